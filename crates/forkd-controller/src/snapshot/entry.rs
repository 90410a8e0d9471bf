//! One snapshot in the registry: its state (`state`), its owner, and its template while that is in use.

use std::io;
use std::sync::Arc;
use std::time::{Duration, Instant};

use parking_lot::Mutex;
use tokio::sync::watch;

use crate::snapshot::state::SnapshotState;
use crate::snapshot::template::Template;
use crate::telemetry::Telemetry;

/// One snapshot in the registry. [`state`](crate::snapshot::state) changes its state.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) tag: String,
    owner: Mutex<String>,
    pub(super) state: watch::Sender<SnapshotState>,
    pub(crate) current: Mutex<Option<Arc<Template>>>,
    /// When a client last asked for the template, or when the template was set.
    used: Mutex<Instant>,
    /// Held while a template is started from disk: one start at a time.
    pub(crate) starting: tokio::sync::Mutex<()>,
    pub(super) telemetry: Arc<Telemetry>,
}

impl Entry {
    pub(crate) fn new(tag: &str, owner: &str, state: SnapshotState, telemetry: Arc<Telemetry>) -> Arc<Self> {
        let (state, current, starting) = (watch::Sender::new(state), Mutex::default(), Default::default());
        let (owner, used) = (Mutex::new(owner.to_owned()), Mutex::new(Instant::now()));
        Arc::new(Entry { tag: tag.to_owned(), owner, state, current, used, starting, telemetry })
    }

    /// The name of the snapshot's owner.
    pub(crate) fn owner(&self) -> String {
        self.owner.lock().clone()
    }

    /// Changes the owner and returns the previous one.
    pub(crate) fn set_owner(&self, owner: &str) -> String {
        std::mem::replace(&mut *self.owner.lock(), owner.to_owned())
    }

    /// The snapshot's template, if its process is alive.
    pub(crate) fn current(&self) -> Option<Arc<Template>> {
        self.current.lock().clone().filter(|template| template.is_alive())
    }

    /// Drops the handle on the template. The template ends with its last child.
    pub(crate) fn unload(&self) {
        self.current.lock().take();
    }

    /// Unloads the template if it is unused for `for_this_long`. Returns whether there was one.
    pub(crate) fn unload_if_unused(&self, for_this_long: Duration) -> bool {
        if !self.is_unused(for_this_long) {
            return false;
        }
        // A request that has the template keeps a handle: the template does not end before the request.
        let unloaded = self.current.lock().take();
        unloaded.is_some()
    }

    /// Whether no client has asked for the template for `for_this_long`.
    pub(crate) fn is_unused(&self, for_this_long: Duration) -> bool {
        self.used.lock().elapsed() >= for_this_long
    }

    /// The live template, to fork children from. Counts as a use.
    pub(crate) fn use_current(&self) -> Option<Arc<Template>> {
        *self.used.lock() = Instant::now();
        self.current()
    }

    pub(crate) fn set_current(&self, template: Arc<Template>) {
        *self.used.lock() = Instant::now();
        *self.current.lock() = Some(template);
    }

    /// The command that removes the snapshot, for error texts.
    pub(crate) fn remove_command(&self) -> String {
        format!("forkd rmi {}", self.tag)
    }

    /// Writes the record of `template`, as the state says.
    pub(crate) fn write_record(&self, template: &Template) -> io::Result<()> {
        self.state().write_record(template, self.owner(), true)
    }

    /// Writes the new owner into the template's record, if the snapshot is a branch that is not on disk.
    pub(crate) fn update_record(&self) -> io::Result<()> {
        // Held meanwhile: a template that is forgotten is not recorded as wanted again.
        match (&*self.current.lock(), self.branch()) {
            (Some(template), Some(_)) => self.write_record(template),
            _ => Ok(()),
        }
    }

    /// Drops the handle on the template for good: the next daemon does not save a branch that is not on disk.
    pub(crate) fn forget(&self) {
        let template = self.current.lock().take();
        template.iter().for_each(|template| self.forget_template(template));
    }

    /// As [`forget`](Entry::forget), for a template that is not set yet.
    pub(crate) fn forget_template(&self, template: &Template) {
        if let Err(error) = self.state().write_record(template, self.owner(), false) {
            tracing::warn!(tag = self.tag, %error, "template record not updated: branch is removed");
        }
    }
}

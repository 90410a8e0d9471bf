//! Sandboxes and templates whose records the daemon cannot read (`records`). It keeps them: it lists them in state
//! `unknown` with the reason, and counts what they have of the host and of a quota. It changes none of their files,
//! so that a daemon that can read the record takes them over. Only a client ends them.
//!
//! What is needed to count them comes from where it can still be read: the part of the record that looks as usual,
//! the ledger, the template that forked the sandbox, and what the kernel says of the process.

use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::Duration;

use forkd_protocol::control::WaitStatus;
use forkd_protocol::names::is_valid_name;
use serde_json::Value;
use tokio::sync::oneshot;

use crate::auth::principal::local_owner;
use crate::error::{Code, Error, Result};
use crate::host::lineage::{Lineage, Lineages};
use crate::host::process::{self, Identity, Pidfd};
use crate::sandbox::lifetime::Life;
use crate::sandbox::registry::{Registry, time};
use crate::sandbox::{Belongings, Phase, Record, Sandbox, Spec, Wish, child_name};
use crate::snapshot::adopt::{self, Leftovers};
use crate::snapshot::registry::lock;
use crate::snapshot::template::{self, Adopted, Template};
use crate::util::records::{self, Kept};

/// Why a sandbox is in state `unknown`, in one word.
pub(crate) const UNREADABLE: &str = "record_unreadable";

/// The same for clients that may not read causes.
pub(crate) const UNREAD: &str = "the daemon cannot read its record";

/// The same in one sentence, with what to do; `end` is the command that ends it.
pub(crate) fn advice(why: &str, end: &str) -> String {
    format!("{why}; end it (`{end}`), or start the version of the daemon that wrote it")
}

/// The error of everything but looking at it and ending it.
pub(crate) fn refused(what: &str, why: &str, end: &str) -> Error {
    let text = format!("the state of {what} is unknown: {}", advice(UNREAD, end));
    Error::new(Code::StateUnknown, text).because(why.to_owned())
}

/// The folder of a sandbox or a template with a record that cannot be read.
#[derive(Debug)]
pub(crate) struct Unread {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
    /// Which file it is, and why it cannot be read.
    pub(crate) why: String,
    /// Its process, if that record can be read.
    pub(crate) identity: Option<Identity>,
}

/// What is left of it: its process, if it has one that can be found.
#[derive(Debug)]
pub(crate) struct Remains {
    id: String,
    folder: PathBuf,
    process: Option<(i32, Pidfd)>,
    /// Held and not listened to: its template remembers its end for a daemon that can read its record.
    _told: Option<oneshot::Receiver<WaitStatus>>,
}

impl Remains {
    fn new(unread: &Unread, child: Option<(i32, Adopted)>) -> Self {
        let recorded = unread.identity.as_ref().and_then(|it| Some((it.pid, it.open()?)));
        let (forked, told) = match child {
            Some((template, Adopted::Alive(pid, told))) => (child_of(pid, template), Some(told)),
            Some((_, Adopted::Ended(_))) | None => (None, None),
        };
        let (id, folder) = (unread.id.clone(), unread.folder.clone());
        Remains { id, folder, process: recorded.or(forked), _told: told }
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.process.as_ref().map(|(pid, _)| *pid)
    }

    /// Returns when its process has ended; never if that is not known.
    async fn ended(&self) {
        match &self.process {
            Some((_, process)) if process.ended().await.is_ok() => {}
            _ => std::future::pending().await,
        }
    }

    /// Ends its process and returns when that is gone. One that is not known is asked through its control socket,
    /// and if it does not obey `kill` is called.
    async fn end(&self, kill: impl Fn()) {
        if let Some((_, process)) = &self.process {
            return process.end(&self.id).await;
        }
        while adopt::stop(&self.folder).await.is_err() {
            tracing::error!(
                id = self.id,
                "a process whose record cannot be read does not stop; trying again"
            );
            kill();
        }
    }
}

/// The process `pid`, if it is a child of `parent`.
fn child_of(pid: i32, parent: i32) -> Option<(i32, Pidfd)> {
    let pidfd = Pidfd::open(rustix::process::Pid::from_raw(pid)?).ok()?;
    // Looked up after the pidfd was opened: the process with this pid now is the one it means.
    (process::parent(pid) == Some(parent)).then_some((pid, pidfd))
}

/// The part of a record that looks as usual.
#[derive(Debug)]
struct Glimpse(Value);

impl Glimpse {
    fn of<T: Kept>(folder: &Path) -> Self {
        Glimpse(records::glimpse::<T>(folder))
    }

    fn text(&self, place: &str) -> Option<String> {
        self.0.pointer(place)?.as_str().map(str::to_owned)
    }

    fn number<T: TryFrom<u64>>(&self, place: &str) -> Option<T> {
        self.0.pointer(place)?.as_u64()?.try_into().ok()
    }

    /// The lineage whose number and name are at `place`.
    fn lineage(&self, lineages: &Arc<Lineages>, place: &str) -> Option<Arc<Lineage>> {
        let name = self.text(&format!("{place}/cgroup")).filter(|name| is_valid_name(name))?;
        lineages.resume(self.number(&format!("{place}/lineage"))?, &name)
    }
}

/// Keeps a sandbox.
pub(crate) async fn keep(registry: &Arc<Registry>, leftovers: &mut Leftovers, unread: Unread) {
    let (host, id, seen) = (&registry.host, &unread.id, Glimpse::of::<Record>(&unread.folder));
    tracing::error!(sandbox = id, why = unread.why, "a sandbox's record cannot be read; it is kept");
    let ledger = registry.ledger.find(id).await.ok().flatten().map(|it| it.made);
    let (template, name, child) = forked_by(leftovers, id, &seen);
    let remains = Remains::new(&unread, template.as_ref().map(|it| it.pid).zip(child));
    let lineage = seen.lineage(&host.lineages, "").or_else(|| Some(template.as_ref()?.lineage.clone()));
    let lineage = lineage.or_else(|| host.lineages.of_process(remains.pid()?, Some(id)));
    let leaf = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref()?.existing(&name).ok());
    let slot = seen.text("/netns").and_then(|name| host.slots.adopt(&name));
    // Which one it has is not known, unless the record says that it has none.
    let is_certain = slot.is_some() || seen.0.get("netns").is_some_and(Value::is_null);
    let any_slot = (!is_certain).then(|| host.slots.hold());
    let guest = template.as_ref().map(|template| &template.about.guest);
    let mem_mib = seen.number("/spec/mem_mib").or(guest.map(|guest| guest.mem_size_mib));
    let mem_mib = mem_mib.unwrap_or(host.config.limits.default_mem_mib);
    let image = || Some(guest?.image.as_ref()?.name.clone());
    let spec = Spec {
        owner: seen
            .text("/spec/owner")
            .or_else(|| ledger.as_ref().map(|it| it.owner.clone()))
            .unwrap_or_else(local_owner),
        image: seen.text("/spec/image").or_else(image),
        snapshot_tag: seen
            .text("/spec/snapshot_tag")
            .or_else(|| ledger.as_ref()?.snapshot_tag.clone())
            .or_else(|| Some(template.as_ref()?.about.tag.clone())),
        vcpus: seen.number("/spec/vcpus").or(guest.map(|guest| guest.vcpus)).unwrap_or(1),
        mem_mib,
        network: slot.is_some(),
        memory_limit_mib: seen
            .number("/spec/memory_limit_mib")
            .unwrap_or_else(|| crate::host::cgroup::memory_mib(mem_mib)),
        guest: None,
    };
    let belongings = Belongings { lineage, template, slot, any_slot, leaf };
    let mut sandbox = Sandbox::new(id.clone(), spec, unread.folder.clone(), belongings, host);
    let created = seen.number("/created_at_unix").or(ledger.as_ref().map(|it| it.created_at_unix));
    let nanos = Duration::from_nanos(seen.number("/created_nanos").unwrap_or(0));
    sandbox.created = time(created.unwrap_or(0)) + nanos.min(Duration::from_secs(1));
    sandbox.child = name;
    sandbox.learn(|facts| {
        facts.pid = remains.pid().and_then(|pid| u32::try_from(pid).ok());
        facts.life = Life { labels: ledger.map(|it| it.labels).unwrap_or_default(), ..Life::default() };
    });
    sandbox.turn_to(Phase::Unknown(unread.why.into()));
    let seat = registry.seat(&sandbox.spec);
    registry.add_unknown(seat, sandbox, remains);
}

/// The template that says it forked the sandbox `id`, what that is called there, and what became of it.
fn forked_by(
    leftovers: &mut Leftovers,
    id: &str,
    seen: &Glimpse,
) -> (Option<Arc<Template>>, String, Option<Adopted>) {
    let name = child_name(id, seen.number("/generation").unwrap_or(0));
    let again = format!("{id}-");
    let is_it = |child: &str| child == name || child == id || child.starts_with(&again);
    for (template, children) in leftovers.templates.values_mut() {
        let known = children.keys().find(|child| is_it(child)).cloned();
        if let Some((name, adopted)) = known.and_then(|child| children.remove_entry(&child)) {
            return (Some(template.clone()), name, Some(adopted));
        }
    }
    let template = seen.text("/template").and_then(|it| leftovers.templates.get(&it));
    (template.map(|(template, _)| template.clone()), name, None)
}

impl Sandbox {
    /// Fails if its record cannot be read: it can only be looked at and deleted.
    pub(crate) fn known(&self) -> Result<()> {
        match self.phase() {
            Phase::Unknown(why) => Err(refused(&format!("sandbox {}", self.id), &why, &self.kill_command())),
            _ => Ok(()),
        }
    }

    /// What ends it, for people.
    pub(crate) fn kill_command(&self) -> String {
        format!("forkd kill {}", self.id)
    }

    /// Keeps one whose record cannot be read, until it is deleted or left to the next daemon.
    pub(crate) async fn keep_unknown(self: Arc<Self>, remains: Remains) {
        // Nothing can be asked of it.
        drop(self.take_commands());
        let dismissed = tokio::select! {
            biased;
            wish = self.dismissed() => wish,
            () = remains.ended() => {
                tracing::warn!(sandbox = self.id, "the process of a sandbox in state unknown ended");
                self.learn(|facts| facts.pid = None);
                self.dismissed().await
            }
        };
        if dismissed == Wish::Leave {
            return;
        }
        let kill = || drop(self.belongings().leaf.as_ref().map(|leaf| leaf.kill()));
        remains.end(kill).await;
        self.learn(|facts| facts.pid = None);
        self.turn_to(Phase::Ended(Arc::new(self.farewell())));
    }
}

/// A template whose record cannot be read.
#[derive(Debug)]
pub(crate) struct UnknownTemplate {
    pub(crate) why: String,
    remains: Remains,
    seen: Glimpse,
    lineage: Mutex<Option<Arc<Lineage>>>,
}

impl UnknownTemplate {
    pub(crate) fn new(unread: Unread, lineages: &Arc<Lineages>) -> Arc<Self> {
        tracing::error!(
            template = unread.id,
            why = unread.why,
            "a template's record cannot be read; it is kept"
        );
        let seen = Glimpse::of::<template::Record>(&unread.folder);
        let remains = Remains::new(&unread, None);
        let lineage = seen.lineage(lineages, "/about");
        let lineage = lineage.or_else(|| lineages.of_process(remains.pid()?, None));
        Arc::new(UnknownTemplate { why: unread.why, remains, seen, lineage: Mutex::new(lineage) })
    }

    /// Finds its lineage by its user, when those that know the lineage's name are taken over.
    pub(crate) fn claim(&self, lineages: &Arc<Lineages>) {
        let mut lineage = lock(&self.lineage);
        if lineage.is_none() {
            *lineage = self.remains.pid().and_then(|pid| lineages.of_process(pid, Some(&self.remains.id)));
        }
    }

    pub(crate) fn id(&self) -> &str {
        &self.remains.id
    }

    pub(crate) fn pid(&self) -> Option<i32> {
        self.remains.pid()
    }

    /// The tag that it is all there is of, if that can be read.
    pub(crate) fn tag(&self) -> Option<String> {
        let standing = self.seen.0.get("standing");
        let on_disk = standing.is_some_and(|standing| standing.get("saved").is_some());
        let forgotten = standing.is_some_and(|standing| standing == "forgotten");
        self.seen.text("/about/tag").filter(|tag| is_valid_name(tag) && !on_disk && !forgotten)
    }

    pub(crate) fn vcpus(&self) -> u8 {
        self.seen.number("/about/guest/vcpus").unwrap_or(0)
    }

    pub(crate) fn mem_mib(&self) -> u64 {
        self.seen.number("/about/guest/mem_size_mib").unwrap_or(0)
    }

    /// Whether it may be a branch that is to be stored over the snapshot `tag`, and of which nothing is on disk.
    pub(crate) fn may_need(&self, tag: &str) -> bool {
        let standing = self.seen.0.get("standing");
        match standing.and_then(Value::as_object).map(|it| (it.get("saved"), it.get("unsaved"))) {
            // What is on disk, and what is to be stored in full, needs no other snapshot.
            Some((Some(_), _)) => false,
            Some((None, Some(_))) => match self.seen.0.pointer("/standing/unsaved/origin") {
                Some(Value::Null) => false,
                Some(origin) => origin.get("tag").is_none_or(|origin| origin == tag),
                None => true,
            },
            Some((None, None)) => true,
            None => standing.is_none_or(|standing| standing != "forgotten"),
        }
    }

    /// Has the next daemon end it, should this one be killed before it has.
    pub(crate) fn disown(&self) -> std::io::Result<()> {
        match std::fs::remove_file(self.remains.folder.join(template::RECORD)) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(()),
        }
    }

    /// Ends it and removes what it has. Its children go on.
    pub(crate) async fn end(&self, janitor: &crate::host::cleanup::Janitor) {
        let lineage = lock(&self.lineage).clone();
        let cgroup = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref());
        // Only that of a branch is its own; the leaf of any other goes with its lineage.
        let leaf = cgroup.and_then(|cgroup| cgroup.existing(&self.remains.id).ok());
        self.remains.end(|| drop(leaf.as_ref().map(|leaf| leaf.kill()))).await;
        if let Some(leaf) = leaf {
            janitor.run(move || leaf.kill().and_then(|()| leaf.remove())).await;
        }
        janitor.remove_folder(self.remains.folder.clone()).await;
        drop(lock(&self.lineage).take());
    }

    /// The next daemon takes it over.
    pub(crate) fn leave(&self) {
        if let Some(lineage) = &*lock(&self.lineage) {
            lineage.leave();
        }
    }
}

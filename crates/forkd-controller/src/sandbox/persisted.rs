//! What is known of a sandbox beside its spec: in memory, and in its record for the next daemon.
//!
//! Requests read [`RuntimeInfo`] and must never wait for the disk, so it has a lock of its own. A change that the
//! next daemon must know goes through [`Sandbox::rewrite`], which changes both while the record is locked.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::host::process;
use crate::sandbox::lifetime::Attempt;
use crate::sandbox::{DesiredState, END, History, Phase, RECORD, Sandbox, SandboxRecord, SavedState};

/// What is known of a sandbox. Lock order: the record, then the runtime information.
#[derive(Debug)]
pub(super) struct Persisted {
    on_disk: Mutex<OnDisk>,
    runtime: Mutex<RuntimeInfo>,
}

/// What the sandbox's folder says to the next daemon. Locked while a file of the folder is written.
#[derive(Debug, Default)]
pub(super) struct OnDisk {
    /// The record as it is on disk: none before a boot is over, and none of a sandbox that is bound to a connection.
    record: Option<SandboxRecord>,
    /// The next daemon ends it: nothing that would make it a sandbox to take over is written any more.
    is_deleted: bool,
}

impl Persisted {
    pub(super) fn new(runtime: RuntimeInfo) -> Self {
        Persisted { on_disk: Mutex::default(), runtime: Mutex::new(runtime) }
    }

    fn lock(&self) -> MutexGuard<'_, OnDisk> {
        self.on_disk.lock()
    }

    fn runtime(&self) -> MutexGuard<'_, RuntimeInfo> {
        self.runtime.lock()
    }
}

/// What becomes known while it runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuntimeInfo {
    pub(crate) pid: Option<u32>,
    /// From the monitor's start until it was ready, its warm-up included; of booted ones.
    pub(crate) boot_ms: Option<u64>,
    /// From the request's arrival to the first answer; of forked ones.
    pub(crate) ready_ms: Option<f64>,
    /// The name of its network slot.
    pub(crate) netns: Option<String>,
    /// How long a booted one is to live once it has started.
    pub(crate) time_to_live: Option<Duration>,
    pub(crate) saved: SavedState,
    /// Whether its monitor paused it because the host's disk is full.
    pub(crate) disk_full: bool,
    /// What is being done because its time is over.
    pub(crate) attempt: Attempt,
    /// Whether it is being stored, to be ended then: what is done in it would be lost.
    pub(crate) is_suspending: bool,
}

impl Sandbox {
    pub(crate) fn facts(&self) -> RuntimeInfo {
        self.persisted.runtime().clone()
    }

    /// Looks at what is known of it, without a copy.
    pub(crate) fn read_runtime<T>(&self, look: impl FnOnce(&RuntimeInfo) -> T) -> T {
        look(&self.persisted.runtime())
    }

    pub(crate) fn update_runtime(&self, change: impl FnOnce(&mut RuntimeInfo)) {
        change(&mut self.persisted.runtime());
    }

    /// Takes what is known of it from its record, which is on disk already.
    pub(crate) fn recorded(&self, record: SandboxRecord) {
        self.update_runtime(|facts| facts.saved = record.saved.clone());
        self.persisted.lock().record = Some(record);
    }

    /// Has the next daemon take over one that has booted, unless it was deleted meanwhile.
    pub(crate) fn persist_for_adoption(&self) -> io::Result<()> {
        let lineage = self.resources().lineage.clone();
        let lineage = lineage.ok_or_else(|| io::Error::other("it has no user of its own"))?;
        let mut on_disk = self.persisted.lock();
        if on_disk.is_deleted {
            return Ok(());
        }
        let facts = self.facts();
        let booted = SandboxRecord {
            template: String::new(),
            lineage: lineage.slot,
            cgroup: lineage.name.clone(),
            spec: self.spec.clone(),
            created_at_unix: self.created_at_unix(),
            created_nanos: self.created_nanos(),
            netns: facts.netns,
            generation: 0,
            envs: BTreeMap::new(),
            saved: SavedState { workspace: None, ..facts.saved },
        };
        booted.write(&self.folder)?;
        on_disk.record = Some(booted);
        Ok(())
    }

    /// Its record: none of one that is bound to a connection, or has not booted yet.
    pub(crate) fn record(&self) -> Option<SandboxRecord> {
        self.persisted.lock().record.clone()
    }

    /// Notes something about it that the next daemon is to know, too. Blocks for a moment.
    pub(crate) fn remember(&self, change: impl FnOnce(&mut History)) {
        if let Err(error) = self.rewrite(|facts| change(&mut facts.saved.history)) {
            tracing::error!(sandbox = self.id, %error, "cannot write down what was done to it");
        }
    }

    /// Changes what is known of it, here and in its record: only what that has.
    pub(crate) fn rewrite(&self, change: impl FnOnce(&mut RuntimeInfo)) -> io::Result<()> {
        let mut on_disk = self.persisted.lock();
        self.update_runtime(change);
        // The file is that of whoever takes its place.
        let gone = self.desired() == DesiredState::Replace;
        let Some(record) = on_disk.record.as_mut().filter(|_| !gone) else { return Ok(()) };
        record.saved = self.read_runtime(|facts| facts.saved.clone());
        record.write(&self.folder)
    }

    /// Has the next daemon end it, should this one be killed before it has: whoever was told that it is deleted
    /// does not find it again. Only a record and what names its process make it one to take over.
    pub(crate) fn mark_deleted(&self) {
        let mut on_disk = self.persisted.lock();
        on_disk.is_deleted = true;
        let gone = match on_disk.record.as_ref().map(SandboxRecord::is_booted) {
            // What it is is not known, and a sandbox without a record is ended.
            None if matches!(self.phase(), Phase::Unknown(_)) => [END, RECORD],
            None => return,
            Some(false) => [END, process::RECORD],
            // Nobody but this file knows its process: that one has to be found to be ended.
            Some(true) => {
                on_disk.record.take();
                [END, RECORD]
            }
        };
        for name in gone {
            match std::fs::remove_file(self.folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(sandbox = self.id, %error, "cannot write down that it is deleted");
                }
                _ => {}
            }
        }
    }

    /// Writes something into its folder that makes the next daemon take it over, unless it is deleted.
    pub(crate) fn write_if_not_deleted(&self, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        // Held while it is written: it is deleted before, or after.
        let on_disk = self.persisted.lock();
        match on_disk.is_deleted {
            true => Ok(()),
            false => write(&self.folder),
        }
    }
}

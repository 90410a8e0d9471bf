//! A sandbox's changing state: in memory for requests, and in its record for the next daemon.
//!
//! Requests read [`RuntimeInfo`] and must never wait for the disk, so it has a lock of its own. A change that the
//! next daemon must know goes through [`Sandbox::update_persisted`], which changes both while the record is locked.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;
use std::time::Duration;

use parking_lot::{Mutex, MutexGuard};

use crate::error::{Error, Result};
use crate::host::process;
use crate::sandbox::lifetime::Attempt;
use crate::sandbox::{DesiredState, END, History, Phase, RECORD, Sandbox, SandboxRecord, SavedState};

/// The changing state of a sandbox. Lock order: the record, then the runtime information.
#[derive(Debug)]
pub(super) struct Persisted {
    on_disk: Mutex<OnDisk>,
    runtime: Mutex<RuntimeInfo>,
}

/// The files of the sandbox's folder that the next daemon reads. Locked while one of them is written.
#[derive(Debug, Default)]
pub(super) struct OnDisk {
    /// The record on disk; `None` before a boot is over, and for a sandbox that is bound to a connection.
    record: Option<SandboxRecord>,
    /// The sandbox is deleted: no file that makes the next daemon adopt it may be written any more.
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

/// What the daemon learns while the sandbox runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct RuntimeInfo {
    pub(crate) pid: Option<u32>,
    /// For a boot: from the start of the monitor until the guest was ready, warm-up included.
    pub(crate) boot_ms: Option<u64>,
    /// For a fork: from the arrival of the request to the agent's first answer.
    pub(crate) ready_ms: Option<f64>,
    /// The name of its network slot.
    pub(crate) netns: Option<String>,
    /// For a boot: how long the sandbox lives after its start.
    pub(crate) time_to_live: Option<Duration>,
    pub(crate) saved: SavedState,
    /// Whether its monitor paused it because the host's disk is full.
    pub(crate) disk_full: bool,
    /// The daemon's action after its time is over.
    pub(crate) attempt: Attempt,
    /// Whether a suspend stores it and ends it then: work in the guest now would be lost.
    pub(crate) is_suspending: bool,
    /// Whether the daemon ends it because its time is over: no client can lengthen its life any more.
    pub(crate) has_expired: bool,
}

impl Sandbox {
    pub(crate) fn runtime(&self) -> RuntimeInfo {
        self.persisted.runtime().clone()
    }

    /// Reads the runtime information without a copy.
    pub(crate) fn read_runtime<T>(&self, look: impl FnOnce(&RuntimeInfo) -> T) -> T {
        look(&self.persisted.runtime())
    }

    pub(crate) fn update_runtime(&self, change: impl FnOnce(&mut RuntimeInfo)) {
        change(&mut self.persisted.runtime());
    }

    /// Sets the saved state from `record`, which is on disk already.
    pub(crate) fn recorded(&self, record: SandboxRecord) {
        self.update_runtime(|runtime| runtime.saved = record.saved.clone());
        self.persisted.lock().record = Some(record);
    }

    /// Writes the record of a booted sandbox, so that the next daemon adopts it, unless it was deleted meanwhile.
    pub(crate) fn persist_for_adoption(&self, envs: BTreeMap<String, String>) -> io::Result<()> {
        let lineage = self.resources().lineage.clone();
        let lineage = lineage.ok_or_else(|| io::Error::other("the sandbox has no user id of its own"))?;
        let mut on_disk = self.persisted.lock();
        if on_disk.is_deleted {
            return Ok(());
        }
        let saved = self.read_runtime(|runtime| runtime.saved.clone());
        let booted = SandboxRecord { envs, ..SandboxRecord::new(self, lineage.slot, &lineage.name, saved) };
        booted.write(&self.folder)?;
        on_disk.record = Some(booted);
        Ok(())
    }

    /// Its record; `None` before its boot is over, and if it is bound to a connection.
    pub(crate) fn record(&self) -> Option<SandboxRecord> {
        self.persisted.lock().record.clone()
    }

    /// Changes the history, in memory and in the record for the next daemon. Blocks for a moment.
    pub(crate) fn update_history(&self, change: impl FnOnce(&mut History)) {
        if let Err(error) = self.update_persisted(|runtime| change(&mut runtime.saved.history)) {
            tracing::error!(sandbox = self.id, %error, "sandbox history not saved");
        }
    }

    /// Changes the runtime information, and writes the saved part of it into the record.
    pub(crate) fn update_persisted(&self, change: impl FnOnce(&mut RuntimeInfo)) -> io::Result<()> {
        let mut on_disk = self.persisted.lock();
        self.update_runtime(change);
        self.write_saved(&mut on_disk)
    }

    /// The same for a change that `change` may refuse. Nothing is written then.
    pub(crate) fn try_update_persisted(
        &self,
        change: impl FnOnce(&mut RuntimeInfo) -> Result<()>,
    ) -> Result<()> {
        let mut on_disk = self.persisted.lock();
        change(&mut self.persisted.runtime())?;
        let written = self.write_saved(&mut on_disk);
        written.map_err(|error| Error::host("cannot write the record of a sandbox", error))
    }

    fn write_saved(&self, on_disk: &mut OnDisk) -> io::Result<()> {
        // A rollback replaces this process: the file belongs to the new one.
        let gone = self.desired() == DesiredState::Replace;
        let Some(record) = on_disk.record.as_mut().filter(|_| !gone) else { return Ok(()) };
        record.saved = self.read_runtime(|runtime| runtime.saved.clone());
        record.write(&self.folder)
    }

    /// Has the next daemon end the sandbox if this one is killed before it has: a deleted sandbox must not reappear.
    /// A sandbox is adopted only if it has both a record and a process record, so one of them is removed.
    pub(crate) fn mark_deleted(&self) {
        let mut on_disk = self.persisted.lock();
        on_disk.is_deleted = true;
        let gone = match on_disk.record.as_ref().map(SandboxRecord::is_booted) {
            // The record is unreadable. The next daemon ends a sandbox without one.
            None if matches!(self.phase(), Phase::Unknown(_)) => [END, RECORD],
            None => return,
            Some(false) => [END, process::RECORD],
            // No template knows the process, so the process record stays: the next daemon needs it for the kill.
            Some(true) => {
                on_disk.record.take();
                [END, RECORD]
            }
        };
        for name in gone {
            match std::fs::remove_file(self.folder.join(name)) {
                Err(error) if error.kind() != io::ErrorKind::NotFound => {
                    tracing::error!(sandbox = self.id, %error, "file of a deleted sandbox not removed");
                }
                _ => {}
            }
        }
    }

    /// Writes a file into its folder that makes the next daemon adopt it, unless the sandbox is deleted.
    pub(crate) fn write_if_not_deleted(&self, write: impl FnOnce(&Path) -> io::Result<()>) -> io::Result<()> {
        // The lock is held during the write, so a delete comes before or after it.
        let on_disk = self.persisted.lock();
        match on_disk.is_deleted {
            true => Ok(()),
            false => write(&self.folder),
        }
    }
}

//! Reports of a VM's threads to the control thread: the guest is ready, the host's disk is full, the VM has
//! ended and why.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use forkd_protocol::control::EndReason;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{Error, Result};

/// How far a VM has come: made anew whenever one is built, so that a fork starts with nothing reported.
#[derive(Debug)]
pub struct VmReport {
    ready: AtomicBool,
    disk_full: AtomicBool,
    first: Mutex<Option<(EndReason, String)>>,
    event: EventFd,
}

impl VmReport {
    /// Nothing has happened yet.
    pub fn new() -> Result<VmReport> {
        let event = EventFd::new(EFD_NONBLOCK).map_err(Error::system("create an eventfd"))?;
        Ok(VmReport {
            ready: AtomicBool::new(false),
            disk_full: AtomicBool::new(false),
            first: Mutex::new(None),
            event,
        })
    }

    /// Reports that the VM ended. The first report counts: the others follow from it.
    pub fn report(&self, reason: EndReason, detail: String) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((reason, detail));
        // It fails only when it is already set 2⁶⁴-1 times.
        let _ = self.event.write(1);
    }

    /// Reports that the guest runs. Only the first time counts, and only that costs a system call.
    pub fn report_ready(&self) {
        if !self.ready.load(Ordering::Relaxed) && !self.ready.swap(true, Ordering::SeqCst) {
            let _ = self.event.write(1);
        }
    }

    /// Whether the guest has signalled that it runs.
    pub fn is_ready(&self) -> bool {
        self.ready.load(Ordering::SeqCst)
    }

    /// Reports that a write of the guest waits for room on the host's disk.
    pub fn report_disk_full(&self) {
        self.disk_full.store(true, Ordering::SeqCst);
        let _ = self.event.write(1);
    }

    /// Whether a write waits for room, as was reported since the last call.
    pub fn take_disk_full(&self) -> bool {
        self.disk_full.swap(false, Ordering::SeqCst)
    }

    /// Readable once there is a report. Reading the event resets it.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// How it ended, if it has.
    pub fn get(&self) -> Option<(EndReason, String)> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

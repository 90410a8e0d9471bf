//! The end of a VM: who notices it first says why, and the control thread is told.

use std::sync::{Mutex, PoisonError};

use forkd_protocol::control::EndReason;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::{Error, Result};

/// How a VM ended, once it has.
#[derive(Debug)]
pub struct Ending {
    first: Mutex<Option<(EndReason, String)>>,
    event: EventFd,
}

impl Ending {
    /// Nothing has ended yet.
    pub fn new() -> Result<Ending> {
        let event = EventFd::new(EFD_NONBLOCK).map_err(Error::system("create an eventfd"))?;
        Ok(Ending { first: Mutex::new(None), event })
    }

    /// Says that the VM ended. The first report counts: the others follow from it.
    pub fn report(&self, reason: EndReason, detail: String) {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).get_or_insert((reason, detail));
        // It fails only when it is already set 2⁶⁴-1 times.
        let _ = self.event.write(1);
    }

    /// Readable once the VM has ended.
    pub fn event(&self) -> &EventFd {
        &self.event
    }

    /// How it ended, if it has.
    pub fn get(&self) -> Option<(EndReason, String)> {
        self.first.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }
}

//! Signals meant for a command that runs elsewhere.

use anyhow::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

/// SIGINT, SIGQUIT, SIGTERM and SIGHUP of this process, to be passed on.
#[derive(Debug)]
pub(crate) struct Forwarded {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    hangup: Signal,
    interrupts: u32,
}

impl Forwarded {
    /// From now on these signals do not end this process.
    pub(crate) fn listen() -> Result<Self> {
        Ok(Forwarded {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hangup: signal(SignalKind::hangup())?,
            interrupts: 0,
        })
    }

    /// Waits for work that must not be cut off half way, and gives it with the signal that came
    /// meanwhile. Only who insists leaves without it.
    pub(crate) async fn finish<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> std::result::Result<(T, Option<Caught>), Caught> {
        let mut first = None;
        tokio::pin!(work);
        loop {
            tokio::select! {
                done = &mut work => return Ok((done, first)),
                caught = self.next() => {
                    if caught.insists {
                        return Err(caught);
                    }
                    first = first.or(Some(caught));
                }
            }
        }
    }

    /// The next signal. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Caught {
        tokio::select! {
            _ = self.interrupt.recv() => {
                self.interrupts += 1;
                Caught { name: "SIGINT", number: libc::SIGINT as u8, insists: self.interrupts > 1 }
            }
            _ = self.quit.recv() => Caught { name: "SIGQUIT", number: libc::SIGQUIT as u8, insists: false },
            _ = self.terminate.recv() => Caught { name: "SIGTERM", number: libc::SIGTERM as u8, insists: false },
            _ = self.hangup.recv() => Caught { name: "SIGHUP", number: libc::SIGHUP as u8, insists: false },
        }
    }
}

/// A signal this process got.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caught {
    pub(crate) name: &'static str,
    pub(crate) number: u8,
    /// A second ^C, of someone who wants to leave.
    pub(crate) insists: bool,
}

impl Caught {
    /// The status of a command this signal ended.
    pub(crate) fn status(self) -> u8 {
        128 + self.number
    }
}

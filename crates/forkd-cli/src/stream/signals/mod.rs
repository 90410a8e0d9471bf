//! Signals that end this process: the only module that catches them.
//!
//! By default the kernel ends a command at the first signal. A command that has to clean up calls
//! [`Forwarded::listen`]. From then on the [watch](watch) ends the process within two seconds of the first
//! signal, whatever the command waits for. `forkd run`, `exec` and `shell` call [`Forwarded::pass_on`]: their
//! signals go to the command in the guest.

mod watch;

use anyhow::Result;
use tokio::signal::unix::{Signal, SignalKind, signal};

pub(crate) use watch::{ExitAction, clean_terminal_on_signal, drain};
use watch::{ListenGuard, SaveGuard};

/// The effect of a signal.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum SignalPolicy {
    /// This process ends within two seconds.
    Ends,
    /// The command in the guest gets it. This process ends with the command.
    PassesOn,
    /// This process ends when its requests are done; a second signal ends it at once.
    Drains,
}

/// SIGINT, SIGQUIT, SIGTERM and SIGHUP of this process.
#[derive(Debug)]
pub(crate) struct Forwarded {
    signals: Signals,
    policy: SignalPolicy,
    interrupts: u32,
    all: u32,
    _listening: ListenGuard,
}

impl Forwarded {
    /// Listens for signals, after which the command has two seconds to clean up.
    pub(crate) fn listen() -> Result<Self> {
        Self::open(SignalPolicy::Ends)
    }

    /// Gives signals to a command in a guest; they do not end this process.
    pub(crate) fn pass_on() -> Result<Self> {
        Self::open(SignalPolicy::PassesOn)
    }

    /// Listens for signals, after which the command ends its work without a time limit. A second signal ends it at once.
    pub(crate) fn drain() -> Result<Self> {
        Self::open(SignalPolicy::Drains)
    }

    fn open(policy: SignalPolicy) -> Result<Self> {
        // Start the watch first: it keeps signals ignored that were ignored at the start of the process.
        let listening = ListenGuard::begin(policy)?;
        Ok(Forwarded { signals: Signals::open()?, policy, interrupts: 0, all: 0, _listening: listening })
    }

    /// Waits for work that must not be cancelled half way; returns it with a signal that came meanwhile. A
    /// second signal returns without it. The watch ends the process if the work takes too long.
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

    /// The same for a running save, which has no time limit. A second signal returns without it.
    pub(crate) async fn finish_save<T>(
        &mut self,
        work: impl Future<Output = T>,
    ) -> std::result::Result<(T, Option<Caught>), Caught> {
        let _saving = SaveGuard::begin();
        self.finish(work).await
    }

    /// The next signal. Safe to cancel.
    pub(crate) async fn next(&mut self) -> Caught {
        let mut caught = self.signals.next().await;
        self.all += 1;
        self.interrupts += u32::from(caught.name == "SIGINT");
        caught.insists = match self.policy {
            // All signals other than ^C go to the command, however many come.
            SignalPolicy::PassesOn => self.interrupts > 1,
            SignalPolicy::Ends | SignalPolicy::Drains => self.all > 1,
        };
        caught
    }
}

/// The signals themselves.
#[derive(Debug)]
struct Signals {
    interrupt: Signal,
    quit: Signal,
    terminate: Signal,
    /// Absent if the process was started with `nohup`.
    hangup: Option<Signal>,
}

impl Signals {
    /// Catches these signals: from now on the kernel does not end this process at them.
    fn open() -> Result<Self> {
        let hangup = if watch::survives_hangup() { None } else { Some(signal(SignalKind::hangup())?) };
        Ok(Signals {
            interrupt: signal(SignalKind::interrupt())?,
            quit: signal(SignalKind::quit())?,
            terminate: signal(SignalKind::terminate())?,
            hangup,
        })
    }

    /// The next one. Safe to cancel.
    async fn next(&mut self) -> Caught {
        let hangup = async {
            match &mut self.hangup {
                Some(hangup) => hangup.recv().await,
                None => std::future::pending().await,
            }
        };
        let (name, number) = tokio::select! {
            _ = self.interrupt.recv() => ("SIGINT", libc::SIGINT),
            _ = self.quit.recv() => ("SIGQUIT", libc::SIGQUIT),
            _ = self.terminate.recv() => ("SIGTERM", libc::SIGTERM),
            _ = hangup => ("SIGHUP", libc::SIGHUP),
        };
        Caught { name, number: number as u8, insists: false }
    }
}

/// A signal that this process received.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Caught {
    pub(crate) name: &'static str,
    pub(crate) number: u8,
    /// A second one: the user wants to leave now.
    pub(crate) insists: bool,
}

impl Caught {
    /// The exit status of a command that this signal ended.
    pub(crate) fn status(self) -> u8 {
        128 + self.number
    }
}

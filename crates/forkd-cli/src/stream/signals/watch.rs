//! The watch: a thread that ends this process after a signal, if the command does not end by itself.
//!
//! The command may wait for a daemon that never answers, or do work that cannot be cancelled. The watch has
//! its own runtime, so nothing that blocks the command blocks it. At the end it restores the terminal, runs
//! the open [`ExitAction`]s, and exits without waiting for any thread.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{OnceLock, mpsc};
use std::time::Duration;

use anyhow::{Context, Result};
use parking_lot::{Mutex, MutexGuard};
use tokio::time::Instant;

use super::{Caught, SignalPolicy, Signals};
use crate::stream::terminal;

/// The time in which a command may clean up.
const CLEANUP_TIME: Duration = Duration::from_millis(1500);
/// The time in which exit actions may run. Together with [`CLEANUP_TIME`] less than the promised two seconds.
const EXIT_ACTIONS_TIME: Duration = Duration::from_millis(400);
/// The interval of checks whether a save has ended.
const SAVE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// Open exit actions by number, in the order of their creation.
type ExitActions = BTreeMap<u64, Box<dyn FnOnce() + Send>>;

static LISTENING: AtomicUsize = AtomicUsize::new(0);
static SAVING: AtomicUsize = AtomicUsize::new(0);
static POLICY: Mutex<SignalPolicy> = Mutex::new(SignalPolicy::Ends);
static EXIT_ACTIONS: Mutex<ExitActions> = Mutex::new(BTreeMap::new());

/// Held by a command while it listens for signals.
#[derive(Debug)]
pub(super) struct ListenGuard(());

impl ListenGuard {
    pub(super) fn begin(policy: SignalPolicy) -> Result<Self> {
        start()?;
        *POLICY.lock() = policy;
        LISTENING.fetch_add(1, Ordering::SeqCst);
        Ok(ListenGuard(()))
    }
}

impl Drop for ListenGuard {
    fn drop(&mut self) {
        LISTENING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Held during a save: the first signal does not end it.
#[derive(Debug)]
pub(super) struct SaveGuard(());

impl SaveGuard {
    pub(super) fn begin() -> Self {
        SAVING.fetch_add(1, Ordering::SeqCst);
        SaveGuard(())
    }
}

impl Drop for SaveGuard {
    fn drop(&mut self) {
        SAVING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// An action that runs if a signal ends the process before this is dropped.
#[derive(Debug)]
pub(crate) struct ExitAction(u64);

impl ExitAction {
    pub(crate) fn new(work: impl FnOnce() + Send + 'static) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        start()?;
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        exit_actions().insert(number, Box::new(work));
        Ok(ExitAction(number))
    }
}

impl Drop for ExitAction {
    fn drop(&mut self) {
        exit_actions().remove(&self.0);
    }
}

fn exit_actions() -> MutexGuard<'static, ExitActions> {
    EXIT_ACTIONS.lock()
}

/// For a command that draws on the terminal: a signal ends the process only after the terminal is clean.
pub(crate) fn clean_terminal_on_signal() {
    // Without the watch, the kernel ends the process anyway.
    let _ = start();
}

/// For the daemon: it drains by itself at the first signal, and a second signal ends it at once.
pub(crate) fn drain() -> Result<()> {
    start()?;
    *POLICY.lock() = SignalPolicy::Drains;
    Ok(())
}

/// Whether the process was started to survive its terminal, as with `nohup`.
pub(super) fn survives_hangup() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: sigaction only writes the signal's present action to the given struct.
        let asked = unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr()) };
        // SAFETY: zeroes are a valid sigaction, and the call filled it in if it succeeded.
        asked == 0 && unsafe { action.assume_init() }.sa_sigaction == libc::SIG_IGN
    })
}

/// Starts the watch, once.
fn start() -> Result<()> {
    static STARTED: OnceLock<Result<(), String>> = OnceLock::new();
    let started = STARTED.get_or_init(|| {
        let (ready, is_ready) = mpsc::channel();
        let watch = std::thread::Builder::new().name("watch".into()).spawn(move || watch(&ready));
        watch.map_err(|error| error.to_string())?;
        is_ready.recv().map_err(|error| error.to_string())?
    });
    started.clone().map_err(|error| anyhow::anyhow!("cannot catch signals: {error}"))
}

/// Runs until the process ends. Reports on `ready` whether signals are caught.
fn watch(ready: &mpsc::Sender<Result<(), String>>) {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build();
    let runtime = match runtime.context("no runtime") {
        Ok(runtime) => runtime,
        Err(error) => return drop(ready.send(Err(format!("{error:#}")))),
    };
    runtime.block_on(async {
        match Signals::open() {
            Err(error) => drop(ready.send(Err(format!("{error:#}")))),
            Ok(mut signals) => {
                let _ = ready.send(Ok(()));
                let caught = overdue(&mut signals).await;
                end(caught);
            }
        }
    });
}

/// Returns when the process has to end now, with the signal that ends it.
async fn overdue(signals: &mut Signals) -> Caught {
    loop {
        let first = signals.next().await;
        let policy = *POLICY.lock();
        match policy {
            SignalPolicy::PassesOn if LISTENING.load(Ordering::SeqCst) > 0 => {}
            SignalPolicy::Drains => return second(signals, first).await,
            _ if LISTENING.load(Ordering::SeqCst) == 0 => return first,
            _ => {
                grace(signals).await;
                return first;
            }
        }
    }
}

/// The signal after the one that started the drain. SIGHUP has another meaning for a daemon.
async fn second(signals: &mut Signals, first: Caught) -> Caught {
    let mut asked = 0;
    let mut caught = first;
    loop {
        match caught.name {
            "SIGQUIT" => return caught,
            "SIGTERM" | "SIGINT" if asked > 0 => return caught,
            "SIGTERM" | "SIGINT" => asked += 1,
            _ => {}
        }
        caught = signals.next().await;
    }
}

/// Waits for the time in which a command may clean up. A save may take longer, until a second signal.
async fn grace(signals: &mut Signals) {
    let (mut limit, mut insisted) = (Instant::now() + CLEANUP_TIME, false);
    while Instant::now() < limit {
        let saving = !insisted && SAVING.load(Ordering::SeqCst) > 0;
        if saving {
            limit = Instant::now() + CLEANUP_TIME;
        }
        tokio::select! {
            () = tokio::time::sleep(SAVE_POLL_INTERVAL) => {}
            // Without a save, a second signal changes nothing: the time is short, and a lost terminal sends two.
            _ = signals.next() => insisted |= saving,
        }
    }
}

/// Ends the process.
fn end(caught: Caught) {
    let (done, is_done) = mpsc::channel::<()>();
    // Exit actions may block, and so may standard error.
    let last = std::thread::Builder::new().name("last".into()).spawn(move || {
        terminal::put_back();
        let to_do = std::mem::take(&mut *exit_actions());
        to_do.into_values().rev().for_each(|work| work());
        if std::io::stderr().is_terminal() {
            // Otherwise a line of progress would stay where the prompt appears.
            let _ = std::io::stderr().write_all(b"\r\x1b[2K");
        }
        drop(done);
    });
    if last.is_ok() {
        let _ = is_done.recv_timeout(EXIT_ACTIONS_TIME);
    }
    // SAFETY: _exit ends the process without running more of its code: it waits for no lock that a thread
    // holds, and for no work that cannot be cancelled.
    unsafe { libc::_exit(i32::from(caught.status())) }
}

//! The watch: a thread that ends this process after a signal, should the command not do so itself.
//!
//! The command may wait for a daemon that never answers, or do something that cannot be cut off. The watch
//! has a runtime of its own, so nothing that blocks the command blocks it. At the end it puts the terminal
//! back, does what [`ExitAction`] left to be done, and leaves the process without waiting for any thread.

use std::collections::BTreeMap;
use std::io::{IsTerminal, Write};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError, mpsc};
use std::time::Duration;

use anyhow::{Context, Result};
use tokio::time::Instant;

use super::{Caught, SignalPolicy, Signals};
use crate::stream::terminal;

/// How long a command has to clean up after itself.
const CLEANUP_TIME: Duration = Duration::from_millis(1500);
/// How long the rest may take. Together with [`CLEANUP_TIME`] it is less than the two seconds that are promised.
const EXIT_ACTIONS_TIME: Duration = Duration::from_millis(400);
/// How often it is looked whether a save is over.
const SAVE_POLL_INTERVAL: Duration = Duration::from_millis(50);

/// What is left to be done, by number, in the order in which it was made.
type Last = BTreeMap<u64, Box<dyn FnOnce() + Send>>;

static LISTENING: AtomicUsize = AtomicUsize::new(0);
static SAVING: AtomicUsize = AtomicUsize::new(0);
static CONDUCT: Mutex<SignalPolicy> = Mutex::new(SignalPolicy::Ends);
static LAST_TO_DO: Mutex<Last> = Mutex::new(BTreeMap::new());

/// A command that hears signals and acts on them, while it does.
#[derive(Debug)]
pub(super) struct ListenGuard(());

impl ListenGuard {
    pub(super) fn begin(conduct: SignalPolicy) -> Result<Self> {
        start()?;
        *CONDUCT.lock().unwrap_or_else(PoisonError::into_inner) = conduct;
        LISTENING.fetch_add(1, Ordering::SeqCst);
        Ok(ListenGuard(()))
    }
}

impl Drop for ListenGuard {
    fn drop(&mut self) {
        LISTENING.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A save under way: the first signal does not end it.
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

/// Something to be done if a signal ends the process before this is dropped.
#[derive(Debug)]
pub(crate) struct ExitAction(u64);

impl ExitAction {
    pub(crate) fn new(work: impl FnOnce() + Send + 'static) -> Result<Self> {
        static NEXT: AtomicU64 = AtomicU64::new(0);
        start()?;
        let number = NEXT.fetch_add(1, Ordering::SeqCst);
        last_to_do().insert(number, Box::new(work));
        Ok(ExitAction(number))
    }
}

impl Drop for ExitAction {
    fn drop(&mut self) {
        last_to_do().remove(&self.0);
    }
}

fn last_to_do() -> std::sync::MutexGuard<'static, Last> {
    LAST_TO_DO.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A command that draws on the terminal leaves it tidy: a signal ends the process only after that.
pub(crate) fn run_exit_actions() {
    // Without it the kernel ends the process just as well.
    let _ = start();
}

/// For the daemon: it drains by itself at the first signal, and a second one ends it at once.
pub(crate) fn drain() -> Result<()> {
    start()?;
    *CONDUCT.lock().unwrap_or_else(PoisonError::into_inner) = SignalPolicy::Drains;
    Ok(())
}

/// Whether the process was started to go on without a terminal, as `nohup` does.
pub(super) fn survives_hangup() -> bool {
    static ANSWER: OnceLock<bool> = OnceLock::new();
    *ANSWER.get_or_init(|| {
        let mut action = std::mem::MaybeUninit::<libc::sigaction>::zeroed();
        // SAFETY: sigaction only writes how the signal is treated to the place it is given.
        let asked = unsafe { libc::sigaction(libc::SIGHUP, std::ptr::null(), action.as_mut_ptr()) };
        // SAFETY: zeroes are a valid sigaction, and it was filled in where the call succeeded.
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

/// Until the process ends. Tells on `ready` whether signals are caught.
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

/// Returns when the process has to end now, with the signal that it ends by.
async fn overdue(signals: &mut Signals) -> Caught {
    loop {
        let first = signals.next().await;
        let conduct = *CONDUCT.lock().unwrap_or_else(PoisonError::into_inner);
        match conduct {
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

/// The signal after the one that asked for the drain. SIGHUP asks a daemon for something else.
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

/// Waits as long as a command may take to clean up. A save may take longer, until a second signal.
async fn grace(signals: &mut Signals) {
    let (mut limit, mut insisted) = (Instant::now() + CLEANUP_TIME, false);
    while Instant::now() < limit {
        let saving = !insisted && SAVING.load(Ordering::SeqCst) > 0;
        if saving {
            limit = Instant::now() + CLEANUP_TIME;
        }
        tokio::select! {
            () = tokio::time::sleep(SAVE_POLL_INTERVAL) => {}
            // Without a save it changes nothing: the time is short, and a terminal that goes away sends two.
            _ = signals.next() => insisted |= saving,
        }
    }
}

/// Leaves the process.
fn end(caught: Caught) {
    let (done, is_done) = mpsc::channel::<()>();
    // What is to be done may block, and so may standard error.
    let last = std::thread::Builder::new().name("last".into()).spawn(move || {
        terminal::put_back();
        let to_do = std::mem::take(&mut *last_to_do());
        to_do.into_values().rev().for_each(|work| work());
        if std::io::stderr().is_terminal() {
            // A line of progress would stay where the prompt comes.
            let _ = std::io::stderr().write_all(b"\r\x1b[2K");
        }
        drop(done);
    });
    if last.is_ok() {
        let _ = is_done.recv_timeout(EXIT_ACTIONS_TIME);
    }
    // SAFETY: it ends the process without running anything more of it: no lock that a thread holds, and no
    // work that cannot be cut off, is waited for.
    unsafe { libc::_exit(i32::from(caught.status())) }
}

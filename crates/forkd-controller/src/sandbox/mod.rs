//! One sandbox, as requests see it: what it is, where it stands, and its agent.
//!
//! A sandbox has one *supervisor* (`supervisor`), a task that owns its monitor from the start of the process
//! to its end. Requests never own the process: they watch the [`Phase`] and talk to the agent. So a
//! request that goes away leaves nothing half done, and a sandbox that ends tells everybody who
//! waits for it at once.

pub(crate) mod adopt;
pub(crate) mod agent_call;
pub(crate) mod archive;
pub(crate) mod command;
pub(crate) mod disk_full;
pub(crate) mod disks;
pub(crate) mod envs;
pub(crate) mod lifetime;
pub(crate) mod persisted;
pub(crate) mod quiesce;
mod record;
pub(crate) mod registry;
pub(crate) mod resources;
pub(crate) mod rollback;
pub(crate) mod spawn;
mod start;
pub(crate) mod state;
pub(crate) mod supervisor;
pub(crate) mod unknown;
pub(crate) mod visit;
mod watchdog;

use std::path::PathBuf;
use std::sync::atomic::AtomicU64;
use std::sync::{Arc, OnceLock};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkd_protocol::agent::AGENT_PORT;
use forkd_protocol::control::CONSOLE_TAIL;
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::{OwnedMutexGuard, mpsc, watch};
use tokio_util::task::TaskTracker;

use crate::agent::{self, Agent, Endpoint};
use crate::error::{Code, Error, Result};
use crate::host::Host;
use crate::host::process_stats::Pauses;
use crate::monitor::{boot_files, console};
use crate::sandbox::command::MonitorCommand;
use crate::sandbox::disk_full::DISK_FULL_DETAIL;
use crate::sandbox::disks::Disks;
use crate::sandbox::lifetime::Activity;
use crate::sandbox::persisted::Persisted;
use crate::sandbox::resources::Resources;
use crate::telemetry::{Telemetry, otlp};
use crate::util::task;

pub(crate) use crate::sandbox::persisted::RuntimeInfo;
pub(crate) use record::{
    END, End, History, RECORD, ROLLED_BACK, SandboxRecord, SavedState, Spec, child_name,
};

/// After a connection broke, how long to wait for the reason to become known.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// Where a sandbox stands.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// It boots, or was just forked.
    Starting,
    /// Its agent answers, or it is a bare guest that runs.
    Running,
    /// Its agent has not answered for a while.
    Unresponsive,
    /// Its vCPUs stand still until it is resumed.
    Paused,
    /// There is no process any more.
    Ended(Arc<End>),
    /// Its record cannot be read: why. See `unknown`.
    Unknown(Arc<str>),
}

/// What is to become of a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DesiredState {
    /// To run.
    Run,
    /// To end: its supervisor kills the process and finishes.
    End,
    /// To run on without us: its supervisor lets go and finishes.
    Leave,
    /// To make room for another process: its supervisor kills this one and finishes.
    Replace,
}

/// A sandbox.
///
/// Lock order, first to last: `suspends`, `exclusive`, `disks.generation` (all held across awaits), then `persisted`,
/// whose two locks are ordered in `persisted`. `resources` is a leaf: no other lock is taken while it is held.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    /// See [`SandboxRecord::child`].
    pub(crate) child: String,
    pub(crate) spec: Spec,
    pub(crate) created: SystemTime,
    /// Its files. Removed after the process is gone.
    pub(crate) folder: PathBuf,
    /// The trace of the request that made it.
    pub(crate) trace: Option<otlp::Context>,
    pub(crate) telemetry: Arc<Telemetry>,

    /// The client of its agent.
    pub(crate) agent: Agent,
    /// When its agent last answered, in milliseconds since 1970; 0 if it never did.
    pub(crate) heard: AtomicU64,
    /// Uses of it, now and last.
    pub(crate) activity: Arc<Activity>,

    /// Changed in `state` only.
    pub(crate) phase: watch::Sender<Phase>,
    /// How its supervisor takes orders.
    orders: Orders,
    /// How it ends when a client or a time-out ends it; as deleted if it is not set.
    pub(crate) end_reason: OnceLock<End>,

    /// Held by a branch, a pause and a rollback: one at a time.
    exclusive: Arc<tokio::sync::Mutex<()>>,
    /// Held by a suspend: one at a time.
    pub(crate) suspends: Arc<tokio::sync::Mutex<()>>,
    /// How long a request waits for `exclusive`.
    pub(crate) patience: Duration,
    /// How long a freeze or a thaw of its processes may take.
    pub(crate) freeze_limit: Duration,
    /// Thaws that its agent has yet to do.
    pub(crate) thaws: TaskTracker,

    pub(crate) disks: Disks,
    pub(crate) pauses: Pauses,
    persisted: Persisted,
    resources: Mutex<Resources>,
}

/// The way to a sandbox's supervisor.
#[derive(Debug)]
struct Orders {
    desired: watch::Sender<DesiredState>,
    commands: mpsc::Sender<MonitorCommand>,
    /// The supervisor takes it when it starts.
    taken: Mutex<Option<mpsc::Receiver<MonitorCommand>>>,
}

impl Orders {
    fn new() -> Self {
        let (commands, taken) = mpsc::channel(command::QUEUE);
        Orders { desired: watch::Sender::new(DesiredState::Run), commands, taken: Mutex::new(Some(taken)) }
    }
}

impl Sandbox {
    pub(crate) fn new(id: String, spec: Spec, folder: PathBuf, resources: Resources, host: &Host) -> Self {
        let endpoint = Endpoint::Vsock { socket: folder.join(boot_files::VSOCK), port: AGENT_PORT };
        let netns = resources.slot.as_ref().map(|slot| slot.name().to_owned());
        Sandbox {
            child: id.clone(),
            id,
            spec,
            created: SystemTime::now(),
            folder,
            agent: Agent::new(endpoint, host.config.timing.call),
            phase: watch::Sender::new(Phase::Starting),
            orders: Orders::new(),
            exclusive: Arc::default(),
            suspends: Arc::default(),
            disks: Disks::default(),
            pauses: Pauses::default(),
            heard: AtomicU64::new(0),
            telemetry: host.telemetry.clone(),
            trace: otlp::current(),
            persisted: Persisted::new(RuntimeInfo { netns, ..RuntimeInfo::default() }),
            activity: Activity::new(),
            end_reason: OnceLock::new(),
            patience: host.config.timing.call,
            freeze_limit: host.config.timing.freeze,
            thaws: task::tracker(),
            resources: Mutex::new(resources),
        }
    }

    /// When it was made, in seconds since 1970.
    pub(crate) fn created_at_unix(&self) -> u64 {
        self.created.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    /// The part of that second.
    pub(crate) fn created_nanos(&self) -> u32 {
        self.created.duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// Notes that a branch was taken of it.
    pub(crate) fn branched(&self, tag: &str) {
        self.remember(|history| {
            history.branch_count = history.branch_count.saturating_add(1);
            history.last_branch_tag = Some(tag.to_owned());
        });
        self.note_branched();
    }

    pub(crate) fn resources(&self) -> MutexGuard<'_, Resources> {
        self.resources.lock()
    }

    /// The supervisor's end of the commands; nobody else's, and once.
    pub(super) fn take_commands(&self) -> Option<mpsc::Receiver<MonitorCommand>> {
        self.orders.taken.lock().take()
    }

    pub(crate) fn console_path(&self) -> PathBuf {
        self.folder.join(boot_files::CONSOLE)
    }

    /// Waits until nobody else branches it, pauses it or takes it back. The turn is over when what is
    /// returned is dropped.
    pub(crate) async fn lock_exclusive(&self) -> Result<OwnedMutexGuard<()>> {
        tokio::time::timeout(self.patience, self.exclusive.clone().lock_owned()).await.map_err(|_| {
            let text = format!("sandbox {} is being branched, paused or rolled back; try again", self.id);
            Error::new(Code::SandboxBusy, text)
        })
    }

    /// What is to become of it.
    pub(crate) fn desired(&self) -> DesiredState {
        *self.orders.desired.borrow()
    }

    /// Tells when that changes.
    pub(crate) fn wishes(&self) -> watch::Receiver<DesiredState> {
        self.orders.desired.subscribe()
    }

    /// Ends it, or lets go of it.
    pub(crate) fn set_desired(&self, wish: DesiredState) {
        self.orders.desired.send_replace(wish);
    }

    /// Returns when it is not to be run any more by us, with what instead.
    pub(crate) async fn dismissed(&self) -> DesiredState {
        match self.orders.desired.subscribe().wait_for(|wish| *wish != DesiredState::Run).await {
            Ok(wish) => *wish,
            // Would mean that `self` is gone.
            Err(_) => DesiredState::End,
        }
    }

    /// Returns when it runs, or why it never will.
    pub(crate) async fn started(&self) -> Result<()> {
        let mut phases = self.phase.subscribe();
        let phase = phases.wait_for(|phase| !matches!(phase, Phase::Starting)).await;
        match phase.map(|phase| phase.clone()) {
            Ok(Phase::Ended(end)) => {
                let text = format!("sandbox {} did not start: {}", self.id, end.detail);
                let text = if self.spec.is_bare() { text } else { with_console(&text, &end) };
                Err(end.because(Error::new(Code::GuestFailed, text)))
            }
            _ => Ok(()),
        }
    }

    /// Fails while it is being put away: what is done to it then would be lost.
    pub(crate) fn check_not_suspending(&self) -> Result<()> {
        self.known()?;
        if !self.read_runtime(|facts| facts.is_suspending) {
            return Ok(());
        }
        let then = match self.read_runtime(|facts| facts.saved.workspace.clone()) {
            Some(name) => format!("`forkd workspace resume {name}` goes on when that is done"),
            None => "its time is over; fork the snapshot it is stored as (`forkd images`) to go on".into(),
        };
        Err(Error::new(Code::SandboxSuspending, format!("sandbox {} is being suspended; {then}", self.id)))
    }

    /// Fails unless it is running now and has an agent. One that was paused because nobody used it goes on.
    pub(crate) async fn ready(&self) -> Result<()> {
        self.check_not_suspending()?;
        self.activity.touch();
        self.auto_resume().await?;
        self.runs().await
    }

    /// As [`ready`](Sandbox::ready), and changes nothing.
    pub(crate) async fn runs(&self) -> Result<()> {
        match self.phase() {
            Phase::Running if self.spec.is_bare() => {
                let text =
                    format!("sandbox {} is a bare kernel: it has no agent that could do that", self.id);
                Err(Error::new(Code::SandboxUnfit, text))
            }
            Phase::Running => Ok(()),
            Phase::Starting => {
                let text =
                    format!("sandbox {} is still starting; wait for its state to be `running`", self.id);
                Err(Error::new(Code::SandboxStarting, text))
            }
            Phase::Unresponsive => Err(self.unresponsive().await),
            Phase::Paused if self.waits_for_room() => {
                let text = format!("sandbox {} is paused: {DISK_FULL_DETAIL}", self.id);
                Err(Error::new(Code::SandboxWaitsForDisk, text))
            }
            Phase::Paused => {
                let text = format!("sandbox {id} is paused; `forkd resume {id}` lets it go on", id = self.id);
                Err(Error::new(Code::SandboxPaused, text))
            }
            Phase::Ended(end) => Err(self.ended(Code::SandboxEnded, &end)),
            Phase::Unknown(_) => self.known(),
        }
    }

    /// Does `work` with the agent, unless the sandbox ends or hangs meanwhile: then the reason for
    /// that is the error. Meanwhile it is in use.
    pub(crate) async fn with_agent<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        let _in_use = self.in_use();
        self.ask_agent(work).await
    }

    /// As [`with_agent`](Sandbox::with_agent), but it is not in use by that.
    pub(crate) async fn ask_agent<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        let error = tokio::select! {
            done = work => match done {
                Ok(value) => {
                    self.heard();
                    // It may have been done after the instant that is stored, and is lost then: nobody is to
                    // believe that it was done.
                    return self.check_not_suspending().map(|()| value);
                }
                Err(error) => error,
            },
            trouble = self.trouble() => return Err(trouble),
        };
        if matches!(error, agent::Error::Unreachable(_) | agent::Error::Timeout(_)) {
            // A broken connection is often the first sign of an end whose reason comes later.
            if let Ok(trouble) = tokio::time::timeout(REASON_WAIT, self.trouble()).await {
                return Err(trouble);
            }
        }
        Err(self.agent_error(error))
    }

    /// Returns when the sandbox has ended or does not answer any more, with that as an error.
    pub(crate) async fn trouble(&self) -> Error {
        let mut phases = self.phase.subscribe();
        let bad = |phase: &Phase| matches!(phase, Phase::Ended(_) | Phase::Unresponsive);
        let phase = phases.wait_for(bad).await.map(|phase| phase.clone());
        match phase {
            Ok(Phase::Ended(end)) => self.ended(Code::SandboxLost, &end),
            _ => self.unresponsive().await,
        }
    }

    /// An agent's failure in words for the caller.
    pub(crate) fn agent_error(&self, error: agent::Error) -> Error {
        use forkd_protocol::connect::Code as Guest;
        let code = match &error {
            agent::Error::Refused(error) => match error.code {
                // A user the image does not have is a wrong request, not a missing token.
                Guest::InvalidArgument | Guest::OutOfRange | Guest::Unauthenticated => Code::InvalidRequest,
                Guest::NotFound => Code::GuestNotFound,
                Guest::FailedPrecondition | Guest::AlreadyExists | Guest::Aborted => Code::GuestConflict,
                Guest::PermissionDenied => Code::GuestForbidden,
                Guest::DeadlineExceeded => Code::GuestTimeout,
                Guest::ResourceExhausted | Guest::Unavailable => Code::GuestBusy,
                _ => Code::GuestFailed,
            },
            agent::Error::Timeout(_) => Code::GuestTimeout,
            agent::Error::NoRoom => Code::DaemonBusy,
            agent::Error::DiskFull(_) => Code::GuestDiskFull,
            agent::Error::Unreachable(why) => {
                return Error::new(Code::GuestFailed, error.public()).because(why.clone());
            }
            agent::Error::Protocol(_) => Code::GuestFailed,
        };
        Error::new(code, console::printable(error.to_string().as_bytes()))
    }

    pub(super) fn ended(&self, code: Code, end: &End) -> Error {
        if end.reason == ROLLED_BACK {
            let text = format!("sandbox {} was rolled back meanwhile; ask again", self.id);
            return Error::new(Code::SandboxReplaced, text);
        }
        let text = format!("sandbox {} has ended: {}", self.id, end.detail);
        end.because(Error::new(code, with_console(&text, end)))
    }

    async fn unresponsive(&self) -> Error {
        let text = format!("sandbox {} does not answer any more; delete it if it stays so", self.id);
        Error::new(Code::SandboxUnresponsive, console::with_tail(&text, &self.tail().await))
    }

    /// The end of its console.
    pub(crate) async fn tail(&self) -> String {
        let path = self.console_path();
        let read = tokio::task::spawn_blocking(move || console::tail(&path, CONSOLE_TAIL as u64));
        read.await.unwrap_or_default()
    }
}

fn with_console(text: &str, end: &End) -> String {
    if end.is_requested() { text.to_owned() } else { console::with_tail(text, &end.console_tail) }
}

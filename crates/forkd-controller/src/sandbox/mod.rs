//! Sandboxes: their states, their supervisors, their records, and the registry of all of them.
//!
//! A sandbox has one *supervisor*, a task that owns its monitor from the start of the process to its end. Requests
//! never own the process: they watch the [`Phase`] and call the agent. So a cancelled request leaves nothing half
//! done, and when a sandbox ends, every request that waits for it fails at once, with the reason.
//!
//! - A running sandbox: `state` changes its [`Phase`], `supervisor` owns its monitor, `start` brings the guest up,
//!   `watchdog` pings the agent, and `command` holds the commands from requests to the supervisor.
//! - Its data: `persisted` (in memory and for the next daemon), `record` (the files' contents), `lifetime` (time-outs,
//!   labels, last use), `archive` (the sandboxes that ended).
//! - All sandboxes: `registry` boots, finds and deletes them, `spawn` forks them, `rollback` restarts one from a
//!   snapshot. After a restart of the daemon `adopt` takes them over, and `unknown` keeps those with unreadable records.
//! - The host: `resources` (cgroup, network slot, lineage), `disks` (frozen layers), `disk_full`.
//! - Other APIs: `e2b` is the state that the E2B API keeps for a sandbox;
//!   `forwards` limits its clients' requests into the guest.
//! - The guest: `quiesce` freezes and thaws its processes, `agent_call` calls its agent, `envs` checks variables.

pub(crate) mod adopt;
pub(crate) mod agent_call;
pub(crate) mod archive;
pub(crate) mod cold_boot;
pub(crate) mod command;
pub(crate) mod disk_full;
pub(crate) mod disks;
pub(crate) mod e2b;
pub(crate) mod envs;
pub(crate) mod forwards;
pub(crate) mod idempotency;
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
use crate::sandbox::forwards::Forwards;
use crate::sandbox::lifetime::Activity;
use crate::sandbox::persisted::Persisted;
use crate::sandbox::resources::Resources;
use crate::telemetry::{Telemetry, otlp};
use crate::util::task;

pub(crate) use crate::sandbox::persisted::RuntimeInfo;
pub(crate) use record::{
    END, End, History, RECORD, ROLLED_BACK, SandboxRecord, SavedState, Spec, child_name,
};

/// The state of a sandbox.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// The guest boots, or was just forked.
    Starting,
    /// The agent answers, or a bare guest runs.
    Running,
    /// The agent has not answered for `unresponsive_after`.
    Unresponsive,
    /// The vCPUs are stopped until a resume.
    Paused,
    /// The process is gone.
    Ended(Arc<End>),
    /// The daemon cannot read the record, for this reason. See `unknown`.
    Unknown(Arc<str>),
}

/// What requests and the daemon want the supervisor to do with a sandbox.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum DesiredState {
    /// Keep it running.
    Run,
    /// End it: the supervisor kills the process and returns.
    End,
    /// Leave it running for the next daemon: the supervisor returns without a kill.
    Leave,
    /// Make way for the process of a rollback: the supervisor kills this one and returns.
    Replace,
}

/// A sandbox.
///
/// Lock order, first to last: `suspends`, a place in `disks.queue`, `exclusive`, `disks.generation` (all held across
/// awaits), then the record of `persisted`, `phase`, and the runtime information of `persisted`. `phase` is locked while
/// the event of its change is emitted, which reads the runtime information. `resources`, `pauses` and
/// `supervisor.taken` are leaves: no other lock is taken while one of them is held.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    /// See [`SandboxRecord::child`].
    pub(crate) child: String,
    pub(crate) spec: Spec,
    pub(crate) created: SystemTime,
    /// The folder of its files, removed after the process is gone.
    pub(crate) folder: PathBuf,
    /// The trace of the request that created the sandbox.
    pub(crate) trace: Option<otlp::Context>,
    pub(crate) telemetry: Arc<Telemetry>,

    /// The client of its agent.
    pub(crate) agent: Agent,
    /// The time of the agent's last answer, in milliseconds since 1970; 0 before the first.
    pub(crate) heard: AtomicU64,
    /// Current uses, and the time of the last one.
    pub(crate) activity: Arc<Activity>,

    /// Only `state` changes it.
    pub(crate) phase: watch::Sender<Phase>,
    /// The channels to the supervisor.
    supervisor: SupervisorChannels,
    /// The end to record when a client or a time-out ends the sandbox; `deleted` if it is not set.
    pub(crate) end_reason: OnceLock<End>,

    /// A branch, a pause and a rollback hold this lock: one at a time.
    exclusive: Arc<tokio::sync::Mutex<()>>,
    /// A suspend holds this lock: one at a time.
    pub(crate) suspends: Arc<tokio::sync::Mutex<()>>,
    /// How long a request waits for `exclusive`.
    pub(crate) patience: Duration,
    /// How long a freeze or a thaw of the guest's processes may take.
    pub(crate) freeze_limit: Duration,
    /// Thaws that its agent has yet to do.
    pub(crate) thaws: TaskTracker,

    pub(crate) disks: Disks,
    pub(crate) pauses: Pauses,
    /// Requests of clients into the guest.
    pub(crate) forwards: Forwards,
    persisted: Persisted,
    resources: Mutex<Resources>,
}

/// The channels to a sandbox's supervisor.
#[derive(Debug)]
struct SupervisorChannels {
    desired: watch::Sender<DesiredState>,
    commands: mpsc::Sender<MonitorCommand>,
    /// The receiver of `commands`, until the supervisor takes it.
    taken: Mutex<Option<mpsc::Receiver<MonitorCommand>>>,
}

impl SupervisorChannels {
    fn new() -> Self {
        let (commands, taken) = mpsc::channel(command::QUEUE);
        SupervisorChannels {
            desired: watch::Sender::new(DesiredState::Run),
            commands,
            taken: Mutex::new(Some(taken)),
        }
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
            supervisor: SupervisorChannels::new(),
            exclusive: Arc::default(),
            suspends: Arc::default(),
            disks: Disks::default(),
            pauses: Pauses::default(),
            forwards: Forwards::default(),
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

    /// When the sandbox was created, in seconds since 1970.
    pub(crate) fn created_at_unix(&self) -> u64 {
        self.created.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    /// The nanoseconds within that second.
    pub(crate) fn created_nanos(&self) -> u32 {
        self.created.duration_since(UNIX_EPOCH).unwrap_or_default().subsec_nanos()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    /// Records in the history that a branch `tag` was taken, and emits the event.
    pub(crate) fn branched(&self, tag: &str) {
        self.update_history(|history| {
            history.branch_count = history.branch_count.saturating_add(1);
            history.last_branch_tag = Some(tag.to_owned());
        });
        self.note_branched();
    }

    pub(crate) fn resources(&self) -> MutexGuard<'_, Resources> {
        self.resources.lock()
    }

    /// The receiver of the commands. Only the supervisor takes it, and only once.
    pub(super) fn take_commands(&self) -> Option<mpsc::Receiver<MonitorCommand>> {
        self.supervisor.taken.lock().take()
    }

    pub(crate) fn console_path(&self) -> PathBuf {
        self.folder.join(boot_files::CONSOLE)
    }

    /// Waits until no other request branches, pauses or rolls back the sandbox, and keeps those out until the caller
    /// drops the guard.
    pub(crate) async fn lock_exclusive(&self) -> Result<OwnedMutexGuard<()>> {
        tokio::time::timeout(self.patience, self.exclusive.clone().lock_owned()).await.map_err(|_| {
            let text = format!("sandbox {} is being branched, paused or rolled back; try again", self.id);
            Error::new(Code::SandboxBusy, text)
        })
    }

    /// What the supervisor is to do now.
    pub(crate) fn desired(&self) -> DesiredState {
        *self.supervisor.desired.borrow()
    }

    /// Watches the desired state.
    pub(crate) fn watch_desired(&self) -> watch::Receiver<DesiredState> {
        self.supervisor.desired.subscribe()
    }

    /// Sets what the supervisor is to do; the supervisor acts on it at once.
    pub(crate) fn set_desired(&self, desired: DesiredState) {
        self.supervisor.desired.send_replace(desired);
    }

    /// Returns the desired state as soon as that is no longer [`DesiredState::Run`].
    pub(crate) async fn desired_changed(&self) -> DesiredState {
        match self.supervisor.desired.subscribe().wait_for(|desired| *desired != DesiredState::Run).await {
            Ok(desired) => *desired,
            // Not reached: `self` holds the sender.
            Err(_) => DesiredState::End,
        }
    }

    /// Waits until the start is over. Fails with the reason if the sandbox ended instead.
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

    /// Fails while the sandbox is being suspended: the stored snapshot would not contain later changes.
    pub(crate) fn check_not_suspending(&self) -> Result<()> {
        self.known()?;
        self.read_runtime(|runtime| self.check_not_suspending_in(runtime))
    }

    /// The same for a caller that has locked the runtime information.
    pub(super) fn check_not_suspending_in(&self, runtime: &RuntimeInfo) -> Result<()> {
        if !runtime.is_suspending {
            return Ok(());
        }
        let then = match &runtime.saved.workspace {
            Some(name) => format!("run `forkd workspace resume {name}` when that is done"),
            None => "its time is over; fork the snapshot it is stored as (`forkd images`) to continue".into(),
        };
        Err(Error::new(Code::SandboxSuspending, format!("sandbox {} is being suspended; {then}", self.id)))
    }

    /// Counts as a use, and resumes an auto-paused sandbox. Fails unless the sandbox then runs and has an agent.
    pub(crate) async fn ready(&self) -> Result<()> {
        self.check_not_suspending()?;
        self.activity.touch();
        self.auto_resume().await?;
        self.runs().await
    }

    /// Fails unless the sandbox runs and has an agent. Neither counts as a use nor resumes it.
    pub(crate) async fn runs(&self) -> Result<()> {
        match self.phase() {
            Phase::Running if self.spec.is_bare() => {
                let text =
                    format!("sandbox {} is a bare kernel, which has no agent for this request", self.id);
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
                let text = format!("sandbox {id} is paused; `forkd resume {id}` resumes it", id = self.id);
                Err(Error::new(Code::SandboxPaused, text))
            }
            Phase::Ended(end) => Err(self.ended(Code::SandboxEnded, &end)),
            Phase::Unknown(_) => self.known(),
        }
    }

    /// Waits until the sandbox ends or becomes unresponsive, and returns that as an error.
    pub(crate) async fn trouble(&self) -> Error {
        let mut phases = self.phase.subscribe();
        let bad = |phase: &Phase| matches!(phase, Phase::Ended(_) | Phase::Unresponsive);
        let phase = phases.wait_for(bad).await.map(|phase| phase.clone());
        match phase {
            Ok(Phase::Ended(end)) => self.ended(Code::SandboxLost, &end),
            _ => self.unresponsive().await,
        }
    }

    /// The API error for an agent's failure.
    pub(crate) fn agent_error(&self, error: agent::Error) -> Error {
        use forkd_protocol::connect::Code as Guest;
        let code = match &error {
            agent::Error::Refused(error) => match error.code {
                // A user the image does not have is a wrong request, not a missing token.
                Guest::InvalidArgument | Guest::Unauthenticated => Code::InvalidRequest,
                Guest::OutOfRange => Code::FolderTooLarge,
                Guest::Unimplemented => {
                    let text = format!(
                        "the agent of sandbox {} is of an older version and cannot do that; make the snapshot again \
                         with this version of forkd, and fork from it",
                        self.id
                    );
                    return Error::new(Code::SandboxUnfit, text).because(error.message.clone());
                }
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
        let text = format!("sandbox {} does not answer any more; delete it if that lasts", self.id);
        Error::new(Code::SandboxUnresponsive, console::with_tail(&text, &self.tail().await))
    }

    /// The last lines of its console.
    pub(crate) async fn tail(&self) -> String {
        let path = self.console_path();
        let read = tokio::task::spawn_blocking(move || console::tail(&path, CONSOLE_TAIL as u64));
        read.await.unwrap_or_default()
    }
}

fn with_console(text: &str, end: &End) -> String {
    if end.is_requested() { text.to_owned() } else { console::with_tail(text, &end.console_tail) }
}

//! One sandbox, as requests see it: what it is, where it stands, and its agent.
//!
//! A sandbox has one *keeper* (`keeper`), a task that owns its monitor from the start of the process
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
pub(crate) mod quiesce;
mod record;
pub(crate) mod registry;
pub(crate) mod resources;
pub(crate) mod rollback;
pub(crate) mod spawn;
pub(crate) mod state;
pub(crate) mod supervisor;
pub(crate) mod unknown;
pub(crate) mod visit;

use std::collections::BTreeMap;
use std::io;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
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
use crate::sandbox::command::Command;
use crate::sandbox::disk_full::DISK_FULL_DETAIL;
use crate::sandbox::disks::Disks;
use crate::sandbox::lifetime::{Activity, Attempt, Life};
use crate::sandbox::resources::Belongings;
use crate::telemetry::{Telling, otlp};
use crate::util::task;

pub(crate) use record::{END, End, History, RECORD, ROLLED_BACK, Record, Spec, child_name};

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
pub(crate) enum Wish {
    /// To run.
    Run,
    /// To end: its keeper kills the process and finishes.
    End,
    /// To run on without us: its keeper lets go and finishes.
    Leave,
    /// To make room for another process: its keeper kills this one and finishes.
    GiveWay,
}

/// A sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    /// See [`Record::child`].
    pub(crate) child: String,
    pub(crate) spec: Spec,
    pub(crate) created: SystemTime,
    /// Its files. Removed after the process is gone.
    pub(crate) folder: PathBuf,
    pub(crate) agent: Agent,
    /// Changed in `phases` only.
    pub(crate) phase: watch::Sender<Phase>,
    wish: watch::Sender<Wish>,
    /// To its keeper, which takes the other end when it starts.
    pub(super) commands: mpsc::Sender<Command>,
    asked: Mutex<Option<mpsc::Receiver<Command>>>,
    /// Held by whoever must not find it paused, or frozen, in the middle of what it does.
    turn: Arc<tokio::sync::Mutex<()>>,
    /// Held by the suspend of it: there is one at a time.
    pub(crate) suspends: Arc<tokio::sync::Mutex<()>>,
    pub(crate) disks: Disks,
    pub(crate) pauses: Pauses,
    /// When its agent last answered, in milliseconds since 1970; 0 if it never did.
    pub(crate) heard: AtomicU64,
    pub(crate) telling: Arc<Telling>,
    /// What it was made for.
    pub(crate) trace: Option<otlp::Context>,
    facts: Mutex<Facts>,
    /// Who uses it, and when somebody last did.
    pub(crate) activity: Arc<Activity>,
    /// How it ends when it is asked to; as one that was deleted if nobody says otherwise.
    pub(crate) farewell: OnceLock<End>,
    /// How long to wait for whoever has its turn.
    pub(crate) patience: Duration,
    /// How long its processes may take to stand still, or to go on, when it is paused or resumed.
    pub(crate) freeze_limit: Duration,
    /// Thaws of its processes that its agent is yet to do.
    pub(crate) thaws: TaskTracker,
    /// Of a forked one: as it is on disk.
    record: Mutex<Option<Record>>,
    /// Whether the next daemon is to end it. Changed with `record` locked.
    pub(crate) disowned: AtomicBool,
    belongings: Mutex<Belongings>,
}

/// What becomes known while it runs.
#[derive(Debug, Clone, Default)]
pub(crate) struct Facts {
    pub(crate) pid: Option<u32>,
    /// From the monitor's start until it was ready, its warm-up included; of booted ones.
    pub(crate) boot_ms: Option<u64>,
    /// From the request's arrival to the first answer; of forked ones.
    pub(crate) ready_ms: Option<f64>,
    /// Whether the image has a Python.
    pub(crate) python: Option<bool>,
    /// The name of its network slot.
    pub(crate) netns: Option<String>,
    /// When its time is over.
    pub(crate) deadline_unix: Option<u64>,
    /// How long a booted one is to live once it has started.
    pub(crate) lifetime: Option<Duration>,
    pub(crate) history: History,
    /// The workspace it is the sandbox of.
    pub(crate) workspace: Option<String>,
    pub(crate) life: Life,
    /// Whether its monitor paused it because the host's disk is full.
    pub(crate) disk_full: bool,
    /// What is being done because its time is over.
    pub(crate) attempt: Attempt,
    /// Whether it is being stored, to be ended then: what is done in it would be lost.
    pub(crate) put_away: bool,
}

impl Sandbox {
    pub(crate) fn new(id: String, spec: Spec, folder: PathBuf, belongings: Belongings, host: &Host) -> Self {
        let endpoint = Endpoint::Vsock { socket: folder.join(boot_files::VSOCK), port: AGENT_PORT };
        let netns = belongings.slot.as_ref().map(|slot| slot.name().to_owned());
        let (commands, asked) = mpsc::channel(command::QUEUE);
        Sandbox {
            child: id.clone(),
            id,
            spec,
            created: SystemTime::now(),
            folder,
            agent: Agent::new(endpoint, host.config.timing.call),
            phase: watch::Sender::new(Phase::Starting),
            wish: watch::Sender::new(Wish::Run),
            commands,
            asked: Mutex::new(Some(asked)),
            turn: Arc::default(),
            suspends: Arc::default(),
            disowned: AtomicBool::default(),
            disks: Disks::default(),
            pauses: Pauses::default(),
            heard: AtomicU64::new(0),
            telling: host.telling.clone(),
            trace: otlp::current(),
            facts: Mutex::new(Facts { netns, ..Facts::default() }),
            activity: Activity::new(),
            farewell: OnceLock::new(),
            patience: host.config.timing.call,
            freeze_limit: host.config.timing.freeze,
            thaws: task::tracker(),
            record: Mutex::default(),
            belongings: Mutex::new(belongings),
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

    pub(crate) fn facts(&self) -> Facts {
        self.facts.lock().clone()
    }

    /// Looks at what is known of it, without a copy.
    pub(crate) fn look<T>(&self, look: impl FnOnce(&Facts) -> T) -> T {
        look(&self.facts.lock())
    }

    pub(crate) fn learn(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock());
    }

    /// Takes what is known of it from its record, which is on disk already.
    pub(crate) fn recorded(&self, record: Record) {
        self.learn(|facts| {
            facts.python = record.python;
            facts.deadline_unix = record.deadline_unix;
            facts.history = record.history.clone();
            facts.workspace = record.workspace.clone();
            facts.life = record.life.clone();
        });
        *self.lock_record() = Some(record);
    }

    pub(crate) fn lock_record(&self) -> MutexGuard<'_, Option<Record>> {
        self.record.lock()
    }

    /// Has the next daemon take over one that has booted, unless it was deleted meanwhile.
    pub(crate) fn outlive(&self) -> io::Result<()> {
        let lineage = self.belongings().lineage.clone();
        let lineage = lineage.ok_or_else(|| io::Error::other("it has no user of its own"))?;
        let mut record = self.lock_record();
        if self.disowned.load(Ordering::Relaxed) {
            return Ok(());
        }
        let facts = self.facts();
        let booted = Record {
            template: String::new(),
            lineage: lineage.slot,
            cgroup: lineage.name.clone(),
            spec: self.spec.clone(),
            created_at_unix: self.created_at_unix(),
            created_nanos: self.created_nanos(),
            deadline_unix: facts.deadline_unix,
            netns: facts.netns,
            python: facts.python,
            generation: 0,
            history: facts.history,
            envs: BTreeMap::new(),
            workspace: None,
            life: facts.life,
        };
        booted.write(&self.folder)?;
        *record = Some(booted);
        Ok(())
    }

    /// Its record: none of one that is bound to a connection, or has not booted yet.
    pub(crate) fn record(&self) -> Option<Record> {
        self.lock_record().clone()
    }

    /// Notes something about it that the next daemon is to know, too. Blocks for a moment.
    pub(crate) fn remember(&self, change: impl FnOnce(&mut History)) {
        if let Err(error) = self.rewrite(|facts| change(&mut facts.history)) {
            tracing::error!(sandbox = self.id, %error, "cannot write down what was done to it");
        }
    }

    /// Changes what is known of it, here and in its record: only what that has.
    pub(crate) fn rewrite(&self, change: impl FnOnce(&mut Facts)) -> io::Result<()> {
        let mut record = self.lock_record();
        self.learn(change);
        // The file is that of whoever takes its place.
        let gone = self.wished() == Wish::GiveWay;
        let Some(record) = record.as_mut().filter(|_| !gone) else { return Ok(()) };
        self.look(|facts| {
            record.history = facts.history.clone();
            record.life = facts.life.clone();
            record.deadline_unix = facts.deadline_unix;
        });
        record.write(&self.folder)
    }

    /// Notes that a branch was taken of it.
    pub(crate) fn branched(&self, tag: &str) {
        self.remember(|history| {
            history.branch_count = history.branch_count.saturating_add(1);
            history.last_branch_tag = Some(tag.to_owned());
        });
        self.told_of_branch();
    }

    pub(crate) fn belongings(&self) -> MutexGuard<'_, Belongings> {
        self.belongings.lock()
    }

    /// The keeper's end of the commands; nobody else's, and once.
    pub(super) fn take_commands(&self) -> Option<mpsc::Receiver<Command>> {
        self.asked.lock().take()
    }

    pub(crate) fn console_path(&self) -> PathBuf {
        self.folder.join(boot_files::CONSOLE)
    }

    /// Waits until nobody else branches it, pauses it or takes it back. The turn is over when what is
    /// returned is dropped.
    pub(crate) async fn take_turn(&self) -> Result<OwnedMutexGuard<()>> {
        tokio::time::timeout(self.patience, self.turn.clone().lock_owned()).await.map_err(|_| {
            let text = format!("sandbox {} is being branched, paused or rolled back; try again", self.id);
            Error::new(Code::SandboxBusy, text)
        })
    }

    /// What is to become of it.
    pub(crate) fn wished(&self) -> Wish {
        *self.wish.borrow()
    }

    /// Tells when that changes.
    pub(crate) fn wishes(&self) -> watch::Receiver<Wish> {
        self.wish.subscribe()
    }

    /// Ends it, or lets go of it.
    pub(crate) fn wish(&self, wish: Wish) {
        self.wish.send_replace(wish);
    }

    /// Returns when it is not to be run any more by us, with what instead.
    pub(crate) async fn dismissed(&self) -> Wish {
        match self.wish.subscribe().wait_for(|wish| *wish != Wish::Run).await {
            Ok(wish) => *wish,
            // Would mean that `self` is gone.
            Err(_) => Wish::End,
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
    pub(crate) fn not_put_away(&self) -> Result<()> {
        self.known()?;
        if !self.look(|facts| facts.put_away) {
            return Ok(());
        }
        let then = match self.look(|facts| facts.workspace.clone()) {
            Some(name) => format!("`forkd workspace resume {name}` goes on when that is done"),
            None => "its time is over; fork the snapshot it is stored as (`forkd images`) to go on".into(),
        };
        Err(Error::new(Code::SandboxSuspending, format!("sandbox {} is being suspended; {then}", self.id)))
    }

    /// Fails unless it is running now and has an agent. One that was paused because nobody used it goes on.
    pub(crate) async fn ready(&self) -> Result<()> {
        self.not_put_away()?;
        self.activity.touch();
        self.wake().await?;
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
                    return self.not_put_away().map(|()| value);
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
    if end.is_wished() { text.to_owned() } else { console::with_tail(text, &end.console_tail) }
}

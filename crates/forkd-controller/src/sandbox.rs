//! One sandbox, as requests see it: what it is, where it stands, and its agent.
//!
//! A sandbox has one *keeper* (`keeper`), a task that owns its monitor from the start of the process
//! to its end. Requests never own the process: they watch the [`Phase`] and talk to the agent. So a
//! request that goes away leaves nothing half done, and a sandbox that ends tells everybody who
//! waits for it at once.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkd_net::Slot;
use forkd_protocol::agent::AGENT_PORT;
use forkd_protocol::control::CONSOLE_TAIL;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

use crate::agent::{self, Agent, Endpoint};
use crate::boot;
use crate::cgroup::Leaf;
use crate::config::Timing;
use crate::console;
use crate::error::{Error, Kind, Result};
use crate::lineage::Lineage;
use crate::network::chain;
use crate::template::Template;

/// The file in a forked sandbox's folder that says what it is.
pub(crate) const RECORD: &str = "sandbox.json";
/// The file in a forked sandbox's folder that says how it ended.
pub(crate) const END: &str = "end.json";
/// After a connection broke, how long to wait for the reason to become known.
const REASON_WAIT: Duration = Duration::from_secs(2);

/// What a sandbox is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// The image it has; none for a bare guest, which has no agent, either.
    pub(crate) image: Option<String>,
    /// The snapshot it was forked from.
    pub(crate) snapshot_tag: Option<String>,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    pub(crate) network: bool,
    /// What its monitor may use; where the host has cgroups.
    pub(crate) memory_limit_mib: u64,
}

impl Spec {
    /// Whether only its kernel can say that it runs.
    pub(crate) fn is_bare(&self) -> bool {
        self.image.is_none()
    }
}

/// What the next daemon needs to know of a forked sandbox. Written before the fork is asked for.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Record {
    /// Its template.
    pub(crate) template: String,
    /// The number of its lineage.
    pub(crate) lineage: u32,
    pub(crate) spec: Spec,
    pub(crate) created_at_unix: u64,
    /// When it is to be deleted.
    pub(crate) deadline_unix: Option<u64>,
    /// Its network slot.
    pub(crate) netns: Option<String>,
    pub(crate) python: Option<bool>,
}

/// Where a sandbox stands.
#[derive(Debug, Clone)]
pub(crate) enum Phase {
    /// It boots, or was just forked.
    Starting,
    /// Its agent answers, or it is a bare guest that runs.
    Running,
    /// Its agent has not answered for a while.
    Unresponsive,
    /// There is no process any more.
    Ended(Arc<End>),
}

/// How a sandbox ended.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct End {
    /// One word for programs.
    pub(crate) reason: String,
    /// One sentence for people.
    pub(crate) detail: String,
    /// The end of its console.
    pub(crate) console_tail: String,
}

impl End {
    pub(crate) fn new(reason: &str, detail: impl Into<String>, console_tail: String) -> Self {
        End { reason: reason.into(), detail: detail.into(), console_tail }
    }

    pub(crate) fn deleted() -> Self {
        End::new("deleted", "the sandbox was deleted", String::new())
    }
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
}

/// What a sandbox has that others could have after it.
#[derive(Debug, Default)]
pub(crate) struct Belongings {
    pub(crate) lineage: Option<Arc<Lineage>>,
    /// Who forked it.
    pub(crate) template: Option<Arc<Template>>,
    pub(crate) slot: Option<Slot>,
    pub(crate) leaf: Option<Leaf>,
}

impl Belongings {
    /// Gives the host back what is the sandbox's alone. Its process must be gone. Blocks.
    pub(crate) fn discard(&mut self, id: &str) {
        if let Some(Err(error)) = self.slot.take().map(|mut slot| slot.destroy()) {
            tracing::error!(sandbox = id, error = chain(&error), "its network slot is left behind");
        }
        if let Some(Err(error)) = self.leaf.take().map(|leaf| leaf.remove()) {
            tracing::error!(sandbox = id, %error, "its cgroup is left behind");
        }
    }
}

/// A sandbox.
#[derive(Debug)]
pub(crate) struct Sandbox {
    pub(crate) id: String,
    pub(crate) spec: Spec,
    pub(crate) created: SystemTime,
    /// Its files. Removed after the process is gone.
    pub(crate) folder: PathBuf,
    pub(crate) agent: Agent,
    pub(super) phase: watch::Sender<Phase>,
    wish: watch::Sender<Wish>,
    facts: Mutex<Facts>,
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
}

impl Sandbox {
    pub(crate) fn new(
        id: String,
        spec: Spec,
        folder: PathBuf,
        belongings: Belongings,
        timing: &Timing,
    ) -> Self {
        let endpoint = Endpoint::Vsock { socket: folder.join(boot::VSOCK), port: AGENT_PORT };
        let netns = belongings.slot.as_ref().map(|slot| slot.name().to_owned());
        Sandbox {
            id,
            spec,
            created: SystemTime::now(),
            folder,
            agent: Agent::new(endpoint, timing.call),
            phase: watch::Sender::new(Phase::Starting),
            wish: watch::Sender::new(Wish::Run),
            facts: Mutex::new(Facts { netns, ..Facts::default() }),
            belongings: Mutex::new(belongings),
        }
    }

    /// When it was made, in seconds since 1970.
    pub(crate) fn created_at_unix(&self) -> u64 {
        self.created.duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
    }

    pub(crate) fn phase(&self) -> Phase {
        self.phase.borrow().clone()
    }

    pub(crate) fn facts(&self) -> Facts {
        self.facts.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn learn(&self, change: impl FnOnce(&mut Facts)) {
        change(&mut self.facts.lock().unwrap_or_else(PoisonError::into_inner));
    }

    pub(crate) fn belongings(&self) -> MutexGuard<'_, Belongings> {
        self.belongings.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn console_path(&self) -> PathBuf {
        self.folder.join(boot::CONSOLE)
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
                Err(Error::new(Kind::Guest, text))
            }
            _ => Ok(()),
        }
    }

    /// Fails unless it is running now and has an agent.
    pub(crate) async fn ready(&self) -> Result<()> {
        match self.phase() {
            Phase::Running if self.spec.is_bare() => {
                let text =
                    format!("sandbox {} is a bare kernel: it has no agent that could do that", self.id);
                Err(Error::new(Kind::Conflict, text))
            }
            Phase::Running => Ok(()),
            Phase::Starting => {
                let text =
                    format!("sandbox {} is still starting; wait for its state to be `running`", self.id);
                Err(Error::new(Kind::Conflict, text))
            }
            Phase::Unresponsive => Err(self.unresponsive().await),
            Phase::Ended(end) => Err(self.ended(Kind::Conflict, &end)),
        }
    }

    /// Does `work` with the agent, unless the sandbox ends or hangs meanwhile: then the reason for
    /// that is the error.
    pub(crate) async fn with_agent<T>(&self, work: impl Future<Output = agent::Result<T>>) -> Result<T> {
        let error = tokio::select! {
            done = work => match done {
                Ok(value) => return Ok(value),
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
            Ok(Phase::Ended(end)) => self.ended(Kind::Guest, &end),
            _ => self.unresponsive().await,
        }
    }

    /// An agent's failure in words for the caller.
    pub(crate) fn agent_error(&self, error: agent::Error) -> Error {
        use forkd_protocol::connect::Code;
        let kind = match &error {
            agent::Error::Refused(error) => match error.code {
                Code::InvalidArgument | Code::OutOfRange => Kind::Invalid,
                Code::NotFound => Kind::NotFound,
                Code::FailedPrecondition | Code::AlreadyExists | Code::Aborted => Kind::Conflict,
                Code::PermissionDenied => Kind::Forbidden,
                Code::DeadlineExceeded => Kind::Timeout,
                Code::ResourceExhausted | Code::Unavailable => Kind::Busy,
                _ => Kind::Guest,
            },
            agent::Error::Timeout(_) => Kind::Timeout,
            agent::Error::Unreachable(_) | agent::Error::Protocol(_) => Kind::Guest,
        };
        Error::new(kind, console::printable(error.to_string().as_bytes()))
    }

    fn ended(&self, kind: Kind, end: &End) -> Error {
        let text = format!("sandbox {} has ended: {}", self.id, end.detail);
        Error::new(kind, with_console(&text, end))
    }

    async fn unresponsive(&self) -> Error {
        let text = format!("sandbox {} does not answer any more; delete it if it stays so", self.id);
        Error::new(Kind::Timeout, console::with_tail(&text, &self.tail().await))
    }

    /// The end of its console.
    pub(crate) async fn tail(&self) -> String {
        let path = self.console_path();
        let read = tokio::task::spawn_blocking(move || console::tail(&path, CONSOLE_TAIL as u64));
        read.await.unwrap_or_default()
    }
}

fn with_console(text: &str, end: &End) -> String {
    match end.reason.as_str() {
        "deleted" => text.to_owned(),
        _ => console::with_tail(text, &end.console_tail),
    }
}

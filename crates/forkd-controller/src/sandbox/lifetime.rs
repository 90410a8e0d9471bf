//! A sandbox's time-outs, labels and uses.
//!
//! [`Lifetime`] holds the labels, the idle time-out, the action of time-outs, and the state of pauses and suspends. The
//! deadline is beside it in `SavedState`. Both are parts of the sandbox's record, so the next daemon applies them, too.
//! [`Activity`] holds the last use, in memory only: without a daemon no client can use a sandbox, and the next daemon
//! counts from its own start. `lifecycle::timeouts` acts when a time-out is over.
//!
//! A sandbox that a client of the E2B API pauses is suspended, not paused: see `workspace/e2b.rs`.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forkd_api::{MAX_TIMEOUT_SECS, OnTimeout};
use serde::{Deserialize, Serialize};

use crate::error::{Code, Error, Result};
use crate::sandbox::{End, Phase, RuntimeInfo, Sandbox};
use crate::util::time::now_unix;

/// The most labels of one sandbox.
const MAX_LABELS: usize = 32;
/// The longest name of a label.
const MAX_LABEL_NAME: usize = 63;
/// The longest value of a label, in characters.
const MAX_LABEL_VALUE: usize = 255;

/// The end reason of a sandbox whose deadline passed.
pub(crate) const TIMED_OUT: &str = "timed_out";
/// The end reason of a sandbox that was unused for its idle time-out.
pub(crate) const IDLE: &str = "idle_timed_out";
/// The end reason of a sandbox that was suspended.
pub(crate) const SUSPENDED: &str = "suspended";

/// Labels, idle time-out, and the state of pauses and suspends. A part of the sandbox's record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Lifetime {
    pub(crate) labels: BTreeMap<String, String>,
    /// The idle time-out: the longest time without a use.
    pub(crate) idle_timeout_secs: Option<u64>,
    pub(crate) on_timeout: OnTimeout,
    /// The tag of the snapshot that a suspend on time-out makes.
    pub(crate) suspend_as: Option<String>,
    /// The request that created the sandbox, if it had an idempotency key.
    pub(crate) request: Option<String>,
    /// The idle time-out paused it; the next use resumes it.
    #[serde(rename = "dozing")]
    pub(crate) auto_paused: bool,
    /// It is paused, and the agent had frozen its processes before.
    pub(crate) frozen: bool,
    /// The suspend that is under way.
    pub(crate) suspending: Option<Suspending>,
}

/// A suspend that is not finished. `branch::suspend` describes how the next daemon undoes it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspending {
    /// The tag of the snapshot.
    pub(crate) tag: String,
    /// Whether the suspend pauses the sandbox; set before the pause. In records of earlier versions the same field
    /// means that the snapshot is complete.
    #[serde(rename = "complete")]
    pub(crate) paused: bool,
}

/// Fails unless number, names and values of the labels are within the limits.
pub(crate) fn check_labels(labels: &BTreeMap<String, String>) -> Result<()> {
    if labels.len() > MAX_LABELS {
        let text = format!("there are {} labels, and {MAX_LABELS} is the limit", labels.len());
        return Err(Error::invalid(text));
    }
    for (name, value) in labels {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
        if !(1..=MAX_LABEL_NAME).contains(&name.len()) || !name.bytes().all(plain) {
            let text = format!(
                "labels: the name {name:?} is invalid: use 1 to {MAX_LABEL_NAME} letters, digits, `.`, `_`, `/`, `-`"
            );
            return Err(Error::invalid(text));
        }
        if value.chars().count() > MAX_LABEL_VALUE || value.chars().any(char::is_control) {
            let text = format!(
                "labels: the value of {name} is invalid: use at most {MAX_LABEL_VALUE} printable characters"
            );
            return Err(Error::invalid(text));
        }
    }
    Ok(())
}

/// Checks a time-out of a request; `name` is the name of the field, for the error.
pub(crate) fn check_secs(name: &str, secs: u64) -> Result<Duration> {
    match secs {
        1..=MAX_TIMEOUT_SECS => Ok(Duration::from_secs(secs)),
        _ => Err(Error::invalid(format!("{name} is {secs}; it must be 1 to {MAX_TIMEOUT_SECS}"))),
    }
}

/// Now plus `time_to_live`, in seconds since 1970, rounded up so that the deadline is never early.
pub(crate) fn deadline(time_to_live: Duration) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at = now.saturating_add(time_to_live);
    at.as_secs().saturating_add(u64::from(at.subsec_nanos() > 0))
}

/// Milliseconds on the monotonic clock.
fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

/// The uses of a sandbox, and the time of the last one. The daemon's own pings do not count.
#[derive(Debug)]
pub(crate) struct Activity {
    last_ms: AtomicU64,
    /// How often the sandbox was used.
    uses: AtomicU64,
    /// Uses in progress.
    users: AtomicUsize,
}

impl Activity {
    pub(crate) fn new() -> Arc<Self> {
        let last_ms = AtomicU64::new(now_ms());
        Arc::new(Activity { last_ms, uses: AtomicU64::new(0), users: AtomicUsize::new(0) })
    }

    /// Counts a use.
    pub(crate) fn touch(&self) {
        self.last_ms.store(now_ms(), Ordering::SeqCst);
        self.uses.fetch_add(1, Ordering::SeqCst);
    }

    /// The time since the last use; zero while one is in progress.
    pub(crate) fn idle(&self) -> Duration {
        match self.users.load(Ordering::SeqCst) {
            0 => Duration::from_millis(now_ms().saturating_sub(self.last_ms.load(Ordering::SeqCst))),
            _ => Duration::ZERO,
        }
    }

    /// A stamp that differs from an earlier one if there was a use in between.
    pub(crate) fn stamp(&self) -> (u64, usize) {
        (self.uses.load(Ordering::SeqCst), self.users.load(Ordering::SeqCst))
    }

    /// The time of the last use, in seconds since 1970.
    pub(crate) fn last_unix(&self) -> u64 {
        now_unix().saturating_sub(self.idle().as_secs())
    }
}

/// A use of a sandbox, in progress until it is dropped.
#[derive(Debug)]
pub(crate) struct InUse(Arc<Activity>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.touch();
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Marks a sandbox as being suspended until it is dropped.
pub(crate) struct SuspendGuard<'a>(&'a Sandbox);

impl<'a> SuspendGuard<'a> {
    /// None unless `is_due` says so. Until then a client can lengthen the sandbox's life, and from then on it cannot.
    pub(crate) fn begin_if(sandbox: &'a Sandbox, is_due: impl FnOnce(&RuntimeInfo) -> bool) -> Option<Self> {
        let mut begun = false;
        sandbox.update_runtime(|runtime| {
            begun = is_due(runtime);
            runtime.is_suspending |= begun;
        });
        begun.then(|| SuspendGuard(sandbox))
    }
}

impl Drop for SuspendGuard<'_> {
    fn drop(&mut self) {
        self.0.update_runtime(|runtime| runtime.is_suspending = false);
    }
}

impl Sandbox {
    /// Begins a use that lasts until the guard is dropped. The idle time begins after the last use.
    pub(crate) fn in_use(&self) -> InUse {
        self.activity.users.fetch_add(1, Ordering::SeqCst);
        self.activity.touch();
        InUse(self.activity.clone())
    }

    /// Changes lifetime and deadline, in memory and in the record for the next daemon. Blocks for a moment.
    pub(crate) fn update_lifetime(
        &self,
        change: impl FnOnce(&mut Lifetime, &mut Option<u64>),
    ) -> io::Result<()> {
        self.update_persisted(|runtime| change(&mut runtime.saved.lifetime, &mut runtime.saved.deadline_unix))
    }

    /// Decides whether the daemon ends the sandbox because its time is over. Until then a client can lengthen its life,
    /// and from then on it cannot.
    pub(crate) fn expire_if(&self, is_due: impl FnOnce(&RuntimeInfo) -> bool) -> bool {
        let mut expired = false;
        self.update_runtime(|runtime| {
            runtime.has_expired |= is_due(runtime);
            expired = runtime.has_expired;
        });
        expired
    }

    /// Fails once the daemon has begun to act on the sandbox's time-out: it would undo a client's change of the time.
    /// For changes by `try_update_persisted`, where the check and the change are one step.
    pub(crate) fn check_time_is_open(&self, runtime: &RuntimeInfo) -> Result<()> {
        if runtime.has_expired {
            let text = format!("there is no sandbox {} any more: its time was over", self.id);
            return Err(Error::new(Code::SandboxNotFound, text));
        }
        self.check_not_suspending_in(runtime)
    }

    /// Whether the idle time-out paused it.
    pub(crate) fn is_auto_paused(&self) -> bool {
        matches!(self.phase(), Phase::Paused)
            && self.read_runtime(|runtime| runtime.saved.lifetime.auto_paused)
    }

    /// Resumes the sandbox if its idle time-out paused it.
    pub(crate) async fn auto_resume(&self) -> Result<()> {
        if !self.is_auto_paused() {
            return Ok(());
        }
        let _turn = self.lock_exclusive().await?;
        if self.is_auto_paused() {
            tracing::info!(sandbox = self.id, "auto-paused sandbox resumed by a use");
            self.go_on().await?;
        }
        Ok(())
    }

    /// Records that the sandbox is no longer paused by its idle time-out or by a suspend.
    pub(crate) fn forget_pause(&self) {
        if self.read_runtime(|runtime| {
            !runtime.saved.lifetime.auto_paused && runtime.saved.lifetime.suspending.is_none()
        }) {
            return;
        }
        let written = self.update_lifetime(|lifetime, _| {
            lifetime.auto_paused = false;
            if let Some(suspending) = &mut lifetime.suspending {
                suspending.paused = false;
            }
        });
        if let Err(error) = written {
            tracing::error!(sandbox = self.id, %error, "sandbox record not updated: resumed");
        }
    }

    /// The end to record for a requested end.
    pub(crate) fn end_reason(&self) -> End {
        self.end_reason.get().cloned().unwrap_or_else(End::deleted)
    }
}

#[cfg(test)]
impl Sandbox {
    /// A sandbox without a process, for tests. Must be called in a runtime.
    pub(crate) fn bare(id: &str) -> Self {
        use crate::config::Config;
        use crate::host::Host;
        use crate::sandbox::Spec;
        use crate::sandbox::resources::Resources;
        use crate::telemetry::Telemetry;
        let folder = tempfile::tempdir().unwrap();
        let config = Arc::new(Config::new(folder.path()));
        let database = forkd_store::Database::open(&folder.path().join("forkd.db")).unwrap();
        let host = Host::new(config.clone(), Arc::new(database), Telemetry::open(&config).unwrap());
        let spec = Spec {
            owner: "local".into(),
            image: None,
            snapshot_tag: None,
            forked_from: None,
            vcpus: 1,
            mem_mib: 64,
            network: false,
            memory_limit_mib: 128,
            guest: None,
        };
        Sandbox::new(id.into(), spec, "/nonexistent".into(), Resources::default(), &host)
    }
}

/// The daemon's action on a sandbox whose time is over.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Attempt {
    #[default]
    None,
    UnderWay,
    /// It failed, and is tried again after this time.
    Failed(Instant),
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sandbox::agent_call::AgentCall;

    #[test]
    fn labels_are_few_short_and_printable() {
        let one = |name: &str, value: &str| BTreeMap::from([(name.to_owned(), value.to_owned())]);
        for (name, value) in [("a", ""), ("team/x.y_z-1", "Grüße, 7"), (&"n".repeat(63), &"ü".repeat(255))]
        {
            check_labels(&one(name, value)).unwrap();
        }
        for (name, value) in [
            ("", "x"),
            ("a b", "x"),
            ("a=b", "x"),
            ("ä", "x"),
            ("a", "x\n"),
            ("a", "\u{7f}"),
            (&"n".repeat(64), "x"),
            ("a", &"x".repeat(256)),
        ] {
            assert!(check_labels(&one(name, value)).is_err(), "{name:?} {value:?}");
        }
        let many = |n: usize| (0..n).map(|i| (format!("k{i}"), String::new())).collect();
        check_labels(&many(32)).unwrap();
        assert!(check_labels(&many(33)).unwrap_err().public().contains("33"));
    }

    #[test]
    fn a_sandbox_in_use_is_not_idle() {
        let activity = Activity::new();
        activity.last_ms.store(0, Ordering::SeqCst);
        let before = activity.stamp();
        activity.users.fetch_add(1, Ordering::SeqCst);
        let user = InUse(activity.clone());
        assert_eq!(activity.idle(), Duration::ZERO);
        drop(user);
        assert_ne!(activity.stamp(), before);
        assert_eq!(activity.stamp().1, 0);
    }

    #[tokio::test]
    async fn a_command_keeps_a_sandbox_from_being_idle_until_it_has_ended() {
        let sandbox = Sandbox::bare("sb1");
        let users = || sandbox.activity.stamp().1;
        let before = sandbox.activity.stamp().0;
        let meanwhile =
            AgentCall::COMMAND.run(&sandbox, async { Ok((users(), sandbox.activity.idle())) }).await;
        assert_eq!(meanwhile.unwrap(), (1, Duration::ZERO));
        assert_eq!(users(), 0);
        assert!(sandbox.activity.stamp().0 > before);
    }

    #[test]
    fn a_record_without_a_life_has_an_ordinary_one() {
        assert_eq!(serde_json::from_str::<Lifetime>("{}").unwrap(), Lifetime::default());
        assert_eq!(Lifetime::default().on_timeout, OnTimeout::Kill);
    }
}

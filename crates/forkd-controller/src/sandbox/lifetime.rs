//! How long a sandbox lives and what is written on it: time-outs, labels, and who used it when.
//!
//! What is asked for is in [`Lifetime`], a part of the sandbox's record, so that the next daemon goes by it. When
//! it was last used is in [`Activity`], in memory only: while no daemon runs nobody can use a sandbox, and
//! the next one counts from its own start. What is done when a time is over is `timeouts`'.

use std::collections::BTreeMap;
use std::io;
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, LazyLock};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

use forkd_api::OnTimeout;
use serde::{Deserialize, Serialize};

use crate::error::{Error, Result};
use crate::sandbox::{End, Phase, Sandbox};
use crate::util::time::now_unix;

/// The longest time-out: 30 days.
pub(crate) const MAX_TIMEOUT_SECS: u64 = 30 * 24 * 3600;
/// The most labels of one sandbox.
const MAX_LABELS: usize = 32;
/// The longest name of a label.
const MAX_LABEL_NAME: usize = 63;
/// The longest value of a label, in characters.
const MAX_LABEL_VALUE: usize = 255;

/// The reason of a sandbox that lived as long as it was to.
pub(crate) const TIMED_OUT: &str = "timed_out";
/// The reason of a sandbox that nobody used for as long as it was to wait.
pub(crate) const IDLE: &str = "idle_timed_out";
/// The reason of a sandbox that was put away.
pub(crate) const SUSPENDED: &str = "suspended";

/// What its maker wants of a sandbox's life, and how far that is. A part of its record.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Lifetime {
    pub(crate) labels: BTreeMap<String, String>,
    /// Nobody may leave it unused for longer.
    pub(crate) idle_timeout_secs: Option<u64>,
    pub(crate) on_timeout: OnTimeout,
    /// The snapshot it is to be stored as.
    pub(crate) suspend_as: Option<String>,
    /// The request that made it, if that came with an idempotency key.
    pub(crate) request: Option<String>,
    /// It was paused because nobody used it: whoever uses it lets it go on.
    #[serde(rename = "dozing")]
    pub(crate) auto_paused: bool,
    /// It is paused, and its processes were frozen before.
    pub(crate) frozen: bool,
    /// The snapshot it is being stored as.
    pub(crate) suspending: Option<Suspending>,
}

/// A suspend that is not finished: `suspend` says what the next daemon does about it.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Suspending {
    /// The snapshot it is being stored as.
    pub(crate) tag: String,
    /// Whether the suspend pauses it. Earlier versions have the same field: the snapshot is all of it then.
    #[serde(rename = "complete")]
    pub(crate) paused: bool,
}

/// Whether labels are what they may be.
pub(crate) fn check_labels(labels: &BTreeMap<String, String>) -> Result<()> {
    if labels.len() > MAX_LABELS {
        let text = format!("there are {} labels, and {MAX_LABELS} is the limit", labels.len());
        return Err(Error::invalid(text));
    }
    for (name, value) in labels {
        let plain = |byte: u8| byte.is_ascii_alphanumeric() || b"._/-".contains(&byte);
        if !(1..=MAX_LABEL_NAME).contains(&name.len()) || !name.bytes().all(plain) {
            let text = format!(
                "labels: the name {name:?} cannot be: 1 to {MAX_LABEL_NAME} of letters, digits, `.`, `_`, `/`, `-`"
            );
            return Err(Error::invalid(text));
        }
        if value.chars().count() > MAX_LABEL_VALUE || value.chars().any(char::is_control) {
            let text = format!(
                "labels: the value of {name} cannot be: at most {MAX_LABEL_VALUE} printable characters"
            );
            return Err(Error::invalid(text));
        }
    }
    Ok(())
}

/// A time-out as a request gave it; `name` is the field's.
pub(crate) fn check_secs(name: &str, secs: u64) -> Result<Duration> {
    match secs {
        1..=MAX_TIMEOUT_SECS => Ok(Duration::from_secs(secs)),
        _ => Err(Error::invalid(format!("{name} is {secs}; it must be 1 to {MAX_TIMEOUT_SECS}"))),
    }
}

/// The time in `time_to_live`, in whole seconds since 1970: not a moment too early.
pub(crate) fn deadline(time_to_live: Duration) -> u64 {
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let at = now.saturating_add(time_to_live);
    at.as_secs().saturating_add(u64::from(at.subsec_nanos() > 0))
}

/// Milliseconds on a clock nobody can set.
fn now_ms() -> u64 {
    static START: LazyLock<Instant> = LazyLock::new(Instant::now);
    START.elapsed().as_millis() as u64
}

/// Who uses a sandbox, and when somebody last did. The daemon's own pings are none.
#[derive(Debug)]
pub(crate) struct Activity {
    last_ms: AtomicU64,
    /// How often it was used.
    uses: AtomicU64,
    /// How many use it now.
    users: AtomicUsize,
}

impl Activity {
    pub(crate) fn new() -> Arc<Self> {
        let last_ms = AtomicU64::new(now_ms());
        Arc::new(Activity { last_ms, uses: AtomicU64::new(0), users: AtomicUsize::new(0) })
    }

    /// Notes that somebody uses it.
    pub(crate) fn touch(&self) {
        self.last_ms.store(now_ms(), Ordering::SeqCst);
        self.uses.fetch_add(1, Ordering::SeqCst);
    }

    /// For how long nobody has.
    pub(crate) fn idle(&self) -> Duration {
        match self.users.load(Ordering::SeqCst) {
            0 => Duration::from_millis(now_ms().saturating_sub(self.last_ms.load(Ordering::SeqCst))),
            _ => Duration::ZERO,
        }
    }

    /// Another one if somebody used it in between.
    pub(crate) fn stamp(&self) -> (u64, usize) {
        (self.uses.load(Ordering::SeqCst), self.users.load(Ordering::SeqCst))
    }

    /// When it was last used, in seconds since 1970.
    pub(crate) fn last_unix(&self) -> u64 {
        now_unix().saturating_sub(self.idle().as_secs())
    }
}

/// Somebody uses a sandbox, as long as this lives.
#[derive(Debug)]
pub(crate) struct InUse(Arc<Activity>);

impl Drop for InUse {
    fn drop(&mut self) {
        self.0.touch();
        self.0.users.fetch_sub(1, Ordering::SeqCst);
    }
}

/// A sandbox that is being stored, to be ended then. Dropping it says that this is over.
pub(crate) struct SuspendGuard<'a>(&'a Sandbox);

impl<'a> SuspendGuard<'a> {
    pub(crate) fn begin(sandbox: &'a Sandbox) -> Self {
        sandbox.update_runtime(|facts| facts.is_suspending = true);
        SuspendGuard(sandbox)
    }
}

impl Drop for SuspendGuard<'_> {
    fn drop(&mut self) {
        self.0.update_runtime(|facts| facts.is_suspending = false);
    }
}

impl Sandbox {
    /// To be held by whoever uses it: its idle time begins when nobody does.
    pub(crate) fn in_use(&self) -> InUse {
        self.activity.users.fetch_add(1, Ordering::SeqCst);
        self.activity.touch();
        InUse(self.activity.clone())
    }

    /// Changes how it is to live and when it is to end, here and for the next daemon. Blocks for a moment.
    pub(crate) fn amend(&self, change: impl FnOnce(&mut Lifetime, &mut Option<u64>)) -> io::Result<()> {
        self.rewrite(|facts| change(&mut facts.saved.lifetime, &mut facts.saved.deadline_unix))
    }

    /// Whether it was paused because nobody used it.
    pub(crate) fn is_auto_paused(&self) -> bool {
        matches!(self.phase(), Phase::Paused) && self.read_runtime(|facts| facts.saved.lifetime.auto_paused)
    }

    /// Lets it go on if it was paused because nobody used it.
    pub(crate) async fn auto_resume(&self) -> Result<()> {
        if !self.is_auto_paused() {
            return Ok(());
        }
        let _turn = self.lock_exclusive().await?;
        if self.is_auto_paused() {
            tracing::info!(sandbox = self.id, "somebody uses it; it goes on");
            self.go_on().await?;
        }
        Ok(())
    }

    /// It is paused no more, or for another reason.
    pub(crate) fn forget_pause(&self) {
        if self.read_runtime(|facts| {
            !facts.saved.lifetime.auto_paused && facts.saved.lifetime.suspending.is_none()
        }) {
            return;
        }
        let written = self.amend(|lifetime, _| {
            lifetime.auto_paused = false;
            if let Some(suspending) = &mut lifetime.suspending {
                suspending.paused = false;
            }
        });
        if let Err(error) = written {
            tracing::error!(sandbox = self.id, %error, "cannot write down that it goes on");
        }
    }

    /// How it ends when it is asked to.
    pub(crate) fn end_reason(&self) -> End {
        self.end_reason.get().cloned().unwrap_or_else(End::deleted)
    }
}

#[cfg(test)]
impl Sandbox {
    /// One without a process, to look at. In a runtime only.
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
            vcpus: 1,
            mem_mib: 64,
            network: false,
            memory_limit_mib: 128,
            guest: None,
        };
        Sandbox::new(id.into(), spec, "/nonexistent".into(), Resources::default(), &host)
    }
}

/// Whether something is being done about a sandbox whose time is over.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) enum Attempt {
    #[default]
    None,
    UnderWay,
    /// It failed; not to be tried again before.
    Failed(Instant),
}

#[cfg(test)]
mod tests {
    use super::*;

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
    fn whoever_uses_it_keeps_it_from_being_idle() {
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
        let meanwhile = sandbox.with_agent(async { Ok((users(), sandbox.activity.idle())) }).await;
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

//! The state that the E2B API keeps for a sandbox: what its client gave, and the tokens it got.
//!
//! It is a part of the sandbox's record, and of the record of its workspace while the sandbox is paused on disk. So
//! it survives the daemon, and a paused one survives the host's boot. `compat::e2b` gives it its meaning.

use std::collections::BTreeMap;

use forkd_api::OnTimeout;
use serde::{Deserialize, Serialize};

use crate::sandbox::lifetime::Lifetime;

/// The time-out of a request that gives none, in seconds.
pub(crate) const DEFAULT_TIMEOUT_SECS: u64 = 300;

/// See the module's page.
#[derive(Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct E2bState {
    /// The template's name, as the client gave it.
    pub(crate) template: String,
    pub(crate) metadata: BTreeMap<String, String>,
    /// Variables of every process, without those that the daemon adds.
    pub(crate) envs: BTreeMap<String, String>,
    /// The secret for the sandbox's processes and files.
    pub(crate) access_token: String,
    /// The secret for its other ports, where those are not public.
    pub(crate) traffic_token: String,
    /// Whether clients reach its other ports without the secret.
    pub(crate) public_traffic: bool,
    /// Whether its deadline pauses it; otherwise the deadline ends it.
    pub(crate) auto_pause: bool,
    /// Whether a pause at its deadline keeps its memory.
    pub(crate) keeps_memory: bool,
    /// Whether a request wakes it when it is paused.
    pub(crate) auto_resume: bool,
    /// The last time-out, in seconds: a wake sets it again.
    pub(crate) timeout_secs: u64,
    /// When it was first started; a resume does not change that.
    pub(crate) started_at_unix_ms: u64,
}

impl E2bState {
    /// The variables of every process in the sandbox `id`.
    pub(crate) fn variables(&self, id: &str) -> BTreeMap<String, String> {
        let own = [("E2B_SANDBOX", "true"), ("E2B_SANDBOX_ID", id), ("E2B_TEMPLATE_ID", &self.template)];
        let own = own.map(|(name, value)| (name.to_owned(), value.to_owned()));
        own.into_iter().chain(self.envs.clone()).collect()
    }

    /// How long the sandbox lives after a resume whose client gives no time, in seconds. The time-out that ended its last
    /// life at once is none.
    pub(crate) fn resume_secs(&self) -> u64 {
        if self.timeout_secs == 0 { DEFAULT_TIMEOUT_SECS } else { self.timeout_secs }
    }

    /// The lifetime of a sandbox that starts now.
    pub(crate) fn lifetime(&self) -> Lifetime {
        let on_timeout = if self.auto_pause { OnTimeout::Suspend } else { OnTimeout::Kill };
        Lifetime { on_timeout, ..Lifetime::default() }
    }
}

/// Without the secrets.
impl std::fmt::Debug for E2bState {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("E2bState").field("template", &self.template).finish_non_exhaustive()
    }
}

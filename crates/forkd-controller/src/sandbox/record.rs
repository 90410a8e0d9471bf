//! What is written down of a sandbox: what it is, what was done to it, and how it ended.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::auth::quota::Claim;
use crate::error::Error;
use crate::sandbox::lifetime::{IDLE, Lifetime, SUSPENDED, TIMED_OUT};
use crate::util::records::{self, Found, VersionedRecord};

/// The file in a forked sandbox's folder that says what it is.
pub(crate) const RECORD: &str = "sandbox.json";
/// The file in a forked sandbox's folder that says how it ended.
pub(crate) const END: &str = "end.json";
/// The reason of an end that is none of the sandbox, only of its process.
pub(crate) const ROLLED_BACK: &str = "rolled_back";

/// What a sandbox is.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// Whose it is.
    #[serde(default = "crate::auth::principal::local_owner")]
    pub(crate) owner: String,
    /// The image it has; none for a bare guest, which has no agent, either.
    pub(crate) image: Option<String>,
    /// The snapshot it was forked from.
    pub(crate) snapshot_tag: Option<String>,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    pub(crate) network: bool,
    /// What its monitor may use; where the host has cgroups.
    pub(crate) memory_limit_mib: u64,
    /// All that a snapshot of it is to say; none for one that an older version made.
    #[serde(default)]
    pub(crate) guest: Option<forkd_store::GuestSpec>,
}

impl Spec {
    /// Whether only its kernel can say that it runs.
    pub(crate) fn is_bare(&self) -> bool {
        self.image.is_none()
    }
}

/// What was done to a sandbox since it was made.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct History {
    /// How many branches were taken of it.
    pub(crate) branch_count: u64,
    /// The last one.
    pub(crate) last_branch_tag: Option<String>,
    /// The snapshot it was last taken back to.
    pub(crate) rolled_back_to: Option<String>,
    /// The port of loopback that was opened for it (`line`).
    #[serde(default)]
    pub(crate) line_port: Option<u16>,
}

impl Spec {
    /// What it counts towards its owner's quota.
    pub(crate) fn claim(&self) -> Claim {
        Claim { owner: self.owner.clone(), mem_mib: self.mem_mib }
    }
}

/// What changes while a sandbox runs and the next daemon must know. It is a part of [`RuntimeInfo`] and of the record:
/// a new field goes here only, with `serde(default)`, and into the newest example in `tests/golden`.
///
/// [`RuntimeInfo`]: crate::sandbox::RuntimeInfo
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct SavedState {
    /// When its time is over.
    pub(crate) deadline_unix: Option<u64>,
    /// Whether its image has a Python.
    pub(crate) python: Option<bool>,
    pub(crate) history: History,
    /// The workspace whose sandbox it is.
    pub(crate) workspace: Option<String>,
    #[serde(rename = "life")]
    pub(crate) lifetime: Lifetime,
}

/// What the next daemon needs to know of a sandbox. Written before a fork is asked for, and after a boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxRecord {
    /// Its template; empty for one that was booted.
    pub(crate) template: String,
    /// The number of its lineage.
    pub(crate) lineage: u32,
    /// The name of its lineage's cgroup.
    pub(crate) cgroup: String,
    pub(crate) spec: Spec,
    pub(crate) created_at_unix: u64,
    /// The part of that second.
    #[serde(default)]
    pub(crate) created_nanos: u32,
    /// Its network slot.
    pub(crate) netns: Option<String>,
    /// How often it was taken back: each time its process is another one.
    #[serde(default)]
    pub(crate) generation: u32,
    /// What its agent is told beside its name: again, when it is taken back.
    #[serde(default)]
    pub(crate) envs: BTreeMap<String, String>,
    #[serde(flatten)]
    pub(crate) saved: SavedState,
}

impl SandboxRecord {
    /// Whether no template forked it.
    pub(crate) fn is_booted(&self) -> bool {
        self.template.is_empty()
    }

    /// What the sandbox `id` is called in its template and in its lineage's cgroup: no two processes
    /// have the same name there, and a sandbox that is taken back has one after the other.
    pub(crate) fn child(&self, id: &str) -> String {
        child_name(id, self.generation)
    }

    /// That of the sandbox in `folder`.
    pub(crate) fn read(folder: &Path) -> Found<Self> {
        records::read(folder)
    }

    /// Writes it into `folder`, whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        records::write(self, folder)
    }
}

impl VersionedRecord for SandboxRecord {
    const FILE: &'static str = RECORD;
}

/// See [`SandboxRecord::child`].
pub(crate) fn child_name(id: &str, generation: u32) -> String {
    match generation {
        0 => id.to_owned(),
        generation => format!("{id}-{generation}"),
    }
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
    /// What only the operator may read of it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cause: Option<String>,
}

impl End {
    pub(crate) fn new(reason: &str, detail: impl Into<String>, console_tail: String) -> Self {
        End { reason: reason.into(), detail: detail.into(), console_tail, cause: None }
    }

    /// One that `error` is the reason for.
    pub(crate) fn failed(reason: &str, error: &Error, console_tail: String) -> Self {
        End { cause: error.private(), ..End::new(reason, error.public(), console_tail) }
    }

    /// `error` with the cause of this end.
    pub(crate) fn because(&self, error: Error) -> Error {
        match &self.cause {
            Some(cause) => error.because(cause.clone()),
            None => error,
        }
    }

    pub(crate) fn deleted() -> Self {
        End::new("deleted", "the sandbox was deleted", String::new())
    }

    /// Whether it is what somebody asked for, and leaves no trace in its folder.
    pub(crate) fn is_requested(&self) -> bool {
        matches!(self.reason.as_str(), "deleted" | TIMED_OUT | IDLE | SUSPENDED)
    }

    /// That which was written down in `folder`.
    pub(crate) fn read(folder: &Path) -> Found<Self> {
        records::read(folder)
    }

    /// Writes it down in `folder`, whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        records::write(self, folder)
    }

    /// That of a process whose place another one takes.
    pub(crate) fn rolled_back() -> Self {
        End::new(ROLLED_BACK, "the sandbox was rolled back", String::new())
    }
}

impl VersionedRecord for End {
    const FILE: &'static str = END;
}

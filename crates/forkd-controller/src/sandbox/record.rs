//! The files of a sandbox's folder: its record (spec, history, saved state) and its end.

use std::collections::BTreeMap;
use std::io;
use std::path::Path;

use serde::{Deserialize, Serialize};

use crate::auth::quota::Claim;
use crate::error::Error;
use crate::sandbox::Sandbox;
use crate::sandbox::e2b::E2bState;
use crate::sandbox::lifetime::{IDLE, Lifetime, SUSPENDED, TIMED_OUT};
use crate::util::records::{self, Found, VersionedRecord};

/// The file of the record in a sandbox's folder.
pub(crate) const RECORD: &str = "sandbox.json";
/// The file of the end in a sandbox's folder.
pub(crate) const END: &str = "end.json";
/// The end reason of a process that a rollback replaced; the sandbox itself continues.
pub(crate) const ROLLED_BACK: &str = "rolled_back";

/// The fixed properties of a sandbox.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Spec {
    /// The owner's name.
    #[serde(default = "crate::auth::principal::local_owner")]
    pub(crate) owner: String,
    /// Its image; `None` for a bare guest, which has no agent either.
    pub(crate) image: Option<String>,
    /// The tag of the snapshot it was forked from.
    pub(crate) snapshot_tag: Option<String>,
    /// The running sandbox it was forked from; it has no `snapshot_tag` then.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) forked_from: Option<String>,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    pub(crate) network: bool,
    /// The memory limit of its cgroup, where the host has cgroups.
    pub(crate) memory_limit_mib: u64,
    /// The guest as its snapshots describe it; `None` if an older version created the sandbox.
    #[serde(default)]
    pub(crate) guest: Option<forkd_store::GuestSpec>,
}

impl Spec {
    /// Whether it was booted, and neither forked nor rolled back.
    pub(crate) fn is_booted(&self) -> bool {
        self.snapshot_tag.is_none() && self.forked_from.is_none()
    }

    /// Whether it is a bare kernel without an agent.
    pub(crate) fn is_bare(&self) -> bool {
        self.image.is_none()
    }
}

/// What was done to a sandbox since its creation.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct History {
    /// The number of branches taken.
    pub(crate) branch_count: u64,
    /// The tag of the last branch.
    pub(crate) last_branch_tag: Option<String>,
    /// The tag of the snapshot of its last rollback.
    pub(crate) rolled_back_to: Option<String>,
    /// The loopback port that was opened for it (`line`).
    #[serde(default)]
    pub(crate) line_port: Option<u16>,
}

impl Spec {
    /// Its share of the owner's quota.
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
    /// Its deadline.
    pub(crate) deadline_unix: Option<u64>,
    /// Whether its image has a Python.
    pub(crate) python: Option<bool>,
    pub(crate) history: History,
    /// The workspace it belongs to.
    pub(crate) workspace: Option<String>,
    #[serde(rename = "life")]
    pub(crate) lifetime: Lifetime,
    /// The state of the E2B API, if a client of that API made the sandbox.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) e2b: Option<Box<E2bState>>,
}

/// What the next daemon needs to adopt a sandbox. Written before the request to fork, and after a boot.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct SandboxRecord {
    /// The id of its template; empty for a booted sandbox.
    pub(crate) template: String,
    /// The number of its lineage.
    pub(crate) lineage: u32,
    /// The name of its lineage's cgroup.
    pub(crate) cgroup: String,
    pub(crate) spec: Spec,
    pub(crate) created_at_unix: u64,
    /// The nanoseconds within that second.
    #[serde(default)]
    pub(crate) created_nanos: u32,
    /// The name of its network slot.
    pub(crate) netns: Option<String>,
    /// The number of rollbacks: each replaces the process.
    #[serde(default)]
    pub(crate) generation: u32,
    /// The variables that the agent gets with the sandbox's id, after a fork and again after a rollback.
    #[serde(default)]
    pub(crate) envs: BTreeMap<String, String>,
    #[serde(flatten)]
    pub(crate) saved: SavedState,
}

impl SandboxRecord {
    /// The record of `sandbox`, whose process is in the lineage `lineage` with the cgroup `cgroup`.
    pub(crate) fn new(sandbox: &Sandbox, lineage: u32, cgroup: &str, saved: SavedState) -> Self {
        SandboxRecord {
            template: String::new(),
            lineage,
            cgroup: cgroup.to_owned(),
            spec: sandbox.spec.clone(),
            created_at_unix: sandbox.created_at_unix(),
            created_nanos: sandbox.created_nanos(),
            netns: sandbox.read_runtime(|runtime| runtime.netns.clone()),
            generation: 0,
            envs: BTreeMap::new(),
            saved,
        }
    }

    /// Whether it was booted, not forked from a template.
    pub(crate) fn is_booted(&self) -> bool {
        self.template.is_empty()
    }

    /// The name of the process of the sandbox `id` in its template and in its lineage's cgroup. Names are unique
    /// there, so every rollback of a sandbox gives it a new one.
    pub(crate) fn child(&self, id: &str) -> String {
        child_name(id, self.generation)
    }

    /// Reads the record of the sandbox in `folder`.
    pub(crate) fn read(folder: &Path) -> Found<Self> {
        records::read(folder)
    }

    /// Writes the record into `folder`, whole or not at all.
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
    /// The reason, as one word for programs.
    pub(crate) reason: String,
    /// The reason, as a sentence for people.
    pub(crate) detail: String,
    /// The last lines of its console.
    pub(crate) console_tail: String,
    /// The cause, which only the operator may read.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) cause: Option<String>,
}

impl End {
    pub(crate) fn new(reason: &str, detail: impl Into<String>, console_tail: String) -> Self {
        End { reason: reason.into(), detail: detail.into(), console_tail, cause: None }
    }

    /// An end because of `error`.
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

    /// Whether a client or a time-out asked for this end. Such an end is not written into the folder.
    pub(crate) fn is_requested(&self) -> bool {
        matches!(self.reason.as_str(), "deleted" | TIMED_OUT | IDLE | SUSPENDED)
    }

    /// Reads the end in `folder`.
    pub(crate) fn read(folder: &Path) -> Found<Self> {
        records::read(folder)
    }

    /// Writes the end into `folder`, whole or not at all.
    pub(crate) fn write(&self, folder: &Path) -> io::Result<()> {
        records::write(self, folder)
    }

    /// The end of a process that a rollback replaces.
    pub(crate) fn rolled_back() -> Self {
        End::new(ROLLED_BACK, "the sandbox was rolled back", String::new())
    }
}

impl VersionedRecord for End {
    const FILE: &'static str = END;
}

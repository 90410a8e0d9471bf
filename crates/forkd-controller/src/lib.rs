//! The daemon: REST and WebSocket API, authentication, and the life of sandboxes.
//!
//! It owns the data directory, starts monitor processes and hands them descriptors, talks to the
//! agents inside, and ends what it started. It knows no KVM and no device, builds no image, and
//! believes nothing a guest or a monitor says.
//!
//! From top to bottom: [`serve`] listens; `api` and `session` are what clients see. `registry` knows all
//! sandboxes, `sandbox` is one as requests see it, and `keeper` its life. `snapshots` knows all
//! snapshots and the template each has, `making` makes one, `template` is one process to fork from, and
//! `spawn` forks. `branch` forks a template off a sandbox, and `persist` brings it to disk; `rollback` takes
//! a sandbox back; `line` is how clients of the reference speak with one; `workspaces` are sandboxes with a
//! name, and `tree` says who came from whom. `life` is what is asked of a sandbox's life and `timeouts` has it
//! end in time; `suspend` stores one and ends it; `ledger` remembers those that are gone. `adopt` takes over what an
//! earlier daemon left, by `records`, and `unknown` keeps what it cannot read. Below
//! them `monitor` is a process of a VM, `link` the connection to
//! one, [`agent`] the client of the inside, `guest` what is asked of it; and `host` holds what all share:
//! user ids and cgroups (`lineage`, `cgroup`), who is killed first (`oom`), `network`, the `janitor` who takes things away, and what is
//! told about all of it (`telling`).
//! [`frames`] is the wire of `forkd run` and `forkd shell`, shared with the command; `session` speaks it.
//!
//! Who gets in: `auth` finds out who sent a request (`identity`, by `tokens`, slowed by `rate`), `access` what
//! they may do, and `visit` keeps who may only look from waking anything; `ownership` is whose snapshots are,
//! `quota` how much each may have, `allowed` which files requests may name, `tls` the certificate, and `refresh`
//! reads again what is replaced. `refusal` has words for what is no request at all; `descriptors` says for how
//! many sandboxes there are files to open.
//!
//! What goes wrong: `error` is a failure with its cause, `code` what a program reads of it, and `api::error` the
//! body a client gets.

pub mod agent;
mod api;
mod auth;
mod branch;
mod client_stream;
mod compat;
mod config;
mod error;
mod exec;
#[cfg(test)]
mod fake_guest;
#[cfg(test)]
mod fake_process;
pub mod frames;

mod host;
mod lifecycle;
mod lock;
mod monitor;
mod network;
mod refresh;
mod refusal;
mod sandbox;
mod server;
mod snapshot;
mod telemetry;
mod tls;
mod util;
mod workspace;

pub use api::error::ErrorBody;
pub use api::{
    BranchRequest, CompactRequest, CreateRequest, EvalReply, EvalRequest, ExecReply, ExecRequest, FileInfo,
    FileKind, FileList, FileWritten, GoneInfo, Health, LayerInfo, LinePort, NewToken, OwnerRequest,
    PauseInfo, PingReply, Progress, RollbackRequest, SandboxInfo, SandboxState, SnapshotInfo,
    SnapshotInfoDetail, SnapshotPhase, SnapshotRequest, SnapshotStatus, SpawnError, SpawnReply, Stats,
    SuspendRequest, TemplateInfo, TokenInfo, TokenRequest, TokenScope, Tree, TreeHow, TreeKind, TreeNode,
    UpdateRequest, VersionInfo, WorkspaceInfo, WorkspaceRequest, WorkspaceStatus, openapi,
};
pub use config::{Config, DEFAULT_DATA_DIR, DEFAULT_PORT, DEFAULT_SOCKET, Limits, Timing, TlsFiles};
pub use error::{Code, Error, Result, Retry};
pub use sandbox::lifetime::OnTimeout;
pub use server::{Ready, serve, serve_until};
pub use telemetry::events::{About, Event, EventKind};
pub use util::time as clock;

/// The version of this daemon.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

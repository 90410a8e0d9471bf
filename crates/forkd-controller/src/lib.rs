//! The daemon: REST and WebSocket API, authentication, and the life of sandboxes.
//!
//! It owns the data directory, starts monitor processes and hands them descriptors, talks to the
//! agents inside, and ends what it started. It knows no KVM and no device, builds no image, and
//! believes nothing a guest or a monitor says.
//!
//! From top to bottom: [`serve`] listens; `api` and `run` are what clients see. `registry` knows all
//! sandboxes, `sandbox` is one as requests see it, and `keeper` its life. `snapshots` knows all
//! snapshots and the template each has, `making` makes one, `template` is one process to fork from, and
//! `spawn` forks. `branch` forks a template off a sandbox, and `persist` brings it to disk; `rollback` takes
//! a sandbox back; `workspaces` are sandboxes with a name, and `tree` says who came from whom. `adopt` takes
//! over what an earlier daemon left. Below them `monitor` is a process of a VM, `link` the connection to
//! one, [`agent`] the client of the inside, `guest` what is asked of it; and `host` holds what all share:
//! user ids and cgroups (`lineage`, `cgroup`), `network`, and the `janitor` who takes things away.
//! [`frames`] is the wire of `forkd run`, shared with the command.

mod adopt;
pub mod agent;
mod api;
mod assets;
mod auth;
mod boot;
mod branch;
mod cgroup;
mod command;
mod compact;
mod companion;
mod config;
mod console;
mod count;
mod error;
pub mod frames;
mod guest;
mod host;
mod janitor;
mod keeper;
mod leftovers;
mod lineage;
mod link;
mod loading;
mod lock;
mod making;
mod monitor;
mod network;
mod persist;
mod process;
mod registry;
mod retention;
mod rollback;
mod run;
mod run_dir;
mod sandbox;
mod server;
mod snapshots;
mod spawn;
mod stats;
mod stopping;
mod template;
mod tree;
mod unix_socket;
mod workspaces;

pub use api::{
    BranchRequest, CompactRequest, CreateRequest, EvalReply, EvalRequest, ExecReply, ExecRequest, Health,
    LayerInfo, PingReply, Progress, RollbackRequest, SandboxInfo, SandboxState, SnapshotInfo,
    SnapshotInfoDetail, SnapshotPhase, SnapshotRequest, SnapshotStatus, SpawnError, SpawnReply, Stats,
    SuspendRequest, TemplateInfo, Tree, TreeHow, TreeKind, TreeNode, VersionInfo, WorkspaceInfo,
    WorkspaceRequest, WorkspaceStatus, openapi,
};
pub use config::{Config, DEFAULT_DATA_DIR, DEFAULT_PORT, DEFAULT_SOCKET, Limits, Timing};
pub use error::{Error, ErrorBody, Kind, Result};
pub use server::{Ready, serve, serve_until};

/// The version of this daemon.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

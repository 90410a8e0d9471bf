//! The daemon: REST and WebSocket API, authentication, and the life of sandboxes.
//!
//! It owns the data directory, starts one monitor process per sandbox and hands it descriptors,
//! talks to the agent inside, and ends what it started. It knows no KVM and no device, builds no
//! image, and believes nothing a guest or a monitor says.
//!
//! From top to bottom: [`serve`] listens; `api` and `run` are what clients see; `registry` knows
//! all sandboxes; `sandbox` is the life of one; `monitor` is its process; [`agent`] talks to the
//! inside. [`frames`] is the wire of `forkd run`, shared with the command.

pub mod agent;
mod api;
mod assets;
mod auth;
mod boot;
mod companion;
mod config;
mod console;
mod count;
mod error;
pub mod frames;
mod lock;
mod monitor;
mod process;
mod registry;
mod run;
mod sandbox;
mod server;
mod stopping;
mod unix_socket;

pub use api::{
    CreateRequest, EvalReply, EvalRequest, ExecReply, ExecRequest, Health, SandboxInfo, SandboxState,
    VersionInfo, openapi,
};
pub use config::{Config, DEFAULT_DATA_DIR, DEFAULT_PORT, DEFAULT_SOCKET, Limits, Timing};
pub use error::{Error, ErrorBody, Kind, Result};
pub use server::{Ready, serve, serve_until};

/// The version of this daemon.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

//! The daemon: REST and WebSocket API, authentication, and the lifecycle of sandboxes.
//!
//! The daemon owns the data directory, starts monitor processes, passes descriptors to them, calls the agents in
//! guests, and ends the processes it started. It has no code for KVM or devices, builds no image, and trusts nothing
//! that a guest or a monitor sends.
//!
//! Each folder is a room with one subject. Every room may import `config` and `error`. The other rooms import only rooms
//! below themselves in this list; `scripts/layers.py` checks that.
//!
//! | room | what is in it |
//! |---|---|
//! | [`config`](Config), `error` | the daemon's settings; errors with their codes |
//! | `daemon` | start, stop, listeners, TLS, reload |
//! | `api` | HTTP only: routes, middleware, the OpenAPI document |
//! | `compat` | wire protocols of other systems: the JSON-lines protocol of the reference's agent; the E2B API; MCP |
//! | `exec` | commands in a sandbox: run, eval, streams |
//! | `lifecycle` | what happens without a request: time-outs, a full disk |
//! | `workspace` | sandboxes with a name that outlive a reboot |
//! | `branch` | forking a template off a running sandbox, and suspending one |
//! | `sandbox` | one sandbox and all sandboxes: state, supervisor, spawn, rollback, adoption |
//! | `snapshot` | all snapshots and their templates: create, load, save, compact, gc |
//! | `auth` | principals, tokens, policy, quotas, rate limits |
//! | [`agent`] | the client of the agent in a guest |
//! | `monitor` | one monitor process and its control socket |
//! | `host` | images, user ids, cgroups, files and processes of this machine |
//! | `network` | network slots of sandboxes |
//! | `telemetry` | metrics, events, the audit log, traces |
//! | `util` | tasks, time, random numbers, records on disk |
//! | `testing` | a fake guest and a fake monitor, for unit tests |

pub mod agent;
mod api;
mod auth;
mod branch;
mod compat;
mod config;
mod daemon;
mod error;
mod exec;
mod host;
mod lifecycle;
mod monitor;
mod network;
mod sandbox;
mod snapshot;
mod telemetry;
#[cfg(test)]
mod testing;
mod util;
mod workspace;

pub use api::openapi;
pub use config::{Config, DEFAULT_DATA_DIR, DEFAULT_PORT, DEFAULT_SOCKET, Limits, Timing, TlsFiles};
pub use daemon::{Ready, serve, serve_until};
pub use error::{Error, Result};
pub use util::time as clock;

/// The version of this daemon.
pub const VERSION: &str = env!("CARGO_PKG_VERSION");

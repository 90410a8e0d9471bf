//! Benchmarks of forkd's claims on speed and memory, measured to the moment a user cares about.
//!
//! One definition of time holds in every case: from the request for `n` children until that child has
//! answered. Numbers are compared within one run on one host, as ratios to the floor.
//!
//! - [`floor`]: the least a host can do: `fork(2)`, a VM built by bare KVM calls, its first `out`;
//! - [`guest`]: the tiny guest the floor and the real path run;
//! - [`firecracker`]: the same fan-out with another monitor;
//! - [`host`]: the conditions of a run, and the memory of processes;
//! - [`burst`]: the figures of one fan-out, and of several together;
//! - [`report`]: lines, table, and whether the goals are met; [`chart`]: pictures of the same lines;
//! - [`e2b`]: the lines, the table and the goals of the E2B API.
//!
//! The `forkd bench` command drives it. Cases that need the daemon are there: this crate knows nothing of
//! HTTP, tags or the emulated machine.

pub mod bare;
pub mod branch;
pub mod burst;
pub mod chart;
pub mod e2b;
pub mod firecracker;
pub mod floor;
pub mod guest;
pub mod host;
pub mod report;
pub mod writer;

/// Why a measurement could not be made.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// A call to the system failed.
    #[error("cannot {what}: {source}")]
    System {
        /// What was to be done.
        what: String,
        /// Why it was not.
        source: std::io::Error,
    },
    /// A call to KVM failed.
    #[error(transparent)]
    Vmm(#[from] forkd_vmm::Error),
    /// What was asked for cannot be measured, or what came back makes no sense.
    #[error("{0}")]
    Invalid(String),
}

/// This crate's results.
pub type Result<T> = std::result::Result<T, Error>;

/// For `map_err`: what was to be done.
fn system<E: Into<std::io::Error>>(what: impl Into<String>) -> impl FnOnce(E) -> Error {
    move |source| Error::System { what: what.into(), source: source.into() }
}

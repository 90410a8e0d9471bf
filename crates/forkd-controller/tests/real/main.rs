//! A real daemon, with guests of a few instructions: wherever `/dev/kvm` opens.
//!
//! One executable, since each would hold the whole daemon again. Failures panic: everything here runs in
//! tests only.
#![allow(clippy::unwrap_used)]

mod auth;
mod branches;
mod daemon;
mod errors;
mod forks;
mod life;
mod pause_rollback;
mod records;
mod save;
mod support;
mod suspends;
mod telemetry;
mod tree;
mod workspaces;

/// The daemon of the other tests, which start this executable again for it.
#[test]
fn the_daemon() {
    daemon::run();
}

//! Tests of a real daemon, with guests of a few instructions. They run wherever `/dev/kvm` opens.
//!
//! All are in one executable, since each executable would link the whole daemon again. Failures panic: this code runs
//! in tests only.
#![allow(clippy::unwrap_used)]

mod auth;
mod branches;
mod daemon;
mod errors;
mod forks;
mod lifetimes;
mod native_forks;
mod pause_rollback;
mod records;
mod save;
mod support;
mod suspends;
mod telemetry;
mod tree;
mod workspaces;

/// The daemon of the other tests: they start this executable again with only this test.
#[test]
fn the_daemon() {
    daemon::run();
}

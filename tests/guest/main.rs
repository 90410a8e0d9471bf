//! Real Linux guests, end to end. Needs root and a KVM that runs Linux: `make test` runs this binary
//! inside the emulated machine where the host has none.
#![allow(clippy::unwrap_used)]

mod api;
mod assets;
mod branch_and_rollback;
mod branch_consistency;
mod cold_boot;
mod connected;
mod devices;
mod disk_full;
mod exit;
mod fork_isolation;
mod forks;
mod hazards;
mod hostile;
mod jail;
mod layers;
mod leaks;
mod limits;
mod load;
mod network;
mod parent;
mod pause;
mod run;
mod streams;
mod workspaces;

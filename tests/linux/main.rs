//! Real Linux guests, end to end. Needs root and a KVM that runs Linux: `make test` runs this binary
//! inside the emulated machine where the host has none.
#![allow(clippy::unwrap_used)]

mod api;
mod assets;
mod branches;
mod branching;
mod connected;
mod devices;
mod disk_full;
mod ends;
mod forks;
mod hazards;
mod hostile;
mod jail;
mod layers;
mod leaks;
mod limits;
mod lives;
mod load;
mod network;
mod parent;
mod run;
mod streams;
mod window;
mod workspaces;

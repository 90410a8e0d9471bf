//! Real Linux guests, end to end. Needs root and a KVM that runs Linux: `make test` runs this binary
//! inside the emulated machine where the host has none.
#![allow(clippy::unwrap_used)]

mod api;
mod assets;
mod devices;
mod ends;
mod hostile;
mod jail;
mod run;

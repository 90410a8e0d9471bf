//! forkd from outside the emulated machine, on a host whose KVM does not run Linux: commands work the
//! same, the machine comes by itself, and what was written in it survives.
//!
//! On a host whose KVM runs Linux there is no machine to test; that is listed as not run.
#![allow(clippy::unwrap_used)]

mod bench;
mod branch_api;
mod cli;
mod clients;
mod e2b;
mod examples;
mod fanout;
mod faults;
mod kills;
mod load;
mod machine;
mod make;
mod mcp;
mod node;
mod pattern;
mod pip;
mod power;
mod readme;
mod schema;
mod sdk;
mod sdk_python;
mod sdk_typescript;
mod signals;
mod upgrade;

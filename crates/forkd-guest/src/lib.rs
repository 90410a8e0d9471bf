//! The guest side of forkd: init and agent in one static binary, PID 1 of every guest.
//!
//! - [`init`] brings the machine up from `/forkd/init.json`: modules, root, mounts, network.
//! - [`agent`] serves the host afterwards: it runs commands, reads and writes files, and keeps a
//!   warmed Python interpreter.
//! - [`http`] is the small HTTP server underneath; it knows no service.
//!
//! The messages are `forkd-protocol`'s. This crate knows nothing of KVM, of the controller or of
//! how many siblings a guest has. Plain threads, no async: PID 1 must stay small, and it must stay
//! up whatever the processes of the guest do. What comes from the network, from those processes and
//! from the image is hostile: it may get an error, never a panic or memory without bound.

pub mod agent;
mod files;
mod filesystem;
pub mod http;
pub mod init;
mod log;
mod process;
mod python;
mod rpc;
mod sys;
mod users;
mod warm;

pub use http::fuzz_request;

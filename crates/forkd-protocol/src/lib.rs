//! The protocols between the parts of forkd.
//!
//! There are three:
//!
//! - [`control`]: controller ⇄ monitor, over a unix `SEQPACKET` socket. One JSON message per
//!   packet, descriptors attached to it, a version handshake first.
//! - [`agent`]: host ⇄ agent in the guest, over vsock. HTTP/1.1 with the Connect protocol's JSON
//!   encoding ([`connect`]): the process and file services have the shapes E2B clients already
//!   speak, so that one implementation serves both.
//! - [`json_lines`]: clients of the reference ⇄ a guest: one JSON line in, one out.
//!
//! [`init`] is the plan a guest's init finds in its initramfs; [`names`] holds the rules for names
//! that appear on both sides. This crate knows no sockets by path, no KVM and no async runtime; its
//! parsers take bytes from hostile peers and are fuzzed.

pub mod agent;
mod bounded;
pub mod connect;
pub mod control;
pub mod init;
pub mod json_lines;
pub mod names;

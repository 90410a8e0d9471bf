//! Files for the host and its clients: whole contents over HTTP, and the filesystem service.

pub(crate) mod content;
mod draft;
mod metadata;
mod multipart;
pub(crate) mod service;
pub(crate) mod tree;
mod upload;
pub(crate) mod watch;

pub use multipart::fuzz_multipart;

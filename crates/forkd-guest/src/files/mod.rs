//! Files for the host and its clients: whole contents over HTTP, and the filesystem service.

pub(crate) mod content;
mod draft;
pub(crate) mod service;

//! The JSON-lines protocol, with which clients of the reference reach a sandbox: a client and a server.

pub(crate) mod json_lines;
pub(crate) mod relay;

//! Wire protocols beside the REST API.
//!
//! - `e2b`: the API of E2B, for programs written for it.
//! - `json_lines`: the protocol of the reference's agent.
//! - `mcp`: the Model Context Protocol, for agents.

pub(crate) mod e2b;
pub(crate) mod json_lines;
pub(crate) mod mcp;

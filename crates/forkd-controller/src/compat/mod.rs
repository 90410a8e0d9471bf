//! Wire protocols of other systems.
//!
//! - `e2b`: the API of E2B, for programs written for it.
//! - `json_lines`: the protocol of the reference's agent.

pub(crate) mod e2b;
pub(crate) mod json_lines;

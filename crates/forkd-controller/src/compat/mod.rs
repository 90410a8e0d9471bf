//! Wire protocols of other systems. `json_lines` is the protocol of the reference's agent.

pub(crate) mod json_lines;

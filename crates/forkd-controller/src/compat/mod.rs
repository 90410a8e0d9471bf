//! Wire protocols of other systems. `json_lines` is the protocol of the reference's agent. The E2B API belongs here, too.

pub(crate) mod json_lines;

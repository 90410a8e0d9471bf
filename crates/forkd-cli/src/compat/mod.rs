//! The JSON-lines protocol that the reference's clients use to reach a sandbox: asking a port that uses it,
//! and serving one.

pub(crate) mod json_lines;
pub(crate) mod relay;

//! TODO front page of compat.

pub(crate) mod json_lines;

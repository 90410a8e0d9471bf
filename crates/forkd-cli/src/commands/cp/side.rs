//! Copying files between this computer and a sandbox: the two sides and what is done with each. `forkd cp`
//! decides what goes where.
//!
//! A guest is hostile: whatever it says a file is called, nothing is written outside of the folder that was
//! named ([`DestinationFolder`](super::DestinationFolder)), and no link it has becomes one here.

use std::path::PathBuf;

use forkd_protocol::names::is_valid_sandbox_id;
use serde::Serialize;

/// One side of a copy, as it was typed.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A path on this computer.
    Here(PathBuf),
    /// A path in a sandbox.
    There(String, String),
    /// Standard input or output.
    Standard,
}

impl Side {
    pub(crate) fn parse(text: &str) -> Side {
        match text.split_once(':') {
            _ if text == "-" => Side::Standard,
            Some((id, path)) if is_valid_sandbox_id(id) => Side::There(id.to_owned(), path.to_owned()),
            _ => Side::Here(text.into()),
        }
    }
}

/// What came of a copy.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Copied {
    /// Files copied.
    pub(crate) files: u64,
    /// Folders made or found there.
    pub(crate) folders: u64,
    /// Bytes of those files.
    pub(crate) bytes: u64,
    /// What was left out.
    pub(crate) skipped: Vec<Skipped>,
}

/// Something that was left out.
#[derive(Debug, Serialize)]
pub(crate) struct Skipped {
    /// Where it is, as its own side names it.
    pub(crate) path: String,
    /// Why.
    pub(crate) reason: String,
}

impl Copied {
    pub(crate) fn skip(&mut self, path: impl Into<String>, reason: impl Into<String>) {
        self.skipped.push(Skipped { path: path.into(), reason: reason.into() });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_side_is_in_a_sandbox_only_if_it_begins_with_an_id() {
        assert_eq!(Side::parse("sb1:/etc"), Side::There("sb1".into(), "/etc".into()));
        assert_eq!(Side::parse("sb1:"), Side::There("sb1".into(), String::new()));
        assert_eq!(Side::parse("-"), Side::Standard);
        for here in ["sb1", "./sb1:/etc", "SB1:/x", "a:b", "C:/x", "/tmp/sb1:x"] {
            assert_eq!(Side::parse(here), Side::Here(here.into()), "{here}");
        }
    }
}

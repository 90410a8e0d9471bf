//! The two sides of a copy between this host and a sandbox. `forkd cp` decides what goes where.
//!
//! A guest is hostile: whatever names its files have, nothing is written outside of the folder that the user
//! named ([`DestinationFolder`](super::DestinationFolder)), and no link of the guest becomes one here.

use std::path::PathBuf;

use forkd_protocol::names::is_valid_sandbox_id;
use serde::Serialize;

/// One side of a copy, as on the command line.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Side {
    /// A path on this host.
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

/// The result of a copy.
#[derive(Debug, Default, Serialize)]
pub(crate) struct Copied {
    /// The number of copied files.
    pub(crate) files: u64,
    /// The number of folders created or found.
    pub(crate) folders: u64,
    /// Bytes of those files.
    pub(crate) bytes: u64,
    /// Skipped entries.
    pub(crate) skipped: Vec<Skipped>,
}

/// A skipped entry.
#[derive(Debug, Serialize)]
pub(crate) struct Skipped {
    /// Its path on the source side.
    pub(crate) path: String,
    /// The reason.
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

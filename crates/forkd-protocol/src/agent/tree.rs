//! Messages about a folder with all below it (`Agent/Tree`).

use serde::{Deserialize, Serialize};

use super::proto_json::{base64_option, nullable};
use crate::bounded::bounded_vec;

/// The most entries of one tree.
pub const MAX_TREE_ENTRIES: usize = 100_000;

/// The most entries of one message.
pub const MAX_TREE_BATCH: usize = 1024;

/// `Agent/Tree`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TreeRequest {
    /// The folder. A link here is followed; links below it are not.
    #[serde(deserialize_with = "nullable")]
    pub path: String,
    /// Read regular files and send their SHA-256.
    #[serde(deserialize_with = "nullable")]
    pub hash: bool,
}

/// One message of a tree: its next entries, in the order of the bytes of their paths. A message without entries only
/// shows that the agent still works.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct TreeEntries {
    /// At most [`MAX_TREE_BATCH`].
    #[serde(deserialize_with = "bounded_vec::<_, _, MAX_TREE_BATCH>")]
    pub entries: Vec<TreeEntry>,
}

/// A file, a folder or a link of a tree.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct TreeEntry {
    /// Relative to the folder of the request. Bytes that are not UTF-8 are replaced.
    pub path: String,
    /// The bytes of the path, if they are not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub path_bytes: Option<Vec<u8>>,
    /// As in [`EntryInfo::type`](super::EntryInfo), but a link has `FILE_TYPE_SYMLINK`.
    pub r#type: String,
    /// Bytes of a regular file or of a link's target; 0 for all others.
    pub size: u64,
    /// Milliseconds since 1970.
    pub modified_ms: i64,
    /// Permission bits.
    pub mode: u32,
    /// SHA-256 of a regular file in lower-case hexadecimal digits, if the request asks for it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sha256: Option<String>,
    /// The target of a link as it is written. Bytes that are not UTF-8 are replaced.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub target: Option<String>,
    /// The bytes of the target, if they are not UTF-8.
    #[serde(skip_serializing_if = "Option::is_none", with = "base64_option")]
    pub target_bytes: Option<Vec<u8>>,
    /// Why a hash, a target or the content of a folder is absent: a text of [`incomplete`].
    #[serde(skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<String>,
}

/// Values of [`TreeEntry::incomplete`].
pub mod incomplete {
    /// The user may not read it, or reading it failed.
    pub const UNREADABLE: &str = "unreadable";
    /// The file changed while the agent read it.
    pub const CHANGING: &str = "changing";
    /// The folder is on a pseudo file system, or on one of another machine or process; the agent does not enter it.
    pub const FILE_SYSTEM: &str = "file_system";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_entry_has_only_the_fields_that_apply_and_exact_bytes_where_text_cannot_hold_them() {
        let entry = TreeEntry {
            path: "a\u{fffd}".into(),
            path_bytes: Some(b"a\xff".to_vec()),
            r#type: "FILE_TYPE_FILE".into(),
            size: 1,
            modified_ms: -1,
            mode: 0o644,
            ..TreeEntry::default()
        };
        let json = serde_json::to_value(&entry).unwrap();
        let expected = serde_json::json!({
            "path": "a\u{fffd}", "pathBytes": "Yf8=", "type": "FILE_TYPE_FILE", "size": 1, "modifiedMs": -1,
            "mode": 420,
        });
        assert_eq!(json, expected);
        assert_eq!(serde_json::from_value::<TreeEntry>(json).unwrap(), entry);
    }

    #[test]
    fn a_message_with_too_many_entries_is_refused() {
        let read = |n: usize| {
            let text = format!(r#"{{"entries":[{}]}}"#, vec!["{}"; n].join(","));
            serde_json::from_str::<TreeEntries>(&text)
        };
        assert_eq!(read(MAX_TREE_BATCH).unwrap().entries.len(), MAX_TREE_BATCH);
        assert!(read(MAX_TREE_BATCH + 1).is_err());
    }
}

//! A folder in a sandbox with all below it, to compare it with another.

use serde::{Deserialize, Serialize};

use crate::FileKind;

/// A folder with all below it.
///
/// Compare two of them by kind, mode, SHA-256, size and link target. The time of the last change differs between files
/// of the same content. Where `path_base64` is there, compare it instead of `path`.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileTree {
    /// The folder of the request.
    pub path: String,
    /// All entries below the folder, at most 100000, in the order of the bytes of their paths. Links below the folder
    /// are not followed.
    pub entries: Vec<FileTreeEntry>,
}

/// A file, a folder or a link below a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileTreeEntry {
    /// Path relative to the folder, such as `a/b`. Bytes that are not UTF-8 are replaced with U+FFFD.
    pub path: String,
    /// The bytes of the path in base64. Absent if the path is UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub path_base64: Option<String>,
    /// The file's type.
    pub kind: FileKind,
    /// Size of a regular file or of a link's target in bytes; 0 for all others.
    pub size: u64,
    /// Time of the last change in milliseconds since 1970.
    pub modified_unix_ms: i64,
    /// Permission bits, as a number.
    pub mode: u32,
    /// SHA-256 of a regular file, in lower-case hexadecimal digits. Null for all others, without `hash`, and if
    /// `incomplete` has a reason.
    pub sha256: Option<String>,
    /// The path that a symbolic link contains. Bytes that are not UTF-8 are replaced with U+FFFD.
    pub target: Option<String>,
    /// The bytes of `target` in base64. Absent if they are UTF-8.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_base64: Option<String>,
    /// Why the hash, the link's target or the content of a folder is missing. Absent if nothing is missing.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub incomplete: Option<Incomplete>,
}

/// Why an entry of a folder is not complete.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum Incomplete {
    /// The user may not read it, or reading it failed.
    Unreadable,
    /// The file changed while the agent read it.
    Changing,
    /// The folder is on a pseudo file system such as `/proc`, or on one of another machine or process. The agent does
    /// not list it.
    FileSystem,
}

//! Files in a sandbox.

use serde::{Deserialize, Serialize};

/// What a path leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A link.
    Symlink,
    /// A device, a pipe, a socket.
    Other,
}

/// What is known of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileInfo {
    /// Last part of its path. Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Absolute path.
    pub path: String,
    /// What it is.
    pub r#type: FileKind,
    /// Bytes.
    pub size: u64,
    /// Permission bits, as a number.
    pub mode: u32,
    /// As `ls -l` shows them.
    pub permissions: String,
    /// Owner's name.
    pub owner: String,
    /// Group's name.
    pub group: String,
    /// RFC 3339.
    pub modified_time: String,
    /// Of a link: where it points.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Of a link that leads somewhere: what is there.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_type: Option<FileKind>,
}

/// What is in a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileList {
    /// Ordered by path; the folder itself is not among them. Links are not followed.
    pub entries: Vec<FileInfo>,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileWritten {
    /// Absolute path.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Whether the file took its place when all of it had come. If not, it was written where it is, because
    /// nothing could be put beside it, and an upload that had broken off would have left a part.
    pub whole: bool,
}

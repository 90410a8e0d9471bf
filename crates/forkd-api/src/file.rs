//! Files in a sandbox.

use serde::{Deserialize, Serialize};

/// The type of a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(rename_all = "snake_case")]
pub enum FileKind {
    /// A regular file.
    File,
    /// A folder.
    Directory,
    /// A symbolic link.
    Symlink,
    /// A device, a pipe or a socket.
    Other,
}

/// The attributes of a file.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileInfo {
    /// Last part of the path. Bytes that are not UTF-8 are replaced.
    pub name: String,
    /// Absolute path.
    pub path: String,
    /// The file's type.
    pub r#type: FileKind,
    /// Size in bytes.
    pub size: u64,
    /// Permission bits, as a number.
    pub mode: u32,
    /// Permission bits as `ls -l` shows them.
    pub permissions: String,
    /// Name of the owner.
    pub owner: String,
    /// Name of the group.
    pub group: String,
    /// Time of the last change, in RFC 3339.
    pub modified_time: String,
    /// The path that a symbolic link contains.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// The type of the file a symbolic link leads to; absent if that file does not exist.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub target_type: Option<FileKind>,
}

/// The content of a folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct FileList {
    /// Ordered by path, without the folder itself. Links are not followed.
    pub entries: Vec<FileInfo>,
}

/// A file that was written.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(from = "ReadFileWritten")]
pub struct FileWritten {
    /// Absolute path.
    pub path: String,
    /// Size in bytes.
    pub size: u64,
    /// Whether the upload was atomic: the daemon wrote a file beside the path and renamed it at the end. If false,
    /// the guest could create no file beside the path; the upload wrote in place, and an interruption would have left
    /// a part.
    pub atomic: bool,
    /// The older name of `atomic`, with the same value.
    #[cfg_attr(feature = "openapi", schema(deprecated))]
    pub whole: bool,
}

impl FileWritten {
    /// A file that was written, with `atomic` under both names.
    pub fn new(path: String, size: u64, atomic: bool) -> Self {
        FileWritten { path, size, atomic, whole: atomic }
    }
}

/// [`FileWritten`] of an older daemon, which sends `whole` only, or of a newer one.
#[derive(Deserialize)]
struct ReadFileWritten {
    path: String,
    size: u64,
    atomic: Option<bool>,
    #[serde(default)]
    whole: bool,
}

impl From<ReadFileWritten> for FileWritten {
    fn from(read: ReadFileWritten) -> Self {
        FileWritten::new(read.path, read.size, read.atomic.unwrap_or(read.whole))
    }
}

/// A folder to create.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MkdirRequest {
    /// Absolute path in the guest. Missing parent folders are created, too.
    pub path: String,
    /// User who creates and owns the folder; the image's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

/// A file or a folder to move.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
#[serde(deny_unknown_fields)]
pub struct MoveRequest {
    /// Absolute path in the guest.
    pub from: String,
    /// Absolute path in the guest. Missing parent folders are created; an existing file is replaced.
    pub to: String,
    /// User whose permissions apply; the image's default when absent.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub user: Option<String>,
}

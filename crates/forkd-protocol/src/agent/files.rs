//! Messages about files: the filesystem service, and the answer to an upload.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use super::{
    EmptyMessage,
    proto_json::{nullable, number},
};
use crate::bounded::bounded_vec;

/// What the names of an upload's headers with metadata begin with; the rest is the key.
pub const METADATA_HEADER: &str = "x-metadata-";

/// A filesystem request that names a path and nothing else (`Stat`, `MakeDir`, `Remove`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct PathRequest {
    /// Absolute, or relative to the user's home.
    #[serde(deserialize_with = "nullable")]
    pub path: String,
}

/// `Filesystem/Move`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct MoveRequest {
    /// From.
    #[serde(deserialize_with = "nullable")]
    pub source: String,
    /// To.
    #[serde(deserialize_with = "nullable")]
    pub destination: String,
}

/// `Filesystem/ListDir`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct ListDirRequest {
    /// The folder.
    #[serde(deserialize_with = "nullable")]
    pub path: String,
    /// How many levels; 0 means 1.
    #[serde(deserialize_with = "number")]
    pub depth: u32,
}

/// A file's metadata.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct EntryInfo {
    /// Last part of the path.
    pub name: String,
    /// `FILE_TYPE_FILE`, `FILE_TYPE_DIRECTORY` or `FILE_TYPE_SYMLINK`. A link has the type of its target, and
    /// `FILE_TYPE_SYMLINK` only if it has none.
    pub r#type: String,
    /// Absolute path.
    pub path: String,
    /// Bytes.
    pub size: u64,
    /// Permission bits.
    pub mode: u32,
    /// As `ls -l` shows them.
    pub permissions: String,
    /// Owner's name.
    pub owner: String,
    /// Group's name.
    pub group: String,
    /// RFC 3339.
    pub modified_time: String,
    /// Where a link points.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub symlink_target: Option<String>,
    /// Whether it is a link.
    #[serde(skip_serializing_if = "std::ops::Not::not")]
    pub is_symlink: bool,
    /// What clients stored with it. The daemon forwards it unread: parsed, it would take many times its room.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", skip_deserializing)]
    pub metadata: BTreeMap<String, String>,
}

/// One entry (`Stat`, `MakeDir`, `Move`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EntryResponse {
    /// The entry.
    pub entry: EntryInfo,
}

/// The most entries one listing gives.
pub const MAX_ENTRIES: usize = 20_000;

/// Entries of a folder (`ListDir`).
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct EntryList {
    /// The entries, without the folder itself. More than [`MAX_ENTRIES`] are not read: each takes many times
    /// the room that it has in a message.
    #[serde(deserialize_with = "bounded_vec::<_, _, MAX_ENTRIES>")]
    pub entries: Vec<EntryInfo>,
}

/// A file written through `POST /files`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WrittenFile {
    /// Absolute path.
    pub path: String,
    /// Last part of the path.
    pub name: String,
    /// Always `file`.
    pub r#type: String,
    /// Of an upload that asked for it with `whole=true`: whether the file took its place when all of it
    /// had come, or was written where it is, for want of permission to put another beside it.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub whole: Option<bool>,
    /// What the client stored with it. The daemon forwards it unread.
    #[serde(skip_serializing_if = "BTreeMap::is_empty", skip_deserializing)]
    pub metadata: BTreeMap<String, String>,
}

/// `Filesystem/WatchDir` and `Filesystem/CreateWatcher`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatchDirRequest {
    /// The folder.
    #[serde(deserialize_with = "nullable")]
    pub path: String,
    /// The folders below it, too.
    #[serde(deserialize_with = "nullable")]
    pub recursive: bool,
    /// Each event has the metadata of its file, if there is one.
    #[serde(alias = "include_entry", deserialize_with = "nullable")]
    pub include_entry: bool,
    /// Watch a folder on a network file system, too, where changes by other machines go unnoticed.
    #[serde(alias = "allow_network_mounts", deserialize_with = "nullable")]
    pub allow_network_mounts: bool,
}

/// One message of a `WatchDir` stream: one of the fields is set, `start` in the first message.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WatchDirResponse {
    /// The folder is watched from now on.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub start: Option<EmptyMessage>,
    /// Something happened to a file.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub filesystem: Option<FilesystemEvent>,
    /// Nothing happened for a while; the connection is alive.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub keepalive: Option<EmptyMessage>,
}

/// Something that happened to a file.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct FilesystemEvent {
    /// The file's path, relative to the watched folder.
    pub name: String,
    /// `EVENT_TYPE_CREATE`, `_WRITE`, `_REMOVE`, `_RENAME` (of the old name; the new name has a `_CREATE`) or
    /// `_CHMOD`.
    pub r#type: String,
    /// The file's metadata, if the client asked for it and the file is there.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub entry: Option<EntryInfo>,
}

/// A watcher: the answer of `CreateWatcher`, and the request of `GetWatcherEvents` and `RemoveWatcher`.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct WatcherRef {
    /// Its name.
    #[serde(alias = "watcher_id", deserialize_with = "nullable")]
    pub watcher_id: String,
}

/// `Filesystem/GetWatcherEvents`: what happened since the last such call.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct WatcherEvents {
    /// In the order in which it happened.
    #[serde(deserialize_with = "bounded_vec::<_, _, MAX_ENTRIES>")]
    pub events: Vec<FilesystemEvent>,
}

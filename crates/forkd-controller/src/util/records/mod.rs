//! Records: small files from which the next daemon restores the sandboxes and templates of this one.
//!
//! Every record has a version. Its file is always whole: it is written under another name and renamed.
//!
//! | found | means |
//! |---|---|
//! | no file | The object is half-made, and no client has its id. The daemon ends it and removes its folder. |
//! | a file this daemon reads | The daemon takes the object over. |
//! | a file it cannot read: damaged, or of a newer daemon | The daemon *keeps* the object: see `unknown`. |
//!
//! A new field needs no new version if a daemon that does not know it may ignore it, and lose it when it writes
//! the record again. It needs `serde(default)`, as records without it are read for ever. Anything else, such as a
//! new variant that an older daemon must not guess at, is a new version. `tests/golden` has one file of every kind
//! and version.

use std::io;
use std::path::Path;

use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::Value;

/// The largest record that is read.
const MAX_FILE: u64 = 1 << 20;

/// The type of a record.
pub(crate) trait VersionedRecord: Serialize + DeserializeOwned {
    /// The name of its file.
    const FILE: &'static str;
    /// The version this daemon writes. It reads this one and all earlier ones. A file without a version is 0.
    const VERSION: u32 = 1;
}

/// The result of reading a record.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Found<T> {
    Missing,
    /// A file that cannot be read, and why.
    Unreadable(String),
    Read(T),
}

impl<T> Found<T> {
    /// The record, if it can be read.
    pub(crate) fn read(self) -> Option<T> {
        match self {
            Found::Read(record) => Some(record),
            Found::Missing | Found::Unreadable(_) => None,
        }
    }
}

/// The content of a record's file.
#[derive(Serialize)]
struct Versioned<'a, T> {
    version: u32,
    #[serde(flatten)]
    record: &'a T,
}

/// The fields of every version.
#[derive(Deserialize)]
struct Header {
    #[serde(default)]
    version: u64,
}

/// The record in `folder`.
pub(crate) fn read<T: VersionedRecord>(folder: &Path) -> Found<T> {
    let unreadable = |why: String| Found::Unreadable(format!("{} cannot be read: {why}", T::FILE));
    match bytes(&folder.join(T::FILE)) {
        Ok(bytes) => parse(&bytes).map_or_else(unreadable, Found::Read),
        Err(error) if error.kind() == io::ErrorKind::NotFound => Found::Missing,
        Err(error) => unreadable(error.to_string()),
    }
}

/// Whatever JSON is in an unreadable record in `folder`. None of it is certain.
pub(crate) fn glimpse<T: VersionedRecord>(folder: &Path) -> Value {
    let bytes = bytes(&folder.join(T::FILE)).unwrap_or_default();
    serde_json::from_slice(&bytes).unwrap_or(Value::Null)
}

fn bytes(path: &Path) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    let file = std::fs::File::open(path)?;
    io::Read::read_to_end(&mut io::Read::take(file, MAX_FILE), &mut bytes)?;
    Ok(bytes)
}

/// Parses a record, or returns why `bytes` are none.
pub(crate) fn parse<T: VersionedRecord>(bytes: &[u8]) -> Result<T, String> {
    let Header { version } = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    // Before the other fields: a newer version may have different ones.
    if version > u64::from(T::VERSION) {
        let known = T::VERSION;
        return Err(format!("it has version {version}, and this daemon reads versions up to {known}"));
    }
    serde_json::from_slice(bytes).map_err(|error| error.to_string())
}

/// The bytes of a record's file.
pub(crate) fn to_vec<T: VersionedRecord>(record: &T) -> io::Result<Vec<u8>> {
    Ok(serde_json::to_vec(&Versioned { version: T::VERSION, record })?)
}

/// Writes a record into `folder`, whole or not at all. Not synced, as it need not outlive the host's boot.
pub(crate) fn write<T: VersionedRecord>(record: &T, folder: &Path) -> io::Result<()> {
    let new = folder.join(format!("{}.new", T::FILE));
    std::fs::write(&new, to_vec(record)?)?;
    std::fs::rename(new, folder.join(T::FILE))
}

#[cfg(test)]
mod tests;

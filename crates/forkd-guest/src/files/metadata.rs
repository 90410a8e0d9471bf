//! What clients store with a file: extended attributes of its own, `user.e2b.KEY`.

use std::{collections::BTreeMap, ffi::CStr, fs::File, io, path::Path};

use forkd_protocol::agent::METADATA_HEADER;
use rustix::{fs::XattrFlags, io::Errno};

use crate::http::Head;

/// What the names of these attributes begin with.
const PREFIX: &str = "user.e2b.";
/// The longest key: the kernel's limit on the name of an attribute is 255 bytes.
const MAX_KEY: usize = 255 - PREFIX.len();
/// How much of a file's list of attributes is read. The kernel's limit.
const MAX_LIST: usize = 64 << 10;
/// The most keys and bytes of metadata that are read of one file.
const MAX_READ_KEYS: usize = 128;
const MAX_READ: usize = 64 << 10;

/// The metadata of a file, by key.
pub(super) type Metadata = BTreeMap<String, String>;

/// The metadata in the headers of an upload; an error names the header.
pub(super) fn of_headers(head: &Head) -> Result<Metadata, String> {
    let mut metadata = Metadata::new();
    for (key, value) in head.with_prefix(METADATA_HEADER) {
        if key.is_empty() || key.len() > MAX_KEY {
            return Err(format!("{METADATA_HEADER}{key}: a key has 1 to {MAX_KEY} bytes"));
        }
        if !value.bytes().all(|byte| (b' '..=b'~').contains(&byte)) {
            return Err(format!("{METADATA_HEADER}{key}: a value has printable ASCII characters only"));
        }
        metadata.insert(key.to_owned(), value.to_owned());
    }
    Ok(metadata)
}

/// Gives an open file this metadata and no other.
pub(super) fn replace(file: &File, metadata: &Metadata) -> io::Result<()> {
    let known = match list(|buf| rustix::fs::flistxattr(file, buf)) {
        // A file system without attributes.
        Err(Errno::NOTSUP) if metadata.is_empty() => return Ok(()),
        known => known?,
    };
    for name in known {
        if !name.strip_prefix(PREFIX).is_some_and(|key| metadata.contains_key(key)) {
            rustix::fs::fremovexattr(file, name.as_str())?;
        }
    }
    for (key, value) in metadata {
        rustix::fs::fsetxattr(file, format!("{PREFIX}{key}"), value.as_bytes(), XattrFlags::empty())?;
    }
    Ok(())
}

/// The metadata of a file or a folder, with the permissions of the thread's current user; a link is followed. What
/// cannot be read is left out.
pub(super) fn read(path: &Path) -> Metadata {
    let mut metadata = Metadata::new();
    let mut size = 0;
    for name in list(|buf| rustix::fs::listxattr(path, buf)).unwrap_or_default() {
        let mut value = vec![0; MAX_READ.saturating_sub(size)];
        let Ok(len) = rustix::fs::getxattr(path, name.as_str(), &mut value[..]) else { continue };
        value.truncate(len);
        let (Some(key), Ok(value)) = (name.strip_prefix(PREFIX), String::from_utf8(value)) else { continue };
        size += key.len() + value.len();
        if size > MAX_READ || metadata.len() == MAX_READ_KEYS {
            break;
        }
        metadata.insert(key.to_owned(), value);
    }
    metadata
}

/// The names of a file's attributes that are metadata.
fn list(read: impl Fn(&mut [u8]) -> Result<usize, Errno>) -> Result<Vec<String>, Errno> {
    // Almost all files have few attributes or none.
    let mut buf = vec![0; 256];
    let len = match read(&mut buf) {
        Err(Errno::RANGE) => {
            buf.resize(MAX_LIST, 0);
            read(&mut buf)?
        }
        len => len?,
    };
    let names = buf[..len].split_inclusive(|byte| *byte == 0);
    let names = names.filter_map(|name| CStr::from_bytes_with_nul(name).ok()?.to_str().ok());
    Ok(names.filter(|name| name.starts_with(PREFIX)).map(String::from).collect())
}

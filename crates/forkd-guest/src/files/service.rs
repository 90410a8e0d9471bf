//! The filesystem service: names, folders and what is known of files. Contents go through `files`.
//!
//! Every call acts with the permissions of the user it is made for.

use std::{
    collections::BTreeMap,
    ffi::CStr,
    fs::{self, Metadata},
    io,
    os::{
        fd::{AsFd, BorrowedFd},
        unix::fs::{FileTypeExt, MetadataExt},
    },
    path::{Path, PathBuf},
};

use forkd_protocol::{
    agent::{
        DEFAULT_USER_HEADER, EntryInfo, EntryList, EntryResponse, ListDirRequest, MAX_ENTRIES, MoveRequest,
        PathRequest,
    },
    connect::{Code, Error},
};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags},
    io::Errno,
};
use serde_json::json;

use super::metadata;
use crate::{
    http::{Exchange, Head},
    rpc,
    users::{self, IdNames, User},
};

/// How deep a folder can be and still be removed. Each level costs stack and a descriptor.
const MAX_DEPTH: usize = 200;
/// The most metadata in one listing.
const MAX_LIST_METADATA: usize = 4 << 20;

/// Answers one call; `None` if there is no such method.
pub(crate) fn call(
    method: &str,
    user: &dyn Fn(&Head) -> Result<User, Error>,
    exchange: &mut Exchange,
) -> Option<io::Result<()>> {
    Some(match method {
        "Stat" => rpc::unary(exchange, |request: PathRequest, head| {
            acting(user, head, |user| entry_response(&user.resolve(&request.path)?, links(head)))
        }),
        "MakeDir" => rpc::unary(exchange, |request: PathRequest, head| {
            acting(user, head, |user| make_dir(&user.resolve(&request.path)?, links(head)))
        }),
        "Move" => rpc::unary(exchange, |request: MoveRequest, head| {
            acting(user, head, |user| {
                rename(&user.resolve(&request.source)?, &user.resolve(&request.destination)?, links(head))
            })
        }),
        "ListDir" => rpc::unary(exchange, |request: ListDirRequest, head| {
            acting(user, head, |user| list(&user.resolve(&request.path)?, request.depth.max(1), links(head)))
        }),
        "RemoveOne" => rpc::unary(exchange, |request: PathRequest, head| {
            acting(user, head, |user| {
                remove_one(&user.resolve(&request.path)?)?;
                Ok(json!({}))
            })
        }),
        "Remove" => rpc::unary(exchange, |request: PathRequest, head| {
            acting(user, head, |user| {
                remove(&user.resolve(&request.path)?)?;
                Ok(json!({}))
            })
        }),
        _ => return None,
    })
}

fn acting<A>(
    user: &dyn Fn(&Head) -> Result<User, Error>,
    head: &Head,
    act: impl FnOnce(&User) -> Result<A, Error>,
) -> Result<A, Error> {
    let user = user(head)?;
    let _acting = users::act_as(&user).map_err(|error| failed(Path::new(&user.name), &error))?;
    act(&user)
}

/// The Connect error for a failed file operation.
pub(super) fn failed(path: &Path, error: &io::Error) -> Error {
    let code = match error.raw_os_error() {
        Some(libc::ENOENT) => Code::NotFound,
        Some(libc::EEXIST | libc::ENOTEMPTY) => Code::AlreadyExists,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => Code::PermissionDenied,
        Some(libc::ENOTDIR | libc::EISDIR | libc::ELOOP | libc::ENAMETOOLONG | libc::EINVAL) => {
            Code::InvalidArgument
        }
        Some(libc::ENOSPC | libc::EDQUOT) => Code::ResourceExhausted,
        Some(libc::EMFILE | libc::ENFILE) => Code::Unavailable,
        Some(libc::EXDEV | libc::EBUSY) => Code::FailedPrecondition,
        _ => Code::Internal,
    };
    Error::new(code, format!("{}: {error}", path.display()))
}

fn entry_response(path: &Path, links: Links) -> Result<EntryResponse, Error> {
    let metadata = fs::symlink_metadata(path).map_err(|error| failed(path, &error))?;
    Ok(EntryResponse { entry: entry(path, &metadata, &IdNames::load(), links) })
}

fn make_dir(path: &Path, links: Links) -> Result<EntryResponse, Error> {
    match fs::metadata(path) {
        Ok(metadata) if metadata.is_dir() => {
            return Err(Error::new(Code::AlreadyExists, format!("{}: is there already", path.display())));
        }
        Ok(_) => {
            return Err(Error::new(
                Code::InvalidArgument,
                format!("{}: is there and no folder", path.display()),
            ));
        }
        Err(_) => {}
    }
    fs::create_dir_all(path).map_err(|error| failed(path, &error))?;
    entry_response(path, links)
}

fn rename(from: &Path, to: &Path, links: Links) -> Result<EntryResponse, Error> {
    fs::symlink_metadata(from).map_err(|error| failed(from, &error))?;
    if let Some(parent) = to.parent() {
        fs::create_dir_all(parent).map_err(|error| failed(parent, &error))?;
    }
    match fs::rename(from, to) {
        Ok(()) => entry_response(to, links),
        Err(error) if error.raw_os_error() == Some(libc::EXDEV) => {
            let message = format!(
                "{} and {} are on different file systems; copy it and remove the original",
                from.display(),
                to.display()
            );
            Err(Error::new(Code::FailedPrecondition, message))
        }
        Err(error) => Err(failed(to, &error)),
    }
}

fn list(path: &Path, depth: u32, links: Links) -> Result<EntryList, Error> {
    let names = IdNames::load();
    let mut entries = Vec::new();
    let mut size = 0;
    let mut folders: Vec<(PathBuf, u32)> = vec![(path.to_path_buf(), 1)];
    while let Some((folder, level)) = folders.pop() {
        let read = match fs::read_dir(&folder) {
            Ok(read) => read,
            Err(error) if level == 1 => return Err(failed(&folder, &error)),
            // One the user may not read, or that is gone already, is listed as empty.
            Err(_) => continue,
        };
        for found in read {
            let Ok(found) = found else { break };
            let path = found.path();
            let Ok(metadata) = fs::symlink_metadata(&path) else { continue };
            if entries.len() >= MAX_ENTRIES {
                let message = format!("more than {MAX_ENTRIES} entries: list a smaller folder or depth");
                return Err(Error::new(Code::OutOfRange, message));
            }
            let entry = entry(&path, &metadata, &names, links);
            size += entry.metadata.iter().map(|(key, value)| key.len() + value.len()).sum::<usize>();
            if size > MAX_LIST_METADATA {
                let message =
                    format!("more than {MAX_LIST_METADATA} bytes of metadata: list a smaller folder");
                return Err(Error::new(Code::OutOfRange, message));
            }
            entries.push(entry);
            if metadata.is_dir() && level < depth {
                folders.push((path, level + 1));
            }
        }
    }
    entries.sort_by(|a, b| a.path.cmp(&b.path));
    Ok(EntryList { entries })
}

/// Removes what is there and has nothing below it.
fn remove_one(path: &Path) -> Result<(), Error> {
    let metadata = fs::symlink_metadata(path).map_err(|error| failed(path, &error))?;
    let removed = if metadata.is_dir() { fs::remove_dir(path) } else { fs::remove_file(path) };
    removed.map_err(|error| match error.raw_os_error() {
        Some(libc::ENOTEMPTY | libc::EEXIST) => {
            let message = format!("{}: the folder is not empty; remove it recursively", path.display());
            Error::new(Code::FailedPrecondition, message)
        }
        _ => failed(path, &error),
    })
}

fn remove(path: &Path) -> Result<(), Error> {
    let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(Error::new(Code::InvalidArgument, format!("{}: cannot be removed", path.display())));
    };
    let removed = open_folder(None, parent).and_then(|folder| {
        let name = std::ffi::CString::new(name.as_encoded_bytes()).map_err(|_| Errno::INVAL)?;
        remove_entry(folder.as_fd(), &name, 0)
    });
    match removed {
        Ok(()) | Err(Errno::NOENT | Errno::NOTDIR) => Ok(()),
        Err(Errno::MLINK) => {
            let message = format!(
                "{}: folders nested more than {MAX_DEPTH} deep; remove it with rm -rf",
                path.display()
            );
            Err(Error::new(Code::FailedPrecondition, message))
        }
        Err(errno) => Err(failed(path, &errno.into())),
    }
}

fn open_folder(at: Option<BorrowedFd>, name: impl rustix::path::Arg) -> Result<std::os::fd::OwnedFd, Errno> {
    let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
    match at {
        // Inside the tree no link is followed: one put there meanwhile must not lead out of it.
        Some(at) => rustix::fs::openat(at, name, flags | OFlags::NOFOLLOW, Mode::empty()),
        None => rustix::fs::open(name, flags, Mode::empty()),
    }
}

/// Removes `name` and all below it; `MLINK` if that is too deep.
fn remove_entry(at: BorrowedFd, name: &CStr, depth: usize) -> Result<(), Errno> {
    match rustix::fs::unlinkat(at, name, AtFlags::empty()) {
        Err(Errno::ISDIR | Errno::PERM) => {}
        other => return other,
    }
    // An empty folder, or one that only its parent's owner can empty.
    match rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR) {
        Err(Errno::NOTEMPTY | Errno::EXIST) => {}
        other => return other,
    }
    if depth >= MAX_DEPTH {
        return Err(Errno::MLINK);
    }
    let folder = open_folder(Some(at), name)?;
    for found in Dir::read_from(&folder)? {
        let found = found?;
        if matches!(found.file_name().to_bytes(), b"." | b"..") {
            continue;
        }
        match remove_entry(folder.as_fd(), found.file_name(), depth + 1) {
            Ok(()) | Err(Errno::NOENT) => {}
            Err(errno) => return Err(errno),
        }
    }
    rustix::fs::unlinkat(at, name, AtFlags::REMOVEDIR)
}

/// How the entry of a link is described.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Links {
    /// With its own mode, and its target as it is written.
    AsWritten,
    /// With the mode of its target, and the target's absolute path, as E2B clients expect.
    Resolved,
}

fn links(head: &Head) -> Links {
    match head.header(DEFAULT_USER_HEADER) {
        Some(_) => Links::Resolved,
        None => Links::AsWritten,
    }
}

/// A file's metadata. A link has its own, but the type of its target, as clients expect that list folders to
/// open them.
pub(super) fn entry(path: &Path, metadata: &Metadata, names: &IdNames, links: Links) -> EntryInfo {
    let link = metadata.is_symlink();
    let target = if link { fs::metadata(path).ok() } else { None };
    let shown = target.as_ref().unwrap_or(metadata);
    let (mode, points_to) = match links {
        Links::AsWritten => (metadata.mode(), fs::read_link(path)),
        Links::Resolved => (shown.mode(), fs::canonicalize(path).or_else(|_| Ok(path.to_path_buf()))),
    };
    EntryInfo {
        name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
        r#type: type_name(shown).into(),
        path: path.to_string_lossy().into_owned(),
        size: metadata.len(),
        mode: mode & 0o7777,
        permissions: permissions(metadata),
        owner: names.user(metadata.uid()),
        group: names.group(metadata.gid()),
        modified_time: rfc3339(metadata.mtime(), metadata.mtime_nsec()),
        symlink_target: points_to.ok().filter(|_| link).map(|target| target.to_string_lossy().into_owned()),
        is_symlink: link,
        // Nothing else has attributes of users.
        metadata: if shown.is_file() || shown.is_dir() { metadata::read(path) } else { BTreeMap::new() },
    }
}

fn type_name(metadata: &Metadata) -> &'static str {
    match FileType::from_raw_mode(metadata.mode()) {
        FileType::RegularFile => "FILE_TYPE_FILE",
        FileType::Directory => "FILE_TYPE_DIRECTORY",
        FileType::Symlink => "FILE_TYPE_SYMLINK",
        _ => "FILE_TYPE_UNSPECIFIED",
    }
}

/// As `ls -l` shows them: `-rwxr-xr-x`.
fn permissions(metadata: &Metadata) -> String {
    let (mode, kind) = (metadata.mode(), metadata.file_type());
    let first = match () {
        () if kind.is_dir() => 'd',
        () if kind.is_symlink() => 'l',
        () if kind.is_fifo() => 'p',
        () if kind.is_socket() => 's',
        () if kind.is_block_device() => 'b',
        () if kind.is_char_device() => 'c',
        () => '-',
    };
    let mut text = String::from(first);
    for (shift, special, set) in [(6, 0o4000, 's'), (3, 0o2000, 's'), (0, 0o1000, 't')] {
        let bits = mode >> shift;
        text.push(if bits & 4 != 0 { 'r' } else { '-' });
        text.push(if bits & 2 != 0 { 'w' } else { '-' });
        text.push(match (mode & special != 0, bits & 1 != 0) {
            (true, true) => set,
            (true, false) => set.to_ascii_uppercase(),
            (false, true) => 'x',
            (false, false) => '-',
        });
    }
    text
}

/// A time in seconds since 1970 as `2026-11-15T06:15:18.048202000Z`.
fn rfc3339(seconds: i64, nanos: i64) -> String {
    // A file may claim any time at all; a time beyond the calendar is shown as the nearest that fits.
    let seconds = seconds.clamp(-62_135_596_800, 253_402_300_799);
    let (days, second) = (seconds.div_euclid(86_400), seconds.rem_euclid(86_400));
    // Days are counted from 1 March of a year 0, so that leap days come last; eras are 400 years.
    let days = days + 719_468;
    let (era, day_of_era) = (days.div_euclid(146_097), days.rem_euclid(146_097));
    let year_of_era = (day_of_era - day_of_era / 1_460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let month_index = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * month_index + 2) / 5 + 1;
    let month = if month_index < 10 { month_index + 3 } else { month_index - 9 };
    let year = era * 400 + year_of_era + i64::from(month <= 2);
    let (hour, minute, second) = (second / 3600, second / 60 % 60, second % 60);
    format!(
        "{year:04}-{month:02}-{day:02}T{hour:02}:{minute:02}:{second:02}.{:09}Z",
        nanos.clamp(0, 999_999_999)
    )
}

#[cfg(test)]
mod tests;

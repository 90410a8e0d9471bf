//! A file that takes its place when all of it has come, and is gone if that never happens.

use std::{
    ffi::OsString,
    fs::{self, File, Permissions},
    io,
    os::{
        fd::OwnedFd,
        unix::fs::{MetadataExt, PermissionsExt, fchown},
    },
    path::Path,
    sync::atomic::{AtomicU64, Ordering},
};

use rustix::fs::{AtFlags, Mode, OFlags};

use super::content::open_regular;
use crate::sys;

/// The part of its mode that an overwritten file keeps: as in the kernel, a change of a file clears its
/// set-id bits.
const KEPT_MODE: u32 = 0o777;

/// What the names of drafts begin with: of new files, and of files that replace others.
const NEW: &str = ".forkd-new-";
const REPLACING: &str = ".forkd-old-";

/// Whether a draft of that name becomes a new file; `None` if it is not the name of a draft.
pub(super) fn is_new_file(name: &[u8]) -> Option<bool> {
    let (rest, new) = match name.strip_prefix(NEW.as_bytes()) {
        Some(rest) => (rest, true),
        None => (name.strip_prefix(REPLACING.as_bytes())?, false),
    };
    let mut numbers = rest.split(|byte| *byte == b'-');
    let mut number =
        || numbers.next().is_some_and(|text| !text.is_empty() && text.iter().all(u8::is_ascii_digit));
    (number() && number() && numbers.next().is_none()).then_some(new)
}

/// A file under way.
pub(super) struct Draft {
    pub(super) file: File,
    /// Its folder: a descriptor, so that a link put into the path meanwhile leads nowhere.
    folder: OwnedFd,
    temporary: OsString,
    /// Its name; none once it has it.
    name: Option<OsString>,
    /// The file whose place it takes: its owner, its group and its mode.
    before: Option<(u32, u32, u32)>,
    mode: Option<u32>,
}

impl Draft {
    /// Begins a file for `path`, with the permissions of the thread's current user; `None` if `path` is a
    /// file that can only be written in place, because its folder takes no other.
    pub(super) fn begin(path: &Path, mode: Option<u32>) -> io::Result<Option<Draft>> {
        // A link stays one: its target is replaced.
        let path = match fs::canonicalize(path) {
            Ok(path) => path,
            Err(_) if fs::symlink_metadata(path).is_ok_and(|found| found.is_symlink()) => return Ok(None),
            Err(_) => path.to_path_buf(),
        };
        // Replacing needs no permission on the file itself; asked for, so that it is as with writing.
        let before = match open_regular(&path, OFlags::WRONLY) {
            Ok(file) => {
                let found = file.metadata()?;
                Some((found.uid(), found.gid(), found.mode() & KEPT_MODE))
            }
            Err(error) if error.kind() == io::ErrorKind::NotFound => None,
            Err(error) => return Err(error),
        };
        let (Some(parent), Some(name)) = (path.parent(), path.file_name()) else {
            return Err(io::Error::from_raw_os_error(libc::EISDIR));
        };
        let folder =
            rustix::fs::open(parent, OFlags::PATH | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let kind = if before.is_some() { REPLACING } else { NEW };
        let temporary = OsString::from(format!("{kind}{}-{number}", sys::uptime_ms()));
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        // Other users must not read a file that was private before.
        let first = Mode::from_raw_mode(if before.is_some() || mode.is_some() { 0o600 } else { 0o666 });
        match rustix::fs::openat(&folder, &temporary, flags, first) {
            Ok(file) => {
                let (file, name) = (File::from(file), Some(name.to_owned()));
                Ok(Some(Draft { file, folder, temporary, name, before, mode }))
            }
            Err(errno) if errno != rustix::io::Errno::NOSPC && before.is_some() => Ok(None),
            Err(errno) => Err(errno.into()),
        }
    }

    /// Gives the file the owner and mode it is to have. Needs the agent's own permissions.
    pub(super) fn dress(&self) -> io::Result<()> {
        if let Some((owner, group, _)) = self.before {
            fchown(&self.file, Some(owner), Some(group))?;
        }
        match self.mode.or(self.before.map(|(_, _, mode)| mode)) {
            Some(mode) => self.file.set_permissions(Permissions::from_mode(mode)),
            None => Ok(()),
        }
    }

    /// Renames it into place, with the permissions of the thread's current user.
    pub(super) fn place(mut self) -> io::Result<()> {
        if let Some(name) = &self.name {
            rustix::fs::renameat(&self.folder, &self.temporary, &self.folder, name)?;
            self.name = None;
        }
        Ok(())
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        if self.name.is_some() {
            let _ = rustix::fs::unlinkat(&self.folder, &self.temporary, AtFlags::empty());
        }
    }
}

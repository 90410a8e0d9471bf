//! Folders and the files in them, by descriptor: no link is ever followed, nothing special opened.

use std::fs::{self, File};
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};

use rustix::fs::{AtFlags, CWD, Mode, OFlags};
use rustix::io::Errno;

use crate::crash_points::{Step, did};
use crate::error::{Error, Result};

/// An open folder. It stays the same folder when another one gets its name.
#[derive(Debug)]
pub(crate) struct Dir {
    fd: OwnedFd,
    path: PathBuf,
}

impl Dir {
    /// Opens the folder at `path`, whose last part must not be a link.
    pub(crate) fn open(path: &Path) -> io::Result<Dir> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Dir { fd: rustix::fs::open(path, flags, Mode::empty())?, path: path.to_owned() })
    }

    /// The same folder, to be known by another path: the one it is about to have.
    pub(crate) fn known_as(&self, path: &Path) -> io::Result<Dir> {
        Ok(Dir { fd: self.fd.try_clone()?, path: path.to_owned() })
    }

    /// The path it is known by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the regular file `name` for reading. If `name` is no regular file, the error says which kind it has.
    pub(crate) fn read(&self, name: &str) -> std::result::Result<File, String> {
        // Non-blocking: the name may be a pipe. For regular files the flag means nothing.
        let flags = OFlags::RDONLY | OFlags::NOFOLLOW | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let file = match rustix::fs::openat(&self.fd, name, flags, Mode::empty()) {
            Ok(fd) => File::from(fd),
            Err(Errno::NOENT) => return Err("is missing".into()),
            Err(Errno::LOOP) => return Err("is a symbolic link, not a file".into()),
            Err(error) => return Err(format!("cannot be opened ({})", io::Error::from(error))),
        };
        match file.metadata() {
            Ok(meta) if meta.is_file() => Ok(file),
            Ok(_) => Err("is not a regular file".into()),
            Err(error) => Err(format!("cannot be read ({error})")),
        }
    }

    /// Makes the file `name`, which must not be there, for us alone.
    pub(crate) fn create(&self, name: &str) -> io::Result<File> {
        let flags = OFlags::RDWR | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let file = rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?;
        did(Step::Changed);
        Ok(file.into())
    }

    /// Gives the open `file` the name `name` in here, which nothing must have.
    pub(crate) fn link(&self, file: &File, name: &str) -> rustix::io::Result<()> {
        // By way of /proc: needs no privilege, and works for a file without a name.
        rustix::fs::linkat(CWD, proc_path(file), &self.fd, name, AtFlags::SYMLINK_FOLLOW)?;
        did(Step::Changed);
        Ok(())
    }

    /// Renames the file `from` to `to` and replaces a file of that name.
    pub(crate) fn rename(&self, from: &str, to: &str) -> io::Result<()> {
        rustix::fs::renameat(&self.fd, from, &self.fd, to)?;
        did(Step::Changed);
        Ok(())
    }

    /// Removes the file `name`, if it is there.
    pub(crate) fn unlink(&self, name: &str) -> io::Result<()> {
        match rustix::fs::unlinkat(&self.fd, name, AtFlags::empty()) {
            Ok(()) => did(Step::Changed),
            Err(Errno::NOENT) => {}
            Err(error) => return Err(error.into()),
        }
        Ok(())
    }

    /// The file system it is on.
    pub(crate) fn device(&self) -> io::Result<u64> {
        Ok(rustix::fs::fstat(&self.fd)?.st_dev)
    }

    /// Returns when the names in it are on disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        rustix::fs::fsync(&self.fd)?;
        did(Step::SyncedFolder(&self.path));
        Ok(())
    }
}

/// Returns when the contents of `file` are on disk.
pub(crate) fn sync_file(file: &File) -> io::Result<()> {
    file.sync_all()?;
    did(Step::SyncedFile(file));
    Ok(())
}

/// The file behind `file`, opened anew for reading: with a place of its own to read from, because
/// others may share that of `file`.
pub(crate) fn reopen(file: &File) -> io::Result<File> {
    // Non-blocking: it means nothing for regular files, and anything else must not hold us up.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    Ok(rustix::fs::open(proc_path(file), flags, Mode::empty())?.into())
}

fn proc_path(file: &File) -> String {
    format!("/proc/self/fd/{}", file.as_raw_fd())
}

/// Removes the file, folder or link at `path`. Does not follow links.
pub(crate) fn delete(path: &Path) -> Result<()> {
    let is_folder = fs::symlink_metadata(path).is_ok_and(|meta| meta.is_dir());
    let removed = if is_folder { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    match removed {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(Error::io("remove", path)(error)),
        _ => {
            did(Step::Changed);
            Ok(())
        }
    }
}

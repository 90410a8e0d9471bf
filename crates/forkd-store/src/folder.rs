//! Folders and the files in them, by descriptor: no link is ever followed, nothing special opened.

use std::fs::File;
use std::io;
use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags};
use rustix::io::Errno;

/// An open folder. It stays what it is when something else gets its name.
#[derive(Debug)]
pub(crate) struct Folder {
    fd: OwnedFd,
    path: PathBuf,
}

impl Folder {
    /// Opens the folder at `path`, whose last part must not be a link.
    pub(crate) fn open(path: &Path) -> io::Result<Folder> {
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        Ok(Folder { fd: rustix::fs::open(path, flags, Mode::empty())?, path: path.to_owned() })
    }

    /// The path it was opened by.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Opens the regular file `name` for reading. The error says what is there instead.
    pub(crate) fn read(&self, name: &str) -> Result<File, String> {
        // Non-blocking: somebody may have put a pipe there. It means nothing for regular files.
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
        Ok(rustix::fs::openat(&self.fd, name, flags, Mode::RUSR | Mode::WUSR)?.into())
    }

    /// Returns when the names in it are on disk.
    pub(crate) fn sync(&self) -> io::Result<()> {
        Ok(rustix::fs::fsync(&self.fd)?)
    }
}

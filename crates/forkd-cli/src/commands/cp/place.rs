//! A folder on this host that no copied name can leave: every file is opened relative to a descriptor, by a
//! plain name, and no link is followed.

use std::fs::File;
use std::io::Write;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context, Result, bail};
use rustix::fs::{AtFlags, Mode, OFlags};
use rustix::io::Errno;

/// A folder into which files are copied.
#[derive(Debug)]
pub(crate) struct DestinationFolder {
    folder: OwnedFd,
}

impl DestinationFolder {
    /// The folder that the user named; its path may contain links.
    pub(crate) fn open(path: &Path) -> Result<DestinationFolder> {
        let path = if path.as_os_str().is_empty() { Path::new(".") } else { path };
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC;
        let folder = rustix::fs::open(path, flags, Mode::empty())
            .with_context(|| format!("cannot open the folder {}", path.display()))?;
        Ok(DestinationFolder { folder })
    }

    /// The folder `name` in it, created if it is missing.
    pub(crate) fn folder(&self, name: &str, mode: u32) -> Result<DestinationFolder> {
        check(name)?;
        // Its owner must be able to fill it.
        match rustix::fs::mkdirat(&self.folder, name, Mode::from_raw_mode(mode & 0o777 | 0o700)) {
            Ok(()) | Err(Errno::EXIST) => {}
            Err(errno) => bail!("cannot create the folder {name}: {errno}"),
        }
        let flags = OFlags::RDONLY | OFlags::DIRECTORY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        match rustix::fs::openat(&self.folder, name, flags, Mode::empty()) {
            Ok(folder) => Ok(DestinationFolder { folder }),
            Err(Errno::LOOP | Errno::NOTDIR) => bail!("{name} exists and is not a folder"),
            Err(errno) => bail!("cannot open the folder {name}: {errno}"),
        }
    }

    /// Creates a file that gets its name when it is [kept](Draft::keep).
    pub(crate) fn draft(&self, name: &str, mode: u32) -> Result<Draft> {
        check(name)?;
        static NEXT: AtomicU64 = AtomicU64::new(0);
        let number = NEXT.fetch_add(1, Ordering::Relaxed);
        let temporary = format!(".forkd-{}-{number}", std::process::id());
        let flags = OFlags::WRONLY | OFlags::CREATE | OFlags::EXCL | OFlags::NOFOLLOW | OFlags::CLOEXEC;
        let mode = Mode::from_raw_mode(mode & 0o777 | 0o600);
        let file = rustix::fs::openat(&self.folder, &temporary, flags, mode)
            .with_context(|| format!("cannot write {name}"))?;
        let folder = self.folder.try_clone().context("cannot keep a folder open")?;
        Ok(Draft { file: file.into(), folder, temporary, name: Some(name.to_owned()) })
    }
}

/// An unfinished file; removed if it is not kept.
#[derive(Debug)]
pub(crate) struct Draft {
    file: File,
    folder: OwnedFd,
    temporary: String,
    /// `None` once it has its name.
    name: Option<String>,
}

impl Draft {
    pub(crate) fn write(&mut self, bytes: &[u8]) -> Result<()> {
        let name = self.name.as_deref().unwrap_or_default();
        self.file.write_all(bytes).with_context(|| format!("cannot write {name}"))
    }

    /// Gives it its name. An existing file or link of that name is replaced, not followed.
    pub(crate) fn keep(mut self) -> Result<()> {
        if let Some(name) = &self.name {
            rustix::fs::renameat(&self.folder, &self.temporary, &self.folder, name)
                .with_context(|| format!("cannot put {name} into its place"))?;
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

/// Whether a name is that of an entry of a folder: not `.`, not `..`, and not a path.
pub(crate) fn is_plain_name(name: &str) -> bool {
    !matches!(name, "" | "." | "..") && !name.contains(['/', '\0'])
}

fn check(name: &str) -> Result<()> {
    if !is_plain_name(name) {
        bail!("{name:?} is not a name that a file can have here");
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn nothing_is_written_outside_whatever_the_name_or_the_links_there_are() {
        let top = tempfile::tempdir().unwrap();
        let (inside, outside) = (top.path().join("in"), top.path().join("out"));
        std::fs::create_dir(&inside).unwrap();
        std::fs::create_dir(&outside).unwrap();
        std::fs::write(outside.join("file"), "untouched").unwrap();
        std::os::unix::fs::symlink(&outside, inside.join("folder")).unwrap();
        std::os::unix::fs::symlink(outside.join("file"), inside.join("link")).unwrap();
        let place = DestinationFolder::open(&inside).unwrap();
        for name in ["", ".", "..", "../out/file", "/etc/passwd", "a/b", "a\0b"] {
            assert!(place.draft(name, 0o644).is_err() && place.folder(name, 0o755).is_err(), "{name:?}");
        }
        assert!(place.folder("folder", 0o755).is_err(), "a link is no folder");
        let mut draft = place.draft("link", 0o644).unwrap();
        draft.write(b"new").unwrap();
        draft.keep().unwrap();
        assert_eq!(std::fs::read(inside.join("link")).unwrap(), b"new");
        assert!(!inside.join("link").is_symlink());
        assert_eq!(std::fs::read(outside.join("file")).unwrap(), b"untouched");
        assert_eq!(std::fs::read_dir(&outside).unwrap().count(), 1);
    }

    #[test]
    fn a_file_that_is_not_kept_leaves_nothing() {
        let top = tempfile::tempdir().unwrap();
        let place = DestinationFolder::open(top.path()).unwrap();
        let mut draft = place.draft("file", 0o600).unwrap();
        draft.write(b"half").unwrap();
        drop(draft);
        assert_eq!(std::fs::read_dir(top.path()).unwrap().count(), 0);
    }
}

//! A file tree on its way into an image. The files lie in a folder of the host; the attributes that need root
//! there (owner, mode, device number) are kept beside them.
//!
//! Nothing here ever changes an owner, makes a device node or sets a setuid bit on the host: a
//! hostile tar gets plain files of the caller's, readable by him alone.

use std::collections::HashMap;
use std::fs::{self, File};
use std::io::Read;
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Path, PathBuf};

use rustix::fs::{Mode, OFlags, ResolveFlags};
use rustix::io::Errno;

use crate::elf;
use crate::error::{Error, Result};

pub(crate) const TYPE_MASK: u32 = 0o170_000;
pub(crate) const TYPE_FILE: u32 = 0o100_000;
pub(crate) const TYPE_FOLDER: u32 = 0o040_000;
pub(crate) const TYPE_LINK: u32 = 0o120_000;
pub(crate) const TYPE_CHAR: u32 = 0o020_000;
pub(crate) const TYPE_BLOCK: u32 = 0o060_000;
pub(crate) const TYPE_FIFO: u32 = 0o010_000;

/// The blocks of our ext4 disks.
pub(crate) const BLOCK: u64 = 4096;

/// A file's attributes in the image.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Node {
    /// Type and permissions.
    pub(crate) mode: u32,
    pub(crate) uid: u32,
    pub(crate) gid: u32,
    /// Device number, for device nodes.
    pub(crate) rdev: u64,
}

/// An extended attribute, set once the disk exists.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Xattr {
    /// Path in the image, without the leading `/`.
    pub(crate) path: Vec<u8>,
    pub(crate) name: String,
    pub(crate) value: Vec<u8>,
}

/// A file tree on its way into an image.
pub(crate) struct Tree {
    /// Where the files lie.
    pub(crate) path: PathBuf,
    /// The same, opened.
    pub(crate) root: OwnedFd,
    /// By device and inode number, because hard links are one file.
    pub(crate) nodes: HashMap<(u64, u64), Node>,
    pub(crate) xattrs: Vec<Xattr>,
    /// Room the contents take, in bytes.
    pub(crate) bytes: u64,
}

impl Tree {
    /// A tree without files, to be filled in the empty folder `path`.
    pub(crate) fn empty(path: &Path) -> Result<Tree> {
        let root = open_folder(path)?;
        let mut tree =
            Tree { path: path.to_owned(), root, nodes: HashMap::new(), xattrs: Vec::new(), bytes: 0 };
        let meta = fs::metadata(path).map_err(Error::io("read", path))?;
        tree.set(&meta, Node { mode: TYPE_FOLDER | 0o755, uid: 0, gid: 0, rdev: 0 });
        Ok(tree)
    }

    /// The existing files in folder `path`. Files of a caller without root become root's: such a caller could
    /// not have unpacked them with another owner.
    pub(crate) fn scan(path: &Path, limit: u64) -> Result<Tree> {
        let mut tree = Tree::empty(path)?;
        let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
        let device = fs::metadata(path).map_err(Error::io("read", path))?.dev();
        let mut pending = vec![path.to_owned()];
        while let Some(next) = pending.pop() {
            let meta = fs::symlink_metadata(&next).map_err(Error::io("read", &next))?;
            if meta.dev() != device {
                return Err(Error::Invalid(format!(
                    "{} is a mount point: the folder of an image must be on one file system; unmount \
                     it, or build from `tar --one-file-system`",
                    next.display()
                )));
            }
            let known = tree.set(
                &meta,
                Node {
                    mode: meta.mode(),
                    uid: if meta.uid() == uid { 0 } else { meta.uid() },
                    gid: if meta.gid() == gid { 0 } else { meta.gid() },
                    rdev: meta.rdev(),
                },
            );
            if meta.is_dir() {
                tree.bytes += BLOCK;
                for entry in fs::read_dir(&next).map_err(Error::io("read", &next))? {
                    pending.push(entry.map_err(Error::io("read", &next))?.path());
                }
            } else if meta.is_file() && !known {
                // Holes of the source stay holes in the image.
                tree.bytes += meta.len().min(meta.blocks() * 512).next_multiple_of(BLOCK);
            }
            tree.check_size(limit)?;
        }
        Ok(tree)
    }

    /// Records the attributes of the file behind `meta`. Returns whether it was known before.
    pub(crate) fn set(&mut self, meta: &fs::Metadata, node: Node) -> bool {
        self.nodes.insert((meta.dev(), meta.ino()), node).is_some()
    }

    /// Ends what cannot fit into a disk of `limit` bytes, before it fills the host's.
    pub(crate) fn check_size(&self, limit: u64) -> Result<()> {
        let inodes = self.nodes.len() as u64 * 256;
        let needed = self.bytes.saturating_add(inodes);
        if needed > limit {
            return Err(too_small(limit));
        }
        Ok(())
    }

    /// Opens `path` as a process in the image would: links lead where they lead there, and never out.
    pub(crate) fn open(&self, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
        open_inside(&self.root, path, flags)
    }

    /// What `path` is in the image, links followed.
    pub(crate) fn node(&self, path: &str) -> Option<Node> {
        let file = self.open(path.as_bytes(), OFlags::PATH).ok()?;
        let meta = File::from(file).metadata().ok()?;
        self.nodes.get(&(meta.dev(), meta.ino())).copied()
    }

    /// Whether `path` is a program in the image, links followed.
    pub(crate) fn is_program(&self, path: &str) -> bool {
        self.node(path).is_some_and(|node| node.mode & TYPE_MASK == TYPE_FILE && node.mode & 0o111 != 0)
    }

    /// Checks that the tree has a `/bin/sh` for this architecture: without one no command can be run.
    pub(crate) fn check_shell(&self) -> Result<()> {
        if !self.is_program("bin/sh") {
            return Err(Error::Invalid(
                "the image has no /bin/sh, so no command could be run in it; add a shell: the packages \
                 dash and coreutils, or busybox with a link /bin/sh -> busybox"
                    .into(),
            ));
        }
        let mut head = [0u8; 20];
        let file = self.open(b"bin/sh", OFlags::RDONLY | OFlags::NONBLOCK);
        let read = file.map_err(std::io::Error::from).and_then(|file| File::from(file).read_exact(&mut head));
        read.map_err(Error::io("read /bin/sh in", &self.path))?;
        match elf::architecture(&head).as_deref() {
            Some("x86_64") => Ok(()),
            Some(other) => Err(Error::Invalid(format!(
                "the image is for {other} (its /bin/sh is), and guests are x86_64; use an image for x86_64 \
                 (amd64)"
            ))),
            None => Err(Error::Invalid(
                "the image's /bin/sh is not an ELF program; add a real shell, such as dash or busybox".into(),
            )),
        }
    }
}

pub(crate) fn too_small(limit: u64) -> Error {
    let mib = limit >> 20;
    Error::Invalid(format!(
        "the contents do not fit into a disk of {mib} MiB; choose a larger one with `--size-mib {}`",
        mib.saturating_mul(2)
    ))
}

fn open_folder(path: &Path) -> Result<OwnedFd> {
    rustix::fs::open(path, OFlags::RDONLY | OFlags::DIRECTORY | OFlags::CLOEXEC, Mode::empty())
        .map_err(Error::io("open", path))
}

/// Opens `path` below `root` as if `root` were `/`.
pub(crate) fn open_inside(root: &OwnedFd, path: &[u8], flags: OFlags) -> rustix::io::Result<OwnedFd> {
    let path = if path.is_empty() { b"." } else { path };
    let path = Path::new(std::ffi::OsStr::from_bytes(path));
    // The kernel returns EAGAIN when anything on the system was renamed while it looked at a `..`.
    for _ in 0..100 {
        let flags = flags | OFlags::CLOEXEC;
        match rustix::fs::openat2(root, path, flags, Mode::empty(), ResolveFlags::IN_ROOT) {
            Err(Errno::AGAIN) => {}
            result => return result,
        }
    }
    Err(Errno::AGAIN)
}

//! The walk through a folder and all below it, in the order of the bytes of paths.
//!
//! The walk opens every folder by its name in the folder above, and follows no link. So a process that moves or
//! replaces folders meanwhile cannot lead the walk out of the folder. Only regular files are opened.

use std::{
    collections::BTreeSet,
    ffi::OsStr,
    fs::File,
    io::{self, Read},
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::Path,
};

use forkd_protocol::{
    agent::{TreeEntry, incomplete},
    connect::{Code, Error},
};
use rustix::{
    fs::{AtFlags, Dir, FileType, Mode, OFlags, Stat},
    io::Errno,
};
use sha2::{Digest, Sha256};

use super::super::{content::PIECE, service::failed};

/// How deep folders can be nested. Each level costs a descriptor.
const MAX_DEPTH: usize = 200;

/// File systems that the walk enters: ext2 to ext4, XFS, Btrfs, F2FS, ZFS, bcachefs, JFS, tmpfs, ramfs, overlay,
/// SquashFS, EROFS, FAT, exFAT, NTFS, ISO 9660, UDF. All others are interfaces of the kernel, or another machine or a
/// process answers for them, and may not answer.
const ENTERED: [u32; 17] = [
    0xef53,
    0x5846_5342,
    0x9123_683e,
    0xf2f5_2010,
    0x2fc1_2fc1,
    0xca45_1a4e,
    0x3153_464a,
    0x0102_1994,
    0x8584_58f6,
    0x794c_7630,
    0x7371_7368,
    0xe0f5_e1e2,
    0x4d44,
    0x2011_bab0,
    0x7366_746e,
    0x9660,
    0x1501_3346,
];

/// What a walk does.
#[derive(Debug, Clone, Copy)]
pub(super) struct Options {
    /// Read regular files and compute their hashes.
    pub(super) hash: bool,
    /// A folder with more entries is refused.
    pub(super) max_entries: usize,
}

/// Why a walk ends early.
#[derive(Debug)]
pub(super) enum Stop {
    /// The caller gets this error.
    Refused(Error),
    /// The caller has left.
    Gone(io::Error),
}

/// Takes what a walk finds.
pub(super) trait Visit {
    fn found(&mut self, entry: TreeEntry) -> Result<(), Stop>;
    /// Is called often: before each entry and each piece of a file.
    fn tick(&mut self) -> Result<(), Stop>;
}

/// An open folder that can be walked through.
pub(super) struct Root {
    folder: OwnedFd,
    device: u64,
    /// The device of `/dev`, whose file system looks like a tmpfs.
    dev: Option<u64>,
}

/// Opens the folder to begin with. The caller names it, so a link here is followed.
pub(super) fn open_root(path: &Path) -> Result<Root, Error> {
    let opened = || -> Result<Root, Errno> {
        let folder = rustix::fs::open(path, FOLDER, Mode::empty())?;
        let device = rustix::fs::fstat(&folder)?.st_dev;
        let device_of = |path| rustix::fs::stat(path).ok().map(|stat| stat.st_dev);
        let dev = device_of("/dev").filter(|dev| Some(*dev) != device_of("/"));
        Ok(Root { folder, device, dev })
    };
    let root = opened().map_err(|errno| failed(path, &errno.into()))?;
    if !is_entered(root.folder.as_fd(), root.device, root.dev) {
        let message = format!(
            "{}: a pseudo file system, or one of another machine or process: choose another folder",
            path.display()
        );
        return Err(Error::new(Code::InvalidArgument, message));
    }
    Ok(root)
}

const FOLDER: OFlags = OFlags::RDONLY.union(OFlags::DIRECTORY).union(OFlags::CLOEXEC);

fn is_entered(folder: BorrowedFd, device: u64, dev: Option<u64>) -> bool {
    // The magic numbers have 32 bits, whatever the type of the field.
    let magic = rustix::fs::fstatfs(folder).map(|found| found.f_type as u32);
    dev != Some(device) && magic.is_ok_and(|magic| ENTERED.contains(&magic))
}

/// A folder that the walk is in.
struct Level {
    folder: OwnedFd,
    device: u64,
    /// Names that are left. A folder is there twice: its name, and later its name with a slash, for what is in it.
    /// That is the order of the bytes of whole paths: `a`, `a-b`, `a/b`.
    left: BTreeSet<Vec<u8>>,
    /// How much of the path leads here, the last slash included.
    path_len: usize,
}

/// Walks through `root`; it can be walked through again.
pub(super) fn walk(root: &Root, options: Options, visit: &mut dyn Visit) -> Result<(), Stop> {
    let folder = openat(root.folder.as_fd(), OsStr::new("."), FOLDER)
        .map_err(|errno| Stop::Refused(failed(Path::new("."), &errno.into())))?;
    let mut walk = Walk { options, visit, dev: root.dev, path: Vec::new(), entries: 0 };
    let mut levels = vec![walk.enter(folder, root.device)?];
    while let Some(level) = levels.last_mut() {
        walk.path.truncate(level.path_len);
        let Some(key) = level.left.pop_first() else {
            levels.pop();
            continue;
        };
        walk.visit.tick()?;
        walk.path.extend_from_slice(&key);
        match key.strip_suffix(b"/") {
            None => {
                if walk.look(level, &key)? {
                    level.left.insert([&key, &b"/"[..]].concat());
                }
            }
            Some(name) => {
                // A folder that is not there any more, or cannot be opened now, is shown as empty.
                let Ok(folder) = openat(level.folder.as_fd(), OsStr::from_bytes(name), FOLDER) else {
                    continue;
                };
                let Ok(stat) = rustix::fs::fstat(&folder) else { continue };
                if stat.st_dev != level.device && !is_entered(folder.as_fd(), stat.st_dev, root.dev) {
                    continue;
                }
                if levels.len() >= MAX_DEPTH {
                    return Err(too_large(format!("folders are nested more than {MAX_DEPTH} deep")));
                }
                levels.push(walk.enter(folder, stat.st_dev)?);
            }
        }
    }
    Ok(())
}

fn too_large(what: String) -> Stop {
    Stop::Refused(Error::new(Code::OutOfRange, format!("{what}: choose a smaller folder")))
}

fn openat(at: BorrowedFd, name: &OsStr, flags: OFlags) -> Result<OwnedFd, Errno> {
    rustix::fs::openat(at, name, flags | OFlags::NOFOLLOW, Mode::empty())
}

struct Walk<'v> {
    options: Options,
    visit: &'v mut dyn Visit,
    dev: Option<u64>,
    /// The path from the root to where the walk is.
    path: Vec<u8>,
    /// Names that were read.
    entries: usize,
}

impl Walk<'_> {
    /// Reads the names of a folder.
    fn enter(&mut self, folder: OwnedFd, device: u64) -> Result<Level, Stop> {
        let failed = |path: &[u8], errno: Errno| {
            Stop::Refused(failed(Path::new(OsStr::from_bytes(path)), &errno.into()))
        };
        let mut left = BTreeSet::new();
        for found in Dir::read_from(&folder).map_err(|errno| failed(&self.path, errno))? {
            let found = found.map_err(|errno| failed(&self.path, errno))?;
            let name = found.file_name().to_bytes();
            if matches!(name, b"." | b"..") {
                continue;
            }
            // Each folder is read once, so this counts every entry, and limits the names in memory.
            self.entries += 1;
            if self.entries > self.options.max_entries {
                return Err(too_large(format!("more than {} entries", self.options.max_entries)));
            }
            left.insert(name.to_vec());
        }
        Ok(Level { folder, device, left, path_len: self.path.len() })
    }

    /// Describes `name`; true if it is a folder to walk through.
    fn look(&mut self, level: &Level, name: &[u8]) -> Result<bool, Stop> {
        let (path, path_bytes) = text(&self.path);
        let mut entry = TreeEntry { path, path_bytes, ..TreeEntry::default() };
        let name = OsStr::from_bytes(name);
        let flags = AtFlags::SYMLINK_NOFOLLOW | AtFlags::NO_AUTOMOUNT;
        let stat = match rustix::fs::statat(&level.folder, name, flags) {
            Ok(stat) => stat,
            // Removed since the folder was read.
            Err(Errno::NOENT) => return Ok(false),
            Err(_) => {
                entry.r#type = "FILE_TYPE_UNSPECIFIED".into();
                entry.incomplete = Some(incomplete::UNREADABLE.into());
                return self.visit.found(entry).map(|()| false);
            }
        };
        describe(&mut entry, &stat);
        let mut enters = false;
        let why = match FileType::from_raw_mode(stat.st_mode) {
            FileType::Directory => {
                let why = self.check_folder(level, name);
                enters = why.is_none();
                why
            }
            FileType::Symlink => match rustix::fs::readlinkat(&level.folder, name, Vec::new()) {
                Ok(target) => {
                    let (target, bytes) = text(&target.into_bytes());
                    (entry.target, entry.target_bytes) = (Some(target), bytes);
                    None
                }
                Err(_) => Some(incomplete::CHANGING),
            },
            FileType::RegularFile if self.options.hash => self.hash(level, name, &mut entry)?,
            _ => None,
        };
        entry.incomplete = why.map(String::from);
        self.visit.found(entry)?;
        Ok(enters)
    }

    /// Why the walk does not enter a folder.
    fn check_folder(&self, level: &Level, name: &OsStr) -> Option<&'static str> {
        let opened = openat(level.folder.as_fd(), name, FOLDER);
        let device = |folder: &OwnedFd| rustix::fs::fstat(folder).map(|stat| stat.st_dev);
        match opened.and_then(|folder| Ok((device(&folder)?, folder))) {
            Ok((device, folder)) if device != level.device => {
                (!is_entered(folder.as_fd(), device, self.dev)).then_some(incomplete::FILE_SYSTEM)
            }
            Ok(_) => None,
            Err(Errno::NOENT | Errno::NOTDIR | Errno::LOOP) => Some(incomplete::CHANGING),
            Err(_) => Some(incomplete::UNREADABLE),
        }
    }

    /// Adds the hash of a regular file, or returns why there is none. The attributes become those of the file that
    /// was read.
    fn hash(
        &mut self,
        level: &Level,
        name: &OsStr,
        entry: &mut TreeEntry,
    ) -> Result<Option<&'static str>, Stop> {
        // Should it be a pipe or a device by now, this neither blocks nor becomes a terminal of the agent.
        let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
        let opened = openat(level.folder.as_fd(), name, flags);
        let (mut file, before) = match opened.and_then(|file| Ok((rustix::fs::fstat(&file)?, file))) {
            Ok((stat, file)) => (File::from(file), stat),
            Err(Errno::NOENT | Errno::LOOP | Errno::NXIO) => return Ok(Some(incomplete::CHANGING)),
            Err(_) => return Ok(Some(incomplete::UNREADABLE)),
        };
        if !FileType::from_raw_mode(before.st_mode).is_file() {
            return Ok(Some(incomplete::CHANGING));
        }
        describe(entry, &before);
        let (mut hash, mut left) = (Sha256::new(), entry.size);
        let mut piece = vec![0; PIECE];
        // A file that grows is read to the size it had.
        while left > 0 {
            self.visit.tick()?;
            let most = usize::try_from(left).unwrap_or(usize::MAX).min(piece.len());
            match file.read(&mut piece[..most]) {
                Ok(0) => return Ok(Some(incomplete::CHANGING)),
                Ok(n) => {
                    hash.update(&piece[..n]);
                    left -= n as u64;
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                Err(_) => return Ok(Some(incomplete::UNREADABLE)),
            }
        }
        let state = |stat: &Stat| (stat.st_size, stat.st_mtime, stat.st_mtime_nsec);
        if rustix::fs::fstat(&file).is_ok_and(|after| state(&after) != state(&before)) {
            return Ok(Some(incomplete::CHANGING));
        }
        entry.sha256 = Some(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect());
        Ok(None)
    }
}

fn describe(entry: &mut TreeEntry, stat: &Stat) {
    let kind = FileType::from_raw_mode(stat.st_mode);
    let (name, has_size) = match kind {
        FileType::RegularFile => ("FILE_TYPE_FILE", true),
        FileType::Directory => ("FILE_TYPE_DIRECTORY", false),
        FileType::Symlink => ("FILE_TYPE_SYMLINK", true),
        _ => ("FILE_TYPE_UNSPECIFIED", false),
    };
    entry.r#type = name.into();
    // The size of a folder depends on what was in it before.
    entry.size = if has_size { u64::try_from(stat.st_size).unwrap_or_default() } else { 0 };
    // The kernel gives less than a second beside the seconds, whatever the type of the field.
    let millis = stat.st_mtime_nsec as i64 / 1_000_000;
    entry.modified_ms = stat.st_mtime.saturating_mul(1000).saturating_add(millis);
    entry.mode = stat.st_mode & 0o7777;
}

/// Bytes as text, and the bytes themselves if the text does not have them all.
fn text(bytes: &[u8]) -> (String, Option<Vec<u8>>) {
    match std::str::from_utf8(bytes) {
        Ok(text) => (text.to_owned(), None),
        Err(_) => (String::from_utf8_lossy(bytes).into_owned(), Some(bytes.to_vec())),
    }
}

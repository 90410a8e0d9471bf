//! Unpacking a tar into a [`Tree`]. The tar is hostile: whatever its paths, links, sizes and numbers
//! say, files appear only inside the tree, and memory and disk have bounds.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::os::fd::OwnedFd;
use std::os::unix::ffi::OsStrExt;
use std::path::Path;

use rustix::fs::{AtFlags, Mode, OFlags, Timespec, Timestamps};
use rustix::io::Errno;
use tar::{EntryType, Header, PaxExtensions};

use crate::error::{Error, Result};
use crate::tree::{
    BLOCK, Node, TYPE_BLOCK, TYPE_CHAR, TYPE_FIFO, TYPE_FILE, TYPE_FOLDER, TYPE_LINK, TYPE_MASK, Tree, Xattr,
    open_inside, too_small,
};

/// The most a long name or a set of extended headers may take. Linux has paths up to 4 KiB and
/// attributes up to 64 KiB.
const MAX_EXTENSION: u64 = 1 << 20;
/// The most memory all extended attributes together may take.
const MAX_XATTRS: usize = 16 << 20;
/// Padding behind the end mark that is read. Tars are padded to 10 KiB.
const MAX_PADDING: u64 = 1 << 20;
/// Data is copied in pieces of this size; a piece of zeroes becomes a hole.
const PIECE: usize = 64 << 10;

/// Unpacks the tar that `reader` gives into `tree`, which must end up small enough for a disk of
/// `limit` bytes.
pub(crate) fn unpack(reader: impl Read, tree: &mut Tree, limit: u64, log: &dyn Fn(&str)) -> Result<()> {
    let mut reader = EndWatch { inner: reader, zeroes: 0 };
    let mut archive = tar::Archive::new(&mut reader);
    // Raw: the crate would read long names and extended headers of any size into memory.
    let entries = archive.entries().map_err(broken)?.raw(true);
    let mut unpacker = Unpacker { tree, limit, xattr_bytes: 0, parent: None };
    let mut extension = Extension::default();
    for entry in entries {
        let mut entry = entry.map_err(broken)?;
        let header = entry.header().clone();
        match header.entry_type() {
            EntryType::XGlobalHeader => {}
            EntryType::GNULongName => extension.path = Some(without_zero(read_extension(&mut entry)?)),
            EntryType::GNULongLink => extension.link = Some(without_zero(read_extension(&mut entry)?)),
            EntryType::XHeader => extension.read_pax(&read_extension(&mut entry)?)?,
            kind => {
                let mut extension = std::mem::take(&mut extension);
                let Some(file) = Entry::read(&header, &mut extension)? else {
                    log(&format!("left out an entry of kind {:?}", char::from(kind.as_byte())));
                    continue;
                };
                unpacker.add(&file, &mut entry)?;
                unpacker.keep_xattrs(&file.path, extension.xattrs)?;
            }
        }
    }
    if reader.zeroes < 512 {
        return Err(Error::Invalid("the tar is truncated: its end mark is missing".into()));
    }
    // What follows the end mark is padding; reading it lets a program that writes into a pipe finish.
    io::copy(&mut reader.take(MAX_PADDING), &mut io::sink()).map_err(broken)?;
    Ok(())
}

fn broken(error: io::Error) -> Error {
    let what = if error.kind() == io::ErrorKind::UnexpectedEof { "truncated" } else { "broken" };
    Error::Invalid(format!("the tar is {what}: {error}"))
}

/// Counts the zeroes at the end of what was read: a whole tar ends in at least one block of them.
struct EndWatch<R> {
    inner: R,
    zeroes: usize,
}

impl<R: Read> Read for EndWatch<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        let count = self.inner.read(buffer)?;
        let zeroes = buffer[..count].iter().rev().take_while(|byte| **byte == 0).count();
        self.zeroes = if zeroes == count { self.zeroes.saturating_add(count) } else { zeroes };
        Ok(count)
    }
}

/// Attributes of a file from the headers before its own.
#[derive(Default)]
struct Extension {
    path: Option<Vec<u8>>,
    link: Option<Vec<u8>>,
    size: Option<u64>,
    uid: Option<u64>,
    gid: Option<u64>,
    mtime: Option<u64>,
    xattrs: Vec<(String, Vec<u8>)>,
    sparse: bool,
}

impl Extension {
    fn read_pax(&mut self, bytes: &[u8]) -> Result<()> {
        for record in PaxExtensions::new(bytes) {
            let record = record.map_err(broken)?;
            let Ok(key) = record.key() else { continue };
            let value = record.value_bytes();
            let number = || {
                // Times have a fraction, which is dropped.
                let text = std::str::from_utf8(value).ok()?;
                text.split('.').next()?.parse::<u64>().ok()
            };
            match key {
                "path" => self.path = Some(value.to_vec()),
                "linkpath" => self.link = Some(value.to_vec()),
                "size" => self.size = number(),
                "uid" => self.uid = number(),
                "gid" => self.gid = number(),
                "mtime" => self.mtime = number(),
                key if key.starts_with("GNU.sparse.") => self.sparse = true,
                key => {
                    if let Some(name) = key.strip_prefix("SCHILY.xattr.")
                        && is_kept(name)
                    {
                        self.xattrs.push((name.to_owned(), value.to_vec()));
                    }
                }
            }
        }
        Ok(())
    }
}

/// Whether an extended attribute means something in a guest. Labels of the source's security module
/// do not.
fn is_kept(name: &str) -> bool {
    name.starts_with("user.") || name.starts_with("system.posix_acl_") || name == "security.capability"
}

fn read_extension(entry: &mut impl Read) -> Result<Vec<u8>> {
    crate::compress::read_all(entry, MAX_EXTENSION).map_err(broken)
}

fn without_zero(mut bytes: Vec<u8>) -> Vec<u8> {
    if let Some(end) = bytes.iter().position(|byte| *byte == 0) {
        bytes.truncate(end);
    }
    bytes
}

/// A file of the tar, its headers put together and checked.
struct Entry {
    kind: EntryType,
    /// Where, inside the tree.
    path: Vec<u8>,
    /// The same as in the tar, for messages.
    shown: String,
    node: Node,
    size: u64,
    link: Vec<u8>,
    mtime: u64,
}

impl Entry {
    /// `None` for kinds of entries that are no files.
    fn read(header: &Header, extension: &mut Extension) -> Result<Option<Entry>> {
        let kind = header.entry_type();
        let path = extension.path.take().unwrap_or_else(|| header.path_bytes().into_owned());
        let shown = String::from_utf8_lossy(&path).into_owned();
        if extension.sparse || kind == EntryType::GNUSparse {
            return Err(refused(&shown, "is stored sparse; make the tar without `--sparse`"));
        }
        let size = header.entry_size().map_err(broken)?;
        if extension.size.is_some_and(|extended| extended != size) {
            return Err(refused(&shown, "is larger than 8 GiB, which a tar image cannot hold"));
        }
        let path = inside(&path).map_err(|why| refused(&shown, why))?;
        let Some(node) = node(header, kind, extension).map_err(|why| refused(&shown, why))? else {
            return Ok(None);
        };
        let link = extension.link.take().or_else(|| header.link_name_bytes().map(|name| name.into_owned()));
        let mtime = extension.mtime.or_else(|| header.mtime().ok()).unwrap_or_default();
        Ok(Some(Entry { kind, path, shown, node, size, link: link.unwrap_or_default(), mtime }))
    }
}

struct Unpacker<'a> {
    tree: &'a mut Tree,
    limit: u64,
    /// Memory the extended attributes take so far.
    xattr_bytes: usize,
    /// The folder the last file went to: the next one mostly goes there too.
    parent: Option<(Vec<u8>, OwnedFd)>,
}

impl Unpacker<'_> {
    fn add(&mut self, entry: &Entry, data: &mut impl Read) -> Result<()> {
        if entry.path.is_empty() {
            // The root itself: only its owner and mode matter.
            let meta = std::fs::metadata(&self.tree.path).map_err(Error::io("read", &self.tree.path))?;
            if entry.kind.is_dir() {
                self.tree.set(&meta, entry.node);
            }
            return Ok(());
        }
        let at = |error: Errno| place(&entry.shown, error);
        let (parent_path, name) = split(&entry.path);
        let name = Path::new(std::ffi::OsStr::from_bytes(name));
        self.enter(parent_path, &entry.shown)?;
        let parent = self.parent.as_ref().map(|(_, folder)| folder).ok_or_else(|| at(Errno::NOENT))?;
        let replaced = make_room(parent, name, entry.kind.is_dir()).map_err(at)?;
        let bytes = self.make(entry, parent, name, data)?;
        set_time(parent, name, entry.mtime).map_err(at)?;
        let meta = rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW).map_err(at)?;
        // A hard link's header repeats the attributes of its target; the target's count.
        if entry.kind != EntryType::Link {
            self.tree.nodes.insert((meta.st_dev, meta.st_ino), entry.node);
        }
        if replaced {
            // It may have been, or led to, the current folder.
            self.parent = None;
        }
        self.tree.bytes = self.tree.bytes.saturating_add(bytes);
        self.tree.check_size(self.limit)
    }

    /// Makes the file itself; how much room it takes.
    fn make(&self, entry: &Entry, parent: &OwnedFd, name: &Path, data: &mut impl Read) -> Result<u64> {
        let at = |error: Errno| place(&entry.shown, error);
        match entry.kind {
            EntryType::Directory => match rustix::fs::mkdirat(parent, name, Mode::from(0o700)) {
                Ok(()) => Ok(BLOCK),
                Err(Errno::EXIST) => Ok(0),
                Err(error) => Err(at(error)),
            },
            EntryType::Symlink if entry.link.is_empty() => Err(refused(&entry.shown, "is a link to nothing")),
            EntryType::Symlink => {
                let target = std::ffi::OsStr::from_bytes(&entry.link);
                rustix::fs::symlinkat(target, parent, name).map_err(at)?;
                Ok(0)
            }
            EntryType::Link => {
                let target = inside(&entry.link).map_err(|why| refused(&entry.shown, why))?;
                let (folder, target) = split(&target);
                let target = std::ffi::OsStr::from_bytes(target);
                let linked = open_inside(&self.tree.root, folder, OFlags::PATH | OFlags::DIRECTORY)
                    .and_then(|folder| rustix::fs::linkat(folder, target, parent, name, AtFlags::empty()));
                match linked {
                    Ok(()) => Ok(0),
                    Err(Errno::NOENT) => Err(refused(
                        &entry.shown,
                        "is a hard link to a file that is not before it in the tar",
                    )),
                    Err(error) => Err(at(error)),
                }
            }
            _ => {
                let flags =
                    OFlags::CREATE | OFlags::EXCL | OFlags::WRONLY | OFlags::NOFOLLOW | OFlags::CLOEXEC;
                let file = rustix::fs::openat(parent, name, flags, Mode::from(0o600)).map_err(at)?;
                if entry.node.mode & TYPE_MASK != TYPE_FILE {
                    // A device or a pipe: on the host, an empty file stands for it.
                    return Ok(0);
                }
                // Holes count as if they were filled: the time to read them is spent in any case.
                let bytes = entry.size.checked_next_multiple_of(BLOCK).unwrap_or(u64::MAX);
                if bytes > self.limit.saturating_sub(self.tree.bytes) {
                    return Err(too_small(self.limit));
                }
                copy(data, &mut File::from(file), entry.size).map_err(|error| match error {
                    CopyError::Read(error) => broken(error),
                    CopyError::Write(source) => {
                        Error::Io { doing: "write", path: self.tree.path.join(name), source }
                    }
                })?;
                Ok(bytes)
            }
        }
    }

    /// Makes `path` the current folder; folders on the way that no entry announced are made.
    fn enter(&mut self, path: &[u8], shown: &str) -> Result<()> {
        if self.parent.as_ref().is_some_and(|(current, _)| current == path) {
            return Ok(());
        }
        let at = |error: Errno| place(shown, error);
        let open = |path: &[u8]| open_inside(&self.tree.root, path, OFlags::PATH | OFlags::DIRECTORY);
        let folder = match open(path) {
            Ok(folder) => folder,
            Err(Errno::NOENT) => {
                let (above, name) = split(path);
                let name = Path::new(std::ffi::OsStr::from_bytes(name)).to_owned();
                let above = above.to_owned();
                self.enter(&above, shown)?;
                let parent =
                    self.parent.as_ref().map(|(_, folder)| folder).ok_or_else(|| at(Errno::NOENT))?;
                rustix::fs::mkdirat(parent, &name, Mode::from(0o700)).map_err(at)?;
                let meta = rustix::fs::statat(parent, &name, AtFlags::SYMLINK_NOFOLLOW).map_err(at)?;
                let node = Node { mode: TYPE_FOLDER | 0o755, uid: 0, gid: 0, rdev: 0 };
                self.tree.nodes.insert((meta.st_dev, meta.st_ino), node);
                self.tree.bytes = self.tree.bytes.saturating_add(BLOCK);
                open_inside(&self.tree.root, path, OFlags::PATH | OFlags::DIRECTORY).map_err(at)?
            }
            Err(error) => return Err(at(error)),
        };
        self.parent = Some((path.to_owned(), folder));
        Ok(())
    }

    fn keep_xattrs(&mut self, path: &[u8], xattrs: Vec<(String, Vec<u8>)>) -> Result<()> {
        for (name, value) in xattrs {
            let xattr = Xattr { path: path.to_owned(), name, value };
            let size = size_of::<Xattr>() + xattr.path.len() + xattr.name.len() + xattr.value.len();
            self.xattr_bytes = self.xattr_bytes.saturating_add(size);
            if self.xattr_bytes > MAX_XATTRS {
                return Err(Error::Invalid("the tar has more than 16 MiB of extended attributes".into()));
            }
            self.tree.xattrs.push(xattr);
        }
        Ok(())
    }
}

fn refused(path: &str, why: &str) -> Error {
    Error::Invalid(format!("{path:?} in the tar {why}"))
}

/// The error for a failed system call at entry `path`.
fn place(path: &str, error: Errno) -> Error {
    match error {
        Errno::NOTDIR => refused(path, "lies below something that is not a folder"),
        Errno::NOTEMPTY => refused(path, "would replace a folder that is not empty"),
        Errno::NAMETOOLONG => refused(path, "has a name that is too long"),
        Errno::LOOP => refused(path, "lies behind a link that leads back to itself"),
        Errno::NOENT | Errno::EXIST => refused(path, "lies behind a link that leads nowhere"),
        Errno::PERM | Errno::ISDIR => refused(path, "is a hard link to something that cannot have one"),
        error => Error::Io { doing: "unpack", path: path.into(), source: error.into() },
    }
}

/// The parts of `path` joined again, without `.` and empty ones. An absolute path is one inside the
/// image; one that goes up is nothing an honest tar has.
fn inside(path: &[u8]) -> std::result::Result<Vec<u8>, &'static str> {
    let mut parts = Vec::new();
    for part in path.split(|byte| *byte == b'/') {
        match part {
            b"" | b"." => {}
            b".." => return Err("goes up with `..`, which could lead out of the image"),
            part if part.contains(&0) => return Err("has a zero byte in its name"),
            part => parts.push(part),
        }
    }
    Ok(parts.join(&b'/'))
}

fn split(path: &[u8]) -> (&[u8], &[u8]) {
    match path.iter().rposition(|byte| *byte == b'/') {
        Some(at) => (&path[..at], &path[at + 1..]),
        None => (&[], path),
    }
}

/// The entry's attributes in the image; `None` for kinds that are no files.
fn node(
    header: &Header,
    kind: EntryType,
    extension: &Extension,
) -> std::result::Result<Option<Node>, &'static str> {
    let file_type = match kind {
        EntryType::Regular | EntryType::Continuous => TYPE_FILE,
        // A hard link is checked like the file it names.
        EntryType::Link => TYPE_FILE,
        EntryType::Directory => TYPE_FOLDER,
        EntryType::Symlink => TYPE_LINK,
        EntryType::Char => TYPE_CHAR,
        EntryType::Block => TYPE_BLOCK,
        EntryType::Fifo => TYPE_FIFO,
        _ => return Ok(None),
    };
    let number = |extended: Option<u64>, plain: io::Result<u64>| {
        let number = extended.map_or(plain, Ok).ok().and_then(|number| u32::try_from(number).ok());
        number.filter(|number| *number != u32::MAX).ok_or("has an owner or group that is no user id")
    };
    let mode = header.mode().map_err(|_| "has no readable mode")?;
    let rdev = match file_type {
        TYPE_CHAR | TYPE_BLOCK => {
            let part = |part: io::Result<Option<u32>>| part.ok().flatten().ok_or("has no device number");
            rustix::fs::makedev(part(header.device_major())?, part(header.device_minor())?)
        }
        _ => 0,
    };
    Ok(Some(Node {
        mode: file_type | mode & 0o7777,
        uid: number(extension.uid, header.uid())?,
        gid: number(extension.gid, header.gid())?,
        rdev,
    }))
}

/// Removes what is at `name`, unless both it and what comes are folders. Whether something went.
fn make_room(parent: &OwnedFd, name: &Path, for_folder: bool) -> rustix::io::Result<bool> {
    let meta = match rustix::fs::statat(parent, name, AtFlags::SYMLINK_NOFOLLOW) {
        Err(Errno::NOENT) => return Ok(false),
        other => other?,
    };
    let is_folder = meta.st_mode & TYPE_MASK == TYPE_FOLDER;
    if is_folder && for_folder {
        return Ok(false);
    }
    let flags = if is_folder { AtFlags::REMOVEDIR } else { AtFlags::empty() };
    rustix::fs::unlinkat(parent, name, flags)?;
    Ok(true)
}

fn set_time(parent: &OwnedFd, name: &Path, mtime: u64) -> rustix::io::Result<()> {
    // Later than 2106 is a lie, and not every file system of a host can hold it.
    let time = Timespec { tv_sec: i64::from(u32::try_from(mtime).unwrap_or(u32::MAX)), tv_nsec: 0 };
    let times = Timestamps { last_access: time, last_modification: time };
    rustix::fs::utimensat(parent, name, &times, AtFlags::SYMLINK_NOFOLLOW)
}

enum CopyError {
    Read(io::Error),
    Write(io::Error),
}

/// Copies `size` bytes, pieces of zeroes as holes.
fn copy(data: &mut impl Read, file: &mut File, size: u64) -> std::result::Result<(), CopyError> {
    let mut buffer = vec![0u8; PIECE];
    let mut done = 0;
    while done < size {
        let piece = usize::try_from(size - done).unwrap_or(PIECE).min(PIECE);
        data.read_exact(&mut buffer[..piece]).map_err(CopyError::Read)?;
        let written = if buffer[..piece].iter().all(|byte| *byte == 0) {
            file.seek(SeekFrom::Current(piece as i64)).map(|_| ())
        } else {
            file.write_all(&buffer[..piece])
        };
        written.map_err(CopyError::Write)?;
        done += piece as u64;
    }
    file.set_len(size).map_err(CopyError::Write)
}

#[cfg(test)]
#[path = "unpack_tests.rs"]
mod tests;

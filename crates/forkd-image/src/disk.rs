//! From a [`Tree`] to an ext4 disk, without root and without mounting.
//!
//! `mke2fs -d` copies the tree into the new file system. It is the reference implementation, makes a journal
//! and checksums, and e2fsck is there to check its work; the ext4 writers on crates.io have neither journal
//! nor device nodes. It runs under `fakeroot`, given a list of what each file is to be
//! ([`crate::tree::Node`]): so a tar's owners, setuid bits and device nodes reach the image without ever
//! having existed on the host, whatever user runs the build. Extended attributes follow through debugfs, for
//! the same reason.

use std::fmt::Write as _;
use std::fs::{self, File};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;

use sha2::{Digest, Sha256};

use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::tools;
use crate::tree::{BLOCK, Tree, too_small};

/// The file system's settings, the same whatever the host's own configuration says: an image built
/// anywhere must be readable by any guest kernel from 4.14 on.
const MKE2FS_CONFIG: &str = "[defaults]
\tbase_features = sparse_super,large_file,filetype,resize_inode,dir_index,ext_attr
\tdefault_mntopts = acl,user_xattr
\tblocksize = 4096
\tinode_size = 256
\tinode_ratio = 16384
[fs_types]
\text4 = {
\t\tfeatures = has_journal,extent,huge_file,flex_bg,metadata_csum,64bit,dir_nlink,extra_isize
\t}
";
/// The journal is written round and round, and every block of it ends up in each child's layer.
const JOURNAL_MIB: u64 = 16;
const INODE_RATIO: u64 = 16384;

/// Makes a disk of `size` bytes at `disk` with the files of `tree`; `work` is a folder for notes.
pub(crate) fn make(tree: &Tree, disk: &Path, size: u64, work: &Path, progress: &dyn Progress) -> Result<()> {
    let config = work.join("mke2fs.conf");
    fs::write(&config, MKE2FS_CONFIG).map_err(Error::io("write", &config))?;
    let state = work.join("fakeroot.state");
    fs::write(&state, fakeroot_state(tree)).map_err(Error::io("write", &state))?;
    let file = File::create(disk).map_err(Error::io("create", disk))?;
    file.set_len(size).map_err(Error::io("write", disk))?;
    drop(file);

    tools::command("mke2fs", "e2fsprogs")?;
    let mut command = tools::command("fakeroot", "fakeroot")?;
    command.env("MKE2FS_CONFIG", &config).arg("-i").arg(&state).args(["--", "mke2fs"]);
    command.args(["-q", "-F", "-t", "ext4", "-m", "0", "-J"]).arg(format!("size={JOURNAL_MIB}"));
    command.arg("-N").arg(inodes(tree, size).to_string());
    command.arg("-E").arg(format!("root_owner=0:0,{}", zeroed_option()?));
    command.arg("-d").arg(&tree.path).arg(disk).arg((size / 1024).to_string() + "k");
    tools::stream(command, tools::drain, |line| progress.log(line)).map_err(|error| match error {
        Error::Tool(text) if text.contains("Could not allocate") => too_small(size),
        other => other,
    })?;
    set_xattrs(tree, disk, work, progress)?;
    check(disk)
}

/// One line per file, as `fakeroot -s` writes them.
fn fakeroot_state(tree: &Tree) -> String {
    let mut text = String::new();
    for ((dev, ino), node) in &tree.nodes {
        let (mode, uid, gid, rdev) = (node.mode, node.uid, node.gid, node.rdev);
        let _ = writeln!(text, "dev={dev:x},ino={ino},mode={mode:o},uid={uid},gid={gid},nlink=1,rdev={rdev}");
    }
    text
}

/// As many inodes as is usual for a disk of this size, or as the files need and a few more.
fn inodes(tree: &Tree, size: u64) -> u64 {
    let needed = tree.nodes.len() as u64;
    (size / INODE_RATIO).max(needed + needed / 4 + 1024)
}

/// The option of mke2fs for a new file that is full of zeroes. Without it mke2fs would have to write the
/// zeroes: otherwise the guest would write them itself, into its own layer.
fn zeroed_option() -> Result<&'static str> {
    let mut command = tools::command("mke2fs", "e2fsprogs")?;
    let mut version = Vec::new();
    let output = command.arg("-V").output().map_err(Error::io("start", Path::new("mke2fs")))?;
    if let Some(line) = String::from_utf8_lossy(&output.stderr).split_whitespace().nth(1) {
        version = line.split('.').map(|part| part.parse::<u32>().unwrap_or_default()).collect();
    }
    let knows = version >= vec![1, 47];
    Ok(if knows { "assume_storage_prezeroed=1" } else { "lazy_itable_init=0,lazy_journal_init=0" })
}

fn set_xattrs(tree: &Tree, disk: &Path, work: &Path, progress: &dyn Progress) -> Result<()> {
    let mut script = String::new();
    let mut set = 0;
    for (index, xattr) in tree.xattrs.iter().enumerate() {
        let quoted = (quote(&xattr.path), quote(xattr.name.as_bytes()));
        let (Some(path), Some(name)) = quoted else {
            let path = String::from_utf8_lossy(&xattr.path);
            progress.log(&format!("left out attribute {:?} of {path:?}: strange names", xattr.name));
            continue;
        };
        let value = work.join(format!("xattr-{index}"));
        fs::write(&value, &xattr.value).map_err(Error::io("write", &value))?;
        let Some(value) = quote(value.as_os_str().as_encoded_bytes()) else { continue };
        let _ = writeln!(script, "ea_set -f {value} {path} {name}");
        set += 1;
    }
    if set == 0 {
        return Ok(());
    }
    let commands = work.join("debugfs.commands");
    fs::write(&commands, script).map_err(Error::io("write", &commands))?;
    let mut command = tools::command("debugfs", "e2fsprogs")?;
    command.args(["-w", "-f"]).arg(&commands).arg(disk);
    tools::stream(command, tools::drain, |line| {
        if line.starts_with("ea_set") {
            progress.log(&format!("an extended attribute was left out: {line}"));
        }
    })
}

/// `bytes` as debugfs reads a word; `None` if it cannot read it at all.
fn quote(bytes: &[u8]) -> Option<String> {
    let text = std::str::from_utf8(bytes).ok()?;
    if text.chars().any(char::is_control) || text.len() > 3000 {
        return None;
    }
    Some(format!("\"{}\"", text.replace('"', "\"\"")))
}

/// Has e2fsck look at the finished disk.
fn check(disk: &Path) -> Result<()> {
    let mut command = tools::command("e2fsck", "e2fsprogs")?;
    command.args(["-f", "-n"]).arg(disk);
    tools::output(command).map_err(|error| match error {
        Error::Tool(text) => Error::Tool(format!("the disk that was just made is damaged: {text}")),
        other => other,
    })?;
    Ok(())
}

/// The identity of a disk: SHA-256 over its blocks that are not all zeroes, each behind its number.
/// Reads only what is there, so a large and nearly empty disk costs nothing.
pub(crate) fn digest(disk: &Path) -> Result<String> {
    let file = File::open(disk).map_err(Error::io("open", disk))?;
    let size = file.metadata().map_err(Error::io("read", disk))?.size();
    let mut hash = Sha256::new();
    hash.update(size.to_le_bytes());
    let mut block = [0u8; BLOCK as usize];
    let mut at = 0;
    while at < size {
        at = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Data(at)) {
            Ok(data) => data / BLOCK * BLOCK,
            // No more data.
            Err(rustix::io::Errno::NXIO) => break,
            // A file system that cannot tell holes from data.
            Err(_) => at,
        };
        let end = match rustix::fs::seek(&file, rustix::fs::SeekFrom::Hole(at)) {
            Ok(hole) if hole > at => hole,
            _ => size,
        };
        while at < end.min(size) {
            let length = usize::try_from((size - at).min(BLOCK)).unwrap_or_default();
            file.read_exact_at(&mut block[..length], at).map_err(Error::io("read", disk))?;
            if block[..length].iter().any(|byte| *byte != 0) {
                hash.update((at / BLOCK).to_le_bytes());
                hash.update(&block[..length]);
            }
            at += BLOCK;
        }
    }
    Ok(hash.finalize().iter().map(|byte| format!("{byte:02x}")).collect())
}

//! Tars from friends and from enemies.

use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::path::Path;

use tar::{Builder, EntryType, Header};
use tempfile::TempDir;

use super::unpack;
use crate::error::Result;
use crate::tree::{Node, Tree};

const LIMIT: u64 = 64 << 20;

/// A tar being made, one entry at a time; paths go in as they are.
struct Tar(Builder<Vec<u8>>);

impl Tar {
    fn new() -> Tar {
        Tar(Builder::new(Vec::new()))
    }

    fn entry(mut self, kind: EntryType, path: &str, link: &str, mode: u32, data: &[u8]) -> Tar {
        let mut header = Header::new_gnu();
        header.set_entry_type(kind);
        header.set_mode(mode);
        header.set_uid(12);
        header.set_gid(34);
        header.set_mtime(1_000_000);
        header.set_size(data.len() as u64);
        header.set_device_major(1).unwrap();
        header.set_device_minor(3).unwrap();
        let name = &mut header.as_old_mut().name;
        name[..path.len()].copy_from_slice(path.as_bytes());
        header.as_old_mut().linkname[..link.len()].copy_from_slice(link.as_bytes());
        header.set_cksum();
        self.0.append(&header, data).unwrap();
        self
    }

    fn file(self, path: &str, data: &[u8]) -> Tar {
        self.entry(EntryType::Regular, path, "", 0o644, data)
    }

    fn folder(self, path: &str) -> Tar {
        self.entry(EntryType::Directory, path, "", 0o755, &[])
    }

    fn link(self, path: &str, target: &str) -> Tar {
        self.entry(EntryType::Symlink, path, target, 0o777, &[])
    }

    fn hard_link(self, path: &str, target: &str) -> Tar {
        self.entry(EntryType::Link, path, target, 0o644, &[])
    }

    fn bytes(self) -> Vec<u8> {
        self.0.into_inner().unwrap()
    }

    /// Unpacks into `root` in a fresh folder, beside which a bystander lies.
    fn unpack(self) -> Result<(TempDir, Tree)> {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("root")).unwrap();
        fs::write(folder.path().join("bystander"), "untouched").unwrap();
        let mut tree = Tree::empty(&folder.path().join("root")).unwrap();
        let result = unpack(&self.bytes()[..], &mut tree, LIMIT, &|_| {});
        assert_eq!(fs::read_to_string(folder.path().join("bystander")).unwrap(), "untouched");
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["bystander", "root"]);
        result.map(|()| (folder, tree))
    }

    fn refused(self) -> String {
        self.unpack().map(|_| ()).unwrap_err().to_string()
    }
}

#[test]
fn owners_modes_links_and_devices_are_remembered_and_never_made_on_the_host() {
    let (folder, tree) = Tar::new()
        .folder("./bin/")
        .entry(EntryType::Regular, "./bin/su", "", 0o4755, b"program")
        .hard_link("./bin/doas", "./bin/su")
        .link("./sh", "bin/su")
        .folder("dev")
        .entry(EntryType::Char, "dev/null", "", 0o666, &[])
        .entry(EntryType::Fifo, "dev/pipe", "", 0o600, &[])
        .unpack()
        .unwrap();
    let node = |path: &str| tree.node(path).unwrap();
    assert_eq!(node("bin/su"), Node { mode: 0o104_755, uid: 12, gid: 34, rdev: 0 });
    assert_eq!(node("sh"), node("bin/doas"));
    assert_eq!(node("dev/null"), Node { mode: 0o020_666, uid: 12, gid: 34, rdev: 0x103 });
    assert_eq!(node("dev/pipe").mode, 0o010_600);
    let root = folder.path().join("root");
    let su = fs::metadata(root.join("bin/su")).unwrap();
    assert_eq!((su.nlink(), su.permissions().mode() & 0o7777, su.mtime()), (2, 0o600, 1_000_000));
    assert!(fs::metadata(root.join("dev/null")).unwrap().is_file());
    assert_eq!(fs::read_link(root.join("sh")).unwrap(), Path::new("bin/su"));
}

#[test]
fn a_path_that_goes_up_is_refused_and_an_absolute_one_stays_inside() {
    for path in ["../bystander", "a/../../bystander", "./..", "a/.."] {
        assert!(Tar::new().file(path, b"x").refused().contains(".."), "{path}");
    }
    assert!(Tar::new().file("f", b"x").hard_link("l", "../bystander").refused().contains(".."));
    let (folder, _) = Tar::new().file("/etc/passwd", b"theirs").unpack().unwrap();
    assert_eq!(fs::read(folder.path().join("root/etc/passwd")).unwrap(), b"theirs");
}

#[test]
fn a_link_out_of_the_image_leads_back_into_it() {
    // Writing through the links: what is written lands below the root.
    let (folder, _) = Tar::new()
        .link("up", "../../../..")
        .file("up/bystander", b"inside")
        .folder("etc")
        .link("abs", "/etc")
        .file("abs/passwd", b"inside")
        .unpack()
        .unwrap();
    assert_eq!(fs::read(folder.path().join("root/bystander")).unwrap(), b"inside");
    assert_eq!(fs::read(folder.path().join("root/etc/passwd")).unwrap(), b"inside");
    // Writing onto a link replaces the link, never its target.
    let target = "../bystander";
    let (folder, _) = Tar::new().link("l", target).file("l", b"inside").unpack().unwrap();
    assert_eq!(fs::read(folder.path().join("root/l")).unwrap(), b"inside");
    // A hard link to a link is a second link, not a way out.
    let (folder, _) = Tar::new().link("l", target).hard_link("h", "l").file("h", b"x").unpack().unwrap();
    assert!(folder.path().join("root/l").is_symlink());
}

#[test]
fn strange_trees_are_refused_with_the_path_that_is_wrong() {
    let cases = [
        (Tar::new().link("loop", "loop").file("loop/x", b""), "back to itself"),
        (Tar::new().link("gone", "nowhere").file("gone/x", b""), "leads nowhere"),
        (Tar::new().file("f", b"").file("f/x", b""), "not a folder"),
        (Tar::new().folder("d").file("d/x", b"").file("d", b""), "not empty"),
        (Tar::new().hard_link("l", "later"), "not before it"),
        (Tar::new().folder("d").hard_link("l", "d"), "hard link to something"),
        (Tar::new().link("l", ""), "link to nothing"),
        (Tar::new().entry(EntryType::GNUSparse, "s", "", 0o644, b""), "--sparse"),
    ];
    for (tar, expected) in cases {
        let error = tar.refused();
        assert!(error.contains(expected), "{error} / {expected}");
    }
}

#[test]
fn later_entries_replace_earlier_ones() {
    let (folder, tree) = Tar::new()
        .file("a", b"old")
        .entry(EntryType::Regular, "a", "", 0o600, b"new")
        .folder("d")
        .link("d", "a")
        .folder("e")
        .entry(EntryType::Directory, "e", "", 0o700, &[])
        .unpack()
        .unwrap();
    assert_eq!(fs::read(folder.path().join("root/a")).unwrap(), b"new");
    assert_eq!(tree.node("d").unwrap().mode, 0o100_600);
    assert_eq!(tree.node("e").unwrap().mode, 0o040_700);
}

#[test]
fn a_tar_cut_anywhere_is_an_error_and_never_a_panic() {
    let whole = Tar::new().file("a", &[1; 700]).folder("d").link("d/l", "x").bytes();
    for cut in (0..whole.len() - 1024).step_by(37).chain([512, 1024, 1536, 2048]) {
        let folder = tempfile::tempdir().unwrap();
        let mut tree = Tree::empty(folder.path()).unwrap();
        let error = unpack(&whole[..cut], &mut tree, LIMIT, &|_| {}).unwrap_err().to_string();
        assert!(error.contains("truncated") || error.contains("broken"), "{cut}: {error}");
    }
}

#[test]
fn a_tar_with_any_byte_changed_never_panics_and_never_gets_out() {
    let whole = Tar::new().file("a", b"x").hard_link("h", "a").link("l", "a").bytes();
    for at in (0..whole.len() - 1024).step_by(3) {
        let mut changed = whole.clone();
        changed[at] ^= 0x55;
        // With the checksum made good again, so that the change is looked at.
        let start = at / 512 * 512;
        let block = &mut changed[start..start + 512];
        block[148..156].fill(b' ');
        let sum: u32 = block.iter().map(|byte| u32::from(*byte)).sum();
        block[148..155].copy_from_slice(format!("{sum:06o}\0").as_bytes());
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir(folder.path().join("root")).unwrap();
        let mut tree = Tree::empty(&folder.path().join("root")).unwrap();
        let _ = unpack(&changed[..], &mut tree, LIMIT, &|_| {});
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }
}

/// A header with a size its data does not have.
fn lying(kind: EntryType, size: u64) -> Vec<u8> {
    let mut header = Header::new_gnu();
    header.set_entry_type(kind);
    header.as_old_mut().name[..1].copy_from_slice(b"a");
    header.set_mode(0o644);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(size);
    header.set_cksum();
    header.as_bytes().to_vec()
}

#[test]
fn sizes_no_disk_can_hold_end_early() {
    for (kind, size, expected) in [
        (EntryType::Regular, 1 << 40, "do not fit"),
        (EntryType::Regular, u64::MAX / 2, "do not fit"),
        (EntryType::GNULongName, 1 << 40, "broken"),
        (EntryType::XHeader, 1 << 40, "broken"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let mut tree = Tree::empty(folder.path()).unwrap();
        let header = lying(kind, size);
        let endless = std::io::Read::chain(&header[..], std::io::repeat(b'x'));
        let error = unpack(endless, &mut tree, LIMIT, &|_| {}).unwrap_err().to_string();
        assert!(error.contains(expected), "{kind:?}: {error}");
    }
}

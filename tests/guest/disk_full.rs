//! Guests that write to their disks while the host's disk is full. The data directory of the daemon here is a small
//! ext4 in a file.

use std::fs::File;
use std::path::{Path, PathBuf};
use std::process::Command;

use forkd_tests::daemon::Daemon;
use forkd_tests::{eventually, library_path};
use rustix::fs::{FallocateFlags, statvfs};
use rustix::mount::{UnmountFlags, unmount};
use serde_json::json;
use tempfile::NamedTempFile;

use crate::parent::{SMALL, alone};

/// What guests that wait for room need before they go on, and what the test's guest writes, in all.
const ROOM: u64 = 128 << 20;
/// What ext4 itself needs, and the daemon's database and logs.
const BESIDE: u64 = 64 << 20;
/// Room there is when the guest begins to write.
const LEFT: u64 = 8 << 20;
/// The guest writes more than that: this many MiB, each with another byte.
const WRITE: &str = "
import os, threading
state = 'writing'
def work():
    global state
    try:
        with open('/root/big', 'wb') as file:
            for byte in range(1, 25):
                file.write(bytes([byte]) * (1 << 20))
            file.flush()
            os.fsync(file.fileno())
        state = 'written'
    except OSError as error:
        state = str(error)
# Late enough for the answer to this.
threading.Timer(3, work).start()
";
/// What the guest reads from its disk afterwards, not from its page cache.
const READ: &str = "
open('/proc/sys/vm/drop_caches', 'w').write('3')
big = open('/root/big', 'rb').read()
len(big) == 24 << 20 and all(big[at << 20:at + 1 << 20] == bytes([at + 1]) * (1 << 20) for at in range(24))
";

/// A daemon on a small disk. The daemon goes first.
struct Small {
    daemon: Daemon,
    disk: Disk,
}

/// A file system.
struct Disk {
    /// Where it is mounted.
    place: PathBuf,
    _image: NamedTempFile,
}

impl Drop for Disk {
    fn drop(&mut self) {
        let _ = unmount(&self.place, UnmountFlags::DETACH);
    }
}

impl Disk {
    /// Makes an ext4 of `size` bytes and mounts it on `place`. Not a file system in memory: there, a guest that
    /// only reads a hole of its memory's file needs room.
    fn mount(size: u64, place: &Path) -> Disk {
        let image = NamedTempFile::new().unwrap();
        image.as_file().set_len(size).unwrap();
        run(Command::new("mke2fs").args(["-q", "-F", "-t", "ext4", "-m", "0"]).arg(image.path()));
        run(Command::new("mount").args(["-o", "loop"]).arg(image.path()).arg(place));
        Disk { place: place.to_owned(), _image: image }
    }

    /// Takes `bytes` of it with a file of that name.
    fn fill(&self, name: &str, bytes: u64) -> PathBuf {
        let path = self.place.join(name);
        rustix::fs::fallocate(File::create(&path).unwrap(), FallocateFlags::empty(), 0, bytes).unwrap();
        path
    }

    fn free(&self) -> u64 {
        let stat = statvfs(&self.place).unwrap();
        stat.f_bavail * stat.f_frsize
    }
}

impl Small {
    /// With the snapshot [`SMALL`], and [`ROOM`] beside it.
    fn start() -> Small {
        let parent = alone();
        let mut daemon = Daemon::start();
        daemon.kill();
        let place = daemon.data_dir().to_owned();
        let snapshots = parent.data_dir().join("snapshots");
        let disk = Disk::mount(allocated(&snapshots) + ROOM + BESIDE, &place);
        for part in ["images", "kernels"] {
            std::os::unix::fs::symlink(library_path().join(part), place.join(part)).unwrap();
        }
        run(Command::new("cp").args(["-a", "--sparse=always"]).arg(&snapshots).arg(&place));
        daemon.restart();
        Small { daemon, disk }
    }
}

fn run(command: &mut Command) {
    let output = command.output().unwrap();
    assert!(output.status.success(), "{command:?}: {}", String::from_utf8_lossy(&output.stderr));
}

/// Bytes that the files in a folder take.
fn allocated(folder: &Path) -> u64 {
    let output = Command::new("du").args(["-s", "-B1"]).arg(folder).output().unwrap();
    let text = String::from_utf8(output.stdout).unwrap();
    text.split_whitespace().next().unwrap().parse().unwrap()
}

#[test]
fn a_guest_that_finds_the_hosts_disk_full_is_paused_and_its_write_is_done_when_there_is_room() {
    let Small { mut daemon, disk } = Small::start();
    let children = daemon.fork(SMALL, 2);
    let (writer, sibling) = (children[0].clone(), children[1].clone());
    for child in &children {
        daemon.sh(child, "sync");
    }
    // A daemon needs a little room to start.
    let reserve = disk.fill("reserve", 4 << 20);
    let filler = disk.fill("filler", disk.free() - LEFT);

    daemon.eval(&writer, WRITE);
    let waits = |daemon: &Daemon| {
        eventually("a guest that waits for room", || {
            let info = daemon.sandbox(&writer);
            (info["state"] == "paused" && info["reason"] == "host_disk_full").then_some(())
        });
    };
    waits(&daemon);
    assert_eq!(daemon.eval(&sibling, "2 + 2"), "4");
    let body = json!({"code": "1"});
    let response = daemon.request("POST", &format!("/v1/sandboxes/{writer}/eval"), Some(body));
    assert_eq!(response.status, 409, "{response:?}");
    // The next daemon knows, too.
    std::fs::remove_file(reserve).unwrap();
    daemon.restart();
    waits(&daemon);
    // It can be tried at once, and finds no room.
    daemon.tell(&writer, "resume", json!({}));
    waits(&daemon);
    assert_eq!(daemon.sandbox(&sibling)["state"], "running");

    std::fs::remove_file(filler).unwrap();
    eventually("room", || (daemon.sandbox(&writer)["state"] == "running").then_some(()));
    eventually("all that was to be written", || {
        let state = daemon.eval(&writer, "state");
        assert!(!state.contains("rror"), "{state}");
        state.contains("written").then_some(())
    });
    assert_eq!(daemon.eval(&writer, READ), "True");
    let errors = daemon.sh(&writer, "dmesg | grep -ci 'i/o error' || true");
    assert_eq!(errors.trim(), "0");
    daemon.delete(&children);
}

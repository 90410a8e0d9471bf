//! After children came and went, and after their snapshot is gone, the host is as it was.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use forkd_tests::daemon::Daemon;
use forkd_tests::{binary, eventually};
use serde_json::json;

/// Everything a sandbox has on the host, by name.
fn resources(daemon: &Daemon) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    // The machine's own daemon has sandboxes, too, of another copy of the program.
    let monitor = binary("forkd-vmm").canonicalize().unwrap();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        let program = std::fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if program == monitor {
            found.insert(format!("process {}", entry.file_name().to_string_lossy()));
        }
    }
    walk(Path::new("/sys/fs/cgroup"), 4, &mut |path| {
        if path.to_string_lossy().contains("forkd/") {
            found.insert(format!("cgroup {}", path.display()));
        }
    });
    // So it has network slots.
    let own = daemon.run_dir();
    let others: Vec<PathBuf> = std::fs::read_dir(own.parent().unwrap())
        .unwrap()
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| *path != own && path.join("netns").is_dir())
        .collect();
    for mount in std::fs::read_to_string("/proc/self/mountinfo").unwrap().lines() {
        let place = mount.split(' ').nth(4).unwrap();
        if !others.iter().any(|other| Path::new(place).starts_with(other)) {
            found.insert(format!("mount {place}"));
        }
    }
    for link in std::fs::read_dir("/sys/class/net").unwrap().flatten() {
        if !others.iter().any(|other| other.join("netns").join(link.file_name()).exists()) {
            found.insert(format!("link {}", link.file_name().to_string_lossy()));
        }
    }
    for folder in [daemon.run_dir(), daemon.data_dir().join("snapshots")] {
        walk(&folder, 3, &mut |path| {
            found.insert(format!("file {}", path.display()));
        });
    }
    found
}

fn walk(folder: &Path, depth: u32, visit: &mut impl FnMut(&Path)) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let path = entry.path();
        if path.is_dir() && depth > 0 {
            walk(&path, depth - 1, visit);
        }
        // Files of the cgroup file system come with their folder.
        if path.is_dir() || !path.starts_with("/sys") {
            visit(&path);
        }
    }
}

fn descriptors(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count()
}

#[test]
fn nothing_is_left_of_children_that_came_and_went() {
    let daemon = Daemon::start_with_env(&[("FORKD_NETWORK_POOL", "0")]);
    // Once through everything, so that what is made once and kept is there.
    daemon.snapshot(json!({"tag": "first", "image": "python", "mem_size_mib": 256}));
    let children = daemon.fork("first", 1);
    daemon.delete(&children);
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/first", None).status, 204);
    eventually("the first template to go", || daemon.templates().is_empty().then_some(()));
    let (before, fds) = (resources(&daemon), descriptors(&daemon));

    daemon.snapshot(json!({"tag": "t", "image": "python", "mem_size_mib": 256}));
    for _ in 0..2 {
        let children = daemon.fork("t", 5);
        let during = resources(&daemon);
        assert!(during.difference(&before).count() > 20, "the census sees nothing: {during:?}");
        daemon.delete(&children);
    }
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/t", None).status, 204);
    eventually("everything to go", || {
        let left: Vec<_> = resources(&daemon).difference(&before).cloned().collect();
        if left.is_empty() && descriptors(&daemon) <= fds { Some(()) } else { None }
    });
}

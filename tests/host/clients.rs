//! The published clients of the reference, unmodified: from PyPI into an environment of their own, then all
//! they can do, against the daemon that everything here uses.

use std::path::{Path, PathBuf};
use std::process::Command;

use forkd_tests::{binary, library_path};
use serde_json::Value;

use crate::cli::{forkd, text};
use crate::machine::machine_is_used;
use crate::pip::{environment, must};

const REQUIREMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/clients/requirements.txt");
const DRIVE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/clients/drive.py");
/// What the snapshots made here are called.
const TAG: &str = "forkd-clients";

/// The kernel of the library, as the daemon sees that.
fn kernel(library: &Path) -> PathBuf {
    let mut found: Vec<_> = std::fs::read_dir(library_path().join("kernels")).unwrap().flatten().collect();
    found.retain(|entry| entry.path().join("vmlinux").is_file());
    found.sort_by_key(|entry| entry.file_name());
    library.join("kernels").join(found.last().unwrap().file_name()).join("vmlinux")
}

#[test]
fn the_published_clients_of_the_reference_work_unmodified() {
    let programs = environment("published-clients", Path::new(REQUIREMENTS), &["--require-hashes"]);
    // Whatever an earlier run left; and there is a daemon from here on.
    forkd(None, &["kill", "--tag", TAG]);
    forkd(None, &["rmi", "--cascade", TAG]);
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    let library = if machine_is_used() { PathBuf::from("/forkd-share") } else { library_path() };
    let path = std::env::var("PATH").unwrap();
    let driven = Command::new(programs.join("python"))
        .arg(DRIVE)
        .env("PATH", format!("{}:{path}", binary("forkd").parent().unwrap().display()))
        .env("FORKD_URL", found["url"].as_str().unwrap())
        .env("FORKD_TOKEN", found["token"].as_str().unwrap())
        .env("DRIVE_TAG", TAG)
        .env("DRIVE_KERNEL", kernel(&library))
        .env("DRIVE_ROOTFS", library.join("images/python/disk.ext4"))
        .output()
        .unwrap();
    let said = text(&must(driven, "the clients").stdout);
    assert!(said.contains("the published clients work"), "{said}");
    println!("{said}");
}

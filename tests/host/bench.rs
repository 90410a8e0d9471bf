//! `forkd bench branch`, natively: the lines that programs read, and that nothing of it stays.

use forkd_tests::test_name;
use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::cli::{forkd, text};
use crate::fanout::can_run;

/// A program with the part of Firecracker's API that snapshots need, and whose guest writes its byte.
const STAND_IN: &str = r#"#!/usr/bin/env python3
import os, socket, sys
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen()
while True:
    stream = listener.accept()[0]
    request = stream.recv(65536).decode()
    stream.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    if "/actions" in request:
        os.write(1, b"\x07")
"#;

/// Of this size and dirtiness branches are taken in a row, too; and what else is measured has it anyway.
const MEM_MIB: u64 = 512;
const DIRTY_PCT: u64 = 10;

#[test]
fn a_bench_of_branches_prints_a_line_for_every_case_and_leaves_nothing() {
    if !can_run(test_name!()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let (program, data) = (folder.path().join("firecracker"), folder.path().join("data"));
    fs::write(&program, STAND_IN).unwrap();
    fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
    let (mem_mib, dirty_pct) = (MEM_MIB.to_string(), DIRTY_PCT.to_string());
    let mut args = vec!["bench", "branch", "--quick", "--json", "--guest", "tiny", "--memory", "layer"];
    args.extend(["--mem-size-mib", &mem_mib, "--dirty", &dirty_pct]);
    args.extend(["--firecracker", program.to_str().unwrap()]);
    let output = forkd(Some(&data), &args);
    let said = format!("{}{}", text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{said}");

    let lines: Vec<Value> =
        text(&output.stdout).lines().map(|line| serde_json::from_str(line).unwrap()).collect();
    let of_subject = |line: &&Value| {
        let subject = [&line["guest"], &line["memory"], &line["mem_mib"], &line["dirty_pct"]];
        subject == [&json!("tiny"), &json!("layer"), &json!(MEM_MIB), &json!(DIRTY_PCT)]
    };
    let (in_row, at_once): (Vec<&Value>, Vec<&Value>) =
        lines.iter().filter(of_subject).partition(|line| line.get("index").is_some());
    for case in ["forkd", "fork", "fork_plain", "uffd_wp", "copy", "firecracker_full", "firecracker_diff"] {
        let found: Vec<&&Value> = at_once.iter().filter(|line| line["case"] == case).collect();
        let [line] = found[..] else { panic!("{} lines for {case}: {said}", found.len()) };
        assert!(line["n"].as_u64().unwrap() > 0, "{line}");
        // Kernels that cannot write-protect memory from a file report that, and have no times.
        if case == "uffd_wp" && line["ok"] == 0 {
            assert!(!line["errors"].as_array().unwrap().is_empty(), "{line}");
            assert_eq!((line.get("p50_ms"), line.get("p99_ms")), (Some(&Value::Null), Some(&Value::Null)));
            continue;
        }
        assert_eq!(line["ok"], line["n"], "{line}");
        let times = [&line["p50_ms"], &line["p99_ms"]].map(|ms| ms.as_f64().unwrap());
        assert!(0.0 <= times[0] && times[0] <= times[1], "{line}");
    }
    assert!(in_row.iter().all(|line| line["case"] == "forkd"), "{said}");
    assert!(in_row.iter().all(|line| line["pause_ms"].as_f64().is_some_and(|ms| ms >= 0.0)), "{said}");
    let order: Vec<u64> = in_row.iter().map(|line| line["index"].as_u64().unwrap()).collect();
    assert_eq!(order, (0..10).collect::<Vec<u64>>(), "{said}");

    let kept = fs::read_dir(&data).unwrap().flatten().map(|entry| entry.path());
    let kept = kept.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("bench-"));
    assert_eq!(kept.chain(run_dirs(&data)).collect::<Vec<_>>(), [""; 0].map(PathBuf::from));
}

/// A bench with a daemon of its own that has children.
fn busy_bench(data: &Path) -> std::process::Child {
    let mut command = std::process::Command::new(forkd_tests::binary("forkd"));
    command.env("FORKD_DATA_DIR", data).stdin(std::process::Stdio::null());
    command.stdout(std::process::Stdio::null()).stderr(std::process::Stdio::null());
    command.args(["bench", "spawn", "--case", "tiny", "--n", "500,500,500,500,500,500"]);
    let mut bench = command.spawn().unwrap();
    let begun = std::time::Instant::now();
    let has_children = || {
        let folders = bench_folders(data).into_iter().map(|folder| folder.join("run/sandboxes"));
        folders.flat_map(fs::read_dir).flatten().count() > 10
    };
    while !has_children() {
        assert!(bench.try_wait().unwrap().is_none(), "it ended");
        assert!(begun.elapsed().as_secs() < 120, "it has no children");
        std::thread::sleep(std::time::Duration::from_millis(10));
    }
    bench
}

fn bench_folders(data: &Path) -> Vec<PathBuf> {
    let entries = fs::read_dir(data).into_iter().flatten().flatten().map(|entry| entry.path());
    entries.filter(|path| path.file_name().unwrap().to_string_lossy().starts_with("bench-")).collect()
}

#[test]
fn a_bench_that_is_told_to_end_takes_its_daemon_and_its_sandboxes_with_it() {
    if !can_run(test_name!()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut bench = busy_bench(folder.path());
    rustix::process::kill_process(rustix::process::Pid::from_child(&bench), rustix::process::Signal::TERM)
        .unwrap();
    assert_eq!(bench.wait().unwrap().code(), Some(128 + 15));
    // What did not go in two seconds, on a busy host, is found.
    let cleaned = forkd(Some(folder.path()), &["cleanup", "--yes", "--json"]);
    assert!(cleaned.status.success(), "{}", text(&cleaned.stdout));
    assert_eq!((bench_folders(folder.path()), run_dirs(folder.path())), (Vec::new(), Vec::new()));
}

#[test]
fn what_a_killed_bench_leaves_is_found_and_removed() {
    if !can_run(test_name!()) {
        return;
    }
    let folder = tempfile::tempdir().unwrap();
    let mut bench = busy_bench(folder.path());
    let place = bench_folders(folder.path()).remove(0);
    let look = |args: &[&str]| -> Vec<Value> {
        let told = forkd(Some(folder.path()), &[&["cleanup", "--json"], args].concat());
        let told: Value = serde_json::from_slice(&told.stdout).unwrap();
        told["leftovers"].as_array().unwrap().clone()
    };
    let of = |found: &[Value], path: &Path| {
        found.iter().find(|one| one["path"] == path.to_str().unwrap()).map(|one| one["action"].clone())
    };
    assert_eq!(of(&look(&[]), &place), Some(json!("skip")));
    bench.kill().unwrap();
    bench.wait().unwrap();
    let run = fs::read_link(place.join("run")).unwrap();
    let found = look(&[]);
    assert_eq!(of(&found, &place), Some(json!("delete")));
    assert_eq!(of(&found, &run), Some(json!("delete")));
    look(&["--yes"]);
    assert_eq!((bench_folders(folder.path()), run.exists()), (Vec::new(), false));
    assert_eq!(look(&[]).iter().filter(|one| of(&[(*one).clone()], &place).is_some()).count(), 0);
}

/// What daemons with data below `data` had in memory, and is still there.
fn run_dirs(data: &Path) -> Vec<PathBuf> {
    let entries = ["/run", "/dev/shm"].into_iter().flat_map(fs::read_dir).flatten().flatten();
    let of_it = |place: &PathBuf| fs::read_link(place.join("data")).is_ok_and(|to| to.starts_with(data));
    entries.map(|entry| entry.path()).filter(of_it).collect()
}

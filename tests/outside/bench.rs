//! `forkd bench branch`, natively: the lines that programs read, and that nothing of it stays.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde_json::{Value, json};

use crate::bare::can_run;
use crate::natively::{forkd, text};

/// A program that speaks as little of Firecracker's API as snapshots need, and whose guest says its word.
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
    if !can_run("a_bench_of_branches_prints_a_line_for_every_case_and_leaves_nothing") {
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
        // Kernels that cannot write-protect memory from a file say so, and have no times.
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

/// What daemons with data below `data` had in memory, and is still there.
fn run_dirs(data: &Path) -> Vec<PathBuf> {
    let entries = ["/run", "/dev/shm"].into_iter().flat_map(fs::read_dir).flatten().flatten();
    let of_it = |place: &PathBuf| fs::read_link(place.join("data")).is_ok_and(|to| to.starts_with(data));
    entries.map(|entry| entry.path()).filter(of_it).collect()
}

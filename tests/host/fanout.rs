//! Children by the hundred, natively: guests of a few instructions through the real daemon, template and
//! jail, on any computer whose `/dev/kvm` opens.

use std::collections::BTreeSet;
use std::io::Write;
use std::path::PathBuf;
use std::process::Command;

use forkd_tests::daemon::{Daemon, is_monitor};
use forkd_tests::{binary, eventually, test_name};
use serde_json::{Value, json};

forkd_vmm::guest_code! {
    /// Reports ready, and once more when its generation id has changed, which makes it a child.
    fn says_ready,
    "mov rbx, qword ptr [0xe8000]",
    "mov rcx, qword ptr [0xe8008]",
    "mov dx, 0x602",
    "out dx, al",
    "2: nop",
    "cmp rbx, qword ptr [0xe8000]",
    "jne 3f",
    "cmp rcx, qword ptr [0xe8008]",
    "je 2b",
    "3: out dx, al",
    "4: hlt",
    "jmp 4b",
}

/// Where to look for images when none is needed.
pub(crate) fn no_library() -> PathBuf {
    PathBuf::from("/nonexistent")
}

/// Whether this computer can run these tests; prints a line if not.
pub(crate) fn can_run(test: &str) -> bool {
    let missing = if !rustix::process::geteuid().is_root() {
        "needs root"
    } else if std::fs::File::options().read(true).write(true).open("/dev/kvm").is_err() {
        "needs /dev/kvm"
    } else {
        return true;
    };
    // Straight to standard error: what tests print is swallowed when they pass.
    let _ = writeln!(std::io::stderr(), "NOT RUN: {test} ({missing})");
    false
}

/// A daemon with a snapshot `tiny` of a bare guest.
pub(crate) fn daemon_with_tiny(env: &[(&str, &str)]) -> Daemon {
    let daemon = Daemon::start_with(&[], env, no_library());
    make_tiny(&daemon);
    daemon
}

fn make_tiny(daemon: &Daemon) {
    let kernel = daemon.data_dir().join("tiny.elf");
    std::fs::write(&kernel, forkd_vmm::asm_guest::elf_kernel(says_ready())).unwrap();
    let body = json!({"tag": "tiny", "kernel": kernel, "network": false, "mem_size_mib": 512});
    let info = daemon.snapshot(body);
    assert_eq!(info["status"], "ready", "{info}");
}

pub(crate) fn spawn(daemon: &Daemon, n: usize) -> Value {
    let body = json!({"snapshot_tag": "tiny", "n": n, "network": false});
    let response = daemon.request("POST", "/v1/sandboxes?results=each", Some(body));
    assert_eq!(response.status, 201, "{}\n{}", String::from_utf8_lossy(&response.body), daemon.log());
    response.json()
}

pub(crate) fn ids(answer: &Value) -> Vec<String> {
    let children = answer["children"].as_array().unwrap();
    children.iter().map(|child| child["id"].as_str().unwrap().to_owned()).collect()
}

/// Monitors on this computer that run the program under test, and everything in the daemon's folders.
pub(crate) fn census(daemon: &Daemon) -> BTreeSet<String> {
    let monitor = binary("forkd-vmm").canonicalize().unwrap();
    let mut found = BTreeSet::new();
    for entry in std::fs::read_dir("/proc").unwrap().flatten() {
        // Another build may be under test at the same time.
        let program = std::fs::read_link(entry.path().join("exe")).unwrap_or_default();
        if program == monitor {
            found.insert(format!("process {}", entry.file_name().to_string_lossy()));
        }
    }
    let snapshots = daemon.data_dir().join("snapshots");
    for folder in [daemon.run_dir().join("sandboxes"), daemon.run_dir().join("templates"), snapshots] {
        for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
            found.insert(entry.path().display().to_string());
        }
    }
    let mounts = std::fs::read_to_string("/proc/self/mountinfo").unwrap();
    found.extend(mounts.lines().map(|line| format!("mount {}", line.split(' ').nth(4).unwrap())));
    found
}

pub(crate) fn descriptors(daemon: &Daemon) -> usize {
    std::fs::read_dir(format!("/proc/{}/fd", daemon.pid())).unwrap().count()
}

#[test]
fn a_thousand_children_come_and_go_and_leave_nothing() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_tiny(&[]);
    daemon.delete(&ids(&spawn(&daemon, 1)));
    let (before, fds) = (census(&daemon), descriptors(&daemon));
    let answer = spawn(&daemon, 1000);
    assert_eq!(answer["errors"], json!([]), "{}", answer["errors"]);
    let children = ids(&answer);
    assert_eq!(children.iter().collect::<BTreeSet<_>>().len(), 1000);
    let pids: BTreeSet<u64> =
        answer["children"].as_array().unwrap().iter().map(|child| child["pid"].as_u64().unwrap()).collect();
    assert_eq!(pids.len(), 1000, "each is a process of its own");
    assert!(pids.iter().all(|pid| is_monitor(*pid as u32)));
    daemon.delete(&children);
    eventually("everything to go", || {
        (census(&daemon) == before && descriptors(&daemon) <= fds).then_some(())
    });
}

#[test]
fn one_sandbox_is_inspected_with_its_origin_its_figures_and_its_branches() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_tiny(&[]);
    let id = ids(&spawn(&daemon, 1)).remove(0);
    let branched = daemon.request("POST", &format!("/v1/sandboxes/{id}/branch"), Some(json!({"tag": "b1"})));
    assert_eq!(branched.status, 201, "{}", String::from_utf8_lossy(&branched.body));
    let forkd = |args: &[&str]| {
        let output = daemon.forkd(&[&["inspect", &id], args].concat()).output().unwrap();
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        String::from_utf8(output.stdout).unwrap()
    };
    let told: Value = serde_json::from_str(&forkd(&["--json"])).unwrap();
    assert_eq!((&told["sandbox"]["id"], &told["sandbox"]["branch_count"]), (&json!(id), &json!(1)));
    assert_eq!((&told["snapshot"]["tag"], &told["branches"][0]["tag"]), (&json!("tiny"), &json!("b1")));
    assert!(told["stats"]["private_kib"].as_u64() > Some(0), "{told}");
    let shown = forkd(&[]);
    assert!(shown.lines().any(|line| line.starts_with("id ") && line.ends_with(&id)), "{shown}");
    assert!(shown.lines().all(|line| !line.contains("null")), "{shown}");
    daemon.delete(&[id]);
}

#[test]
fn out_of_descriptors_the_children_that_fit_run_and_the_others_are_told() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = Daemon::start_limited(libc::RLIMIT_NOFILE, 400);
    make_tiny(&daemon);
    let before = census(&daemon);
    let answer = spawn(&daemon, 300);
    let (children, errors) = (ids(&answer), answer["errors"].as_array().unwrap());
    assert_eq!(children.len() + errors.len(), 300);
    assert!(!children.is_empty() && !errors.is_empty(), "{} children", children.len());
    assert!(errors[0]["error"].as_str().unwrap().len() > 10 && errors[0]["index"].is_u64(), "{}", errors[0]);
    daemon.delete(&children);
    eventually("what did not fit to be cleaned up", || (census(&daemon) == before).then_some(()));
    // And it works again.
    daemon.delete(&ids(&spawn(&daemon, 5)));
}

#[test]
fn a_daemon_that_may_open_too_few_files_for_what_runs_says_so_and_touches_nothing() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_tiny(&[]);
    let children = ids(&spawn(&daemon, 40));
    let before = census(&daemon);
    daemon.kill();
    // Enough to start with, and not for all of them: it must not take some for gone.
    let mut command = std::process::Command::new("prlimit");
    command.arg("--nofile=150").arg(forkd_tests::binary("forkd")).args([
        "serve",
        "--bind",
        "127.0.0.1:0",
        "--data-dir",
    ]);
    let output = command.arg(daemon.data_dir()).env("FORKD_SOCKET", daemon.socket()).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert!(!output.status.success() && text.contains("LimitNOFILE"), "{text}");
    daemon.restart();
    assert_eq!(daemon.sandboxes().len(), children.len(), "{}", daemon.log());
    assert_eq!(census(&daemon), before);
    daemon.delete(&children);
}

#[test]
fn killed_with_nine_in_the_middle_of_a_fan_out_the_daemon_finds_or_ends_every_child() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_tiny(&[]);
    let mut kept = ids(&spawn(&daemon, 3));
    let templates = daemon.templates();
    std::thread::scope(|scope| {
        let socket = daemon.socket();
        let asking = scope.spawn(move || {
            let body = json!({"snapshot_tag": "tiny", "n": 1000, "network": false}).to_string();
            let stream = std::os::unix::net::UnixStream::connect(socket).unwrap();
            let headers = [("content-type", "application/json")];
            forkd_tests::http::request(stream, "POST", "/v1/sandboxes", &headers, body.as_bytes())
        });
        eventually("the fan-out to be under way", || (daemon.folders() > 50).then_some(()));
        daemon.kill();
        // On a busy computer it may have been over already: then all of it is acknowledged.
        if let Ok(answer) = asking.join().unwrap() {
            let children = answer.json();
            kept.extend(children.as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap().to_owned()));
        }
    });
    daemon.restart();
    assert_eq!(daemon.templates(), templates, "the template outlives its daemon");
    let found = daemon.sandboxes();
    assert!(kept.iter().all(|id| found.contains(id)), "what was acknowledged is lost: {}", daemon.log());
    // A sandbox that was not acknowledged is either like any other, or gone without a trace.
    daemon.delete(&found);
    eventually("half-made children to go", || (daemon.folders() == 0).then_some(()));
    let more = ids(&spawn(&daemon, 10));
    let mine: BTreeSet<u32> = daemon.monitors().into_iter().collect();
    eventually("no process without a sandbox", || {
        let all = census(&daemon).iter().filter(|name| name.starts_with("process ")).count();
        (all == mine.len() + templates.len()).then_some(())
    });
    daemon.delete(&more);
}

/// Damages a file of the snapshot, and returns the text that the error must have.
type Damage = (&'static str, fn(&std::path::Path), &'static [&'static str]);

#[test]
fn a_damaged_snapshot_is_refused_by_name_and_nothing_starts() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_tiny(&[]);
    let folder = daemon.data_dir().join("snapshots/tiny");
    assert_eq!(daemon.request("POST", "/v1/snapshots/tiny/unload", None).status, 204);
    eventually("the template to go", || daemon.templates().is_empty().then_some(()));
    let manifest: Value =
        serde_json::from_slice(&std::fs::read(folder.join("manifest.json")).unwrap()).unwrap();
    let memory = manifest["memory"][0]["blake3"].as_str().unwrap().to_owned();
    let damages: [Damage; 5] = [
        (
            "memory",
            |path| {
                let file = std::fs::File::options().write(true).open(path).unwrap();
                file.set_len(file.metadata().unwrap().len() - 4096).unwrap();
            },
            &[".layers", "truncated"],
        ),
        ("memory", |path| flip_byte(path, 0x10_0000), &[".layers", "edited"]),
        ("state", |path| flip_byte(path, 100), &["state"]),
        ("state", |path| std::fs::remove_file(path).unwrap(), &["state"]),
        (
            "manifest.json",
            |path| {
                let mut manifest: Value = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
                manifest["version"] = json!(99);
                std::fs::write(path, manifest.to_string()).unwrap();
            },
            &["version", "99"],
        ),
    ];
    for (name, damage, words) in damages {
        let path = match name {
            "memory" => folder.with_file_name(".layers").join(&memory),
            _ => folder.join(name),
        };
        let whole = std::fs::read(&path).unwrap();
        damage(&path);
        let body = json!({"snapshot_tag": "tiny", "n": 2});
        let response = daemon.request("POST", "/v1/sandboxes", Some(body));
        assert_eq!(response.status, 409, "{name}: {response:?}");
        assert_eq!(response.json()["code"], "snapshot_unusable", "{name}: {response:?}");
        let text = response.json()["error"].as_str().unwrap().to_owned();
        assert!(words.iter().all(|word| text.contains(word)), "{name}: {text}");
        assert!(daemon.templates().is_empty() && daemon.folders() == 0, "{name}: something started");
        std::fs::write(&path, whole).unwrap();
    }
    // Mended, it works again.
    daemon.delete(&ids(&spawn(&daemon, 1)));
}

#[test]
fn a_snapshot_that_needs_a_cpu_feature_this_host_lacks_is_refused_by_its_name() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_tiny(&[]);
    // Made on another host: everything in order, but its guest's CPUID has a feature that no host has.
    daemon.kill();
    let store = forkd_store::Store::open(&daemon.data_dir().join("snapshots")).unwrap();
    let tiny = store.get("tiny").unwrap();
    let files = tiny.open().unwrap();
    let mut state = forkd_vmm::state::file::read(&files.state).unwrap();
    let leaf = state.vcpus[0].cpuid.iter_mut().find(|entry| (entry.function, entry.index) == (7, 0)).unwrap();
    leaf.edx |= 1;
    let mut draft = store.begin("foreign").unwrap();
    forkd_vmm::state::file::write(&state, &draft.create_state().unwrap()).unwrap();
    let memory = draft.create_memory().unwrap();
    std::io::copy(&mut &files.memory[0], &mut &memory).unwrap();
    drop(memory);
    draft.publish(forkd_store::Contents::new(tiny.manifest().guest.clone())).unwrap();
    daemon.restart();

    let response =
        daemon.request("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "foreign", "network": false})));
    assert_eq!(
        (response.status, &response.json()["code"]),
        (409, &json!("snapshot_unusable")),
        "{response:?}"
    );
    // The operator reads which.
    let text = response.json()["error"].as_str().unwrap().to_owned();
    assert!(text.contains("foreign") && text.contains("lacks") && text.contains("edx bit 0"), "{text}");
    assert_eq!(daemon.folders(), 0);
}

fn flip_byte(path: &std::path::Path, at: usize) {
    let mut bytes = std::fs::read(path).unwrap();
    bytes[at] ^= 0x40;
    std::fs::write(path, bytes).unwrap();
}

#[test]
fn a_stats_call_tells_what_a_child_costs() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_tiny(&[]);
    let children = ids(&spawn(&daemon, 4));
    for id in &children {
        let stats = daemon.request("GET", &format!("/v1/sandboxes/{id}/stats"), None).json();
        let private = stats["private_kib"].as_u64().unwrap();
        assert!((1..4096).contains(&private), "{stats}");
        assert!(stats["pss_kib"].as_u64().unwrap() >= private, "{stats}");
    }
    daemon.delete(&children);
}

#[test]
fn what_a_dead_daemon_left_is_the_next_ones_and_is_removed_when_there_can_be_none() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_tiny(&[]);
    assert_eq!(ids(&spawn(&daemon, 3)).len(), 3);
    let run = daemon.run_dir();
    let processes: Vec<u32> = daemon.monitors().into_iter().chain(daemon.templates()).collect();
    assert_eq!(processes.len(), 4);
    daemon.kill();
    let elsewhere = tempfile::tempdir().unwrap();
    // What of it is shown, and whether it is to go.
    let cleanup = |more: &[&str]| -> BTreeSet<(String, bool)> {
        let mut command = Command::new(binary("forkd"));
        command.arg("--data-dir").arg(elsewhere.path()).args(["cleanup", "--json"]).args(more);
        let output = command.output().unwrap();
        assert!(output.status.success(), "{output:?}");
        let answer: Value = serde_json::from_slice(&output.stdout).unwrap();
        let shown = answer["leftovers"]
            .as_array()
            .unwrap()
            .iter()
            .map(|it| (it["path"].as_str().unwrap().to_owned(), it["action"] == "delete"));
        let ours =
            |path: &str| path == run.to_str().unwrap() || processes.iter().any(|pid| pid.to_string() == path);
        shown.filter(|(path, _)| ours(path)).collect()
    };
    let all = |is_to_go: bool| -> BTreeSet<(String, bool)> {
        let processes = processes.iter().map(u32::to_string);
        processes.chain([run.display().to_string()]).map(|path| (path, is_to_go)).collect()
    };
    assert_eq!(cleanup(&["--yes"]), all(false), "the next daemon takes it over");
    assert!(run.exists() && processes.iter().all(|pid| is_monitor(*pid)));
    // Without the way from the data directory to it, none can.
    std::fs::remove_file(daemon.data_dir().join("run")).unwrap();
    assert_eq!(cleanup(&[]), all(true));
    assert!(run.exists() && processes.iter().all(|pid| is_monitor(*pid)), "looking changes nothing");
    assert_eq!(cleanup(&["--yes"]), all(true));
    assert!(!run.exists() && !processes.iter().any(|pid| is_monitor(*pid)));
    assert_eq!(cleanup(&[]), BTreeSet::new());
}

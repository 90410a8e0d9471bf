//! A machine of its own whose plug is pulled while branches are on their way to its disk: every snapshot
//! that was acknowledged is whole afterwards, and of every other one nothing is left.

use std::collections::BTreeSet;
use std::net::TcpStream;
use std::path::Path;
use std::time::{Duration, Instant};

use forkd_tests::http::{self, Response};
use forkd_tests::random::{Random, rounds};
use forkd_tests::{TIMEOUT, eventually};
use rustix::process::{Signal, kill_process, test_kill_process};
use serde_json::{Value, json};

use crate::cli::{forkd, text};
use crate::machine::{Stop, machine_is_used, own_data_dir, pid, shell, status};
use crate::pattern::{self, writes_pages};

/// The daemon in a machine, over its forwarded port.
struct Remote {
    address: String,
    bearer: String,
}

impl Remote {
    /// Starts the machine if it does not run.
    fn of(data: &Path) -> Remote {
        let started = forkd(Some(data), &["images"]);
        assert!(started.status.success(), "{}", text(&started.stderr));
        let found = forkd(Some(data), &["token", "print", "--json"]);
        let found: Value = serde_json::from_slice(&found.stdout).unwrap();
        Remote {
            address: found["url"].as_str().unwrap().strip_prefix("http://").unwrap().to_owned(),
            bearer: format!("Bearer {}", found["token"].as_str().unwrap()),
        }
    }

    fn try_request(&self, method: &str, path: &str, body: Option<Value>) -> std::io::Result<Response> {
        let stream = TcpStream::connect(&self.address)?;
        stream.set_read_timeout(Some(TIMEOUT))?;
        let headers = [("authorization", self.bearer.as_str()), ("content-type", "application/json")];
        let body = body.map(|body| body.to_string()).unwrap_or_default();
        http::request(stream, method, path, &headers, body.as_bytes())
    }

    fn ask(&self, method: &str, path: &str, body: Option<Value>, status: u16) -> Value {
        let response = self.try_request(method, path, body).unwrap();
        assert_eq!(response.status, status, "{method} {path}: {response:?}");
        if response.body.is_empty() { Value::Null } else { response.json() }
    }

    /// Forks a child, which has found its memory to be of one instant when this returns.
    fn child(&self, tag: &str) -> String {
        let body = json!({"snapshot_tag": tag, "network": false});
        self.ask("POST", "/v1/sandboxes", Some(body), 201)[0]["id"].as_str().unwrap().to_owned()
    }

    /// Tags and what is known of each.
    fn snapshots(&self) -> std::io::Result<Vec<(String, Value)>> {
        let list = self.try_request("GET", "/v1/snapshots", None)?.json();
        let list = list.as_array().unwrap().iter();
        Ok(list.map(|info| (info["tag"].as_str().unwrap().to_owned(), info.clone())).collect())
    }
}

/// Branches a sandbox over and over, and watches, until the plug is pulled in the middle of it: tags that
/// were seen `ready`.
fn branch_until(
    remote: &Remote,
    source: &str,
    prefix: &str,
    end: Instant,
    pull: impl FnOnce(),
) -> BTreeSet<String> {
    std::thread::scope(|scope| {
        scope.spawn(|| {
            for index in 0.. {
                let wait = index % 3 == 2;
                let body = json!({"tag": format!("{prefix}-{index}"), "mode": "live", "wait": wait});
                let path = format!("/v1/sandboxes/{source}/branch");
                if remote.try_request("POST", &path, Some(body)).is_err() {
                    return;
                }
            }
        });
        let mut acknowledged = BTreeSet::new();
        while Instant::now() < end {
            let Ok(list) = remote.snapshots() else { break };
            let ready = list.into_iter().filter(|(_, info)| info["status"] == "ready");
            acknowledged.extend(ready.map(|(tag, _)| tag));
            std::thread::sleep(Duration::from_millis(20));
        }
        pull();
        acknowledged
    })
}

#[test]
fn with_its_plug_pulled_a_machine_keeps_every_acknowledged_snapshot_and_nothing_else() {
    if !machine_is_used() {
        return;
    }
    let data = own_data_dir();
    let data = data.path();
    let _stop = Stop(data);
    std::fs::write(data.join("pattern.elf"), forkd_vmm::asm_guest::elf_kernel(writes_pages())).unwrap();
    let mut random = Random::start("power");
    let mut remote = Remote::of(data);
    let kernel = "/forkd-share/pattern.elf";
    let body =
        json!({"tag": pattern::TAG, "kernel": kernel, "network": false, "mem_size_mib": pattern::MEM_MIB});
    remote.ask("POST", "/v1/snapshots", Some(body), 201);
    remote.ask("POST", "/v1/workspaces", Some(json!({"name": "dev", "snapshot_tag": pattern::TAG})), 201);
    remote.ask("POST", "/v1/workspaces/dev/suspend", Some(json!({"diff": true})), 200);

    let (mut kept, mut unasked) = (0, 0);
    for round in 0..rounds(2) {
        let source = remote.child(pattern::TAG);
        // It never rests, and savers have only what others leave of the computer.
        let pid_inside = remote.ask("GET", &format!("/v1/sandboxes/{source}"), None, 200)["pid"].clone();
        shell(data, &format!("renice -n 19 $(ls /proc/{pid_inside}/task)"));
        let end = Instant::now() + Duration::from_secs(2) + random.time(Duration::from_secs(12));
        let (supervisor, qemu) = (pid(data, "supervisor_pid"), pid(data, "qemu_pid"));
        let acknowledged = branch_until(&remote, &source, &format!("r{round}"), end, || {
            kill_process(supervisor, Signal::KILL).unwrap();
            eventually("QEMU to end with its supervisor", || test_kill_process(qemu).is_err().then_some(()));
        });

        remote = Remote::of(data);
        let found = remote.snapshots().unwrap();
        let tags: BTreeSet<String> = found.iter().map(|(tag, _)| tag.clone()).collect();
        assert!(acknowledged.is_subset(&tags), "lost: {acknowledged:?}, found {tags:?}");
        // One that is there is whole, acknowledged or not: the answer may have been on its way.
        let mut layers = BTreeSet::new();
        for (tag, info) in &found {
            assert_eq!(info["status"], "ready", "{info}");
            let child = remote.child(tag);
            remote.ask("DELETE", &format!("/v1/sandboxes/{child}"), None, 204);
            let info = remote.ask("GET", &format!("/v1/snapshots/{tag}/info"), None, 200);
            let digests = info["layers"].as_array().unwrap().iter();
            layers.extend(digests.map(|layer| layer["digest"].as_str().unwrap().to_owned()));
        }
        let log = status(data)["logs"]["daemon"].as_str().unwrap().to_owned();
        let store = Path::new(&log).parent().unwrap().join("forkd/snapshots");
        let names = |folder: &Path| -> BTreeSet<String> {
            let listed = shell(data, &format!("ls -A {}", folder.display()));
            listed.lines().map(str::to_owned).collect()
        };
        assert_eq!(names(&store.join(".layers")), layers, "layers on disk that nobody needs, or too few");
        let folders: BTreeSet<String> = names(&store).into_iter().filter(|name| name != ".layers").collect();
        assert!(folders.is_superset(&tags), "{folders:?} {tags:?}");
        let drafts: Vec<_> = folders.difference(&tags).filter(|name| !name.contains("lock")).collect();
        assert!(drafts.is_empty(), "left behind: {drafts:?}");
        kept += acknowledged.len();
        unasked += tags.len() - acknowledged.len();

        for tag in tags.iter().filter(|tag| tag.starts_with('r')) {
            remote.ask("DELETE", &format!("/v1/snapshots/{tag}"), None, 204);
        }
    }
    println!(
        "campaign: | machine (power) | {} | {kept} acknowledged, none lost; {unasked} more, whole |",
        rounds(2)
    );
    // A workspace that was suspended through all of it resumes.
    let info = remote.ask("GET", "/v1/workspaces/dev", None, 200);
    assert_eq!(info["status"], "suspended", "{info}");
    let info = remote.ask("POST", "/v1/workspaces/dev/resume", Some(json!({})), 200);
    assert_eq!(info["status"], "running", "{info}");
}

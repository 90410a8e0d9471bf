//! Branches of a real daemon, with guests of a few instructions. They run wherever `/dev/kvm` opens.

use std::time::{Duration, Instant};

use crate::daemon::{Daemon, eventually, launch, pid, runs, within};
use forkd_vmm::guest_code;
use serde_json::{Value, json};

guest_code! {
    /// Counts its forks. The VM generation id changes in every child; then the guest adds a page with the new
    /// count to its pages, checks all of them, and writes the count to the console, or an X if a page is
    /// damaged. Then it reports that it is ready. Meanwhile it keeps writing to memory.
    pub(crate) fn counts_its_forks,
    "mov edx, 0x602",
    "mov rbx, qword ptr [0xe8000]",
    "out dx, al",
    "2: pause",
    "inc qword ptr [0x210000]",
    "cmp rbx, qword ptr [0xe8000]",
    "je 2b",
    "mov rbx, qword ptr [0xe8000]",
    "inc qword ptr [0x200000]",
    "mov rax, qword ptr [0x200000]",
    "mov rcx, rax",
    "shl rcx, 12",
    "mov qword ptr [rcx + 0x300000], rax",
    "mov rsi, rax",
    "3: test rsi, rsi",
    "jz 4f",
    "mov rcx, rsi",
    "shl rcx, 12",
    "cmp qword ptr [rcx + 0x300000], rsi",
    "jne 5f",
    "dec rsi",
    "jmp 3b",
    "4: add al, '0'",
    "jmp 6f",
    "5: mov al, 'X'",
    "6: mov edx, 0x3f8",
    "out dx, al",
    "mov al, 10",
    "out dx, al",
    "mov edx, 0x602",
    "out dx, al",
    "jmp 2b",
}

/// A daemon with the snapshot `root`.
pub(crate) fn start() -> Option<Daemon> {
    let daemon = Daemon::start(&[("kernel", counts_its_forks())])?;
    daemon.snapshot("root", "kernel");
    Some(daemon)
}

fn id(sandbox: &Value) -> &str {
    sandbox["id"].as_str().unwrap()
}

pub(crate) trait Branching {
    fn try_branch(&self, sandbox: &Value, body: Value) -> (u16, Value);
    fn branch(&self, sandbox: &Value, body: Value) -> Value;
    fn one(&self, tag: &str) -> Value;
    fn info(&self, tag: &str) -> Value;
    fn console(&self, sandbox: &Value) -> String;
    fn becomes_ready(&self, tag: &str) -> Value;
    fn gone(&self);
}

impl Branching for Daemon {
    fn try_branch(&self, sandbox: &Value, body: Value) -> (u16, Value) {
        self.request("POST", &format!("/v1/sandboxes/{}/branch", id(sandbox)), Some(body))
    }

    fn branch(&self, sandbox: &Value, body: Value) -> Value {
        let (status, info) = self.try_branch(sandbox, body.clone());
        let expected = if body["wait"] == false { 202 } else { 201 };
        assert_eq!(status, expected, "{info}\n{}", self.log());
        info
    }

    /// Spawns one child.
    fn one(&self, tag: &str) -> Value {
        self.spawn(tag, 1).remove(0)
    }

    fn info(&self, tag: &str) -> Value {
        let (status, info) = self.request("GET", &format!("/v1/snapshots/{tag}/info"), None);
        assert_eq!(status, 200, "{info}");
        info
    }

    /// The count on the guest's console.
    fn console(&self, sandbox: &Value) -> String {
        let path = self.place("sandboxes").join(id(sandbox)).join("console.log");
        let text = || std::fs::read_to_string(&path).unwrap();
        eventually("a count", || text().ends_with('\n'));
        text().trim().to_owned()
    }

    fn becomes_ready(&self, tag: &str) -> Value {
        let now = || self.request("GET", &format!("/v1/snapshots/{tag}"), None).1;
        // Savers have the lowest CPU priority, and these guests never rest.
        within(Duration::from_secs(180), "a branch on disk", || now()["status"] != "writing");
        let info = now();
        assert_eq!(info["status"], "ready", "{info}\n{}", self.log());
        info
    }

    /// Removes all objects, and checks that nothing is left.
    fn gone(&self) {
        self.delete_all();
        eventually("no sandboxes", || self.left("sandboxes") == 0);
        for snapshot in self.request("GET", "/v1/snapshots", None).1.as_array().unwrap() {
            let path = format!("/v1/snapshots/{}?cascade=true", snapshot["tag"].as_str().unwrap());
            let (status, error) = self.request("DELETE", &path, None);
            // An earlier cascade may have removed it.
            assert!(status == 204 || status == 404, "{error}");
        }
        for folder in ["templates", "snapshots"] {
            eventually("empty folders", || self.left(folder) == 0);
        }
        assert!(self.monitors().is_empty());
    }
}

#[test]
fn a_branch_can_be_forked_from_at_once_and_is_on_disk_later() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    assert_eq!(daemon.console(&source), "1");
    let begun = Instant::now();
    let branch = daemon.branch(&source, json!({"tag": "b", "mode": "live", "wait": false}));
    let took = begun.elapsed();
    assert_eq!(branch["branched_from"], source["id"]);
    assert_eq!((&branch["mode"], &branch["quiesced"]), (&json!("live"), &json!(false)), "no agent");
    assert!(branch["pause_ms"].as_f64().unwrap() > 0.0, "{branch}");
    assert_eq!((&branch["bootable"], &branch["parent_tag"]), (&json!(true), &json!("root")), "{branch}");
    assert_eq!(branch["template"]["source"], "memory");
    let children = daemon.spawn("b", 3);
    if std::env::var_os("FORKD_TIMES").is_some() {
        eprintln!("branch {took:?}, pause {} ms, then {} ms", branch["pause_ms"], children[0]["ready_ms"]);
    }
    for child in &children {
        assert_eq!(daemon.console(child), "2");
        assert_eq!(child["snapshot_tag"], "b");
    }
    assert_eq!(daemon.console(&source), "1", "the source went on as it was");
    let info = daemon.becomes_ready("b");
    assert_eq!((&info["parent_tag"], &info["chain_depth"]), (&json!("root"), &json!(1)), "{info}");
    let written = info["diff_logical_bytes"].as_u64().unwrap();
    assert!(written > 0 && written < 1 << 20, "a few pages differ: {info}");
    assert!(info["diff_ms"].as_f64().unwrap() > 0.0 && info["bytes_written"].as_u64().unwrap() > 0, "{info}");
    assert_eq!(info["created_at_unix"], branch["created_at_unix"], "it is as old as its instant");

    // The same from disk.
    assert_eq!(daemon.request("POST", "/v1/snapshots/b/unload", None).0, 204);
    let child = daemon.one("b");
    assert_eq!(daemon.console(&child), "2");
    let (_, now) = daemon.request("GET", "/v1/snapshots/b", None);
    assert_eq!(now["template"]["source"], "disk");
    let old = branch["template"]["pid"].as_i64().unwrap() as i32;
    assert!(runs(old), "it has children");
    daemon.gone();
    assert!(!runs(old));
}

#[test]
fn the_modes_wait_for_the_disk_and_store_what_they_say() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    let full = daemon.branch(&source, json!({"tag": "full"}));
    assert_eq!((&full["status"], &full["mode"]), (&json!("ready"), &json!("full")));
    assert_eq!((&full["chain_depth"], &full["parent_tag"]), (&json!(0), &Value::Null), "{full}");
    let diff = daemon.branch(&source, json!({"tag": "diff", "mode": "diff", "parent_tag": "root"}));
    assert_eq!((&diff["status"], &diff["chain_depth"]), (&json!("ready"), &json!(1)), "{diff}");
    let live = daemon.branch(&source, json!({"live": true, "live_fork": true}));
    assert_eq!((&live["status"], &live["parent_tag"]), (&json!("ready"), &json!("root")), "{live}");
    let tag = live["tag"].as_str().unwrap();
    let parts: Vec<&str> = tag.split('-').collect();
    assert!(parts[0] == "branch" && parts[1] == id(&source) && parts[3].len() == 4, "{tag}");

    let info = daemon.info("root");
    let mut dependents = vec!["diff", tag];
    dependents.sort_unstable();
    assert_eq!(info["dependents"], json!(dependents), "{info}");
    let info = daemon.info("diff");
    assert_eq!((&info["ancestors"], &info["parent_tag"]), (&json!(["root"]), &json!("root")));
    assert_eq!(info["parent_content_hash"].as_str().unwrap().len(), 64);
    assert_eq!(info["layers"].as_array().unwrap().len(), 2);
    assert_eq!((&info["layers"][0]["kind"], &info["layers"][0]["shared_by"]), (&json!("memory"), &json!(3)));
    assert!(info["own_memory_bytes"].as_u64() < info["memory_physical_bytes"].as_u64(), "{info}");
    let info = daemon.info("full");
    assert_eq!((&info["ancestors"], &info["dependents"]), (&json!([]), &json!([])), "{info}");
    assert_eq!(info["layers"].as_array().unwrap().len(), 1);
    for tag in ["full", "diff", tag] {
        assert_eq!(daemon.request("POST", &format!("/v1/snapshots/{tag}/unload"), None).0, 204);
        assert_eq!(daemon.console(&daemon.one(tag)), "2", "{tag}");
    }
    daemon.gone();
}

#[test]
fn a_wrong_request_changes_nothing() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    daemon.branch(&source, json!({"tag": "taken"}));
    for (status, body, code) in [
        (400, json!({"tag": "x", "mode": "diff", "diff": true}), "invalid_request"),
        (400, json!({"tag": "x", "diff": true, "live": true}), "invalid_request"),
        (400, json!({"tag": "x", "wait": false}), "invalid_request"),
        (400, json!({"tag": "x", "mode": "diff", "wait": false}), "invalid_request"),
        (400, json!({"tag": "x", "mode": "diff", "parent_tag": "taken"}), "invalid_request"),
        (400, json!({"tag": "x", "mode": "live", "parent_tag": "root"}), "invalid_request"),
        (400, json!({"tag": "x", "mode": "quick"}), "invalid_request"),
        (400, json!({"tag": "../x"}), "invalid_request"),
        (409, json!({"tag": "taken"}), "tag_taken"),
        (409, json!({"tag": "root"}), "tag_taken"),
        (409, json!({"tag": "x", "mode": "disk"}), "sandbox_unfit"),
    ] {
        let (got, error) = daemon.try_branch(&source, body.clone());
        assert_eq!(got, status, "{body}: {error}");
        assert_eq!(error["code"], code, "{error}");
    }
    let (status, error) = daemon.try_branch(&json!({"id": "sbnobody"}), json!({}));
    assert_eq!(status, 404, "{error}");
    let process = rustix::process::Pid::from_raw(pid(&source)).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    let state = || daemon.request("GET", &format!("/v1/sandboxes/{}", id(&source)), None).1;
    eventually("its end", || state()["state"] == "ended");
    let (status, error) = daemon.try_branch(&source, json!({"tag": "x"}));
    assert_eq!((status, &error["code"]), (409, &json!("sandbox_ended")), "{error}");
    assert_eq!(daemon.request("GET", "/v1/snapshots/x", None).0, 404);
    daemon.gone();
}

#[test]
fn many_branches_of_one_sandbox_and_of_branches_are_each_what_they_were() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    // Ten in a row, each forked before it is on disk.
    for n in 0..10 {
        let tag = format!("row{n}");
        daemon.branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
        let child = daemon.one(&tag);
        assert_eq!(daemon.console(&child), "2");
        // The guests never rest, and savers have the lowest CPU priority.
        assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{}", id(&child)), None).0, 204);
    }
    // A branch of a child of a branch, while none of them is on disk.
    let mut newest = source.clone();
    for n in 0..4 {
        let tag = format!("deep{n}");
        daemon.branch(&newest, json!({"tag": tag, "mode": "live", "wait": false}));
        newest = daemon.one(&tag);
        assert_eq!(daemon.console(&newest), (n + 2).to_string());
    }
    daemon.delete_all();
    for n in 0..4 {
        let info = daemon.becomes_ready(&format!("deep{n}"));
        assert_eq!(info["chain_depth"], n + 1, "{info}");
    }
    for n in 0..10 {
        assert_eq!(daemon.becomes_ready(&format!("row{n}"))["parent_tag"], "root");
    }
    assert_eq!(daemon.info("deep3")["ancestors"], json!(["root", "deep0", "deep1", "deep2"]));
    daemon.gone();
}

#[test]
fn a_chain_of_four_is_loaded_from_disk_each_time_and_compacted() {
    let Some(daemon) = start() else { return };
    let mut tag = String::from("root");
    for n in 1..=4 {
        assert_eq!(daemon.request("POST", &format!("/v1/snapshots/{tag}/unload"), None).0, 204);
        let child = daemon.one(&tag);
        assert_eq!(daemon.console(&child), n.to_string());
        tag = format!("link{n}");
        let info = daemon.branch(&child, json!({"tag": tag, "mode": "diff"}));
        assert_eq!(info["chain_depth"], n, "{info}");
        daemon.delete_all();
    }
    assert_eq!(daemon.request("POST", "/v1/snapshots/link4/unload", None).0, 204);
    let compact = |tag: &str, to: &str| {
        daemon.request("POST", &format!("/v1/snapshots/{tag}/compact"), Some(json!({"to": to})))
    };
    assert_eq!(compact("link4", "link4").0, 400);
    assert_eq!(compact("link4", "../x").0, 400);
    assert_eq!(compact("link4", "link3").0, 409);
    assert_eq!(compact("nobody", "x").0, 404);
    let (status, info) = compact("link4", "whole");
    assert_eq!(status, 200, "{info}\n{}", daemon.log());
    assert_eq!(
        (&info["branched_from"], &info["chain_depth"]),
        (&json!("compact:link4"), &json!(0)),
        "{info}"
    );
    assert_eq!(daemon.info("whole")["layers"].as_array().unwrap().len(), 1);
    // The flat snapshot does not need its sources.
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/root?cascade=true", None).0, 204);
    let tags: Vec<Value> = daemon.request("GET", "/v1/snapshots", None).1.as_array().unwrap().clone();
    assert_eq!(tags.len(), 1, "{tags:?}");
    assert_eq!(daemon.console(&daemon.one("whole")), "5");
    daemon.gone();
}

#[test]
fn a_snapshot_that_others_need_is_not_removed_by_accident() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    daemon.branch(&source, json!({"tag": "a", "mode": "diff"}));
    let child = daemon.one("a");
    daemon.branch(&child, json!({"tag": "b", "mode": "diff"}));
    let delete = |path: &str| daemon.request("DELETE", &format!("/v1/snapshots/{path}"), None);
    let (status, error) = delete("root");
    assert_eq!((status, &error["code"]), (409, &json!("snapshot_in_use")), "{error}");
    assert_eq!(delete("root?cascade=true&force=true").0, 400);
    assert_eq!(delete("nobody").0, 404);
    // Only the name goes: snapshots that need its layers keep them.
    assert_eq!(delete("root?force=true").0, 204);
    assert_eq!(daemon.request("GET", "/v1/snapshots/root", None).0, 404);
    assert_eq!(daemon.request("POST", "/v1/snapshots/b/unload", None).0, 204);
    assert_eq!(daemon.console(&daemon.one("b")), "3");
    assert_eq!(daemon.info("b")["ancestors"], json!(["root", "a"]));
    // The sandbox's own snapshot is gone: its branch is stored in full.
    let info = daemon.branch(&source, json!({"tag": "c", "mode": "diff"}));
    assert_eq!((&info["chain_depth"], &info["parent_tag"]), (&json!(0), &Value::Null), "{info}");
    assert_eq!(delete("a?cascade=true").0, 204);
    assert_eq!(daemon.request("GET", "/v1/snapshots/b", None).0, 404);
    assert!(runs(pid(&child)), "who runs goes on");
    daemon.gone();
}

/// The processes whose parent `parent` is.
fn forked_by(parent: i32) -> Vec<i32> {
    let path = format!("/proc/{parent}/task/{parent}/children");
    let children = std::fs::read_to_string(path).unwrap_or_default();
    children.split_whitespace().map(|pid| pid.parse().unwrap()).collect()
}

/// Kills the next savers of `tag`, whose template has no other children: at most `most`, until the branch is
/// written. Returns how many. A branch that was `answered` and has no template was refused, so it has no
/// savers.
fn kill_savers(daemon: &Daemon, tag: &str, most: usize, answered: impl Fn() -> bool) -> usize {
    let info = || daemon.request("GET", &format!("/v1/snapshots/{tag}"), None);
    let mut killed = Vec::new();
    let mut looked = Instant::now();
    let mut template = None;
    loop {
        if template.is_none() || looked.elapsed() > Duration::from_millis(50) {
            let answered = answered();
            let (status, info) = info();
            template = info["template"]["pid"].as_i64().map(|pid| pid as i32).or(template);
            looked = Instant::now();
            if (status != 200 || info["status"] != "writing") && (template.is_some() || answered) {
                return killed.len();
            }
        }
        for saver in template.map(forked_by).unwrap_or_default() {
            if killed.contains(&saver) || killed.len() == most {
                continue;
            }
            let process = rustix::process::Pid::from_raw(saver).unwrap();
            if rustix::process::kill_process(process, rustix::process::Signal::KILL).is_ok() {
                killed.push(saver);
            }
        }
        if killed.len() == most {
            return most;
        }
    }
}

/// How long to try. Savers are quick, so it may take several branches to catch one. The number depends on chance
/// and on the load of the computer, so only the time is limited.
const HUNT: Duration = Duration::from_secs(180);

/// Takes branches until the savers of one were `caught`, and returns its tag. The other branches are removed.
fn hunt(daemon: &Daemon, name: &str, caught: impl Fn(&str) -> bool) -> String {
    let begun = Instant::now();
    let mut tags = (0..).map(|round| format!("{name}{round}"));
    let found = tags.find(|tag| {
        if caught(tag) {
            return true;
        }
        assert_eq!(daemon.request("DELETE", &format!("/v1/snapshots/{tag}"), None).0, 204);
        assert!(begun.elapsed() < HUNT, "until {tag} too few savers were caught");
        false
    });
    found.unwrap()
}

#[test]
fn a_saver_that_is_killed_is_tried_once_more_and_then_given_up() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    let branch = |tag: &str| daemon.branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
    let status = |tag: &str| daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).1;
    hunt(&daemon, "once", |tag| {
        branch(tag);
        let killed = kill_savers(&daemon, tag, 1, || true);
        daemon.becomes_ready(tag);
        killed == 1
    });

    let tag = hunt(&daemon, "twice", |tag| {
        branch(tag);
        let killed = kill_savers(&daemon, tag, 2, || true);
        within(Duration::from_secs(180), "what came of it", || status(tag)["status"] != "writing");
        // A saver that is killed after its work was done may have succeeded.
        killed == 2 && status(tag)["status"] == "failed"
    });
    let failed = status(&tag);
    assert_eq!(failed["error_code"], "internal", "{failed}");
    assert_eq!(failed["bootable"], true, "its template lives: {failed}");
    let child = daemon.one(&tag);
    assert_eq!(daemon.console(&child), "2");
    // A branch of its child has no stored parent, so it is stored in full.
    let info = daemon.branch(&child, json!({"tag": "whole", "mode": "diff"}));
    assert_eq!((&info["chain_depth"], &info["parent_tag"]), (&json!(0), &Value::Null), "{info}");
    let (code, error) = daemon.request("POST", &format!("/v1/snapshots/{tag}/unload"), None);
    assert_eq!(code, 409, "{error}");
    assert_eq!(daemon.request("DELETE", &format!("/v1/snapshots/{tag}"), None).0, 204);
    assert_eq!(daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0, 404);
    assert!(runs(pid(&child)));

    // A waiting client gets the error, and the tag is free again.
    hunt(&daemon, "told", |tag| {
        let (status, answer) = std::thread::scope(|scope| {
            let asked = scope.spawn(|| daemon.try_branch(&source, json!({"tag": tag, "mode": "diff"})));
            kill_savers(&daemon, tag, 2, || asked.is_finished());
            asked.join().unwrap()
        });
        if status == 201 {
            return false;
        }
        assert_eq!(status, 500, "{answer}");
        assert_eq!(answer["code"], "internal", "{answer}");
        assert_eq!(daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0, 404);
        daemon.branch(&source, json!({"tag": tag, "mode": "diff"}));
        true
    });
    daemon.gone();
}

#[test]
fn a_daemon_that_is_killed_while_a_branch_is_written_finishes_it_later() {
    let Some(mut daemon) = start() else { return };
    let source = daemon.one("root");
    daemon.branch(&source, json!({"tag": "a", "mode": "live", "wait": false}));
    let child = daemon.one("a");
    // A branch whose parent is not on disk, either.
    daemon.branch(&child, json!({"tag": "b", "mode": "live", "wait": false}));
    daemon.restart();
    for (tag, parent, depth) in [("a", "root", 1), ("b", "a", 2)] {
        let info = daemon.becomes_ready(tag);
        assert_eq!(info["branched_from"], if tag == "a" { &source["id"] } else { &child["id"] }.clone());
        assert!(info["pause_ms"].as_f64().unwrap() > 0.0, "{info}");
        // Whether or not it was on disk before the restart, its parent is the same.
        assert_eq!((&info["parent_tag"], &info["chain_depth"]), (&json!(parent), &json!(depth)), "{info}");
    }
    for (tag, count) in [("a", "2"), ("b", "3")] {
        assert_eq!(daemon.console(&daemon.one(tag)), count);
        assert_eq!(daemon.request("POST", &format!("/v1/snapshots/{tag}/unload"), None).0, 204);
        assert_eq!(daemon.console(&daemon.one(tag)), count);
    }
    // The source runs on, and can be branched again.
    assert_eq!(daemon.branch(&source, json!({"tag": "c", "mode": "diff"}))["parent_tag"], "root");
    // A daemon that stops leaves its branches to the next one, too.
    daemon.branch(&source, json!({"tag": "d", "mode": "live", "wait": false}));
    daemon.terminate();
    daemon.child = launch(daemon.folder.path());
    daemon.up();
    daemon.becomes_ready("d");
    assert_eq!(daemon.console(&daemon.one("d")), "2");
    daemon.gone();
}

#[test]
fn a_branch_of_a_lineage_outlives_what_the_lineage_began_with() {
    let Some(mut daemon) = start() else { return };
    let source = daemon.one("root");
    daemon.branch(&source, json!({"tag": "a", "mode": "live", "wait": false}));
    let child = daemon.one("a");
    daemon.becomes_ready("a");
    assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{}", id(&source)), None).0, 204);
    assert_eq!(daemon.request("DELETE", "/v1/snapshots/root?force=true", None).0, 204);
    eventually("the root's template's end", || daemon.left("templates") == 1);
    daemon.restart();
    assert!(runs(pid(&child)));
    assert_eq!(daemon.console(&daemon.one("a")), "2");
    let info = daemon.branch(&child, json!({"tag": "b", "mode": "diff"}));
    assert_eq!(info["parent_tag"], "a", "{info}");
    daemon.gone();
}

#[test]
fn a_removed_branch_leaves_nothing_while_it_is_being_written() {
    let Some(daemon) = start() else { return };
    let source = daemon.one("root");
    for n in 0..5 {
        let tag = format!("b{n}");
        let branch = daemon.branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
        let template = branch["template"]["pid"].as_i64().unwrap() as i32;
        let child = (n == 0).then(|| daemon.one(&tag));
        assert_eq!(daemon.request("DELETE", &format!("/v1/snapshots/{tag}"), None).0, 204);
        assert_eq!(daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0, 404);
        if let Some(child) = child {
            assert!(runs(template) && runs(pid(&child)), "its child needs it");
            assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{}", id(&child)), None).0, 204);
        }
        eventually("its template's end", || !runs(template));
    }
    daemon.gone();
}

#[test]
fn old_branches_go_when_nothing_needs_them() {
    let Some(mut daemon) = start() else { return };
    std::fs::write(daemon.path().join("limits.json"), r#"{"branch_max_count": 2}"#).unwrap();
    let source = daemon.one("root");
    daemon.branch(&source, json!({"tag": "used", "mode": "diff"}));
    let child = daemon.one("used");
    daemon.branch(&child, json!({"tag": "needed", "mode": "diff"}));
    daemon.restart();
    // By the order in which they were taken, within one second, and not by name.
    for tag in ["z", "y", "x"] {
        daemon.branch(&source, json!({"tag": tag, "mode": "diff"}));
    }
    let there = |tag: &str| daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0 == 200;
    eventually("the oldest's end", || !there("z") && !there("needed"));
    std::thread::sleep(Duration::from_millis(300));
    assert!(there("used") && there("root"), "a sandbox was forked from it");
    assert!(there("x"), "the newest");

    // While a workspace's record cannot be read, no snapshot is removed.
    let broken = daemon.path().join("workspaces/broken.json");
    std::fs::write(&broken, "{}").unwrap();
    daemon.restart();
    let there =
        |daemon: &Daemon, tag: &str| daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0 == 200;
    for tag in ["w", "v", "u"] {
        daemon.branch(&source, json!({"tag": tag, "mode": "diff"}));
    }
    eventually("its refusal", || daemon.log().contains("old branches not removed"));
    assert!(["x", "w", "v", "u"].iter().all(|tag| there(&daemon, tag)), "{}", daemon.log());
    std::fs::remove_file(broken).unwrap();
    daemon.restart();
    daemon.branch(&source, json!({"tag": "t", "mode": "diff"}));
    eventually("the end of those that are too many", || !there(&daemon, "x") && !there(&daemon, "v"));
    assert!(there(&daemon, "t"));
    daemon.gone();
}

#[test]
fn a_branch_nobody_forks_from_takes_no_memory() {
    let Some(mut daemon) = start() else { return };
    std::fs::write(daemon.path().join("limits.json"), r#"{"branch_unload_secs": 3}"#).unwrap();
    daemon.restart();
    let source = daemon.one("root");
    let branch = |tag: &str| {
        let branch = daemon.branch(&source, json!({"tag": tag, "mode": "diff"}));
        branch["template"]["pid"].as_i64().unwrap() as i32
    };
    let needed = branch("with-child");
    let child = daemon.one("with-child");
    let unused = branch("unused");
    let unloaded =
        |tag: &str| daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).1["template"].is_null();
    eventually("both to be let go of", || unloaded("unused") && unloaded("with-child"));
    eventually("the end of a template", || !runs(unused));
    assert!(runs(needed) && daemon.console(&child) == "2", "a child needs it");
    assert!(!unloaded("root"), "that is no branch");
    // The same from disk.
    assert_eq!(daemon.console(&daemon.one("unused")), "2");
    daemon.gone();
}

#[test]
fn more_branches_at_a_time_than_allowed_are_told_to_come_later() {
    let Some(mut daemon) = start() else { return };
    std::fs::write(daemon.path().join("limits.json"), r#"{"max_branches": 0}"#).unwrap();
    let source = daemon.one("root");
    daemon.restart();
    let (status, error) = daemon.try_branch(&source, json!({"tag": "b"}));
    assert_eq!((status, &error["code"]), (503, &json!("daemon_busy")), "{error}");
    assert_eq!(daemon.request("GET", "/v1/snapshots/b", None).0, 404);
    daemon.gone();
}

#[test]
fn a_sandbox_that_is_deleted_while_it_is_branched_leaves_a_whole_branch_or_none() {
    let Some(daemon) = start() else { return };
    let mut whole = 0;
    let sources = daemon.spawn("root", 12);
    for (round, source) in sources.iter().enumerate() {
        let tag = format!("b{round}");
        let (status, answer) = std::thread::scope(|scope| {
            let live = json!({"tag": tag, "mode": "live", "wait": false});
            let asked = scope.spawn(|| daemon.try_branch(source, live));
            std::thread::sleep(Duration::from_millis(round as u64));
            // The last round waits for the response, however long that takes.
            while round + 1 == sources.len() && !asked.is_finished() {
                std::thread::sleep(Duration::from_millis(1));
            }
            assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{}", id(source)), None).0, 204);
            asked.join().unwrap()
        });
        if status == 202 {
            daemon.becomes_ready(&tag);
            let child = daemon.one(&tag);
            assert_eq!(daemon.console(&child), "2");
            assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{}", id(&child)), None).0, 204);
            whole += 1;
        } else {
            assert!(status == 404 || status == 409, "{status} {answer}");
            assert_eq!(daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0, 404);
        }
    }
    assert!(whole > 0);
    daemon.gone();
}

#[test]
fn a_daemon_killed_at_any_moment_of_a_branch_loses_none_that_was_acknowledged() {
    let Some(mut daemon) = start() else { return };
    let source = daemon.one("root");
    for round in 0..6 {
        let asking = std::sync::atomic::AtomicBool::new(true);
        let acknowledged = std::thread::scope(|scope| {
            let asked = scope.spawn(|| {
                let mut acknowledged = Vec::new();
                let path = format!("/v1/sandboxes/{}/branch", id(&source));
                for n in 0..50 {
                    let tag = format!("b{round}.{n}");
                    let live = json!({"tag": tag, "mode": "live", "wait": false});
                    match daemon.try_request("POST", &path, Some(live)) {
                        Some((202, _)) => acknowledged.push(tag),
                        Some((503, _)) => {}
                        Some(other) => panic!("{other:?}"),
                        None => break,
                    }
                    if !asking.load(std::sync::atomic::Ordering::Relaxed) {
                        break;
                    }
                }
                acknowledged
            });
            std::thread::sleep(Duration::from_millis(30 + 37 * round));
            let process = rustix::process::Pid::from_raw(daemon.child.id() as i32).unwrap();
            rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
            asking.store(false, std::sync::atomic::Ordering::Relaxed);
            asked.join().unwrap()
        });
        daemon.restart();
        for tag in &acknowledged {
            assert_eq!(daemon.becomes_ready(tag)["parent_tag"], "root", "{tag}");
        }
        let all = daemon.request("GET", "/v1/snapshots", None).1.as_array().unwrap().clone();
        for snapshot in all.iter().filter(|snapshot| snapshot["tag"] != "root") {
            let tag = snapshot["tag"].as_str().unwrap();
            // It is whole, whether or not a client got a response.
            daemon.becomes_ready(tag);
            assert_eq!(daemon.request("POST", &format!("/v1/snapshots/{tag}/unload"), None).0, 204);
        }
        if let Some(tag) = acknowledged.last() {
            let child = daemon.one(tag);
            assert_eq!(daemon.console(&child), "2");
            assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{}", id(&child)), None).0, 204);
        }
        for snapshot in all.iter().filter(|snapshot| snapshot["tag"] != "root") {
            let path = format!("/v1/snapshots/{}", snapshot["tag"].as_str().unwrap());
            assert_eq!(daemon.request("DELETE", &path, None).0, 204);
        }
        // Only the template of root, and nothing half-made.
        eventually("no templates but one", || daemon.left("templates") == 1);
        let state = daemon.request("GET", &format!("/v1/sandboxes/{}", id(&source)), None).1;
        assert_eq!(state["state"], "running", "{state}");
    }
    daemon.gone();
}

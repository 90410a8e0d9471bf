//! Records that a daemon cannot read: damaged ones, and those of a newer daemon. The daemon keeps their objects.

use std::path::PathBuf;

use crate::auth::{add, address};
use crate::daemon::{Daemon, eventually, launch, pid, runs};
use crate::support::{children_of, id, route};
use serde_json::{Value, json};

impl Daemon {
    /// The path of a record of a sandbox or a template.
    fn record(&self, folder: &str, id: &str, file: &str) -> PathBuf {
        self.place(folder).join(id).join(file)
    }

    /// Kills the daemon, changes its files, and starts another one.
    fn restart_with(&mut self, change: impl FnOnce(&Daemon)) {
        self.kill();
        change(self);
        self.child = launch(self.path());
        self.up();
    }

    fn unknown(&self, sandbox: &str) -> Value {
        let info = self.sandbox(sandbox);
        assert_eq!(info["state"], "unknown", "{info}\n{}", self.log());
        assert_eq!(info["reason"], "record_unreadable");
        info
    }

    fn only_template(&self) -> String {
        let mut all = std::fs::read_dir(self.place("templates")).unwrap().flatten();
        let name = all.next().unwrap().file_name().into_string().unwrap();
        assert!(all.next().is_none());
        name
    }

    fn ended(&self, child: &Value) {
        eventually("its end", || !runs(pid(child)));
        let folder = self.place("sandboxes").join(id(child));
        eventually("its folder's end", || !folder.exists());
    }
}

/// Changes a record's JSON.
fn edit(path: &PathBuf, change: impl FnOnce(&mut Value)) {
    let mut record = serde_json::from_slice(&std::fs::read(path).unwrap()).unwrap();
    change(&mut record);
    std::fs::write(path, record.to_string()).unwrap();
}

/// A way to make a sandbox's record unreadable: the file, and the change.
type Damage = (&'static str, fn(&PathBuf));
const DAMAGES: [Damage; 7] = [
    ("sandbox.json", |path| std::fs::write(path, "").unwrap()),
    ("sandbox.json", |path| std::fs::write(path, r#"{"template": "tp"#).unwrap()),
    ("sandbox.json", |path| edit(path, |record| record["version"] = json!(99))),
    ("sandbox.json", |path| edit(path, |record| record["life"]["on_timeout"] = json!("hibernate"))),
    ("sandbox.json", |path| edit(path, |record| record["spec"]["vcpus"] = json!("many"))),
    ("process.json", |path| std::fs::write(path, "\0\0\0\0").unwrap()),
    ("process.json", |path| edit(path, |record| record["version"] = json!(2))),
];

#[test]
fn a_sandbox_whose_record_cannot_be_read_is_kept_until_a_client_ends_it() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    let most = DAMAGES.len() + 1;
    std::fs::write(daemon.path().join("limits.json"), json!({"max_sandboxes": most}).to_string()).unwrap();
    daemon.restart();
    daemon.snapshot("tiny", "kernel");
    let children = daemon.spawn("tiny", most);
    // This request makes the daemon write the ledger.
    daemon.done(200, "GET", "/v1/sandboxes?archived=true", None);
    let (healthy, damaged) = children.split_last().unwrap();
    let file = |daemon: &Daemon, child: &Value, name: &str| daemon.record("sandboxes", &id(child), name);
    let kept: Vec<Vec<u8>> = damaged
        .iter()
        .zip(DAMAGES)
        .map(|(child, (name, _))| std::fs::read(file(&daemon, child, name)).unwrap())
        .collect();
    daemon.restart_with(|daemon| {
        for (child, (name, damage)) in damaged.iter().zip(DAMAGES) {
            damage(&file(daemon, child, name));
        }
    });

    // Three daemons: the one that first finds the damage, one after a stop, and one after a kill.
    for round in 0..3 {
        match round {
            1 => {
                daemon.terminate();
                daemon.child = launch(daemon.path());
                daemon.up();
            }
            2 => daemon.restart(),
            _ => {}
        }
        for (child, (name, _)) in damaged.iter().zip(DAMAGES) {
            let info = daemon.unknown(&id(child));
            for same in ["pid", "owner", "snapshot_tag", "vcpus", "mem_size_mib", "created_at_unix"] {
                assert_eq!(info[same], child[same], "{same}: {info}");
            }
            assert!(info["detail"].as_str().unwrap().contains(name), "{info}");
            assert!(runs(pid(child)), "{}", daemon.log());
        }
        assert_eq!(daemon.sandbox(&id(healthy))["state"], "running");
        assert_eq!(daemon.list().len(), most);
        let unknown = daemon.done(200, "GET", "/v1/sandboxes?state=unknown", None);
        assert_eq!(unknown.as_array().unwrap().len(), DAMAGES.len());
        assert_eq!(children_of(daemon.template_of("tiny")), most);
        // Each of them counts towards the limit.
        let (status, _) = daemon.request("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "tiny"})));
        assert_eq!(status, 503);
    }

    // Requests to them are refused, and have no effect.
    let child = &damaged[2];
    for (method, verb, body) in [
        ("POST", "ping", None),
        ("POST", "exec", Some(json!({"args": ["true"]}))),
        ("POST", "pause", None),
        ("POST", "resume", None),
        ("POST", "branch", Some(json!({"tag": "never"}))),
        ("POST", "rollback", None),
        ("GET", "stats", None),
        ("GET", "console", None),
        ("PUT", "agent-port", None),
    ] {
        let (status, answer) = daemon.request(method, &route(child, verb), body);
        assert_eq!(status, 409, "{verb}: {answer}");
    }
    let path = format!("/v1/sandboxes/{}", id(child));
    daemon.refused(409, "state_unknown", "PATCH", &path, Some(json!({"timeout_secs": 60})));
    assert_eq!(daemon.unknown(&id(child))["pid"], child["pid"]);

    // Half of the records are repaired: these sandboxes run on. The others are deleted.
    let (mended, doomed) = damaged.split_at(DAMAGES.len() / 2);
    daemon.restart_with(|daemon| {
        for ((child, (name, _)), whole) in mended.iter().zip(DAMAGES).zip(&kept) {
            std::fs::write(file(daemon, child, name), whole).unwrap();
        }
    });
    for child in mended.iter().chain([healthy]) {
        let info = daemon.sandbox(&id(child));
        assert_eq!((&info["state"], &info["pid"]), (&json!("running"), &child["pid"]), "{info}");
        let before = daemon.printed(&id(child)).len();
        eventually("the next letter", || daemon.printed(&id(child)).len() > before);
    }
    for child in doomed {
        daemon.unknown(&id(child));
        daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(child)), None);
        daemon.ended(child);
    }
    let more = doomed.len();
    eventually("their reservations", || {
        let body = json!({"snapshot_tag": "tiny", "n": more});
        daemon.request("POST", "/v1/sandboxes", Some(body)).0 == 201
    });
    assert_eq!(daemon.list().len(), most);
    daemon.delete_all();
    daemon.done(204, "DELETE", "/v1/snapshots/tiny", None);
    eventually("empty folders", || ["sandboxes", "templates"].iter().all(|it| daemon.left(it) == 0));
}

#[test]
fn a_sandbox_in_state_unknown_that_was_deleted_does_not_come_back() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let children = daemon.spawn("tiny", DAMAGES.len());
    daemon.restart_with(|daemon| {
        for (child, (name, damage)) in children.iter().zip(DAMAGES) {
            damage(&daemon.record("sandboxes", &id(child), name));
        }
    });
    children.iter().for_each(|child| drop(daemon.unknown(&id(child))));
    daemon.delete_all();
    daemon.restart();
    assert!(daemon.list().is_empty(), "{:?}", daemon.list());
    children.iter().for_each(|child| daemon.ended(child));
}

#[test]
fn an_end_that_cannot_be_read_is_kept_and_one_of_a_process_that_lives_counts_not() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let children = daemon.spawn("tiny", 2);
    let process = rustix::process::Pid::from_raw(pid(&children[0])).unwrap();
    rustix::process::kill_process(process, rustix::process::Signal::KILL).unwrap();
    eventually("an end", || daemon.sandbox(&id(&children[0]))["state"] == "ended");
    let ends = [0, 1].map(|index: usize| daemon.record("sandboxes", &id(&children[index]), "end.json"));
    let whole = std::fs::read(&ends[0]).unwrap();
    daemon.restart_with(|_| ends.iter().for_each(|end| std::fs::write(end, "{").unwrap()));
    daemon.unknown(&id(&children[0]));
    assert_eq!(daemon.sandbox(&id(&children[1]))["state"], "running");
    daemon.restart_with(|_| std::fs::write(&ends[0], whole).unwrap());
    let info = daemon.sandbox(&id(&children[0]));
    assert_eq!((&info["state"], &info["reason"]), (&json!("ended"), &json!("monitor_died")));
}

#[test]
fn a_sandbox_in_state_unknown_counts_towards_its_owners_quota() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.done(200, "POST", "/v1/snapshots/tiny/owner", Some(json!({"owner": "*"})));
    let mut ann = add(&daemon, json!({"name": "ann", "max_memory_mib": 64}));
    let child = ann.done(201, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "tiny"})))[0].clone();
    daemon.done(200, "GET", "/v1/sandboxes?archived=true", None);
    daemon.restart_with(|daemon| {
        std::fs::write(daemon.record("sandboxes", &id(&child), "sandbox.json"), "rubbish").unwrap();
    });
    ann.address = address(&daemon);
    let mine = ann.done(200, "GET", "/v1/sandboxes", None);
    assert_eq!((&mine[0]["id"], &mine[0]["state"]), (&child["id"], &json!("unknown")), "{mine}");
    ann.done(429, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "tiny"})));
    ann.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&child)), None);
    ann.done(201, "POST", "/v1/sandboxes", Some(json!({"snapshot_tag": "tiny"})));
    daemon.ended(&child);
}

#[test]
fn a_record_of_a_daemon_without_versions_is_read() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let template = (daemon.only_template(), daemon.template_of("tiny"));
    daemon.restart_with(|daemon| {
        for file in ["sandbox.json", "process.json"] {
            edit(&daemon.record("sandboxes", &id(&child), file), without_version);
        }
        for file in ["template.json", "process.json"] {
            edit(&daemon.record("templates", &template.0, file), without_version);
        }
    });
    let info = daemon.sandbox(&id(&child));
    assert_eq!((&info["state"], &info["pid"]), (&json!("running"), &child["pid"]));
    assert_eq!(daemon.template_of("tiny"), template.1);
}

fn without_version(record: &mut Value) {
    assert_eq!(record["version"], 1, "{record}");
    record.as_object_mut().unwrap().remove("version");
}

#[test]
fn a_template_whose_record_cannot_be_read_is_kept_and_its_children_go_on() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    let (template, process) = (daemon.only_template(), daemon.template_of("tiny"));
    let damages: [Damage; 3] = [
        ("template.json", |path| std::fs::write(path, "{}").unwrap()),
        ("template.json", |path| edit(path, |record| record["standing"] = json!({"moved": "away"}))),
        ("process.json", |path| std::fs::write(path, "?").unwrap()),
    ];
    for (name, damage) in damages {
        let child = daemon.spawn("tiny", 1).remove(0);
        assert_eq!(daemon.template_of("tiny"), process);
        let file = daemon.record("templates", &template, name);
        let whole = std::fs::read(&file).unwrap();
        daemon.restart_with(|_| damage(&file));
        let tag = format!("/v1/snapshots/{template}");
        let info = daemon.done(200, "GET", &tag, None);
        assert_eq!(info["status"], "unknown", "{info}");
        assert!(info["error"].as_str().unwrap().contains(name), "{info}");
        let known = name != "process.json";
        assert_eq!(info["template"]["pid"].as_i64(), known.then_some(i64::from(process)), "{info}");
        assert_eq!(daemon.sandbox(&id(&child))["state"], "running");
        assert!(runs(process));
        daemon.refused(409, "state_unknown", "POST", &format!("{tag}/unload"), None);
        let (status, _) = daemon.request("POST", "/v1/sandboxes", Some(json!({"snapshot_tag": template})));
        assert_eq!(status, 409);
        // The daemon does not know which snapshots it needs, so it removes none.
        if name == "template.json" {
            daemon.refused(409, "snapshot_in_use", "DELETE", "/v1/snapshots/tiny", None);
        }
        // A new template, from disk, gets another user id. The unknown one keeps its own, even as the last of its
        // lineage.
        daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&child)), None);
        daemon.ended(&child);
        let other = daemon.spawn("tiny", 1).remove(0);
        assert_ne!(daemon.template_of("tiny"), process);
        if rustix::process::geteuid().is_root() {
            assert_ne!(user(daemon.template_of("tiny")), user(process));
        }
        daemon.done(204, "DELETE", &format!("/v1/sandboxes/{}", id(&other)), None);
        daemon.done(204, "POST", "/v1/snapshots/tiny/unload", None);
        eventually("the other template's end", || daemon.left("templates") == 1);
        daemon.restart_with(|_| std::fs::write(&file, whole).unwrap());
        assert_eq!(daemon.template_of("tiny"), process, "the template is back");
        assert_eq!(daemon.request("GET", &tag, None).0, 404);
    }

    // A deletion removes its folder, and not its children.
    let children = daemon.spawn("tiny", 2);
    let file = daemon.record("templates", &template, "template.json");
    daemon.restart_with(|_| std::fs::write(&file, "").unwrap());
    daemon.done(204, "DELETE", &format!("/v1/snapshots/{template}"), None);
    daemon.restart();
    eventually("its end", || !runs(process) && daemon.left("templates") == 0);
    assert_eq!(daemon.request("GET", &format!("/v1/snapshots/{template}"), None).0, 404);
    for child in &children {
        assert_eq!(daemon.sandbox(&id(child))["state"], "running");
    }
    daemon.delete_all();
    daemon.done(204, "DELETE", "/v1/snapshots/tiny", None);
    eventually("empty folders", || ["sandboxes", "snapshots"].iter().all(|it| daemon.left(it) == 0));
}

/// The user id of a process.
fn user(pid: i32) -> String {
    let status = std::fs::read_to_string(format!("/proc/{pid}/status")).unwrap();
    status.lines().find(|line| line.starts_with("Uid:")).unwrap().to_owned()
}

#[test]
fn a_branch_that_is_nowhere_else_keeps_its_tag_and_what_it_is_stored_over() {
    let Some(mut daemon) = Daemon::spelling() else { return };
    daemon.snapshot("tiny", "kernel");
    daemon.snapshot("other", "kernel");
    let child = daemon.spawn("tiny", 1).remove(0);
    let branch = daemon.done(201, "POST", &route(&child, "branch"), Some(json!({"tag": "b"})));
    let process = branch["template"]["pid"].as_i64().unwrap() as i32;
    let folders = std::fs::read_dir(daemon.place("templates")).unwrap().flatten();
    let tagged = |folder: &PathBuf| {
        let record = std::fs::read(folder.join("template.json")).unwrap();
        serde_json::from_slice::<Value>(&record).unwrap()["about"]["tag"] == "b"
    };
    let folder = folders.map(|entry| entry.path()).find(tagged).unwrap();
    // The record of a branch that a newer daemon has not stored yet.
    daemon.restart_with(|_| {
        edit(&folder.join("template.json"), |record| {
            record["version"] = json!(2);
            record["about"]["tag"] = json!("ghost");
            let origin = json!({"tag": "tiny", "snapshot": null, "template": "tp1"});
            record["standing"] = json!({"unsaved": {"source": id(&child), "mode": "live", "origin": origin}});
        });
    });
    let info = daemon.done(200, "GET", "/v1/snapshots/ghost", None);
    assert_eq!((&info["status"], &info["mem_size_mib"]), (&json!("unknown"), &json!(64)), "{info}");
    assert_eq!(info["template"]["pid"].as_i64(), Some(i64::from(process)));
    let tree = daemon.done(200, "GET", "/v1/tree", None);
    let node = tree["nodes"].as_array().unwrap().iter().find(|node| node["name"] == "ghost").unwrap();
    assert_eq!(node["state"], "unknown");
    daemon.refused(409, "tag_taken", "POST", &route(&child, "branch"), Some(json!({"tag": "ghost"})));
    daemon.refused(409, "snapshot_in_use", "DELETE", "/v1/snapshots/tiny", None);
    daemon.done(204, "DELETE", "/v1/snapshots/other", None);
    assert!(runs(process));
    // It is removed with the snapshot below it, or by itself.
    daemon.done(204, "DELETE", "/v1/snapshots/tiny?cascade=true", None);
    eventually("its end", || !runs(process) && !folder.exists());
    assert_eq!(daemon.request("GET", "/v1/snapshots/ghost", None).0, 404);
    assert_eq!(daemon.sandbox(&id(&child))["state"], "running");
}

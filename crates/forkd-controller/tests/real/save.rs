//! Branches whose save takes long or fails, with guests of a few instructions. They run wherever `/dev/kvm`
//! opens.

use std::fs::File;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::Duration;

use rustix::fs::{Mode, OFlags};
use rustix::mount::{MountFlags, UnmountFlags, mount, unmount};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::daemon::{Daemon, eventually, launch, pid, runs, within};
use crate::support::{id, route};

/// Waits until the save of `tag` has ended.
fn settled(daemon: &Daemon, tag: &str) -> Value {
    let now = || daemon.done(200, "GET", &format!("/v1/snapshots/{tag}"), None);
    // Savers have the lowest CPU priority, and these guests never rest.
    within(Duration::from_secs(180), "what comes of a branch", || now()["status"] != "writing");
    now()
}

/// The archived nodes of the tree.
fn gone(daemon: &Daemon) -> Vec<Value> {
    let tree = daemon.done(200, "GET", "/v1/tree", None);
    tree["nodes"].as_array().unwrap().iter().filter(|node| node["gone"] == true).cloned().collect()
}

/// The template of `branch`, and its saver: all its children but `child`.
fn template_and_saver(branch: &Value, child: &Value) -> Vec<Pid> {
    let template = branch["template"]["pid"].as_i64().unwrap() as i32;
    let children = std::fs::read_to_string(format!("/proc/{template}/task/{template}/children")).unwrap();
    let children = children.split_whitespace().map(|pid| pid.parse().unwrap()).filter(|it| *it != pid(child));
    std::iter::once(template).chain(children).map(|pid| Pid::from_raw(pid).unwrap()).collect()
}

/// Sends a signal. A saver may have ended before that.
fn tell(processes: &[Pid], signal: Signal) {
    for process in processes {
        let _ = kill_process(*process, signal);
    }
}

#[test]
fn a_child_forked_before_its_branch_was_on_disk_can_be_taken_back_to_it() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("root", "kernel");
    let source = daemon.spawn("root", 1).remove(0);
    let live = json!({"tag": "b", "mode": "live", "wait": false});
    let branch = daemon.done(202, "POST", &route(&source, "branch"), Some(live));
    let child = daemon.spawn("b", 1).remove(0);
    // It is on disk in a later second than that of the child's creation.
    let stopped = template_and_saver(&branch, &child);
    tell(&stopped, Signal::STOP);
    std::thread::sleep(Duration::from_millis(1100));
    tell(&stopped, Signal::CONT);
    let info = settled(&daemon, "b");
    assert_eq!(info["status"], "ready", "{info}");
    assert_eq!(info["created_at_unix"], branch["created_at_unix"], "it is as old as its instant");

    let letter = daemon.first_letter(&id(&child));
    let back = |to: Value| daemon.done(200, "POST", &route(&child, "rollback"), Some(to));
    assert_eq!(back(json!({}))["rolled_back_to"], "b");
    assert_eq!(daemon.first_letter(&id(&child)), letter);
    // Also after a rollback to another snapshot, when its process does not show the branch.
    assert_eq!(back(json!({"to": "root"}))["rolled_back_to"], "root");
    assert_eq!(gone(&daemon), Vec::<Value>::new());
    assert_eq!(back(json!({}))["rolled_back_to"], "b");
    assert_eq!(daemon.first_letter(&id(&child)), letter);

    // A new branch with the same tag is another snapshot, even in the same second.
    daemon.done(204, "DELETE", "/v1/snapshots/b", None);
    let full = json!({"tag": "b", "mode": "full"});
    daemon.done(201, "POST", &route(&source, "branch"), Some(full));
    daemon.refused(409, "no_rollback_target", "POST", &route(&child, "rollback"), None);
    assert_eq!(gone(&daemon).len(), 1, "the one before");
    assert_eq!(back(json!({"to": "b"}))["rolled_back_to"], "b");
}

/// The scheduling policy of a process, as numbered in `sched.h`; none if it has ended.
fn policy(process: Pid) -> Option<i32> {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", process.as_raw_nonzero())).ok()?;
    stat.rsplit_once(')')?.1.split_whitespace().nth(38)?.parse().ok()
}

/// Branches `source` until a saver is seen with the lowest CPU priority before it is done. The saver is then
/// stopped.
fn caught_saving(daemon: &Daemon, source: &Value) -> (String, Pid) {
    for n in 0..50 {
        let tag = format!("caught-{n}");
        let live = json!({"tag": tag, "mode": "live", "wait": false});
        let branch = daemon.done(202, "POST", &route(source, "branch"), Some(live));
        let template = branch["template"]["pid"].as_i64().unwrap();
        let children = format!("/proc/{template}/task/{template}/children");
        let writing = || {
            let info = daemon.done(200, "GET", &format!("/v1/snapshots/{tag}"), None);
            info["status"] == "writing"
        };
        while writing() {
            let seen = std::fs::read_to_string(&children).unwrap();
            let Some(saver) = seen.split_whitespace().find_map(|pid| Pid::from_raw(pid.parse().ok()?)) else {
                continue;
            };
            if policy(saver) == Some(libc::SCHED_IDLE) && kill_process(saver, Signal::STOP).is_ok() {
                return (tag, saver);
            }
        }
    }
    panic!("no saver was seen with the lowest CPU priority");
}

#[test]
fn a_saver_has_the_last_place_for_a_cpu_until_it_gets_nothing_there() {
    let Some(daemon) = Daemon::spelling() else { return };
    daemon.snapshot("root", "kernel");
    // These guests never rest.
    let source = daemon.spawn("root", 1 + std::thread::available_parallelism().unwrap().get()).remove(0);
    let (tag, saver) = caught_saving(&daemon, &source);
    within(Duration::from_secs(20), "a share of the CPUs", || policy(saver) == Some(libc::SCHED_OTHER));
    tell(&[saver], Signal::CONT);
    let info = settled(&daemon, &tag);
    assert_eq!(info["status"], "ready", "{info}");
}

/// A small file system in memory.
struct Small(PathBuf);

impl Small {
    /// Mounts one. `None`, with a note, without the permission to mount.
    fn mount(at: &Path) -> Option<Small> {
        match mount("none", at, "tmpfs", MountFlags::empty(), c"size=8m,mode=700") {
            Ok(()) => Some(Small(at.to_owned())),
            Err(error) => {
                let _ = writeln!(std::io::stderr(), "NOT RUN: a full disk needs a mount: {error}");
                None
            }
        }
    }

    /// Fills it until the returned file is closed.
    fn fill(&self) -> File {
        let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
        let mut filler = File::from(rustix::fs::open(&self.0, flags, Mode::RUSR | Mode::WUSR).unwrap());
        while filler.write(&[1; 4096]).is_ok() {}
        filler
    }
}

impl Drop for Small {
    fn drop(&mut self) {
        let _ = unmount(&self.0, UnmountFlags::DETACH);
    }
}

/// A daemon whose snapshots are on a small disk, with a sandbox to branch. `limits` are the daemon's settings.
fn on_a_small_disk(limits: Value) -> Option<(Daemon, Small, Value)> {
    let mut daemon = Daemon::spelling()?;
    daemon.kill();
    let disk = Small::mount(&daemon.path().join("snapshots"))?;
    std::fs::write(daemon.path().join("limits.json"), limits.to_string()).unwrap();
    daemon.child = launch(daemon.path());
    daemon.up();
    daemon.snapshot("root", "kernel");
    let source = daemon.spawn("root", 1).remove(0);
    Some((daemon, disk, source))
}

fn info(daemon: &Daemon, tag: &str) -> Value {
    daemon.done(200, "GET", &format!("/v1/snapshots/{tag}"), None)
}

/// Takes a live branch of `source` on a full disk, and returns it when it waits for room.
fn waiting(daemon: &Daemon, source: &Value, tag: &str) -> Value {
    let live = json!({"tag": tag, "mode": "live", "wait": false});
    let branch = daemon.done(202, "POST", &route(source, "branch"), Some(live));
    waits(daemon, tag);
    branch
}

fn waits(daemon: &Daemon, tag: &str) {
    // Between two attempts its record has the reason.
    let waits = || info(daemon, tag)["error_code"] == "disk_full";
    within(Duration::from_secs(180), "a branch that waits for room", waits);
    let info = info(daemon, tag);
    assert_eq!((&info["status"], &info["bootable"]), (&json!("writing"), &json!(true)), "{info}");
}

fn template(branch: &Value) -> i32 {
    branch["template"]["pid"].as_i64().unwrap() as i32
}

#[test]
fn a_branch_for_which_there_is_no_room_waits_in_memory_until_there_is() {
    let Some((mut daemon, disk, source)) = on_a_small_disk(json!({})) else { return };
    let left = daemon.left("snapshots");
    let filler = disk.fill();
    waiting(&daemon, &source, "b");
    assert_eq!(daemon.left("snapshots"), left);
    let child = daemon.spawn("b", 1).remove(0);
    // A client that waits gets an error, even if the branch's parent is not on disk.
    let diff = |tag: &str| Some(json!({"tag": tag, "mode": "diff"}));
    for sandbox in [&source, &child] {
        daemon.refused(507, "disk_full", "POST", &route(sandbox, "branch"), diff("c"));
        daemon.refused(404, "snapshot_not_found", "GET", "/v1/snapshots/c", None);
    }

    // The branch survives a kill and a stop of the daemon.
    daemon.restart();
    waits(&daemon, "b");
    daemon.terminate();
    daemon.child = launch(daemon.path());
    daemon.up();
    waits(&daemon, "b");
    assert_eq!(daemon.left("snapshots"), left);

    drop(filler);
    let saved = settled(&daemon, "b");
    assert_eq!((&saved["status"], &saved["error"]), (&json!("ready"), &Value::Null), "{saved}");
    daemon.done(201, "POST", &route(&source, "branch"), diff("c"));
    for tag in ["b", "c"] {
        daemon.done(204, "POST", &format!("/v1/snapshots/{tag}/unload"), None);
        assert_eq!(daemon.spawn(tag, 1).len(), 1, "from disk");
    }
}

#[test]
fn a_branch_that_waits_for_room_ends_when_it_is_removed_or_its_template_dies() {
    let Some((daemon, disk, source)) = on_a_small_disk(json!({})) else { return };
    let _filler = disk.fill();
    let removed = template(&waiting(&daemon, &source, "removed"));
    daemon.done(204, "DELETE", "/v1/snapshots/removed", None);
    daemon.refused(404, "snapshot_not_found", "GET", "/v1/snapshots/removed", None);
    eventually("the end of its template", || !runs(removed));

    let dead = template(&waiting(&daemon, &source, "dead"));
    kill_process(Pid::from_raw(dead).unwrap(), Signal::KILL).unwrap();
    let dead = settled(&daemon, "dead");
    assert_eq!((&dead["status"], &dead["bootable"]), (&json!("failed"), &json!(false)), "{dead}");
}

#[test]
fn branches_that_cannot_be_saved_are_counted_and_their_memory_is_freed() {
    let limits = json!({"branch_max_count": 2, "branch_unload_secs": 5});
    let Some((daemon, disk, source)) = on_a_small_disk(limits) else { return };
    let _filler = disk.fill();
    let mut templates = Vec::new();
    for tag in ["a", "b", "c"] {
        let live = json!({"tag": tag, "mode": "live", "wait": false});
        let branch = daemon.done(202, "POST", &route(&source, "branch"), Some(live));
        templates.push(template(&branch));
    }
    let there = |tag: &str| daemon.request("GET", &format!("/v1/snapshots/{tag}"), None).0 == 200;
    within(Duration::from_secs(180), "the end of one that is too many", || {
        ["a", "b", "c"].iter().filter(|tag| there(tag)).count() == 2
    });
    within(Duration::from_secs(180), "the end of all templates", || {
        !templates.iter().any(|template| runs(*template))
    });
    for tag in ["a", "b", "c"].into_iter().filter(|tag| there(tag)) {
        let failed = settled(&daemon, tag);
        assert_eq!((&failed["status"], &failed["bootable"]), (&json!("failed"), &json!(false)), "{failed}");
        assert_eq!(failed["error_code"], "disk_full", "{failed}");
    }
}

#[test]
fn no_live_branch_is_taken_while_the_disk_has_less_free_than_it_must_have() {
    let Some((daemon, disk, source)) = on_a_small_disk(json!({"min_free_mib": 1})) else { return };
    let filler = disk.fill();
    for wait in [false, true] {
        let live = json!({"tag": "b", "mode": "live", "wait": wait});
        daemon.refused(507, "disk_full", "POST", &route(&source, "branch"), Some(live));
    }
    daemon.refused(404, "snapshot_not_found", "GET", "/v1/snapshots/b", None);
    drop(filler);
    let live = json!({"tag": "b", "mode": "live", "wait": false});
    daemon.done(202, "POST", &route(&source, "branch"), Some(live));
    assert_eq!(settled(&daemon, "b")["status"], "ready");
}

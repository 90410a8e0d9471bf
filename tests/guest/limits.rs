//! What a child may use of the host, and what happens when there is no more.

use std::path::{Path, PathBuf};

use forkd_tests::daemon::{Daemon, is_monitor};
use forkd_tests::eventually;
use serde_json::json;

use crate::parent::{self, SMALL, alone, daemon};

#[test]
fn a_child_that_takes_more_memory_than_it_may_is_ended_and_told_so() {
    let children = daemon().spawn(json!({"snapshot_tag": parent::TAG, "n": 2, "memory_limit_mib": 64}));
    let ids: Vec<_> = children.iter().map(|child| child["id"].as_str().unwrap().to_owned()).collect();
    let body = json!({"code": "hog = b'x' * (200 << 20)", "timeout_secs": 100});
    let response = daemon().request("POST", &format!("/v1/sandboxes/{}/eval", ids[0]), Some(body));
    assert!(response.status >= 400, "{response:?}");
    let info = eventually("the end of the greedy one", || {
        let info = daemon().request("GET", &format!("/v1/sandboxes/{}", ids[0]), None).json();
        (info["state"] == "ended").then_some(info)
    });
    assert_eq!(info["reason"], "out_of_memory", "{info}");
    assert!(info["detail"].as_str().unwrap().contains("64"), "{info}");
    assert_eq!(daemon().eval(&ids[1], "1 + 1"), "2", "its sibling has a limit of its own");
    daemon().delete(&ids);
}

#[test]
fn what_branches_share_with_their_source_does_not_use_up_its_limit() {
    let body = json!({"snapshot_tag": parent::TAG, "memory_limit_mib": 96});
    let source = daemon().spawn(body)[0]["id"].as_str().unwrap().to_owned();
    daemon().eval(&source, "held = numpy.ones(50 << 20, dtype='u1')");
    for tag in ["shares-1", "shares-2"] {
        daemon().branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
        // Every page of it is copied now, and the branch keeps the old ones.
        daemon().eval(&source, "held += 1");
    }
    assert_eq!(daemon().eval(&source, "int(held[0]) + int(held[-1])"), "6");
    let child = daemon().fork("shares-1", 1).remove(0);
    assert_eq!(daemon().eval(&child, "int(held[0]) + int(held[-1])"), "2");
    // There is a limit all the same.
    let body = json!({"code": "hog = b'x' * (200 << 20)", "timeout_secs": 100});
    let response = daemon().request("POST", &format!("/v1/sandboxes/{source}/eval"), Some(body));
    assert!(response.status >= 400, "{response:?}");
    let info = eventually("the end of the greedy one", || {
        let info = daemon().sandbox(&source);
        (info["state"] == "ended").then_some(info)
    });
    assert_eq!(info["reason"], "out_of_memory", "{info}");
    daemon().delete(&[source, child]);
    for tag in ["shares-1", "shares-2"] {
        daemon().when_ready(tag);
        assert!(daemon().delete_snapshot(tag, "").status < 300);
    }
}

/// The cgroup of a process.
fn leaf(pid: u32) -> PathBuf {
    let line = std::fs::read_to_string(format!("/proc/{pid}/cgroup")).unwrap();
    PathBuf::from("/sys/fs/cgroup").join(line.trim().strip_prefix("0::/").unwrap())
}

/// The only template of a daemon.
fn template(daemon: &Daemon) -> u32 {
    eventually("its only template", || match daemon.templates()[..] {
        [template] => Some(template),
        _ => None,
    })
}

/// A limit of a cgroup; `None` if there is none.
fn limit(leaf: &Path, file: &str) -> Option<u64> {
    std::fs::read_to_string(leaf.join(file)).unwrap().trim().parse().ok()
}

/// How soon the kernel kills a process when the host has no memory left: the higher, the sooner.
pub(crate) fn oom_score(pid: u32) -> i32 {
    std::fs::read_to_string(format!("/proc/{pid}/oom_score_adj")).unwrap().trim().parse().unwrap()
}

#[test]
fn twenty_branches_in_a_row_fit_the_limits_of_their_source() {
    let daemon = alone();
    let source = daemon.fork(SMALL, 1).remove(0);
    let (first, monitor) = (template(&daemon), daemon.monitors()[0]);
    let leaves = (leaf(first), leaf(monitor));
    // One vCPU, and what every monitor has beside.
    assert_eq!(limit(&leaves.1, "pids.max"), Some(9));
    assert_eq!(limit(&leaves.1, "memory.max"), Some((256 + 64 + 2 + 64) << 20));
    assert_eq!(limit(&leaves.0, "pids.max"), Some(64));
    assert_eq!(limit(&leaves.0, "memory.max"), Some((256 + 64 + 2 + 64 + 256) << 20));
    let tags: Vec<String> = (0..20).map(|index| format!("train-{index}")).collect();
    for tag in &tags {
        daemon.branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
    }
    // The room that was made for them goes with them.
    eventually("all branches to leave", || (limit(&leaves.1, "pids.max") == Some(9)).then_some(()));
    let branches: Vec<u32> = daemon.templates().into_iter().filter(|pid| *pid != first).collect();
    assert!(!branches.is_empty());
    for branch in branches.into_iter().filter(|pid| is_monitor(*pid)) {
        let own = leaf(branch);
        assert!(own != leaves.1 && own.parent() == leaves.1.parent(), "{}", own.display());
        assert_eq!(limit(&own, "memory.max"), limit(&leaves.0, "memory.max"));
        assert_eq!(limit(&own, "pids.max"), Some(64));
    }
    assert_eq!(daemon.sh(&source, "echo fine"), "fine\n");
    daemon.delete(&[source]);
    tags.iter().rev().for_each(|tag| assert!(daemon.delete_snapshot(tag, "").status < 300));
    template(&daemon);
}

#[test]
fn the_kernel_is_told_to_kill_sandboxes_before_templates_and_the_daemon() {
    let mut daemon = alone();
    let child = daemon.fork(SMALL, 1).remove(0);
    let (template, monitor) = (template(&daemon), daemon.monitors()[0]);
    assert_eq!(oom_score(daemon.pid()), -900);
    assert_eq!(oom_score(template), -500);
    eventually("the score of a sandbox", || (oom_score(monitor) == 300).then_some(()));
    // As if an earlier daemon had not known of scores.
    for pid in [template, monitor] {
        std::fs::write(format!("/proc/{pid}/oom_score_adj"), "0").unwrap();
    }
    daemon.restart();
    assert_eq!(oom_score(daemon.pid()), -900);
    eventually("the scores of what was taken over", || {
        ((oom_score(template), oom_score(monitor)) == (-500, 300)).then_some(())
    });
    daemon.delete(&[child]);
}

#[test]
fn out_of_processes_the_children_that_fit_run_and_the_others_are_told() {
    let daemon = alone();
    daemon.delete(&daemon.fork(SMALL, 1));
    let folder = leaf(template(&daemon)).parent().unwrap().to_path_buf();
    let now: u64 = std::fs::read_to_string(folder.join("pids.current")).unwrap().trim().parse().unwrap();
    std::fs::write(folder.join("pids.max"), (now + 9).to_string()).unwrap();

    let body = json!({"snapshot_tag": SMALL, "n": 6});
    let response = daemon.request("POST", "/v1/sandboxes?results=each", Some(body));
    assert_eq!(response.status, 201, "{response:?}\n{}", daemon.log());
    let answer = response.json();
    let (children, errors) = (answer["children"].as_array().unwrap(), answer["errors"].as_array().unwrap());
    assert_eq!(children.len() + errors.len(), 6, "{answer}");
    assert!(!children.is_empty() && !errors.is_empty(), "{answer}");
    let ids: Vec<_> = children.iter().map(|child| child["id"].as_str().unwrap().to_owned()).collect();
    for id in &ids {
        assert_eq!(daemon.sh(id, "echo fine"), "fine\n");
    }
    daemon.delete(&ids);
    eventually("what did not fit to be cleaned up", || {
        (daemon.folders() == 0 && daemon.monitors().is_empty()).then_some(())
    });
    std::fs::write(folder.join("pids.max"), "max").unwrap();
    daemon.delete(&daemon.fork(SMALL, 3));
}

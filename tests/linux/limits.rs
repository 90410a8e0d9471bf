//! What a child may use of the host, and what happens when there is no more.

use std::path::PathBuf;

use forkd_tests::daemon::Daemon;
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

/// The cgroup of a lineage, by its template.
fn lineage(daemon: &Daemon) -> PathBuf {
    let template = eventually("its only template", || match daemon.templates()[..] {
        [template] => Some(template),
        _ => None,
    });
    let line = std::fs::read_to_string(format!("/proc/{template}/cgroup")).unwrap();
    let path = line.trim().strip_prefix("0::/").unwrap();
    PathBuf::from("/sys/fs/cgroup").join(path).parent().unwrap().to_path_buf()
}

#[test]
fn out_of_processes_the_children_that_fit_run_and_the_others_are_told() {
    let daemon = alone();
    daemon.delete(&daemon.fork(SMALL, 1));
    let folder = lineage(&daemon);
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

//! A branch of a disk alone: sandboxes boot on it, with the files of the source and without its processes.

use std::collections::BTreeSet;

use serde_json::json;

use crate::parent::{daemon, fork};

#[test]
fn a_sandbox_boots_on_a_branch_of_a_disk_and_finds_its_files_and_a_clean_file_system() {
    let daemon = daemon();
    let source = fork(1).remove(0);
    let boot_id = "cat /proc/sys/kernel/random/boot_id";
    // Not synced: the branch has to take care of that.
    let written = daemon.sh(
        &source,
        "echo before > /root/kept; head -c 8000000 /dev/urandom > /root/blob; sha256sum < /root/blob",
    );
    let info = daemon.branch(&source, json!({"tag": "cold", "mode": "disk"}));
    assert_eq!(
        (&info["kind"], &info["mode"], &info["status"]),
        (&json!("disk"), &json!("disk"), &json!("ready"))
    );
    assert_eq!(
        (&info["memory_bytes"], &info["quiesced"], &info["bootable"]),
        (&json!(0), &json!(true), &json!(true))
    );
    assert!(info["template"].is_null() && info["frozen_ms"].as_f64().unwrap() > 0.0, "{info}");
    // The source goes on, and what it writes now is its own.
    daemon.sh(&source, "echo after > /root/kept; echo late > /root/late; sync");

    // Nothing can be forked from it.
    let refused =
        daemon.request("POST", &format!("/v1/sandboxes/{source}/rollback"), Some(json!({"to": "cold"})));
    assert_eq!((refused.status, &refused.json()["code"]), (409, &json!("snapshot_disk_only")));

    let body = json!({"snapshot_tag": "cold", "n": 2, "env": {"PLANET": "mars"}, "labels": {"a": "b"}});
    let children: Vec<String> =
        daemon.spawn(body).iter().map(|child| child["id"].as_str().unwrap().to_owned()).collect();
    assert_eq!(children.len(), 2);
    for id in &children {
        assert_eq!(daemon.sh(id, "cat /root/kept"), "before\n");
        assert_eq!(daemon.sh(id, "sha256sum < /root/blob"), written);
        assert_eq!(
            daemon.sh(id, "cat /root/parent.txt; ls /root/late 2>&1 | grep -c 'No such'"),
            "of the parent1\n"
        );
        assert_eq!(daemon.sh(id, "echo $PLANET $FORKD_SANDBOX_ID"), format!("mars {id}\n"));
        let kernel = daemon.sh(id, "dmesg | grep -i ext4");
        assert!(kernel.contains("mounted filesystem"), "{kernel}");
        for unclean in ["recover", "orphan", "unchecked", "error"] {
            assert!(!kernel.to_lowercase().contains(unclean), "{kernel}");
        }
        let shown = daemon.sandbox(id);
        assert_eq!((&shown["snapshot_tag"], &shown["labels"]["a"]), (&json!("cold"), &json!("b")), "{shown}");
        assert!(shown["boot_ms"].as_u64().unwrap() > 0, "{shown}");
    }
    let everybody = [vec![source.clone()], children.clone()].concat();
    let ids: BTreeSet<String> = everybody.iter().map(|id| daemon.sh(id, boot_id)).collect();
    assert_eq!(ids.len(), everybody.len(), "{ids:?}");
    assert_eq!(daemon.sh(&source, "cat /root/kept"), "after\n");

    // Each has a layer of its own, and can be branched in the same way.
    daemon.sh(&children[0], "echo again > /root/kept");
    assert_eq!(daemon.sh(&children[1], "cat /root/kept"), "before\n");
    daemon.branch(&children[0], json!({"tag": "colder", "mode": "disk"}));
    assert_eq!(daemon.delete_snapshot("cold", "").status, 204);
    let again = daemon.fork("colder", 1).remove(0);
    assert_eq!(daemon.sh(&again, "cat /root/kept; sha256sum < /root/blob"), format!("again\n{written}"));
    daemon.delete(&[everybody, vec![again]].concat());
    assert_eq!(daemon.delete_snapshot("colder", "").status, 204);
}

//! Another build of the daemon in the place of the one that made what runs: sandboxes and templates do not
//! notice, and the new daemon forks and branches them though they still run the old code.
//!
//! The other build is the one in `FORKD_PREVIOUS_BIN`: `make soak` builds it from an earlier commit. Without
//! it, it is a copy of this one, which shows everything but that both understand each other.

use std::path::PathBuf;

use forkd_tests::binary;
use forkd_tests::daemon::Daemon;
use forkd_tests::test_name;
use serde_json::json;

use crate::fanout::{can_run, no_library};
use crate::pattern::{self, check, child, delete_all, make_pattern, store_is_tidy};

/// The programs of another build, in a folder that lives as long as what is returned.
fn other_build() -> (tempfile::TempDir, PathBuf) {
    let folder = tempfile::tempdir().unwrap();
    let path = match std::env::var_os("FORKD_PREVIOUS_BIN").filter(|path| !path.is_empty()) {
        Some(previous) => PathBuf::from(previous),
        None => {
            for name in ["forkd", "forkd-vmm", "forkd-guest"] {
                std::fs::copy(binary(name), folder.path().join(name)).unwrap();
            }
            folder.path().to_path_buf()
        }
    };
    (folder, path)
}

#[test]
fn a_new_daemon_forks_and_branches_what_the_previous_build_made() {
    if !can_run(test_name!()) {
        return;
    }
    let (_folder, programs) = other_build();
    let mut daemon = Daemon::start_other(&programs, no_library());
    make_pattern(&daemon);
    let (source, kept) = (child(&daemon, pattern::TAG), child(&daemon, pattern::TAG));
    daemon.branch(&source, json!({"tag": "before", "mode": "live"}));
    let pids = [&source, &kept].map(|id| daemon.sandbox(id)["pid"].clone());
    let templates = daemon.templates();
    assert_eq!(templates.len(), 2);

    daemon.upgrade();
    assert_eq!(daemon.templates(), templates, "templates run on");
    for (id, pid) in [&source, &kept].iter().zip(&pids) {
        let info = daemon.sandbox(id);
        assert_eq!((&info["state"], &info["pid"]), (&json!("running"), pid), "{info}\n{}", daemon.log());
    }
    let old = |pid: u32| std::fs::read_link(format!("/proc/{pid}/exe")).unwrap().starts_with(&programs);
    assert!(templates.iter().all(|pid| old(*pid)), "they are of the previous build");

    // Forked by old templates, branched by old sandboxes, saved by old savers.
    check(&daemon, pattern::TAG);
    check(&daemon, "before");
    let newborn = child(&daemon, "before");
    daemon.branch(&newborn, json!({"tag": "newborn", "mode": "live"}));
    daemon.branch(&source, json!({"tag": "after", "mode": "diff"}));
    daemon.tell(&kept, "pause", json!({}));
    daemon.branch(&kept, json!({"tag": "paused", "mode": "full"}));
    daemon.tell(&kept, "resume", json!({}));
    daemon.tell(&source, "rollback", json!({"to": "before"}));
    for tag in ["after", "newborn", "paused"] {
        check(&daemon, tag);
        // And what they wrote is read by the new build.
        daemon.unload(tag);
        check(&daemon, tag);
    }
    daemon.delete(&[source, kept, newborn]);
    delete_all(&daemon, &["newborn", "after", "paused", "before"].map(str::to_owned));
    store_is_tidy(&daemon);
}

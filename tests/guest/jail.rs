//! What a monitor can and cannot do on the host.

use std::collections::BTreeSet;

use forkd_tests::monitor::{Guest, Monitor};

use crate::assets::assets;

#[test]
fn a_monitor_is_a_nobody_in_an_empty_room() {
    let assets = assets();
    let mut monitor = Monitor::start();
    monitor.boot_to_agent(Guest { vcpus: 2, disks: vec![(&assets.disk, true)], ..assets.guest() });
    let proc = std::path::PathBuf::from(format!("/proc/{}", monitor.pid()));

    let mut threads = 0;
    for task in std::fs::read_dir(proc.join("task")).unwrap() {
        let status = std::fs::read_to_string(task.unwrap().path().join("status")).unwrap();
        let field = |name: &str| {
            let line = status.lines().find_map(|line| line.strip_prefix(name)).unwrap();
            line.trim().to_owned()
        };
        assert_eq!(field("Uid:"), "64000\t64000\t64000\t64000");
        assert_eq!(field("Gid:"), "64000\t64000\t64000\t64000");
        assert_eq!(field("Groups:"), "");
        for set in ["CapInh:", "CapPrm:", "CapEff:", "CapBnd:", "CapAmb:"] {
            assert_eq!(field(set), "0000000000000000", "{set}");
        }
        assert_eq!(field("NoNewPrivs:"), "1");
        assert_eq!(field("Seccomp:"), "2", "a thread without a filter:\n{status}");
        threads += 1;
    }
    assert!(threads >= 4, "control, devices and two vCPUs, not {threads}");

    let root: Vec<_> = std::fs::read_dir(proc.join("root")).unwrap().collect();
    assert!(root.is_empty(), "{root:?}");
    for space in ["mnt", "net", "ipc", "uts"] {
        let link = |pid: &str| std::fs::read_link(format!("/proc/{pid}/ns/{space}")).unwrap();
        assert_ne!(link(&monitor.pid().to_string()), link("self"), "{space}");
    }
    let interfaces = std::fs::read_to_string(proc.join("net/dev")).unwrap();
    assert_eq!(interfaces.lines().skip(2).count(), 1, "only lo: {interfaces}");

    // Every descriptor was handed in or made by itself: no folder, no device but KVM.
    let mut kinds = BTreeSet::new();
    for fd in std::fs::read_dir(proc.join("fd")).unwrap() {
        // The monitor may close one meanwhile.
        let Ok(target) = std::fs::read_link(fd.unwrap().path()) else { continue };
        assert!(!std::fs::metadata(&target).is_ok_and(|data| data.is_dir()), "{}", target.display());
        kinds.insert(target.to_string_lossy().split(':').next().unwrap().to_owned());
    }
    assert!(kinds.contains("socket"), "{kinds:?}");
    let devices: Vec<_> = kinds.iter().filter(|kind| kind.starts_with("/dev/")).collect();
    assert!(devices.iter().all(|name| ["/dev/kvm", "/dev/null"].contains(&name.as_str())), "{devices:?}");
}

//! Parsing and refusals on made-up trees. The other tests use the host's real cgroups, in a folder of their own, when
//! they run as root.

use std::os::unix::process::CommandExt;
use std::process::{Child, Command};

use super::*;

/// From `linux/sched.h`.
const CLONE_INTO_CGROUP: u64 = 0x2_0000_0000;
/// A user id that no user has.
const UID: u32 = 3_000_000_017;

const MOUNTS: &str = "\
22 1 0:20 / / rw - overlay overlay rw
31 22 0:26 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate
40 22 0:30 / /tmp rw - tmpfs tmpfs rw
";

fn placed(base: &str, ours: bool) -> Option<Place> {
    Some(Place { base: base.into(), ours })
}

#[test]
fn the_folder_is_beside_the_daemon_or_at_the_root() {
    assert_eq!(place(MOUNTS, "0::/\n"), placed("/sys/fs/cgroup", true));
    assert_eq!(place(MOUNTS, "0::/forkd.service\n"), placed("/sys/fs/cgroup/", false));
    let service = "12:pids:/\n1:name=systemd:/x\n0::/system.slice/forkd.service\n";
    assert_eq!(place(MOUNTS, service), placed("/sys/fs/cgroup/system.slice", false));
}

#[test]
fn only_the_mounted_part_of_the_tree_counts() {
    let part = "31 22 0:26 /box /mnt/cg rw - cgroup2 none rw\n";
    assert_eq!(place(part, "0::/box\n"), placed("/mnt/cg", true));
    assert_eq!(place(part, "0::/box/a/b\n"), placed("/mnt/cg/a", false));
    assert_eq!(place(part, "0::/elsewhere\n"), None);
}

#[test]
fn hosts_without_a_place_have_none() {
    assert_eq!(place(MOUNTS, "4:memory:/\n"), None, "v1 only");
    assert_eq!(place("", "0::/\n"), None, "not mounted");
    assert_eq!(place(MOUNTS, "0::/../outside\n"), None, "outside of the namespace");
    for nonsense in ["31", "a b c - ", " - cgroup2", "1 2 3 - cgroup2 x", "1 2 3 / - cgroup2 x"] {
        assert_eq!(place(nonsense, "0::/\n"), None, "{nonsense}");
    }
}

#[test]
fn missing_controllers_are_named_and_nothing_is_changed() {
    let tree = tempfile::tempdir().unwrap();
    let forkd = tree.path().join(FORKD);
    fs::create_dir(&forkd).unwrap();
    for folder in [tree.path(), &forkd] {
        fs::write(folder.join("cgroup.controllers"), "hugetlb pids\n").unwrap();
        fs::write(folder.join(SUBTREE), "").unwrap();
    }
    let place = Place { base: tree.path().into(), ours: true };
    let reason = prepare(&place, NEEDED).unwrap_err();
    assert!(reason.contains("lacks the controllers memory;"), "{reason}");
    assert_eq!(fs::read_to_string(tree.path().join(SUBTREE)).unwrap(), "");

    let cgroups = Cgroups { forkd: Err(reason.clone()) };
    assert_eq!(cgroups.reason(), Some(reason.as_str()));
    assert!(cgroups.lineage("a", 1).unwrap().is_none());
    assert!(cgroups.lineages().is_empty());
}

#[test]
fn a_place_that_cannot_be_written_is_a_reason_not_a_failure() {
    let place = Place { base: "/proc/self".into(), ours: true };
    assert!(prepare(&place, NEEDED).unwrap_err().contains("/proc/self/forkd"));
}

#[test]
fn names_with_paths_in_them_are_refused() {
    for bad in ["..", "a/b", "", ".hidden"] {
        let error = child(Path::new("/sys/fs/cgroup"), bad).unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::InvalidInput, "{bad}");
    }
}

#[test]
fn values_are_found_by_their_whole_key() {
    let events = "low 0\noom 3\noom_kill 2\noom_group_kill 1\n";
    assert_eq!(value(events, "oom_kill"), Some(2));
    assert_eq!(value(events, "oom"), Some(3));
    for bad in ["", "oom_kill", "oom_kill x", "oom_kill -1", "xoom_kill 1"] {
        assert_eq!(value(bad, "oom_kill"), None, "{bad}");
    }
}

/// A `forkd` folder in a cgroup of the test's own; removed with all its contents.
struct Real {
    base: PathBuf,
    cgroups: Cgroups,
    limits: bool,
}

/// `None`, with a note on standard error, where there is no cgroup v2 or no right to it.
fn real(name: &str) -> Option<Real> {
    let made = find_place().and_then(|place| {
        let base = place.base.join(format!("forkd-test-{name}-{}", std::process::id()));
        fs::create_dir(&base).map_err(|error| error.to_string())?;
        let beside = Place { base: base.clone(), ours: false };
        match prepare(&beside, NEEDED) {
            Ok(forkd) => Ok(Real { base, cgroups: Cgroups { forkd: Ok(forkd) }, limits: true }),
            // Everything but limits works without controllers, too.
            Err(_) => prepare(&beside, &[]).map(|forkd| Real {
                base,
                cgroups: Cgroups { forkd: Ok(forkd) },
                limits: false,
            }),
        }
    });
    made.map_err(|reason| eprintln!("NOT RUN: {reason}")).ok()
}

impl Drop for Real {
    fn drop(&mut self) {
        let forkd = self.base.join(FORKD);
        let _ = kill(&self.base);
        for lineage in folders(&forkd) {
            let _ = LineageCgroup { path: forkd.join(lineage), uid: 0 }.remove();
        }
        let left = remove(&forkd).and_then(|()| remove(&self.base));
        if !std::thread::panicking() {
            left.unwrap();
        }
    }
}

/// Starts `program` in `leaf`, as the daemon starts a monitor.
fn start(leaf: &Leaf, program: &str, args: &[&str]) -> Child {
    let procs_fd = leaf.procs_fd().unwrap();
    let mut command = Command::new(program);
    // SAFETY: `join` is one system call.
    unsafe { command.args(args).pre_exec(move || join(procs_fd.as_fd())) };
    command.spawn().unwrap()
}

fn pids(leaf: &Leaf) -> Vec<i32> {
    read(&leaf.path, PROCS).unwrap().lines().map(|line| line.parse().unwrap()).collect()
}

#[test]
fn a_process_is_born_in_its_leaf_and_dies_with_it() {
    let Some(real) = real("born") else { return };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let leaf = lineage.leaf("sb1", &CgroupLimits::default()).unwrap();
    let mut sleep = start(&leaf, "sleep", &["60"]);
    assert_eq!(pids(&leaf), [sleep.id() as i32]);
    let busy = lineage.leaf("sb1", &CgroupLimits::default()).unwrap_err();
    assert_eq!(busy.kind(), io::ErrorKind::ResourceBusy, "a leaf in use was given away");
    leaf.kill().unwrap();
    leaf.remove().unwrap();
    assert!(!sleep.wait().unwrap().success());
    leaf.remove().unwrap();
    assert!(leaf.cpu_usec().is_none());
}

#[test]
fn removing_what_is_in_use_fails_in_the_end() {
    let Some(real) = real("busy") else { return };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let mut sleep = start(&lineage.template(&CgroupLimits::default()).unwrap(), "sleep", &["60"]);
    let begun = std::time::Instant::now();
    assert_eq!(lineage.remove().unwrap_err().kind(), io::ErrorKind::ResourceBusy);
    assert!(begun.elapsed() < Duration::from_secs(10));
    lineage.kill().unwrap();
    lineage.remove().unwrap();
    sleep.wait().unwrap();
    assert!(real.cgroups.lineages().is_empty());
}

#[test]
fn a_new_daemon_finds_lineages_and_leaves_again() {
    let Some(real) = real("again") else { return };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let mut sleep = start(&lineage.leaf("sb1", &CgroupLimits::default()).unwrap(), "sleep", &["60"]);
    lineage.template(&CgroupLimits::default()).unwrap();
    drop(lineage);

    assert_eq!(real.cgroups.lineages(), ["t1"]);
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let mut leaves = lineage.leaves();
    leaves.sort();
    assert_eq!(leaves, ["sb1", "template"]);
    let leaf = lineage.existing("sb1").unwrap();
    assert_eq!(pids(&leaf), [sleep.id() as i32]);
    assert!(leaf.cpu_usec().is_some());
    assert_eq!(lineage.existing("sb2").unwrap_err().kind(), io::ErrorKind::NotFound);
    leaf.kill().unwrap();
    sleep.wait().unwrap();
    lineage.remove().unwrap();
}

/// In a process of user `UID` in the leaf of `procs_fd`: forks into `target`, and tells by its exit
/// status what the kernel said. Only system calls: the test's process has threads.
fn fork_as_template(procs_fd: BorrowedFd<'_>, target: BorrowedFd<'_>) -> i32 {
    use std::os::fd::AsRawFd;
    // SAFETY: the child makes system calls on values that were ready before, and ends.
    unsafe {
        let child = libc::fork();
        if child == 0 {
            if join(procs_fd).is_err() || libc::setuid(UID) != 0 {
                libc::_exit(200);
            }
            let mut args: libc::clone_args = std::mem::zeroed();
            args.flags = CLONE_INTO_CGROUP;
            args.exit_signal = libc::SIGCHLD as u64;
            args.cgroup = target.as_raw_fd() as u64;
            match libc::syscall(libc::SYS_clone3, &raw const args, size_of::<libc::clone_args>()) {
                0 => {
                    libc::sleep(60);
                    libc::_exit(0);
                }
                -1 => libc::_exit(*libc::__errno_location()),
                _ => libc::_exit(0),
            }
        }
        let mut status = 0;
        assert_eq!(libc::waitpid(child, &raw mut status, 0), child);
        libc::WEXITSTATUS(status)
    }
}

#[test]
fn a_template_forks_into_its_own_leaves_and_no_others() {
    let Some(real) = real("clone") else { return };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let procs_fd = lineage.template(&CgroupLimits::default()).unwrap().procs_fd().unwrap();
    let leaf = lineage
        .leaf("sb1", &CgroupLimits { pids_max: real.limits.then_some(8), ..CgroupLimits::default() })
        .unwrap();
    assert_eq!(fork_as_template(procs_fd.as_fd(), leaf.fd()), 0);
    assert_eq!(pids(&leaf).len(), 1, "the child is not in its leaf");
    leaf.kill().unwrap();
    leaf.remove().unwrap();

    let other = real.cgroups.lineage("t2", UID + 1).unwrap().unwrap();
    let foreign = other.leaf("sb2", &CgroupLimits::default()).unwrap();
    assert_eq!(fork_as_template(procs_fd.as_fd(), foreign.fd()), libc::EACCES);
}

#[test]
fn what_uses_more_than_its_memory_is_killed_and_counted() {
    let Some(real) = real("memory").filter(|real| real.limits) else {
        eprintln!("NOT RUN: needs the memory controller");
        return;
    };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let limits =
        CgroupLimits { memory_max: Some(16 << 20), swap_max: None, pids_max: Some(8), cpu_percent: Some(50) };
    let leaf = lineage.leaf("sb1", &limits).unwrap();
    assert_eq!(read(&leaf.path, "memory.max").unwrap().trim(), (16 << 20).to_string());
    assert_eq!(read(&leaf.path, "pids.max").unwrap().trim(), "8");
    assert_eq!(read(&leaf.path, "cpu.max").unwrap().trim(), "50000 100000");
    assert_eq!(leaf.oom_kills().unwrap(), 0);
    // `tail` keeps all of a line.
    let mut tail = start(&leaf, "tail", &["-n", "1", "/dev/zero"]);
    assert!(!tail.wait().unwrap().success());
    assert_eq!(leaf.oom_kills().unwrap(), 1);
    assert!(leaf.memory_current().unwrap() < 16 << 20);
    leaf.remove().unwrap();
}

#[test]
fn what_starts_more_threads_than_it_may_is_refused_them() {
    let Some(real) = real("pids").filter(|real| real.limits) else {
        eprintln!("NOT RUN: needs the pids controller");
        return;
    };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let leaf = lineage.leaf("sb1", &CgroupLimits { pids_max: Some(1), ..CgroupLimits::default() }).unwrap();
    let mut shell = start(&leaf, "sh", &["-c", "sleep 60 & wait"]);
    assert!(!shell.wait().unwrap().success());
    leaf.remove().unwrap();
}

#[test]
fn a_leaf_has_room_for_each_branch_that_has_not_left_it_and_no_more() {
    let folder = tempfile::tempdir().unwrap();
    let max = || fs::read_to_string(folder.path().join("pids.max")).unwrap();
    fs::write(folder.path().join("pids.max"), "max").unwrap();
    let leaf = Leaf::open(folder.path().to_owned()).unwrap();
    drop(leaf.leaving());
    assert_eq!(max(), "max", "a leaf without a limit stays without one");
    fs::write(folder.path().join("pids.max"), "00").unwrap();
    leaf.limit_tasks(10).unwrap();
    assert_eq!(max(), "10");
    let (one, other) = (leaf.leaving(), leaf.leaving());
    assert_eq!(max(), "14");
    drop(one);
    assert_eq!(max(), "12");
    other.stay();
    drop(leaf.leaving());
    assert_eq!(max(), "12", "one that stays for good keeps its room");
    drop(folder);
    drop(leaf.leaving());
}

#[test]
fn a_train_of_branches_fits_into_the_leaf_of_its_source() {
    let Some(real) = real("train").filter(|real| real.limits) else {
        eprintln!("NOT RUN: needs the pids controller");
        return;
    };
    let lineage = real.cgroups.lineage("t1", UID).unwrap().unwrap();
    let leaf = lineage.leaf("sb1", &CgroupLimits::of_sandbox(1, 64)).unwrap();
    let mut born: Vec<_> = (0..20)
        .map(|_| {
            let leaving = leaf.leaving();
            // As many as a branch that is being saved.
            (start(&leaf, "sleep", &["60"]), start(&leaf, "sleep", &["60"]), leaving)
        })
        .collect();
    assert_eq!(pids(&leaf).len(), 40);
    leaf.kill().unwrap();
    for (template, saver, _) in &mut born {
        template.wait().unwrap();
        saver.wait().unwrap();
    }
    drop(born);
    assert_eq!(read(&leaf.path, "pids.max").unwrap().trim(), "9");
    leaf.remove().unwrap();
}

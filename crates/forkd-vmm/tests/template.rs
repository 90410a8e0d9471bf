//! Templates and what they fork: the binary, driven over control sockets as the controller drives it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;
#[path = "support/templates.rs"]
mod templates;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

use forkd_protocol::control::{
    DiskConfig, DiskFiles, EndReason, Event, FdRef, LoadConfig, NetConfig, Reply, Request, Role, SaveConfig,
    Status, VsockConfig, WaitStatus,
};
use forkd_vmm::{asm_guest, guest_code};
use support::{
    Boot, Controller, Fork, Forked, Monitor, file_with, open_kvm, sleeps_once_forked, status, test_name,
    wait_until,
};
use templates::{freeze, start};

guest_code! {
    /// Reports ready, then waits for its generation id to change. It prints the number of its ancestors from
    /// memory, counts itself, writes its id to memory and checks for a while whether that stays (prints an X
    /// if not), reports ready, and waits again.
    fn ancestor,
    "mov rbx, qword ptr [0xe8000]",
    "mov qword ptr [0x200000], 0",
    "2: mov dx, 0x602",
    "out dx, al",
    "3: cmp qword ptr [0xe8000], rbx",
    "je 3b",
    "mov rbx, qword ptr [0xe8000]",
    "mov dx, 0x3f8",
    "mov al, byte ptr [0x200000]",
    "add al, '0'",
    "out dx, al",
    "inc qword ptr [0x200000]",
    "mov qword ptr [0x200008], rbx",
    "mov ecx, 5000",
    "4: cmp qword ptr [0x200008], rbx",
    "je 5f",
    "mov al, 'X'",
    "out dx, al",
    "5: dec ecx",
    "jnz 4b",
    "mov al, 10",
    "out dx, al",
    "jmp 2b",
}

guest_code! {
    /// Reports ready for ever.
    fn chatter,
    "mov dx, 0x602",
    "2: out dx, al",
    "jmp 2b",
}

/// A template of the guest `ancestor`, or `None` where there is no KVM.
fn template(test: &str) -> Option<(Monitor, Controller)> {
    let kvm = open_kvm(test)?;
    let monitor = start(&[]);
    let controller = freeze(kvm, &monitor, ancestor());
    Some((monitor, controller))
}

fn fork(template: &mut Controller, name: &str) -> Forked {
    Fork::new(name).run(template).unwrap()
}

/// The children of a template, by name.
fn children(template: &mut Controller) -> Vec<(String, Option<WaitStatus>)> {
    match template.request(&Request::Children, &[]) {
        Reply::Children { children } => {
            children.into_iter().map(|child| (child.name, child.status)).collect()
        }
        other => panic!("{other:?}"),
    }
}

#[test]
fn children_go_on_from_one_state_each_in_memory_of_its_own() {
    let test = test_name!();
    let Some((_monitor, mut template)) = template(test) else { return };
    assert_eq!(status(&mut template), Status { role: Role::Template, running: false, ready: false });
    let mut children: Vec<_> = ["a", "b", "c"].iter().map(|name| fork(&mut template, name)).collect();
    for child in &mut children {
        child.ready();
        let expected = Status { role: Role::Sandbox, running: true, ready: true };
        assert_eq!(status(&mut child.controller), expected);
    }
    // The first children have written by now: the template, and its next children, see none of it.
    children.push(fork(&mut template, "d"));
    children[3].ready();
    for child in &children {
        assert_eq!(child.console(), "0\n");
    }
    for child in &mut children {
        assert_eq!(child.controller.request(&Request::Stop, &[]), Reply::Stopped);
        assert!(matches!(template.event().0, Event::ChildEnded { status: WaitStatus::Exited(0), .. }));
    }
}

#[test]
fn a_child_becomes_a_template_and_has_children() {
    let test = test_name!();
    let Some((_monitor, mut template)) = template(test) else { return };
    let mut child = fork(&mut template, "child");
    child.ready();
    assert_eq!(child.controller.request(&Request::Freeze, &[]), Reply::Frozen);
    let mut grandchildren: Vec<_> =
        (0..2).map(|index| fork(&mut child.controller, &format!("grandchild{index}"))).collect();
    for grandchild in &mut grandchildren {
        grandchild.ready();
        assert_eq!(grandchild.console(), "1\n", "its parent's memory");
    }
    assert_eq!(grandchildren[0].controller.request(&Request::Freeze, &[]), Reply::Frozen);
    let mut last = fork(&mut grandchildren[0].controller, "last");
    last.ready();
    assert_eq!(last.console(), "2\n");
}

#[test]
fn a_saved_template_forks_in_another_process() {
    let test = test_name!();
    let Some((monitor, mut template)) = template(test) else { return };
    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let save = SaveConfig {
        child: "saver".into(),
        state: FdRef(0),
        memory: Some(FdRef(1)),
        parent: Vec::new(),
        pagemap: None,
        disks: Vec::new(),
        progress: None,
    };
    let reply = template.request(&Request::Save(save), &[state.as_fd(), memory.as_fd()]);
    assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
    // Children are forked while it saves.
    let mut child = fork(&mut template, "child");
    child.ready();
    let ended = Event::ChildEnded { child: "saver".into(), status: WaitStatus::Exited(0) };
    assert_eq!(template.event().0, ended);
    drop((template, monitor, child));

    let loaded = start(&[]);
    let mut template = loaded.attach();
    let load = support::load_config(vec![FdRef(2)], Vec::new());
    let kvm = open_kvm(test).unwrap();
    let fds = [kvm.as_fd(), state.as_fd(), memory.as_fd()];
    // What limits are counted by is what the state is of, or nothing is loaded.
    let load = LoadConfig { vcpus: Some(1), mem_mib: Some(64), ..load };
    for (wrong, why) in [
        (LoadConfig { vcpus: Some(2), ..load.clone() }, "1 vCPUs, its manifest 2"),
        (LoadConfig { mem_mib: Some(32), ..load.clone() }, "64 MiB of memory, its manifest 32"),
    ] {
        match template.request(&Request::Load(wrong), &fds) {
            Reply::Error { message } => assert!(message.contains(why), "{message}"),
            other => panic!("{other:?}"),
        }
    }
    assert_eq!(template.request(&Request::Load(load.clone()), &fds), Reply::Loaded);
    assert_eq!(status(&mut template).role, Role::Template);
    for name in ["a", "b"] {
        let mut child = fork(&mut template, name);
        child.ready();
        assert_eq!(child.console(), "0\n");
    }
    let again = template.request(&Request::Load(load), &fds);
    assert!(matches!(again, Reply::Error { .. }), "{again:?}");
}

/// What a child of a VM with devices gets.
fn fork_with_devices(name: &str) -> (Fork, tempfile::TempDir) {
    let mut fork = Fork::new(name);
    let layer = fork.add(tempfile::tempfile().unwrap());
    fork.config.layers = vec![None, Some(layer)];
    let tap = fork.add(tap());
    fork.config.tap = Some(tap);
    let (listener, folder) = vsock_listener();
    let vsock = fork.add(listener);
    fork.config.vsock = Some(vsock);
    (fork, folder)
}

fn tap() -> UnixDatagram {
    // Any descriptor that does not block will do for a guest that sends nothing.
    let (tap, _) = UnixDatagram::pair().unwrap();
    tap.set_nonblocking(true).unwrap();
    tap
}

fn vsock_listener() -> (UnixListener, tempfile::TempDir) {
    let folder = tempfile::tempdir().unwrap();
    (UnixListener::bind(folder.path().join("vsock")).unwrap(), folder)
}

#[test]
fn children_of_a_vm_with_every_device_run_also_from_files() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut template = monitor.attach();
    let mut boot = Boot::new(kvm.try_clone().unwrap(), file_with(&asm_guest::elf_kernel(ancestor())));
    boot.config.vcpus = 2;
    let base = file_with(&[7; 1 << 20]);
    let layer = tempfile::tempfile().unwrap();
    let [read_only, writable] = [(); 2].map(|()| boot.add(base.try_clone().unwrap()));
    let layer_fd = boot.add(layer.try_clone().unwrap());
    boot.config.disks = vec![
        DiskConfig { base: read_only, layer: None, frozen: Vec::new() },
        DiskConfig { base: writable, layer: Some(layer_fd), frozen: Vec::new() },
    ];
    let tap = boot.add(tap());
    boot.config.net = Some(NetConfig { tap, mac: [6, 0, 0, 0, 0, 1] });
    let (listener, _folder) = vsock_listener();
    let listener = boot.add(listener);
    boot.config.vsock = Some(VsockConfig { cid: 3, listener, guest_ports: vec![1024] });
    assert_eq!(boot.send(&mut template), Reply::Booted);
    assert_eq!(template.event().0, Event::Ready);
    assert_eq!(template.request(&Request::Freeze, &[]), Reply::Frozen);
    let seal = |layers: Vec<Option<FdRef>>| Request::Seal { layers };
    let sealed = std::fs::File::open(format!("/proc/self/fd/{}", layer.as_raw_fd())).unwrap();
    for (request, fd) in [
        (seal(vec![None]), layer.as_fd()),
        (seal(vec![None, None]), layer.as_fd()),
        (seal(vec![Some(FdRef(0)), None]), sealed.as_fd()),
        (seal(vec![None, Some(FdRef(0))]), base.as_fd()),
        (seal(vec![None, Some(FdRef(0))]), layer.as_fd()),
    ] {
        let reply = template.request(&request, &[fd]);
        assert!(matches!(reply, Reply::Error { .. }), "{request:?}: {reply:?}");
    }
    assert_eq!(template.request(&seal(vec![None, Some(FdRef(0))]), &[sealed.as_fd()]), Reply::Sealed);
    let writable = |pid: u32| {
        let fds = std::fs::read_dir(format!("/proc/{pid}/fdinfo")).unwrap().flatten();
        let same = |fd: &std::fs::DirEntry| {
            let path = format!("/proc/{pid}/fd/{}", fd.file_name().to_string_lossy());
            let found = std::fs::metadata(path);
            found.is_ok_and(|found| found.ino() == layer.metadata().unwrap().ino())
        };
        let infos = fds.filter(same).filter_map(|fd| std::fs::read_to_string(fd.path()).ok());
        let mode = |info: String| {
            let flags = info.lines().find_map(|line| line.strip_prefix("flags:")).unwrap().trim().to_owned();
            i32::from_str_radix(&flags, 8).unwrap() & libc::O_ACCMODE
        };
        infos.filter(|info| mode(info.clone()) != libc::O_RDONLY).count()
    };
    assert_eq!(writable(monitor.pid()), 0, "the template can still write to its frozen layer");
    let check = |template: &mut Controller| {
        for name in ["a", "b"] {
            let (fork, _folder) = fork_with_devices(name);
            let mut child = fork.run(template).unwrap();
            child.ready();
            assert_eq!(child.console(), "0\n");
            // Frozen and forked again: its own layer stays below the next one.
            assert_eq!(child.controller.request(&Request::Freeze, &[]), Reply::Frozen);
            let (fork, _folder) = fork_with_devices("grandchild");
            let mut grandchild = fork.run(&mut child.controller).unwrap();
            grandchild.ready();
            assert_eq!(grandchild.console(), "1\n");
        }
    };
    check(&mut template);

    let (state, memory) = (tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap());
    let save = SaveConfig {
        child: "saver".into(),
        state: FdRef(0),
        memory: Some(FdRef(1)),
        parent: Vec::new(),
        pagemap: None,
        disks: Vec::new(),
        progress: None,
    };
    template.request(&Request::Save(save), &[state.as_fd(), memory.as_fd()]);
    let ended = Event::ChildEnded { child: "saver".into(), status: WaitStatus::Exited(0) };
    while template.event().0 != ended {}
    let loaded = start(&[]);
    let mut template = loaded.attach();
    let disks = vec![
        DiskFiles { base: FdRef(3), layers: Vec::new() },
        DiskFiles { base: FdRef(3), layers: vec![FdRef(4)] },
    ];
    let load = support::load_config(vec![FdRef(2)], disks);
    let fds = [kvm.as_fd(), state.as_fd(), memory.as_fd(), base.as_fd(), layer.as_fd()];
    // The controller decides which ports the guest may call, not the file.
    match template.request(&Request::Load(load.clone()), &fds) {
        Reply::Error { message } => assert!(message.contains("ports [1024], allowed are []"), "{message}"),
        other => panic!("{other:?}"),
    }
    let load = LoadConfig { guest_ports: vec![1024], ..load };
    assert_eq!(template.request(&Request::Load(load), &fds), Reply::Loaded);
    check(&mut template);
}

#[test]
fn a_guest_that_says_ready_without_end_is_told_of_once() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut controller = monitor.attach();
    assert!(!status(&mut controller).ready);
    let boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(chatter())));
    assert_eq!(boot.send(&mut controller), Reply::Booted);
    // No controller is connected: the next one gets the event.
    drop(controller);
    std::thread::sleep(Duration::from_millis(100));
    let mut controller = monitor.attach();
    assert_eq!(controller.event().0, Event::Ready);
    for _ in 0..3 {
        assert!(status(&mut controller).ready);
        assert!(!controller.has_event());
    }
}

#[test]
fn the_ends_of_children_are_kept_until_they_are_acknowledged() {
    let test = test_name!();
    let Some((monitor, mut template)) = template(test) else { return };
    let killed = fork(&mut template, "killed");
    let mut stopped = fork(&mut template, "stopped");
    let alive = fork(&mut template, "alive");
    killed.kill();
    let ended = Event::ChildEnded { child: "killed".into(), status: WaitStatus::Signaled(9) };
    assert_eq!(template.event().0, ended);
    // The controller dies, another child ends, a new controller comes.
    drop(template);
    stopped.ready();
    assert_eq!(stopped.controller.request(&Request::Stop, &[]), Reply::Stopped);
    wait_until("the child does not end", || stopped.has_ended());
    let mut template = monitor.attach();
    wait_until("the template does not reap", || children(&mut template)[1].1.is_some());
    let all = [
        ("killed".into(), Some(WaitStatus::Signaled(9))),
        ("stopped".into(), Some(WaitStatus::Exited(0))),
        ("alive".into(), None),
    ];
    assert_eq!(children(&mut template), all);
    let names = vec!["killed".into(), "alive".into(), "nobody".into()];
    assert_eq!(template.request(&Request::Acknowledge { children: names }, &[]), Reply::Acknowledged);
    assert_eq!(children(&mut template), all[1..]);
    assert!(!alive.has_ended());
}

#[test]
fn the_end_of_a_child_is_told_also_where_such_signals_were_ignored() {
    let Some(kvm) = open_kvm(test_name!()) else {
        return;
    };
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
    // SAFETY: between fork and exec one system call is made, with values of its own.
    unsafe {
        command.pre_exec(|| match libc::signal(libc::SIGCHLD, libc::SIG_IGN) {
            libc::SIG_ERR => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let monitor = Monitor::start_with(command, &[]);
    let mut template = freeze(kvm, &monitor, ancestor());
    fork(&mut template, "killed").kill();
    let ended = Event::ChildEnded { child: "killed".into(), status: WaitStatus::Signaled(9) };
    assert_eq!(template.event().0, ended);
}

#[test]
fn children_outlive_their_template() {
    let test = test_name!();
    let Some((mut monitor, mut template)) = template(test) else { return };
    let mut first = fork(&mut template, "first");
    first.ready();
    assert_eq!(template.request(&Request::Stop, &[]), Reply::Stopped);
    assert!(monitor.wait().success());
    assert!(status(&mut first.controller).running);
    drop(first.controller.request(&Request::Freeze, &[]));

    // And when it is killed, which here is a child itself.
    let mut second = fork(&mut first.controller, "second");
    second.ready();
    first.kill();
    wait_until("the child does not end", || first.has_ended());
    assert!(status(&mut second.controller).running);
    second.reconnect();
    assert!(status(&mut second.controller).running);
}

#[test]
fn a_bad_request_harms_nobody() {
    let test = test_name!();
    let Some((mut monitor, mut template)) = template(test) else { return };
    let _one = fork(&mut template, "one");
    let mut refused = |change: &dyn Fn(&mut Fork), expected: &str| {
        let mut fork = Fork::new("two");
        change(&mut fork);
        let message = fork.run(&mut template).map(|_| ()).unwrap_err();
        assert!(message.contains(expected), "{expected}: {message}");
    };
    refused(&|fork| fork.config.child = "one".into(), "already");
    refused(&|fork| fork.config.child = String::new(), "name");
    refused(&|fork| fork.config.child = "x".repeat(65), "name");
    refused(&|fork| fork.config.child = "../two".into(), "name");
    refused(&|fork| fork.config.control = FdRef(9), "descriptor 9");
    refused(&|fork| fork.config.control = fork.config.console, "not a listening socket");
    refused(&|fork| fork.config.console = FdRef(9), "descriptor 9");
    refused(&|fork| fork.config.console = fork.config.control, "something else");
    refused(&|fork| fork.config.console = fork.add(File::open("/dev/null").unwrap()), "reading and writing");
    refused(&|fork| fork.config.cgroup = Some(fork.add(File::open("/").unwrap())), "fork a child");
    let save = SaveConfig {
        child: "one".into(),
        state: FdRef(0),
        memory: Some(FdRef(1)),
        parent: Vec::new(),
        pagemap: None,
        disks: Vec::new(),
        progress: None,
    };
    let files = [tempfile::tempfile().unwrap(), tempfile::tempfile().unwrap()];
    for (save, expected) in [
        (save.clone(), "already"),
        (SaveConfig { child: "saver".into(), memory: Some(FdRef(0)), ..save }, "something else"),
    ] {
        let reply = template.request(&Request::Save(save), &[files[0].as_fd(), files[1].as_fd()]);
        assert!(matches!(&reply, Reply::Error { message } if message.contains(expected)), "{reply:?}");
    }
    for request in [Request::Freeze, Request::Fork(Fork::new("x").config)] {
        let reply = template.request(&request, &[]);
        assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
    }
    assert!(monitor.is_alive());
    assert_eq!(children(&mut template), [("one".into(), None)]);
    fork(&mut template, "two").ready();
}

#[test]
fn a_child_that_cannot_be_restored_says_why_and_exits() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut template = monitor.attach();
    let mut boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(ancestor())));
    let (listener, _folder) = vsock_listener();
    let listener = boot.add(listener);
    boot.config.vsock = Some(VsockConfig { cid: 3, listener, guest_ports: Vec::new() });
    assert_eq!(boot.send(&mut template), Reply::Booted);
    assert_eq!(template.event().0, Event::Ready);
    assert_eq!(template.request(&Request::Freeze, &[]), Reply::Frozen);
    // The guest has the socket device, and this child gets nothing to put behind it.
    let mut child = fork(&mut template, "child");
    let (event, _) = child.controller.event();
    let Event::Ended(end) = event else { panic!("{event:?}") };
    assert_eq!(end.reason, EndReason::Failed);
    assert!(end.detail.contains("vsock"), "{}", end.detail);
    let ended = Event::ChildEnded { child: "child".into(), status: WaitStatus::Exited(1) };
    assert_eq!(template.event().0, ended);
}

#[test]
fn a_child_holds_nothing_of_its_template_or_its_siblings() {
    let test = test_name!();
    if !rustix::process::geteuid().is_root() {
        support::not_run(test, "needs root");
        return;
    }
    let Some((_monitor, mut template)) = template(test) else { return };
    let mut children: Vec<_> = ["a", "b", "c"].iter().map(|name| fork(&mut template, name)).collect();
    children.iter_mut().for_each(Forked::ready);
    let descriptors = |pid: i32| {
        let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).unwrap();
        let links = folder.map(|entry| std::fs::read_link(entry.unwrap().path()).unwrap());
        links.map(|link| link.to_string_lossy().into_owned()).collect::<Vec<_>>()
    };
    let count = |links: &[String], what: &str| links.iter().filter(|link| link.contains(what)).count();
    let all: Vec<_> = children.iter().map(|child| descriptors(child.pid)).collect();
    for links in &all {
        assert_eq!(count(links, "socket:"), 2, "its listener and its connection: {links:?}");
        for foreign in ["pidfd", "signalfd"] {
            assert_eq!(count(links, foreign), 0, "{links:?}");
        }
        assert_eq!(count(links, "(deleted)"), 1, "its console: {links:?}");
        assert_eq!(links.len(), all[0].len(), "who was forked later has as many");
        for status in ["SigBlk:\t0000000000000000", "NoNewPrivs:\t1", "Seccomp:\t2"] {
            let text = std::fs::read_to_string(format!("/proc/{}/status", children[0].pid)).unwrap();
            assert!(text.contains(status), "{text}");
        }
    }
}

/// The folders of a lineage in the cgroup file system: removed when dropped.
struct Cgroups {
    lineage: PathBuf,
}

impl Cgroups {
    /// One for the template and one for a child, given to `user`; `None` without cgroups of version 2.
    fn new(user: u32) -> Option<Cgroups> {
        let mounts = std::fs::read_to_string("/proc/self/mounts").unwrap();
        let mut mounts = mounts.lines().map(|line| line.split(' ').collect::<Vec<_>>());
        let root = mounts.find(|mount| mount.get(2) == Some(&"cgroup2"))?[1].to_owned();
        let lineage = Path::new(&root).join(format!("forkd-test-{}", std::process::id()));
        let all = Cgroups { lineage };
        for folder in [all.lineage.clone(), all.lineage.join("template"), all.lineage.join("child")] {
            std::fs::create_dir(&folder).ok()?;
            std::os::unix::fs::chown(folder.join("cgroup.procs"), Some(user), None).ok()?;
        }
        Some(all)
    }
}

impl Drop for Cgroups {
    fn drop(&mut self) {
        for name in ["template", "child", ""] {
            let folder = self.lineage.join(name);
            // Not before everyone in it was reaped.
            let start = Instant::now();
            while std::fs::remove_dir(&folder).is_err() && start.elapsed() < Duration::from_secs(10) {
                std::thread::sleep(Duration::from_millis(5));
            }
        }
    }
}

#[test]
fn a_jailed_template_forks_straight_into_a_cgroup_of_its_lineage() {
    let test = test_name!();
    const USER: u32 = 23458;
    let Some(kvm) = open_kvm(test) else { return };
    let Some(cgroups) = Cgroups::new(USER) else {
        support::not_run(test, "needs root and cgroups of version 2");
        return;
    };
    let user = USER.to_string();
    let monitor = start(&["--uid", &user, "--gid", &user]);
    let pid = monitor.pid().to_string();
    std::fs::write(cgroups.lineage.join("template/cgroup.procs"), pid).unwrap();
    let mut template = freeze(kvm, &monitor, sleeps_once_forked());
    let mut fork = Fork::new("child");
    let folder = fork.add(File::open(cgroups.lineage.join("child")).unwrap());
    fork.config.cgroup = Some(folder);
    let mut child = fork.run(&mut template).unwrap();
    child.ready();
    let inside = std::fs::read_to_string(cgroups.lineage.join("child/cgroup.procs")).unwrap();
    assert_eq!(inside.trim(), child.pid.to_string());
    child.kill();
    assert!(matches!(template.event().0, Event::ChildEnded { status: WaitStatus::Signaled(9), .. }));
}

#[test]
fn two_hundred_children_at_once_all_run() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut template = freeze(kvm, &monitor, sleeps_once_forked());
    let results = burst(&mut template, 200);
    let mut children: Vec<_> = results.into_iter().map(Result::unwrap).collect();
    children.iter_mut().for_each(Forked::ready);
}

/// Forks `count` children with pipelined requests.
fn burst(template: &mut Controller, count: usize) -> Vec<Result<Forked, String>> {
    let mut forks: Vec<_> = (0..count).map(|index| Fork::new(&format!("child{index}"))).collect();
    // Not all at once: the replies, unread, would fill the socket.
    let mut results = Vec::new();
    while !forks.is_empty() {
        let some: Vec<_> = forks.drain(..forks.len().min(16)).collect();
        let some: Vec<_> = some
            .into_iter()
            .map(|mut fork| {
                fork.send(template);
                fork
            })
            .collect();
        results.extend(some.into_iter().map(|fork| fork.finish(template)));
    }
    results
}

/// The monitor's binary with `limit` of `resource`.
fn limited(resource: libc::__rlimit_resource_t, limit: u64) -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
    // SAFETY: between fork and exec one system call is made, with a value of its own.
    unsafe {
        command.pre_exec(move || {
            let limit = libc::rlimit { rlim_cur: limit, rlim_max: limit };
            match libc::setrlimit(resource, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command
}

#[test]
fn out_of_processes_those_that_fit_run_and_the_others_get_an_error() {
    let test = test_name!();
    if !rustix::process::geteuid().is_root() {
        support::not_run(test, "needs root");
        return;
    }
    let Some(kvm) = open_kvm(test) else { return };
    // A user of its own: processes are counted by user.
    let walls = ["--uid", "23457", "--gid", "23457"];
    let mut monitor = Monitor::start_with(limited(libc::RLIMIT_NPROC, 20), &walls);
    let mut template = freeze(kvm, &monitor, sleeps_once_forked());
    // One that runs already: of a burst, so many may start at once that none has room for its threads.
    let mut first = fork(&mut template, "first");
    first.ready();
    let (mut born, mut refused, mut failed) = (Vec::new(), 0, 0);
    for result in burst(&mut template, 30) {
        match result {
            Ok(child) => born.push(child),
            Err(message) => {
                assert!(message.contains("fork a child"), "{message}");
                refused += 1;
            }
        }
    }
    let mut running = vec![first];
    for mut child in born {
        // A child without room for its threads sends the reason instead of `Hello`.
        match child.controller.next() {
            forkd_protocol::control::Message::Event(Event::Ended(end)) => {
                assert!(end.detail.contains("thread"), "{}", end.detail);
                failed += 1;
            }
            // KVM's own threads count, too: one that has all its own may still find no room for those.
            _ => match child.controller.event().0 {
                Event::Ready => running.push(child),
                Event::Ended(_) => failed += 1,
                other => panic!("{other:?}"),
            },
        }
    }
    assert!(refused + failed > 0, "{} run, nobody got an error", running.len());
    assert!(monitor.is_alive());
    // Those that run are as they were. Then there is room again, and another one fits.
    running.iter_mut().for_each(|child| {
        assert_eq!(child.controller.request(&Request::Stop, &[]), Reply::Stopped);
    });
    wait_until("the children do not end", || running.iter().all(Forked::has_ended));
    wait_until("the template does not reap", || {
        children(&mut template).iter().all(|(_, status)| status.is_some())
    });
    fork(&mut template, "late").ready();
}

#[test]
fn out_of_descriptors_a_child_fails_and_the_template_goes_on() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let mut monitor = Monitor::start_with(limited(libc::RLIMIT_NOFILE, 32), &[]);
    let mut template = freeze(kvm, &monitor, sleeps_once_forked());
    let mut children: Vec<_> = (0..40).map(|index| fork(&mut template, &format!("child{index}"))).collect();
    children.iter_mut().for_each(Forked::ready);
    // More descriptors than the template may have: the message loses some, and the fork is refused.
    let mut greedy = Fork::new("greedy");
    for _ in 0..40 {
        greedy.add(File::open("/dev/null").unwrap());
    }
    greedy.config.console = FdRef(41);
    assert!(greedy.run(&mut template).is_err());
    assert!(monitor.is_alive());
    fork(&mut template, "late").ready();
}

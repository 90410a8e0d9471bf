//! What a branch and its source keep of each other: descriptors, layers of disks, huge pages. The binary, driven over
//! control sockets as the controller drives it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/branching.rs"]
mod branching;
mod support;
#[path = "support/templates.rs"]
mod templates;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

use branching::{Branching, boot_ready, branch, counter, fork, run, sleeper};
use forkd_protocol::control::{
    DiskConfig, FdRef, NetConfig, ReplacedLayers, Reply, Request, Role, VsockConfig,
};
use forkd_vmm::asm_guest;
use support::{Boot, Controller, Fork, Forked, Monitor, file_with, open_kvm, status, test_name, wait_until};
use templates::read_only;

#[test]
fn many_branches_in_a_row_cost_the_source_nothing_it_keeps() {
    let test = test_name!();
    let Some((monitor, mut source)) = run(test, sleeper()) else { return };
    let own = descriptors(monitor.pid() as i32).map(|all| all.len());
    let mut branches: Vec<_> = (0..10).map(|_| branch(&mut source)).collect();
    // One for each living branch: by it the source notices its end.
    comes_back_to(monitor.pid(), own.map(|own| own + branches.len()));
    for branch in &mut branches {
        assert_eq!(branch.controller.request(&Request::Stop, &[]), Reply::Stopped);
    }
    // The kernel reaps them: no process is left, not even a dead one.
    for branch in &branches {
        let process = format!("/proc/{}", branch.pid);
        wait_until("a branch that was stopped is still there", || !Path::new(&process).exists());
    }
    comes_back_to(monitor.pid(), own);
    assert!(status(&mut source).running);
    let mut last = branch(&mut source);
    assert_eq!(status(&mut last.controller).role, Role::Template);
}

/// What a process asks for its largest mapping, the guest's memory: huge pages (`hg`) or small ones (`nh`); nothing
/// where the kernel has no huge pages.
fn page_size(pid: u32) -> Option<String> {
    let maps = std::fs::read_to_string(format!("/proc/{pid}/smaps")).unwrap();
    let mut largest = (0, None);
    let mut size = 0;
    for line in maps.lines() {
        if let Some(text) = line.strip_prefix("Size:") {
            size = text.trim().trim_end_matches(" kB").parse::<u64>().unwrap();
        } else if let Some(flags) = line.strip_prefix("VmFlags:").filter(|_| size > largest.0) {
            let asked = flags.split_whitespace().find(|flag| ["hg", "nh"].contains(flag));
            largest = (size, asked.map(str::to_owned));
        }
    }
    largest.1
}

#[test]
fn a_vm_asks_for_huge_pages_only_as_long_as_it_has_no_branches() {
    let test = test_name!();
    if !rustix::process::geteuid().is_root() {
        support::not_run(test, "needs root");
        return;
    }
    let Some((monitor, mut source)) = run(test, counter()) else { return };
    if page_size(monitor.pid()).is_none() {
        support::not_run(test, "this kernel has no huge pages");
        return;
    }
    let asks_for = |pid: u32, flag: &str| page_size(pid).as_deref() == Some(flag);
    assert!(asks_for(monitor.pid(), "hg"));
    let mut first = branch(&mut source);
    wait_until("a branched VM asks for huge pages", || asks_for(monitor.pid(), "nh"));
    let second = branch(&mut source);
    // A child never had them, with branches or without.
    let mut child = fork(&mut first.controller, "child");
    let grandchild = branch(&mut child.controller);
    drop(grandchild);
    drop(first);
    status(&mut source);
    assert!(asks_for(monitor.pid(), "nh"), "one branch lives");
    drop(second);
    wait_until("a VM without branches does not ask for huge pages", || asks_for(monitor.pid(), "hg"));
    status(&mut child.controller);
    assert!(asks_for(child.pid as u32, "nh"), "a child asks for huge pages");
    assert!(status(&mut source).running);
}

/// What the descriptors of a process are; `None` if this user may not look.
fn descriptors(pid: i32) -> Option<Vec<String>> {
    let folder = std::fs::read_dir(format!("/proc/{pid}/fd")).ok()?;
    // One that is closed just now is not there any more.
    let links = folder.filter_map(|entry| std::fs::read_link(entry.unwrap().path()).ok());
    Some(links.map(|link| link.to_string_lossy().into_owned()).collect())
}

/// Waits until a process has so many descriptors: a source closes those of a branch just after its reply.
fn comes_back_to(pid: u32, count: Option<usize>) {
    wait_until("a source keeps descriptors of its branches", || {
        descriptors(pid as i32).map(|all| all.len()) == count
    });
}

/// A VM with every device and one vCPU that never starts.
struct Devices {
    monitor: Monitor,
    source: Controller,
    layer: File,
    _folder: tempfile::TempDir,
}

impl Devices {
    fn boot(test: &str, command: Command, arguments: &[&str]) -> Option<Devices> {
        let kvm = open_kvm(test)?;
        let monitor = Monitor::start_with(command, arguments);
        let mut source = monitor.attach();
        let mut boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(counter())));
        boot.config.vcpus = 2;
        let layer = tempfile::tempfile().unwrap();
        let base = file_with(&[7; 1 << 20]);
        let [read_only, writable] = [(); 2].map(|()| boot.add(base.try_clone().unwrap()));
        let top = boot.add(layer.try_clone().unwrap());
        boot.config.disks = vec![
            DiskConfig { base: read_only, layer: None, frozen: Vec::new() },
            DiskConfig { base: writable, layer: Some(top), frozen: Vec::new() },
        ];
        let (tap, _) = UnixDatagram::pair().unwrap();
        tap.set_nonblocking(true).unwrap();
        let tap = boot.add(tap);
        boot.config.net = Some(NetConfig { tap, mac: [6, 0, 0, 0, 0, 1] });
        let folder = tempfile::tempdir().unwrap();
        let listener = boot.add(UnixListener::bind(folder.path().join("vsock")).unwrap());
        boot.config.vsock = Some(VsockConfig { cid: 3, listener, guest_ports: vec![1024] });
        boot_ready(&boot, &mut source);
        Some(Devices { monitor, source, layer, _folder: folder })
    }
}

/// A request to branch a VM with every device, and the next layer of its disk.
fn branching_with_layer() -> (Branching, File) {
    let mut branching = Branching::new();
    let next = tempfile::tempfile().unwrap();
    branching.fds.push(next.try_clone().unwrap().into());
    branching.config.layers = vec![None, Some(FdRef(1))];
    (branching, next)
}

fn monitor_binary() -> Command {
    Command::new(env!("CARGO_BIN_EXE_forkd-vmm"))
}

fn is_same_file(one: &File, other: &File) -> bool {
    let key = |file: &File| file.metadata().map(|found| (found.dev(), found.ino())).unwrap();
    key(one) == key(other)
}

fn fork_with_devices(template: &mut Controller, name: &str) -> (Forked, tempfile::TempDir) {
    let mut fork = Fork::new(name);
    let layer = fork.add(tempfile::tempfile().unwrap());
    fork.config.layers = vec![None, Some(layer)];
    let folder = tempfile::tempdir().unwrap();
    let listener = fork.add(UnixListener::bind(folder.path().join("vsock")).unwrap());
    fork.config.vsock = Some(listener);
    let mut child = fork.run(template).unwrap();
    child.ready();
    (child, folder)
}

#[test]
fn a_branch_holds_nothing_of_its_source_but_what_it_needs() {
    let test = test_name!();
    if !rustix::process::geteuid().is_root() {
        support::not_run(test, "needs root");
        return;
    }
    let Some(mut vm) = Devices::boot(test, monitor_binary(), &[]) else { return };
    let before = descriptors(vm.monitor.pid() as i32).unwrap().len();
    let (branching, _next) = branching_with_layer();
    let mut branch = branching.run(&mut vm.source).unwrap();
    let mut links = descriptors(branch.pid).unwrap();
    links.sort();
    let count = |what: &str| links.iter().filter(|link| link.contains(what)).count();
    assert_eq!(count("/dev/kvm"), 1, "{links:?}");
    assert_eq!(count("socket:"), 2, "its listener and its connection: {links:?}");
    assert_eq!(count("signalfd"), 1, "{links:?}");
    assert_eq!(count("anon_inode"), 1, "{links:?}");
    assert_eq!(count("(deleted)"), 3, "the files of its disks: {links:?}");
    assert_eq!(links.len(), 3 + 1 + 2 + 1 + 3, "and three usual ones: {links:?}");
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", branch.pid)).unwrap();
    assert!(!maps.contains("kvm-vcpu"), "{maps}");
    let name = std::fs::read_to_string(format!("/proc/{}/comm", branch.pid)).unwrap();
    assert_eq!(name, "forkd-template\n");
    let status = std::fs::read_to_string(format!("/proc/{}/status", branch.pid)).unwrap();
    for line in ["Threads:\t1", "NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(line), "{status}");
    }
    // The source has its next layer and hold of the branch, and nothing else.
    comes_back_to(vm.monitor.pid(), Some(before + 2));
    // And a child of it has what any child has.
    let (child, _folder) = fork_with_devices(&mut branch.controller, "child");
    let links = descriptors(child.pid).unwrap();
    assert!(!links.iter().any(|link| link.contains("signalfd")), "{links:?}");
}

#[test]
fn frozen_layers_are_handed_out_sealed_and_replaced() {
    let test = test_name!();
    let Some(mut vm) = Devices::boot(test, monitor_binary(), &[]) else { return };
    let seal = Request::Seal { layers: vec![None, Some(FdRef(0))] };
    let refused = |reply: &Reply| matches!(reply, Reply::Error { .. });
    let layer = read_only(&vm.layer);
    let reply = vm.source.request(&seal, &[layer.as_fd()]);
    assert!(refused(&reply), "the layer it writes to is not frozen: {reply:?}");

    let (branching, next) = branching_with_layer();
    let mut first = branching.run(&mut vm.source).unwrap();
    assert!(is_same_file(&File::from(first.layers.remove(0)), &vm.layer));
    for controller in [&mut vm.source, &mut first.controller] {
        let reply = controller.request(&seal, &[vm.layer.as_fd()]);
        assert!(refused(&reply), "open for writing: {reply:?}");
        assert_eq!(controller.request(&seal, &[layer.as_fd()]), Reply::Sealed);
    }
    let (branching, _third) = branching_with_layer();
    let mut second = branching.run(&mut vm.source).unwrap();
    assert!(is_same_file(&File::from(second.layers.remove(0)), &next));

    let merged = read_only(&tempfile::tempfile().unwrap());
    let replace = |count: u8| Request::ReplaceLayers {
        disks: vec![None, Some(ReplacedLayers { count, layer: FdRef(0) })],
    };
    let reply = vm.source.request(&replace(3), &[merged.as_fd()]);
    assert!(refused(&reply), "only two are frozen: {reply:?}");
    let reply = vm.source.request(&replace(2), &[next.as_fd()]);
    assert!(refused(&reply), "open for writing: {reply:?}");
    assert_eq!(vm.source.request(&replace(2), &[merged.as_fd()]), Reply::Replaced);
    let (branching, _) = branching_with_layer();
    let mut last = branching.run(&mut vm.source).unwrap();
    fork_with_devices(&mut last.controller, "child");
    fork_with_devices(&mut second.controller, "child");
}

#[test]
fn a_branch_that_cannot_be_changes_nothing() {
    let test = test_name!();
    if !rustix::process::geteuid().is_root() {
        support::not_run(test, "needs root");
        return;
    }
    // A user of its own: processes are counted by user.
    let walls = ["--uid", "23459", "--gid", "23459"];
    let Some(mut vm) = Devices::boot(test, with_few_processes(), &walls) else { return };
    let pid = vm.monitor.pid() as i32;
    let before = descriptors(pid).unwrap().len();
    let mut refused = |change: &dyn Fn(&mut Branching), expected: &str| {
        let (mut branching, _) = branching_with_layer();
        change(&mut branching);
        let message = branching.run(&mut vm.source).map(|_| ()).unwrap_err();
        assert!(message.contains(expected), "{expected}: {message}");
    };
    refused(&|branching| branching.config.layers = Vec::new(), "2 disks");
    refused(&|branching| branching.config.layers = vec![None, None], "needs a layer");
    refused(&|branching| branching.config.layers.reverse(), "read-only");
    refused(&|branching| branching.config.control = FdRef(1), "not a listening socket");
    refused(&|branching| branching.config.control = FdRef(9), "descriptor 9");
    comes_back_to(pid as u32, Some(before));

    let mut layers = vec![vm.layer.try_clone().unwrap()];
    let mut branches = Vec::new();
    let message = loop {
        let (branching, next) = branching_with_layer();
        match branching.run(&mut vm.source) {
            Ok(branch) => branches.push(branch),
            Err(message) => break message,
        }
        layers.push(next);
    };
    assert!(message.contains("fork a branch"), "{message}");
    assert!(status(&mut vm.source).running);
    // For each its layer, and hold of it.
    comes_back_to(pid as u32, Some(before + 2 * branches.len()));
    // Room again, and another one fits.
    drop(branches.remove(0));
    let mut late = None;
    wait_until("no branch fits, though one has ended", || {
        late = branching_with_layer().0.run(&mut vm.source).ok();
        late.is_some()
    });
    let top = late.unwrap().layers.remove(0);
    assert!(is_same_file(&File::from(top), layers.last().unwrap()), "no layer was used up in vain");
}

/// The monitor, for a user with room for a few processes and threads.
fn with_few_processes() -> Command {
    let mut command = monitor_binary();
    // SAFETY: between fork and exec one system call is made, with a value of its own.
    unsafe {
        command.pre_exec(|| {
            let limit = libc::rlimit { rlim_cur: 10, rlim_max: 10 };
            match libc::setrlimit(libc::RLIMIT_NPROC, &raw const limit) {
                0 => Ok(()),
                _ => Err(std::io::Error::last_os_error()),
            }
        });
    }
    command
}

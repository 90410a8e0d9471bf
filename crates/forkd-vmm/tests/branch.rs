//! Branches: templates forked off a VM that goes on. The binary, driven over control sockets as the
//! controller drives it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;

use std::fs::File;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use forkd_protocol::control::{
    BranchConfig, DiskConfig, EndReason, Event, FdRef, Message, NetConfig, ReplacedLayers, Reply, Request,
    Role, SaveConfig, Status, VERSION, VmEnd, VsockConfig, WaitStatus,
};
use forkd_vmm::{guest_code, tiny};
use support::{Boot, Controller, Fork, Forked, Monitor, file_with, open_kvm, status, wait_until};

guest_code! {
    /// Counts for ever, and says that it is ready at first and whenever it has become somebody else.
    fn counter,
    "mov rbx, qword ptr [0xe8000]",
    "mov dx, 0x602",
    "2: out dx, al",
    "3: inc qword ptr [0x200000]",
    "cmp qword ptr [0xe8000], rbx",
    "je 3b",
    "mov rbx, qword ptr [0xe8000]",
    "jmp 2b",
}

guest_code! {
    /// Two vCPUs that write for ever. The first fills 64 pages, every other one above 4 GiB, with the number
    /// of the round; after each round it hands a token to the second and waits until it comes back. The
    /// second counts the tokens, and fills a page with their number before it gives one back. When the first
    /// has become somebody else, it compares every byte with the round and the page it is at, and prints a V,
    /// or an X. Prints a T when the token or the second's page is wrong.
    fn writers,
    "lea rsi, [rip + 9f]",
    "mov edi, 0x10000",
    "mov ecx, 128",
    "cld",
    "rep movsb",
    "mov qword ptr [0xa020], 0x400003",
    "mov rax, 0x100000083",
    "mov qword ptr [0x400000], rax",
    "mov rbx, qword ptr [0xe8000]",
    "mov r8d, 1",
    "xor r9d, r9d",
    "mov ecx, 0x1b",
    "rdmsr",
    "or eax, 0xc00",
    "wrmsr",
    "mov ecx, 0x830",
    "xor edx, edx",
    "mov eax, 0xc4500",
    "wrmsr",
    "mov eax, 0xc4610",
    "wrmsr",
    "mov dx, 0x602",
    "out dx, al",
    // One page, then a look at who one is.
    "2: cmp qword ptr [0xe8000], rbx",
    "jne 4f",
    "mov r11, r9",
    "call 8f",
    "mov rax, r8",
    "mov ecx, 512",
    "rep stosq",
    "inc r9",
    "cmp r9, 64",
    "jb 2b",
    "xor r9d, r9d",
    "inc r8",
    // The token.
    "inc word ptr [0x3000]",
    "mov ax, word ptr [0x3000]",
    "3: pause",
    "cmp byte ptr [0x3004], 0",
    "jne 7f",
    "cmp word ptr [0x3002], ax",
    "jne 3b",
    "mov edi, 0x30000",
    "mov ecx, 2048",
    "repe scasw",
    "jne 7f",
    "jmp 2b",
    // Somebody else: every byte is looked at.
    "4: mov rbx, qword ptr [0xe8000]",
    "xor r10d, r10d",
    "5: mov r11, r10",
    "call 8f",
    "mov rax, r8",
    "cmp r10, r9",
    "jb 6f",
    "dec rax",
    "6: mov ecx, 512",
    "repe scasq",
    "mov al, 'X'",
    "jne 6f",
    "inc r10",
    "cmp r10, 64",
    "jb 5b",
    "mov al, 'V'",
    "6: mov dx, 0x3f8",
    "out dx, al",
    "mov al, 10",
    "out dx, al",
    "mov dx, 0x602",
    "out dx, al",
    "jmp 2b",
    "7: mov al, 'T'",
    "mov dx, 0x3f8",
    "out dx, al",
    "mov al, 10",
    "out dx, al",
    "mov dx, 0x602",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
    // The address of page r11, in rdi.
    "8: mov rdi, r11",
    "shr rdi, 1",
    "shl rdi, 12",
    "mov rax, 0x1000000",
    "test r11, 1",
    "jz 3f",
    "mov rax, 0x100000000",
    "3: add rdi, rax",
    "ret",
    "9:",
    ".code16",
    "cld",
    "xor ax, ax",
    "mov ds, ax",
    "mov ax, 0x3000",
    "mov es, ax",
    "xor bx, bx",
    "3: mov ax, word ptr ds:[0x3000]",
    "cmp ax, bx",
    "je 3b",
    "inc bx",
    "cmp ax, bx",
    "jne 5f",
    "xor di, di",
    "mov cx, 2048",
    "rep stosw",
    "mov word ptr ds:[0x3002], bx",
    "jmp 3b",
    "5: mov byte ptr ds:[0x3004], 1",
    "6: hlt",
    "jmp 6b",
}

guest_code! {
    /// Says that it is ready and sleeps for ever.
    fn sleeper,
    "mov dx, 0x602",
    "out dx, al",
    "cli",
    "2: hlt",
    "jmp 2b",
}

guest_code! {
    /// Says that it is ready, counts for a moment and powers off.
    fn short_lived,
    "mov dx, 0x602",
    "out dx, al",
    "mov ecx, 100000",
    "2: dec ecx",
    "jnz 2b",
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

/// Where [`counter`] counts.
const COUNTER: u64 = 0x20_0000;

fn start(arguments: &[&str]) -> Monitor {
    Monitor::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), arguments)
}

/// A running guest, or `None` where there is no KVM.
fn run(test: &str, code: &[u8]) -> Option<(Monitor, Controller)> {
    let monitor = start(&[]);
    let boot = Boot::new(open_kvm(test)?, file_with(&tiny::elf_kernel(code)));
    let mut controller = monitor.attach();
    boot_ready(&boot, &mut controller);
    Some((monitor, controller))
}

fn boot_ready(boot: &Boot, controller: &mut Controller) {
    assert_eq!(boot.send(controller), Reply::Booted);
    assert_eq!(controller.event().0, Event::Ready);
}

/// A request to branch, with the descriptors it names and the connection that waits for the branch.
struct Branching {
    config: BranchConfig,
    fds: Vec<OwnedFd>,
    controller: Controller,
    folder: tempfile::TempDir,
}

impl Branching {
    /// Of a VM without disks.
    fn new() -> Branching {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = support::listen(&socket);
        let controller = Controller::connect(&socket);
        controller.channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
        let config = BranchConfig { control: FdRef(0), layers: Vec::new() };
        Branching { config, fds: vec![listener], controller, folder }
    }

    /// Sends the request and takes the reply.
    fn run(self, source: &mut Controller) -> Result<Branch, String> {
        let Branching { config, fds, mut controller, folder } = self;
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        source.channel.send(&Request::Branch(config), &borrowed).unwrap();
        drop(fds);
        match source.reply_with_fds() {
            (Reply::Branched { pid, layers, .. }, mut fds) => {
                let pidfd = fds.remove(0);
                assert_eq!(layers.iter().flatten().count(), fds.len());
                let reply = controller.reply();
                assert!(matches!(reply, Reply::Hello { version: VERSION, .. }), "{reply:?}");
                Ok(Branch { pid, pidfd, layers: fds, controller, _folder: folder })
            }
            (Reply::Error { message }, _) => Err(message),
            other => panic!("{other:?}"),
        }
    }
}

/// A branch: a template with its own process. Killed when it is dropped.
struct Branch {
    pid: i32,
    pidfd: OwnedFd,
    /// The layers it froze.
    layers: Vec<OwnedFd>,
    controller: Controller,
    _folder: tempfile::TempDir,
}

impl Branch {
    fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
    }
}

impl Drop for Branch {
    fn drop(&mut self) {
        self.kill();
    }
}

fn branch(source: &mut Controller) -> Branch {
    Branching::new().run(source).unwrap()
}

fn fork(template: &mut Controller, name: &str) -> Forked {
    let mut child = Fork::new(name).run(template).unwrap();
    child.ready();
    child
}

/// The memory of a template, as a file.
fn memory_of(template: &mut Controller) -> File {
    save(template).1
}

/// A template's state and memory, as files.
fn save(template: &mut Controller) -> (File, File) {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let name = format!("saver{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::SeqCst));
    // Not on a disk: that would be waited for.
    let file = || File::from(rustix::fs::memfd_create("saved", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let (state, memory) = (file(), file());
    let save = SaveConfig {
        child: name.clone(),
        state: FdRef(0),
        memory: FdRef(1),
        parent: Vec::new(),
        pagemap: None,
        disks: Vec::new(),
        progress: None,
    };
    let reply = template.request(&Request::Save(save), &[state.as_fd(), memory.as_fd()]);
    assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
    let saved = Event::ChildEnded { child: name, status: WaitStatus::Exited(0) };
    while template.event().0 != saved {}
    (state, memory)
}

fn number(memory: &File, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    memory.read_exact_at(&mut bytes, offset).unwrap();
    u64::from_le_bytes(bytes)
}

#[test]
fn a_branch_stays_at_its_instant_its_children_go_on_from_it_and_so_does_the_source() {
    let test = "a_branch_stays_at_its_instant_its_children_go_on_from_it_and_so_does_the_source";
    let Some((_monitor, mut source)) = run(test, counter()) else { return };
    let mut first = branch_beyond(&mut source, 0);
    let expected = Status { role: Role::Template, running: false, ready: false };
    assert_eq!(status(&mut first.controller), expected);
    assert_eq!(status(&mut source), Status { role: Role::Sandbox, running: true, ready: true });
    let mut child = fork(&mut first.controller, "child");
    let count = |template: &mut Branch| number(&memory_of(&mut template.controller), COUNTER);
    let then = count(&mut first);
    // The source goes on, and so does a child of the branch.
    branch_beyond(&mut source, then);
    branch_beyond(&mut child.controller, then);
    assert_eq!(count(&mut first), then, "the branch does not");
}

#[test]
fn whatever_two_vcpus_write_meanwhile_every_branch_is_of_one_instant() {
    let test = "whatever_two_vcpus_write_meanwhile_every_branch_is_of_one_instant";
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut source = monitor.attach();
    let mut boot = Boot::new(kvm, file_with(&tiny::elf_kernel(writers())));
    boot.config.vcpus = 2;
    // A little of it is above 4 GiB, in a memory slot of its own.
    boot.config.mem_mib = (3 << 10) + 32;
    boot_ready(&boot, &mut source);
    let mut branches = Vec::new();
    for round in 0..8 {
        std::thread::sleep(Duration::from_millis(3 * round));
        branches.push(branch(&mut source));
    }
    assert_eq!(source.request(&Request::Pause, &[]), Reply::Paused);
    for (index, branch) in branches.iter_mut().enumerate() {
        for name in ["a", "b"] {
            let child = fork(&mut branch.controller, name);
            assert_eq!(child.console(), "V\n", "child {name} of branch {index}");
        }
    }
    // It went on writing, and is as whole as they are.
    assert_eq!(source.request(&Request::Resume, &[]), Reply::Resumed);
    std::thread::sleep(Duration::from_millis(10));
    assert_eq!(source.request(&Request::Freeze, &[]), Reply::Frozen);
    assert_eq!(fork(&mut source, "child").console(), "V\n");
}

#[test]
fn a_branch_of_a_branch_of_a_branch_is_of_one_instant_too() {
    let test = "a_branch_of_a_branch_of_a_branch_is_of_one_instant_too";
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut source = monitor.attach();
    let mut boot = Boot::new(kvm, file_with(&tiny::elf_kernel(writers())));
    boot.config.vcpus = 2;
    boot.config.mem_mib = (3 << 10) + 32;
    boot_ready(&boot, &mut source);
    let mut first = branch(&mut source);
    drop((source, monitor));
    let mut child = fork(&mut first.controller, "child");
    for generation in 2..5 {
        let mut next = branch(&mut child.controller);
        // Its source is gone before it is used.
        drop(std::mem::replace(&mut first, branch(&mut child.controller)));
        child.kill();
        child = fork(&mut next.controller, "child");
        assert_eq!(child.console(), "V\n", "generation {generation}");
        let mut sibling = fork(&mut first.controller, "sibling");
        assert_eq!(sibling.console(), "V\n", "generation {generation}");
        assert!(status(&mut sibling.controller).running);
    }
}

/// A branch of a guest that has counted beyond `count`: one that was just forked or resumed may not have run
/// yet.
fn branch_beyond(source: &mut Controller, count: u64) -> Branch {
    let mut beyond = None;
    wait_until("the guest does not go on counting", || {
        let mut branch = branch(source);
        let counted = number(&memory_of(&mut branch.controller), COUNTER);
        beyond = (counted > count).then_some(branch);
        beyond.is_some()
    });
    beyond.unwrap()
}

#[test]
fn a_vm_whose_memory_comes_from_files_is_branched_too() {
    let test = "a_vm_whose_memory_comes_from_files_is_branched_too";
    let Some((_monitor, mut source)) = run(test, counter()) else { return };
    let mut saved = branch(&mut source);
    assert_eq!(source.request(&Request::Stop, &[]), Reply::Stopped);
    let (state, memory) = save(&mut saved.controller);
    let monitor = start(&[]);
    let mut template = monitor.attach();
    let load = support::load_config(vec![FdRef(2)], Vec::new());
    let kvm = open_kvm(test).unwrap();
    let fds = [kvm.as_fd(), state.as_fd(), memory.as_fd()];
    assert_eq!(template.request(&Request::Load(load), &fds), Reply::Loaded);
    let mut child = fork(&mut template, "child");
    let mut branches = vec![branch_beyond(&mut child.controller, number(&memory, COUNTER))];
    branches.extend((0..2).map(|_| branch(&mut child.controller)));
    child.kill();
    let counts: Vec<_> =
        branches.iter_mut().map(|branch| number(&memory_of(&mut branch.controller), COUNTER)).collect();
    assert!(counts.is_sorted(), "{counts:?}");
    // And a branch of a child of that one, whose memory is still mapped from the same file.
    let mut child = fork(&mut branches[2].controller, "child");
    let mut last = branch_beyond(&mut child.controller, counts[2]);
    child.kill();
    fork(&mut last.controller, "child").kill();
}

#[test]
fn many_branches_in_a_row_cost_the_source_nothing_it_keeps() {
    let test = "many_branches_in_a_row_cost_the_source_nothing_it_keeps";
    let Some((monitor, mut source)) = run(test, sleeper()) else { return };
    let own = descriptors(monitor.pid() as i32).map(|all| all.len());
    let mut branches: Vec<_> = (0..10).map(|_| branch(&mut source)).collect();
    // One for each that lives: the source hears by that when it ends.
    comes_back_to(monitor.pid(), own.map(|own| own + branches.len()));
    for branch in &mut branches {
        assert_eq!(branch.controller.request(&Request::Stop, &[]), Reply::Stopped);
    }
    // Nobody waits for them: no process is left, not even a dead one.
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
    let test = "a_vm_asks_for_huge_pages_only_as_long_as_it_has_no_branches";
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

/// Waits until a process has so many descriptors: a source closes those of a branch just after it has told
/// of it.
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
        let mut boot = Boot::new(kvm, file_with(&tiny::elf_kernel(counter())));
        boot.config.vcpus = 2;
        let layer = tempfile::tempfile().unwrap();
        let base = file_with(&[7; 1 << 20]);
        let [read_only, writable] = [(); 2].map(|()| boot.add(base.try_clone().unwrap()));
        let top = boot.add(layer.try_clone().unwrap());
        boot.config.disks = vec![
            DiskConfig { base: read_only, layer: None },
            DiskConfig { base: writable, layer: Some(top) },
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

/// The same file, opened for reading only.
fn read_only(file: &File) -> File {
    File::open(format!("/proc/self/fd/{}", file.as_raw_fd())).unwrap()
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
    let test = "a_branch_holds_nothing_of_its_source_but_what_it_needs";
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
    let test = "frozen_layers_are_handed_out_sealed_and_replaced";
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
    let test = "a_branch_that_cannot_be_changes_nothing";
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

#[test]
fn source_and_branch_do_not_need_each_other() {
    let test = "source_and_branch_do_not_need_each_other";
    let Some((mut monitor, mut source)) = run(test, counter()) else { return };
    let mut lives = branch(&mut source);
    let dies = branch(&mut source);
    dies.kill();
    wait_until("a branch that was killed is still there", || {
        !Path::new(&format!("/proc/{}", dies.pid)).exists()
    });
    assert!(status(&mut source).running);
    monitor.kill();
    assert_eq!(status(&mut lives.controller).role, Role::Template);
    let mut child = fork(&mut lives.controller, "child");
    assert!(status(&mut child.controller).running);
}

#[test]
fn a_paused_vm_stands_still_can_be_branched_and_goes_on() {
    let test = "a_paused_vm_stands_still_can_be_branched_and_goes_on";
    let Some((mut monitor, mut source)) = run(test, counter()) else { return };
    for _ in 0..2 {
        assert_eq!(source.request(&Request::Pause, &[]), Reply::Paused);
        assert_eq!(status(&mut source), Status { role: Role::Sandbox, running: false, ready: true });
    }
    let count = |source: &mut Controller| number(&memory_of(&mut branch(source).controller), COUNTER);
    // Looked at once after each resume, since a look might wake what that did not; but on a busy computer it
    // may not have run yet.
    let mut wait = Duration::from_millis(5);
    loop {
        let counts = [(); 2].map(|()| {
            std::thread::sleep(Duration::from_millis(5));
            count(&mut source)
        });
        assert_eq!(counts[0], counts[1], "it stood still");
        assert!(!status(&mut source).running, "a branch does not wake it");
        for _ in 0..2 {
            assert_eq!(source.request(&Request::Resume, &[]), Reply::Resumed);
            assert!(status(&mut source).running);
        }
        std::thread::sleep(wait);
        let after = count(&mut source);
        assert_eq!(source.request(&Request::Pause, &[]), Reply::Paused);
        if after > counts[1] {
            break;
        }
        wait *= 2;
        assert!(wait < Duration::from_secs(20), "it does not go on");
    }
    assert_eq!(source.request(&Request::Stop, &[]), Reply::Stopped);
    assert!(monitor.wait().success());

    // One that is paused can also be frozen for good.
    let Some((_monitor, mut source)) = run(test, counter()) else { return };
    assert_eq!(source.request(&Request::Pause, &[]), Reply::Paused);
    assert_eq!(source.request(&Request::Freeze, &[]), Reply::Frozen);
    fork(&mut source, "child");
}

#[test]
fn a_vm_that_sleeps_is_branched_like_any_other() {
    let test = "a_vm_that_sleeps_is_branched_like_any_other";
    let Some((_monitor, mut source)) = run(test, sleeper()) else { return };
    let mut first = branch(&mut source);
    let mut child = Fork::new("child").run(&mut first.controller).unwrap();
    assert!(matches!(child.controller.reply(), Reply::Hello { .. }));
    assert!(status(&mut child.controller).running);
    let mut second = branch(&mut child.controller);
    assert_eq!(status(&mut second.controller).role, Role::Template);
}

#[test]
fn a_vm_that_ends_while_it_is_branched_or_paused_ends_as_ever() {
    let test = "a_vm_that_ends_while_it_is_branched_or_paused_ends_as_ever";
    for round in 0..20 {
        let Some((mut monitor, mut source)) = run(test, short_lived()) else { return };
        std::thread::sleep(Duration::from_micros(50 * round));
        // It may be gone already, and then takes no request.
        if round % 2 == 0 {
            let Branching { config, fds, .. } = Branching::new();
            let _ = source.channel.send(&Request::Branch(config), &[fds[0].as_fd()]);
        } else {
            let _ = source.channel.send(&Request::Pause, &[]);
            let _ = source.channel.send(&Request::Resume, &[]);
        }
        let end = end_of(&mut source);
        assert_eq!(end.reason, EndReason::PoweredOff, "{}", end.detail);
        assert!(monitor.wait().success());
    }
}

/// Waits for the end of a VM. What it was asked for until then was done, or not because it had ended.
fn end_of(source: &mut Controller) -> VmEnd {
    loop {
        let (message, mut fds) = source.channel.recv::<Message>().unwrap().expect("an end");
        match message {
            Message::Event(Event::Ended(end)) => return end,
            Message::Event(_) | Message::Reply(Reply::Paused | Reply::Resumed) => {}
            Message::Reply(Reply::Branched { .. }) => {
                let _ = rustix::process::pidfd_send_signal(fds.remove(0), rustix::process::Signal::KILL);
            }
            Message::Reply(Reply::Error { message }) => assert!(message.contains("ended"), "{message}"),
            Message::Reply(reply) => panic!("{reply:?}"),
        }
    }
}

#[test]
fn only_a_vm_is_branched_paused_and_resumed() {
    let test = "only_a_vm_is_branched_paused_and_resumed";
    let monitor = start(&[]);
    let mut idle = monitor.attach();
    assert!(Branching::new().run(&mut idle).is_err_and(|message| message.contains("no VM")));
    let Some((_monitor, mut template)) = run(test, counter()) else { return };
    assert_eq!(template.request(&Request::Freeze, &[]), Reply::Frozen);
    for controller in [&mut idle, &mut template] {
        for request in [Request::Pause, Request::Resume] {
            let reply = controller.request(&request, &[]);
            assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
        }
    }
    assert!(Branching::new().run(&mut template).is_err());
    fork(&mut template, "child");
}

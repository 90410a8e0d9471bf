//! Layers of memory and of disks through the binary: saved, chained, merged and replaced as the controller
//! has it done.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;
#[path = "support/templates.rs"]
mod templates;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;
use std::process::Command;
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::control::{
    DiskFiles, Event, FdRef, MergeConfig, ReplacedLayers, Reply, Request, SaveConfig, SaveProgress,
    WaitStatus,
};
use forkd_vmm::boot::BootSource;
use forkd_vmm::devices::serial::ConsoleLog;
use forkd_vmm::devices::virtio::VirtioDevice;
use forkd_vmm::devices::virtio::block::{Block, Disk};
use forkd_vmm::devices::virtio::buffers::Buffers;
use forkd_vmm::state::{BlockState, DevicePart, Frozen, SaveFiles, file};
use forkd_vmm::vm::{self, Vm, VmParts};
use forkd_vmm::{asm_guest, guest_code, seccomp};
use support::{Controller, Fork, Forked, Monitor, file_with, open_kvm, test_name};
use templates::{fork, freeze, read_only, start};
use vm_memory::{Bytes, GuestAddress, VolatileSlice};

const PAGE: u64 = 4096;
const MIB: u64 = 64;

guest_code! {
    /// Reports ready, then waits for its generation id to change. Prints the number of its ancestors, counts
    /// itself, reports ready, and waits again.
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
    "mov al, 10",
    "out dx, al",
    "inc qword ptr [0x200000]",
    "jmp 2b",
}

fn temporary() -> File {
    tempfile::tempfile().unwrap()
}

fn clones(files: &[File]) -> Vec<File> {
    files.iter().map(|file| file.try_clone().unwrap()).collect()
}

fn pagemap(pid: u32) -> File {
    File::open(format!("/proc/{pid}/pagemap")).unwrap()
}

/// A template of the guest `ancestor`.
fn template(kvm: File) -> (Monitor, Controller) {
    let monitor = start(&[]);
    let controller = freeze(kvm, &monitor, ancestor());
    (monitor, controller)
}

/// A request to save, with the descriptors it names.
struct Save {
    config: SaveConfig,
    fds: Vec<OwnedFd>,
    state: File,
    memory: File,
    progress: File,
}

impl Save {
    fn new(parent: &[File], pagemap: Option<File>) -> Save {
        let [state, memory, progress] = [(); 3].map(|()| temporary());
        let mut fds: Vec<OwnedFd> =
            [&state, &memory, &progress].map(|file| file.try_clone().unwrap().into()).into();
        let mut add = |file: File| {
            fds.push(file.into());
            FdRef(fds.len() - 1)
        };
        let config = SaveConfig {
            child: "saver".into(),
            state: FdRef(0),
            memory: Some(FdRef(1)),
            parent: parent.iter().map(|layer| add(read_only(layer))).collect(),
            pagemap: pagemap.map(&mut add),
            disks: Vec::new(),
            progress: Some(FdRef(2)),
        };
        Save { config, fds, state, memory, progress }
    }

    fn send(&self, template: &mut Controller) -> Reply {
        let fds: Vec<_> = self.fds.iter().map(AsFd::as_fd).collect();
        template.request(&Request::Save(self.config.clone()), &fds)
    }

    /// Saves, waits for the end, and checks the reported progress.
    fn run(&self, template: &mut Controller) {
        let reply = self.send(template);
        assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
        finished(template, "saver");
        let progress = self.progress();
        assert_eq!((progress.scanned_bytes, progress.total), (MIB << 20, MIB << 20));
    }

    fn progress(&self) -> SaveProgress {
        let mut bytes = [0; SaveProgress::LENGTH];
        let _ = self.progress.read_at(&mut bytes, 0).unwrap();
        SaveProgress::from_bytes(bytes)
    }
}

/// Waits until `child` has ended and acknowledges it.
fn end_of(template: &mut Controller, child: &str) -> WaitStatus {
    let status = loop {
        if let Event::ChildEnded { child: ended, status } = template.event().0
            && ended == child
        {
            break status;
        }
    };
    let children = vec![child.into()];
    assert_eq!(template.request(&Request::Acknowledge { children }, &[]), Reply::Acknowledged);
    status
}

/// Waits until `child` has ended well.
fn finished(template: &mut Controller, child: &str) {
    assert_eq!(end_of(template, child), WaitStatus::Exited(0));
}

/// Asks a new monitor to become a template of these files.
fn load(state: &File, layers: &[File], disks: &[(&File, &[File])]) -> (Monitor, Controller, Reply) {
    let monitor = start(&[]);
    let mut template = monitor.attach();
    let mut fds: Vec<OwnedFd> = vec![open_kvm("").unwrap().into(), read_only(state).into()];
    let mut add = |file: &File| {
        fds.push(read_only(file).into());
        FdRef(fds.len() - 1)
    };
    let memory = layers.iter().map(&mut add).collect();
    let mut disk = |(base, layers): &(&File, &[File])| DiskFiles {
        base: add(base),
        layers: layers.iter().map(&mut add).collect(),
    };
    let disks = disks.iter().map(&mut disk).collect();
    let config = support::load_config(memory, disks);
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let reply = template.request(&Request::Load(config), &fds);
    (monitor, template, reply)
}

#[test]
fn generations_are_saved_as_layers_and_each_comes_back() {
    let Some(kvm) = open_kvm(test_name!()) else { return };
    let (monitor, mut root) = template(kvm);
    let base = Save::new(&[], Some(pagemap(monitor.pid())));
    base.run(&mut root);
    let mut layers = vec![base.memory];
    let mut states = vec![base.state];
    // Each is a child of the one before, frozen: the first three of the warmed guest itself, which is
    // anonymous, the others of what was loaded from layers.
    let mut owners: Vec<Monitor> = vec![monitor];
    let mut children: Vec<Forked> = Vec::new();
    let mut parent = Some(root);
    for depth in 1..=5u64 {
        let mut child = match (&mut parent, children.last_mut()) {
            (Some(parent), _) => fork(parent, "child"),
            (None, Some(parent)) => fork(&mut parent.controller, "child"),
            (None, None) => panic!("nobody to fork"),
        };
        parent = None;
        assert_eq!(child.console(), format!("{}\n", depth - 1));
        assert_eq!(child.controller.request(&Request::Freeze, &[]), Reply::Frozen);
        let save = Save::new(&layers, Some(pagemap(child.pid as u32)));
        save.run(&mut child.controller);
        let slow = Save::new(&layers, None);
        slow.run(&mut child.controller);
        let length = save.memory.metadata().unwrap().len();
        assert_eq!(length, slow.memory.metadata().unwrap().len(), "the pagemap misses pages");
        assert_eq!(save.progress().written, slow.progress().written);
        // Its counter, its generation id, perhaps its page tables and its stack.
        assert!((2..8).contains(&(save.progress().written / PAGE)), "{:?}", save.progress());
        assert!(length < save.progress().written * 11 / 10, "{length} bytes for {:?}", save.progress());
        layers.push(save.memory);
        states.push(save.state);
        children.push(child);
        if depth == 3 {
            let (monitor, template, reply) = load(&states[3], &layers, &[]);
            assert_eq!(reply, Reply::Loaded);
            owners.push(monitor);
            parent = Some(template);
        }
    }
    for depth in 0..=5 {
        let (_monitor, mut template, reply) = load(&states[depth], &layers[..=depth], &[]);
        assert_eq!(reply, Reply::Loaded);
        assert_eq!(fork(&mut template, "a").console(), format!("{depth}\n"));
        assert_eq!(fork(&mut template, "b").console(), format!("{depth}\n"));
    }
    // All in one again.
    let (_monitor, mut template, _) = load(&states[5], &layers, &[]);
    let flat = Save::new(&[], None);
    flat.run(&mut template);
    let (_monitor, mut template, reply) = load(&flat.state, &[flat.memory], &[]);
    assert_eq!(reply, Reply::Loaded);
    assert_eq!(fork(&mut template, "flat").console(), "5\n");
    drop(owners);
}

#[test]
fn layers_that_cannot_be_used_are_refused_and_nothing_starts() {
    let Some(kvm) = open_kvm(test_name!()) else { return };
    let (monitor, mut root) = template(kvm);
    let base = Save::new(&[], None);
    base.run(&mut root);
    let mut child = fork(&mut root, "child");
    assert_eq!(child.controller.request(&Request::Freeze, &[]), Reply::Frozen);
    let layer = Save::new(std::slice::from_ref(&base.memory), None);
    layer.run(&mut child.controller);
    let pick = |files: &[&File]| files.iter().map(|file| file.try_clone().unwrap()).collect::<Vec<_>>();
    let refused = |reply: Reply, text: &str| match reply {
        Reply::Error { message } => assert!(message.contains(text), "{message}"),
        other => panic!("{other:?}"),
    };
    for (layers, text) in [
        (pick(&[]), "at least one is needed"),
        (pick(&[&layer.memory, &base.memory]), "memory layer 0 cannot be used: it is truncated"),
        (pick(&[&base.memory, &base.memory]), "memory layer 1 cannot be used"),
        (pick(&[&base.memory, &layer.memory, &layer.memory]), "memory layer 2 cannot be used"),
    ] {
        let (_monitor, _, reply) = load(&layer.state, &layers, &[]);
        refused(reply, text);
        // A saver takes no other parent either.
        if !layers.is_empty() {
            refused(Save::new(&layers, None).send(&mut child.controller), text);
        }
    }
    let wrong = Save::new(std::slice::from_ref(&base.memory), Some(pagemap(std::process::id())));
    refused(wrong.send(&mut child.controller), "not that of the template's process");
    let mut disks = Save::new(&[], None);
    disks.config.disks = vec![None];
    refused(disks.send(&mut child.controller), "0 disks");
    let children = child.controller.request(&Request::Children, &[]);
    assert_eq!(children, Reply::Children { children: vec![] });

    let length = layer.memory.metadata().unwrap().len();
    layer.memory.set_len(length - 1).unwrap();
    let chain = pick(&[&base.memory, &layer.memory]);
    refused(load(&layer.state, &chain, &[]).2, "memory layer 1 cannot be used");
    drop(monitor);
}

#[test]
fn a_saver_that_is_killed_half_way_leaves_the_template_well() {
    let Some(kvm) = open_kvm(test_name!()) else { return };
    let (monitor, mut template) = template(kvm);
    let (mut killed, begun) = (0, Instant::now());
    // At several moments, and on until one of them was half-way.
    for round in 0u64.. {
        if round >= 5 && (killed > 0 || begun.elapsed() > Duration::from_secs(60)) {
            break;
        }
        let save = Save::new(&[], None);
        let fds: Vec<_> = save.fds.iter().map(AsFd::as_fd).collect();
        template.channel.send(&Request::Save(save.config.clone()), &fds).unwrap();
        let (reply, fds) = template.reply_with_fds();
        assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
        std::thread::sleep(Duration::from_millis(round % 5 * 5));
        let _ = rustix::process::pidfd_send_signal(&fds[0], rustix::process::Signal::KILL);
        let status = end_of(&mut template, "saver");
        assert!(matches!(status, WaitStatus::Signaled(9) | WaitStatus::Exited(0)), "{status:?}");
        killed += u32::from(status == WaitStatus::Signaled(9));
        assert_eq!(fork(&mut template, &format!("child{round}")).console(), "0\n");
    }
    assert!(killed > 0, "all of them were faster");
    let save = Save::new(&[], Some(pagemap(monitor.pid())));
    save.run(&mut template);
    let (_monitor, mut loaded, reply) = load(&save.state, &[save.memory], &[]);
    assert_eq!(reply, Reply::Loaded);
    assert_eq!(fork(&mut loaded, "child").console(), "0\n");
}

#[test]
fn a_saver_that_cannot_write_says_why_behind_its_progress() {
    let Some(kvm) = open_kvm(test_name!()) else { return };
    let (_monitor, mut template) = template(kvm);
    let mut save = Save::new(&[], None);
    let full = File::options().read(true).write(true).open("/dev/full").unwrap();
    save.fds[save.config.memory.unwrap().0] = full.into();
    let reply = save.send(&mut template);
    assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
    assert_eq!(end_of(&mut template, "saver"), WaitStatus::Exited(1));
    let mut why = vec![0; SaveProgress::MAX_REASON];
    let length = save.progress.read_at(&mut why, SaveProgress::LENGTH as u64).unwrap();
    let why = String::from_utf8(why[..length].to_vec()).unwrap();
    assert!(why.starts_with("cannot write the memory layer: No space left on device"), "{why}");
    assert_eq!((save.progress().scanned_bytes, save.progress().total), (0, MIB << 20));

    let save = Save::new(&[], None);
    save.run(&mut template);
    let length = save.progress.metadata().unwrap().len();
    assert_eq!(length, SaveProgress::LENGTH as u64, "nothing behind it");
}

/// A frozen guest in this process.
fn frozen_here(kvm: File, devices: Vec<Box<dyn VirtioDevice>>) -> Frozen {
    let kernel = file_with(&asm_guest::elf_kernel(ancestor()));
    let vm = Vm::build(VmParts {
        kvm,
        vcpus: 1,
        mem_mib: MIB,
        source: BootSource { kernel, initramfs: None, cmdline: String::new() },
        console: Arc::new(ConsoleLog::new(temporary(), 4096).unwrap()),
        devices,
    });
    // The process of a test has threads and heaps of its own, so its calls are not the monitor's.
    let running = vm.unwrap().start(seccomp::Mode::Log).unwrap();
    let start = Instant::now();
    while !running.is_ready() {
        assert!(start.elapsed() < Duration::from_secs(20), "the guest is not ready");
        std::thread::sleep(Duration::from_millis(1));
    }
    running.freeze().unwrap()
}

/// Saves it from this process; returns state and memory.
fn save_here(frozen: &mut Frozen, parent: &[File]) -> (File, File) {
    let (state, memory) = (temporary(), temporary());
    let files = SaveFiles {
        state: state.try_clone().unwrap(),
        memory: Some(memory.try_clone().unwrap()),
        parent: clones(parent),
        pagemap: Some(pagemap(std::process::id())),
        disks: Vec::new(),
        progress: None,
    };
    let saving = frozen.prepare_save(files).unwrap();
    frozen.save(saving).unwrap();
    (state, memory)
}

#[test]
fn a_template_of_thousands_of_scattered_pages_has_few_mappings_and_forks() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let (mut state, base) = save_here(&mut frozen_here(kvm, Vec::new()), &[]);
    let mut layers = vec![base];
    // Every third page of 48 MiB that the guest does not use, in four layers.
    let pages: Vec<u64> = (0x1000..0x1000 + (48 << 8)).step_by(3).collect();
    for offset in 0..4 {
        let kvm = vm::open_kvm(open_kvm(test).unwrap()).unwrap();
        let mut frozen = Frozen::load(kvm, file::read(&state).unwrap(), clones(&layers), Vec::new()).unwrap();
        for page in pages.iter().skip(offset).step_by(4) {
            frozen.memory().write_obj(*page, GuestAddress(page * PAGE)).unwrap();
        }
        let layer;
        (state, layer) = save_here(&mut frozen, &layers);
        layers.push(layer);
    }
    let (monitor, mut template, reply) = load(&state, &layers, &[]);
    assert_eq!(reply, Reply::Loaded);
    let maps = std::fs::read_to_string(format!("/proc/{}/maps", monitor.pid())).unwrap();
    assert!(maps.lines().count() < 256, "{} mappings", maps.lines().count());
    assert_eq!(fork(&mut template, "child").console(), "0\n");
    // What it has is what was written, and nothing of it differs from where it came from.
    let save = Save::new(&layers, Some(pagemap(monitor.pid())));
    save.run(&mut template);
    assert_eq!(save.progress().written, 0);
    let flat = Save::new(&[], None);
    flat.run(&mut template);
    for page in pages {
        let mut bytes = [0; 8];
        flat.memory.read_exact_at(&mut bytes, page * PAGE).unwrap();
        assert_eq!(u64::from_le_bytes(bytes), page);
    }
}

const DISK: usize = 64 * 4096 + 1024;

/// What a disk made of these files and this state reads.
fn read_disk(base: &File, layers: &[File], state: &BlockState) -> Vec<u8> {
    let disk = Disk::frozen(base.try_clone().unwrap(), clones(layers), state).unwrap();
    let mut bytes = vec![0; DISK];
    let mut buffers = Buffers::default();
    buffers.push(VolatileSlice::from(&mut bytes[..]));
    disk.read(0, buffers).unwrap();
    bytes
}

fn disk_state(state: &File) -> BlockState {
    let state = file::read(state).unwrap();
    let block = state.devices.into_iter().find_map(|device| match device.part {
        DevicePart::Block(state) => Some(state),
        _ => None,
    });
    block.unwrap()
}

#[test]
fn a_templates_disk_reads_the_same_when_its_layers_are_merged() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let base = file_with(&(0..DISK).map(|at| (at % 249) as u8).collect::<Vec<_>>());
    let layers: Vec<File> = (0..5).map(|_| temporary()).collect();
    let mut disk = Disk::new(base.try_clone().unwrap(), Some(layers[0].try_clone().unwrap())).unwrap();
    let mut expected: Vec<u8> = (0..DISK).map(|at| (at % 249) as u8).collect();
    for (index, layer) in layers.iter().enumerate() {
        if index > 0 {
            disk.add_layer(Some(layer.try_clone().unwrap())).unwrap();
        }
        for (start, length) in [(index * 5000 / 512 * 512, 9216), (index * 512, 512), (DISK - 512, 512)] {
            // One of them writes zeros.
            let mut bytes = vec![if index == 2 { 0 } else { 200 + index as u8 }; length];
            expected[start..start + length].copy_from_slice(&bytes);
            let mut buffers = Buffers::default();
            buffers.push(VolatileSlice::from(&mut bytes[..]));
            disk.write(start as u64, buffers).unwrap();
        }
    }
    let mut frozen = frozen_here(kvm, vec![Box::new(Block::new(disk, "disk"))]);
    let (state, memory) = save_here(&mut frozen, &[]);
    assert_eq!(read_disk(&base, &layers, &disk_state(&state)), expected);

    let (_monitor, mut template, reply) = load(&state, &[memory], &[(&base, &layers)]);
    assert_eq!(reply, Reply::Loaded);
    let layers_of = |template: &mut Controller| {
        template.channel.send(&Request::Layers, &[]).unwrap();
        let (reply, fds) = template.reply_with_fds();
        let count = fds.len();
        assert_eq!(reply, Reply::Layers { disks: vec![(0..count).map(FdRef).collect()] });
        fds.into_iter().map(File::from).collect::<Vec<_>>()
    };
    assert_eq!(layers_of(&mut template).len(), 5);

    // Three of five become one.
    let merged = temporary();
    let replaced = |count, layer| vec![Some(ReplacedLayers { count, layer })];
    let merge =
        |count| Request::Merge(MergeConfig { child: "merger".into(), disks: replaced(count, FdRef(0)) });
    assert!(matches!(template.request(&merge(6), &[merged.as_fd()]), Reply::Error { .. }));
    let sealed = read_only(&merged);
    assert!(matches!(template.request(&merge(3), &[sealed.as_fd()]), Reply::Error { .. }), "read-only");
    assert!(matches!(template.request(&merge(3), &[merged.as_fd()]), Reply::Forked { .. }));
    finished(&mut template, "merger");
    let replace = |count| Request::ReplaceLayers { disks: replaced(count, FdRef(0)) };
    for (request, file) in [
        (replace(3), &merged),
        (replace(6), &sealed),
        (replace(3), &read_only(&temporary())),
        (Request::ReplaceLayers { disks: vec![] }, &sealed),
    ] {
        let reply = template.request(&request, &[file.as_fd()]);
        assert!(matches!(reply, Reply::Error { .. }), "{reply:?}");
    }
    assert_eq!(template.request(&replace(3), &[sealed.as_fd()]), Reply::Replaced);
    let left = layers_of(&mut template);
    assert_eq!(left.len(), 3);

    // Saved as they are, and as one.
    let save = Save::new(&[], None);
    save.run(&mut template);
    let state = disk_state(&save.state);
    assert_eq!(state.files, 4);
    assert_eq!(read_disk(&base, &left, &state), expected);
    let mut save = Save::new(&[], None);
    let one = temporary();
    save.fds.push(one.try_clone().unwrap().into());
    save.config.disks = vec![Some(FdRef(save.fds.len() - 1))];
    save.run(&mut template);
    let state = disk_state(&save.state);
    assert_eq!(state.files, 2);
    assert_eq!(read_disk(&base, &[one.try_clone().unwrap()], &state), expected);
    assert_eq!(layers_of(&mut template).len(), 3, "the template keeps its own");

    // A child of either finds its disk, and its layer on top.
    let (_monitor, mut loaded, reply) = load(&save.state, &[save.memory], &[(&base, &[one])]);
    assert_eq!(reply, Reply::Loaded);
    for template in [&mut template, &mut loaded] {
        let mut child = Fork::new("child");
        let layer = child.add(temporary());
        child.config.layers = vec![Some(layer)];
        let mut child = child.run(template).unwrap();
        child.ready();
        assert_eq!(child.console(), "0\n");
    }
}

#[test]
fn whether_a_state_fits_this_host_can_be_asked_without_loading_it() {
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let (state, _) = save_here(&mut frozen_here(kvm, Vec::new()), &[]);
    let ask = |kvm: File, state: &File| {
        let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
        command.arg("check").stdin(read_only(state));
        support::pass_as_3(&mut command, kvm);
        let output = command.output().unwrap();
        (output.status.success(), String::from_utf8(output.stderr).unwrap())
    };
    let kvm = || open_kvm(test).unwrap();
    assert_eq!(ask(kvm(), &state), (true, String::new()));
    let mut bytes = vec![0; state.metadata().unwrap().len() as usize];
    state.read_exact_at(&mut bytes, 0).unwrap();
    let middle = bytes.len() / 2;
    bytes[middle] ^= 0xff;
    for (wrong, why) in [(bytes.clone(), "damaged"), (bytes[..middle].to_vec(), "cut off"), (vec![], "empty")]
    {
        let (fits, said) = ask(kvm(), &file_with(&wrong));
        assert!(!fits && said.starts_with("forkd-vmm: "), "{why}: {said}");
    }
    let (fits, said) = ask(File::open("/dev/null").unwrap(), &state);
    assert!(!fits && said.contains("KVM"), "{said}");
}

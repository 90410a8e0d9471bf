//! A VM that boots on the frozen disk layers of another one, without that one's memory. The guests drive their disk
//! themselves.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/branching.rs"]
mod branching;
mod support;
#[path = "support/templates.rs"]
mod templates;

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use branching::{Branch, Branching, number};
use forkd_protocol::control::{
    BootConfig, DiskConfig, Event, FdRef, Reply, Request, SaveConfig, SaveProgress, WaitStatus,
};
use forkd_vmm::state::{BlockState, file};
use forkd_vmm::{asm_guest, guest_code};
use support::{Boot, Controller, Monitor, file_with, open_kvm, test_name, wait_until};
use templates::{boot_ready, read_only, start};

/// The size of the disk, which is [`FRESH`] all over at first.
const DISK: usize = 1 << 20;
const FRESH: u8 = 0x77;
const BLOCK: u64 = 4096;

// Both guests begin with the same driver: the registers of the first device get a page, then the device gets one
// queue. `7:` does the request in the header for the data's block and waits for its end.
macro_rules! with_driver {
    ($(#[$meta:meta])* fn $name:ident, $($line:expr),+ $(,)?) => {
        guest_code! {
            $(#[$meta])*
            fn $name,
            "mov eax, 0xd0000083",
            "mov qword ptr [0x310400], rax",
            "mov qword ptr [0xa018], 0x310003",
            "mov ebx, 0xd0000000",
            // Reset, acknowledge, driver; VIRTIO_F_VERSION_1; features are chosen.
            "mov dword ptr [rbx + 0x70], 0",
            "mov dword ptr [rbx + 0x70], 1",
            "mov dword ptr [rbx + 0x70], 3",
            "mov dword ptr [rbx + 0x24], 1",
            "mov dword ptr [rbx + 0x20], 1",
            "mov dword ptr [rbx + 0x70], 11",
            // The queue, and the device goes on.
            "mov dword ptr [rbx + 0x30], 0",
            "mov dword ptr [rbx + 0x38], 8",
            "mov dword ptr [rbx + 0x80], 0x300000",
            "mov dword ptr [rbx + 0x84], 0",
            "mov dword ptr [rbx + 0x90], 0x301000",
            "mov dword ptr [rbx + 0x94], 0",
            "mov dword ptr [rbx + 0xa0], 0x302000",
            "mov dword ptr [rbx + 0xa4], 0",
            "mov dword ptr [rbx + 0x44], 1",
            "mov dword ptr [rbx + 0x70], 15",
            // Header, data, status.
            "mov qword ptr [0x300000], 0x303000",
            "mov dword ptr [0x300008], 16",
            "mov dword ptr [0x30000c], 0x10001",
            "mov qword ptr [0x300010], 0x304000",
            "mov dword ptr [0x300018], 4096",
            "mov qword ptr [0x300020], 0x305000",
            "mov dword ptr [0x300028], 1",
            "mov dword ptr [0x30002c], 2",
            "xor r8d, r8d",
            "jmp 8f",
            // In: eax is the type of the request (1 writes), ecx the sector.
            "7: mov dword ptr [0x303000], eax",
            "mov dword ptr [0x303004], 0",
            "mov qword ptr [0x303008], rcx",
            "xor eax, 1",
            "shl eax, 1",
            "or eax, 0x20001",
            "mov dword ptr [0x30001c], eax",
            "inc r8w",
            "mov word ptr [0x301002], r8w",
            "mov dword ptr [rbx + 0x50], 0",
            "6: pause",
            "cmp word ptr [0x302002], r8w",
            "jne 6b",
            // A request that failed ends the guest.
            "cmp byte ptr [0x305000], 0",
            "je 5f",
            "ud2",
            "5: ret",
            "8: nop",
            $($line,)+
        }
    };
}

with_driver! {
    /// Counts, and writes the count all over block 0, then over block 1, for ever. Reports ready after each round.
    fn writer,
    "xor r9d, r9d",
    "2: inc r9",
    "mov rax, r9",
    "mov edi, 0x304000",
    "mov ecx, 512",
    "rep stosq",
    "mov eax, 1",
    "xor ecx, ecx",
    "call 7b",
    "mov eax, 1",
    "mov ecx, 8",
    "call 7b",
    "mov dx, 0x602",
    "out dx, al",
    "jmp 2b",
}

with_driver! {
    /// Prints a line of the first eight bytes of the blocks 0, 1 and 2, writes over block 3 what was in block 0, reports ready,
    /// and sleeps.
    fn reader,
    "xor r9d, r9d",
    "2: xor eax, eax",
    "mov rcx, r9",
    "call 7b",
    "mov esi, 0x304000",
    "mov ecx, 8",
    "mov dx, 0x3f8",
    "4: lodsb",
    "out dx, al",
    "dec ecx",
    "jnz 4b",
    "add r9, 8",
    "cmp r9, 24",
    "jne 2b",
    "mov al, 10",
    "out dx, al",
    "xor eax, eax",
    "xor ecx, ecx",
    "call 7b",
    "mov eax, 1",
    "mov ecx, 24",
    "call 7b",
    "mov dx, 0x602",
    "out dx, al",
    "cli",
    "3: hlt",
    "jmp 3b",
}

fn temporary() -> File {
    tempfile::tempfile().unwrap()
}

fn clone(file: &File) -> File {
    file.try_clone().unwrap()
}

/// A running writer.
struct Source {
    base: File,
    controller: Controller,
    _monitor: Monitor,
}

impl Source {
    fn boot(test: &str) -> Option<Source> {
        let kvm = open_kvm(test)?;
        let base = file_with(&[FRESH; DISK]);
        let monitor = start(&[]);
        let mut controller = monitor.attach();
        let mut boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(writer())));
        let disk = boot.add(read_only(&base));
        let layer = boot.add(temporary());
        boot.config.disks = vec![DiskConfig { base: disk, layer: Some(layer), frozen: Vec::new() }];
        boot_ready(&boot, &mut controller);
        Some(Source { base, controller, _monitor: monitor })
    }

    /// Branches it; returns the branch and the layer that the branch froze.
    fn branch(&mut self) -> (Branch, File) {
        let mut branching = Branching::new();
        branching.fds.push(temporary().into());
        branching.config.layers = vec![Some(FdRef(1))];
        let mut branch = branching.run(&mut self.controller).unwrap();
        let layer = read_only(&File::from(branch.layers.remove(0)));
        (branch, layer)
    }
}

/// Saves the disks of a branch, and nothing of its memory, with all layers as one if `merged` is given.
fn save_disks(branch: &mut Branch, merged: Option<&File>) -> File {
    let (state, progress) = (temporary(), temporary());
    let mut fds: Vec<OwnedFd> = vec![clone(&state).into(), clone(&progress).into()];
    fds.extend(merged.map(|file| clone(file).into()));
    let save = SaveConfig {
        child: "saver".into(),
        state: FdRef(0),
        memory: None,
        parent: Vec::new(),
        pagemap: None,
        disks: vec![merged.map(|_| FdRef(2))],
        progress: Some(FdRef(1)),
    };
    let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
    let reply = branch.controller.request(&Request::Save(save), &fds);
    assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
    let ended = Event::ChildEnded { child: "saver".into(), status: WaitStatus::Exited(0) };
    while branch.controller.event().0 != ended {}
    let children = vec!["saver".into()];
    assert_eq!(branch.controller.request(&Request::Acknowledge { children }, &[]), Reply::Acknowledged);
    let mut bytes = [0; SaveProgress::LENGTH];
    progress.read_exact_at(&mut bytes, 0).unwrap();
    assert_eq!(SaveProgress::from_bytes(bytes).total, 0, "no memory is saved");
    state
}

/// A request to boot the reader on `base`, frozen `layers`, and a fresh layer.
fn cold(kvm: File, base: &File, layers: &[File], state: &File) -> (Boot, File) {
    let mut boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(reader())));
    let top = temporary();
    let disk = DiskConfig {
        base: boot.add(read_only(base)),
        layer: Some(boot.add(clone(&top))),
        frozen: layers.iter().map(|layer| boot.add(read_only(layer))).collect(),
    };
    boot.config.disks = vec![disk];
    boot.config.disk_state = Some(boot.add(read_only(state)));
    (boot, top)
}

/// Boots the reader on these files. Returns what it found in the blocks 0, 1 and 2.
fn read_back(kvm: File, base: &File, layers: &[File], state: &File) -> [u64; 3] {
    let monitor = start(&[]);
    let mut controller = monitor.attach();
    let (boot, top) = cold(kvm, base, layers, state);
    boot_ready(&boot, &mut controller);
    wait_until("the guest prints nothing", || boot.console.metadata().unwrap().len() >= 25);
    let found = [0, 8, 16].map(|offset| number(&boot.console, offset));
    assert_eq!(number(&top, 3 * BLOCK), found[0], "the new layer takes what the guest writes");
    found
}

const FRESH_NUMBER: u64 = u64::from_ne_bytes([FRESH; 8]);

/// A branch of `source` that was taken at least some rounds after `count`, and its disk's layers: those of the
/// branches before it are below its own.
fn branch_after(source: &mut Source, count: u64, layers: &mut Vec<File>) -> Branch {
    let mut later = None;
    wait_until("the guest does not go on writing", || {
        let (branch, layer) = source.branch();
        let written = layer.metadata().unwrap().len() >= 8 && number(&layer, 0) > count + 2;
        layers.push(layer);
        later = written.then_some(branch);
        written || layers.len() > 20
    });
    later.expect("no branch has what the guest wrote")
}

#[test]
fn a_vm_boots_on_the_layers_of_a_branch_and_sees_the_instant_of_the_branch() {
    let Some(mut source) = Source::boot(test_name!()) else { return };
    let base = clone(&source.base);
    let boot = |layers: &[File], state: &File| read_back(open_kvm("").unwrap(), &base, layers, state);
    let (mut first, layer) = source.branch();
    let mut layers = vec![layer];
    let state = save_disks(&mut first, None);
    let found = boot(&layers, &state);
    let [zero, one, fresh] = found;
    assert!(zero > 0 && (one == zero || one + 1 == zero), "{found:?}");
    assert_eq!(fresh, FRESH_NUMBER, "a block that was never written comes from the base");

    // The source goes on. A later branch has several layers, or one that is merged from them.
    let mut later = branch_after(&mut source, zero, &mut layers);
    let stacked = boot(&layers, &save_disks(&mut later, None));
    assert!(stacked[0] > zero + 2, "{stacked:?}");
    let merged = temporary();
    let merged_state = save_disks(&mut later, Some(&merged));
    assert_eq!(boot(&[merged], &merged_state), stacked);
    // And the first one is what it was.
    assert_eq!(boot(&layers[..1], &state), found);
}

fn disks_file(states: &[BlockState]) -> File {
    let file = temporary();
    file::write_disks(states, &file).unwrap();
    file
}

#[test]
fn a_damaged_block_map_is_refused_and_the_monitor_goes_on() {
    let Some(mut source) = Source::boot(test_name!()) else { return };
    let (mut branch, layer) = source.branch();
    let state = save_disks(&mut branch, None);
    let good = file::read_disks(&state, DISK as u64).unwrap();
    assert_eq!(good.len(), 1);
    let monitor = start(&[]);
    let mut controller = monitor.attach();
    let mut refused = |layers: &[File], state: &File, change: &dyn Fn(&mut BootConfig), why: &str| {
        let (mut boot, _top) = cold(open_kvm("").unwrap(), &source.base, layers, state);
        change(&mut boot.config);
        match boot.send(&mut controller) {
            Reply::Error { message } => assert!(message.contains(why), "{message}"),
            other => panic!("{why}: {other:?}"),
        }
    };
    let as_is = |_: &mut BootConfig| ();
    let layers = [layer];
    let changed = |change: &dyn Fn(&mut BlockState)| {
        let mut state = good[0].clone();
        change(&mut state);
        disks_file(&[state])
    };
    refused(&layers, &changed(&|state| state.runs[0].0 += 1), &as_is, "map");
    refused(&layers, &changed(&|state| state.runs = vec![(u64::MAX, 1), (2, 1)]), &as_is, "map");
    refused(&layers, &changed(&|state| state.runs = vec![(256, 2)]), &as_is, "map");
    refused(&layers, &changed(&|state| state.runs = vec![(256, 1)]), &as_is, "truncated");
    refused(&layers, &changed(&|state| state.size += 512), &as_is, "its base has");
    refused(&layers, &changed(&|state| state.files = 3), &as_is, "files");
    refused(&layers, &changed(&|state| state.writable = false), &as_is, "read-only");
    refused(&[], &state, &as_is, "files");
    refused(&layers, &disks_file(&[]), &as_is, "disk_state is of 0 disks");
    refused(&layers, &disks_file(&[good[0].clone(), good[0].clone()]), &as_is, "disk_state is of 2 disks");
    refused(&layers, &file_with(b"forkdvm"), &as_is, "truncated");
    refused(&layers, &file_with(&[0; 100]), &as_is, "not a state file");
    let with_memory = file_with(include_bytes!("../../../fuzz/corpus/state_file/file"));
    refused(&layers, &with_memory, &as_is, "a snapshot with memory");
    let no_state = |config: &mut BootConfig| config.disk_state = None;
    refused(&layers, &state, &no_state, "no disk_state");
    let no_layer = |config: &mut BootConfig| config.disks[0].layer = None;
    refused(&layers, &state, &no_layer, "needs a layer");

    let (boot, _top) = cold(open_kvm("").unwrap(), &source.base, &layers, &state);
    boot_ready(&boot, &mut controller);
}

#[test]
fn a_state_of_disks_alone_is_no_snapshot_with_memory() {
    let disk = BlockState { id: [1; 20], size: 4096, writable: true, files: 1, runs: vec![(1, 0)] };
    let state = disks_file(std::slice::from_ref(&disk));
    assert_eq!(file::read_disks(&state, 4096).unwrap(), [disk]);
    let text = file::read(&state).unwrap_err().to_string();
    assert!(text.contains("can only boot on it"), "{text}");
}

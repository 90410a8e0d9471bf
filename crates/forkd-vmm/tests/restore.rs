//! VMs frozen and thawed, in memory and through files, with guests of a few instructions. A thaw is
//! meant for a forked child; here the same process plays it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/in_process.rs"]
mod in_process;
mod support;

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::os::unix::net::{UnixDatagram, UnixListener};
use std::time::{Duration, Instant};

use forkd_vmm::boot::cpuid::{self, Grant};
use forkd_vmm::devices::virtio::VirtioDevice;
use forkd_vmm::devices::virtio::block::{Block, Disk};
use forkd_vmm::devices::virtio::net::Net;
use forkd_vmm::devices::virtio::rng::Rng;
use forkd_vmm::devices::virtio::vsock::Vsock;
use forkd_vmm::layout::{GENERATION_GSI, GENERATION_ID, SERIAL_GSI};
use forkd_vmm::memory::HUGE_PAGE;
use forkd_vmm::state::{ChildParts, Frozen, MachineState, MemoryRange, SaveFiles, file};
use forkd_vmm::vm::{self, Running, Vm, VmParts};
use forkd_vmm::{GuestMemory, guest_code};
use in_process::{console, parts, read, start};
use kvm_bindings::kvm_cpuid_entry2;
use support::test_name;
use vm_memory::{Bytes, GuestAddress, GuestMemoryBackend, GuestMemoryRegion};

/// What a child without devices gets.
fn nothing() -> ChildParts {
    ChildParts {
        console: console(),
        layers: Vec::new(),
        tap: None,
        vsock: None,
        guest_connections: Box::new(|_, _| false),
    }
}

/// Waits until the number at `address` is more than `than`.
fn wait_for_more(running: &Running, address: u64, than: u64) {
    let start = Instant::now();
    while read(running.memory(), address) <= than {
        assert!(running.end().is_none(), "{:?}", running.end());
        assert!(start.elapsed() < Duration::from_secs(20), "the guest stands still");
        std::thread::sleep(Duration::from_millis(1));
    }
}

guest_code! {
    /// Counts in a register and shows it in memory, below 4 GiB.
    fn count,
    "xor eax, eax",
    "2: inc rax",
    "mov qword ptr [0x200000], rax",
    "jmp 2b",
}

/// A guest that counts must find its last number plus one, or the same, after a thaw.
fn counts_on(frozen: Frozen, address: u64) {
    let before = read(frozen.memory(), address);
    let caching = memory_type(&frozen);
    let vm = frozen.thaw(nothing()).unwrap();
    assert_eq!(read(vm.memory(), address), before, "nothing runs before it is started");
    let running = start(vm);
    wait_for_more(&running, address, before);
    let frozen = running.freeze().unwrap();
    let (shown, register) = (read(frozen.memory(), address), frozen.state().vcpus[0].regs.rax);
    assert!(register == shown || register == shown + 1, "{register} was shown as {shown}");
    assert_eq!(memory_type(&frozen), caching, "how memory is cached");
}

/// How the first vCPU caches memory, where KVM keeps that.
fn memory_type(frozen: &Frozen) -> Option<u64> {
    const MTRR_DEFAULT_TYPE: u32 = 0x2ff;
    let msrs = &frozen.state().vcpus[0].msrs;
    msrs.iter().find(|msr| msr.index == MTRR_DEFAULT_TYPE).map(|msr| msr.data)
}

#[test]
fn a_thawed_guest_goes_on_exactly_where_it_was() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let running = start(Vm::build(parts(kvm, count())).unwrap());
    wait_for_more(&running, 0x20_0000, 1000);
    counts_on(running.freeze().unwrap(), 0x20_0000);
}

/// The files of a frozen VM.
struct Saved {
    state: File,
    memory: File,
}

impl Saved {
    fn new(frozen: &mut Frozen) -> Saved {
        let saved = Saved { state: tempfile::tempfile().unwrap(), memory: tempfile::tempfile().unwrap() };
        let files = SaveFiles {
            state: saved.state.try_clone().unwrap(),
            memory: Some(saved.memory.try_clone().unwrap()),
            parent: Vec::new(),
            pagemap: None,
            disks: Vec::new(),
            progress: None,
        };
        let saving = frozen.prepare_save(files).unwrap();
        frozen.save(saving).unwrap();
        saved
    }

    fn load(&self) -> Frozen {
        self.try_load(|_| {}).unwrap()
    }

    /// Loads the files with some of the state changed.
    fn try_load(&self, change: impl FnOnce(&mut MachineState)) -> forkd_vmm::Result<Frozen> {
        let kvm = vm::open_kvm(support::open_kvm("").unwrap()).unwrap();
        let mut state = file::read(&self.state)?;
        change(&mut state);
        Frozen::load(kvm, state, vec![self.memory.try_clone().unwrap()], Vec::new())
    }

    fn refusal(&self, change: impl FnOnce(&mut MachineState)) -> String {
        self.try_load(change).err().expect("it is refused").to_string()
    }
}

fn frozen_counter(kvm: File) -> Frozen {
    let running = start(Vm::build(parts(kvm, count())).unwrap());
    wait_for_more(&running, 0x20_0000, 1000);
    running.freeze().unwrap()
}

#[test]
fn a_guest_survives_being_saved_and_loaded() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let saved = Saved::new(&mut frozen_counter(kvm));
    // Twice: the files are not changed by what runs from them.
    for _ in 0..2 {
        counts_on(saved.load(), 0x20_0000);
    }
}

guest_code! {
    /// Maps the memory above 4 GiB, wakes a second vCPU, which counts at 0x2000, and counts itself, below
    /// and above the hole.
    fn two_counters,
    "lea rsi, [rip + 3f]",
    "mov edi, 0x10000",
    "mov ecx, 16",
    "cld",
    "rep movsb",
    "mov qword ptr [0xa020], 0x400003",
    "mov rax, 0x100000083",
    "mov qword ptr [0x400000], rax",
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
    "xor eax, eax",
    "mov rbx, 0x100000000",
    "2: inc rax",
    "mov qword ptr [0x200000], rax",
    "mov qword ptr [rbx], rax",
    "jmp 2b",
    "3:",
    ".code16",
    "4: inc dword ptr [0x2000]",
    "jmp 4b",
}

/// KVM maps no huge pages where guest and host do not agree on where they begin.
fn can_have_huge_pages(memory: &GuestMemory) {
    for region in memory.iter() {
        let (guest, host) = (region.start_addr().0, region.as_ptr() as u64);
        assert_eq!(guest % HUGE_PAGE as u64, host % HUGE_PAGE as u64, "{guest:#x} is at {host:#x}");
    }
}

#[test]
fn two_vcpus_and_two_memory_slots_go_on_and_a_large_guest_takes_no_room() {
    let name = test_name!();
    let Some(kvm) = support::open_kvm(name) else { return };
    let vm = Vm::build(VmParts { vcpus: 2, mem_mib: 4096, ..parts(kvm, two_counters()) }).unwrap();
    can_have_huge_pages(vm.memory());
    let mut running = start(vm);
    const LOW: u64 = 0x20_0000;
    const HIGH: u64 = 4 << 30;
    const SECOND: u64 = 0x2000;
    let mut saved = None;
    for round in 0..4 {
        let (low, second) = (read(running.memory(), LOW), read(running.memory(), SECOND));
        wait_for_more(&running, LOW, low + 1000);
        wait_for_more(&running, SECOND, second + 1000);
        let mut frozen = running.freeze().unwrap();
        assert_eq!((frozen.state().vcpus.len(), frozen.state().memory.len()), (2, 2));
        let (low, high) = (read(frozen.memory(), LOW), read(frozen.memory(), HIGH));
        assert!(high == low || high + 1 == low, "{high} is not {low}");
        let register = frozen.state().vcpus[0].regs.rax;
        assert!(register == low || register == low + 1, "{register} is not {low}");
        if round == 1 {
            let files = Saved::new(&mut frozen);
            assert_eq!(files.memory.metadata().unwrap().len(), 4 << 30);
            assert!(files.memory.metadata().unwrap().blocks() * 512 < 1 << 20, "holes are holes");
            frozen = files.load();
            can_have_huge_pages(frozen.memory());
            saved = Some(files);
        }
        let vm = frozen.thaw(nothing()).unwrap();
        can_have_huge_pages(vm.memory());
        running = start(vm);
    }
    running.stop();
    drop(saved);
}

#[test]
fn every_copy_is_another_generation() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let mut frozen = frozen_counter(kvm);
    let saved = Saved::new(&mut frozen);
    let id = |memory: &GuestMemory| memory.read_obj::<[u8; 16]>(GuestAddress(GENERATION_ID)).unwrap();
    let parent = frozen.state().generation.id;
    assert_eq!(id(frozen.memory()), parent);
    let children = [frozen, saved.load()].map(|frozen| id(frozen.thaw(nothing()).unwrap().memory()));
    assert!(children[0] != parent && children[1] != parent && children[0] != children[1]);
}

guest_code! {
    /// Leaves a mark in the serial port and reads it back for ever.
    fn serial_mark,
    "mov dx, 0x3ff",
    "mov al, 0x5a",
    "out dx, al",
    "2: in al, dx",
    "mov byte ptr [0x200008], al",
    "inc qword ptr [0x200000]",
    "jmp 2b",
}

#[test]
fn the_serial_port_keeps_its_registers() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let running = start(Vm::build(parts(kvm, serial_mark())).unwrap());
    wait_for_more(&running, 0x20_0000, 10);
    let saved = Saved::new(&mut running.freeze().unwrap());
    let frozen = saved.load();
    frozen.memory().write_obj(0u8, GuestAddress(0x20_0008)).unwrap();
    let before = read(frozen.memory(), 0x20_0000);
    let running = start(frozen.thaw(nothing()).unwrap());
    wait_for_more(&running, 0x20_0000, before + 10);
    assert_eq!(read(running.memory(), 0x20_0008), 0x5a);
    running.stop();
}

/// Which lines are up at the chip that takes the interrupts of all devices.
fn lines(state: &mut MachineState) -> &mut u32 {
    // SAFETY: the last of the three chips is the one with this part of the union.
    unsafe { &mut state.interrupts.chips[2].chip.ioapic.irr }
}

#[test]
fn a_line_that_was_up_for_a_moment_does_not_swallow_the_next_interrupt() {
    let Some(kvm) = support::open_kvm(test_name!()) else {
        return;
    };
    let saved = Saved::new(&mut frozen_counter(kvm));
    // The kernel raises and lowers a line in a thread of its own: a VM can be saved between the two.
    let frozen = saved.try_load(|state| *lines(state) |= 1 << SERIAL_GSI | 1 << GENERATION_GSI).unwrap();
    let mut frozen = start(frozen.thaw(nothing()).unwrap()).freeze().unwrap();
    let again = Saved::new(&mut frozen);
    assert_eq!(*lines(&mut file::read(&again.state).unwrap()), 0);
}

#[test]
fn what_cannot_be_restored_is_refused_with_the_reason() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let saved = Saved::new(&mut frozen_counter(kvm));
    assert!(saved.try_load(|_| {}).is_ok());

    // No KVM has ever offered this one.
    let text = saved.refusal(|state| {
        let entry = state.vcpus[0].cpuid.iter_mut().find(|entry| entry.function == 7).unwrap();
        entry.ebx |= 1 << 22;
    });
    assert!(text.contains("CPU lacks") && text.contains("cpuid 7.0:ebx bit 22"), "{text}");
    let text = saved.refusal(|state| {
        let msr = kvm_bindings::kvm_msr_entry { index: 0x1234_5678, data: 1, ..Default::default() };
        state.vcpus[0].msrs.push(msr);
    });
    assert!(text.contains("MSR 0x12345678"), "{text}");
    for ranges in [
        vec![],
        vec![MemoryRange { start: 0, length: 0 }],
        vec![MemoryRange { start: 4096, length: 16 << 20 }],
        vec![MemoryRange { start: 0, length: (16 << 20) + 1 }],
        vec![MemoryRange { start: 0, length: 1 << 63 }, MemoryRange { start: 1 << 63, length: 1 << 63 }],
    ] {
        let text = saved.refusal(|state| state.memory = ranges);
        assert!(text.contains("memory ranges"), "{text}");
    }
    let text = saved.refusal(|state| state.serial.input = vec![0; 65]);
    assert!(text.contains("65 bytes of input"), "{text}");
    let kvm = vm::open_kvm(support::open_kvm("").unwrap()).unwrap();
    let disk = vec![(tempfile::tempfile().unwrap(), Vec::new())];
    let state = file::read(&saved.state).unwrap();
    let error = Frozen::load(kvm, state, vec![saved.memory.try_clone().unwrap()], disk).err().unwrap();
    assert!(error.to_string().contains("0 disks, but 1"), "{error}");

    saved.memory.set_len((16 << 20) - 1).unwrap();
    let text = saved.refusal(|_| {});
    assert!(
        text.contains(
            "memory layer 0 cannot be used: it is truncated: it has 16777215 bytes instead of 16777216"
        ),
        "{text}"
    );
    saved.memory.set_len(17 << 20).unwrap();
    assert!(saved.refusal(|_| {}).contains("too long"));
    let mut byte = [0];
    saved.state.read_exact_at(&mut byte, 1000).unwrap();
    saved.state.write_all_at(&[byte[0] ^ 1], 1000).unwrap();
    assert!(saved.refusal(|_| {}).contains("was changed"));
}

/// The first entry of a CPUID leaf, which is made if there is none.
fn leaf(state: &mut MachineState, function: u32) -> &mut kvm_cpuid_entry2 {
    let cpuid = &mut state.vcpus[0].cpuid;
    let at = cpuid.iter().position(|entry| entry.function == function).unwrap_or_else(|| {
        cpuid.push(kvm_cpuid_entry2 { function, ..Default::default() });
        cpuid.len() - 1
    });
    &mut cpuid[at]
}

#[test]
fn an_edited_state_gets_its_guest_no_more_than_a_boot_does() {
    let Some(kvm) = support::open_kvm(test_name!()) else {
        return;
    };
    let saved = Saved::new(&mut frozen_counter(kvm));
    // What KVM would take, and what no guest gets. Which of the two sentences it is depends on this host.
    let named = |name: &str, text: String| {
        assert!(text.contains(name) && (text.contains("gives to none") || text.contains("lacks")), "{text}");
    };
    named("vmx", saved.refusal(|state| leaf(state, 1).ecx |= 1 << 5));
    named("svm", saved.refusal(|state| leaf(state, 0x8000_0001).ecx |= 1 << 2));
    named("shstk", saved.refusal(|state| leaf(state, 7).ecx |= 1 << 7));
    named("8000000a", saved.refusal(|state| leaf(state, 0x8000_000a).edx |= 1));
    named("hypervisor leaf 40000100", saved.refusal(|state| leaf(state, 0x4000_0100).eax = 1));
    // Hidden where KVM finds it all the same.
    let hidden = saved.refusal(|state| {
        let cpuid = &mut state.vcpus[0].cpuid;
        let basic = cpuid.iter_mut().find(|entry| entry.function == 1).unwrap();
        let other = kvm_cpuid_entry2 { index: 7, ecx: basic.ecx | 1 << 5, ..*basic };
        cpuid.insert(0, other);
    });
    assert!(hidden.contains("CPUID leaf 1"), "{hidden}");

    for (index, data) in [(0x3a, 5), (0x480, 1), (0x8000_0000, 0)] {
        let text = saved.refusal(|state| {
            state.vcpus[0].msrs.push(kvm_bindings::kvm_msr_entry { index, data, ..Default::default() });
        });
        assert!(text.contains(&format!("MSR {index:#x}")), "{text}");
    }
    let text = saved.refusal(|state| state.vcpus[0].sregs.efer |= 1 << 12);
    assert!(text.contains("virtualization of its own"), "{text}");
    let text = saved.refusal(|state| state.vcpus[0].sregs.cr4 |= 1 << 13);
    assert!(text.contains("virtualization of its own"), "{text}");
}

#[test]
fn a_guest_of_an_older_version_keeps_its_counters_and_goes_on() {
    let name = test_name!();
    let Some(kvm) = support::open_kvm(name) else { return };
    let mut saved = Saved::new(&mut frozen_counter(kvm));
    let kvm = vm::open_kvm(support::open_kvm("").unwrap()).unwrap();
    let older = cpuid::granted(&cpuid::supported(&kvm).unwrap(), 0, 1, Grant::Older).unwrap();
    let mut state = file::read(&saved.state).unwrap();
    state.vcpus[0].cpuid = older.as_slice().to_vec();
    // Not every host has counters: these values have no effect, and KVM takes them everywhere.
    if leaf(&mut state, 0xa).eax == 0 {
        leaf(&mut state, 0xa).edx = 1 << 15;
    }
    saved.state = tempfile::tempfile().unwrap();
    file::write(&state, &saved.state).unwrap();
    let version = |file: &File| {
        let mut version = [0; 4];
        file.read_exact_at(&mut version, file::MAGIC.len() as u64).unwrap();
        u32::from_le_bytes(version)
    };
    assert_eq!(version(&saved.state), 1);
    let frozen = saved.load();
    let before = read(frozen.memory(), 0x20_0000);
    let running = start(frozen.thaw(nothing()).unwrap());
    wait_for_more(&running, 0x20_0000, before);
    // Saved from there, it is what it was, and is loaded again.
    let again = Saved::new(&mut running.freeze().unwrap());
    assert_eq!(version(&again.state), 1);
    counts_on(again.load(), 0x20_0000);
    // Virtualization is not for older guests, either.
    assert!(again.refusal(|state| leaf(state, 1).ecx |= 1 << 5).contains("vmx"));
}

#[test]
fn a_vm_that_has_ended_is_not_frozen() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let running = start(Vm::build(parts(kvm, power_off())).unwrap());
    let start = Instant::now();
    while running.end().is_none() {
        assert!(start.elapsed() < Duration::from_secs(20));
        std::thread::sleep(Duration::from_millis(1));
    }
    let error = running.freeze().err().unwrap();
    assert!(error.to_string().contains("powered off"), "{error}");
}

guest_code! {
    /// Powers off.
    fn power_off,
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "hlt",
}

#[test]
fn a_guest_with_every_device_is_thawed_with_what_it_needs_and_refused_without() {
    let name = test_name!();
    let Some(kvm) = support::open_kvm(name) else { return };
    let folder = tempfile::tempdir().unwrap();
    let listener = |name: &str| UnixListener::bind(folder.path().join(name)).unwrap();
    let base = support::file_with(&[7; 8192]);
    let layer = tempfile::tempfile().unwrap();
    let (tap, _network) = UnixDatagram::pair().unwrap();
    let disk = |layer| Disk::new(base.try_clone().unwrap(), layer).unwrap();
    let devices: Vec<Box<dyn VirtioDevice>> = vec![
        Box::new(Block::new(disk(None), "read-only")),
        Box::new(Block::new(disk(Some(layer.try_clone().unwrap())), "writable")),
        Box::new(Net::new(tap.into(), [2, 0, 0, 0, 0, 1])),
        Box::new(Vsock::new(3, listener("parent"), Box::new(|_, _| false)).unwrap()),
        Box::new(Rng::new()),
    ];
    let running = start(Vm::build(VmParts { devices, ..parts(kvm, count()) }).unwrap());
    wait_for_more(&running, 0x20_0000, 1000);
    let mut frozen = running.freeze().unwrap();
    assert_eq!(frozen.disks().iter().map(|disk| disk.files().len()).collect::<Vec<_>>(), [1, 2]);
    let saved = Saved::new(&mut frozen);
    let load = || {
        let kvm = vm::open_kvm(support::open_kvm("").unwrap()).unwrap();
        let file = |file: &File| file.try_clone().unwrap();
        let disks = vec![(file(&base), vec![]), (file(&base), vec![file(&layer)])];
        Frozen::load(kvm, file::read(&saved.state).unwrap(), vec![file(&saved.memory)], disks).unwrap()
    };
    let layers = || vec![None, Some(tempfile::tempfile().unwrap())];
    let refusal = |parts: ChildParts| load().thaw(parts).err().unwrap().to_string();
    assert!(refusal(nothing()).contains("2 disks"));
    let text = refusal(ChildParts { layers: layers(), ..nothing() });
    assert!(text.contains("a vsock listener is needed"), "{text}");
    let swapped = vec![Some(tempfile::tempfile().unwrap()), None];
    let text = refusal(ChildParts { layers: swapped, vsock: Some(listener("swapped")), ..nothing() });
    assert!(text.contains("layers[0]"), "{text}");

    let children = [("one", frozen), ("two", load())];
    for (name, frozen) in children {
        let before = read(frozen.memory(), 0x20_0000);
        let parts = ChildParts { layers: layers(), vsock: Some(listener(name)), ..nothing() };
        let running = start(frozen.thaw(parts).unwrap());
        wait_for_more(&running, 0x20_0000, before);
        // And once more, from a child.
        let frozen = running.freeze().unwrap();
        assert_eq!(frozen.disks()[1].files().len(), 3);
    }
}

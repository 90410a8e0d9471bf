//! The VM's machinery driven by guests of a few instructions: milliseconds each, and on any host
//! whose `/dev/kvm` opens.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/in_process.rs"]
mod in_process;
mod support;

use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use forkd_protocol::control::{EndReason, VmEnd};
use forkd_vmm::devices::virtio::VirtioDevice;
use forkd_vmm::devices::virtio::block::{Block, Disk};
use forkd_vmm::devices::virtio::rng::Rng;
use forkd_vmm::devices::virtio::vsock::Vsock;
use forkd_vmm::vm::{Running, VmParts};
use forkd_vmm::{GuestMemory, guest_code};
use in_process::{boot, parts, read};
use support::test_name;

/// Waits for the VM's end and stops it.
fn end_of(running: Running) -> (VmEnd, GuestMemory) {
    let start = Instant::now();
    loop {
        if let Some(end) = running.end() {
            let memory = running.memory().clone();
            running.stop();
            return (end, memory);
        }
        assert!(start.elapsed() < Duration::from_secs(30), "the guest does not end");
        std::thread::sleep(Duration::from_millis(1));
    }
}

guest_code! {
    /// Writes memory and the console, then powers off.
    fn hello,
    "mov rax, 0x1122334455667788",
    "mov qword ptr [0x200000], rax",
    "lea rsi, [rip + 3f]",
    "mov ecx, 6",
    "mov dx, 0x3f8",
    "2: lodsb",
    "out dx, al",
    "dec ecx",
    "jnz 2b",
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "hlt",
    "3: .ascii \"hello\\n\"",
}

#[test]
fn what_a_guest_writes_reaches_memory_and_the_console() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let (end, memory) = end_of(boot(parts(kvm, hello())));
    assert_eq!(end.reason, EndReason::PoweredOff);
    assert_eq!(end.console_tail, "hello\n");
    assert_eq!(read(&memory, 0x20_0000), 0x1122_3344_5566_7788);
}

guest_code! {
    /// Maps the memory above 4 GiB, writes its first and its last page, then powers off.
    fn high_memory,
    "mov qword ptr [0xa020], 0x400003",
    "mov rax, 0x100000083",
    "mov qword ptr [0x400000], rax",
    "mov rax, 0x13fe00083",
    "mov qword ptr [0x400ff8], rax",
    "mov rbx, 0x100000000",
    "mov qword ptr [rbx], 0x1111",
    "mov rbx, 0x13ffffff8",
    "mov qword ptr [rbx], 0x2222",
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "hlt",
}

#[test]
fn memory_above_the_hole_is_reachable_to_its_last_byte() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let (end, memory) = end_of(boot(VmParts { mem_mib: 4096, ..parts(kvm, high_memory()) }));
    assert_eq!(end.reason, EndReason::PoweredOff, "{}", end.detail);
    assert_eq!(read(&memory, 4 << 30), 0x1111);
    assert_eq!(read(&memory, (5 << 30) - 8), 0x2222);
}

guest_code! {
    /// Wakes all other vCPUs, waits until three have counted themselves, then powers off.
    fn wake_everyone,
    "lea rsi, [rip + 3f]",
    "mov edi, 0x10000",
    "mov ecx, 16",
    "cld",
    "rep movsb",
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
    "2: pause",
    "cmp word ptr [0x2000], 3",
    "jne 2b",
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "hlt",
    "3:",
    ".code16",
    "lock inc word ptr [0x2000]",
    "5: hlt",
    "jmp 5b",

}

#[test]
fn every_vcpu_runs() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let (end, memory) = end_of(boot(VmParts { vcpus: 4, ..parts(kvm, wake_everyone()) }));
    assert_eq!(end.reason, EndReason::PoweredOff, "{}", end.detail);
    assert_eq!(read(&memory, 0x2000), 3);
}

guest_code! {
    /// Prints what a kernel prints when it panics, then resets.
    fn panic_and_reset,
    "lea rsi, [rip + 3f]",
    "mov dx, 0x3f8",
    "2: lodsb",
    "out dx, al",
    "cmp al, 10",
    "jne 2b",
    "mov al, 0xfe",
    "out 0x64, al",
    "hlt",
    "3: .ascii \"[ 1.0] Kernel panic - not syncing: no init\\n\"",
}

guest_code! {
    /// Resets.
    fn reset,
    "mov al, 0xfe",
    "out 0x64, al",
    "hlt",
}

guest_code! {
    /// An exception with nothing to handle it.
    fn triple_fault,
    "ud2",
}

#[test]
fn every_end_has_its_reason() {
    if support::open_kvm(test_name!()).is_none() {
        return;
    }
    let run = |code| end_of(boot(parts(support::open_kvm("").unwrap(), code))).0;
    assert_eq!(run(reset()).reason, EndReason::Reset);
    let end = run(panic_and_reset());
    assert_eq!(end.reason, EndReason::Panicked);
    assert_eq!(end.detail, "Kernel panic - not syncing: no init");
    assert!(end.console_tail.contains("no init"));
    let end = run(triple_fault());
    assert_eq!(end.reason, EndReason::Failed);
    assert!(end.detail.contains("triple fault"), "{}", end.detail);
}

guest_code! {
    /// Maps the device registers, writes pseudo-random values of every width to pseudo-random ones of
    /// six slots, reads them back, and powers off after 3000 rounds.
    fn register_garbage,
    "mov qword ptr [0xa018], 0x400003",
    "mov eax, 0xd0000083",
    "mov qword ptr [0x400400], rax",
    "mov r8d, 3000",
    "mov r9, 88172645463325252",
    "2: mov rax, r9",
    "shl rax, 13",
    "xor r9, rax",
    "mov rax, r9",
    "shr rax, 7",
    "xor r9, rax",
    "mov rax, r9",
    "shl rax, 17",
    "xor r9, rax",
    // A slot and an offset below 0x200, where all registers are; sometimes unaligned.
    "mov rbx, r9",
    "shr rbx, 20",
    "and ebx, 0x71ff",
    "test r9, 0x300",
    "jz 3f",
    "and ebx, 0x71fc",
    "3: add rbx, 0",
    "mov eax, 0xd0000000",
    "add rbx, rax",
    "mov rax, r9",
    // Small values reach further into a device's states than large ones.
    "test r9, 0x1000",
    "jz 4f",
    "and eax, 0xf",
    "4: mov ecx, r9d",
    "shr ecx, 28",
    "cmp ecx, 13",
    "jb 7f",
    "je 6f",
    "cmp ecx, 14",
    "je 5f",
    "mov qword ptr [rbx], rax",
    "mov rax, qword ptr [rbx]",
    "jmp 8f",
    "5: mov byte ptr [rbx], al",
    "mov al, byte ptr [rbx]",
    "jmp 8f",
    "6: mov word ptr [rbx], ax",
    "mov ax, word ptr [rbx]",
    "jmp 8f",
    "7: mov dword ptr [rbx], eax",
    "mov eax, dword ptr [rbx]",
    "8: dec r8d",
    "jnz 2b",
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "hlt",
}

#[test]
fn garbage_in_every_register_leaves_the_monitor_alive() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let folder = tempfile::tempdir().unwrap();
    let listener = UnixListener::bind(folder.path().join("vsock")).unwrap();
    let disk = |layer| Disk::new(support::file_with(&[0; 1 << 20]), layer).unwrap();
    let devices: Vec<Box<dyn VirtioDevice>> = vec![
        Box::new(Block::new(disk(None), "read-only")),
        Box::new(Block::new(disk(Some(tempfile::tempfile().unwrap())), "writable")),
        Box::new(Vsock::new(3, listener, Box::new(|_, _| false)).unwrap()),
        Box::new(Rng::new()),
    ];
    let (end, _) = end_of(boot(VmParts { devices, ..parts(kvm, register_garbage()) }));
    assert_eq!(end.reason, EndReason::PoweredOff, "{}", end.detail);
}

guest_code! {
    /// Counts for ever.
    fn count,
    "2: inc qword ptr [0x200000]",
    "jmp 2b",
}

#[test]
fn a_paused_guest_stands_still_and_goes_on_where_it_was() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let mut running = boot(parts(kvm, count()));
    let counter = |memory: &GuestMemory| read(memory, 0x20_0000);
    for _ in 0..20 {
        let paused = running.pause().unwrap();
        let before = counter(paused.memory());
        std::thread::sleep(Duration::from_millis(2));
        assert_eq!(counter(paused.memory()), before, "a paused guest goes on");
        drop(paused);
        let start = Instant::now();
        while counter(running.memory()) == before {
            assert!(start.elapsed() < Duration::from_secs(10), "a resumed guest does not go on");
        }
    }
    assert!(running.end().is_none());
    running.stop();
}

#[test]
fn a_guest_that_spins_is_stopped_at_once() {
    let Some(kvm) = support::open_kvm(test_name!()) else { return };
    let running = boot(VmParts { vcpus: 2, ..parts(kvm, count()) });
    let start = Instant::now();
    running.stop();
    assert!(start.elapsed() < Duration::from_secs(5));
}

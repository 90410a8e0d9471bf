//! Branches: templates forked off a VM that goes on. The binary, driven over control sockets as the
//! controller drives it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

#[path = "support/branching.rs"]
mod branching;
mod support;
#[path = "support/templates.rs"]
mod templates;

use std::os::fd::AsFd;
use std::path::Path;
use std::time::Duration;

use branching::{
    Branch, Branching, COUNTER, boot_ready, branch, branch_beyond, counter, fork, memory_of, number, run,
    save, sleeper, start,
};
use forkd_protocol::control::{EndReason, Event, FdRef, Message, Reply, Request, Role, Status, VmEnd};
use forkd_vmm::{asm_guest, guest_code};
use support::{Boot, Controller, Fork, file_with, open_kvm, status, test_name, wait_until};

guest_code! {
    /// Two vCPUs that write for ever. The first fills 64 pages, every other one above 4 GiB, with the number
    /// of the round; after each round it hands a token to the second and waits until it comes back. The
    /// second counts the tokens, and fills a page with their number before it gives one back. When the first
    /// finds a new generation id, it compares every byte with the round and the page it is at, and prints a
    /// V, or an X. Prints a T when the token or the second's page is wrong.
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
    // One page, then a check of the generation id.
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
    // A new generation id: every byte is checked.
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
    /// Reports ready, counts for a moment and powers off.
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

#[test]
fn a_branch_stays_at_its_instant_its_children_go_on_from_it_and_so_does_the_source() {
    let test = test_name!();
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
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut source = monitor.attach();
    let mut boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(writers())));
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
    let test = test_name!();
    let Some(kvm) = open_kvm(test) else { return };
    let monitor = start(&[]);
    let mut source = monitor.attach();
    let mut boot = Boot::new(kvm, file_with(&asm_guest::elf_kernel(writers())));
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

#[test]
fn a_vm_whose_memory_comes_from_files_is_branched_too() {
    let test = test_name!();
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
fn source_and_branch_do_not_need_each_other() {
    let test = test_name!();
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
    let test = test_name!();
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
    let test = test_name!();
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
    let test = test_name!();
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
    let test = test_name!();
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

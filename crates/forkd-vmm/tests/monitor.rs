//! The whole monitor as a process: the binary, driven over its control socket as the controller
//! drives it.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

mod support;
#[path = "support/templates.rs"]
mod templates;

use std::fs::File;
use std::os::fd::AsFd;
use std::os::unix::net::UnixListener;
use std::path::Path;
use std::process::Command;
use std::time::Duration;

use forkd_protocol::control::{
    DiskConfig, EndReason, Event, FdRef, MAX_VCPUS, NetConfig, OLDEST_VERSION, Reply, Request, VERSION,
    VsockConfig,
};
use forkd_vmm::{asm_guest, guest_code};
use support::{Boot, Controller, Monitor, file_with, open_kvm, status, test_name, wait_until};
use templates::start;

guest_code! {
    /// Prints a greeting on the console and powers off.
    fn greet,
    "lea rsi, [rip + 3f]",
    "mov dx, 0x3f8",
    "2: lodsb",
    "out dx, al",
    "cmp al, 10",
    "jne 2b",
    "mov dx, 0x600",
    "mov al, 0x34",
    "out dx, al",
    "hlt",
    "3: .ascii \"hello from the guest\\n\"",
}

guest_code! {
    /// Spins for ever.
    fn spin,
    "2: jmp 2b",
}

fn kernel(code: &[u8]) -> File {
    file_with(&asm_guest::elf_kernel(code))
}

/// A monitor with a guest that spins, or `None` where there is no KVM.
fn spinning(test: &str) -> Option<(Monitor, Controller)> {
    let kvm = open_kvm(test)?;
    let monitor = start(&[]);
    let mut controller = monitor.attach();
    assert_eq!(Boot::new(kvm, kernel(spin())).send(&mut controller), Reply::Booted);
    Some((monitor, controller))
}

#[track_caller]
fn assert_refused(reply: Reply, expected: &str) {
    match reply {
        Reply::Error { message } => assert!(message.contains(expected), "{message}"),
        other => panic!("not refused: {other:?}"),
    }
}

#[test]
fn a_guest_runs_and_its_end_is_told_with_its_last_words() {
    let Some(kvm) = open_kvm(test_name!()) else { return };
    let mut monitor = start(&[]);
    let mut controller = monitor.attach();
    assert!(!status(&mut controller).running);
    assert_eq!(Boot::new(kvm, kernel(greet())).send(&mut controller), Reply::Booted);
    let (event, _) = controller.event();
    let Event::Ended(end) = event else { panic!("{event:?}") };
    assert_eq!(end.reason, EndReason::PoweredOff);
    assert_eq!(end.console_tail, "hello from the guest\n");
    assert!(monitor.wait().success());
}

#[test]
fn stop_ends_a_guest_that_spins_and_the_process() {
    let Some((mut monitor, mut controller)) = spinning(test_name!()) else {
        return;
    };
    assert!(status(&mut controller).running);
    assert_eq!(controller.request(&Request::Stop, &[]), Reply::Stopped);
    assert!(monitor.wait().success());
}

#[test]
fn stop_before_boot_ends_the_process() {
    let mut monitor = start(&[]);
    assert_eq!(monitor.attach().request(&Request::Stop, &[]), Reply::Stopped);
    assert!(monitor.wait().success());
}

#[test]
fn another_version_is_refused_with_a_sentence_and_the_next_controller_is_served() {
    let monitor = start(&[]);
    let mut stranger = monitor.connect();
    assert_refused(stranger.request(&Request::Hello { version: VERSION + 1 }, &[]), "version");
    assert!(stranger.is_closed());
    monitor.attach();
}

#[test]
fn a_controller_of_any_spoken_version_is_served_and_gets_to_know_the_newest() {
    let monitor = start(&[]);
    for version in OLDEST_VERSION..=VERSION {
        let mut controller = monitor.connect();
        match controller.request(&Request::Hello { version }, &[]) {
            Reply::Hello { version: offered, newest, .. } => {
                assert_eq!((offered, newest), (version, VERSION))
            }
            other => panic!("{other:?}"),
        }
    }
    let mut older = monitor.connect();
    assert_refused(older.request(&Request::Hello { version: OLDEST_VERSION - 1 }, &[]), "version");
}

#[test]
fn whoever_does_not_say_hello_first_is_sent_away() {
    let mut monitor = start(&[]);
    let mut stranger = monitor.connect();
    assert_refused(stranger.request(&Request::Stop, &[]), "hello");
    assert!(stranger.is_closed());
    assert!(monitor.is_alive());
    monitor.attach();
}

#[test]
fn a_silent_connection_does_not_keep_others_out() {
    let monitor = start(&[]);
    let silent = monitor.connect();
    monitor.attach();
    assert!(silent.is_closed());
}

#[test]
fn garbage_closes_its_connection_and_nothing_else() {
    let Some((monitor, mut controller)) = spinning(test_name!()) else {
        return;
    };
    let flags = rustix::net::SendFlags::empty();
    for garbage in [&b"{\"boot\":"[..], b"\0\xff\xfe", b"[]", &[b'x'; 200_000]] {
        rustix::net::send(controller.channel.as_fd(), garbage, flags).unwrap();
        assert_refused(controller.reply(), "no request");
        assert!(controller.is_closed());
        controller = monitor.attach();
        assert!(status(&mut controller).running);
    }
}

#[test]
fn the_vm_goes_on_without_a_controller_and_the_next_one_finds_it_running() {
    let test = test_name!();
    let Some((mut monitor, controller)) = spinning(test) else { return };
    drop(controller);
    std::thread::sleep(Duration::from_millis(50));
    assert!(monitor.is_alive());
    let mut controller = monitor.attach();
    assert!(status(&mut controller).running);
    // A second controller waits until the first has gone.
    let mut second = monitor.connect();
    second.channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
    assert!(status(&mut controller).running);
    drop(controller);
    assert!(matches!(second.reply(), Reply::Hello { .. }));
    assert!(status(&mut second).running);
}

#[test]
fn a_refused_boot_says_why_changes_nothing_and_another_may_follow() {
    let Some(kvm) = open_kvm(test_name!()) else {
        return;
    };
    let mut monitor = start(&[]);
    let mut controller = monitor.attach();
    let boot = |kernel: File| Boot::new(kvm.try_clone().unwrap(), kernel);
    let mut refused = |boot: Boot, expected: &str| assert_refused(boot.send(&mut controller), expected);

    refused(boot(file_with(b"#!/bin/sh\necho not a kernel\n")), "not a Linux kernel");
    refused(boot(file_with(b"")), "not a Linux kernel");
    refused(boot(file_with(&asm_guest::elf_kernel(greet())[..100])), "not a Linux kernel");
    refused(boot(File::open(std::env::current_exe().unwrap()).unwrap()), "not a Linux kernel");
    refused(Boot::new(tempfile::tempfile().unwrap(), kernel(greet())), "not KVM");

    let change = |change: &dyn Fn(&mut Boot)| {
        let mut boot = boot(kernel(greet()));
        change(&mut boot);
        boot
    };
    refused(change(&|boot| boot.config.vcpus = 0), "vcpus");
    refused(change(&|boot| boot.config.vcpus = MAX_VCPUS + 1), "vcpus");
    refused(change(&|boot| boot.config.mem_mib = 1), "mem_mib");
    refused(change(&|boot| boot.config.mem_mib = u64::MAX), "mem_mib");
    refused(change(&|boot| boot.config.kernel = FdRef(99)), "descriptor 99");
    refused(change(&|boot| boot.config.console = boot.config.kernel), "used for something else");
    refused(change(&|boot| boot.config.cmdline = "a\0b".into()), "command line");
    refused(change(&|boot| boot.config.cmdline = "x".repeat(4096)), "command line");
    refused(
        change(&|boot| {
            let base = boot.add(file_with(&[0; 4096]));
            let layer = boot.add(tempfile::tempfile().unwrap());
            boot.config.disks = vec![DiskConfig { base, layer: Some(layer), frozen: Vec::new() }; 2];
        }),
        "used for something else",
    );
    refused(
        change(&|boot| {
            let base = boot.add(file_with(&[0; 4096]));
            let layer = boot.add(File::open("/dev/null").unwrap());
            boot.config.disks.push(DiskConfig { base, layer: Some(layer), frozen: Vec::new() });
        }),
        "not open for reading and writing",
    );
    refused(
        change(&|boot| {
            let tap = boot.add(tempfile::tempfile().unwrap());
            boot.config.net = Some(NetConfig { tap, mac: [2, 0, 0, 0, 0, 1] });
        }),
        "net.tap: the descriptor blocks",
    );
    refused(
        change(&|boot| {
            let listener = boot.add(tempfile::tempfile().unwrap());
            boot.config.vsock = Some(VsockConfig { cid: 3, listener, guest_ports: Vec::new() });
        }),
        "not a listening socket",
    );
    refused(
        change(&|boot| {
            let base = boot.add(file_with(&[0; 4096]));
            boot.config.disks = vec![DiskConfig { base, layer: None, frozen: Vec::new() }; 18];
        }),
        "virtio devices",
    );

    assert!(monitor.is_alive());
    assert!(!status(&mut controller).running);
    assert_eq!(boot(kernel(spin())).send(&mut controller), Reply::Booted);
    assert_refused(boot(kernel(spin())).send(&mut controller), "already");
    assert!(status(&mut controller).running);
}

#[test]
fn a_vm_that_ends_unattended_ends_its_process() {
    let Some(kvm) = open_kvm(test_name!()) else { return };
    let mut monitor = start(&[]);
    let mut controller = monitor.attach();
    Boot::new(kvm, kernel(greet())).send(&mut controller);
    drop(controller);
    assert!(monitor.wait().success());
}

#[test]
fn a_monitor_started_wrongly_says_so_and_exits() {
    for arguments in [&["--uid", "7"][..], &["--uid", "x", "--gid", "1"], &["--seccomp", "maybe"], &["boot"]]
    {
        let mut monitor = Monitor::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), arguments);
        assert!(!monitor.wait().success());
    }
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkd-vmm"));
    support::pass_as_3(&mut command, File::open("/dev/null").unwrap());
    let output = command.output().unwrap();
    assert!(!output.status.success());
    assert!(String::from_utf8_lossy(&output.stderr).contains("not a listening socket"));
}

#[test]
fn a_monitor_not_started_by_root_has_the_walls_that_need_no_privileges() {
    let monitor = start(&[]);
    let _controller = monitor.attach();
    let process = format!("/proc/{}", monitor.pid());
    let limits = std::fs::read_to_string(format!("{process}/limits")).unwrap();
    let core = limits.lines().find(|line| line.starts_with("Max core file size")).unwrap();
    assert_eq!(core.split_whitespace().collect::<Vec<_>>()[4..6], ["0", "0"], "{core}");
    let status = std::fs::read_to_string(format!("{process}/status")).unwrap();
    for wall in ["NoNewPrivs:\t1", "Seccomp:\t2"] {
        assert!(status.contains(wall), "{wall}: {status}");
    }
}

#[test]
fn a_jailed_monitor_has_no_files_no_network_and_no_privileges() {
    let test = test_name!();
    if !rustix::process::geteuid().is_root() {
        support::not_run(test, "needs root");
        return;
    }
    let Some(kvm) = open_kvm(test) else { return };
    let arguments = ["--uid", "23456", "--gid", "34567"];
    let monitor = Monitor::start(Path::new(env!("CARGO_BIN_EXE_forkd-vmm")), &arguments);
    let mut controller = monitor.attach();
    let mut boot = Boot::new(kvm, kernel(spin()));
    boot.config.vcpus = 2;
    let folder = tempfile::tempdir().unwrap();
    let listener = boot.add(UnixListener::bind(folder.path().join("vsock")).unwrap());
    boot.config.vsock = Some(VsockConfig { cid: 3, listener, guest_ports: Vec::new() });
    assert_eq!(boot.send(&mut controller), Reply::Booted);

    let process = format!("/proc/{}", monitor.pid());
    let statuses = || -> Vec<String> {
        let threads = std::fs::read_dir(format!("{process}/task")).unwrap();
        // One of the kernel's own may be gone already.
        threads.filter_map(|it| std::fs::read_to_string(it.unwrap().path().join("status")).ok()).collect()
    };
    // A thread has its name only when it has got so far.
    wait_until("not every thread is there", || {
        let statuses = statuses();
        let is_there = |name: &str| statuses.iter().any(|text| text.starts_with(&format!("Name:\t{name}\n")));
        ["forkd-sandbox", "devices", "vcpu0", "vcpu1"].into_iter().all(is_there)
    });
    for text in statuses() {
        let field = |name: &str| {
            let line = text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(":"));
            line.unwrap_or_else(|| panic!("no {name}")).split_whitespace().collect::<Vec<_>>().join(" ")
        };
        // A worker of the kernel's own, which newer ones list here.
        if field("Name").starts_with("kvm") {
            continue;
        }
        assert_eq!(field("Uid"), "23456 23456 23456 23456");
        assert_eq!(field("Gid"), "34567 34567 34567 34567");
        assert_eq!(field("Groups"), "");
        for set in ["CapInh", "CapPrm", "CapEff", "CapBnd", "CapAmb"] {
            assert_eq!(field(set), "0000000000000000", "{set}");
        }
        assert_eq!(field("NoNewPrivs"), "1");
        assert_eq!(field("Seccomp"), "2", "filtered");
    }
    assert_eq!(std::fs::read_dir(format!("{process}/root/")).unwrap().count(), 0, "an empty root");
    let network = std::fs::read_to_string(format!("{process}/net/dev")).unwrap();
    assert_eq!(network.lines().count(), 3, "two lines of heading and loopback: {network}");
    for namespace in ["mnt", "ipc", "uts", "net"] {
        let of = |process: &str| std::fs::read_link(format!("{process}/ns/{namespace}")).unwrap();
        assert_ne!(of(&process), of("/proc/self"), "{namespace}");
    }
    assert!(status(&mut controller).running);
    assert_eq!(controller.request(&Request::Stop, &[]), Reply::Stopped);
}

//! Bad input and hostile guests: a clear error or a dead sandbox, never a hung or crashed daemon.

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use forkd_tests::daemon::Daemon;
use forkd_tests::monitor::{Guest, Monitor};
use forkd_tests::{eventually, library_path};
use serde_json::json;

use crate::assets::assets;

/// What making a sandbox is refused with.
fn refusal(daemon: &Daemon) -> String {
    let response = daemon.request("POST", "/v1/sandboxes", Some(json!({"image": "python"})));
    assert!(response.status >= 400, "{response:?}");
    let message = response.json()["error"].as_str().unwrap().to_owned();
    eventually("what was begun to go", || {
        (daemon.folders() == 0 && daemon.monitors().is_empty()).then_some(())
    });
    assert_eq!(daemon.request("GET", "/healthz", None).status, 200);
    message
}

/// A library like the real one but for the disk of the `python` image, which `change` may spoil.
fn library_with(folder: &Path, change: impl FnOnce(&Path)) -> PathBuf {
    let image = folder.join("images/python");
    std::fs::create_dir_all(&image).unwrap();
    std::os::unix::fs::symlink(library_path().join("kernels"), folder.join("kernels")).unwrap();
    std::fs::copy(library_path().join("images/python/image.json"), image.join("image.json")).unwrap();
    let size = std::fs::metadata(library_path().join("images/python/disk.ext4")).unwrap().len();
    std::fs::File::create(image.join("disk.ext4")).unwrap().set_len(size).unwrap();
    change(&image.join("disk.ext4"));
    folder.to_path_buf()
}

#[test]
fn a_kernel_that_is_not_one_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("kernel");
    std::fs::write(&kernel, "#!/bin/sh\necho not a kernel\n".repeat(100)).unwrap();
    let daemon = Daemon::start_with(&["--kernel", kernel.to_str().unwrap()], &[], library_path());
    let message = refusal(&daemon);
    assert!(message.contains("kernel"), "{message}");
}

#[test]
fn a_kernel_that_never_gets_anywhere_is_given_up() {
    // A legal ELF executable whose only instruction is a jump to itself.
    let folder = tempfile::tempdir().unwrap();
    let kernel = folder.path().join("vmlinux");
    std::fs::write(&kernel, looping_elf()).unwrap();
    let env = [("FORKD_BOOT_TIMEOUT_SECS", "8")];
    let daemon = Daemon::start_with(&["--kernel", kernel.to_str().unwrap()], &env, library_path());
    let message = refusal(&daemon);
    assert!(message.contains("8 s") && message.contains("console"), "{message}");
}

fn looping_elf() -> Vec<u8> {
    let (address, offset) = (0x100_0000u64, 0x1000u64);
    let kernel_address = 0xffff_ffff_8100_0000;
    let mut elf = vec![0u8; 0x1010];
    elf[..20].copy_from_slice(b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0\x02\0\x3e\0");
    elf[20..24].copy_from_slice(&1u32.to_le_bytes());
    elf[24..32].copy_from_slice(&address.to_le_bytes());
    elf[32..40].copy_from_slice(&64u64.to_le_bytes());
    elf[52..58].copy_from_slice(&[64, 0, 56, 0, 1, 0]);
    elf[64..72].copy_from_slice(&[1, 0, 0, 0, 5, 0, 0, 0]);
    for (at, value) in [(72, offset), (80, kernel_address), (88, address), (96, 2), (104, 2), (112, 0x1000)] {
        elf[at..at + 8].copy_from_slice(&value.to_le_bytes());
    }
    elf[0x1000..0x1002].copy_from_slice(&[0xeb, 0xfe]);
    elf
}

#[test]
fn a_truncated_disk_is_named_before_anything_starts() {
    let folder = tempfile::tempdir().unwrap();
    let library = library_with(folder.path(), |disk| {
        std::fs::File::options().write(true).open(disk).unwrap().set_len(1000).unwrap();
    });
    let message = refusal(&Daemon::start_with(&[], &[], library));
    assert!(message.contains("disk.ext4") && message.contains("1000"), "{message}");
    assert!(message.contains("forkd image build"), "{message}");
}

#[test]
fn a_disk_without_a_file_system_fails_with_what_the_guest_said() {
    let folder = tempfile::tempdir().unwrap();
    let library = library_with(folder.path(), |_| {});
    let message = refusal(&Daemon::start_with(&[], &[], library));
    assert!(message.contains("/dev/vda"), "{message}");
}

#[test]
fn a_guest_that_writes_garbage_into_its_devices_hurts_only_itself() {
    let assets = assets();
    let guest = || Guest { disks: vec![(&assets.disk, true)], ..assets.guest() };
    let (mut neighbour, mut culprit) = (Monitor::start(), Monitor::start());
    neighbour.boot_to_agent(guest());
    // Stock kernels keep even root from the registers of a device in use, unless configured otherwise.
    culprit.boot_to_agent(Guest { cmdline: "iomem=relaxed", ..guest() });
    let headers = [("content-type", "application/octet-stream")];
    let code = include_bytes!("random_registers.py");
    assert_eq!(
        culprit.agent("POST", "/files?path=/root/random_registers.py", &headers, code).unwrap().status,
        200
    );
    culprit.start_in_background("exec python3 -u /root/random_registers.py > /dev/console 2>&1");

    // What becomes of the guest is its own affair: it may get through, end or hang.
    let start = Instant::now();
    let through = |monitor: &Monitor| monitor.console().contains("garbage in all devices");
    while !through(&culprit) && !culprit.has_ended() && start.elapsed() < Duration::from_secs(90) {
        std::thread::sleep(Duration::from_millis(100));
    }
    let console = culprit.console();
    assert!(console.contains("garbage in device"), "it never got at a device:\n{console}");
    if culprit.has_ended() {
        println!("the culprit ended: {:?}", culprit.wait_end().reason);
    }
    assert_eq!(neighbour.sh("echo unharmed"), "unharmed\n");
}

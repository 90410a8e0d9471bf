//! What a guest finds in its machine, and that it works.

use std::io::{Read, Write};
use std::net::TcpStream;
use std::os::unix::net::UnixStream;

use forkd_protocol::control::Event;
use forkd_tests::monitor::{GUEST_CALL_PORT, Guest, Monitor};
use forkd_tests::{TIMEOUT, eventually};

use crate::assets::assets;

#[test]
fn a_guest_has_the_cpus_memory_and_disks_it_was_given() {
    let assets = assets();
    let pattern: Vec<u8> = (0..2u32 << 20).map(|i| (i.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let folder = tempfile::tempdir().unwrap();
    let (writable, read_only) = (folder.path().join("writable"), folder.path().join("read-only"));
    std::fs::write(&writable, &pattern).unwrap();
    std::fs::write(&read_only, &pattern).unwrap();

    let mut monitor = Monitor::start();
    monitor.boot_to_agent(Guest {
        vcpus: 2,
        mem_mib: 4096,
        disks: vec![(&assets.disk, true), (&writable, true), (&read_only, false)],
        ..assets.guest()
    });

    assert_eq!(monitor.sh("nproc"), "2\n");
    let total: u64 = monitor.sh("awk '/MemTotal/{print $2}' /proc/meminfo").trim().parse().unwrap();
    assert!((3700 << 10..4096 << 10).contains(&total), "{total} KiB");
    // Memory goes on above the hole, and is used: the kernel takes from the top first.
    assert!(monitor.sh("grep -i 'system ram' /proc/iomem").contains("100000000-"));
    let sums =
        monitor.sh("head -c 67108864 /dev/urandom > /dev/shm/x; md5sum < /dev/shm/x; md5sum < /dev/shm/x");
    let sums: Vec<&str> = sums.lines().collect();
    assert_eq!(sums[0], sums[1]);

    // Disks: order, size, and what may be written where.
    assert_eq!(monitor.sh("cat /sys/block/vdb/size /sys/block/vdb/ro /sys/block/vdc/ro"), "4096\n0\n1\n");
    let same = "cmp /dev/vdb /dev/vdc && echo same";
    assert_eq!(monitor.sh(same), "same\n");
    monitor.sh(
        "printf changed | dd of=/dev/vdb bs=1 seek=5000 conv=notrunc,fsync 2>&1; echo 3 > /proc/sys/vm/drop_caches",
    );
    assert_eq!(
        monitor.sh("cmp -l /dev/vdb /dev/vdc | wc -l; dd if=/dev/vdb bs=1 skip=5000 count=7"),
        "7\nchanged"
    );
    assert_ne!(monitor.sh_status("echo no > /dev/vdc").0, 0);
    assert!(std::fs::read(&writable).unwrap() == pattern, "the base of a copy-on-write disk was written to");
    assert!(std::fs::read(&read_only).unwrap() == pattern);

    // Randomness, and the generation id's driver bound to its device.
    assert!(monitor.sh("cat /sys/class/misc/hw_random/rng_current").contains("virtio"));
    assert_eq!(monitor.sh("head -c 5000 /dev/hwrng | wc -c"), "5000\n");
    assert_ne!(monitor.sh("ls /sys/bus/acpi/drivers/vmgenid | grep -c VMGENCTR"), "0\n");
    assert_eq!(
        monitor.sh("cat /sys/devices/system/clocksource/clocksource0/current_clocksource"),
        "kvm-clock\n"
    );
}

#[test]
fn vsock_carries_megabytes_both_ways_and_guests_may_call() {
    let assets = assets();
    let mut monitor = Monitor::start();
    monitor.boot_to_agent(Guest { disks: vec![(&assets.disk, true)], ..assets.guest() });

    // Host-initiated: a file in and out again through the agent.
    let data: Vec<u8> = (0..16u32 << 20).map(|i| (i.wrapping_mul(747_796_405) >> 23) as u8).collect();
    let headers = [("content-type", "application/octet-stream")];
    let written = monitor.agent("POST", "/files?path=/root/data", &headers, &data).unwrap();
    assert_eq!(written.status, 200, "{written:?}");
    let read = monitor.agent("GET", "/files?path=/root/data", &[], b"").unwrap();
    assert!(read.body == data, "{} bytes of {} came back, or others", read.body.len(), data.len());

    // A port without a listener is refused, not left hanging.
    assert!(monitor.connect(9999).is_err());

    // Guest-initiated: the other end of the guest's connection comes over the control socket; calls to
    // a port that was not allowed are refused without a word.
    let script = "python3 -c \"
import socket
try:
    socket.socket(socket.AF_VSOCK).connect((2, 5006))
    print('let in')
except OSError:
    pass
s = socket.socket(socket.AF_VSOCK)
s.connect((2, 5005))
s.sendall(b'x' * 3000000)
s.shutdown(socket.SHUT_WR)
print(len(s.makefile('rb').read()))\" > /root/answer 2>&1";
    monitor.start_in_background(script);
    let (event, fds) = monitor.event();
    assert_eq!(event, Event::GuestConnection { port: GUEST_CALL_PORT });
    let mut stream = UnixStream::from(fds.into_iter().next().unwrap());
    stream.set_read_timeout(Some(TIMEOUT)).unwrap();
    let mut received = Vec::new();
    stream.read_to_end(&mut received).unwrap();
    assert_eq!(received.len(), 3_000_000);
    stream.write_all(&received[..2_000_000]).unwrap();
    drop(stream);
    eventually("the guest's count", || (monitor.sh("cat /root/answer") == "2000000\n").then_some(()));
}

#[test]
fn a_tap_connects_a_guest_to_the_network() {
    let assets = assets();
    let name = format!("t{}", std::process::id());
    let tap = forkd_net::Tap::create(&name).unwrap();
    tap.bring_up(std::net::Ipv4Addr::new(10, 42, 0, 1), 24).unwrap();
    let mut monitor = Monitor::start();
    let guest = Guest { disks: vec![(&assets.disk, true)], tap: Some(tap.into_fd()), ..assets.guest() };
    monitor.boot_to_agent(guest);

    // A server in the guest; megabytes from it must arrive unchanged.
    monitor.sh("mkdir /srv/www && cd /srv/www && head -c 4000000 /dev/urandom > blob && \
         (python3 -m http.server 8000 >/dev/null 2>&1 &) ; md5sum blob > /root/sum");
    let response = eventually("the guest's server", || {
        let stream = TcpStream::connect("10.42.0.2:8000").ok()?;
        stream.set_read_timeout(Some(TIMEOUT)).unwrap();
        forkd_tests::http::request(stream, "GET", "/blob", &[], b"").ok()
    });
    assert_eq!(response.body.len(), 4_000_000);
    let back = monitor.agent(
        "POST",
        "/files?path=/root/back",
        &[("content-type", "application/octet-stream")],
        &response.body,
    );
    assert_eq!(back.unwrap().status, 200);
    monitor.sh("cmp /root/back /srv/www/blob");
}

#[test]
fn a_bzimage_boots_as_an_elf_does() {
    let assets = assets();
    let mut monitor = Monitor::start();
    let disks = vec![(assets.disk.as_path(), true)];
    monitor.boot_to_agent(Guest { kernel: &assets.bzimage, disks, ..assets.guest() });
    assert!(monitor.sh("uname -s").starts_with("Linux"));
}

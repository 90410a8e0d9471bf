//! Boots a kernel in a monitor and shows its console: the shortest way to try one.
//!
//! `boot KERNEL [--initramfs FILE] [--cmdline TEXT] [--mem MIB] [--vcpus N] [--disk BASE]…
//! [--cow BASE]… [--vsock SOCKET] [--jail ID] [--limit SECONDS]`, next to a built `forkd-vmm`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::fs::File;
use std::os::fd::OwnedFd;
use std::os::unix::fs::FileExt;
use std::os::unix::net::{UnixListener, UnixStream};
use std::time::{Duration, Instant};

use forkd_protocol::control::{DiskConfig, Event, Reply, VsockConfig};
use support::{Boot, Monitor};

/// What the guest sends to this port of the host comes back.
const ECHO_PORT: u32 = 5000;

fn main() {
    let mut arguments = std::env::args().skip(1);
    let kernel = File::open(arguments.next().expect("a kernel")).expect("the kernel opens");
    let kvm = support::open_kvm("boot").expect("/dev/kvm opens");
    let mut boot = Boot::new(kvm, kernel);
    (boot.config.mem_mib, boot.config.vcpus) = (512, 1);
    let (mut jail, mut limit) = (None, Duration::from_secs(60));
    while let Some(option) = arguments.next() {
        let value = arguments.next().expect("a value");
        match option.as_str() {
            "--initramfs" => boot.config.initramfs = Some(boot.add(File::open(value).expect("it opens"))),
            "--cmdline" => boot.config.cmdline = value,
            "--mem" => boot.config.mem_mib = value.parse().expect("a number"),
            "--vcpus" => boot.config.vcpus = value.parse().expect("a number"),
            "--disk" | "--cow" => {
                let base = boot.add(File::open(value).expect("it opens"));
                let layer = (option == "--cow").then(|| boot.add(tempfile::tempfile().expect("a file")));
                boot.config.disks.push(DiskConfig { base, layer, frozen: Vec::new() });
            }
            "--vsock" => {
                let listener = boot.add(UnixListener::bind(value).expect("it binds"));
                boot.config.vsock = Some(VsockConfig { cid: 3, listener, guest_ports: vec![ECHO_PORT] });
            }
            "--jail" => jail = Some(value),
            "--limit" => limit = Duration::from_secs(value.parse().expect("a number")),
            _ => panic!("unknown option {option}"),
        }
    }

    let binary = std::env::current_exe().expect("a path").with_file_name("../forkd-vmm");
    let walls = jail.as_deref().map_or(vec![], |id| vec!["--uid", id, "--gid", id]);
    let mut monitor = Monitor::start(&binary, &walls);
    let mut controller = monitor.attach();
    let start = Instant::now();
    assert_eq!(boot.send(&mut controller), Reply::Booted);
    println!("[{:?}] booted", start.elapsed());
    let events = std::thread::spawn(move || {
        loop {
            let (event, fds) = controller.event();
            println!("[{:?}] {event:?}", start.elapsed());
            match event {
                Event::Ended(_) => break,
                Event::GuestConnection { .. } => fds.into_iter().for_each(echo),
                Event::Ready | Event::DiskFull | Event::ChildEnded { .. } => {}
            }
        }
    });
    let mut shown = 0;
    while monitor.is_alive() && start.elapsed() < limit {
        shown += show(&boot.console, shown);
        std::thread::sleep(Duration::from_millis(100));
    }
    show(&boot.console, shown);
    println!("[{:?}] the monitor ended: {}", start.elapsed(), !monitor.is_alive());
    if !monitor.is_alive() {
        println!("{}", monitor.wait());
        let _ = events.join();
    }
}

/// Whatever the guest connects to sends everything back.
fn echo(connection: OwnedFd) {
    std::thread::spawn(move || {
        let stream = UnixStream::from(connection);
        let _ = std::io::copy(&mut &stream, &mut &stream);
    });
}

fn show(console: &File, from: u64) -> u64 {
    let mut bytes = vec![0; 64 << 10];
    let count = console.read_at(&mut bytes, from).unwrap_or(0);
    print!("{}", String::from_utf8_lossy(&bytes[..count]));
    count as u64
}

//! Measures what a fork costs through a template, without a controller: `spawn [COUNT] [MIB] [JAIL_ID]`
//! boots a tiny guest, freezes it, forks COUNT children with pipelined requests and prints how long it
//! took until all of them were ready. Next to a built `forkd-vmm`.

#[path = "../tests/support/mod.rs"]
mod support;

use std::os::fd::AsFd;
use std::time::Instant;

use forkd_protocol::control::{Channel, Event, Reply, Request};
use forkd_vmm::asm_guest;
use support::{Boot, Fork, Monitor, sleeps_once_forked};

fn main() {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let number = |index: usize, otherwise: u64| {
        arguments.get(index).map_or(otherwise, |text| text.parse().expect("a number"))
    };
    let (count, mib) = (number(0, 100), number(1, 512));
    let binary = std::env::current_exe().expect("a path").with_file_name("../forkd-vmm");
    let walls = arguments.get(2).map_or(vec![], |id| vec!["--uid", id, "--gid", id]);
    let monitor = Monitor::start(&binary, &walls);
    let mut template = monitor.attach();
    let kvm = support::open_kvm("spawn").expect("/dev/kvm opens");
    let mut boot = Boot::new(kvm, support::file_with(&asm_guest::elf_kernel(sleeps_once_forked())));
    boot.config.mem_mib = mib;
    assert_eq!(boot.send(&mut template), Reply::Booted);
    assert_eq!(template.event().0, Event::Ready);
    assert_eq!(template.request(&Request::Freeze, &[]), Reply::Frozen);

    let mut forks: Vec<_> = (0..count).map(|index| Fork::new(&format!("child{index}"))).collect();
    // Requests and replies go at the same time, or one of the two would fill the socket.
    let requests = Channel::new(template.channel.as_fd().try_clone_to_owned().expect("a descriptor"));
    let mut messages: Vec<_> =
        forks.iter_mut().map(|fork| (fork.config.clone(), std::mem::take(&mut fork.fds))).collect();
    let start = Instant::now();
    let sender = std::thread::spawn(move || {
        for (config, fds) in messages.drain(..) {
            let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
            requests.send(&Request::Fork(config), &fds).expect("the template listens");
        }
    });
    let mut children = Vec::new();
    for fork in forks {
        children.push(fork.finish(&mut template).expect("a child"));
    }
    let forked = start.elapsed();
    children.iter_mut().for_each(|child| child.ready());
    let ready = start.elapsed();
    sender.join().expect("the sender is done");
    println!("{count} children of {mib} MiB: all forked in {forked:?}, all ready in {ready:?}");
}

//! The filters, tripped for real: each case runs in a process of its own, which lives or is killed.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::os::unix::process::ExitStatusExt;
use std::process::Command;

use forkd_vmm::seccomp::{Mode, ThreadKind, install};

const CASE: &str = "FORKD_SECCOMP_CASE";

const TESTS: [(&str, fn()); 5] = [
    (
        "every_kind_of_thread_can_allocate_sleep_print_and_panic",
        every_kind_of_thread_can_allocate_sleep_print_and_panic,
    ),
    (
        "no_thread_opens_executes_connects_or_touches_other_processes",
        no_thread_opens_executes_connects_or_touches_other_processes,
    ),
    (
        "each_kind_of_thread_has_what_it_is_for_and_no_more",
        each_kind_of_thread_has_what_it_is_for_and_no_more,
    ),
    ("a_forked_child_cannot_signal_its_relatives", a_forked_child_cannot_signal_its_relatives),
    ("logging_lets_everything_pass", logging_lets_everything_pass),
];

fn main() {
    if let Ok(case) = std::env::var(CASE) {
        return run_case(&case);
    }
    for (name, test) in TESTS {
        test();
        println!("test {name} ... ok");
    }
}

/// Runs `case` in a thread of `kind` in a new process and returns the signal that killed it, if any.
fn signal_of(kind: &str, case: &str, mode: &str) -> Option<i32> {
    let output = Command::new(std::env::current_exe().unwrap())
        .env(CASE, format!("{kind} {case} {mode}"))
        // A backtrace would open files.
        .env("RUST_BACKTRACE", "0")
        .output()
        .unwrap();
    if output.status.signal().is_none() {
        let text = String::from_utf8_lossy(&output.stdout);
        assert!(text.contains("case survived"), "{kind} {case}: {text}");
    }
    output.status.signal()
}

/// As in the monitor: the control thread filters itself and starts a thread, which tightens that.
fn run_case(case: &str) {
    let [kind, case, mode] = case.split(' ').collect::<Vec<_>>()[..] else { panic!("{case}") };
    let mode = if mode == "log" { Mode::Log } else { Mode::Kill };
    install(ThreadKind::Control, mode).unwrap();
    let start = |kind| {
        let case = case.to_owned();
        std::thread::spawn(move || {
            install(kind, mode).unwrap();
            call(&case);
        })
    };
    // A thread that panicked has survived too.
    match kind {
        "control" => call(case),
        "device" => drop(start(ThreadKind::Device).join()),
        _ => drop(start(ThreadKind::Vcpu).join()),
    }
    println!("case survived");
}

fn call(case: &str) {
    // Not asked for here: that is not allowed either, and would be all that is tested.
    const OTHER: libc::pid_t = 1;
    // SAFETY: each call has arguments that make it harmless or fail.
    unsafe {
        match case {
            "work" => {
                let numbers: Vec<u64> = (0..1 << 20).collect();
                std::thread::sleep(std::time::Duration::from_millis(1));
                println!("{} {:?}", numbers.len(), std::time::Instant::now());
                std::thread::yield_now();
            }
            // Grows and shrinks the heap, which some heaps do not do without opening a file.
            "heap" => {
                for size in [100_000usize, 60_000, 120_000] {
                    let blocks: Vec<Vec<u8>> = (0..200).map(|_| vec![1; size]).collect();
                    drop(blocks);
                }
            }
            "panic" => panic!("on purpose"),
            "open" => drop(std::fs::File::open("/dev/null")),
            "exec" => drop(libc::execve(c"/nonexistent".as_ptr(), std::ptr::null(), std::ptr::null())),
            "network" => drop(libc::socket(libc::AF_INET, libc::SOCK_STREAM, 0)),
            "code" => {
                let flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
                libc::mmap(std::ptr::null_mut(), 4096, libc::PROT_READ | libc::PROT_EXEC, flags, -1, 0);
            }
            "kill" => drop(libc::syscall(libc::SYS_tgkill, OTHER, OTHER, 0)),
            "set_flags" => drop(libc::fcntl(0, libc::F_SETFL, libc::O_DIRECT)),
            "ptrace" => drop(libc::ptrace(libc::PTRACE_TRACEME)),
            "terminal" => drop(libc::ioctl(0, libc::TIOCGWINSZ, 0)),
            "thread" => drop(std::thread::Builder::new().spawn(|| ()).unwrap()),
            "fork" => {
                let made = libc::fork();
                if made == 0 {
                    libc::_exit(0);
                }
                assert!(made > 0, "{}", std::io::Error::last_os_error());
            }
            "vfork" => drop(libc::syscall(libc::SYS_clone, libc::CLONE_VM | libc::SIGCHLD, 0, 0, 0, 0)),
            "clone3" => {
                let nothing = [0u64; 8];
                let made = libc::syscall(libc::SYS_clone3, nothing.as_ptr(), size_of_val(&nothing));
                if made == 0 {
                    libc::_exit(0);
                }
                assert!(made > 0, "{}", std::io::Error::last_os_error());
            }
            // Ends as its child does, which tries to reach its parent.
            "kill_from_fork" => {
                let parent = libc::getpid();
                let nothing = [0u64; 8];
                let made = libc::syscall(libc::SYS_clone3, nothing.as_ptr(), size_of_val(&nothing));
                if made == 0 {
                    libc::kill(parent, 0);
                    libc::_exit(0);
                }
                let mut status = 0;
                libc::wait4(-1, &raw mut status, libc::__WALL, std::ptr::null_mut());
                assert!(libc::WIFSIGNALED(status), "{status:#x}");
                assert_eq!(libc::WTERMSIG(status), libc::SIGSYS);
            }
            "unshare" => drop(libc::unshare(libc::CLONE_NEWUSER)),
            "count_threads" => drop(libc::unshare(libc::CLONE_THREAD)),
            "unshare_more" => drop(libc::unshare(libc::CLONE_THREAD | libc::CLONE_FILES)),
            "pidfd_signal" => drop(libc::syscall(libc::SYS_pidfd_send_signal, -1, 0, 0, 0)),
            "pidfd_open" => drop(libc::syscall(libc::SYS_pidfd_open, OTHER, 0)),
            "pidfd_getfd" => drop(libc::syscall(libc::SYS_pidfd_getfd, -1, 0, 0)),
            "queue_signal" => drop(libc::syscall(libc::SYS_rt_tgsigqueueinfo, OTHER, 0, 0, 0)),
            "read_memory" => drop(libc::process_vm_readv(OTHER, [].as_ptr(), 0, [].as_ptr(), 0, 0)),
            "prlimit" => {
                let _ = libc::prlimit(OTHER, libc::RLIMIT_CORE, std::ptr::null(), std::ptr::null_mut());
            }
            "nice_others" => drop(libc::setpriority(libc::PRIO_PROCESS, OTHER as u32, 19)),
            "nice_self" => drop(libc::setpriority(libc::PRIO_PROCESS, 0, 19)),
            "signal_self" => drop(libc::syscall(libc::SYS_tgkill, libc::getpid(), libc::getpid(), 0)),
            "timer" => drop(libc::syscall(libc::SYS_timer_create, libc::CLOCK_MONOTONIC, 0, 0)),
            "accept" => drop(libc::accept4(-1, std::ptr::null_mut(), std::ptr::null_mut(), 0)),
            "stream_pair" => drop(socket_pair(libc::SOCK_STREAM | libc::SOCK_CLOEXEC)),
            "packet_pair" => drop(socket_pair(libc::SOCK_SEQPACKET | libc::SOCK_CLOEXEC)),
            "datagram_pair" => drop(socket_pair(libc::SOCK_DGRAM | libc::SOCK_CLOEXEC)),
            "socket_listens" => drop(socket_option(libc::SYS_getsockopt, libc::SO_ACCEPTCONN)),
            "socket_peer" => drop(socket_option(libc::SYS_getsockopt, libc::SO_PEERCRED)),
            "socket_patience" => drop(socket_option(libc::SYS_setsockopt, libc::SO_SNDTIMEO)),
            "socket_filter" => drop(socket_option(libc::SYS_setsockopt, libc::SO_ATTACH_FILTER)),
            "give_back" => drop(libc::madvise(std::ptr::null_mut(), 0, libc::MADV_DONTNEED)),
            "huge_pages" => drop(libc::madvise(std::ptr::null_mut(), 0, libc::MADV_HUGEPAGE)),
            "merge_pages" => drop(libc::madvise(std::ptr::null_mut(), 0, libc::MADV_MERGEABLE)),
            "remove_pages" => drop(libc::madvise(std::ptr::null_mut(), 0, libc::MADV_REMOVE)),
            "kvm_create" => drop(libc::ioctl(-1, 0xae01, 0)),
            "kvm_create_other" => drop(libc::ioctl(-1, 0xae01, 1)),
            "filter" => drop(libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, 0, 0)),
            "filter_listener" => {
                let flags = libc::SECCOMP_FILTER_FLAG_NEW_LISTENER;
                libc::syscall(libc::SYS_seccomp, libc::SECCOMP_SET_MODE_FILTER, flags, 0);
            }
            "kvm_run" => drop(libc::ioctl(-1, 0xae80, 0)),
            "kvm_set_regs" => drop(libc::ioctl(-1, 0x4090_ae82, 0)),
            _ => panic!("no case {case}"),
        }
    }
}

fn socket_pair(kind: i32) -> i32 {
    let mut pair = [0; 2];
    // SAFETY: the call writes two numbers.
    unsafe { libc::socketpair(libc::AF_UNIX, kind, 0, pair.as_mut_ptr()) }
}

fn socket_option(call: libc::c_long, option: i32) -> libc::c_long {
    // SAFETY: there is no such descriptor, so no pointer is looked at.
    unsafe { libc::syscall(call, -1, libc::SOL_SOCKET, option, 0, 0) }
}

fn every_kind_of_thread_can_allocate_sleep_print_and_panic() {
    for kind in ["control", "device", "vcpu"] {
        assert_eq!(signal_of(kind, "work", "kill"), None, "{kind}");
        assert_eq!(signal_of(kind, "heap", "kill"), None, "{kind}");
    }
    for kind in ["device", "vcpu"] {
        assert_eq!(signal_of(kind, "panic", "kill"), None, "{kind}");
    }
}

fn no_thread_opens_executes_connects_or_touches_other_processes() {
    for kind in ["control", "device", "vcpu"] {
        let own =
            ["open", "exec", "vfork", "network", "code", "terminal", "unshare", "signal_self", "set_flags"];
        let own = own.into_iter().chain(["unshare_more"]);
        let others = ["kill", "ptrace", "pidfd_signal", "pidfd_getfd", "queue_signal"];
        let arguments = ["packet_pair", "datagram_pair", "socket_peer", "socket_filter", "merge_pages"];
        let others = others.into_iter().chain(arguments).chain(["remove_pages", "kvm_create_other"]);
        let others = others.chain(["filter_listener"]);
        for case in own.chain(others).chain(["read_memory", "prlimit", "nice_others"]) {
            assert_eq!(signal_of(kind, case, "kill"), Some(libc::SIGSYS), "{kind} {case}");
        }
    }
}

fn each_kind_of_thread_has_what_it_is_for_and_no_more() {
    for (kind, allowed, denied) in [
        (
            "control",
            &["thread", "clone3", "fork", "pidfd_open", "accept", "kvm_run", "kvm_set_regs", "timer"][..],
            &[][..],
        ),
        ("control", &["nice_self", "stream_pair", "socket_listens", "socket_patience", "give_back"], &[]),
        ("control", &["huge_pages", "kvm_create", "filter", "count_threads"], &[]),
        ("device", &["stream_pair", "give_back"], &["huge_pages", "socket_listens", "kvm_create", "filter"]),
        ("vcpu", &["give_back"], &["huge_pages", "stream_pair", "socket_listens", "kvm_create", "filter"]),
        ("device", &["accept"], &["kvm_run", "kvm_set_regs", "nice_self"]),
        ("vcpu", &["kvm_run"], &["accept", "kvm_set_regs", "nice_self"]),
        ("device", &[], &["thread", "clone3", "fork", "pidfd_open", "timer", "count_threads"]),
        ("vcpu", &[], &["thread", "clone3", "fork", "pidfd_open", "timer", "count_threads"]),
    ] {
        for case in allowed {
            assert_eq!(signal_of(kind, case, "kill"), None, "{kind} {case}");
        }
        for case in denied {
            assert_eq!(signal_of(kind, case, "kill"), Some(libc::SIGSYS), "{kind} {case}");
        }
    }
}

fn a_forked_child_cannot_signal_its_relatives() {
    assert_eq!(signal_of("control", "kill_from_fork", "kill"), None);
}

fn logging_lets_everything_pass() {
    assert_eq!(signal_of("vcpu", "open", "log"), None);
}

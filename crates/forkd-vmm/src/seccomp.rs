//! Which system calls each kind of thread may make.
//!
//! Allow-lists, installed by each thread on itself before it looks at anything a guest or a peer
//! sent. Threads inherit the filter of the thread that starts them and can only tighten it: the
//! control thread installs its own first, and the lists of the others are subsets of it. A call that
//! is not listed ends the process; `--seccomp log` lets it pass and writes it to the kernel's log
//! instead, to find out what a list lacks.

use std::collections::BTreeMap;
use std::env::consts::ARCH;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::{Error, Result};

/// What a thread is for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Talks to the controller, builds the VM and starts the other threads.
    Control,
    /// Serves the queues of the devices.
    Device,
    /// Runs a vCPU and serves register accesses.
    Vcpu,
}

/// What happens to a call that is not listed.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub enum Mode {
    /// The process ends.
    #[default]
    Kill,
    /// It is logged and made.
    Log,
}

/// Installs the filter for `kind` on the calling thread. The control thread's comes first, before the
/// process has other threads.
pub fn install(kind: ThreadKind, mode: Mode) -> Result<()> {
    let otherwise = match mode {
        Mode::Kill => SeccompAction::KillProcess,
        Mode::Log => SeccompAction::Log,
    };
    if kind == ThreadKind::Control {
        use_one_heap();
        apply(Ok([(libc::SYS_clone3, Vec::new())].into()), NO_CLONE3, SeccompAction::Allow)?;
    }
    apply(rules(kind), SeccompAction::Allow, otherwise)
}

/// What `clone3` gets from the control thread on: the C library then uses `clone`. What `clone3` is to
/// make stands in memory, where no filter sees it: a process, or a user namespace with all privileges.
const NO_CLONE3: SeccompAction = SeccompAction::Errno(libc::ENOSYS as u32);

/// Installs a filter: `listed` for calls that match `rules`, `otherwise` for all others. Of several
/// filters the strictest counts.
fn apply(
    rules: std::result::Result<Rules, seccompiler::BackendError>,
    listed: SeccompAction,
    otherwise: SeccompAction,
) -> Result<()> {
    let program = || -> std::result::Result<BpfProgram, seccompiler::BackendError> {
        SeccompFilter::new(rules?, otherwise, listed, ARCH.try_into()?)?.try_into()
    };
    let failed = |error: seccompiler::Error| Error::Config(format!("no seccomp filter: {error}"));
    seccompiler::apply_filter(&program().map_err(|error| failed(error.into()))?).map_err(failed)
}

/// Makes all threads allocate from one heap. The C library's heaps of other threads read a file in
/// `/proc` before they shrink, now and then, which no filter here allows.
fn use_one_heap() {
    // SAFETY: the call sets a number.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// What Rust and the C library do by themselves in any thread: memory, locks, signals, ending, and
/// the message of a panic.
const RUNTIME: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
    libc::SYS_madvise,
    libc::SYS_mremap,
    libc::SYS_munmap,
    libc::SYS_read,
    libc::SYS_restart_syscall,
    libc::SYS_rt_sigprocmask,
    libc::SYS_rt_sigreturn,
    libc::SYS_sched_yield,
    libc::SYS_sigaltstack,
    libc::SYS_write,
    libc::SYS_writev,
];

/// What devices do when a register is written: the console's file, and a device that is reset lets go
/// of its connections.
const REGISTERS: &[i64] = &[libc::SYS_epoll_ctl, libc::SYS_ftruncate, libc::SYS_pread64, libc::SYS_pwrite64];

/// What devices do with what they were given: disks, the tap, sockets.
const QUEUES: &[i64] = &[
    libc::SYS_accept4,
    libc::SYS_epoll_pwait,
    libc::SYS_epoll_wait,
    libc::SYS_preadv,
    libc::SYS_pwritev,
    libc::SYS_readv,
    libc::SYS_recvfrom,
    libc::SYS_recvmsg,
    libc::SYS_sendmsg,
    libc::SYS_sendto,
    libc::SYS_shutdown,
    libc::SYS_timerfd_settime,
];

/// What the control thread does on top: its socket, looking at descriptors, starting threads.
const CONTROL: &[i64] = &[
    // Fails, see `NO_CLONE3`, but is no reason to be killed.
    libc::SYS_clone3,
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_fstat,
    libc::SYS_getsockopt,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_setsockopt,
    libc::SYS_statx,
    libc::SYS_timerfd_create,
];

/// The ioctls that build a VM.
const BUILD_IOCTLS: &[u32] = &[
    0xae00,      // KVM_GET_API_VERSION
    0xae01,      // KVM_CREATE_VM
    0xae03,      // KVM_CHECK_EXTENSION
    0xae04,      // KVM_GET_VCPU_MMAP_SIZE
    0xae41,      // KVM_CREATE_VCPU
    0xae47,      // KVM_SET_TSS_ADDR
    0xae60,      // KVM_CREATE_IRQCHIP
    0xc008_ae05, // KVM_GET_SUPPORTED_CPUID
    0x4020_ae46, // KVM_SET_USER_MEMORY_REGION
    0x4020_ae76, // KVM_IRQFD
    0x4040_ae79, // KVM_IOEVENTFD
    0x8090_ae81, // KVM_GET_REGS
    0x4090_ae82, // KVM_SET_REGS
    0x8138_ae83, // KVM_GET_SREGS
    0x4138_ae84, // KVM_SET_SREGS
    0x4008_ae89, // KVM_SET_MSRS
    0x41a0_ae8d, // KVM_SET_FPU
    0x8400_ae8e, // KVM_GET_LAPIC
    0x4400_ae8f, // KVM_SET_LAPIC
    0x4008_ae90, // KVM_SET_CPUID2
    0x5421,      // FIONBIO, how std makes sockets non-blocking
];
const KVM_RUN: u32 = 0xae80;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules(kind: ThreadKind) -> std::result::Result<Rules, seccompiler::BackendError> {
    let lists: &[&[i64]] = match kind {
        ThreadKind::Control => &[RUNTIME, REGISTERS, QUEUES, CONTROL],
        ThreadKind::Device => &[RUNTIME, REGISTERS, QUEUES],
        ThreadKind::Vcpu => &[RUNTIME, REGISTERS],
    };
    let mut rules: Rules = lists.iter().copied().flatten().map(|&call| (call, Vec::new())).collect();

    // Memory, but never code: what is written here must not be run here.
    let no_code = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![when(2, no_code.clone(), 0)?]);
    }
    // Signals to threads of this process only: to kick vCPUs, and to abort.
    let own_process = u64::from(std::process::id());
    rules.insert(libc::SYS_tgkill, vec![when(0, SeccompCmpOp::Eq, own_process)?]);

    // Connections of the guest to the host are pairs of unix sockets, never a network.
    if kind != ThreadKind::Vcpu {
        rules.insert(libc::SYS_socketpair, vec![when(0, SeccompCmpOp::Eq, libc::AF_UNIX as u64)?]);
    }
    match kind {
        ThreadKind::Control => {
            let ioctls = BUILD_IOCTLS.iter().chain([&KVM_RUN]).map(|&request| ioctl(request));
            rules.insert(libc::SYS_ioctl, ioctls.collect::<std::result::Result<_, _>>()?);
            // Threads, not processes; and the kernel gives no thread a user namespace of its own.
            let thread = libc::CLONE_THREAD as u64;
            rules.insert(libc::SYS_clone, vec![when(0, SeccompCmpOp::MaskedEq(thread), thread)?]);
            // New threads set their name and tighten their filter.
            let prctl = [libc::PR_SET_NAME, libc::PR_SET_NO_NEW_PRIVS];
            let prctl = prctl.map(|option| when(0, SeccompCmpOp::Eq, option as u64));
            rules.insert(libc::SYS_prctl, prctl.into_iter().collect::<std::result::Result<_, _>>()?);
            let set_filter = u64::from(libc::SECCOMP_SET_MODE_FILTER);
            rules.insert(libc::SYS_seccomp, vec![when(0, SeccompCmpOp::Eq, set_filter)?]);
            let fcntl = [libc::F_GETFL, libc::F_SETFL, libc::F_GETFD, libc::F_DUPFD_CLOEXEC];
            let fcntl = fcntl.map(|command| when(1, SeccompCmpOp::Eq, command as u64));
            rules.insert(libc::SYS_fcntl, fcntl.into_iter().collect::<std::result::Result<_, _>>()?);
        }
        ThreadKind::Device => {}
        ThreadKind::Vcpu => {
            rules.insert(libc::SYS_ioctl, vec![ioctl(KVM_RUN)?]);
        }
    }
    Ok(rules)
}

fn ioctl(request: u32) -> std::result::Result<SeccompRule, seccompiler::BackendError> {
    when(1, SeccompCmpOp::Eq, u64::from(request))
}

/// A rule: the lower half of argument `index`, compared by `operator` with `value`.
fn when(
    index: u8,
    operator: SeccompCmpOp,
    value: u64,
) -> std::result::Result<SeccompRule, seccompiler::BackendError> {
    SeccompRule::new(vec![SeccompCondition::new(index, SeccompCmpArgLen::Dword, operator, value)?])
}

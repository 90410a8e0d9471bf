//! Which system calls each kind of thread may make.
//!
//! Allow-lists, installed by each thread on itself before it reads any input of a guest or a peer. Threads
//! inherit the filter of the thread that starts them and can only tighten it: the control thread installs its
//! own first, and the lists of the others are subsets of it. Forks inherit it too: a template's list is its
//! children's, so nothing in it depends on a process id, and no call that could reach into another process is
//! in it: the children of a lineage share a user id. A call that is not listed ends the process; `--seccomp
//! log` lets it pass and writes it to the kernel's log instead, to find out what a list lacks.

use std::collections::BTreeMap;
use std::env::consts::ARCH;
use std::sync::OnceLock;

use seccompiler::{
    BpfProgram, SeccompAction, SeccompCmpArgLen, SeccompCmpOp, SeccompCondition, SeccompFilter, SeccompRule,
};

use crate::{Error, Result};

/// The purpose of a thread.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum ThreadKind {
    /// Talks to the controller, builds the VM and starts the other threads.
    Control,
    /// Serves the queues of the devices.
    Device,
    /// Runs a vCPU and serves register accesses.
    Vcpu,
}

/// The action for a call that is not listed.
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
    if kind == ThreadKind::Control {
        use_one_heap();
    }
    let programs = programs(mode).map_err(failed)?;
    let program = match kind {
        ThreadKind::Control => &programs.control,
        ThreadKind::Device => &programs.device,
        ThreadKind::Vcpu => &programs.vcpu,
    };
    seccompiler::apply_filter(program).map_err(failed)
}

fn failed(error: impl std::fmt::Display) -> Error {
    Error::Config(format!("no seccomp filter: {error}"))
}

/// The filters, ready to be installed.
struct Programs {
    control: BpfProgram,
    device: BpfProgram,
    vcpu: BpfProgram,
}

/// The filters of a mode. Compiled once per process and its forks: a forked child finds them in the
/// memory it inherits, and installing one is one system call.
fn programs(mode: Mode) -> std::result::Result<&'static Programs, &'static str> {
    type Compiled = OnceLock<std::result::Result<Programs, String>>;
    static KILL: Compiled = OnceLock::new();
    static LOG: Compiled = OnceLock::new();
    let (compiled, otherwise) = match mode {
        Mode::Kill => (&KILL, SeccompAction::KillProcess),
        Mode::Log => (&LOG, SeccompAction::Log),
    };
    let compile = |kind| -> std::result::Result<BpfProgram, seccompiler::BackendError> {
        SeccompFilter::new(rules(kind)?, otherwise.clone(), SeccompAction::Allow, ARCH.try_into()?)?
            .try_into()
    };
    let all = || {
        Ok(Programs {
            control: compile(ThreadKind::Control)?,
            device: compile(ThreadKind::Device)?,
            vcpu: compile(ThreadKind::Vcpu)?,
        })
    };
    let result = compiled.get_or_init(|| all().map_err(|error: seccompiler::BackendError| error.to_string()));
    result.as_ref().map_err(String::as_str)
}

/// Makes all threads allocate from one heap. The C library's heaps of other threads read a file in
/// `/proc` before they shrink, now and then, which no filter here allows.
fn use_one_heap() {
    // SAFETY: the call sets a number.
    unsafe { libc::mallopt(libc::M_ARENA_MAX, 1) };
}

/// Calls that Rust and the C library make by themselves in any thread: memory, locks, signals, ending, and
/// the message of a panic.
const RUNTIME: &[i64] = &[
    libc::SYS_brk,
    libc::SYS_clock_gettime,
    libc::SYS_clock_nanosleep,
    libc::SYS_close,
    libc::SYS_exit,
    libc::SYS_exit_group,
    libc::SYS_futex,
    libc::SYS_getcpu,
    libc::SYS_getpid,
    libc::SYS_getrandom,
    libc::SYS_gettid,
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

/// Calls of devices when a register is written: the console's file, and a device that is reset lets go of its
/// connections.
const REGISTERS: &[i64] = &[libc::SYS_epoll_ctl, libc::SYS_ftruncate, libc::SYS_pread64, libc::SYS_pwrite64];

/// Calls of devices on their descriptors: disks, the tap, sockets.
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

/// Further calls of the control thread: its socket, looking at descriptors, starting threads and getting
/// their vCPUs out of the guest.
const CONTROL: &[i64] = &[
    libc::SYS_dup,
    libc::SYS_epoll_create1,
    libc::SYS_eventfd2,
    libc::SYS_fstat,
    libc::SYS_poll,
    libc::SYS_ppoll,
    libc::SYS_rseq,
    libc::SYS_rt_sigaction,
    libc::SYS_sched_getaffinity,
    libc::SYS_set_robust_list,
    libc::SYS_statx,
    // Timers signal threads of their own process only: the kernel sees to that.
    libc::SYS_timer_create,
    libc::SYS_timer_delete,
    libc::SYS_timer_settime,
    libc::SYS_timerfd_create,
];

/// Further calls of a template: it assembles its memory, forks, waits for its children, and its savers write
/// files. A process that branches looks up its child; nothing here can act on what it finds that way.
///
/// The arguments of `clone3` are in memory, where no filter sees them, and only `clone3` makes a process in a
/// cgroup. Every sandbox can be branched, and its branch is a template: none of them can do without it. It
/// gives no more than `fork` does: namespaces take privileges that no process in the jail has, and the user
/// namespaces that would give them are refused to a process in a chroot, which the jail ends with. What
/// remains is `CLONE_PARENT`: a broken monitor can make processes that are children of its template, or of
/// the daemon, instead of its own. They have its walls, its user id and its cgroup, so its limits count them;
/// a template reaps them and takes no notice.
const FORK: &[i64] = &[
    libc::SYS_clone3,
    libc::SYS_close_range,
    libc::SYS_fallocate,
    libc::SYS_fdatasync,
    libc::SYS_fsync,
    libc::SYS_lseek,
    libc::SYS_memfd_create,
    libc::SYS_pidfd_open,
    libc::SYS_signalfd4,
    libc::SYS_wait4,
];

/// The ioctls that build a VM, and save and restore its state.
const BUILD_IOCTLS: &[u32] = &[
    0xae00,      // KVM_GET_API_VERSION
    0xc004_ae02, // KVM_GET_MSR_INDEX_LIST
    0xae03,      // KVM_CHECK_EXTENSION
    0xae04,      // KVM_GET_VCPU_MMAP_SIZE
    0xc008_ae05, // KVM_GET_SUPPORTED_CPUID
    0xae41,      // KVM_CREATE_VCPU
    0x4020_ae46, // KVM_SET_USER_MEMORY_REGION
    0xae47,      // KVM_SET_TSS_ADDR
    0xae60,      // KVM_CREATE_IRQCHIP
    0x4008_ae61, // KVM_IRQ_LINE
    0xc208_ae62, // KVM_GET_IRQCHIP
    0x8208_ae63, // KVM_SET_IRQCHIP
    0x4020_ae76, // KVM_IRQFD
    0x4040_ae79, // KVM_IOEVENTFD
    0x4030_ae7b, // KVM_SET_CLOCK
    0x8030_ae7c, // KVM_GET_CLOCK
    0x8090_ae81, // KVM_GET_REGS
    0x4090_ae82, // KVM_SET_REGS
    0x8138_ae83, // KVM_GET_SREGS
    0x4138_ae84, // KVM_SET_SREGS
    0xc008_ae88, // KVM_GET_MSRS
    0x4008_ae89, // KVM_SET_MSRS
    0x41a0_ae8d, // KVM_SET_FPU
    0x8400_ae8e, // KVM_GET_LAPIC
    0x4400_ae8f, // KVM_SET_LAPIC
    0x4008_ae90, // KVM_SET_CPUID2
    0xc008_ae91, // KVM_GET_CPUID2
    0x8004_ae98, // KVM_GET_MP_STATE
    0x4004_ae99, // KVM_SET_MP_STATE
    0x8040_ae9f, // KVM_GET_VCPU_EVENTS
    0x4040_aea0, // KVM_SET_VCPU_EVENTS
    0x8080_aea1, // KVM_GET_DEBUGREGS
    0x4080_aea2, // KVM_SET_DEBUGREGS
    0xaea2,      // KVM_SET_TSC_KHZ
    0xaea3,      // KVM_GET_TSC_KHZ
    0x9000_aea4, // KVM_GET_XSAVE
    0x5000_aea5, // KVM_SET_XSAVE
    0x8188_aea6, // KVM_GET_XCRS
    0x4188_aea7, // KVM_SET_XCRS
    0xaead,      // KVM_KVMCLOCK_CTRL
    0x9000_aecf, // KVM_GET_XSAVE2
    0x4018_aee1, // KVM_SET_DEVICE_ATTR
    0x4018_aee2, // KVM_GET_DEVICE_ATTR
    0x4018_aee3, // KVM_HAS_DEVICE_ATTR
    0x5421,      // FIONBIO, how std makes sockets non-blocking
];
const KVM_RUN: u32 = 0xae80;
/// With one more argument: the kind of VM.
const KVM_CREATE_VM: u32 = 0xae01;

/// Memory advice of any thread: for a heap or a stack that is given back, and for the guard of a new stack.
const ADVICE: &[i32] = &[libc::MADV_DONTNEED, MADV_GUARD_INSTALL, MADV_GUARD_REMOVE];
/// Further advice of the control thread, for guest memory and memory shared with KVM.
const CONTROL_ADVICE: &[i32] =
    &[libc::MADV_DONTFORK, libc::MADV_HUGEPAGE, libc::MADV_NOHUGEPAGE, libc::MADV_POPULATE_READ];
/// As in `linux/mman.h`, since Linux 6.13; newer C libraries use them for the stacks of threads.
const MADV_GUARD_INSTALL: i32 = 102;
const MADV_GUARD_REMOVE: i32 = 103;
/// As in `asm/socket.h`: how long sending waits, in the form that is tried first.
const SO_SNDTIMEO_NEW: i32 = 67;
/// The target of `ioprio_set`: a process.
pub(crate) const IOPRIO_WHO_PROCESS: u32 = 1;

type Rules = BTreeMap<i64, Vec<SeccompRule>>;

fn rules(kind: ThreadKind) -> std::result::Result<Rules, seccompiler::BackendError> {
    let lists: &[&[i64]] = match kind {
        ThreadKind::Control => &[RUNTIME, REGISTERS, QUEUES, CONTROL, FORK],
        ThreadKind::Device => &[RUNTIME, REGISTERS, QUEUES],
        ThreadKind::Vcpu => &[RUNTIME, REGISTERS],
    };
    let mut rules: Rules = lists.iter().copied().flatten().map(|&call| (call, Vec::new())).collect();

    // Memory, but never code: written memory must not be executable.
    let no_code = SeccompCmpOp::MaskedEq(libc::PROT_EXEC as u64);
    for call in [libc::SYS_mmap, libc::SYS_mprotect] {
        rules.insert(call, vec![when(2, no_code.clone(), 0)?]);
    }
    // Connections of the guest to the host are pairs of unix sockets, never a network; and streams: from
    // others one could send to any name.
    if kind != ThreadKind::Vcpu {
        let stream = (libc::SOCK_STREAM | libc::SOCK_CLOEXEC) as u32;
        rules.insert(libc::SYS_socketpair, vec![both((0, libc::AF_UNIX as u32), (1, stream))?]);
    }
    let advice = ADVICE.iter().chain(if kind == ThreadKind::Control { CONTROL_ADVICE } else { &[] });
    let advice = advice.map(|advice| when(2, SeccompCmpOp::Eq, *advice as u64));
    rules.insert(libc::SYS_madvise, advice.collect::<std::result::Result<_, _>>()?);
    match kind {
        ThreadKind::Control => {
            let ioctls = BUILD_IOCTLS.iter().chain([&KVM_RUN]).map(|&request| ioctl(request));
            // An ordinary VM: other kinds are more of KVM to attack.
            let ioctls = ioctls.chain([both((1, KVM_CREATE_VM), (2, 0))]);
            rules.insert(libc::SYS_ioctl, ioctls.collect::<std::result::Result<_, _>>()?);
            // Whether a socket listens, and how long a controller that does not read is waited for.
            let socket = |option: i32| both((1, libc::SOL_SOCKET as u32), (2, option as u32));
            rules.insert(libc::SYS_getsockopt, vec![socket(libc::SO_ACCEPTCONN)?]);
            rules.insert(libc::SYS_setsockopt, vec![socket(libc::SO_SNDTIMEO)?, socket(SO_SNDTIMEO_NEW)?]);
            // How older C libraries make threads, and all of them fork. Else processes are made with `clone3`.
            let thread = libc::CLONE_THREAD as u64;
            let fork = (libc::CLONE_CHILD_SETTID | libc::CLONE_CHILD_CLEARTID | libc::SIGCHLD) as u64;
            let clone = [when(0, SeccompCmpOp::MaskedEq(thread), thread)?, when(0, SeccompCmpOp::Eq, fork)?];
            rules.insert(libc::SYS_clone, clone.into());
            // New threads set their name and tighten their filter.
            let prctl = [libc::PR_SET_NAME, libc::PR_SET_NO_NEW_PRIVS];
            let prctl = prctl.map(|option| when(0, SeccompCmpOp::Eq, option as u64));
            rules.insert(libc::SYS_prctl, prctl.into_iter().collect::<std::result::Result<_, _>>()?);
            rules.insert(libc::SYS_seccomp, vec![both((0, libc::SECCOMP_SET_MODE_FILTER), (1, 0))?]);
            // Flags are looked at and never set: those of a disk's base are its siblings' too, and with
            // `O_DIRECT` among them their reads would fail.
            let fcntl = [libc::F_GETFL, libc::F_GETFD, libc::F_DUPFD_CLOEXEC];
            let fcntl = fcntl.map(|command| when(1, SeccompCmpOp::Eq, command as u64));
            rules.insert(libc::SYS_fcntl, fcntl.into_iter().collect::<std::result::Result<_, _>>()?);
            // Only savers lower their priority: "process 0" is the caller.
            rules.insert(libc::SYS_setpriority, vec![both((0, libc::PRIO_PROCESS), (1, 0))?]);
            rules.insert(libc::SYS_sched_setscheduler, vec![both((0, 0), (1, libc::SCHED_IDLE as u32))?]);
            rules.insert(libc::SYS_ioprio_set, vec![both((0, IOPRIO_WHO_PROCESS), (1, 0))?]);
            // How a template asks whether it has one thread, which it must before it forks. With exactly this flag
            // the call changes nothing.
            let alone = SeccompCondition::new(
                0,
                SeccompCmpArgLen::Qword,
                SeccompCmpOp::Eq,
                libc::CLONE_THREAD as u64,
            )?;
            rules.insert(libc::SYS_unshare, vec![SeccompRule::new(vec![alone])?]);
            // A thread that branches moves itself to the guest's CPU and back, and no other thread: "thread
            // 0" is the caller.
            rules.insert(libc::SYS_sched_setaffinity, vec![when(0, SeccompCmpOp::Eq, 0)?]);
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

/// A rule: two arguments, by their index, have these lower halves.
fn both(one: (u8, u32), other: (u8, u32)) -> std::result::Result<SeccompRule, seccompiler::BackendError> {
    let is = |(index, value): (u8, u32)| {
        SeccompCondition::new(index, SeccompCmpArgLen::Dword, SeccompCmpOp::Eq, value.into())
    };
    SeccompRule::new(vec![is(one)?, is(other)?])
}

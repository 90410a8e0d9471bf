//! The monitor's process: puts up the walls, then serves its controller.
//!
//! `forkd-vmm [--uid N --gid N] [--seccomp kill|log]` with the listening control socket as descriptor
//! 3; `forkd-vmm probe` with `/dev/kvm` as descriptor 3; `forkd-vmm check [--uid N --gid N] [--seccomp
//! kill|log]` with `/dev/kvm` as descriptor 3 and a snapshot's state as standard input.

use std::io::Write;
use std::os::fd::{FromRawFd, OwnedFd};
use std::process::ExitCode;

use forkd_protocol::control::LISTENER_FD;
use forkd_vmm::control::{self, Finish};
use forkd_vmm::jail::{self, JailIds};
use forkd_vmm::seccomp::{self, Mode, ThreadKind};
use forkd_vmm::{Error, Result, probe};

const USAGE: &str = "usage: forkd-vmm [--uid N --gid N] [--seccomp kill|log], with the listening control \
                     socket as descriptor 3; or: forkd-vmm probe, with /dev/kvm as descriptor 3; or: forkd-vmm \
                     check [the same options], with that and a snapshot's state as standard input";

/// The most memory a check takes. An honest state takes a few MiB, that of a disk of many GiB which was
/// written all over some hundred.
const CHECK_MEMORY: u64 = 1 << 30;

fn main() -> ExitCode {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    if arguments == ["probe"] {
        return run_probe();
    }
    let done = match arguments.split_first() {
        Some((first, options)) if first == "check" => parse(options).and_then(run_check),
        _ => parse(&arguments).and_then(run),
    };
    match done {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            say(&error.chain());
            ExitCode::FAILURE
        }
    }
}

/// How the process was started.
struct Options {
    ids: Option<JailIds>,
    seccomp: Mode,
}

fn parse(arguments: &[String]) -> Result<Options> {
    let usage = || Error::Config(USAGE.into());
    let (mut uid, mut gid, mut seccomp) = (None, None, Mode::Kill);
    for pair in arguments.chunks(2) {
        let [name, value] = pair else { return Err(usage()) };
        match (name.as_str(), value.as_str()) {
            ("--uid", id) => uid = Some(id.parse().map_err(|_| usage())?),
            ("--gid", id) => gid = Some(id.parse().map_err(|_| usage())?),
            ("--seccomp", "kill") => seccomp = Mode::Kill,
            ("--seccomp", "log") => seccomp = Mode::Log,
            _ => return Err(usage()),
        }
    }
    let ids = match (uid, gid) {
        (Some(uid), Some(gid)) => Some(JailIds { uid, gid }),
        (None, None) => None,
        _ => return Err(usage()),
    };
    Ok(Options { ids, seccomp })
}

fn run(options: Options) -> Result<()> {
    // A thread that fails takes the VM with it: half a monitor would be an unnoticed hang. No backtrace: it
    // would open files, which the filters forbid.
    std::panic::set_hook(Box::new(|info| {
        say(&info.to_string());
        std::process::exit(101);
    }));
    let listener = inherited(LISTENER_FD)?;
    jail::enter(options.ids)?;
    seccomp::install(ThreadKind::Control, options.seccomp)?;
    match control::serve(listener, options.seccomp)? {
        Finish::Stopped | Finish::Saved => {}
        Finish::Ended(end) => say(&format!("the VM ended ({:?}): {}", end.reason, end.detail)),
    }
    Ok(())
}

fn run_probe() -> ExitCode {
    let report = match inherited(probe::KVM_FD) {
        Ok(kvm) => probe::run(kvm),
        Err(error) => probe::Report { reason: error.chain(), ..Default::default() },
    };
    match serde_json::to_string(&report) {
        Ok(text) => println!("{text}"),
        Err(error) => say(&error.to_string()),
    }
    // Not by returning: a guest that hangs must not be waited for.
    std::process::exit(0)
}

/// Whether this host could restore the state on standard input, which may be any bytes: behind the same
/// walls as a VM, and in little memory.
fn run_check(options: Options) -> Result<()> {
    let (state, kvm) = (inherited(libc::STDIN_FILENO)?, inherited(probe::KVM_FD)?);
    jail::enter(options.ids)?;
    jail::limit_memory(CHECK_MEMORY)?;
    seccomp::install(ThreadKind::Control, options.seccomp)?;
    forkd_vmm::state::frozen::check_state(kvm, &state.into())
}

/// Writes a line for people. Standard error may be closed: that is no reason to fail.
fn say(text: &str) {
    let _ = writeln!(std::io::stderr(), "forkd-vmm: {text}");
}

/// Takes over descriptor `number`, which the parent process left open.
fn inherited(number: i32) -> Result<OwnedFd> {
    // SAFETY: `fcntl` with this command only looks, also at a number that is not open.
    if unsafe { libc::fcntl(number, libc::F_GETFD) } < 0 {
        return Err(Error::Config(format!("descriptor {number} is not open; {USAGE}")));
    }
    // SAFETY: the descriptor is open, and nothing else in this process, which has just started, owns it.
    Ok(unsafe { OwnedFd::from_raw_fd(number) })
}

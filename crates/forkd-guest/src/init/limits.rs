//! Limits that keep the agent alive when the processes of the guest take all resources.

use std::{fs, path::PathBuf};

use rustix::process::{Resource, Rlimit};

use crate::log;

/// The cgroup of everything users run.
const USER_CGROUP: &str = "/sys/fs/cgroup/user";
/// Memory that users cannot have: the least and the most.
const RESERVE: (u64, u64) = (16 << 20, 64 << 20);

/// Protects PID 1 itself. Its children give all of this up again.
pub(super) fn protect_agent() {
    if let Err(error) = fs::write("/proc/self/oom_score_adj", "-1000") {
        log::error!("cannot protect the agent from running out of memory: {error}");
    }
    // A little ahead of busy users, so that they can be signalled.
    let _ = rustix::process::setpriority_process(None, -5);
    let files = Rlimit { current: Some(65_536), maximum: Some(1 << 20) };
    let _ = rustix::process::setrlimit(Resource::Nofile, files);
    rustix::process::umask(rustix::fs::Mode::from_raw_mode(0o022));
    // Ctrl-Alt-Del must not reset the guest behind the host's back.
    let _ = rustix::system::reboot(rustix::system::RebootCommand::CadOff);
}

/// Makes the cgroup for users' processes, with everything but a small reserve for the agent.
/// `None` if there cannot be one; commands still run then.
pub(super) fn make_user_cgroup() -> Option<PathBuf> {
    for controller in ["+pids", "+memory"] {
        if let Err(error) = fs::write("/sys/fs/cgroup/cgroup.subtree_control", controller) {
            log::info!("no cgroup controller {controller}: {error}");
        }
    }
    if let Err(error) = fs::create_dir(USER_CGROUP) {
        log::error!("cannot create {USER_CGROUP}: {error}; commands run without cgroups");
        return None;
    }
    if let Some(pids) = most_threads() {
        let _ = fs::write(format!("{USER_CGROUP}/pids.max"), (pids - pids / 10).to_string());
    }
    let info = rustix::system::sysinfo();
    let memory = u64::from(info.mem_unit).saturating_mul(info.totalram);
    let reserve = (memory / 16).clamp(RESERVE.0, RESERVE.1);
    if let Some(most) = memory.checked_sub(reserve) {
        let _ = fs::write(format!("{USER_CGROUP}/memory.max"), most.to_string());
    }
    Some(USER_CGROUP.into())
}

/// The kernel's limit of threads.
fn most_threads() -> Option<u64> {
    let read = |name| fs::read_to_string(format!("/proc/sys/kernel/{name}")).ok()?.trim().parse().ok();
    let (threads, pids): (Option<u64>, Option<u64>) = (read("threads-max"), read("pid_max"));
    Some(threads?.min(pids?))
}

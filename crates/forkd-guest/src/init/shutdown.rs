//! The end of a guest.

use std::{fs, thread, time::Duration};

use rustix::{
    mount::{MountFlags, UnmountFlags},
    system::RebootCommand,
};

use super::mounts;
use crate::{log, process::reaper};

/// How long processes have between being asked to end and being ended.
const GRACE: Duration = Duration::from_secs(5);
/// How long killed ones may take to be gone.
const KILL_TIME: Duration = Duration::from_secs(2);

/// Ends all processes, puts the file systems in order and powers off.
pub(super) fn shut_down() {
    // Frozen processes do not get signals.
    let _ = fs::write("/sys/fs/cgroup/user/cgroup.freeze", "0");
    signal_all(libc::SIGTERM);
    signal_all(libc::SIGCONT);
    if !reaper::wait_until_childless(GRACE) {
        signal_all(libc::SIGKILL);
        reaper::wait_until_childless(KILL_TIME);
    }
    rustix::fs::sync();
    for path in mounts::mounted() {
        let unmounted = rustix::mount::unmount(&path, UnmountFlags::empty());
        if unmounted.is_err() && rustix::mount::mount_remount(&path, MountFlags::RDONLY, c"").is_err() {
            log::info!("{} stays mounted", path.display());
        }
    }
    rustix::fs::sync();
    power_off()
}

/// Signals every process but this one.
fn signal_all(signal: i32) {
    // SAFETY: plain integers; -1 means everybody else, to PID 1.
    unsafe { libc::kill(-1, signal) };
}

/// Ends the guest at once.
pub(super) fn power_off() -> ! {
    rustix::fs::sync();
    let _ = rustix::system::reboot(RebootCommand::PowerOff);
    // Only where that is not allowed; a reset also ends the guest.
    let _ = rustix::system::reboot(RebootCommand::Restart);
    loop {
        thread::sleep(Duration::from_secs(60));
    }
}

//! Checks of how this computer's kernel is set.

use std::fs;

use super::{Check, Runs};

/// Pages of guests that the kernel merges tell one guest what another one has in its memory.
pub(super) fn same_page_merging() -> Check {
    judge_merging(fs::read_to_string("/sys/kernel/mm/ksm/run").ok().as_deref())
}

fn judge_merging(run: Option<&str>) -> Check {
    const NAME: &str = "ksm";
    match run.map(str::trim) {
        None => Check::pass(NAME, "this kernel does not merge pages"),
        Some("1") => Check::warn(
            NAME,
            "the kernel merges equal pages: by the time a write takes, a guest can tell what others hold",
            "echo 2 > /sys/kernel/mm/ksm/run; forked children share memory without it",
        ),
        Some(_) => Check::pass(NAME, "pages are not merged"),
    }
}

/// For people who compare: forkd itself does not need it.
pub(super) fn userfaultfd() -> Check {
    const NAME: &str = "userfaultfd";
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call takes flags only and makes a descriptor or an error.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if made < 0 {
        let error = std::io::Error::last_os_error();
        return Check::skip(
            NAME,
            format!("not there ({error}); only `forkd bench branch` uses it, to compare"),
        );
    }
    // SAFETY: the descriptor was just made, and nobody else has it.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(made as i32) });
    Check::pass(NAME, "there; only `forkd bench branch` uses it, to compare")
}

/// Without it guests do not get out; the daemon switches it on.
pub(super) fn forwarding(will_use: Runs) -> Check {
    const NAME: &str = "ip-forward";
    if will_use == Runs::Machine {
        return Check::skip(NAME, "not needed: the emulated machine forwards for itself");
    }
    match fs::read_to_string("/proc/sys/net/ipv4/ip_forward").map(|text| text.trim() == "1") {
        Ok(true) => Check::pass(NAME, "IPv4 is forwarded"),
        Ok(false) => Check::warn(
            NAME,
            "IPv4 is not forwarded yet; the daemon switches it on with the first network",
            "nothing to do, or sysctl -w net.ipv4.ip_forward=1",
        ),
        Err(error) => {
            Check::warn(NAME, format!("cannot be read: {error}"), "use a kernel with IPv4 for networks")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::*;

    #[test]
    fn merging_pages_is_warned_of_and_nothing_else_is() {
        assert_eq!(judge_merging(Some("1\n")).status, CheckStatus::Warn);
        for fine in [Some("0\n"), Some("2\n"), None] {
            assert_eq!(judge_merging(fine).status, CheckStatus::Pass);
        }
    }
}

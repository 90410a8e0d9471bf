//! Checks of settings of the host's kernel.

use std::fs;

use super::{Check, Runs};

/// Merged pages reveal the memory of one guest to another.
pub(super) fn same_page_merging() -> Check {
    judge_merging(fs::read_to_string("/sys/kernel/mm/ksm/run").ok().as_deref())
}

fn judge_merging(run: Option<&str>) -> Check {
    const NAME: &str = "ksm";
    match run.map(str::trim) {
        None => Check::pass(NAME, "this kernel does not merge pages"),
        Some("1") => Check::warn(
            NAME,
            "the kernel merges equal pages: from the time of its writes, a guest can infer the memory of other guests",
            "echo 2 > /sys/kernel/mm/ksm/run; forked children share memory without it",
        ),
        Some(_) => Check::pass(NAME, "the kernel does not merge pages"),
    }
}

/// For the benchmark only: forkd itself does not need userfaultfd.
pub(super) fn userfaultfd() -> Check {
    const NAME: &str = "userfaultfd";
    let flags = libc::O_CLOEXEC | libc::O_NONBLOCK;
    // SAFETY: the call takes flags only, and returns a descriptor or an error.
    let made = unsafe { libc::syscall(libc::SYS_userfaultfd, flags) };
    if made < 0 {
        let error = std::io::Error::last_os_error();
        return Check::skip(
            NAME,
            format!("missing ({error}); only `forkd bench branch` uses it, to compare"),
        );
    }
    // SAFETY: the call above returned the descriptor, and no other code owns it.
    drop(unsafe { <std::os::fd::OwnedFd as std::os::fd::FromRawFd>::from_raw_fd(made as i32) });
    Check::pass(NAME, "available; only `forkd bench branch` uses it, to compare")
}

/// Guests reach the internet only with it; the daemon enables it.
pub(super) fn forwarding(will_use: Runs) -> Check {
    const NAME: &str = "ip-forward";
    if will_use == Runs::Machine {
        return Check::skip(NAME, "not needed: the emulated machine forwards by itself");
    }
    match fs::read_to_string("/proc/sys/net/ipv4/ip_forward").map(|text| text.trim() == "1") {
        Ok(true) => Check::pass(NAME, "the kernel forwards IPv4"),
        Ok(false) => Check::warn(
            NAME,
            "the kernel does not forward IPv4 yet; the daemon enables it with the first network",
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

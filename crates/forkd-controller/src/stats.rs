//! What a process uses on the host.

use std::io;

use crate::api::Stats;
use crate::process::field;

/// Clock ticks of `/proc` per second: fixed by the kernel for user space on x86.
const TICKS_PER_SEC: u64 = 100;

/// Of process `pid`.
pub(crate) fn read(pid: u32) -> io::Result<Stats> {
    let mut stats = parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?);
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    let ticks = field::<u64>(&stat, 14).zip(field::<u64>(&stat, 15));
    stats.cpu_ms =
        ticks.map(|(user, kernel)| user.saturating_add(kernel).saturating_mul(1000 / TICKS_PER_SEC));
    Ok(stats)
}

/// The sums in a `smaps_rollup`.
fn parse(rollup: &str) -> Stats {
    let kib = |key: &str| -> u64 {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
    };
    Stats {
        private_kib: kib("Private_Clean") + kib("Private_Dirty") + kib("Private_Hugetlb"),
        pss_kib: kib("Pss"),
        rss_kib: kib("Rss"),
        ..Stats::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_private_is_summed_whatever_kind_it_is() {
        let rollup = "00400000-7fff [rollup]\nRss:    100 kB\nPss:   60 kB\nPss_Dirty: 9 kB\n\
                      Private_Clean: 10 kB\nPrivate_Dirty:   20 kB\nPrivate_Hugetlb: 3 kB\n";
        let stats = parse(rollup);
        assert_eq!((stats.private_kib, stats.pss_kib, stats.rss_kib), (33, 60, 100));
    }

    #[test]
    fn our_own_process_uses_something() {
        let stats = read(std::process::id()).unwrap();
        assert!(
            stats.private_kib > 0 && stats.pss_kib >= stats.private_kib && stats.rss_kib >= stats.pss_kib
        );
    }
}

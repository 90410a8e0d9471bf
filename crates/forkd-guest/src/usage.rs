//! What the guest uses: CPU, memory and the root disk.

use std::{fs, path::Path, thread, time::Duration};

use forkd_protocol::{
    agent::Usage,
    connect::{Code, Error},
};

/// The time between the two looks at the CPUs' counters.
const WINDOW: Duration = Duration::from_millis(100);

/// The usage now. Takes [`WINDOW`].
pub(crate) fn measure() -> Result<Usage, Error> {
    let failed = |what: &str| Error::new(Code::Internal, format!("cannot read {what}"));
    let read = |path: &str| fs::read_to_string(Path::new("/proc").join(path)).ok();
    let cpu = || read("stat").as_deref().and_then(cpu_times);
    let before = cpu().ok_or_else(|| failed("/proc/stat"))?;
    thread::sleep(WINDOW);
    let after = cpu().ok_or_else(|| failed("/proc/stat"))?;
    let memory = read("meminfo").as_deref().and_then(memory).ok_or_else(|| failed("/proc/meminfo"))?;
    let disk = rustix::fs::statvfs("/").map_err(|_| failed("the root file system"))?;
    let total = disk.f_blocks.saturating_mul(disk.f_frsize);
    Ok(Usage {
        cpu_count: thread::available_parallelism().map_or(1, |count| count.get() as u32),
        cpu_used_percent: used_percent(before, after),
        memory_total: memory.total,
        memory_used: memory.total.saturating_sub(memory.available),
        memory_cache: memory.cache,
        disk_total: total,
        disk_used: total.saturating_sub(disk.f_bfree.saturating_mul(disk.f_frsize)),
    })
}

/// Time of all CPUs: idle, and in all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct CpuTimes {
    idle: u64,
    all: u64,
}

/// The first line of `/proc/stat`: user, nice, system, idle, iowait, irq, softirq, steal. What follows is a part of
/// these.
fn cpu_times(stat: &str) -> Option<CpuTimes> {
    let line = stat.lines().next()?.strip_prefix("cpu ")?;
    let times: Vec<u64> = line.split_whitespace().take(8).map(str::parse).collect::<Result<_, _>>().ok()?;
    Some(CpuTimes { idle: times.get(3)?.saturating_add(*times.get(4)?), all: times.iter().sum() })
}

/// The share of the time between two looks in which the CPUs were not idle, of one to a hundred.
fn used_percent(before: CpuTimes, after: CpuTimes) -> f64 {
    let all = after.all.saturating_sub(before.all);
    let idle = after.idle.saturating_sub(before.idle).min(all);
    if all == 0 { 0.0 } else { (all - idle) as f64 * 100.0 / all as f64 }
}

/// Bytes of `/proc/meminfo`.
#[derive(Debug, PartialEq, Eq)]
struct Memory {
    total: u64,
    available: u64,
    cache: u64,
}

fn memory(meminfo: &str) -> Option<Memory> {
    let bytes = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':'))?;
        line.trim().strip_suffix(" kB")?.parse::<u64>().ok()?.checked_mul(1024)
    };
    Some(Memory { total: bytes("MemTotal")?, available: bytes("MemAvailable")?, cache: bytes("Cached")? })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_share_of_time_that_is_not_idle_counts() {
        let before = cpu_times("cpu  10 0 10 70 10 0 0 0 5 5\ncpu0 1 2 3\n").unwrap();
        assert_eq!(before, CpuTimes { idle: 80, all: 100 });
        let after = cpu_times("cpu  60 0 10 110 20 0 0 0 0 0\n").unwrap();
        assert_eq!(used_percent(before, after), 50.0);
        assert_eq!(used_percent(after, after), 0.0);
        assert_eq!(used_percent(after, before), 0.0, "counters that go back say nothing");
        for bad in ["", "cpu0 1 2 3 4 5", "cpu  1 x", "cpu  1 2 3"] {
            assert_eq!(cpu_times(bad), None, "{bad:?}");
        }
    }

    #[test]
    fn memory_is_read_in_bytes() {
        let text = "MemTotal:  2048 kB\nMemFree: 1 kB\nMemAvailable:  1024 kB\nCached:   512 kB\n";
        assert_eq!(memory(text), Some(Memory { total: 2 << 20, available: 1 << 20, cache: 512 << 10 }));
        assert_eq!(memory("MemTotal: 1 kB\n"), None);
    }

    #[test]
    fn this_machine_has_a_usage() {
        let usage = measure().unwrap();
        assert!(usage.cpu_count > 0 && (0.0..=100.0).contains(&usage.cpu_used_percent), "{usage:?}");
        assert!(usage.memory_used > 0 && usage.memory_used < usage.memory_total, "{usage:?}");
        assert!(usage.disk_total > 0, "{usage:?}");
    }
}

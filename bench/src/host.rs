//! The host: under which conditions a number came about, and what memory processes take.

use std::collections::BTreeMap;
use std::fs;
use std::time::{SystemTime, UNIX_EPOCH};

use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use serde::{Deserialize, Serialize};

use crate::{Error, Result, system};

/// Of how many children of a burst the memory is looked at: walking page tables is slow, and they
/// are alike.
pub const MEMORY_SAMPLE: usize = 50;

/// Under which conditions a line was measured. No number without them.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(default)]
pub struct Conditions {
    /// The host's kernel.
    pub kernel: String,
    /// Its CPU.
    pub cpu: String,
    /// How many of them.
    pub cores: usize,
    /// Its memory.
    pub memory_mib: u64,
    /// Whether the host is itself emulated in software: only ratios mean anything there.
    pub emulated: bool,
    /// Whether there are cgroup v2 controllers to put children under.
    pub cgroups: bool,
    /// The version of forkd.
    pub forkd: String,
    /// The day, in UTC.
    pub date: String,
}

impl Conditions {
    /// As they are here and now.
    pub fn here() -> Conditions {
        let cpuinfo = fs::read_to_string("/proc/cpuinfo").unwrap_or_default();
        let cpu = field(&cpuinfo, "model name").unwrap_or("unknown").to_owned();
        let kernel = fs::read_to_string("/proc/sys/kernel/osrelease").unwrap_or_default();
        let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |time| time.as_secs());
        Conditions {
            kernel: kernel.trim().to_owned(),
            cores: std::thread::available_parallelism().map_or(1, usize::from),
            memory_mib: meminfo("MemTotal").unwrap_or(0) >> 10,
            // What QEMU's software emulation calls every CPU it makes up.
            emulated: cpu.contains("QEMU TCG"),
            cgroups: has_cgroups(),
            cpu,
            forkd: env!("CARGO_PKG_VERSION").to_owned(),
            date: date(seconds),
        }
    }
}

fn has_cgroups() -> bool {
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    controllers.split_whitespace().any(|name| name == "memory")
}

/// The day of a number of seconds since 1970, as people write it.
pub fn date(seconds: u64) -> String {
    let is_leap = |year: u64| year.is_multiple_of(4) && !year.is_multiple_of(100) || year.is_multiple_of(400);
    let (mut days, mut year) = (seconds / 86_400, 1970);
    while days >= 365 + u64::from(is_leap(year)) {
        days -= 365 + u64::from(is_leap(year));
        year += 1;
    }
    let february = 28 + u64::from(is_leap(year));
    let mut month = 1;
    for length in [31, february, 31, 30, 31, 30, 31, 31, 30, 31, 30] {
        if days < length {
            break;
        }
        days -= length;
        month += 1;
    }
    format!("{year}-{month:02}-{:02}", days + 1)
}

/// What a process takes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct Memory {
    /// Private pages.
    pub private_kib: u64,
    /// Those, and its share of the pages others have too.
    pub pss_kib: u64,
}

/// What these processes take; those that cannot be looked at are left out.
pub fn memory_of(pids: impl Iterator<Item = i32>) -> Vec<Memory> {
    pids.filter_map(|pid| parse_smaps(&fs::read_to_string(format!("/proc/{pid}/smaps_rollup")).ok()?))
        .collect()
}

fn parse_smaps(text: &str) -> Option<Memory> {
    let kib = |name: &str| field(text, name)?.strip_suffix("kB")?.trim().parse::<u64>().ok();
    let private = kib("Private_Clean")?.checked_add(kib("Private_Dirty")?)?;
    // Huge pages are counted apart, where there are any.
    Some(Memory {
        private_kib: private.checked_add(kib("Private_Hugetlb").unwrap_or(0))?,
        pss_kib: kib("Pss")?,
    })
}

/// The last of the CPUs this process may use.
pub fn last_cpu() -> Result<usize> {
    let allowed = sched_getaffinity(None).map_err(system("ask which CPUs there are"))?;
    Ok((0..CpuSet::MAX_CPU).rev().find(|cpu| allowed.is_set(*cpu)).unwrap_or(0))
}

/// Keeps a thread, or the calling one, on one CPU, and so all that it forks.
pub fn keep_on(cpu: usize, thread: Option<i32>) -> Result<()> {
    let thread = match thread {
        Some(id) => Some(Pid::from_raw(id).ok_or_else(|| Error::Invalid(format!("no thread: {id}")))?),
        None => None,
    };
    if cpu >= CpuSet::MAX_CPU {
        return Err(Error::Invalid(format!("there is no CPU {cpu}")));
    }
    let mut only = CpuSet::new();
    only.set(cpu);
    sched_setaffinity(thread, &only).map_err(system(format!("keep a thread on CPU {cpu}")))
}

/// The threads of a sandbox's process that run its guest.
pub fn vcpu_threads(pid: i32) -> Vec<i32> {
    let threads = fs::read_dir(format!("/proc/{pid}/task")).into_iter().flatten().flatten();
    let is_vcpu = |thread: &fs::DirEntry| {
        fs::read_to_string(thread.path().join("comm")).is_ok_and(|name| name.starts_with("vcpu"))
    };
    threads.filter(is_vcpu).filter_map(|thread| thread.file_name().to_str()?.parse().ok()).collect()
}

/// What the host could still give to new processes.
pub fn available_kib() -> Option<u64> {
    meminfo("MemAvailable")
}

/// The memory that the host lost between two samples, for each of `n` children. Negative when other processes
/// freed more meanwhile.
pub fn difference_per_child(before: Option<u64>, after: Option<u64>, n: usize) -> Option<f64> {
    if n == 0 {
        return None;
    }
    Some((before? as f64 - after? as f64) / n as f64)
}

fn meminfo(name: &str) -> Option<u64> {
    let text = fs::read_to_string("/proc/meminfo").ok()?;
    field(&text, name)?.strip_suffix("kB")?.trim().parse().ok()
}

/// The value of `name: value` in the lines of a file of the kernel's.
fn field<'a>(text: &'a str, name: &str) -> Option<&'a str> {
    let lines: BTreeMap<&str, &str> = text
        .lines()
        .filter_map(|line| line.split_once(':'))
        .map(|(key, value)| (key.trim(), value.trim()))
        .collect();
    lines.get(name).copied()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn days_are_those_of_the_calendar() {
        assert_eq!(date(0), "1970-01-01");
        assert_eq!(date(951_782_400), "2000-02-29");
        assert_eq!(date(951_868_800), "2000-03-01");
        assert_eq!(date(1_798_761_599), "2026-12-31");
    }

    #[test]
    fn private_memory_is_what_nobody_else_has() {
        let text = "55d-7ff ---p 0 00:00 0 [rollup]\nRss: 1000 kB\nPss: 300 kB\nPss_Dirty: 7 kB\n\
                    Private_Clean: 16 kB\nPrivate_Dirty: 200 kB\nPrivate_Hugetlb: 0 kB\n";
        assert_eq!(parse_smaps(text), Some(Memory { private_kib: 216, pss_kib: 300 }));
        assert_eq!(parse_smaps("Pss: many kB"), None);
    }

    #[test]
    fn this_process_takes_memory_of_this_host() {
        let memory = memory_of([std::process::id() as i32, -1].into_iter());
        assert_eq!(memory.len(), 1);
        assert!(memory[0].private_kib > 0 && memory[0].pss_kib >= memory[0].private_kib);
        assert!(Conditions::here().memory_mib > 0);
    }

    #[test]
    fn a_thread_stays_where_it_is_kept() {
        let cpu = last_cpu().unwrap();
        let kept = std::thread::spawn(move || {
            keep_on(cpu, None).unwrap();
            let allowed = sched_getaffinity(None).unwrap();
            assert_eq!((0..CpuSet::MAX_CPU).filter(|cpu| allowed.is_set(*cpu)).collect::<Vec<_>>(), [cpu]);
            assert!(keep_on(CpuSet::MAX_CPU, None).is_err() && keep_on(cpu, Some(0)).is_err());
        });
        kept.join().unwrap();
    }

    #[test]
    fn the_threads_of_a_guest_have_their_names() {
        let vcpu = std::thread::Builder::new().name("vcpu7".into());
        let (told, waits) = std::sync::mpsc::channel::<()>();
        let vcpu = vcpu.spawn(move || waits.recv()).unwrap();
        // It names itself once it runs.
        while vcpu_threads(std::process::id() as i32).len() != 1 {
            std::thread::yield_now();
        }
        drop(told);
        assert!(vcpu.join().unwrap().is_err());
    }

    #[test]
    fn memory_given_back_meanwhile_counts_negative() {
        assert_eq!(difference_per_child(Some(1000), Some(500), 10), Some(50.0));
        assert_eq!(difference_per_child(Some(500), Some(1000), 10), Some(-50.0));
        assert_eq!(difference_per_child(Some(1), None, 1), None);
        assert_eq!(difference_per_child(Some(1), Some(1), 0), None);
    }
}

//! The resource usage of a process, and the pauses of a sandbox.

use std::collections::VecDeque;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;
use std::time::{Duration, Instant};

use forkd_api::{PauseInfo, Stats};
use parking_lot::Mutex;

use crate::host::process::field;
use crate::util::time;

/// Clock ticks of `/proc` per second: fixed by the kernel for user space on x86.
const TICKS_PER_SEC: u64 = 100;
/// How many pauses of a sandbox are kept.
const PAUSES: usize = 32;

/// The usage of process `pid`.
pub(crate) fn read(pid: u32) -> io::Result<Stats> {
    let mut stats = memory(pid)?;
    let stat = std::fs::read(format!("/proc/{pid}/stat"))?;
    let ticks = field::<u64>(&stat, 14).zip(field::<u64>(&stat, 15));
    let millis = |ticks: u64| ticks.saturating_mul(1000 / TICKS_PER_SEC);
    stats.cpu_ms = ticks.map(|(user, kernel)| millis(user.saturating_add(kernel)));
    let begun = field::<u64>(&stat, 22).map_or(0, millis);
    stats.uptime_ms = since_boot_ms().saturating_sub(begun);
    Ok(stats)
}

/// Milliseconds since the host's boot, the clock of process start times.
fn since_boot_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    let (secs, nanos) = (u64::try_from(now.tv_sec).unwrap_or(0), u64::try_from(now.tv_nsec).unwrap_or(0));
    secs.saturating_mul(1000).saturating_add(nanos / 1_000_000)
}

/// The memory of process `pid` alone.
pub(crate) fn memory(pid: u32) -> io::Result<Stats> {
    Ok(parse(&std::fs::read_to_string(format!("/proc/{pid}/smaps_rollup"))?))
}

/// The sums in a `smaps_rollup`.
fn parse(rollup: &str) -> Stats {
    let kib = |key: &str| -> u64 {
        let line = rollup.lines().find_map(|line| line.strip_prefix(key)?.strip_prefix(':'));
        line.and_then(|rest| rest.trim().strip_suffix("kB")?.trim().parse().ok()).unwrap_or(0)
    };
    Stats {
        private_kib: kib("Private_Clean") + kib("Private_Dirty") + kib("Private_Hugetlb"),
        shared_kib: kib("Shared_Clean") + kib("Shared_Dirty") + kib("Shared_Hugetlb"),
        pss_kib: kib("Pss"),
        rss_kib: kib("Rss"),
        ..Stats::default()
    }
}

/// Bytes on disk of the disk layers that process `pid` has open: files without a name on the file system of
/// `data`. A file with a name (a base, a layer of a snapshot) does not belong to the sandbox.
pub(crate) fn disk_bytes(pid: u32, data: &Path) -> io::Result<u64> {
    let device = std::fs::metadata(data)?.dev();
    let (mut seen, mut bytes) = (Vec::new(), 0u64);
    for entry in std::fs::read_dir(format!("/proc/{pid}/fd"))? {
        // The descriptor may be closed meanwhile.
        let Ok(file) = std::fs::metadata(entry?.path()) else { continue };
        if file.is_file() && file.dev() == device && file.nlink() == 0 && !seen.contains(&file.ino()) {
            seen.push(file.ino());
            bytes = bytes.saturating_add(file.blocks().saturating_mul(512));
        }
    }
    Ok(bytes)
}

/// The last pauses of a sandbox.
#[derive(Debug, Default)]
pub(crate) struct Pauses(Mutex<PauseLog>);

#[derive(Debug, Default)]
struct PauseLog {
    over: VecDeque<PauseInfo>,
    /// When the current pause began.
    now: Option<(u64, Instant)>,
}

impl Pauses {
    /// It stands still until it is resumed.
    pub(crate) fn begin(&self) {
        self.0.lock().now = Some((time::now_ms(), Instant::now()));
    }

    /// How long the current pause lasts; none if there is none, or its begin is not known.
    pub(crate) fn lasts(&self) -> Option<Duration> {
        self.0.lock().now.map(|(_, since)| since.elapsed())
    }

    /// Ends the pause. One that an earlier daemon began is not recorded, as its begin is not known.
    pub(crate) fn end(&self) {
        let since = self.0.lock().now.take();
        if let Some((_, since)) = since {
            self.add(since.elapsed().as_secs_f64() * 1e3, None, "pause");
        }
    }

    /// Records a pause that is over.
    pub(crate) fn add(&self, pause_ms: f64, frozen_ms: Option<f64>, why: &str) {
        let mut kept = self.0.lock();
        if kept.over.len() == PAUSES {
            kept.over.pop_front();
        }
        let at_unix_ms = time::now_ms();
        kept.over.push_back(PauseInfo { at_unix_ms, pause_ms: Some(pause_ms), frozen_ms, why: why.into() });
    }

    /// All pauses, oldest first.
    pub(crate) fn list(&self) -> Vec<PauseInfo> {
        let kept = self.0.lock();
        let now = kept.now.map(|(at_unix_ms, _)| PauseInfo {
            at_unix_ms,
            pause_ms: None,
            frozen_ms: None,
            why: "pause".into(),
        });
        kept.over.iter().cloned().chain(now).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_private_is_summed_whatever_kind_it_is() {
        let rollup = "00400000-7fff [rollup]\nRss:    100 kB\nPss:   60 kB\nPss_Dirty: 9 kB\n\
                      Shared_Clean: 40 kB\nShared_Dirty: 2 kB\n\
                      Private_Clean: 10 kB\nPrivate_Dirty:   20 kB\nPrivate_Hugetlb: 3 kB\n";
        let stats = parse(rollup);
        assert_eq!((stats.private_kib, stats.pss_kib, stats.rss_kib), (33, 60, 100));
        assert_eq!(stats.shared_kib, 42);
    }

    #[test]
    fn our_own_process_uses_something() {
        let stats = read(std::process::id()).unwrap();
        assert!(
            stats.private_kib > 0 && stats.pss_kib >= stats.private_kib && stats.rss_kib >= stats.pss_kib
        );
        // No test process is an hour old.
        assert!(stats.uptime_ms < 3_600_000, "{}", stats.uptime_ms);
    }

    #[test]
    fn a_layer_is_a_file_without_a_name_and_counts_once() {
        let folder = tempfile::tempdir().unwrap();
        let before = disk_bytes(std::process::id(), folder.path()).unwrap();
        let layer = tempfile::tempfile_in(folder.path()).unwrap();
        std::os::unix::fs::FileExt::write_all_at(&layer, &[7; 1 << 20], 0).unwrap();
        layer.sync_all().unwrap();
        let _twice = layer.try_clone().unwrap();
        let named = std::fs::write(folder.path().join("base"), [7; 1 << 20]);
        let _base = named.and_then(|()| std::fs::File::open(folder.path().join("base"))).unwrap();
        let grown = disk_bytes(std::process::id(), folder.path()).unwrap() - before;
        assert!((1 << 20..2 << 20).contains(&grown), "{grown}");
    }

    #[test]
    fn the_last_pauses_are_kept_and_an_ongoing_one_is_reported() {
        let pauses = Pauses::default();
        for index in 0..40 {
            pauses.add(f64::from(index), Some(1.0), "branch");
        }
        pauses.begin();
        let list = pauses.list();
        assert_eq!((list.len(), list[0].pause_ms, list[32].pause_ms), (33, Some(8.0), None));
        pauses.end();
        let last = pauses.list().pop().unwrap();
        assert!(last.why == "pause" && last.pause_ms.is_some_and(|ms| ms >= 0.0), "{last:?}");
        assert_eq!(pauses.list().len(), 32);
    }
}

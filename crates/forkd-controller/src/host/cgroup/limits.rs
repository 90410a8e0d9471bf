//! The resource limits of a leaf.

use std::io;
use std::path::Path;

use crate::host::cgroup::{set, set_if_there};

/// Memory of a monitor beside its guest's: code, threads and device buffers.
const OVERHEAD_MIB: u64 = 64;
/// Tables with an entry of 8 bytes for each page of 4 KiB, at most: the host's page tables, KVM's, KVM's
/// reverse map, and one in reserve. The kernel charges all of them to the leaf.
const TABLES: u64 = 4;
/// How many bytes of guest memory one byte of such a table stands for.
const TABLE_REACH: u64 = 512;
/// The minimal room for the page cache. Without any, a leaf writes to its disk layer at a crawl.
const CACHE_MIB: u64 = 64;
/// The part of guest memory that a large guest gets as page cache.
const CACHE_PART: u64 = 16;
/// Tasks of a sandbox beside its vCPUs: the control thread, the device thread, a task of KVM's own (which
/// recovers huge pages), and a reserve.
const TASKS_BESIDE_VCPUS: u32 = 8;
/// Tasks of a template: those of the largest sandbox that becomes one, and its savers.
const TEMPLATE_TASKS: u32 = 64;

/// The limits of a leaf. Without a figure there is no limit.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct CgroupLimits {
    /// Bytes of memory, the monitor's and its share of the kernel's included.
    pub(crate) memory_max: Option<u64>,
    /// Bytes of memory that may be swapped out beside those; none where there is a limit of memory.
    pub(crate) swap_max: Option<u64>,
    /// Tasks: processes and threads.
    pub(crate) pids_max: Option<u32>,
    /// CPU time in percent of one CPU. Ignored where the host has no `cpu` controller.
    pub(crate) cpu_percent: Option<u32>,
}

impl CgroupLimits {
    /// The limits of a sandbox that may use `memory_mib` MiB.
    pub(crate) fn of_sandbox(vcpus: u8, memory_mib: u64) -> CgroupLimits {
        let memory_max = Some(bytes(memory_mib));
        let pids_max = Some(TASKS_BESIDE_VCPUS + u32::from(vcpus));
        CgroupLimits { memory_max, pids_max, ..CgroupLimits::default() }
    }

    /// The limits of a template whose guest has `guest_mib` MiB, and of the guest that is booted and warmed up to
    /// become it.
    ///
    /// Beside the memory of any sandbox, there is room for a copy of it: a saver writes one, and a data directory
    /// may be in memory. A template is cold, so all of it may be swapped out. Memory that a branch inherits stays
    /// charged to its source.
    pub(crate) fn of_template(guest_mib: u64) -> CgroupLimits {
        let max = Some(bytes(memory_mib(guest_mib).saturating_add(guest_mib)));
        CgroupLimits { memory_max: max, swap_max: max, pids_max: Some(TEMPLATE_TASKS), cpu_percent: None }
    }

    /// Writes all limits but that of the tasks, for which there is
    /// [`Leaf::limit_tasks`](crate::host::cgroup::Leaf::limit_tasks). Only a missing CPU limit is no error.
    pub(crate) fn apply(&self, leaf: &Path) -> io::Result<()> {
        if let Some(bytes) = self.memory_max {
            set(leaf, "memory.max", bytes)?;
            // A sandbox that swapped instead would slow down the others.
            set_if_there(leaf, "memory.swap.max", self.swap_max.unwrap_or(0))?;
        }
        if let Some(percent) = self.cpu_percent {
            // Microseconds of each tenth of a second; the kernel takes no less than one thousand.
            let micros = (u64::from(percent) * 1000).max(1000);
            set_if_there(leaf, "cpu.max", format_args!("{micros} 100000"))?;
        }
        Ok(())
    }
}

/// The memory on the host, by default, of a sandbox whose guest has `guest_mib` MiB.
pub(crate) fn memory_mib(guest_mib: u64) -> u64 {
    let tables = guest_mib.div_ceil(TABLE_REACH / TABLES);
    let cache = CACHE_MIB.max(guest_mib.div_ceil(CACHE_PART));
    [OVERHEAD_MIB, tables, cache].into_iter().fold(guest_mib, u64::saturating_add)
}

fn bytes(mib: u64) -> u64 {
    mib.saturating_mul(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: u64 = 4096;

    /// Bytes of a tree of page tables that maps `bytes` in pages of 4 KiB.
    fn page_tables(bytes: u64) -> u64 {
        let mut entries = bytes.div_ceil(PAGE);
        let mut tables = 0;
        while entries > 1 {
            entries = entries.div_ceil(PAGE / 8);
            tables += entries;
        }
        tables * PAGE
    }

    #[test]
    fn a_guest_of_any_size_can_use_all_of_its_memory() {
        for guest_mib in [1, 128, 512, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 1 << 20] {
            let guest = guest_mib << 20;
            // Both tables map the guest at an offset, so each level may have a table more.
            let tables = 2 * (page_tables(guest) + 4 * PAGE);
            let reverse_map = guest / PAGE * 8;
            let left = (memory_mib(guest_mib) << 20) - guest - tables - reverse_map;
            assert!(left >= (OVERHEAD_MIB + CACHE_MIB) << 20, "{guest_mib} MiB: {} KiB are left", left >> 10);
            assert!(left >= guest / CACHE_PART, "{guest_mib} MiB: {} MiB are left", left >> 20);
        }
        assert_eq!(memory_mib(512), 512 + 64 + 4 + 64);
        assert_eq!(memory_mib(16 << 10), (16 << 10) + 64 + 128 + 1024);
        assert_eq!(memory_mib(u64::MAX), u64::MAX);
    }

    #[test]
    fn a_template_has_room_for_what_it_was_as_a_sandbox_and_for_the_copy_that_a_saver_writes() {
        let (sandbox, template) =
            (CgroupLimits::of_sandbox(32, memory_mib(512)), CgroupLimits::of_template(512));
        assert_eq!(template.memory_max, sandbox.memory_max.map(|max| max + (512 << 20)));
        assert_eq!(sandbox.pids_max, Some(TASKS_BESIDE_VCPUS + 32), "a sandbox is limited, too");
        assert!(template.pids_max > sandbox.pids_max);
        assert_eq!(CgroupLimits::of_template(u64::MAX).memory_max, Some(u64::MAX));
    }
}

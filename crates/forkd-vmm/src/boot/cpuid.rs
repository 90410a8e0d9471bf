//! The CPU of a guest: the features that KVM supports here, with the topology of this VM instead of the
//! host's (one socket, one thread per core, a core per vCPU, APIC id = vCPU index), without virtualization of
//! its own, without performance counters, and without instructions that hold a core while they wait.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use crate::{Error, Result};

const TOPOLOGY: u32 = 0xb;
const TOPOLOGY_V2: u32 = 0x1f;
const SVM_FEATURES: u32 = 0x8000_000a;

/// The features that KVM supports on this host; the same for every vCPU, and slow to query.
pub fn supported(kvm: &Kvm) -> Result<CpuId> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm("KVM_GET_SUPPORTED_CPUID"))
}

/// Which features guests of a forkd get.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Grant {
    /// For every guest that boots now.
    Fresh,
    /// For guests of older versions of forkd: the same with performance counters and WAITPKG.
    Older,
}

impl Grant {
    /// The grant of a guest whose CPUID is `cpuid`.
    pub fn of(cpuid: &[kvm_cpuid_entry2]) -> Grant {
        let has_more = |entry: &kvm_cpuid_entry2| {
            let [eax, ebx, ecx, edx] = only_older(entry.function, entry.index);
            entry.eax & eax | entry.ebx & ebx | entry.ecx & ecx | entry.edx & edx != 0
        };
        if cpuid.iter().any(has_more) { Grant::Older } else { Grant::Fresh }
    }
}

/// The answers vCPU `index` of `vcpus` gives in a guest that boots now.
pub fn for_vcpu(supported: &CpuId, index: u8, vcpus: u8) -> Result<CpuId> {
    granted(supported, index, vcpus, Grant::Fresh)
}

/// The answers vCPU `index` of `vcpus` gives in a guest with that `grant`.
pub fn granted(supported: &CpuId, index: u8, vcpus: u8, grant: Grant) -> Result<CpuId> {
    let highest = supported.as_slice().iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    let apic_id = u32::from(index);
    let mut entries = Vec::new();
    for entry in supported.as_slice() {
        if !matches!(entry.function, TOPOLOGY | TOPOLOGY_V2 | SVM_FEATURES) {
            let entry = adjust(*entry, apic_id, u32::from(vcpus));
            entries.push(if grant == Grant::Older { entry } else { take_away(entry) });
        }
    }
    if highest >= TOPOLOGY {
        entries.extend(topology_leaf(apic_id, u32::from(vcpus)));
    }
    CpuId::from_entries(&entries)
        .map_err(|_| Error::Config("the host's CPU has too many CPUID leaves".into()))
}

/// Bits needed to number `count` things.
fn id_bits(count: u32) -> u32 {
    count.next_power_of_two().trailing_zeros()
}

fn adjust(mut entry: kvm_cpuid_entry2, apic_id: u32, vcpus: u32) -> kvm_cpuid_entry2 {
    const TSC_DEADLINE: u32 = 1 << 24;
    const HYPERVISOR: u32 = 1 << 31;
    const MULTI_THREADED: u32 = 1 << 28;
    // A guest's own guests would be more state to save with every fork, and more of KVM to attack.
    const VMX: u32 = 1 << 5;
    const SVM: u32 = 1 << 2;
    // Where a vCPU is in its shadow stack is in no register that is saved: a thawed guest that uses one
    // would fault at its next return.
    const SHADOW_STACK: u32 = 1 << 7;
    match entry.function {
        1 => {
            entry.ebx = entry.ebx & 0x0000_ffff | vcpus.next_power_of_two() << 16 | apic_id << 24;
            // KVM always has the timer but lists it apart; without it the kernel would want to
            // calibrate the APIC's own against a clock this machine does not have.
            entry.ecx = entry.ecx & !VMX | TSC_DEADLINE | HYPERVISOR;
            entry.edx = if vcpus > 1 { entry.edx | MULTI_THREADED } else { entry.edx & !MULTI_THREADED };
        }
        // Caches, Intel's way and AMD's: the last level belongs to everyone, the others to one core.
        4 | 0x8000_001d if entry.eax & 0x1f != 0 => {
            let level = entry.eax >> 5 & 7;
            let sharing = if level >= 3 { (1 << id_bits(vcpus)) - 1 } else { 0 };
            let cores = if entry.function == 4 { (1 << id_bits(vcpus)) - 1 } else { 0 };
            entry.eax = entry.eax & 0x3fff | sharing << 14 | cores << 26;
        }
        7 if entry.index == 0 => entry.ecx &= !SHADOW_STACK,
        0x8000_0001 => entry.ecx &= !SVM,
        0x8000_0008 => entry.ecx = entry.ecx & !0xf0ff | id_bits(vcpus) << 12 | (vcpus - 1),
        0x8000_001e => (entry.eax, entry.ebx, entry.ecx) = (apic_id, apic_id & 0xff, 0),
        _ => {}
    }
    entry
}

/// The bits of a leaf's eax, ebx, ecx and edx that only [`Grant::Older`] has.
///
/// Performance counters are state that every fork saves and restores, an event in the host's kernel for
/// each that a guest's watchdog takes, and a reason why another host cannot restore a snapshot. WAITPKG
/// lets a guest hold a core while it waits.
fn only_older(function: u32, index: u32) -> [u32; 4] {
    const DTES64: u32 = 1 << 2;
    const DS_CPL: u32 = 1 << 4;
    const PDCM: u32 = 1 << 15;
    const DS: u32 = 1 << 21;
    const WAITPKG: u32 = 1 << 5;
    const ARCH_LBR: u32 = 1 << 19;
    const ARCH_PERFMON_EXT: u32 = 1 << 8;
    // AMD's: of a core, of its north bridge, of its last cache.
    const PERFCTR: u32 = 1 << 23 | 1 << 24 | 1 << 28;
    match (function, index) {
        (1, _) => [0, 0, DTES64 | DS_CPL | PDCM, DS],
        (7, 0) => [0, 0, WAITPKG, ARCH_LBR],
        (7, 1) => [ARCH_PERFMON_EXT, 0, 0, 0],
        (0x8000_0001, _) => [0, 0, PERFCTR, 0],
        // Intel's counters, its records of branches, its counters again, AMD's counters.
        (0xa | 0x1c | 0x23 | 0x8000_0022, _) => [u32::MAX; 4],
        _ => [0; 4],
    }
}

fn take_away(entry: kvm_cpuid_entry2) -> kvm_cpuid_entry2 {
    let [eax, ebx, ecx, edx] = only_older(entry.function, entry.index);
    kvm_cpuid_entry2 {
        eax: entry.eax & !eax,
        ebx: entry.ebx & !ebx,
        ecx: entry.ecx & !ecx,
        edx: entry.edx & !edx,
        ..entry
    }
}

/// Leaf 0xb: level 0 is threads (one per core), level 1 is cores, level 2 ends the list.
fn topology_leaf(apic_id: u32, vcpus: u32) -> impl Iterator<Item = kvm_cpuid_entry2> {
    const THREADS: u32 = 1 << 8;
    const CORES: u32 = 2 << 8;
    [(0, 1, THREADS), (id_bits(vcpus), vcpus, CORES), (0, 0, 0)].into_iter().zip(0..).map(
        move |((shift, count, kind), index)| kvm_cpuid_entry2 {
            function: TOPOLOGY,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: shift,
            ebx: count,
            ecx: kind | index,
            edx: apic_id,
            ..Default::default()
        },
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_vcpu_knows_its_own_id_and_the_number_of_its_siblings() {
        let host = [
            kvm_cpuid_entry2 { function: 0, eax: 0x1f, ..Default::default() },
            kvm_cpuid_entry2 { function: 1, ebx: 0x3740_0800, ..Default::default() },
            kvm_cpuid_entry2 { function: TOPOLOGY, edx: 99, ..Default::default() },
            kvm_cpuid_entry2 { function: TOPOLOGY_V2, edx: 99, ..Default::default() },
        ];
        let cpuid = for_vcpu(&CpuId::from_entries(&host).unwrap(), 2, 3).unwrap();
        let basic = cpuid.as_slice().iter().find(|entry| entry.function == 1).unwrap();
        assert_eq!(basic.ebx, 0x0204_0800);
        assert_eq!(basic.ecx >> 31, 1);
        let topology: Vec<_> = cpuid.as_slice().iter().filter(|entry| entry.function == TOPOLOGY).collect();
        assert_eq!(topology.len(), 3);
        assert!(topology.iter().all(|entry| entry.edx == 2));
        assert_eq!((topology[1].eax, topology[1].ebx, topology[1].ecx), (2, 3, 0x201));
        assert!(cpuid.as_slice().iter().all(|entry| entry.function != TOPOLOGY_V2));
    }

    #[test]
    fn a_guest_that_boots_gets_no_performance_counters_and_no_waiting_instructions() {
        let all = |function, index| kvm_cpuid_entry2 {
            function,
            index,
            flags: KVM_CPUID_FLAG_SIGNIFCANT_INDEX,
            eax: !0,
            ebx: !0,
            ecx: !0,
            edx: !0,
            ..Default::default()
        };
        let leaves = [(1, 0), (7, 0), (7, 1), (0xa, 0), (0x23, 0), (0x8000_0001, 0), (0x8000_0022, 0)];
        let host = CpuId::from_entries(&leaves.map(|(function, index)| all(function, index))).unwrap();
        let cpuid = for_vcpu(&host, 0, 1).unwrap();
        let leaf = |function, index| {
            let found = |entry: &&kvm_cpuid_entry2| (entry.function, entry.index) == (function, index);
            *cpuid.as_slice().iter().find(found).unwrap()
        };
        assert_eq!(leaf(1, 0).ecx & (1 << 15 | 1 << 2 | 1 << 4), 0, "PDCM, DTES64, DS_CPL");
        assert_eq!(leaf(1, 0).edx & 1 << 21, 0, "DS");
        assert_eq!(leaf(7, 0).ecx & 1 << 5, 0, "WAITPKG");
        assert_eq!(leaf(7, 1).eax & 1 << 8, 0, "ArchPerfmonExt");
        assert_eq!(leaf(0x8000_0001, 0).ecx & (1 << 23 | 1 << 24 | 1 << 28), 0, "PERFCTR");
        for (function, index) in [(0xa, 0), (0x23, 0), (0x8000_0022, 0)] {
            let entry = leaf(function, index);
            assert_eq!([entry.eax, entry.ebx, entry.ecx, entry.edx], [0; 4], "{function:#x}");
        }
        // And nothing else is lost: SSE3, AVX2, NX.
        assert!(
            leaf(1, 0).ecx & 1 != 0
                && leaf(7, 0).ebx & 1 << 5 != 0
                && leaf(0x8000_0001, 0).edx >> 20 & 1 != 0
        );

        assert_eq!(Grant::of(cpuid.as_slice()), Grant::Fresh);
        let older = granted(&host, 0, 1, Grant::Older).unwrap();
        assert_eq!(Grant::of(older.as_slice()), Grant::Older);
        // Virtualization and shadow stacks were never given.
        let basic = older.as_slice().iter().find(|entry| entry.function == 1).unwrap();
        assert_eq!(basic.ecx & 1 << 5, 0, "VMX");
    }
}

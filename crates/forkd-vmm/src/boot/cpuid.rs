//! Which CPU a guest sees: what KVM supports here, with the topology of this VM instead of the
//! host's (one socket, one thread per core, a core per vCPU, APIC id = vCPU index) and without
//! virtualization of its own.

use kvm_bindings::{CpuId, KVM_CPUID_FLAG_SIGNIFCANT_INDEX, KVM_MAX_CPUID_ENTRIES, kvm_cpuid_entry2};
use kvm_ioctls::Kvm;

use crate::{Error, Result};

const TOPOLOGY: u32 = 0xb;
const TOPOLOGY_V2: u32 = 0x1f;
const SVM_FEATURES: u32 = 0x8000_000a;

/// What KVM supports on this host; the same for every vCPU, and slow to ask for.
pub fn supported(kvm: &Kvm) -> Result<CpuId> {
    kvm.get_supported_cpuid(KVM_MAX_CPUID_ENTRIES).map_err(Error::kvm("KVM_GET_SUPPORTED_CPUID"))
}

/// The answers vCPU `index` of `vcpus` gives.
pub fn for_vcpu(supported: &CpuId, index: u8, vcpus: u8) -> Result<CpuId> {
    let highest = supported.as_slice().iter().find(|entry| entry.function == 0).map_or(0, |entry| entry.eax);
    let apic_id = u32::from(index);
    let mut entries = Vec::new();
    for entry in supported.as_slice() {
        if !matches!(entry.function, TOPOLOGY | TOPOLOGY_V2 | SVM_FEATURES) {
            entries.push(adjust(*entry, apic_id, u32::from(vcpus)));
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
}

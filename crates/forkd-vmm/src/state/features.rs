//! Whether this host's CPU has the features that a frozen guest already uses.
//!
//! A guest looks at its CPU when it boots and remembers: on a CPU that lacks something it would die of
//! an unknown instruction, at some later time. So it is refused before, by the feature's name.
//!
//! And a state that gives its guest more than a guest gets that boots here was edited: KVM would enable
//! what forkd keeps from guests, virtualization of their own first of all. It is refused, too.

use kvm_bindings::{KVM_CPUID_FLAG_SIGNIFCANT_INDEX, kvm_cpuid_entry2};

use crate::{Error, Result};

/// A register of a CPUID leaf.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Register {
    Eax,
    Ebx,
    Ecx,
    Edx,
}
use Register::{Eax, Ebx, Ecx, Edx};

/// Registers that are lists of features, one per bit: leaf, subleaf, register, and the bits that are
/// none. Those are set by us whatever the host has (the deadline timer, "I am a guest", several
/// threads), or show what the guest has switched on by itself.
const FEATURES: [(u32, u32, Register, u32); 17] = [
    (1, 0, Ecx, 1 << 24 | 1 << 27 | 1 << 31),
    (1, 0, Edx, 1 << 28),
    (7, 0, Ebx, 0),
    (7, 0, Ecx, 1 << 4),
    (7, 0, Edx, 0),
    (7, 1, Eax, 0),
    (7, 1, Edx, 0),
    (7, 2, Edx, 0),
    (0xd, 0, Eax, 0),
    (0xd, 1, Eax, 0),
    (0x8000_0001, 0, Ecx, 0),
    (0x8000_0001, 0, Edx, 0),
    (0x8000_0008, 0, Ebx, 0),
    (0x8000_000a, 0, Eax, 0),
    (0x8000_000a, 0, Edx, 0),
    (0x8000_001f, 0, Eax, 0),
    (0x4000_0001, 0, Eax, 0),
];
/// The leaves in which hypervisors identify themselves. KVM behaves like the one whose leaves it finds there.
const HYPERVISOR_LEAVES: std::ops::RangeInclusive<u32> = 0x4000_0000..=0x4fff_ffff;

/// Names people know, as Linux has them in `/proc/cpuinfo`.
const NAMES: [(u32, u32, Register, u32, &str); 62] = [
    (1, 0, Ecx, 0, "sse3"),
    (1, 0, Ecx, 1, "pclmulqdq"),
    (1, 0, Ecx, 5, "vmx"),
    (1, 0, Ecx, 9, "ssse3"),
    (1, 0, Ecx, 12, "fma"),
    (1, 0, Ecx, 13, "cx16"),
    (1, 0, Ecx, 15, "pdcm"),
    (1, 0, Ecx, 17, "pcid"),
    (1, 0, Ecx, 19, "sse4_1"),
    (1, 0, Ecx, 20, "sse4_2"),
    (1, 0, Ecx, 21, "x2apic"),
    (1, 0, Ecx, 22, "movbe"),
    (1, 0, Ecx, 23, "popcnt"),
    (1, 0, Ecx, 25, "aes"),
    (1, 0, Ecx, 26, "xsave"),
    (1, 0, Ecx, 28, "avx"),
    (1, 0, Ecx, 29, "f16c"),
    (1, 0, Ecx, 30, "rdrand"),
    (1, 0, Edx, 25, "sse"),
    (1, 0, Edx, 26, "sse2"),
    (7, 0, Ebx, 0, "fsgsbase"),
    (7, 0, Ebx, 3, "bmi1"),
    (7, 0, Ebx, 4, "hle"),
    (7, 0, Ebx, 5, "avx2"),
    (7, 0, Ebx, 7, "smep"),
    (7, 0, Ebx, 8, "bmi2"),
    (7, 0, Ebx, 9, "erms"),
    (7, 0, Ebx, 10, "invpcid"),
    (7, 0, Ebx, 11, "rtm"),
    (7, 0, Ebx, 16, "avx512f"),
    (7, 0, Ebx, 17, "avx512dq"),
    (7, 0, Ebx, 18, "rdseed"),
    (7, 0, Ebx, 19, "adx"),
    (7, 0, Ebx, 20, "smap"),
    (7, 0, Ebx, 21, "avx512ifma"),
    (7, 0, Ebx, 23, "clflushopt"),
    (7, 0, Ebx, 24, "clwb"),
    (7, 0, Ebx, 28, "avx512cd"),
    (7, 0, Ebx, 29, "sha_ni"),
    (7, 0, Ebx, 30, "avx512bw"),
    (7, 0, Ebx, 31, "avx512vl"),
    (7, 0, Ecx, 1, "avx512_vbmi"),
    (7, 0, Ecx, 2, "umip"),
    (7, 0, Ecx, 3, "pku"),
    (7, 0, Ecx, 5, "waitpkg"),
    (7, 0, Ecx, 6, "avx512_vbmi2"),
    (7, 0, Ecx, 7, "shstk"),
    (7, 0, Ecx, 8, "gfni"),
    (7, 0, Ecx, 9, "vaes"),
    (7, 0, Ecx, 10, "vpclmulqdq"),
    (7, 0, Ecx, 11, "avx512_vnni"),
    (7, 0, Ecx, 16, "la57"),
    (7, 0, Ecx, 22, "rdpid"),
    (7, 0, Edx, 4, "fsrm"),
    (7, 0, Edx, 26, "spec_ctrl"),
    (7, 1, Eax, 4, "avx_vnni"),
    (0x8000_0001, 0, Ecx, 2, "svm"),
    (0x8000_0001, 0, Ecx, 5, "abm"),
    (0x8000_0001, 0, Edx, 20, "nx"),
    (0x8000_0001, 0, Edx, 26, "pdpe1gb"),
    (0x8000_0001, 0, Edx, 27, "rdtscp"),
    (0x8000_0001, 0, Edx, 29, "lm"),
];

/// Refuses a guest whose CPUID `saved` has features that `fresh`, the CPUID of a guest that boots here,
/// lacks. `supported` is what KVM could give it.
pub fn check(
    saved: &[kvm_cpuid_entry2],
    fresh: &[kvm_cpuid_entry2],
    supported: &[kvm_cpuid_entry2],
) -> Result<()> {
    check_shape(saved)?;
    let (theirs, ours) = (vendor(saved), vendor(supported));
    if theirs != ours {
        return Err(Error::Config(format!(
            "the snapshot was made on a CPU of {theirs}, this host's is of {ours}; restore it on a host like \
             the one it was made on"
        )));
    }
    let (mut missing, mut withheld) = (Vec::new(), Vec::new());
    for (leaf, subleaf, register, ignored) in FEATURES {
        let excess =
            value(saved, leaf, subleaf, register) & !value(fresh, leaf, subleaf, register) & !ignored;
        let offered = value(supported, leaf, subleaf, register);
        for bit in (0..32).filter(|bit| excess >> bit & 1 == 1) {
            let list = if offered >> bit & 1 == 1 { &mut withheld } else { &mut missing };
            list.push(name(leaf, subleaf, register, bit));
        }
    }
    let hypervisor = saved.iter().find(|entry| {
        HYPERVISOR_LEAVES.contains(&entry.function)
            && fresh.iter().all(|other| other.function != entry.function)
    });
    withheld.extend(hypervisor.map(|entry| format!("hypervisor leaf {:x}", entry.function)));
    if !withheld.is_empty() {
        return Err(Error::Config(format!(
            "the state gives its guest what forkd gives to none: {}; make the snapshot again",
            withheld.join(", ")
        )));
    }
    if missing.is_empty() {
        return Ok(());
    }
    Err(Error::Config(format!(
        "this host's CPU lacks what the snapshot's guest uses: {}; restore it on a host like the one it was \
         made on",
        missing.join(", ")
    )))
}

/// Refuses lists in which KVM could find another entry than [`value`] does: KVM takes the first entry of a
/// leaf where it does not look for a subleaf.
fn check_shape(saved: &[kvm_cpuid_entry2]) -> Result<()> {
    for (at, entry) in saved.iter().enumerate() {
        let mut before = saved[..at].iter().filter(|other| other.function == entry.function).peekable();
        let first = before.peek().is_none();
        if first && entry.index != 0 || before.any(|other| other.index == entry.index) {
            return Err(Error::Config(format!(
                "the state's CPUID leaf {:x} is there twice, or has no subleaf 0; make the snapshot again",
                entry.function
            )));
        }
    }
    Ok(())
}

/// A register of a leaf, as KVM finds it: an entry without the flag is that of every subleaf.
fn value(cpuid: &[kvm_cpuid_entry2], leaf: u32, subleaf: u32, register: Register) -> u32 {
    let entry = cpuid.iter().find(|entry| {
        let any = entry.flags & KVM_CPUID_FLAG_SIGNIFCANT_INDEX == 0;
        entry.function == leaf && (any || entry.index == subleaf)
    });
    entry.map_or(0, |entry| match register {
        Eax => entry.eax,
        Ebx => entry.ebx,
        Ecx => entry.ecx,
        Edx => entry.edx,
    })
}

fn name(leaf: u32, subleaf: u32, register: Register, bit: u32) -> String {
    let known =
        NAMES.iter().find(|entry| (entry.0, entry.1, entry.2, entry.3) == (leaf, subleaf, register, bit));
    match known {
        Some(entry) => entry.4.into(),
        None => format!("cpuid {leaf:x}.{subleaf:x}:{} bit {bit}", format!("{register:?}").to_lowercase()),
    }
}

/// The twelve letters of the CPU's maker.
fn vendor(cpuid: &[kvm_cpuid_entry2]) -> String {
    let bytes: Vec<u8> =
        [Ebx, Edx, Ecx].iter().flat_map(|register| value(cpuid, 0, 0, *register).to_le_bytes()).collect();
    String::from_utf8_lossy(&bytes).trim_matches('\0').escape_debug().to_string()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn cpu(features: &[(u32, u32, Register, u32)]) -> Vec<kvm_cpuid_entry2> {
        let mut entries = vec![kvm_cpuid_entry2 { ebx: 0x756e_6547, ..Default::default() }];
        for (leaf, subleaf, register, bits) in features {
            let there = entries.iter().position(|entry| (entry.function, entry.index) == (*leaf, *subleaf));
            let at = there.unwrap_or(entries.len());
            if there.is_none() {
                let flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
                entries.push(kvm_cpuid_entry2 {
                    function: *leaf,
                    index: *subleaf,
                    flags,
                    ..Default::default()
                });
            }
            match register {
                Eax => entries[at].eax = *bits,
                Ebx => entries[at].ebx = *bits,
                Ecx => entries[at].ecx = *bits,
                Edx => entries[at].edx = *bits,
            }
        }
        entries
    }

    #[test]
    fn a_missing_feature_is_named() {
        let saved = cpu(&[(7, 0, Ebx, 1 << 5 | 1 << 6), (1, 0, Ecx, 1 << 28)]);
        let host = cpu(&[(1, 0, Ecx, 1 << 28)]);
        let text = check(&saved, &host, &host).unwrap_err().to_string();
        assert!(text.contains("avx2") && text.contains("cpuid 7.0:ebx bit 6"), "{text}");
        assert!(!text.contains("avx,"), "{text}");
        assert!(check(&host, &saved, &saved).is_ok(), "a host may have more");
    }

    #[test]
    fn what_no_host_lists_is_not_missed() {
        let saved = cpu(&[(1, 0, Ecx, 1 << 24 | 1 << 27 | 1 << 31), (1, 0, Edx, 1 << 28)]);
        assert!(check(&saved, &cpu(&[]), &cpu(&[])).is_ok());
    }

    #[test]
    fn another_makers_cpu_is_refused() {
        let other = [kvm_cpuid_entry2 { ebx: 0x6874_7541, ..Default::default() }];
        assert!(check(&cpu(&[]), &other, &other).unwrap_err().to_string().contains("Auth"));
    }

    #[test]
    fn what_kvm_offers_and_no_guest_gets_is_refused_by_its_name() {
        for (leaf, register, bit, name) in [
            (1, Ecx, 5, "vmx"),
            (0x8000_0001, Ecx, 2, "svm"),
            (7, Ecx, 7, "shstk"),
            (0x8000_000a, Edx, 0, "cpuid 8000000a.0:edx bit 0"),
        ] {
            let host = cpu(&[(leaf, 0, register, 1 << bit)]);
            let text = check(&host, &cpu(&[]), &host).unwrap_err().to_string();
            assert!(text.contains(name) && text.contains("gives to none"), "{text}");
        }
        let mut other = cpu(&[]);
        other.push(kvm_cpuid_entry2 { function: 0x4000_0100, ..Default::default() });
        let text = check(&other, &cpu(&[]), &cpu(&[])).unwrap_err().to_string();
        assert!(text.contains("hypervisor leaf 40000100"), "{text}");
    }

    #[test]
    fn no_second_entry_hides_a_feature_from_the_check() {
        let with = |entry: kvm_cpuid_entry2| {
            let mut entries = cpu(&[]);
            entries.push(entry);
            check(&entries, &cpu(&[]), &cpu(&[]))
        };
        let vmx = kvm_cpuid_entry2 { function: 1, ecx: 1 << 5, ..Default::default() };
        // An entry of no particular subleaf is the one KVM takes, whatever its number.
        assert!(with(vmx).is_err());
        assert!(with(kvm_cpuid_entry2 { index: 9, ..vmx }).is_err());
        let flags = KVM_CPUID_FLAG_SIGNIFCANT_INDEX;
        assert!(with(kvm_cpuid_entry2 { index: 9, flags, ..vmx }).is_err());
        // Leaf 7 without the flag is every subleaf of it: the number of subleaves is then a list of features.
        let every = kvm_cpuid_entry2 { function: 7, eax: 1 << 4, ..Default::default() };
        assert!(with(every).is_err());
        let mut twice = cpu(&[(1, 0, Ecx, 0)]);
        twice.push(vmx);
        assert!(check(&twice, &cpu(&[]), &cpu(&[])).unwrap_err().to_string().contains("twice"));
    }
}

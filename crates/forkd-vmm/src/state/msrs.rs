//! Which model-specific registers a state may set.
//!
//! KVM lets a monitor set more of them than any guest could, and trusts what it sets. So a state may
//! name those a guest that boots here has, and no others.

use kvm_bindings::kvm_msr_entry;

use super::VcpuState;
use crate::boot::cpuid::Grant;
use crate::{Error, Result};

/// Which features the guest may switch on: virtualization, enclaves.
const FEAT_CTL: u32 = 0x3a;
/// The features of nested virtualization.
const VMX: std::ops::RangeInclusive<u32> = 0x480..=0x493;
const EFER: u32 = 0xc000_0080;
/// In [`EFER`]: AMD's virtualization is on.
const SVME: u64 = 1 << 12;
/// In the fourth control register: Intel's is.
const VMXE: u64 = 1 << 13;
/// The bits of [`FEAT_CTL`] that guests without virtualization set by themselves: locked, enclaves.
const FEAT_CTL_OF_GUESTS: u64 = 1 | 1 << 17 | 1 << 18;

/// Whether no guest has it, even if KVM lists it.
pub(super) fn is_for_no_guest(index: u32) -> bool {
    index == FEAT_CTL || VMX.contains(&index)
}

/// Whether only guests with [`Grant::Older`] have it: registers of performance counters, Intel's and AMD's,
/// and of WAITPKG. AMD's first four counters are not among them: no CPUID bit takes them from a guest.
pub(super) fn is_only_older(index: u32) -> bool {
    matches!(
        index,
        0xc1..=0xc8
            | 0xe1
            | 0x186..=0x18d
            | 0x309..=0x30f
            | 0x329
            | 0x345
            | 0x38d..=0x391
            | 0x3f1..=0x3f2
            | 0x4c1..=0x4c8
            | 0x600
            | 0xc000_0300..=0xc000_0303
            | 0xc001_0200..=0xc001_020b
    )
}

/// Drops registers that older versions of forkd saved and no guest needs: they describe features that the
/// guest does not have.
pub(super) fn drop_leftovers(state: &mut VcpuState) {
    let grant = Grant::of(&state.cpuid);
    state.msrs.retain(|msr| {
        let nothing = match msr.index {
            FEAT_CTL => msr.data & !FEAT_CTL_OF_GUESTS == 0,
            index if VMX.contains(&index) => msr.data == 0,
            index => grant == Grant::Fresh && is_only_older(index),
        };
        !nothing
    });
}

/// Refuses a vCPU with registers that are not in `allowed`, or that has virtualization of its own switched
/// on: KVM looks at that alone, and not at the guest's CPUID.
pub(super) fn check(state: &VcpuState, allowed: &[u32]) -> Result<()> {
    let virtualization = |msr: &kvm_msr_entry| msr.index == EFER && msr.data & SVME != 0;
    if state.sregs.efer & SVME != 0 || state.sregs.cr4 & VMXE != 0 || state.msrs.iter().any(virtualization) {
        return Err(Error::Config(
            "the state's guest has virtualization of its own switched on, which forkd gives to none; make the \
             snapshot again"
                .into(),
        ));
    }
    let stranger = state.msrs.iter().find(|msr| is_for_no_guest(msr.index) || !allowed.contains(&msr.index));
    match stranger {
        None => Ok(()),
        Some(msr) => Err(Error::Config(format!(
            "the state sets MSR {:#x}, which a guest that boots here does not have; restore it on a host like \
             the one it was made on, or make the snapshot again",
            msr.index
        ))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::state::file;

    #[test]
    fn only_registers_of_a_guest_that_boots_here_may_be_set() {
        let mut state = file::parse(include_bytes!("../../../../fuzz/corpus/state_file/file")).unwrap();
        let state = &mut state.vcpus[0];
        let mut check_with = |index, data, allowed: &[u32]| {
            state.msrs = vec![kvm_msr_entry { index, data, ..Default::default() }];
            check(state, allowed)
        };
        check_with(0x10, 1, &[0x10]).unwrap();
        check_with(EFER, 0x500, &[EFER]).unwrap();
        assert!(check_with(0x11, 0, &[0x10]).unwrap_err().to_string().contains("MSR 0x11"));
        // Whatever KVM lists.
        for index in [FEAT_CTL, *VMX.start(), *VMX.end()] {
            assert!(check_with(index, 0, &[index]).is_err(), "{index:#x}");
        }
        assert!(check_with(EFER, SVME, &[EFER]).is_err());
    }
}

//! A vCPU's state: out of KVM, into KVM.
//!
//! The order of the calls is not free, in either direction: reading one part makes KVM settle another, and
//! setting one part resets another. Every step that has to be where it is has a comment with the reason.

use std::io;
use std::os::fd::AsRawFd;

use kvm_bindings::{
    CpuId, KVM_VCPU_TSC_CTRL, KVM_VCPU_TSC_OFFSET, Msrs, kvm_cpuid_entry2, kvm_debugregs, kvm_device_attr,
    kvm_lapic_state, kvm_mp_state, kvm_msr_entry, kvm_regs, kvm_sregs, kvm_vcpu_events, kvm_xcrs, kvm_xsave,
};
use kvm_ioctls::{Kvm, VcpuFd};
use serde::{Deserialize, Serialize};

use super::msrs;
use crate::boot::cpuid::Grant;
use crate::{Error, Result};

const IA32_TSC: u32 = 0x10;
const IA32_TSC_DEADLINE: u32 = 0x6e0;
/// How memory is cached: which KVM keeps, but leaves out of its list.
const MTRRS: [std::ops::RangeInclusive<u32>; 5] =
    [0x200..=0x20f, 0x250..=0x250, 0x258..=0x259, 0x268..=0x26f, 0x2ff..=0x2ff];
/// How many model-specific registers KVM takes in one call.
const MSRS_PER_CALL: usize = 256;
/// The most registers a state may have.
const MAX_MSRS: usize = 4096;
/// How far a TSC's frequency may be off without being noticed, in parts per million: KVM's own tolerance.
const TSC_TOLERANCE_PPM: u64 = 250;

/// One vCPU.
#[derive(Serialize, Deserialize)]
pub struct VcpuState {
    /// Whether it runs, is halted or waits to be woken.
    pub mp_state: kvm_mp_state,
    /// General registers.
    pub regs: kvm_regs,
    /// Segments, control registers, the local APIC's address.
    pub sregs: kvm_sregs,
    /// Floating point and vectors.
    pub xsave: Box<kvm_xsave>,
    /// Which of those are enabled.
    pub xcrs: kvm_xcrs,
    /// Debug registers.
    pub debug_regs: kvm_debugregs,
    /// The local APIC.
    pub lapic: Box<kvm_lapic_state>,
    /// Frequency of its TSC; 0 if KVM does not know.
    pub tsc_khz: u32,
    /// Which CPU it claims to be.
    pub cpuid: Vec<kvm_cpuid_entry2>,
    /// Model-specific registers, in the order they are set.
    pub msrs: Vec<kvm_msr_entry>,
    /// Pending exceptions, interrupts and NMIs.
    pub events: kvm_vcpu_events,
}

/// Finds the model-specific registers that make up a vCPU with `cpuid`: those KVM reads and sets. Asked of a
/// vCPU made for it, once for each VM that is built: one by one they take longer than all else that is saved.
pub fn find_msrs(kvm: &Kvm, cpuid: &CpuId) -> Result<Vec<u32>> {
    let vm = kvm.create_vm().map_err(Error::kvm("KVM_CREATE_VM"))?;
    // It gives the vCPU its local APIC.
    vm.create_irq_chip().map_err(Error::kvm("KVM_CREATE_IRQCHIP"))?;
    let vcpu = vm.create_vcpu(0).map_err(Error::kvm("KVM_CREATE_VCPU"))?;
    vcpu.set_cpuid2(cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    let list = kvm.get_msr_index_list().map_err(Error::kvm("KVM_GET_MSR_INDEX_LIST"))?;
    let unlisted = MTRRS.into_iter().flatten().filter(|index| !list.as_slice().contains(index));
    // Some KVMs read and set registers of what the guest does not have, as long as they are zero.
    let grant = Grant::of(cpuid.as_slice());
    let unneeded =
        |index: &u32| msrs::is_for_no_guest(*index) || grant == Grant::Fresh && msrs::is_only_older(*index);
    let indices = list.as_slice().iter().copied().chain(unlisted).filter(|index| !unneeded(index));
    let indices: Vec<u32> = indices.collect();
    // KVM lists more than it reads, and reads more than it sets.
    let readable = get_msrs(&vcpu, &readable(&vcpu, &indices)?)?;
    settable(&vcpu, &in_order(readable))
}

/// Saves all vCPUs of a VM, which have come out of `KVM_RUN` with nothing half done and may go on afterwards.
/// `cpuids` are their CPUIDs (some KVMs, asked for them, answer with the host's), `msrs` what [`find_msrs`]
/// has found.
pub fn save_all(vcpus: &[&VcpuFd], cpuids: &[CpuId], msrs: &[u32]) -> Result<Vec<VcpuState>> {
    if vcpus.is_empty() || vcpus.len() != cpuids.len() {
        return Err(Error::Config("a vCPU's thread has failed: the VM cannot be saved".into()));
    }
    vcpus.iter().zip(cpuids).map(|(vcpu, cpuid)| save(vcpu, cpuid, msrs)).collect()
}

/// The registers [`save_all`] is to save of a VM that came from `states`.
pub fn saved_msrs(states: &[VcpuState]) -> Vec<u32> {
    states.first().map_or_else(Vec::new, |state| state.msrs.iter().map(|msr| msr.index).collect())
}

/// Drops the registers KVM reads but does not set from `states`. To find them they are set, which changes
/// the first vCPU: the last thing done with it.
pub fn keep_settable(vcpus: &[&VcpuFd], states: &mut [VcpuState]) -> Result<()> {
    let (Some(vcpu), Some(state)) = (vcpus.first(), states.first()) else { return Ok(()) };
    let settable = settable(vcpu, &state.msrs)?;
    for state in states {
        state.msrs.retain(|msr| settable.contains(&msr.index));
    }
    Ok(())
}

fn save(vcpu: &VcpuFd, cpuid: &CpuId, msr_indices: &[u32]) -> Result<VcpuState> {
    // First: KVM takes up pending INIT and SIPI here, which changes the local APIC.
    let mp_state = vcpu.get_mp_state().map_err(Error::kvm("KVM_GET_MP_STATE"))?;
    // Asked for events, KVM puts what a pending exception brings along, like the address of a page fault,
    // into the registers it belongs to: before those are read.
    vcpu.get_vcpu_events().map_err(Error::kvm("KVM_GET_VCPU_EVENTS"))?;
    let regs = vcpu.get_regs().map_err(Error::kvm("KVM_GET_REGS"))?;
    let sregs = vcpu.get_sregs().map_err(Error::kvm("KVM_GET_SREGS"))?;
    // 4 KiB hold everything a guest can use: only AMX needs more, and a process has to ask the kernel
    // for that first, which this one does not.
    let xsave = vcpu.get_xsave().map_err(Error::kvm("KVM_GET_XSAVE"))?;
    let xcrs = vcpu.get_xcrs().map_err(Error::kvm("KVM_GET_XCRS"))?;
    let debug_regs = vcpu.get_debug_regs().map_err(Error::kvm("KVM_GET_DEBUGREGS"))?;
    let lapic = vcpu.get_lapic().map_err(Error::kvm("KVM_GET_LAPIC"))?;
    // A KVM without this call has an unstable TSC, which guests do not use.
    let tsc_khz = vcpu.get_tsc_khz().unwrap_or(0);
    let msrs = get_msrs(vcpu, msr_indices)?;
    // Last: everything before may still turn something pending into an event.
    let events = vcpu.get_vcpu_events().map_err(Error::kvm("KVM_GET_VCPU_EVENTS"))?;
    Ok(VcpuState {
        mp_state,
        regs,
        sregs,
        xsave: Box::new(xsave),
        xcrs,
        debug_regs,
        lapic: Box::new(lapic),
        tsc_khz,
        cpuid: cpuid.as_slice().to_vec(),
        msrs: in_order(msrs),
        events,
    })
}

fn wrap(entries: &[kvm_msr_entry]) -> Result<Msrs> {
    Msrs::from_entries(entries).map_err(|_| Error::Config("too many MSRs for one call".into()))
}

fn unset(index: u32) -> kvm_msr_entry {
    kvm_msr_entry { index, ..Default::default() }
}

fn readable(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<u32>> {
    let mut good = Vec::with_capacity(indices.len());
    for index in indices {
        let mut one = wrap(&[unset(*index)])?;
        if vcpu.get_msrs(&mut one).map_err(Error::kvm("KVM_GET_MSRS"))? == 1 {
            good.push(*index);
        }
    }
    Ok(good)
}

fn settable(vcpu: &VcpuFd, msrs: &[kvm_msr_entry]) -> Result<Vec<u32>> {
    let mut good = Vec::with_capacity(msrs.len());
    for msr in msrs {
        if vcpu.set_msrs(&wrap(&[*msr])?).map_err(Error::kvm("KVM_SET_MSRS"))? == 1 {
            good.push(msr.index);
        }
    }
    Ok(good)
}

fn get_msrs(vcpu: &VcpuFd, indices: &[u32]) -> Result<Vec<kvm_msr_entry>> {
    let mut all = Vec::with_capacity(indices.len());
    for chunk in indices.chunks(MSRS_PER_CALL) {
        let entries: Vec<_> = chunk.iter().copied().map(unset).collect();
        let mut msrs = wrap(&entries)?;
        let read = vcpu.get_msrs(&mut msrs).map_err(Error::kvm("KVM_GET_MSRS"))?;
        if let Some(index) = chunk.get(read) {
            return Err(Error::Config(format!(
                "KVM does not read MSR {index:#x} of one vCPU, but does of another; this VM cannot be frozen"
            )));
        }
        all.extend_from_slice(msrs.as_slice());
    }
    Ok(all)
}

/// The deadline timer is relative to the TSC: the TSC has to be set before. And a deadline of zero may be one
/// that has passed, whose interrupt KVM had not delivered yet and does not report: it is set to now, so that
/// the guest gets an interrupt too many rather than none at all. (A guest that does not use the deadline mode
/// gets nothing: KVM ignores the register then.)
fn in_order(mut msrs: Vec<kvm_msr_entry>) -> Vec<kvm_msr_entry> {
    let now = msrs.iter().find(|msr| msr.index == IA32_TSC).map_or(0, |msr| msr.data);
    for msr in &mut msrs {
        if msr.index == IA32_TSC_DEADLINE && msr.data == 0 {
            msr.data = now;
        }
    }
    msrs.sort_by_key(|msr| (msr.index == IA32_TSC_DEADLINE, msr.index != IA32_TSC));
    msrs
}

/// A vCPU's state in the form that the ioctls take: made once, used for every child.
pub struct Prepared {
    cpuid: CpuId,
    msrs: Vec<Msrs>,
    /// The frequency to scale the TSC to, if this host's is another one.
    tsc_khz: Option<u32>,
}

impl Prepared {
    /// Prepares `state` for this host, whose TSC has `host_tsc_khz`.
    pub fn new(state: &VcpuState, host_tsc_khz: u32) -> Result<Prepared> {
        let broken = |what| Error::Config(format!("the state has more {what} than KVM takes"));
        if state.msrs.len() > MAX_MSRS {
            return Err(broken("MSRs"));
        }
        let msrs = state.msrs.chunks(MSRS_PER_CALL).map(wrap).collect::<Result<_>>()?;
        let cpuid = CpuId::from_entries(&state.cpuid).map_err(|_| broken("CPUID leaves"))?;
        Ok(Prepared { cpuid, msrs, tsc_khz: scaled(state.tsc_khz, host_tsc_khz) })
    }

    /// The vCPU's CPUID.
    pub fn into_cpuid(self) -> CpuId {
        self.cpuid
    }
}

/// The frequency to scale to, unless both are practically the same or one is not known.
fn scaled(saved: u32, host: u32) -> Option<u32> {
    let tolerance = u64::from(host) * TSC_TOLERANCE_PPM / 1_000_000;
    let known = saved != 0 && host != 0;
    (known && u64::from(saved.abs_diff(host)) > tolerance).then_some(saved)
}

/// Puts `state` into a new vCPU.
pub fn restore(vcpu: &VcpuFd, state: &VcpuState, prepared: &Prepared) -> Result<()> {
    // Before the TSC is set, which is counted in it.
    if let Some(khz) = prepared.tsc_khz {
        vcpu.set_tsc_khz(khz).map_err(|_| {
            Error::Config(format!(
                "the snapshot's CPU counts time at {khz} kHz, this host's at another frequency, and its KVM \
                 cannot scale one to the other; restore it on a host like the one it was made on"
            ))
        })?;
    }
    // Before all registers: it decides which of their bits are allowed.
    vcpu.set_cpuid2(&prepared.cpuid).map_err(Error::kvm("KVM_SET_CPUID2"))?;
    vcpu.set_mp_state(state.mp_state).map_err(Error::kvm("KVM_SET_MP_STATE"))?;
    vcpu.set_regs(&state.regs).map_err(Error::kvm("KVM_SET_REGS"))?;
    // Also switches the local APIC on, at its address, in its mode.
    vcpu.set_sregs(&state.sregs).map_err(Error::kvm("KVM_SET_SREGS"))?;
    // SAFETY: the structure has the size every KVM reads without AMX, which this process never asked
    // the kernel for; so KVM reads no further than its end.
    unsafe { vcpu.set_xsave(&state.xsave) }.map_err(Error::kvm("KVM_SET_XSAVE"))?;
    vcpu.set_xcrs(&state.xcrs).map_err(Error::kvm("KVM_SET_XCRS"))?;
    vcpu.set_debug_regs(&state.debug_regs).map_err(Error::kvm("KVM_SET_DEBUGREGS"))?;
    // After the APIC is on, and before the registers: the deadline timer is only taken by an APIC in
    // deadline mode.
    vcpu.set_lapic(&state.lapic).map_err(Error::kvm("KVM_SET_LAPIC"))?;
    for msrs in &prepared.msrs {
        let set = vcpu.set_msrs(msrs).map_err(Error::kvm("KVM_SET_MSRS"))?;
        if let Some(refused) = msrs.as_slice().get(set) {
            return Err(Error::Config(format!(
                "this host's KVM does not take the value {:#x} of the snapshot's MSR {:#x}; restore it on a \
                 host like the one it was made on",
                refused.data, refused.index
            )));
        }
    }
    // Last: setting registers clears pending exceptions.
    vcpu.set_vcpu_events(&state.events).map_err(Error::kvm("KVM_SET_VCPU_EVENTS"))?;
    notify_pause(vcpu)
}

/// Notifies the guest, when it goes on, that it was stopped, so that its watchdogs ignore the gap. A guest
/// without KVM's clock has no place for that.
pub fn notify_pause(vcpu: &VcpuFd) -> Result<()> {
    match vcpu.kvmclock_ctrl() {
        Err(error) if error.errno() != libc::EINVAL => Err(Error::kvm("KVM_KVMCLOCK_CTRL")(error)),
        _ => Ok(()),
    }
}

/// Gives all vCPUs the TSC of the first. Each TSC was set at another instant; a guest that sees them
/// differ takes them for broken, and KVM gives up its fast clock.
pub fn equalise_tsc(vcpus: &[VcpuFd]) -> Result<()> {
    let Some((first, others @ [_, ..])) = vcpus.split_first() else { return Ok(()) };
    // A KVM without this (before Linux 5.16) keeps them together as well as it can by itself.
    let Ok(offset) = tsc_offset(first) else { return Ok(()) };
    others.iter().try_for_each(|vcpu| set_tsc_offset(vcpu, offset)).map_err(Error::system("set a vCPU's TSC"))
}

/// `_IOW(KVMIO, 0xe1, struct kvm_device_attr)`.
const KVM_SET_DEVICE_ATTR: u32 = 0x4018_aee1;
/// `_IOW(KVMIO, 0xe2, struct kvm_device_attr)`.
const KVM_GET_DEVICE_ATTR: u32 = 0x4018_aee2;

/// By how much a vCPU's TSC differs from the host's.
fn tsc_offset(vcpu: &VcpuFd) -> io::Result<u64> {
    let mut offset = 0;
    tsc_offset_call(vcpu, KVM_GET_DEVICE_ATTR, &mut offset)?;
    Ok(offset)
}

fn set_tsc_offset(vcpu: &VcpuFd, mut offset: u64) -> io::Result<()> {
    tsc_offset_call(vcpu, KVM_SET_DEVICE_ATTR, &mut offset)
}

fn tsc_offset_call(vcpu: &VcpuFd, call: u32, offset: &mut u64) -> io::Result<()> {
    let attribute = kvm_device_attr {
        group: KVM_VCPU_TSC_CTRL,
        attr: u64::from(KVM_VCPU_TSC_OFFSET),
        addr: (&raw mut *offset) as u64,
        ..Default::default()
    };
    // SAFETY: both calls take this structure; this attribute is eight bytes at its address, which KVM
    // reads or writes and which are borrowed for as long as the call takes.
    let result = unsafe { libc::ioctl(vcpu.as_raw_fd(), call.into(), &raw const attribute) };
    if result < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_deadline_comes_last_and_one_that_has_passed_is_now() {
        let msr = |index, data| kvm_msr_entry { index, data, ..Default::default() };
        let order = in_order(vec![msr(IA32_TSC_DEADLINE, 0), msr(0x174, 1), msr(IA32_TSC, 77)]);
        let order: Vec<_> = order.iter().map(|msr| (msr.index, msr.data)).collect();
        assert_eq!(order, [(IA32_TSC, 77), (0x174, 1), (IA32_TSC_DEADLINE, 77)]);
        let armed = in_order(vec![msr(IA32_TSC_DEADLINE, 99), msr(IA32_TSC, 77)]);
        assert_eq!(armed[1].data, 99);
    }

    #[test]
    fn a_tsc_is_scaled_only_when_it_would_be_noticed() {
        assert_eq!(scaled(2_000_000, 2_000_000), None);
        assert_eq!(scaled(2_000_500, 2_000_000), None);
        assert_eq!(scaled(2_000_501, 2_000_000), Some(2_000_501));
        assert_eq!(scaled(0, 2_000_000), None);
        assert_eq!(scaled(2_000_000, 0), None);
    }
}

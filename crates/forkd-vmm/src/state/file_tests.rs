//! Files that are read again, and files that are not.

use kvm_bindings::{kvm_clock_data, kvm_cpuid_entry2, kvm_irqchip, kvm_msr_entry};

use super::*;
use crate::state::{DevicePart, NetState, QueuePosition, QueueState, TransportState};

fn vcpu() -> VcpuState {
    VcpuState {
        mp_state: Default::default(),
        regs: Default::default(),
        sregs: Default::default(),
        xsave: Default::default(),
        xcrs: Default::default(),
        debug_regs: Default::default(),
        lapic: Default::default(),
        tsc_khz: 1_000_000,
        cpuid: vec![Default::default(); 3],
        msrs: vec![kvm_msr_entry { index: 0x10, data: 99, ..Default::default() }],
        events: Default::default(),
    }
}

fn state() -> MachineState {
    let queue = QueueState {
        size: 64,
        descriptors: 0x1000,
        available: 0x2000,
        used: 0x3000,
        position: Some(QueuePosition { next_available: 5, next_used: 5 }),
    };
    let net = DeviceState {
        transport: TransportState { status: 15, queues: vec![queue, queue], ..Default::default() },
        part: DevicePart::Net(NetState { mac: [1, 2, 3, 4, 5, 6], link_up: true }),
    };
    let rng = DeviceState { transport: TransportState::default(), part: DevicePart::Rng };
    MachineState {
        memory: vec![MemoryRange { start: 0, length: 16 << 20 }],
        vcpus: vec![vcpu(), vcpu()],
        interrupts: InterruptState { chips: [kvm_irqchip::default(); 3] },
        clock: ClockState { clock: kvm_clock_data { clock: 12345, ..Default::default() } },
        serial: SerialState { scratch: 7, input: vec![1, 2], ..Default::default() },
        generation: GenerationState { id: [9; 16] },
        devices: vec![net, rng],
    }
}

fn good() -> Vec<u8> {
    let payload = payload(&state()).unwrap();
    [header(FORMAT_VERSION, &payload), payload].concat()
}

/// Under a checksum that fits.
fn with_payload(payload: &[u8]) -> Vec<u8> {
    [&header(FORMAT_VERSION, payload), payload].concat()
}

fn refusal(bytes: &[u8]) -> String {
    parse(bytes).unwrap_err().to_string()
}

#[test]
fn what_is_written_is_read_again() {
    let file = tempfile::tempfile().unwrap();
    // What was in the file before does not matter.
    file.write_all_at(&[1; 100_000], 0).unwrap();
    write(&state(), &file).unwrap();
    let read = read(&file).unwrap();
    assert_eq!(payload(&read).unwrap(), payload(&state()).unwrap());
    assert_eq!(read.devices, state().devices);
    assert_eq!((read.vcpus.len(), read.vcpus[1].msrs[0].data, read.clock.clock.clock), (2, 99, 12345));
}

#[test]
fn a_truncated_file_is_refused_at_every_length() {
    let good = good();
    for length in 0..good.len() {
        let text = refusal(&good[..length]);
        assert!(length == 0 || text.contains("truncated"), "{length}: {text}");
    }
    let longer = [&good[..], b"x"].concat();
    assert!(refusal(&longer).contains("1 bytes follow its end"));
}

#[test]
fn a_single_changed_byte_is_noticed_wherever_it_is() {
    let good = good();
    assert!(parse(&good).is_ok());
    for position in 0..good.len() {
        let mut changed = good.clone();
        changed[position] ^= 0x40;
        let text = refusal(&changed);
        if position >= HEADER {
            assert!(text.contains("was changed"), "{position}: {text}");
        }
    }
}

#[test]
fn what_another_version_made_is_refused_by_its_version() {
    let payload = payload(&state()).unwrap();
    let other = [header(7, &payload), payload.clone()].concat();
    assert!(refusal(&other).contains("format 7"), "{}", refusal(&other));
    let mut newer = payload.clone();
    newer[4] = 9;
    let text = refusal(&with_payload(&newer));
    assert!(text.contains("\"memory ranges\" has version 9"), "{text}");
    let mut unknown = payload;
    unknown[0] = 200;
    let text = refusal(&with_payload(&unknown));
    assert!(text.contains("unknown kind 200"), "{text}");
}

/// With a CPU that has performance counters.
fn older() -> MachineState {
    let mut state = state();
    for vcpu in &mut state.vcpus {
        let counters = kvm_cpuid_entry2 { function: 0xa, eax: 0x0730_0402, ..Default::default() };
        vcpu.cpuid.push(counters);
        vcpu.msrs.push(kvm_msr_entry { index: 0x38f, data: 7, ..Default::default() });
    }
    state
}

#[test]
fn only_a_state_of_the_older_version_may_have_performance_counters() {
    let payload = payload(&older()).unwrap();
    let text = refusal(&with_payload(&payload));
    assert!(text.contains("performance counters"), "{text}");
    let bytes = [header(OLDER_GUEST, &payload), payload.clone()].concat();
    let state = parse(&bytes).unwrap();
    assert!(state.vcpus.iter().all(|vcpu| vcpu.msrs.iter().any(|msr| msr.index == 0x38f)));
    // Saved again, it is of that version again.
    let file = tempfile::tempfile().unwrap();
    write(&state, &file).unwrap();
    read(&file).unwrap();
    assert_eq!(super::payload(&read(&file).unwrap()).unwrap(), payload);
}

#[test]
fn a_state_of_the_older_version_loses_the_registers_no_guest_needs() {
    let mut state = state();
    let add = |state: &mut MachineState, index, data| {
        state.vcpus[0].msrs.push(kvm_msr_entry { index, data, ..Default::default() });
    };
    // Locked; nothing; a counter of a guest that has none.
    for (index, data) in [(0x3a, 1), (0x480, 0), (0x38f, 0)] {
        add(&mut state, index, data);
    }
    let read = |state: &MachineState| {
        let payload = payload(state).unwrap();
        parse(&[header(OLDER_GUEST, &payload), payload].concat()).unwrap()
    };
    let indices =
        |state: &MachineState| -> Vec<u32> { state.vcpus[0].msrs.iter().map(|msr| msr.index).collect() };
    assert_eq!(indices(&read(&state)), [0x10]);
    // What switches virtualization on stays, to be refused.
    for (index, data) in [(0x3a, 5), (0x480, 1)] {
        add(&mut state, index, data);
    }
    assert_eq!(indices(&read(&state)), [0x10, 0x3a, 0x480]);
}

#[test]
fn a_file_of_the_version_before_is_still_read() {
    let old = include_bytes!("../../../../fuzz/corpus/state_file/file");
    assert_eq!(old[MAGIC.len()..MAGIC.len() + 4], OLDER_GUEST.to_le_bytes());
    assert!(!parse(old).unwrap().vcpus.is_empty());
}

#[test]
fn every_part_is_there_once_and_no_list_is_endless() {
    let state = state();
    let whole = payload(&state).unwrap();
    let mut twice = whole.clone();
    push(&mut twice, Kind::Clock, &state.clock).unwrap();
    assert!(refusal(&with_payload(&twice)).contains("\"clock\" twice"));
    let mut crowd = whole.clone();
    (0..MAX_VIRTIO).for_each(|_| push(&mut crowd, Kind::Device, &state.devices[1]).unwrap());
    assert!(refusal(&with_payload(&crowd)).contains("more than 18"));
    let mut clock_only = Vec::new();
    push(&mut clock_only, Kind::Clock, &state.clock).unwrap();
    assert!(refusal(&with_payload(&clock_only)).contains("\"memory ranges\" is missing"));
    let without_vcpus = payload(&MachineState { vcpus: Vec::new(), ..state }).unwrap();
    assert!(refusal(&with_payload(&without_vcpus)).contains("\"vCPU\" is missing"));
    assert!(refusal(&with_payload(&whole[..whole.len() - 1])).contains("incomplete"));
}

#[test]
fn something_else_is_not_a_state_file() {
    assert!(refusal(b"").contains("not a state file"));
    assert!(refusal(b"\x7fELF and so on").contains("not a state file"));
    let huge = tempfile::tempfile().unwrap();
    huge.set_len(1 << 40).unwrap();
    assert!(read(&huge).unwrap_err().to_string().contains("more than any state"));
    // Runs of blocks that no disk has: each takes two bytes here, and sixteen once it is read.
    huge.set_len(100 << 20).unwrap();
    let text = read_for_disks(&huge, 1 << 30).unwrap_err().to_string();
    assert!(text.contains("more than any state of such a VM"), "{text}");
    let text = read_for_disks(&huge, 1 << 40).unwrap_err().to_string();
    assert!(text.contains("not a state file"), "{text}");
}

#[test]
fn damage_under_a_fitting_checksum_ends_without_a_panic() {
    let whole = payload(&state()).unwrap();
    for position in 0..whole.len() {
        for value in [0, 1, 0x7f, 0x80, 0xff] {
            let mut damaged = whole.clone();
            damaged[position] = value;
            check_any_bytes(&damaged);
        }
    }
    check_any_bytes(&whole);
}

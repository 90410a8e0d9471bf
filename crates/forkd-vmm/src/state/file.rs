//! A [`MachineState`] as a file.
//!
//! ```text
//! magic (8)  format version (4)  payload length (8)  BLAKE3 of everything else (32)  payload
//! payload = sections: kind (4)  version (4)  length (8)  postcard bytes
//! ```
//!
//! All numbers are little-endian. Whatever the bytes are, [`read`] ends with a state or with a
//! sentence about what is wrong with the file. The checksum is looked at before anything is parsed;
//! it finds accidents, not attackers: values are not trusted because it fits.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;

use serde::Serialize;
use serde::de::DeserializeOwned;

use super::{
    ClockState, DeviceState, GenerationState, InterruptState, MachineState, MemoryRange, SerialState,
    VcpuState,
};
use crate::layout::MAX_VIRTIO;
use crate::{Error, Result};

/// How every state file begins.
pub const MAGIC: [u8; 8] = *b"forkdvm\0";
/// The version of the file's frame. Sections have versions of their own.
pub const FORMAT_VERSION: u32 = 1;

const HEADER: usize = 8 + 4 + 8 + 32;
const SECTION_HEADER: usize = 4 + 4 + 8;
/// The longest payload. Nearly all of a long one is the map of a disk that was written all over.
const MAX_PAYLOAD: u64 = 256 << 20;
const MAX_VCPUS: usize = forkd_protocol::control::MAX_VCPUS as usize;
/// One below the hole, one above.
const MAX_RANGES: usize = 2;

/// The kinds of sections, each with its present version and its name.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kind {
    Memory = 1,
    Vcpu = 2,
    Interrupts = 3,
    Clock = 4,
    Serial = 5,
    Generation = 6,
    Device = 7,
}

impl Kind {
    fn from_number(number: u32) -> Option<Kind> {
        [
            Kind::Memory,
            Kind::Vcpu,
            Kind::Interrupts,
            Kind::Clock,
            Kind::Serial,
            Kind::Generation,
            Kind::Device,
        ]
        .into_iter()
        .find(|kind| *kind as u32 == number)
    }

    /// To be raised whenever the meaning of the section's bytes changes.
    fn version(self) -> u32 {
        1
    }

    fn name(self) -> &'static str {
        match self {
            Kind::Memory => "memory ranges",
            Kind::Vcpu => "vCPU",
            Kind::Interrupts => "interrupt chips",
            Kind::Clock => "clock",
            Kind::Serial => "serial port",
            Kind::Generation => "generation id",
            Kind::Device => "device",
        }
    }
}

/// Writes `state` into `file`, from its beginning.
pub fn write(state: &MachineState, file: &File) -> Result<()> {
    let payload = payload(state)?;
    let bytes = [header(FORMAT_VERSION, &payload), payload].concat();
    file.write_all_at(&bytes, 0)
        .and_then(|()| file.set_len(bytes.len() as u64))
        .map_err(Error::system("write the state file"))
}

fn payload(state: &MachineState) -> Result<Vec<u8>> {
    let mut payload = Vec::new();
    push(&mut payload, Kind::Memory, &state.memory)?;
    for vcpu in &state.vcpus {
        push(&mut payload, Kind::Vcpu, vcpu)?;
    }
    push(&mut payload, Kind::Interrupts, &state.interrupts)?;
    push(&mut payload, Kind::Clock, &state.clock)?;
    push(&mut payload, Kind::Serial, &state.serial)?;
    push(&mut payload, Kind::Generation, &state.generation)?;
    for device in &state.devices {
        push(&mut payload, Kind::Device, device)?;
    }
    if payload.len() as u64 > MAX_PAYLOAD {
        return Err(Error::Config(format!(
            "the VM's state takes {} bytes, over the limit of {MAX_PAYLOAD}: its disks are too fragmented",
            payload.len()
        )));
    }
    Ok(payload)
}

fn header(version: u32, payload: &[u8]) -> Vec<u8> {
    let mut header = MAGIC.to_vec();
    header.extend(version.to_le_bytes());
    header.extend((payload.len() as u64).to_le_bytes());
    let checksum = checksum(&header, payload);
    header.extend(checksum);
    header
}

fn checksum(head: &[u8], payload: &[u8]) -> [u8; 32] {
    *blake3::Hasher::new().update(head).update(payload).finalize().as_bytes()
}

fn push<T: Serialize>(payload: &mut Vec<u8>, kind: Kind, part: &T) -> Result<()> {
    let bytes = postcard::to_stdvec(part)
        .map_err(|error| Error::Config(format!("the {} cannot be written down: {error}", kind.name())))?;
    payload.extend((kind as u32).to_le_bytes());
    payload.extend(kind.version().to_le_bytes());
    payload.extend((bytes.len() as u64).to_le_bytes());
    payload.extend(bytes);
    Ok(())
}

/// Reads a state from `file`.
pub fn read(file: &File) -> Result<MachineState> {
    let size = file.metadata().map_err(Error::system("look at the state file"))?.len();
    if size > MAX_PAYLOAD + HEADER as u64 {
        return Err(damaged(format!("it is {size} bytes long, more than any state")));
    }
    // Bounded by the check above.
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => damaged("it became shorter while it was read".into()),
        _ => Error::system("read the state file")(error),
    })?;
    parse(&bytes)
}

/// What is wrong with a state file, and what to do about it.
fn damaged(what: String) -> Error {
    Error::Config(format!("the state file cannot be used: {what}; make the snapshot again"))
}

/// The state in the bytes of a file.
pub fn parse(bytes: &[u8]) -> Result<MachineState> {
    if !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) || bytes.is_empty() {
        return Err(damaged("it is not a state file".into()));
    }
    let mut input = Input(bytes);
    let head = input
        .take(HEADER)
        .ok_or_else(|| damaged(format!("it is truncated: {} bytes are not even its header", bytes.len())))?;
    let mut fields = Input(&head[MAGIC.len()..]);
    let (version, length) = (fields.u32().unwrap_or_default(), fields.u64().unwrap_or_default());
    // Before the checksum: another version may compute it in another way.
    if version != FORMAT_VERSION {
        return Err(damaged(format!(
            "it was made by another version of forkd: it has format {version}, and this one reads \
             {FORMAT_VERSION}"
        )));
    }
    let payload = input.0;
    let there = payload.len() as u64;
    if there < length {
        return Err(damaged(format!("it is truncated: {there} of {length} bytes are there")));
    }
    if there > length {
        return Err(damaged(format!("{} bytes follow its end", there - length)));
    }
    if fields.0 != checksum(&head[..HEADER - 32], payload) {
        return Err(damaged("it was changed: its checksum does not fit its contents".into()));
    }
    sections(payload)
}

/// The parts found so far.
#[derive(Default)]
struct Parts {
    memory: Option<Vec<MemoryRange>>,
    vcpus: Vec<VcpuState>,
    interrupts: Option<InterruptState>,
    clock: Option<ClockState>,
    serial: Option<SerialState>,
    generation: Option<GenerationState>,
    devices: Vec<DeviceState>,
}

fn sections(payload: &[u8]) -> Result<MachineState> {
    let mut input = Input(payload);
    let mut parts = Parts::default();
    while !input.0.is_empty() {
        let (kind, bytes) = section(&mut input)?;
        match kind {
            Kind::Memory => once(&mut parts.memory, kind, bytes)?,
            Kind::Interrupts => once(&mut parts.interrupts, kind, bytes)?,
            Kind::Clock => once(&mut parts.clock, kind, bytes)?,
            Kind::Serial => once(&mut parts.serial, kind, bytes)?,
            Kind::Generation => once(&mut parts.generation, kind, bytes)?,
            Kind::Vcpu => several(&mut parts.vcpus, MAX_VCPUS, kind, bytes)?,
            Kind::Device => several(&mut parts.devices, MAX_VIRTIO, kind, bytes)?,
        }
    }
    let state = MachineState {
        memory: found(parts.memory, Kind::Memory)?,
        vcpus: parts.vcpus,
        interrupts: found(parts.interrupts, Kind::Interrupts)?,
        clock: found(parts.clock, Kind::Clock)?,
        serial: found(parts.serial, Kind::Serial)?,
        generation: found(parts.generation, Kind::Generation)?,
        devices: parts.devices,
    };
    if state.vcpus.is_empty() {
        return Err(missing(Kind::Vcpu));
    }
    if state.memory.is_empty() || state.memory.len() > MAX_RANGES {
        return Err(damaged(format!("it has {} memory ranges, but a VM has one or two", state.memory.len())));
    }
    Ok(state)
}

/// The next section's kind and bytes.
fn section<'a>(input: &mut Input<'a>) -> Result<(Kind, &'a [u8])> {
    let cut = || damaged("its last section is incomplete".into());
    let head = input.take(SECTION_HEADER).ok_or_else(cut)?;
    let mut fields = Input(head);
    let (Some(number), Some(version), Some(length)) = (fields.u32(), fields.u32(), fields.u64()) else {
        return Err(cut());
    };
    let kind = Kind::from_number(number).ok_or_else(|| {
        damaged(format!("it has a section of the unknown kind {number}, so a newer forkd made it"))
    })?;
    if version != kind.version() {
        return Err(damaged(format!(
            "it was made by another version of forkd: its section \"{}\" has version {version}, and this one \
             reads {}",
            kind.name(),
            kind.version()
        )));
    }
    let bytes = usize::try_from(length).ok().and_then(|length| input.take(length)).ok_or_else(cut)?;
    Ok((kind, bytes))
}

fn decode<T: DeserializeOwned>(kind: Kind, bytes: &[u8]) -> Result<T> {
    match postcard::take_from_bytes(bytes) {
        Ok((part, [])) => Ok(part),
        Ok(_) => Err(damaged(format!("its section \"{}\" is longer than its contents", kind.name()))),
        Err(error) => Err(damaged(format!("its section \"{}\" makes no sense: {error}", kind.name()))),
    }
}

fn once<T: DeserializeOwned>(place: &mut Option<T>, kind: Kind, bytes: &[u8]) -> Result<()> {
    if place.is_some() {
        return Err(damaged(format!("it has the section \"{}\" twice", kind.name())));
    }
    *place = Some(decode(kind, bytes)?);
    Ok(())
}

fn several<T: DeserializeOwned>(parts: &mut Vec<T>, most: usize, kind: Kind, bytes: &[u8]) -> Result<()> {
    if parts.len() >= most {
        return Err(damaged(format!("it has more than {most} sections \"{}\"", kind.name())));
    }
    parts.push(decode(kind, bytes)?);
    Ok(())
}

fn found<T>(part: Option<T>, kind: Kind) -> Result<T> {
    part.ok_or_else(|| missing(kind))
}

fn missing(kind: Kind) -> Error {
    damaged(format!("its section \"{}\" is missing", kind.name()))
}

/// Bytes that are taken from the front.
struct Input<'a>(&'a [u8]);

impl<'a> Input<'a> {
    fn take(&mut self, count: usize) -> Option<&'a [u8]> {
        let (taken, rest) = self.0.split_at_checked(count)?;
        self.0 = rest;
        Some(taken)
    }

    fn u32(&mut self) -> Option<u32> {
        self.take(4).and_then(|bytes| bytes.try_into().ok()).map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Option<u64> {
        self.take(8).and_then(|bytes| bytes.try_into().ok()).map(u64::from_le_bytes)
    }
}

/// Fuzz body: any bytes, as a whole file and as a payload under a fitting checksum, end without a panic;
/// what is a state is written and read again alike.
pub(crate) fn check_any_bytes(data: &[u8]) {
    let _ = parse(data);
    let Ok(state) = sections(data) else { return };
    let Ok(written) = payload(&state) else { panic!("what was read can be written") };
    let again = sections(&written).and_then(|state| payload(&state));
    assert_eq!(again.ok(), Some(written), "what is written is read alike");
}

#[cfg(test)]
mod tests {
    use kvm_bindings::{kvm_clock_data, kvm_irqchip, kvm_msr_entry};

    use super::super::{DevicePart, NetState, QueuePosition, QueueState, TransportState};
    use super::*;

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
}

//! A [`MachineState`] as a file, or the state of disks alone, for a snapshot without memory.
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
    BlockState, ClockState, DeviceState, GenerationState, InterruptState, MachineState, MemoryRange,
    SerialState, VcpuState, msrs,
};
use crate::boot::cpuid::Grant;
use crate::layout::MAX_VIRTIO;
use crate::{Error, Result};

/// How every state file begins.
pub const MAGIC: [u8; 8] = *b"forkdvm\0";
/// The version of the file's frame, of the CPU features that its guest got ([`Grant`]), and of the addresses in `layout`.
/// Sections have versions of their own. When you raise it, keep 2 among those that `frame` accepts. A guest from a file of
/// version 2 must be saved as version 2 again: see [`version`].
pub const FORMAT_VERSION: u32 = 2;
/// The version of guests that were booted with performance counters and WAITPKG. They are saved as what
/// they are: only in this version a state may have them.
const OLDER_GUEST: u32 = 1;

const HEADER: usize = 8 + 4 + 8 + 32;
const SECTION_HEADER: usize = 4 + 4 + 8;
/// The longest payload. Nearly all of a long one is the map of a disk that was written all over.
const MAX_PAYLOAD: u64 = 256 << 20;
/// The longest payload without the maps of disks: 32 vCPUs of some 16 KiB take most of it.
const MAX_BESIDE_MAPS: u64 = 4 << 20;
/// A disk's map takes at most so many bytes for each block of the disk: a run of one block takes two bytes,
/// and longer runs take less for each block.
const BYTES_PER_RUN: u64 = 2;
const BYTES_PER_BLOCK: u64 = 4096;
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
    /// A disk without its device: only in files that have nothing else.
    Disk = 8,
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
            Kind::Disk,
        ]
        .into_iter()
        .find(|kind| *kind as u32 == number)
    }

    /// To be raised whenever the meaning of the section's bytes changes. `section` refuses every other version. So the same
    /// change must let it return the version that it read, and decode the older one from the struct of that version.
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
            Kind::Disk => "disk",
        }
    }
}

/// Writes `state` into `file`, from its beginning.
pub fn write(state: &MachineState, file: &File) -> Result<()> {
    write_payload(version(state), payload(state)?, file)
}

/// Writes the state of `disks` alone into `file`, from its beginning.
pub fn write_disks(disks: &[BlockState], file: &File) -> Result<()> {
    write_payload(FORMAT_VERSION, disks_payload(disks)?, file)
}

fn write_payload(version: u32, payload: Vec<u8>, file: &File) -> Result<()> {
    let bytes = [header(version, &payload), payload].concat();
    file.write_all_at(&bytes, 0)
        .and_then(|()| file.set_len(bytes.len() as u64))
        .map_err(Error::system("write the state file"))
}

/// The version of the file that `state` is written to.
fn version(state: &MachineState) -> u32 {
    if grant(state) == Grant::Older { OLDER_GUEST } else { FORMAT_VERSION }
}

/// The features that its guest got when it booted.
pub(super) fn grant(state: &MachineState) -> Grant {
    let older = state.vcpus.iter().any(|vcpu| Grant::of(&vcpu.cpuid) == Grant::Older);
    if older { Grant::Older } else { Grant::Fresh }
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
    bounded(payload)
}

fn disks_payload(disks: &[BlockState]) -> Result<Vec<u8>> {
    let mut payload = Vec::new();
    for disk in disks {
        push(&mut payload, Kind::Disk, disk)?;
    }
    bounded(payload)
}

fn bounded(payload: Vec<u8>) -> Result<Vec<u8>> {
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
    parse(&read_bounded(file, MAX_PAYLOAD)?)
}

/// Reads the state of a VM whose disks have `disk_bytes` in all. The parsed state takes some sixteen times
/// its size in the file, so no file is read that is longer than such a VM's can be.
pub fn read_for_disks(file: &File, disk_bytes: u64) -> Result<MachineState> {
    parse(&read_bounded(file, longest_for_disks(disk_bytes))?)
}

/// Reads the state of disks alone, which have `disk_bytes` in all, from a file of [`write_disks`].
pub fn read_disks(file: &File, disk_bytes: u64) -> Result<Vec<BlockState>> {
    parse_disks(&read_bounded(file, longest_for_disks(disk_bytes))?)
}

fn longest_for_disks(disk_bytes: u64) -> u64 {
    let maps = (disk_bytes / BYTES_PER_BLOCK).saturating_mul(BYTES_PER_RUN);
    MAX_PAYLOAD.min(maps.saturating_add(MAX_BESIDE_MAPS))
}

fn read_bounded(file: &File, most: u64) -> Result<Vec<u8>> {
    let size = file.metadata().map_err(Error::system("look at the state file"))?.len();
    if size > most + HEADER as u64 {
        return Err(damaged(format!("it is {size} bytes long, more than any state of such a VM")));
    }
    // Bounded by the check above.
    let mut bytes = vec![0; size as usize];
    file.read_exact_at(&mut bytes, 0).map_err(|error| match error.kind() {
        io::ErrorKind::UnexpectedEof => damaged("it became shorter while it was read".into()),
        _ => Error::system("read the state file")(error),
    })?;
    Ok(bytes)
}

/// The error for a damaged state file, with the remedy.
fn damaged(what: String) -> Error {
    Error::Config(format!("the state file cannot be used: {what}; make the snapshot again"))
}

/// The state in the bytes of a file.
pub fn parse(bytes: &[u8]) -> Result<MachineState> {
    let (version, payload) = frame(bytes)?;
    let mut state = sections(payload)?;
    if version == OLDER_GUEST {
        state.vcpus.iter_mut().for_each(msrs::drop_leftovers);
    } else if grant(&state) == Grant::Older {
        return Err(damaged(
            "it gives its guest performance counters or WAITPKG, which forkd gives to none".into(),
        ));
    }
    Ok(state)
}

/// The state of disks alone in the bytes of a file.
pub fn parse_disks(bytes: &[u8]) -> Result<Vec<BlockState>> {
    disk_sections(frame(bytes)?.1)
}

/// The version and the payload in the bytes of a file, which have the right length and checksum.
fn frame(bytes: &[u8]) -> Result<(u32, &[u8])> {
    if !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) || bytes.is_empty() {
        return Err(damaged("it is not a state file".into()));
    }
    let mut input = Reader(bytes);
    let head = input
        .take(HEADER)
        .ok_or_else(|| damaged(format!("it is truncated: {} bytes are not even its header", bytes.len())))?;
    let mut fields = Reader(&head[MAGIC.len()..]);
    let (version, length) = (fields.u32().unwrap_or_default(), fields.u64().unwrap_or_default());
    // Before the checksum: another version may compute it in another way.
    if ![OLDER_GUEST, FORMAT_VERSION].contains(&version) {
        return Err(damaged(format!(
            "it was made by another version of forkd: it has format {version}, and this one reads \
             {OLDER_GUEST} and {FORMAT_VERSION}"
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
    Ok((version, payload))
}

/// The parts found so far.
#[derive(Default)]
struct PartialState {
    memory: Option<Vec<MemoryRange>>,
    vcpus: Vec<VcpuState>,
    interrupts: Option<InterruptState>,
    clock: Option<ClockState>,
    serial: Option<SerialState>,
    generation: Option<GenerationState>,
    devices: Vec<DeviceState>,
}

fn sections(payload: &[u8]) -> Result<MachineState> {
    let mut input = Reader(payload);
    let mut parts = PartialState::default();
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
            Kind::Disk => {
                return Err(damaged("it has a disk without a device: a guest can only boot on it".into()));
            }
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

fn disk_sections(payload: &[u8]) -> Result<Vec<BlockState>> {
    let mut input = Reader(payload);
    let mut disks = Vec::new();
    while !input.0.is_empty() {
        match section(&mut input)? {
            (Kind::Disk, bytes) => several(&mut disks, MAX_VIRTIO, Kind::Disk, bytes)?,
            (kind, _) => {
                return Err(damaged(format!(
                    "it has the section \"{}\": it is of a snapshot with memory",
                    kind.name()
                )));
            }
        }
    }
    Ok(disks)
}

/// The next section's kind and bytes.
fn section<'a>(input: &mut Reader<'a>) -> Result<(Kind, &'a [u8])> {
    let cut = || damaged("its last section is incomplete".into());
    let head = input.take(SECTION_HEADER).ok_or_else(cut)?;
    let mut fields = Reader(head);
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
struct Reader<'a>(&'a [u8]);

impl<'a> Reader<'a> {
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

/// Fuzz body: any bytes, as a whole file and as a payload under a fitting checksum, end without a panic; a
/// valid state is written and read again alike.
pub(crate) fn check_any_bytes(data: &[u8]) {
    let _ = parse(data);
    let _ = parse_disks(data);
    if let Ok(disks) = disk_sections(data) {
        let Ok(written) = disks_payload(&disks) else { panic!("what was read can be written") };
        assert_eq!(disk_sections(&written).ok(), Some(disks), "what is written is read alike");
    }
    let Ok(state) = sections(data) else { return };
    let Ok(written) = payload(&state) else { panic!("what was read can be written") };
    let again = sections(&written).and_then(|state| payload(&state));
    assert_eq!(again.ok(), Some(written), "what is written is read alike");
}

#[cfg(test)]
#[path = "file_tests.rs"]
mod tests;

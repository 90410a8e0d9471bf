//! The other side of a virtio device: a small driver for tests and fuzz bodies.
//!
//! It keeps its rings at fixed addresses, and lets its user write anything else by hand: honest
//! requests for tests, every kind of nonsense for fuzzing.

use std::io;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::VirtioDevice;
use super::block::Disk;
use super::mmio::MmioDevice;
use crate::GuestMemory;
use crate::state::{DevicePart, TransportState};

/// Descriptor flags.
pub(crate) const NEXT: u16 = 1;
pub(crate) const WRITE: u16 = 2;
pub(crate) const INDIRECT: u16 = 4;

/// Size of the driver's memory.
pub(crate) const MEMORY: u64 = 0x4_0000;
/// From here on memory is free for buffers.
pub(crate) const BUFFERS: u64 = 0x1_0000;
/// Number of descriptors in every queue that can have so many.
pub(crate) const QUEUE_SIZE: u16 = 64;
/// Distance from one queue's rings to the next one's.
const QUEUE_STRIDE: u64 = 0x3000;

/// A descriptor.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Descriptor {
    pub(crate) address: u64,
    pub(crate) len: u32,
    pub(crate) flags: u16,
    pub(crate) next: u16,
}

impl Descriptor {
    /// Reads a descriptor; zeros stand for what is missing.
    pub(crate) fn from_bytes(bytes: &[u8]) -> Descriptor {
        let number = |range: std::ops::Range<usize>| {
            let bytes = bytes.get(range).unwrap_or_default();
            bytes.iter().rev().fold(0u64, |value, byte| value << 8 | u64::from(*byte))
        };
        Descriptor {
            address: number(0..8),
            len: number(8..12) as u32,
            flags: number(12..14) as u16,
            next: number(14..16) as u16,
        }
    }

    pub(crate) fn to_bytes(self) -> [u8; 16] {
        let mut bytes = [0; 16];
        bytes[..8].copy_from_slice(&self.address.to_le_bytes());
        bytes[8..12].copy_from_slice(&self.len.to_le_bytes());
        bytes[12..14].copy_from_slice(&self.flags.to_le_bytes());
        bytes[14..].copy_from_slice(&self.next.to_le_bytes());
        bytes
    }
}

/// Where the driver puts the parts of a queue.
pub(crate) fn table_at(queue: usize) -> u64 {
    0x1000 + queue as u64 * QUEUE_STRIDE
}

pub(crate) fn available_at(queue: usize) -> u64 {
    table_at(queue) + 0x1000
}

pub(crate) fn used_at(queue: usize) -> u64 {
    table_at(queue) + 0x2000
}

#[derive(Debug, Clone, Copy)]
struct Position {
    size: u16,
    next_descriptor: u16,
    available: u16,
    /// `available` when the device was last notified, or did not want to be.
    announced: u16,
    used: u16,
}

/// A driver, its memory and the device it drives.
pub(crate) struct Driver {
    pub(crate) memory: GuestMemory,
    pub(crate) device: Arc<Mutex<MmioDevice>>,
    /// The device's interrupt.
    pub(crate) interrupt: EventFd,
    positions: Vec<Position>,
}

impl Driver {
    /// A driver of a device in the state of power-on.
    pub(crate) fn new(device: Box<dyn VirtioDevice>) -> io::Result<Driver> {
        let position = |max: &u16| Position {
            size: QUEUE_SIZE.min(*max),
            next_descriptor: 0,
            available: 0,
            announced: 0,
            used: 0,
        };
        let positions = device.queue_sizes().iter().map(position).collect();
        let memory =
            GuestMemory::from_ranges(&[(GuestAddress(0), MEMORY as usize)]).map_err(io::Error::other)?;
        let interrupt = EventFd::new(EFD_NONBLOCK)?;
        let device = MmioDevice::new(device, memory.clone(), interrupt.try_clone()?)?;
        Ok(Driver { memory, device: Arc::new(Mutex::new(device)), interrupt, positions })
    }

    /// A driver that has started its device.
    pub(crate) fn started(device: Box<dyn VirtioDevice>) -> io::Result<Driver> {
        let mut driver = Driver::new(device)?;
        driver.start(u64::MAX);
        Ok(driver)
    }

    /// The same driver in a copy of its VM, whose device `make` makes of what the old one left.
    pub(crate) fn thawed(
        self,
        make: impl FnOnce(&DevicePart, Option<Disk>) -> Box<dyn VirtioDevice>,
    ) -> io::Result<Driver> {
        self.thawed_after(|_| {}, make)
    }

    /// The same after a change of the saved transport.
    pub(crate) fn thawed_after(
        self,
        change: impl FnOnce(&mut TransportState),
        make: impl FnOnce(&DevicePart, Option<Disk>) -> Box<dyn VirtioDevice>,
    ) -> io::Result<Driver> {
        let Driver { memory, device, positions, .. } = self;
        let device = Arc::into_inner(device).and_then(|device| device.into_inner().ok());
        let (mut state, disk) = device.ok_or(io::ErrorKind::ResourceBusy)?.freeze();
        change(&mut state.transport);
        let interrupt = EventFd::new(EFD_NONBLOCK)?;
        let device = make(&state.part, disk);
        let mut device =
            MmioDevice::restore(device, memory.clone(), interrupt.try_clone()?, &state.transport)?;
        device.resume();
        Ok(Driver { memory, device: Arc::new(Mutex::new(device)), interrupt, positions })
    }

    /// How many queues the device has.
    pub(crate) fn queues(&self) -> usize {
        self.positions.len()
    }

    /// Serves every queue that was notified, as the device thread would.
    pub(crate) fn serve(&self) {
        for queue in 0..self.positions.len() {
            let mut device = self.lock();
            if device.queue_notifiers()[queue].read().is_ok() {
                device.queue_event(queue);
            }
        }
    }

    /// Goes through a driver's start, with those of the offered features that are in `wanted`.
    pub(crate) fn start(&mut self, wanted: u64) {
        self.negotiate(wanted);
        for queue in 0..self.positions.len() {
            self.set_up_queue(queue, QUEUE_SIZE.into(), table_at(queue), available_at(queue), used_at(queue));
        }
        self.write(0x70, 15);
    }

    /// The first half of a start: up to FEATURES_OK.
    pub(crate) fn negotiate(&mut self, wanted: u64) {
        for status in [0, 1, 3] {
            self.write(0x70, status);
        }
        for half in [0, 1] {
            self.write(0x14, half);
            let offered = self.read(0x10);
            self.write(0x24, half);
            self.write(0x20, offered & (wanted >> (32 * half)) as u32);
        }
        self.write(0x70, 11);
        for position in &mut self.positions {
            *position =
                Position { size: position.size, next_descriptor: 0, available: 0, announced: 0, used: 0 };
        }
    }

    pub(crate) fn set_up_queue(&mut self, queue: usize, size: u32, table: u64, available: u64, used: u64) {
        self.write(0x30, queue as u32);
        self.write(0x38, size.min(self.read(0x34)));
        for (register, address) in [(0x80, table), (0x90, available), (0xa0, used)] {
            self.write(register, address as u32);
            self.write(register + 4, (address >> 32) as u32);
        }
        self.write(0x44, 1);
        // Entries of an earlier driver in the rings do not count.
        if available <= MEMORY - 4 && used <= MEMORY - 4 {
            self.poke(available, &[0; 4]);
            self.poke(used, &[0; 4]);
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, MmioDevice> {
        self.device.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn write(&self, register: u64, value: u32) {
        self.lock().write(register, &value.to_le_bytes());
    }

    pub(crate) fn read(&self, register: u64) -> u32 {
        let mut data = [0; 4];
        self.lock().read(register, &mut data);
        u32::from_le_bytes(data)
    }

    /// Writes into memory, as far as it reaches.
    pub(crate) fn poke(&self, address: u64, bytes: &[u8]) {
        let _ = self.memory.write(bytes, GuestAddress(address));
    }

    /// Reads memory, as far as it reaches.
    pub(crate) fn peek_into(&self, address: u64, bytes: &mut [u8]) {
        let _ = self.memory.read(bytes, GuestAddress(address));
    }

    pub(crate) fn peek(&self, address: u64, len: usize) -> Vec<u8> {
        let mut bytes = vec![0; len];
        self.peek_into(address, &mut bytes);
        bytes
    }

    fn peek_u16(&self, address: u64) -> u16 {
        self.memory.read_obj(GuestAddress(address)).unwrap_or(0)
    }

    pub(crate) fn set_descriptor(&self, queue: usize, index: u16, descriptor: Descriptor) {
        self.poke(table_at(queue) + u64::from(index) * 16, &descriptor.to_bytes());
    }

    /// Makes the chain that begins with descriptor `head` available.
    pub(crate) fn publish(&mut self, queue: usize, head: u16) {
        let Position { size, available, .. } = self.positions[queue];
        self.poke(available_at(queue) + 4 + u64::from(available % size) * 2, &head.to_le_bytes());
        self.set_available_index(queue, available.wrapping_add(1));
    }

    pub(crate) fn set_available_index(&mut self, queue: usize, index: u16) {
        self.positions[queue].available = index;
        let _ = self.memory.store(
            index,
            GuestAddress(available_at(queue) + 2),
            std::sync::atomic::Ordering::Release,
        );
    }

    /// Adds an honest request made of `pieces` (address, length, writable) and returns its head.
    pub(crate) fn add(&mut self, queue: usize, pieces: &[(u64, u32, bool)]) -> u16 {
        let size = self.positions[queue].size;
        let head = self.positions[queue].next_descriptor;
        for (offset, (address, len, writable)) in (0u16..).zip(pieces) {
            let index = (head + offset) % size;
            let is_last = usize::from(offset) + 1 == pieces.len();
            let flags = if *writable { WRITE } else { 0 } | if is_last { 0 } else { NEXT };
            let next = (index + 1) % size;
            self.set_descriptor(queue, index, Descriptor { address: *address, len: *len, flags, next });
        }
        self.positions[queue].next_descriptor = (head + pieces.len() as u16) % size;
        self.publish(queue, head);
        head
    }

    /// Notifies the device through its register if the used ring asks for it: a driver that agreed on
    /// notification by index sends no other.
    pub(crate) fn notify(&mut self, queue: usize) {
        let Position { size, available, announced, .. } = self.positions[queue];
        self.positions[queue].announced = available;
        // The device must see the available entries before the notification flag is read.
        std::sync::atomic::fence(std::sync::atomic::Ordering::SeqCst);
        let wish = self.peek_u16(used_at(queue) + 4 + u64::from(size) * 8);
        if available.wrapping_sub(wish).wrapping_sub(1) < available.wrapping_sub(announced) {
            self.write(0x50, queue as u32);
        }
    }

    /// Notifies the device through its register and has it serve the queue, as the device thread
    /// would.
    pub(crate) fn kick(&self, queue: usize) {
        self.write(0x50, queue as u32);
        self.lock().queue_event(queue);
    }

    /// The requests the device has finished since the last call: head and length written.
    pub(crate) fn finished(&mut self, queue: usize) -> Vec<(u32, u32)> {
        let size = self.positions[queue].size;
        let index = self.peek_u16(used_at(queue) + 2);
        let mut finished = Vec::new();
        while self.positions[queue].used != index && finished.len() <= usize::from(size) {
            let slot = u64::from(self.positions[queue].used % size);
            let entry: [u32; 2] =
                self.memory.read_obj(GuestAddress(used_at(queue) + 4 + slot * 8)).unwrap_or_default();
            finished.push((entry[0], entry[1]));
            self.positions[queue].used = self.positions[queue].used.wrapping_add(1);
        }
        finished
    }

    /// Whether the device reported that it cannot go on.
    pub(crate) fn needs_reset(&self) -> bool {
        self.read(0x70) & 0x40 != 0
    }
}

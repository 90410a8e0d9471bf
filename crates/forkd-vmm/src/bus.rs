//! Dispatches a guest's port and memory accesses to devices.
//!
//! Addresses with nothing behind them read as all ones, as on a real bus, and swallow writes.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forkd_protocol::control::EndReason;

use crate::devices::power::{self, PowerEvent};
use crate::devices::serial::Serial;
use crate::devices::virtio::mmio::MmioDevice;
use crate::layout::{READY_PORT, SERIAL_PORT, virtio_register};
use crate::state::SerialState;

/// The effect of a port write beyond its device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Effect {
    /// The guest signals that it runs.
    Ready,
    /// The VM ends.
    End(EndReason, &'static str),
}

/// The devices of a VM by address. Shared by all vCPU threads; each device has its own lock.
pub struct Bus {
    serial: Mutex<Serial>,
    virtio: Vec<Arc<Mutex<MmioDevice>>>,
}

impl Bus {
    /// A bus with the `virtio` devices at their addresses, in order.
    pub fn new(serial: Serial, virtio: Vec<Arc<Mutex<MmioDevice>>>) -> Bus {
        Bus { serial: Mutex::new(serial), virtio }
    }

    /// The serial port's registers.
    pub fn serial(&self) -> SerialState {
        lock(&self.serial).state()
    }

    /// The virtio devices, in order, for serving or stopping the VM as a whole.
    pub fn virtio(&self) -> &[Arc<Mutex<MmioDevice>>] {
        &self.virtio
    }

    /// The guest reads `data` from `port`.
    pub fn read_port(&self, port: u16, data: &mut [u8]) {
        data.fill(0xff);
        // Every register here is one byte; of a wider or repeated access the first byte counts.
        let Some(first) = data.first_mut() else { return };
        if let Some(register) = serial_register(port) {
            *first = lock(&self.serial).read(register);
        } else if let Some(value) = power::port_read(port) {
            *first = value;
        }
    }

    /// The guest writes `data` to `port`. Returns what that does to the VM as a whole.
    pub fn write_port(&self, port: u16, data: &[u8]) -> Option<Effect> {
        if let Some(register) = serial_register(port) {
            // A repeated `outs` arrives as one write of many bytes.
            let mut serial = lock(&self.serial);
            data.iter().for_each(|byte| serial.write(register, *byte));
            return None;
        }
        if port == READY_PORT {
            return Some(Effect::Ready);
        }
        data.iter().find_map(|byte| power::port_write(port, *byte)).map(|request| match request {
            PowerEvent::PoweredOff => Effect::End(EndReason::PoweredOff, "the guest powered off"),
            PowerEvent::Reset => Effect::End(EndReason::Reset, "the guest asked for a reset"),
        })
    }

    /// The guest reads `data` from a memory address without memory.
    pub fn read_memory(&self, address: u64, data: &mut [u8]) {
        data.fill(0xff);
        if let Some((index, offset)) = virtio_register(address)
            && let Some(device) = self.virtio.get(index)
        {
            lock(device).read(offset, data);
        }
    }

    /// The guest writes `data` to a memory address without memory.
    pub fn write_memory(&self, address: u64, data: &[u8]) {
        if let Some((index, offset)) = virtio_register(address)
            && let Some(device) = self.virtio.get(index)
        {
            lock(device).write(offset, data);
        }
    }
}

fn serial_register(port: u16) -> Option<u8> {
    port.checked_sub(SERIAL_PORT).filter(|offset| *offset < 8).map(|offset| offset as u8)
}

fn lock<T>(device: &Mutex<T>) -> MutexGuard<'_, T> {
    device.lock().unwrap_or_else(PoisonError::into_inner)
}

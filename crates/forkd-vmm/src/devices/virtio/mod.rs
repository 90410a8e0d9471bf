//! Virtio devices and their common parts.
//!
//! Bottom up: a [`queue::VirtQueue`] is a ring in guest memory, a [`queue::DescriptorChain`] one request taken
//! from it, [`buffers::Buffers`] the guest memory that request points to. A [`VirtioDevice`] serves
//! requests; [`mmio::MmioDevice`] is the register file through which the driver finds, configures
//! and resets it.
//!
//! Everything runs under the lock of its `MmioDevice`: register accesses on vCPU threads, queues and
//! descriptors on the device thread. A device therefore needs no locks of its own.

pub mod block;
pub mod buffers;
pub mod mmio;
pub mod net;
pub mod queue;
pub mod rng;
pub mod vsock;

#[cfg(test)]
mod restore_tests;
// The fuzz bodies use only part of it.
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) mod test_driver;
#[cfg(test)]
mod tests;

use std::io;

use crate::GuestMemory;
use crate::event_loop::{Poller, Readiness};
use crate::state::DevicePart;
use block::Disk;
use queue::{Malformed, VirtQueue};

/// A device behind its transport.
///
/// The order of calls: `attach` once, before the VM runs; in a copy of a VM, `activate` and `resume` if
/// the driver was at work, before that; then, for each life of the driver,
/// `activate`, any number of `queue_event` and `ready`, and `reset`; at last `freeze`. `ready` may also come while the
/// device is not active (its descriptors belong to the host, not to the driver): the queues are
/// empty then.
pub trait VirtioDevice: Send {
    /// The device's type in virtio's numbering. Read by the driver through the transport.
    fn device_type(&self) -> u32;

    /// The features of this type of device that are offered, as a bit mask. The transport adds its
    /// own ([`mmio::TRANSPORT_FEATURES`]).
    fn features(&self) -> u64;

    /// The largest size of each queue; powers of two. Asked once, when the transport is built.
    fn queue_sizes(&self) -> &'static [u16];

    /// Fills `data` from the configuration space at `offset`. Called for any register access of the driver at
    /// any time, with any offset and length; bytes outside read as zero (`data` comes zeroed). No device here
    /// has a writable configuration: writes end in the transport.
    fn read_config(&self, offset: u64, data: &mut [u8]);

    /// Called once, by the event loop that takes the device over: the time to register descriptors
    /// of its own.
    fn attach(&mut self, _poller: Poller) -> io::Result<()> {
        Ok(())
    }

    /// Called when the driver has set up its queues and set DRIVER_OK. `features` are those both sides agreed
    /// on.
    fn activate(&mut self, _features: u64) {}

    /// Called when the driver resets the device (also when it never was active): everything that
    /// belongs to this life of the driver is dropped.
    fn reset(&mut self) {}

    /// Called on the device thread when the driver has put something into `queues[index]`. After an
    /// error the device is not called again until the driver has reset it.
    fn queue_event(
        &mut self,
        index: usize,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed>;

    /// Called on the device thread when a descriptor registered with `token` became ready. It is called once
    /// per change, so the device remembers what it could not use up yet.
    fn ready(
        &mut self,
        _token: u32,
        _readiness: Readiness,
        _queues: &mut [VirtQueue],
        _memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        Ok(())
    }

    /// Called once in a copy of the VM whose driver is at work, before the VM runs: the place to notify the
    /// driver of changes.
    fn resume(&mut self, _queues: &mut [VirtQueue], _memory: &GuestMemory) -> Result<(), Malformed> {
        Ok(())
    }

    /// Whether the configuration differs from what the driver read before this copy was made.
    fn config_changed(&self) -> bool {
        false
    }

    /// Whether the device left a request in its queue, since the last call, because the host's disk is full. The
    /// next `queue_event` tries it again.
    fn take_disk_full(&mut self) -> bool {
        false
    }

    /// The disk behind the device, if it has one. Called at any time between two events.
    fn disk(&mut self) -> Option<&mut Disk> {
        None
    }

    /// Takes the device's state, and the disk behind it, if it has one. Called between two events, when every
    /// request it took from its queues is finished. Also called in a fork of the process, where its
    /// descriptors are another VM's: it must not use them.
    fn freeze(&mut self) -> (DevicePart, Option<Disk>);
}

/// Copies the part of `config` that starts at `offset` into `data`; the rest of `data` stays as it is.
pub(crate) fn read_config_bytes(config: &[u8], offset: u64, data: &mut [u8]) {
    let Some(rest) = usize::try_from(offset).ok().and_then(|offset| config.get(offset..)) else { return };
    let count = rest.len().min(data.len());
    data[..count].copy_from_slice(&rest[..count]);
}

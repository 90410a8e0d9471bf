//! virtio-rng: random bytes from the host's kernel.

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};
use virtio_bindings::virtio_ids::VIRTIO_ID_RNG;

use super::VirtioDevice;
use super::block::Disk;
use super::queue::{Malformed, VirtQueue};
use crate::GuestMemory;
use crate::state::DevicePart;

/// The most bytes one request gets; a driver that wants more asks again.
const MAX_BYTES: usize = 4 << 10;
/// The most requests served in one go.
const MAX_REQUESTS: usize = 32;

/// The device. It has no state.
#[derive(Debug, Default)]
pub struct Rng;

impl Rng {
    /// One queue of requests.
    pub const QUEUE_SIZES: &'static [u16] = &[64];

    /// A source of random bytes.
    pub fn new() -> Rng {
        Rng
    }
}

impl VirtioDevice for Rng {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_RNG
    }

    fn features(&self) -> u64 {
        0
    }

    fn queue_sizes(&self) -> &'static [u16] {
        Self::QUEUE_SIZES
    }

    fn read_config(&self, _offset: u64, _data: &mut [u8]) {}

    fn freeze(&mut self) -> (DevicePart, Option<Disk>) {
        (DevicePart::Rng, None)
    }

    fn queue_event(
        &mut self,
        index: usize,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        let queue = &mut queues[index];
        for _ in 0..MAX_REQUESTS {
            let Some(chain) = queue.pop(memory)? else { return Ok(()) };
            let mut bytes = [0; MAX_BYTES];
            let wanted = chain.writable.len().min(MAX_BYTES);
            // The kernel fails this call only before it has ever been seeded; the driver then gets
            // nothing and asks again.
            let got =
                retry_on_intr(|| getrandom(&mut bytes[..wanted], GetRandomFlags::NONBLOCK)).unwrap_or(0);
            if !chain.writable.copy_from(&bytes[..got]) {
                return Err(Malformed("a buffer"));
            }
            queue.finish(memory, chain, got)?;
        }
        queue.call_again();
        Ok(())
    }
}

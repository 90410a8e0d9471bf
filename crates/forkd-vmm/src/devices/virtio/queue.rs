//! A virtqueue as a device sees it, and the requests in it.
//!
//! The ring itself is `virtio-queue`'s. This layer adds what a hostile guest makes necessary: a
//! chain is either entirely good or refused, never silently cut short; notifications in both
//! directions are decided here, once, for all devices.

use std::sync::atomic::Ordering;

use thiserror::Error;
use virtio_queue::{Queue, QueueOwnedT, QueueT};
use vm_memory::{GuestAddress, GuestMemoryBackend};

use super::buffers::{Buffers, MAX_PIECES};
use crate::GuestMemory;
use crate::state::{QueuePosition, QueueState};

/// The driver broke the rules of a queue. The device stops until it is reset.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Error)]
#[error("the driver broke a queue ({0}); the device waits for a reset")]
pub struct Malformed(pub &'static str);

/// The driver's settings of one queue, from the transport's registers.
#[derive(Debug, Clone, Copy, Default)]
pub struct QueueSetup {
    /// Number of descriptors.
    pub size: u32,
    /// Guest address of the descriptor table.
    pub descriptors: u64,
    /// Guest address of the ring the driver writes.
    pub available: u64,
    /// Guest address of the ring the device writes.
    pub used: u64,
}

impl QueueSetup {
    /// The driver's settings before the VM was stopped.
    pub fn from_state(state: &QueueState) -> QueueSetup {
        let QueueState { size, descriptors, available, used, .. } = *state;
        QueueSetup { size, descriptors, available, used }
    }

    /// This and how far `queue`, which is the one set up by it, has come.
    pub fn to_state(&self, queue: &VirtQueue) -> QueueState {
        let QueueSetup { size, descriptors, available, used } = *self;
        let position = queue.is_ready().then(|| QueuePosition {
            next_available: queue.queue.next_avail(),
            next_used: queue.queue.next_used(),
        });
        QueueState { size, descriptors, available, used, position }
    }
}

/// One queue. Until it is set up it is empty and takes nothing.
#[derive(Debug)]
pub struct VirtQueue {
    queue: Queue,
    /// The driver is ready too: between setting queues up and saying so it wants nothing done.
    live: bool,
    /// Entries were put into the used ring since the driver was last notified.
    unannounced: bool,
    /// The device stopped before the queue was empty and wants to be called again.
    again: bool,
}

/// One request: memory the device reads, then memory it writes.
#[derive(Debug)]
pub struct DescriptorChain<'m> {
    head: u16,
    /// Buffers that the driver wrote.
    pub readable: Buffers<'m>,
    /// Where the device writes.
    pub writable: Buffers<'m>,
}

impl VirtQueue {
    /// An empty queue that can be set up with up to `max_size` descriptors, a power of two.
    pub fn new(max_size: u16) -> Result<VirtQueue, Malformed> {
        let queue = Queue::new(max_size).map_err(|_| Malformed("no such queue size"))?;
        Ok(VirtQueue { queue, live: false, unannounced: false, again: false })
    }

    /// A queue as it was when its VM was stopped. Only a queue in use has addresses that must make
    /// sense.
    pub fn restore(
        max_size: u16,
        state: &QueueState,
        event_index: bool,
        memory: &GuestMemory,
    ) -> Result<VirtQueue, Malformed> {
        let mut queue = VirtQueue::new(max_size)?;
        if let Some(position) = state.position {
            queue.set_up(&QueueSetup::from_state(state), event_index, memory)?;
            queue.queue.set_next_avail(position.next_available);
            queue.queue.set_next_used(position.next_used);
        }
        Ok(queue)
    }

    /// How many requests the driver has ever put into the queue, modulo 2¹⁶.
    pub fn offered(&self, memory: &GuestMemory) -> Result<u16, Malformed> {
        let index = self.queue.avail_idx(memory, Ordering::Acquire);
        index.map(|index| index.0).map_err(|_| Malformed("its available ring"))
    }

    /// The most descriptors it can have.
    pub fn max_size(&self) -> u16 {
        self.queue.max_size()
    }

    /// Whether the driver has set it up.
    pub fn is_ready(&self) -> bool {
        self.queue.ready()
    }

    /// Puts the queue where the driver wants it; `event_index` is whether both sides agreed on notification
    /// by index. On an error it stays empty.
    pub fn set_up(
        &mut self,
        setup: &QueueSetup,
        event_index: bool,
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        self.reset();
        let size = u16::try_from(setup.size).map_err(|_| Malformed("its size"))?;
        self.queue.try_set_size(size).map_err(|_| Malformed("its size"))?;
        let placed = self
            .queue
            .try_set_desc_table_address(GuestAddress(setup.descriptors))
            .and_then(|()| self.queue.try_set_avail_ring_address(GuestAddress(setup.available)))
            .and_then(|()| self.queue.try_set_used_ring_address(GuestAddress(setup.used)));
        self.queue.set_event_idx(event_index);
        self.queue.set_ready(true);
        if placed.is_err() || setup.available == 0 || !self.queue.is_valid(memory) {
            self.reset();
            return Err(Malformed("where its rings are"));
        }
        Ok(())
    }

    /// Back to empty.
    pub fn reset(&mut self) {
        self.queue.reset();
        self.live = false;
        self.unannounced = false;
        self.again = false;
    }

    /// Lets requests be taken, or not.
    pub fn set_live(&mut self, live: bool) {
        self.live = live;
    }

    /// The next request. `None` also means that the driver will notify when it adds one.
    pub fn pop<'m>(&mut self, memory: &'m GuestMemory) -> Result<Option<DescriptorChain<'m>>, Malformed> {
        if !self.live || !self.queue.ready() {
            return Ok(None);
        }
        let broken = |_| Malformed("its available ring");
        if let Some(chain) = self.queue.iter(memory).map_err(broken)?.next() {
            return DescriptorChain::gather(chain, memory).map(Some);
        }
        // Ask for a notification, then look once more: the driver may have added a request between
        // the first look and the wish.
        if !self.queue.enable_notification(memory).map_err(broken)? {
            return Ok(None);
        }
        match self.queue.iter(memory).map_err(broken)?.next() {
            Some(chain) => DescriptorChain::gather(chain, memory).map(Some),
            None => Ok(None),
        }
    }

    /// Undoes the last `pop`: the device cannot serve this request now. Nothing may have been
    /// finished in between.
    pub fn put_back(&mut self, chain: DescriptorChain<'_>) {
        drop(chain);
        self.queue.go_to_previous_position();
    }

    /// Hands a request back to the driver, with the number of bytes written into it.
    pub fn finish(
        &mut self,
        memory: &GuestMemory,
        chain: DescriptorChain<'_>,
        written: usize,
    ) -> Result<(), Malformed> {
        let written = u32::try_from(written).map_err(|_| Malformed("a length"))?;
        self.queue.add_used(memory, chain.head, written).map_err(|_| Malformed("its used ring"))?;
        self.unannounced = true;
        Ok(())
    }

    /// Asks for another `queue_event`: the device stopped early so that others get their turn.
    pub fn call_again(&mut self) {
        self.again = true;
    }

    /// Whether the device asked to be called again; clears the request.
    pub fn take_again(&mut self) -> bool {
        std::mem::take(&mut self.again)
    }

    /// Whether the driver is to be interrupted for what was finished; asked once per event.
    pub fn take_interrupt(&mut self, memory: &GuestMemory) -> Result<bool, Malformed> {
        if !std::mem::take(&mut self.unannounced) {
            return Ok(false);
        }
        self.queue.needs_notification(memory).map_err(|_| Malformed("its available ring"))
    }
}

impl<'m> DescriptorChain<'m> {
    /// Collects a chain's memory. A chain that loops, leaves its table, points outside memory, puts
    /// readable memory after writable or is longer than any honest one is refused as a whole.
    fn gather(
        descriptors: virtio_queue::DescriptorChain<&'m GuestMemory>,
        memory: &'m GuestMemory,
    ) -> Result<DescriptorChain<'m>, Malformed> {
        let mut chain = DescriptorChain {
            head: descriptors.head_index(),
            readable: Buffers::default(),
            writable: Buffers::default(),
        };
        let mut count = 0;
        let mut unfinished = true;
        let mut writing = false;
        for descriptor in descriptors {
            count += 1;
            if count > MAX_PIECES {
                return Err(Malformed("a chain without end"));
            }
            // The iterator ends both where the chain ends and where it breaks; only the last descriptor
            // distinguishes the two.
            unfinished = descriptor.has_next();
            let writable = descriptor.is_write_only();
            if writing && !writable {
                return Err(Malformed("readable memory after writable"));
            }
            writing = writable;
            if descriptor.len() == 0 {
                continue;
            }
            let piece = memory
                .get_slice(descriptor.addr(), descriptor.len() as usize)
                .map_err(|_| Malformed("an address outside memory"))?;
            if writable { chain.writable.push(piece) } else { chain.readable.push(piece) }
        }
        if unfinished {
            return Err(Malformed("a broken chain"));
        }
        Ok(chain)
    }
}

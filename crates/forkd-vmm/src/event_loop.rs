//! The device thread: waits for notifications and descriptors, and calls the devices.
//!
//! One thread serves all devices of a VM, one event at a time. Devices do a bounded amount of work
//! per call, so everyone gets a turn and a stop is never far away.
//!
//! Between two events the thread holds no lock and no half-done request: that is where it waits while its VM
//! stands still, and stops before it is frozen. Events that the kernel has reported and that are not served
//! yet are served when the thread goes on. Nothing it needs is hidden: a thawed VM gets a new loop, and its
//! devices are added again.

use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, OwnedFd};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use rustix::buffer::spare_capacity;
use rustix::event::Timespec;
use rustix::event::epoll::{self, Event, EventData, EventFlags};
use rustix::io::Errno;
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use crate::devices::virtio::mmio::MmioDevice;
use crate::exit::VmReport;
use crate::gate::{Order, ParkGate};

/// How many events are taken from the kernel at once.
const BATCH: usize = 32;
/// The key of orders; every other key names a device.
const ORDERS: u64 = 0;
/// Set in the key of a queue notification.
const QUEUE: u64 = 1 << 32;

/// The events that a descriptor is watched for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Interest {
    /// Something to read.
    Read,
    /// Something to read, or room to write.
    ReadWrite,
}

/// The changes of a descriptor.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Readiness {
    /// There is something to read, perhaps an end or an error.
    pub readable: bool,
    /// There is room to write, or writing gives an error.
    pub writable: bool,
    /// The peer is gone in both directions.
    pub hung_up: bool,
}

/// A device's way to have its own descriptors watched, also while the loop runs.
///
/// A change is reported once (edge-triggered): a device remembers that a descriptor is ready until a call
/// would block. So there is nothing to switch off while the guest has no buffers.
#[derive(Debug, Clone)]
pub struct Poller {
    epoll: Arc<OwnedFd>,
    device: u64,
}

impl Poller {
    /// Watches `fd`; the device's `ready` is called with `token`.
    pub fn add(&self, fd: BorrowedFd<'_>, token: u32, interest: Interest) -> io::Result<()> {
        let mut flags = EventFlags::IN | EventFlags::RDHUP | EventFlags::ET;
        if interest == Interest::ReadWrite {
            flags |= EventFlags::OUT;
        }
        Ok(epoll::add(&*self.epoll, fd, EventData::new_u64(key(self.device) | u64::from(token)), flags)?)
    }

    /// Stops watching `fd`. To be called before it is closed: a copy of it in another process would
    /// keep it watched.
    pub fn remove(&self, fd: BorrowedFd<'_>) {
        // It fails only for a descriptor that is not watched, which is what was asked for.
        let _ = epoll::delete(&*self.epoll, fd);
    }
}

/// Controls a loop from another thread.
#[derive(Debug)]
pub struct LoopControl {
    gate: Arc<ParkGate>,
    wake: EventFd,
}

impl LoopControl {
    /// Returns when the loop waits between two events, or has ended.
    pub fn park(&self) {
        self.give(Order::Park);
        self.gate.wait_until_parked();
    }

    /// Lets it go on.
    pub fn run(&self) {
        self.gate.order(Order::Run);
    }

    /// Ends it after the event being served.
    pub fn stop(&self) {
        self.give(Order::Stop);
    }

    fn give(&self, order: Order) {
        // The order first: the woken thread reads it.
        self.gate.order(order);
        // It fails only when it is set already.
        let _ = self.wake.write(1);
    }
}

/// The devices of a VM and what wakes them.
#[derive(Debug)]
pub struct EventLoop {
    epoll: Arc<OwnedFd>,
    gate: Arc<ParkGate>,
    wake: EventFd,
    devices: Vec<Arc<Mutex<MmioDevice>>>,
    /// Gets the report that a device waits for room on the host's disk.
    report: Option<Arc<VmReport>>,
}

impl EventLoop {
    /// A loop without devices.
    pub fn new() -> io::Result<EventLoop> {
        let epoll = epoll::create(epoll::CreateFlags::CLOEXEC)?;
        let wake = EventFd::new(EFD_NONBLOCK)?;
        epoll::add(&epoll, as_fd(&wake), EventData::new_u64(ORDERS), EventFlags::IN)?;
        let gate = Arc::new(ParkGate::new(Order::Run));
        // Left when the loop is dropped.
        gate.enter();
        Ok(EventLoop { epoll: Arc::new(epoll), gate, wake, devices: Vec::new(), report: None })
    }

    /// Serves `device` from now on: its queues and the descriptors it registers.
    pub fn add_device(&mut self, device: Arc<Mutex<MmioDevice>>) -> io::Result<()> {
        let index = self.devices.len() as u64;
        {
            let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
            for (queue, notifier) in device.queue_notifiers().iter().enumerate() {
                let data = EventData::new_u64(key(index) | QUEUE | queue as u64);
                epoll::add(&*self.epoll, as_fd(notifier), data, EventFlags::IN)?;
            }
            device.attach(Poller { epoll: Arc::clone(&self.epoll), device: index })?;
        }
        self.devices.push(device);
        Ok(())
    }

    /// Reports to `report` from now on when a device waits for room on the host's disk.
    pub(crate) fn report_to(&mut self, report: Arc<VmReport>) {
        self.report = Some(report);
    }

    /// The control of the loop once another thread runs it.
    pub fn control(&self) -> io::Result<LoopControl> {
        Ok(LoopControl { gate: Arc::clone(&self.gate), wake: self.wake.try_clone()? })
    }

    /// Serves the devices until stopped.
    pub fn run(self) -> io::Result<()> {
        let mut events = Vec::with_capacity(BATCH);
        while self.turn(&mut events, None)? {}
        Ok(())
    }

    /// Waits for events, no longer than `timeout`, and serves them; `false` when stopped.
    pub(crate) fn turn(&self, events: &mut Vec<Event>, timeout: Option<Duration>) -> io::Result<bool> {
        let timeout = timeout
            .map(|time| Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() });
        match epoll::wait(&*self.epoll, spare_capacity(events), timeout.as_ref()) {
            Err(Errno::INTR) => return Ok(true),
            other => other?,
        };
        for event in events.drain(..) {
            let key = event.data.u64();
            if key != ORDERS {
                self.dispatch(key, event.flags);
                continue;
            }
            let _ = self.wake.read();
            // Here the thread holds nothing: no lock, no request that is half done.
            if !self.gate.pass() {
                return Ok(false);
            }
        }
        Ok(true)
    }

    fn dispatch(&self, key: u64, flags: EventFlags) {
        let index = (key >> 33).wrapping_sub(1) as usize;
        let Some(device) = self.devices.get(index) else { return };
        let mut device = device.lock().unwrap_or_else(PoisonError::into_inner);
        let token = key as u32;
        if key & QUEUE != 0 {
            device.queue_event(token as usize);
            if device.take_disk_full()
                && let Some(report) = &self.report
            {
                report.report_disk_full();
            }
        } else {
            let broken = flags.intersects(EventFlags::HUP | EventFlags::ERR);
            let readiness = Readiness {
                readable: broken || flags.intersects(EventFlags::IN | EventFlags::RDHUP),
                writable: broken || flags.contains(EventFlags::OUT),
                hung_up: flags.contains(EventFlags::HUP),
            };
            device.ready(token, readiness);
        }
    }
}

impl Drop for EventLoop {
    fn drop(&mut self) {
        self.gate.leave();
    }
}

fn key(device: u64) -> u64 {
    (device + 1) << 33
}

/// `EventFd` has no `AsFd` of its own.
pub(crate) fn as_fd(event: &EventFd) -> BorrowedFd<'_> {
    // SAFETY: the descriptor is open for as long as `event` is borrowed.
    unsafe { BorrowedFd::borrow_raw(event.as_raw_fd()) }
}

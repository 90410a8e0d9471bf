//! The virtio-mmio transport, version 2: a page of registers in front of a device.
//!
//! The driver may read and write any of it at any time, in any order and width. An access that is invalid in
//! the device's present state has no effect: queues are set up between FEATURES_OK and DRIVER_OK and nowhere
//! else, features are settled before, and a device that asked for a reset does nothing but wait for it.
//!
//! The transport's registers that must survive a fork or a restore are in [`TransportState`]. A device's own state is in its
//! [`DevicePart`](crate::state::DevicePart).

use std::fmt;
use std::io;

use virtio_bindings::{virtio_config, virtio_mmio, virtio_ring};
use vmm_sys_util::eventfd::{EFD_NONBLOCK, EventFd};

use super::VirtioDevice;
use super::block::Disk;
use super::queue::{Malformed, QueueSetup, VirtQueue};
use crate::GuestMemory;
use crate::event_loop::{Poller, Readiness};
use crate::state::{DeviceState, TransportState};

/// Where in the page a driver writes a queue's number to notify the device.
pub const NOTIFY_OFFSET: u64 = virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY as u64;
/// Features every device here offers: the modern interface (without which no driver is accepted),
/// notification by index and indirect descriptors.
pub const TRANSPORT_FEATURES: u64 =
    VERSION_1 | 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX | 1 << virtio_ring::VIRTIO_RING_F_INDIRECT_DESC;

const VERSION_1: u64 = 1 << virtio_config::VIRTIO_F_VERSION_1;
const EVENT_INDEX: u64 = 1 << virtio_ring::VIRTIO_RING_F_EVENT_IDX;
/// "virt", little-endian.
const MAGIC: u32 = 0x7472_6976;
const VERSION: u32 = 2;
/// No number is assigned to us; drivers show it and do not use it.
const VENDOR: u32 = 0x646b_7266;

const ACKNOWLEDGE: u32 = virtio_config::VIRTIO_CONFIG_S_ACKNOWLEDGE;
const DRIVER: u32 = virtio_config::VIRTIO_CONFIG_S_DRIVER;
const DRIVER_OK: u32 = virtio_config::VIRTIO_CONFIG_S_DRIVER_OK;
const FEATURES_OK: u32 = virtio_config::VIRTIO_CONFIG_S_FEATURES_OK;
const NEEDS_RESET: u32 = virtio_config::VIRTIO_CONFIG_S_NEEDS_RESET;
const FAILED: u32 = virtio_config::VIRTIO_CONFIG_S_FAILED;

/// Reasons for an interrupt, as the driver reads them.
const USED_BUFFERS: u32 = 1;
const CONFIG_CHANGED: u32 = 2;

/// A device, its queues and its registers.
pub struct MmioDevice {
    device: Box<dyn VirtioDevice>,
    memory: GuestMemory,
    /// Raises the device's interrupt line; KVM listens to it.
    interrupt: EventFd,
    /// Why the line was raised, until the driver acknowledges it.
    interrupt_status: u32,
    queues: Vec<VirtQueue>,
    /// The driver's settings of each queue that are not final yet.
    setups: Vec<QueueSetup>,
    /// Signalled by KVM, or by [`MmioDevice::write`], when the driver notifies a queue.
    notifiers: Vec<EventFd>,
    status: u32,
    driver_features: u64,
    device_features_select: u32,
    driver_features_select: u32,
    queue_select: u32,
    config_generation: u32,
}

impl fmt::Debug for MmioDevice {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MmioDevice")
            .field("type", &self.device.device_type())
            .field("status", &self.status)
            .finish_non_exhaustive()
    }
}

impl MmioDevice {
    /// Puts registers in front of `device`. `interrupt` is written to whenever the driver is to look.
    pub fn new(device: Box<dyn VirtioDevice>, memory: GuestMemory, interrupt: EventFd) -> io::Result<Self> {
        let sizes = device.queue_sizes();
        let queues = sizes.iter().map(|size| VirtQueue::new(*size)).collect::<Result<_, _>>();
        let notifiers = sizes.iter().map(|_| EventFd::new(EFD_NONBLOCK)).collect::<Result<_, _>>()?;
        Ok(MmioDevice {
            queues: queues.map_err(|error| io::Error::new(io::ErrorKind::InvalidInput, error))?,
            setups: vec![QueueSetup::default(); sizes.len()],
            notifiers,
            device,
            memory,
            interrupt,
            interrupt_status: 0,
            status: 0,
            driver_features: 0,
            device_features_select: 0,
            driver_features_select: 0,
            queue_select: 0,
            config_generation: 0,
        })
    }

    /// Puts `device` behind the registers that `state` describes, which is untrusted.
    pub fn restore(
        device: Box<dyn VirtioDevice>,
        memory: GuestMemory,
        interrupt: EventFd,
        state: &TransportState,
    ) -> io::Result<Self> {
        let queues = restore_queues(state, device.features(), device.queue_sizes(), &memory)
            .map_err(|error| io::Error::new(io::ErrorKind::InvalidData, error))?;
        let notifiers = queues.iter().map(|_| EventFd::new(EFD_NONBLOCK)).collect::<Result<_, _>>()?;
        let mut device = MmioDevice {
            setups: state.queues.iter().map(QueueSetup::from_state).collect(),
            queues,
            notifiers,
            device,
            memory,
            interrupt,
            interrupt_status: state.interrupt_status,
            status: state.status,
            driver_features: state.driver_features,
            device_features_select: state.device_features_select,
            driver_features_select: state.driver_features_select,
            queue_select: state.queue_select,
            config_generation: state.config_generation,
        };
        if device.is_running() {
            device.device.activate(device.driver_features);
        }
        Ok(device)
    }

    /// In a copy of a VM, when interrupts and notifications are connected: notifies the driver of changes,
    /// and processes everything that may have been on its way when the VM was stopped.
    pub fn resume(&mut self) {
        if self.device.config_changed() {
            self.config_generation = self.config_generation.wrapping_add(1);
            if self.is_running() {
                self.interrupt_status |= CONFIG_CHANGED;
            }
        }
        // An interrupt that was raised may not have reached the interrupt chip. One too many does no
        // harm: the driver reads the reason.
        if self.interrupt_status != 0 {
            signal(&self.interrupt);
        }
        if self.is_running() {
            let result = self.device.resume(&mut self.queues, &self.memory);
            self.conclude(result);
            // A notification may have been taken and not served.
            self.notifiers.iter().for_each(signal);
        }
    }

    /// The disk behind the device, if it has one.
    pub fn disk(&mut self) -> Option<&mut Disk> {
        self.device.disk()
    }

    /// The end of this device: all of its state, and the disk behind it, if it has one.
    pub fn freeze(&mut self) -> (DeviceState, Option<Disk>) {
        let queues = self.setups.iter().zip(&self.queues).map(|(setup, queue)| setup.to_state(queue));
        let transport = TransportState {
            status: self.status,
            interrupt_status: self.interrupt_status,
            driver_features: self.driver_features,
            device_features_select: self.device_features_select,
            driver_features_select: self.driver_features_select,
            queue_select: self.queue_select,
            config_generation: self.config_generation,
            queues: queues.collect(),
        };
        let (part, disk) = self.device.freeze();
        (DeviceState { transport, part }, disk)
    }

    /// The eventfd of each queue, to be connected to writes of the queue's number at [`NOTIFY_OFFSET`].
    pub fn queue_notifiers(&self) -> &[EventFd] {
        &self.notifiers
    }

    /// The driver reads a register. Called on a vCPU's thread.
    pub fn read(&mut self, offset: u64, data: &mut [u8]) {
        data.fill(0);
        if let Some(offset) = offset.checked_sub(u64::from(virtio_mmio::VIRTIO_MMIO_CONFIG)) {
            return self.device.read_config(offset, data);
        }
        // Registers are four bytes wide and are accessed whole; anything else reads as zero.
        if let Ok(data) = <&mut [u8; 4]>::try_from(data) {
            *data = self.read_register(offset as u32).to_le_bytes();
        }
    }

    /// The driver writes a register. Called on a vCPU's thread.
    pub fn write(&mut self, offset: u64, data: &[u8]) {
        // No device has a writable configuration.
        if offset < u64::from(virtio_mmio::VIRTIO_MMIO_CONFIG)
            && let Ok(data) = <[u8; 4]>::try_from(data)
        {
            self.write_register(offset as u32, u32::from_le_bytes(data));
        }
    }

    /// Hands the device the poller of the loop that serves it from now on.
    pub fn attach(&mut self, poller: Poller) -> io::Result<()> {
        self.device.attach(poller)
    }

    /// A queue's notifier was signalled. Called on the device thread.
    pub fn queue_event(&mut self, index: usize) {
        let Some(notifier) = self.notifiers.get(index) else { return };
        // Empty if another thread was faster; the queue itself holds the requests.
        let _ = notifier.read();
        if !self.is_running() {
            return;
        }
        let result = self.device.queue_event(index, &mut self.queues, &self.memory);
        self.conclude(result);
    }

    /// One of the device's own descriptors became ready. Called on the device thread.
    pub fn ready(&mut self, token: u32, readiness: Readiness) {
        let result = self.device.ready(token, readiness, &mut self.queues, &self.memory);
        if self.is_running() {
            self.conclude(result);
        }
    }

    /// Whether a request waits for room on the host's disk, as the device found since the last call.
    pub fn take_disk_full(&mut self) -> bool {
        self.device.take_disk_full()
    }

    /// Has the device thread look at all queues again.
    pub fn look_again(&self) {
        self.notifiers.iter().for_each(signal);
    }

    /// Whether driver and device are both at work.
    fn is_running(&self) -> bool {
        self.status & (DRIVER_OK | NEEDS_RESET | FAILED) == DRIVER_OK
    }

    /// After every call of the device: notifies the driver of finished requests, or of its error.
    fn conclude(&mut self, result: Result<(), Malformed>) {
        let told = result.and_then(|()| self.announce());
        if told.is_err() {
            self.ask_for_reset();
        }
    }

    fn announce(&mut self) -> Result<(), Malformed> {
        let mut interrupt = false;
        for (queue, notifier) in self.queues.iter_mut().zip(&self.notifiers) {
            interrupt |= queue.take_interrupt(&self.memory)?;
            if queue.take_again() {
                signal(notifier);
            }
        }
        if interrupt {
            self.raise(USED_BUFFERS);
        }
        Ok(())
    }

    fn raise(&mut self, reason: u32) {
        self.interrupt_status |= reason;
        signal(&self.interrupt);
    }

    /// The driver broke the rules: nothing more is read or written for it until it resets the
    /// device. The device's own state goes now, so that nothing is held for a driver that never
    /// does.
    fn ask_for_reset(&mut self) {
        self.status |= NEEDS_RESET;
        self.device.reset();
        self.queues.iter_mut().for_each(VirtQueue::reset);
        if self.status & DRIVER_OK != 0 {
            self.raise(CONFIG_CHANGED);
        }
    }

    fn reset(&mut self) {
        self.device.reset();
        self.queues.iter_mut().for_each(VirtQueue::reset);
        self.setups.fill(QueueSetup::default());
        self.interrupt_status = 0;
        self.status = 0;
        self.driver_features = 0;
        self.device_features_select = 0;
        self.driver_features_select = 0;
        self.queue_select = 0;
    }

    fn features(&self) -> u64 {
        self.device.features() | TRANSPORT_FEATURES
    }

    fn read_register(&self, offset: u32) -> u32 {
        let queue = self.queues.get(self.queue_select as usize);
        match offset {
            virtio_mmio::VIRTIO_MMIO_MAGIC_VALUE => MAGIC,
            virtio_mmio::VIRTIO_MMIO_VERSION => VERSION,
            virtio_mmio::VIRTIO_MMIO_DEVICE_ID => self.device.device_type(),
            virtio_mmio::VIRTIO_MMIO_VENDOR_ID => VENDOR,
            virtio_mmio::VIRTIO_MMIO_DEVICE_FEATURES => half(self.features(), self.device_features_select),
            virtio_mmio::VIRTIO_MMIO_QUEUE_NUM_MAX => queue.map_or(0, |queue| queue.max_size().into()),
            virtio_mmio::VIRTIO_MMIO_QUEUE_READY => queue.is_some_and(VirtQueue::is_ready).into(),
            virtio_mmio::VIRTIO_MMIO_INTERRUPT_STATUS => self.interrupt_status,
            virtio_mmio::VIRTIO_MMIO_STATUS => self.status,
            // A length of all ones: there is no shared memory.
            virtio_mmio::VIRTIO_MMIO_SHM_LEN_LOW | virtio_mmio::VIRTIO_MMIO_SHM_LEN_HIGH => u32::MAX,
            virtio_mmio::VIRTIO_MMIO_CONFIG_GENERATION => self.config_generation,
            _ => 0,
        }
    }

    fn write_register(&mut self, offset: u32, value: u32) {
        match offset {
            virtio_mmio::VIRTIO_MMIO_DEVICE_FEATURES_SEL => self.device_features_select = value,
            virtio_mmio::VIRTIO_MMIO_DRIVER_FEATURES_SEL => self.driver_features_select = value,
            virtio_mmio::VIRTIO_MMIO_DRIVER_FEATURES => self.write_driver_features(value),
            virtio_mmio::VIRTIO_MMIO_QUEUE_SEL => self.queue_select = value,
            virtio_mmio::VIRTIO_MMIO_QUEUE_READY => self.write_queue_ready(value),
            // The device thread takes it from here, as if KVM had signalled it.
            virtio_mmio::VIRTIO_MMIO_QUEUE_NOTIFY => {
                if let Some(notifier) = self.notifiers.get(value as usize) {
                    signal(notifier);
                }
            }
            virtio_mmio::VIRTIO_MMIO_INTERRUPT_ACK => self.interrupt_status &= !value,
            virtio_mmio::VIRTIO_MMIO_STATUS => self.write_status(value),
            _ => self.write_queue_setup(offset, value),
        }
    }

    fn write_driver_features(&mut self, value: u32) {
        if self.status & (DRIVER | FEATURES_OK) != DRIVER {
            return;
        }
        let value = u64::from(value);
        match self.driver_features_select {
            0 => self.driver_features = self.driver_features & !0xffff_ffff | value,
            1 => self.driver_features = self.driver_features & 0xffff_ffff | value << 32,
            _ => {}
        }
    }

    /// Whether queues may be set up now.
    fn takes_queues(&self) -> bool {
        self.status & (FEATURES_OK | DRIVER_OK | NEEDS_RESET | FAILED) == FEATURES_OK
    }

    fn write_queue_setup(&mut self, offset: u32, value: u32) {
        let takes_queues = self.takes_queues();
        let index = self.queue_select as usize;
        let (Some(setup), Some(queue)) = (self.setups.get_mut(index), self.queues.get(index)) else { return };
        if !takes_queues || queue.is_ready() {
            return;
        }
        match offset {
            virtio_mmio::VIRTIO_MMIO_QUEUE_NUM => setup.size = value,
            virtio_mmio::VIRTIO_MMIO_QUEUE_DESC_LOW => set_low(&mut setup.descriptors, value),
            virtio_mmio::VIRTIO_MMIO_QUEUE_DESC_HIGH => set_high(&mut setup.descriptors, value),
            virtio_mmio::VIRTIO_MMIO_QUEUE_AVAIL_LOW => set_low(&mut setup.available, value),
            virtio_mmio::VIRTIO_MMIO_QUEUE_AVAIL_HIGH => set_high(&mut setup.available, value),
            virtio_mmio::VIRTIO_MMIO_QUEUE_USED_LOW => set_low(&mut setup.used, value),
            virtio_mmio::VIRTIO_MMIO_QUEUE_USED_HIGH => set_high(&mut setup.used, value),
            _ => {}
        }
    }

    fn write_queue_ready(&mut self, value: u32) {
        let takes_queues = self.takes_queues();
        let index = self.queue_select as usize;
        let (Some(setup), Some(queue)) = (self.setups.get(index), self.queues.get_mut(index)) else { return };
        if !takes_queues {
            return;
        }
        match value {
            0 => queue.reset(),
            1 if !queue.is_ready() => {
                let event_index = self.driver_features & EVENT_INDEX != 0;
                if queue.set_up(setup, event_index, &self.memory).is_err() {
                    self.ask_for_reset();
                }
            }
            _ => {}
        }
    }

    /// The driver climbs ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK in this order, and goes back to
    /// the bottom by writing zero. A step taken too early is not taken.
    fn write_status(&mut self, value: u32) {
        if value == 0 {
            return self.reset();
        }
        let new = value & !self.status;
        if new & FAILED != 0 {
            self.status |= FAILED;
            self.queues.iter_mut().for_each(|queue| queue.set_live(false));
        }
        if new & ACKNOWLEDGE != 0 {
            self.status |= ACKNOWLEDGE;
        }
        if new & DRIVER != 0 && self.status & ACKNOWLEDGE != 0 {
            self.status |= DRIVER;
        }
        if new & FEATURES_OK != 0 && self.status & DRIVER != 0 && self.features_are_acceptable() {
            self.status |= FEATURES_OK;
        }
        if new & DRIVER_OK != 0 && self.takes_queues() {
            self.status |= DRIVER_OK;
            self.queues.iter_mut().for_each(|queue| queue.set_live(true));
            self.device.activate(self.driver_features);
            // The driver may have notified before; its requests are found now.
            self.notifiers.iter().for_each(signal);
        }
    }

    fn features_are_acceptable(&self) -> bool {
        self.driver_features & !self.features() == 0 && self.driver_features & VERSION_1 != 0
    }
}

/// Checks the saved registers of a device that offers `features` and has queues of `sizes`, and makes
/// its queues.
pub fn restore_queues(
    state: &TransportState,
    features: u64,
    sizes: &[u16],
    memory: &GuestMemory,
) -> Result<Vec<VirtQueue>, Malformed> {
    if state.queues.len() != sizes.len() {
        return Err(Malformed("the number of queues"));
    }
    // A driver climbs one step after the other.
    let steps = [ACKNOWLEDGE, DRIVER, FEATURES_OK, DRIVER_OK];
    let climbed = steps.iter().take_while(|step| state.status & **step != 0).fold(0, |all, step| all | step);
    if state.status & !(NEEDS_RESET | FAILED) != climbed {
        return Err(Malformed("its status"));
    }
    let chosen = state.driver_features;
    let settled = state.status & FEATURES_OK != 0;
    if settled && (chosen & !(features | TRANSPORT_FEATURES) != 0 || chosen & VERSION_1 == 0) {
        return Err(Malformed("its features"));
    }
    let live = state.status & (DRIVER_OK | NEEDS_RESET | FAILED) == DRIVER_OK;
    let mut queues = Vec::with_capacity(sizes.len());
    for (size, saved) in sizes.iter().zip(&state.queues) {
        if saved.position.is_some() && !settled {
            return Err(Malformed("a queue set up too early"));
        }
        let mut queue = VirtQueue::restore(*size, saved, chosen & EVENT_INDEX != 0, memory)?;
        queue.set_live(live);
        queues.push(queue);
    }
    Ok(queues)
}

/// Adds to an eventfd. It fails only when its counter is full, and then it is signalled already.
fn signal(event: &EventFd) {
    let _ = event.write(1);
}

fn half(value: u64, select: u32) -> u32 {
    match select {
        0 => value as u32,
        1 => (value >> 32) as u32,
        _ => 0,
    }
}

fn set_low(address: &mut u64, value: u32) {
    *address = *address & !0xffff_ffff | u64::from(value);
}

fn set_high(address: &mut u64, value: u32) {
    *address = *address & 0xffff_ffff | u64::from(value) << 32;
}

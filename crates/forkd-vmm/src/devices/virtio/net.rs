//! virtio-net over a tap.
//!
//! One packet per request, no offloads: the tap is used in its default mode, where the host's kernel
//! finishes checksums and segments before it hands a packet out, and what the guest writes into the
//! header of a packet it sends is not passed on. Without a tap the interface has no link, and packets
//! are dropped.

use std::io;
use std::os::fd::{AsFd, OwnedFd};

use virtio_bindings::virtio_ids::VIRTIO_ID_NET;
use virtio_bindings::virtio_net::{VIRTIO_NET_F_MAC, VIRTIO_NET_F_STATUS, VIRTIO_NET_S_LINK_UP};

use super::block::Disk;
use super::buffers::Buffers;
use super::queue::{Malformed, VirtQueue};
use super::{VirtioDevice, read_config_bytes};
use crate::GuestMemory;
use crate::event_loop::{Interest, Poller, Readiness};
use crate::state::{DevicePart, NetState};

const RX: usize = 0;
const TX: usize = 1;
const TAP: u32 = 0;
/// The header before every packet, here and on the tap (`TUNSETVNETHDRSZ`).
const HEADER_SIZE: usize = 12;
/// A header without offloads: nothing is left to do for the receiver.
const PLAIN_HEADER: [u8; HEADER_SIZE] = [0; HEADER_SIZE];
/// Where in the header of a received packet the number of buffers stands. It is always one; the
/// tap leaves these bytes alone.
const ONE_BUFFER_AT: usize = 10;
/// The longest packet sent: a whole IP packet with its Ethernet header and a VLAN tag.
const MAX_PACKET: usize = 65535 + 18;
/// After so many packets other devices get their turn.
const MAX_PACKETS_PER_EVENT: usize = 128;

/// The device.
#[derive(Debug)]
pub struct Net {
    tap: Option<OwnedFd>,
    mac: [u8; 6],
    /// Whether the guest has read, in the VM this one is a copy of, that there is a link.
    known_link: bool,
    /// The tap may have packets: true until a read finds none.
    readable: bool,
}

impl Net {
    /// An interface with the hardware address `mac` behind `tap`, which was opened with
    /// `IFF_TAP | IFF_NO_PI | IFF_VNET_HDR`, a header of twelve bytes and non-blocking.
    pub fn new(tap: OwnedFd, mac: [u8; 6]) -> Net {
        Net { tap: Some(tap), mac, known_link: true, readable: true }
    }

    /// The interface of a copy of a VM. Without a tap its link is down.
    pub fn restore(tap: Option<OwnedFd>, state: &NetState) -> Net {
        Net { readable: tap.is_some(), tap, mac: state.mac, known_link: state.link_up }
    }

    /// The features of every interface.
    pub const FEATURES: u64 = 1 << VIRTIO_NET_F_MAC | 1 << VIRTIO_NET_F_STATUS;
    /// Receive and transmit.
    pub const QUEUE_SIZES: &'static [u16] = &[256, 256];

    /// Hands packets to the guest for as long as both packets and buffers last.
    fn receive(&mut self, queue: &mut VirtQueue, memory: &GuestMemory) -> Result<(), Malformed> {
        for _ in 0..MAX_PACKETS_PER_EVENT {
            if !self.readable {
                return Ok(());
            }
            // Without a buffer the packets wait in the tap, which drops what is too much; the
            // driver notifies when it has buffers again.
            let Some(chain) = queue.pop(memory)? else { return Ok(()) };
            let received = self.read_packet(&chain.writable)?;
            match received {
                Some(len) => queue.finish(memory, chain, len)?,
                None => {
                    self.readable = false;
                    queue.put_back(chain);
                }
            }
        }
        queue.call_again();
        Ok(())
    }

    /// Reads a packet with its header; `None` if there is none. One that is longer than the buffer
    /// is cut by the kernel.
    fn read_packet(&self, buffer: &Buffers<'_>) -> Result<Option<usize>, Malformed> {
        if buffer.len() <= HEADER_SIZE {
            return Err(Malformed("a receive buffer too small for a header"));
        }
        // Nothing there, or a tap that is down or gone: in each case there is nothing to read until its state
        // changes, and the poller reports that.
        let Some(Ok(len)) = self.tap.as_ref().map(|tap| buffer.read_from(tap.as_fd())) else {
            return Ok(None);
        };
        if len < HEADER_SIZE {
            return Ok(None);
        }
        let mut header = PLAIN_HEADER;
        header[ONE_BUFFER_AT] = 1;
        if !buffer.copy_from(&header) {
            return Err(Malformed("a receive buffer too small for a header"));
        }
        Ok(Some(len))
    }

    fn transmit(&mut self, queue: &mut VirtQueue, memory: &GuestMemory) -> Result<(), Malformed> {
        for _ in 0..MAX_PACKETS_PER_EVENT {
            let Some(mut chain) = queue.pop(memory)? else { return Ok(()) };
            let header = chain.readable.split_to(HEADER_SIZE);
            if header.is_none() {
                return Err(Malformed("a packet without header"));
            }
            self.write_packet(&chain.readable);
            queue.finish(memory, chain, 0)?;
        }
        queue.call_again();
        Ok(())
    }

    /// Sends a packet, or drops it, as networks do, if it is no packet or the tap does not take it.
    fn write_packet(&self, packet: &Buffers<'_>) {
        if let Some(tap) = &self.tap
            && !packet.is_empty()
            && packet.len() <= MAX_PACKET
        {
            let _: io::Result<usize> = packet.write_packet(&PLAIN_HEADER, tap.as_fd());
        }
    }
}

impl VirtioDevice for Net {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_NET
    }

    fn features(&self) -> u64 {
        Self::FEATURES
    }

    fn queue_sizes(&self) -> &'static [u16] {
        Self::QUEUE_SIZES
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        let mut config = [0; 8];
        config[..6].copy_from_slice(&self.mac);
        config[6] = if self.tap.is_some() { VIRTIO_NET_S_LINK_UP as u8 } else { 0 };
        read_config_bytes(&config, offset, data);
    }

    fn attach(&mut self, poller: Poller) -> io::Result<()> {
        self.readable = self.tap.is_some();
        self.tap.as_ref().map_or(Ok(()), |tap| poller.add(tap.as_fd(), TAP, Interest::Read))
    }

    fn config_changed(&self) -> bool {
        self.tap.is_some() != self.known_link
    }

    fn freeze(&mut self) -> (DevicePart, Option<Disk>) {
        (DevicePart::Net(NetState { mac: self.mac, link_up: self.tap.is_some() }), None)
    }

    fn queue_event(
        &mut self,
        index: usize,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        match index {
            RX => self.receive(&mut queues[RX], memory),
            _ => self.transmit(&mut queues[TX], memory),
        }
    }

    fn ready(
        &mut self,
        _token: u32,
        readiness: Readiness,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        self.readable |= readiness.readable;
        self.receive(&mut queues[RX], memory)
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::net::UnixDatagram;
    use std::time::Duration;

    use super::*;
    use crate::devices::virtio::test_driver::{BUFFERS, Driver};

    const MAC: [u8; 6] = [2, 0, 0, 1, 2, 3];

    /// A device whose tap is a pair of sockets that keep packets apart, as a tap does.
    fn machine() -> (Driver, UnixDatagram) {
        let (tap, network) = UnixDatagram::pair().unwrap();
        tap.set_nonblocking(true).unwrap();
        network.set_read_timeout(Some(Duration::from_secs(5))).unwrap();
        (Driver::started(Box::new(Net::new(tap.into(), MAC))).unwrap(), network)
    }

    fn ready(driver: &Driver) {
        driver.lock().ready(TAP, Readiness { readable: true, writable: false, hung_up: false });
    }

    fn packet(content: &[u8]) -> Vec<u8> {
        [&[0xff; HEADER_SIZE], content].concat()
    }

    #[test]
    fn the_guest_reads_its_hardware_address() {
        let (driver, _network) = machine();
        let mut mac = [0; 6];
        driver.lock().read(0x100, &mut mac);
        assert_eq!(mac, MAC);
    }

    #[test]
    fn a_packet_sent_leaves_through_the_tap_with_a_plain_header() {
        let (mut driver, network) = machine();
        driver.poke(BUFFERS, &[0xee; HEADER_SIZE]);
        driver.poke(BUFFERS + 0x100, b"hello ");
        driver.poke(BUFFERS + 0x200, b"network");
        driver.add(TX, &[(BUFFERS, 12, false), (BUFFERS + 0x100, 6, false), (BUFFERS + 0x200, 7, false)]);
        driver.kick(TX);
        let mut seen = [0; 100];
        let len = network.recv(&mut seen).unwrap();
        assert_eq!(&seen[..len], [&PLAIN_HEADER[..], b"hello network"].concat());
        assert_eq!(driver.finished(TX), [(0, 0)]);
    }

    #[test]
    fn a_packet_from_the_tap_arrives_in_pieces_as_offered() {
        let (mut driver, network) = machine();
        driver.add(RX, &[(BUFFERS, 12, true), (BUFFERS + 0x100, 4, true), (BUFFERS + 0x200, 1500, true)]);
        network.send(&packet(b"incoming")).unwrap();
        ready(&driver);
        assert_eq!(driver.finished(RX), [(0, 20)]);
        assert_eq!(driver.peek(BUFFERS, 12), [0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 1, 0]);
        assert_eq!(driver.peek(BUFFERS + 0x100, 4), b"inco");
        assert_eq!(driver.peek(BUFFERS + 0x200, 5), b"ming\0");
    }

    #[test]
    fn packets_wait_in_the_tap_until_there_are_buffers() {
        let (mut driver, network) = machine();
        for number in 0..5u8 {
            network.send(&packet(&[number; 60])).unwrap();
        }
        ready(&driver);
        assert!(driver.finished(RX).is_empty());
        for number in 0..6 {
            driver.add(RX, &[(BUFFERS + number * 0x800, 0x800, true)]);
        }
        driver.kick(RX);
        assert_eq!(driver.finished(RX).len(), 5);
        for number in 0..5 {
            assert_eq!(driver.peek(BUFFERS + number * 0x800 + 12, 60), [number as u8; 60]);
        }
        network.send(&packet(b"one more")).unwrap();
        ready(&driver);
        assert_eq!(driver.finished(RX).len(), 1, "the buffer looked at in vain was not lost");
    }

    #[test]
    fn a_network_that_is_gone_costs_packets_and_nothing_else() {
        let (mut driver, network) = machine();
        drop(network);
        driver.add(TX, &[(BUFFERS, 100, false)]);
        driver.add(RX, &[(BUFFERS, 100, true)]);
        driver.kick(TX);
        driver.kick(RX);
        ready(&driver);
        assert_eq!(driver.finished(TX).len(), 1);
        assert!(driver.finished(RX).is_empty());
        assert!(!driver.needs_reset());
    }

    #[test]
    fn packets_that_are_none_are_dropped() {
        let (mut driver, network) = machine();
        driver.add(TX, &[(BUFFERS, 12, false)]);
        driver.add(TX, &[(BUFFERS, 0x2_0000, false)]);
        driver.add(TX, &[(BUFFERS, 40, true)]);
        driver.kick(TX);
        assert_eq!(driver.finished(TX).len(), 2, "one without header ends the device");
        assert!(driver.needs_reset());
        network.set_nonblocking(true).unwrap();
        assert!(network.recv(&mut [0; 10]).is_err());
    }

    #[test]
    fn a_receive_buffer_without_room_stops_the_device() {
        for buffer in [(BUFFERS, 12, true), (BUFFERS, 2000, false)] {
            let (mut driver, network) = machine();
            driver.add(RX, &[buffer]);
            network.send(&packet(b"x")).unwrap();
            ready(&driver);
            assert!(driver.needs_reset());
            assert_eq!(driver.peek(BUFFERS, 16), [0; 16]);
        }
    }

    #[test]
    fn a_flood_of_packets_is_served_in_turns() {
        let (mut driver, network) = machine();
        network.set_nonblocking(true).unwrap();
        for _ in 0..40 {
            driver.add(TX, &[(BUFFERS, 64, false)]);
        }
        for _ in 0..60 {
            driver.add(RX, &[(BUFFERS + 0x1000, 0x800, true)]);
        }
        let sent = (0..200).take_while(|_| network.send(&packet(&[1; 60])).is_ok()).count();
        driver.kick(TX);
        driver.kick(RX);
        ready(&driver);
        assert_eq!(driver.finished(TX).len(), 40);
        assert_eq!(driver.finished(RX).len(), sent.min(60));
    }
}

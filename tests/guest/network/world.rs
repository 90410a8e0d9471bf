//! What tests of slots stand on: a host, an internet, and a guest that is a test.

use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::AsFd;
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forkd_net::{
    GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, Network, NetworkConfig, Slot, leftovers,
};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, gettid, move_into_link_name_space, unshare_unsafe};

/// How long a frame that must come may take.
pub(crate) const FRAME_TIMEOUT: Duration = Duration::from_secs(30);
/// Two servers of the internet's, with ordinary addresses: nothing here leaves the test's namespaces.
pub(crate) const SERVER: Ipv4Addr = Ipv4Addr::new(55, 7, 0, 1);
pub(crate) const FARTHER: Ipv4Addr = Ipv4Addr::new(55, 8, 0, 1);
/// The router on the way there, the host's address in its network, and a name server in a private one.
pub(crate) const ROUTER: Ipv4Addr = Ipv4Addr::new(55, 1, 0, 1);
pub(crate) const HOST: Ipv4Addr = Ipv4Addr::new(55, 1, 0, 2);
pub(crate) const RESOLVER: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 53);
/// Where the internet listens, and the host.
pub(crate) const PORT: u16 = 9000;
/// Addresses that lead to the internet's socket, if a rule lets a packet go there.
pub(crate) const FORBIDDEN: [Ipv4Addr; 19] = [
    Ipv4Addr::new(10, 0, 2, 2),
    Ipv4Addr::new(10, 200, 0, 1),
    Ipv4Addr::new(100, 64, 0, 1),
    Ipv4Addr::new(168, 63, 129, 16),
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(172, 16, 0, 1),
    Ipv4Addr::new(172, 31, 255, 1),
    Ipv4Addr::new(192, 0, 0, 192),
    Ipv4Addr::new(192, 0, 2, 1),
    Ipv4Addr::new(192, 31, 196, 1),
    Ipv4Addr::new(192, 52, 193, 1),
    Ipv4Addr::new(192, 88, 99, 1),
    Ipv4Addr::new(192, 168, 1, 1),
    Ipv4Addr::new(192, 175, 48, 1),
    Ipv4Addr::new(198, 19, 255, 1),
    Ipv4Addr::new(198, 51, 100, 1),
    Ipv4Addr::new(203, 0, 113, 1),
    Ipv4Addr::new(240, 0, 0, 1),
    RESOLVER,
];
const VIRTIO_HEADER: usize = 12;
const ARP: u16 = 0x0806;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// Does `work` on a thread with a network namespace of its own.
pub(crate) fn in_new_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    in_new(UnshareFlags::NEWNET, work)
}

/// Does `work` on a thread with namespaces of its own.
pub(crate) fn in_new<T: Send>(namespaces: UnshareFlags, work: impl FnOnce() -> T + Send) -> T {
    on_own_thread(|| {
        // SAFETY: new network and mount namespaces take no descriptor and no memory from another thread.
        unsafe { unshare_unsafe(namespaces) }.expect("run as root");
        work()
    })
}

pub(crate) fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

/// Does `work` in the slot's namespace.
pub(crate) fn inside<T: Send>(slot: &Slot, work: impl FnOnce() -> T + Send) -> T {
    let namespace = File::open(slot.namespace()).unwrap();
    on_own_thread(move || {
        move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
        work()
    })
}

pub(crate) fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The world outside: what is sent to any of its addresses ends in one of its sockets.
pub(crate) struct Internet {
    pub(crate) socket: UdpSocket,
    pub(crate) resolver: UdpSocket,
}

impl Internet {
    /// Connects the calling thread's namespace to a new one, which lives as long as its sockets.
    pub(crate) fn connect() -> Internet {
        let host = gettid().as_raw_nonzero();
        let internet = in_new_namespace(|| {
            ip(&format!("link add lan type veth peer name wan netns {host}"));
            ip("link set lo up");
            ip(&format!("address add {ROUTER}/24 dev lan"));
            ip("link set lan up");
            for address in FORBIDDEN.into_iter().chain([SERVER, FARTHER]) {
                ip(&format!("address add {address}/32 dev lo"));
            }
            // What it answers is from the server, whichever address was asked.
            ip(&format!("route replace 55.1.0.0/24 dev lan src {SERVER}"));
            let listen = |address: Ipv4Addr, port| {
                let socket = UdpSocket::bind((address, port)).unwrap();
                socket.set_read_timeout(Some(FRAME_TIMEOUT)).unwrap();
                socket
            };
            // Without routes of its own to the slots: only what is translated finds its way back.
            Internet { socket: listen(Ipv4Addr::UNSPECIFIED, PORT), resolver: listen(RESOLVER, 53) }
        });
        ip("link set lo up");
        ip(&format!("address add {HOST}/24 dev wan"));
        ip("link set wan up");
        ip(&format!("route add default via {ROUTER}"));
        internet
    }

    /// The next datagram and its source address.
    pub(crate) fn receive(&self) -> (String, std::net::SocketAddr) {
        receive(&self.socket)
    }
}

pub(crate) fn receive(socket: &UdpSocket) -> (String, std::net::SocketAddr) {
    let mut buffer = [0; 2048];
    let (count, from) = socket.recv_from(&mut buffer).expect("a datagram");
    (String::from_utf8_lossy(&buffer[..count]).into_owned(), from)
}

#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Datagram {
    pub(crate) from: (Ipv4Addr, u16),
    pub(crate) to: (Ipv4Addr, u16),
    pub(crate) payload: String,
}

/// What is at the other end of a tap.
pub(crate) struct Guest {
    tap: File,
}

impl Guest {
    pub(crate) fn of(slot: &mut Slot) -> Guest {
        Guest { tap: File::from(slot.take_tap().unwrap()) }
    }

    pub(crate) fn send(&mut self, kind: u16, body: &[u8]) {
        let to = if kind == ARP { [0xff; 6] } else { GATEWAY_MAC };
        let frame =
            [&[0; VIRTIO_HEADER][..], &to[..], &GUEST_MAC[..], &kind.to_be_bytes()[..], body].concat();
        assert_eq!(self.tap.write(&frame).unwrap(), frame.len());
    }

    /// The kind and the body of the next frame for this guest.
    pub(crate) fn receive(&mut self) -> (u16, Vec<u8>) {
        let start = Instant::now();
        loop {
            let left = FRAME_TIMEOUT.checked_sub(start.elapsed()).expect("no frame came");
            let timeout = Timespec { tv_sec: left.as_secs() as i64, tv_nsec: left.subsec_nanos().into() };
            poll(&mut [PollFd::new(&self.tap, PollFlags::IN)], Some(&timeout)).unwrap();
            let mut buffer = [0; 4096];
            let count = match self.tap.read(&mut buffer) {
                Err(error) if error.kind() == ErrorKind::WouldBlock => continue,
                other => other.unwrap(),
            };
            let frame = &buffer[VIRTIO_HEADER..count];
            let kind = u16::from_be_bytes([frame[12], frame[13]]);
            assert_ne!(kind, IPV6, "slots have no IPv6");
            assert_eq!(frame[6..12], GATEWAY_MAC);
            return (kind, frame[14..].to_vec());
        }
    }

    /// Asks for the owner of an address.
    pub(crate) fn ask_for(&mut self, target: Ipv4Addr) {
        let question = [0, 1, 8, 0, 6, 4, 0, 1];
        let addresses = [&GUEST_MAC[..], &GUEST_ADDRESS.octets(), &[0; 6], &target.octets()].concat();
        self.send(ARP, &[&question[..], &addresses].concat());
    }

    pub(crate) fn finds_its_gateway(&mut self) {
        self.ask_for(GATEWAY_ADDRESS);
        let (kind, answer) = self.receive();
        assert_eq!((kind, &answer[7..8]), (ARP, &[2][..]));
        assert_eq!((&answer[8..14], &answer[14..18]), (&GATEWAY_MAC[..], &GATEWAY_ADDRESS.octets()[..]));
    }

    pub(crate) fn send_datagram(&mut self, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &str) {
        let length = (8 + payload.len()) as u16;
        let mut header = vec![0x45, 0];
        header.extend((20 + length).to_be_bytes());
        header.extend([0, 0, 0x40, 0, 64, 17, 0, 0]);
        header.extend(from.0.octets());
        header.extend(to.0.octets());
        let sum: u32 = header.chunks(2).map(|two| u32::from(u16::from_be_bytes([two[0], two[1]]))).sum();
        let sum = !(((sum & 0xffff) + (sum >> 16)) as u16);
        header[10..12].copy_from_slice(&sum.to_be_bytes());
        // No checksum of the payload: IPv4 allows that.
        let udp = [from.1.to_be_bytes(), to.1.to_be_bytes(), length.to_be_bytes(), [0, 0]].concat();
        self.send(IPV4, &[&header, &udp, payload.as_bytes()].concat());
    }

    /// From where guests are, to somewhere.
    pub(crate) fn say(&mut self, to: (Ipv4Addr, u16), payload: &str) {
        self.send_datagram((GUEST_ADDRESS, 4000), to, payload);
    }

    /// The next datagram.
    pub(crate) fn hear(&mut self) -> Datagram {
        loop {
            let (kind, body) = self.receive();
            if kind != IPV4 || body[9] != 17 {
                continue;
            }
            let port = |at: usize| u16::from_be_bytes([body[at], body[at + 1]]);
            let address = |at: usize| Ipv4Addr::new(body[at], body[at + 1], body[at + 2], body[at + 3]);
            let end = 20 + usize::from(port(24));
            return Datagram {
                from: (address(12), port(20)),
                to: (address(16), port(22)),
                payload: String::from_utf8_lossy(&body[28..end]).into_owned(),
            };
        }
    }

    /// Asks the internet something and gets its answer: nothing came before either of them.
    pub(crate) fn exchange(&mut self, internet: &Internet, what: &str) {
        self.say((SERVER, PORT), what);
        let (heard, from) = internet.receive();
        assert_eq!(heard, what, "something else arrived in the internet");
        assert_eq!(from.ip(), HOST, "the address is translated");
        internet.socket.send_to(format!("answer to {what}").as_bytes(), from).unwrap();
        let answer = self.hear();
        assert_eq!(answer.payload, format!("answer to {what}"));
        assert_eq!((answer.from, answer.to), ((SERVER, PORT), (GUEST_ADDRESS, 4000)));
    }
}

/// What networks are like here.
pub(crate) fn usual(run_dir: &Path) -> NetworkConfig {
    NetworkConfig { resolver: Some(RESOLVER), ..NetworkConfig::new(run_dir) }
}

pub(crate) fn open(config: NetworkConfig) -> Network {
    let network = Network::open(config).unwrap();
    network.outbound().expect("a way out");
    network
}

/// What there is of slots: of this test's namespaces, and of links of its host.
pub(crate) fn present(run_dir: &Path) -> Vec<String> {
    let left = leftovers().unwrap();
    let ours = |namespace: &String| Path::new(namespace).starts_with(run_dir);
    let files = std::fs::read_dir(run_dir).unwrap().map(|entry| entry.unwrap().path().display().to_string());
    left.namespaces.into_iter().filter(ours).chain(left.links).chain(files).collect()
}

/// Removes the slots of a test that failed.
pub(crate) struct Cleanup<'a>(&'a Path);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = Network::open(NetworkConfig::new(self.0)).and_then(|network| network.sweep());
        }
    }
}

/// Runs a test with a host, an internet and a network of its own, and sees to it that nothing is left.
pub(crate) fn with_network(test: impl FnOnce(&Network, &Internet, &Path) + Send) {
    with_network_of(usual, test);
}

/// The same, with a network that is not the usual one.
pub(crate) fn with_network_of(
    config: impl FnOnce(&Path) -> NetworkConfig + Send,
    test: impl FnOnce(&Network, &Internet, &Path) + Send,
) {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path();
    in_new_namespace(|| {
        let _cleanup = Cleanup(run_dir);
        let internet = Internet::connect();
        let network = open(config(run_dir));
        test(&network, &internet, run_dir);
        assert_eq!(present(run_dir), Vec::<String>::new());
        network.close().unwrap();
        assert_eq!(leftovers().unwrap().tables, Vec::<String>::new());
    });
}

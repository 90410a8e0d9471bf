//! Network slots, without guests: a test is the guest, frame by frame, at the end of a slot's tap.
//!
//! Every test has a host of its own (a network namespace that its thread lives in) and an internet of
//! its own (another one), so that nothing it does concerns the real network.

use std::collections::HashSet;
use std::fs::File;
use std::io::{ErrorKind, Read, Write};
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::{AsFd, OwnedFd};
use std::path::Path;
use std::process::Command;
use std::time::{Duration, Instant};

use forkd_net::{
    Error, GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, Network, NetworkConfig, Pool, Slot,
    leftovers,
};
use forkd_tests::eventually;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::thread::{LinkNameSpaceType, UnshareFlags, gettid, move_into_link_name_space, unshare_unsafe};

/// How long a frame that must come may take.
const FRAME_PATIENCE: Duration = Duration::from_secs(30);
/// Two addresses of the internet's; the host's there; and a name server in a private network.
const SERVER: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 1);
const HOST: Ipv4Addr = Ipv4Addr::new(198, 51, 100, 2);
const RESOLVER: Ipv4Addr = Ipv4Addr::new(10, 255, 0, 53);
/// Where the internet listens, and the host.
const PORT: u16 = 9000;
/// Addresses that lead to the internet's socket, if somebody lets a packet go there.
const FORBIDDEN: [Ipv4Addr; 8] = [
    Ipv4Addr::new(10, 0, 2, 2),
    Ipv4Addr::new(10, 200, 0, 1),
    Ipv4Addr::new(100, 64, 0, 1),
    Ipv4Addr::new(169, 254, 169, 254),
    Ipv4Addr::new(172, 16, 0, 1),
    Ipv4Addr::new(172, 31, 255, 1),
    Ipv4Addr::new(192, 168, 1, 1),
    RESOLVER,
];
const VIRTIO_HEADER: usize = 12;
const ARP: u16 = 0x0806;
const IPV4: u16 = 0x0800;
const IPV6: u16 = 0x86dd;

/// Does `work` on a thread with a network namespace of its own.
fn in_new_namespace<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    in_new(UnshareFlags::NEWNET, work)
}

/// Does `work` on a thread with namespaces of its own.
fn in_new<T: Send>(namespaces: UnshareFlags, work: impl FnOnce() -> T + Send) -> T {
    on_own_thread(|| {
        // SAFETY: new network and mount namespaces take no descriptor and no memory from anybody.
        unsafe { unshare_unsafe(namespaces) }.expect("run as root");
        work()
    })
}

fn on_own_thread<T: Send>(work: impl FnOnce() -> T + Send) -> T {
    std::thread::scope(|scope| {
        scope.spawn(work).join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// The world outside: what is sent to any of its addresses ends in one of its sockets.
struct Internet {
    socket: UdpSocket,
    resolver: UdpSocket,
}

impl Internet {
    /// Connects the calling thread's namespace to a new one, which lives as long as its sockets.
    fn connect() -> Internet {
        let host = gettid().as_raw_nonzero();
        let internet = in_new_namespace(|| {
            ip(&format!("link add lan type veth peer name wan netns {host}"));
            ip("link set lo up");
            ip(&format!("address add {SERVER}/24 dev lan"));
            ip("link set lan up");
            for address in FORBIDDEN {
                ip(&format!("address add {address}/32 dev lo"));
            }
            let listen = |address: Ipv4Addr, port| {
                let socket = UdpSocket::bind((address, port)).unwrap();
                socket.set_read_timeout(Some(FRAME_PATIENCE)).unwrap();
                socket
            };
            // Without routes of its own to the slots: only what is translated finds its way back.
            Internet { socket: listen(Ipv4Addr::UNSPECIFIED, PORT), resolver: listen(RESOLVER, 53) }
        });
        ip("link set lo up");
        ip(&format!("address add {HOST}/24 dev wan"));
        ip("link set wan up");
        ip(&format!("route add default via {SERVER}"));
        internet
    }

    /// The next datagram, and where it says it is from.
    fn receive(&self) -> (String, std::net::SocketAddr) {
        receive(&self.socket)
    }
}

fn receive(socket: &UdpSocket) -> (String, std::net::SocketAddr) {
    let mut buffer = [0; 2048];
    let (count, from) = socket.recv_from(&mut buffer).expect("a datagram");
    (String::from_utf8_lossy(&buffer[..count]).into_owned(), from)
}

#[derive(Debug, PartialEq, Eq)]
struct Datagram {
    from: (Ipv4Addr, u16),
    to: (Ipv4Addr, u16),
    payload: String,
}

/// What is at the other end of a tap.
struct Guest {
    tap: File,
}

impl Guest {
    fn of(slot: &mut Slot) -> Guest {
        Guest { tap: File::from(slot.take_tap().unwrap()) }
    }

    fn send(&mut self, kind: u16, body: &[u8]) {
        let to = if kind == ARP { [0xff; 6] } else { GATEWAY_MAC };
        let frame =
            [&[0; VIRTIO_HEADER][..], &to[..], &GUEST_MAC[..], &kind.to_be_bytes()[..], body].concat();
        assert_eq!(self.tap.write(&frame).unwrap(), frame.len());
    }

    /// The kind and the body of the next frame for this guest.
    fn receive(&mut self) -> (u16, Vec<u8>) {
        let start = Instant::now();
        loop {
            let left = FRAME_PATIENCE.checked_sub(start.elapsed()).expect("no frame came");
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

    /// Asks who has an address.
    fn ask_for(&mut self, target: Ipv4Addr) {
        let question = [0, 1, 8, 0, 6, 4, 0, 1];
        let addresses = [&GUEST_MAC[..], &GUEST_ADDRESS.octets(), &[0; 6], &target.octets()].concat();
        self.send(ARP, &[&question[..], &addresses].concat());
    }

    fn finds_its_gateway(&mut self) {
        self.ask_for(GATEWAY_ADDRESS);
        let (kind, answer) = self.receive();
        assert_eq!((kind, &answer[7..8]), (ARP, &[2][..]));
        assert_eq!((&answer[8..14], &answer[14..18]), (&GATEWAY_MAC[..], &GATEWAY_ADDRESS.octets()[..]));
    }

    fn send_datagram(&mut self, from: (Ipv4Addr, u16), to: (Ipv4Addr, u16), payload: &str) {
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
    fn say(&mut self, to: (Ipv4Addr, u16), payload: &str) {
        self.send_datagram((GUEST_ADDRESS, 4000), to, payload);
    }

    /// The next datagram.
    fn hear(&mut self) -> Datagram {
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
    fn exchange(&mut self, internet: &Internet, what: &str) {
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

fn open(run_dir: &Path) -> Network {
    let config = NetworkConfig { resolver: Some(RESOLVER), ..NetworkConfig::new(run_dir) };
    let network = Network::open(config).unwrap();
    network.outbound().expect("a way out");
    network
}

/// What there is of slots: of this test's namespaces, and of links of its host.
fn present(run_dir: &Path) -> Vec<String> {
    let left = leftovers().unwrap();
    let ours = |namespace: &String| Path::new(namespace).starts_with(run_dir);
    let files = std::fs::read_dir(run_dir).unwrap().map(|entry| entry.unwrap().path().display().to_string());
    left.namespaces.into_iter().filter(ours).chain(left.links).chain(files).collect()
}

/// Removes the slots of a test that failed.
struct Cleanup<'a>(&'a Path);

impl Drop for Cleanup<'_> {
    fn drop(&mut self) {
        if std::thread::panicking() {
            let _ = Network::open(NetworkConfig::new(self.0)).and_then(|network| network.sweep());
        }
    }
}

/// Runs a test with a host, an internet and a network of its own, and sees to it that nothing is left.
fn with_network(test: impl FnOnce(&Network, &Internet, &Path) + Send) {
    let folder = tempfile::tempdir().unwrap();
    let run_dir = folder.path();
    in_new_namespace(|| {
        let _cleanup = Cleanup(run_dir);
        let internet = Internet::connect();
        let network = open(run_dir);
        test(&network, &internet, run_dir);
        assert_eq!(present(run_dir), Vec::<String>::new());
        network.close().unwrap();
        assert_eq!(leftovers().unwrap().tables, Vec::<String>::new());
    });
}

#[test]
fn a_guest_finds_its_gateway_and_talks_to_the_internet_with_a_translated_address() {
    with_network(|network, internet, _| {
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);

        // Its gateway answers; the slot's outer address does not.
        guest.ask_for(slot.outer_address().unwrap());
        guest.finds_its_gateway();

        guest.exchange(internet, "hello");
        slot.destroy().unwrap();
    });
}

#[test]
fn names_are_resolved_by_the_hosts_resolver_and_nothing_else_of_it_is_reached() {
    with_network(|network, internet, _| {
        assert_eq!(network.resolver(), Some(RESOLVER));
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        guest.say((RESOLVER, 53), "directly, although it is in a private network");
        guest.say((GATEWAY_ADDRESS, 53), "a name");
        let (question, from) = receive(&internet.resolver);
        assert_eq!((question.as_str(), from.ip()), ("a name", HOST.into()));
        internet.resolver.send_to(b"its address", from).unwrap();
        let answer = guest.hear();
        assert_eq!((answer.from, answer.payload.as_str()), ((GATEWAY_ADDRESS, 53), "its address"));
        guest.exchange(internet, "marker");
        slot.destroy().unwrap();
    });
}

#[test]
fn siblings_with_the_same_address_talk_at_once_and_get_only_their_own_answers() {
    with_network(|network, internet, _| {
        let mut slots: Vec<_> = (0..3).map(|_| network.make().unwrap()).collect();
        let mut guests: Vec<_> = slots.iter_mut().map(Guest::of).collect();
        let mut questions = Vec::new();
        for (number, guest) in guests.iter_mut().enumerate() {
            guest.say((SERVER, PORT), &format!("from {number}"));
        }
        for _ in &guests {
            questions.push(internet.receive());
        }
        let sources: HashSet<_> = questions.iter().map(|(_, from)| *from).collect();
        assert_eq!(sources.len(), guests.len());
        // In another order than they came.
        for (question, from) in questions.iter().rev() {
            internet.socket.send_to(format!("answer {question}").as_bytes(), from).unwrap();
        }
        for (number, guest) in guests.iter_mut().enumerate() {
            assert_eq!(guest.hear().payload, format!("answer from {number}"));
            // And nothing more.
            guest.exchange(internet, &format!("marker {number}"));
        }
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
    });
}

#[test]
fn private_networks_and_metadata_services_are_out_of_reach() {
    with_network(|network, internet, _| {
        // The host reaches all of them, so a packet let through would arrive.
        let host = UdpSocket::bind("0.0.0.0:0").unwrap();
        for address in FORBIDDEN {
            host.send_to(address.to_string().as_bytes(), (address, PORT)).unwrap();
            assert_eq!(internet.receive().0, address.to_string());
        }
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        for address in FORBIDDEN {
            guest.say((address, PORT), &format!("to {address}"));
        }
        guest.exchange(internet, "marker");
        slot.destroy().unwrap();
    });
}

#[test]
fn the_host_is_out_of_reach() {
    with_network(|network, internet, _| {
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        let host = UdpSocket::bind(("0.0.0.0", PORT)).unwrap();
        host.set_read_timeout(Some(FRAME_PATIENCE)).unwrap();
        let outer = slot.outer_address().unwrap();
        let cable = Ipv4Addr::from(u32::from(outer) - 1);
        for address in [HOST, cable, outer, GATEWAY_ADDRESS, Ipv4Addr::LOCALHOST] {
            guest.say((address, PORT), &format!("to {address}"));
        }
        // What was sent before this has arrived by now, if it ever does.
        guest.exchange(internet, "marker");
        let own = UdpSocket::bind("0.0.0.0:0").unwrap();
        own.send_to(b"own", (HOST, PORT)).unwrap();
        assert_eq!(receive(&host).0, "own", "the first datagram that the host got");
        slot.destroy().unwrap();
    });
}

#[test]
fn other_slots_are_out_of_reach() {
    with_network(|network, internet, _| {
        let mut slots = [network.make().unwrap(), network.make().unwrap()];
        let [mut one, mut other] = [Guest::of(&mut slots[0]), Guest::of(&mut slots[1])];
        // The other has an open connection, whose addresses a sibling can guess.
        other.exchange(internet, "hello");
        let outer = slots[1].outer_address().unwrap();
        one.say((outer, 4000), "to a sibling");
        one.say((GUEST_ADDRESS, 4000), "to itself or a sibling");
        one.say((Ipv4Addr::new(10, 42, 0, 3), 4000), "to a neighbour");
        one.send_datagram((SERVER, PORT), (outer, 4000), "as if it were the server");
        one.exchange(internet, "marker");
        other.exchange(internet, "marker");

        // Not even if the other slot lets everything in.
        let socket = on_own_thread(|| {
            let namespace = File::open(slots[1].namespace()).unwrap();
            move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network)).unwrap();
            assert!(Command::new("nft").args(["flush", "ruleset"]).status().unwrap().success());
            UdpSocket::bind((outer, PORT)).unwrap()
        });
        socket.set_read_timeout(Some(FRAME_PATIENCE)).unwrap();
        one.say((outer, PORT), "to a sibling");
        one.exchange(internet, "marker");
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"own", (outer, PORT)).unwrap();
        assert_eq!(receive(&socket).0, "own", "the first datagram that the other slot got");
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
    });
}

#[test]
fn packets_with_somebody_elses_address_go_nowhere() {
    with_network(|network, internet, _| {
        let mut slots = [network.make().unwrap(), network.make().unwrap()];
        let mut guest = Guest::of(&mut slots[0]);
        let others = [
            Ipv4Addr::new(10, 42, 0, 3),
            GATEWAY_ADDRESS,
            slots[0].outer_address().unwrap(),
            slots[1].outer_address().unwrap(),
            Ipv4Addr::LOCALHOST,
            Ipv4Addr::UNSPECIFIED,
            HOST,
            SERVER,
            Ipv4Addr::new(203, 0, 113, 9),
        ];
        for address in others {
            guest.send_datagram((address, 4000), (SERVER, PORT), &format!("from {address}"));
        }
        guest.exchange(internet, "marker");
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
    });
}

#[test]
fn a_destroyed_slot_is_gone_even_while_its_tap_is_held() {
    with_network(|network, internet, run_dir| {
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        guest.exchange(internet, "hello");
        assert!(slot.take_tap().is_err(), "there is only one");
        assert_eq!(present(run_dir).len(), 3, "a namespace, its file and a link");
        slot.destroy().unwrap();
        assert_eq!(present(run_dir), Vec::<String>::new());
        guest.say((SERVER, PORT), "from a slot that is gone");

        // Its name can be another's now: destroying it again must not destroy that one.
        let mut others: Vec<_> = (0..2).map(|_| network.make().unwrap()).collect();
        slot.destroy().unwrap();
        for other in &mut others {
            Guest::of(other).exchange(internet, "marker");
            other.destroy().unwrap();
        }
    });
}

#[test]
fn a_tap_can_be_taken_again_when_its_holder_is_gone() {
    with_network(|network, internet, _| {
        let mut slot = network.make().unwrap();
        for holder in ["first", "second"] {
            Guest::of(&mut slot).exchange(internet, holder);
        }
        slot.destroy().unwrap();
    });
}

#[test]
fn slots_survive_a_killed_daemon_if_they_are_adopted_and_are_swept_away_if_not() {
    with_network(|network, internet, run_dir| {
        let mut slots: Vec<_> = (0..3).map(|_| network.make().unwrap()).collect();
        let names: Vec<_> = slots.iter().map(|slot| slot.name().to_owned()).collect();
        let outer = slots[1].outer_address();
        let mut guest = Guest::of(&mut slots[1]);
        drop(slots);

        let network = open(run_dir);
        let mut adopted = network.adopt(&names[1]).unwrap();
        assert_eq!(adopted.outer_address(), outer);
        assert!(matches!(network.adopt(&names[1]), Err(Error::BadSlot { .. })), "one owner");
        // A slot made before the sweep is not swept.
        let mut new = network.make().unwrap();
        assert!(!names.iter().any(|name| name == new.name()));
        let mut swept = network.sweep().unwrap();
        swept.sort();
        assert_eq!(swept, [names[0].as_str(), names[2].as_str()]);
        guest.exchange(internet, "from the adopted one");
        Guest::of(&mut new).exchange(internet, "from the new one");
        adopted.destroy().unwrap();
        new.destroy().unwrap();
    });
}

#[test]
fn a_pool_of_twenty_is_made_used_and_gone() {
    with_network(|network, internet, _| {
        let start = Instant::now();
        let pool = Pool::new(network.clone(), 20).unwrap();
        eventually("twenty slots", || (pool.ready() == 20).then_some(()));
        println!("20 slots were made in {:?}", start.elapsed());

        // More at once than are ready.
        let start = Instant::now();
        let mut slots: Vec<Slot> = std::thread::scope(|scope| {
            let get = || (0..6).map(|_| pool.get().unwrap()).collect::<Vec<_>>();
            let threads: Vec<_> = (0..4).map(|_| scope.spawn(get)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        println!("24 were had in {:?}", start.elapsed());
        let names: HashSet<_> = slots.iter().map(|slot| slot.name().to_owned()).collect();
        let outer: HashSet<_> = slots.iter().map(|slot| slot.outer_address().unwrap()).collect();
        assert_eq!((names.len(), outer.len()), (24, 24));
        let _taps: Vec<OwnedFd> = slots.iter_mut().map(|slot| slot.take_tap().unwrap()).collect();
        eventually("new ones in their place", || (pool.ready() == 20).then_some(()));
        let mut late = pool.get().unwrap();
        Guest::of(&mut late).exchange(internet, "from a late one");
        slots.push(late);

        let start = Instant::now();
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
        println!("25 were destroyed in {:?}", start.elapsed());
        drop(pool);
    });
}

#[test]
fn without_nft_there_are_slots_without_a_way_out() {
    let folder = tempfile::tempdir().unwrap();
    in_new(UnshareFlags::NEWNET | UnshareFlags::NEWNS, || {
        let private = MountPropagationFlags::PRIVATE | MountPropagationFlags::REC;
        mount_change("/", private).unwrap();
        let path = std::env::var_os("PATH").unwrap();
        let sbin = ["/usr/sbin", "/sbin", "/usr/local/sbin"].map(Into::into);
        for folder in std::env::split_paths(&path).chain(sbin) {
            let nft = folder.join("nft");
            if nft.is_file() {
                // Not a program any more.
                mount_bind("/dev/null", &nft).unwrap();
            }
        }
        // A new namespace has it from the first one.
        let forwarding = "/proc/sys/net/ipv4/ip_forward";
        std::fs::write(forwarding, "0").unwrap();
        let network = Network::open(NetworkConfig::new(folder.path())).unwrap();
        let reason = network.outbound().unwrap_err();
        assert!(reason.contains("nft") && reason.contains("package nftables"), "{reason}");
        assert_eq!(network.resolver(), None);
        let mut slot = network.make().unwrap();
        assert_eq!(slot.outer_address(), None);
        Guest::of(&mut slot).finds_its_gateway();
        assert_eq!(present(folder.path()).len(), 2, "a namespace and its file, no link");
        slot.destroy().unwrap();
        assert_eq!(present(folder.path()), Vec::<String>::new());
        assert_eq!(std::fs::read_to_string(forwarding).unwrap().trim(), "0", "left alone");
    });
}

#[test]
fn users_other_than_root_are_told_what_to_do() {
    let folder = tempfile::tempdir().unwrap();
    on_own_thread(|| {
        let nobody = rustix::process::Uid::from_raw(65534);
        rustix::thread::set_thread_res_uid(nobody, nobody, nobody).unwrap();
        let error = Network::open(NetworkConfig::new(folder.path())).unwrap_err();
        assert!(matches!(error, Error::NotRoot));
        assert!(error.to_string().contains("run as root"), "{error}");
    });
}

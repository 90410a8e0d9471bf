//! Network slots, without guests: a test is the guest, frame by frame, at the end of a slot's tap.
//!
//! Every test has a host of its own (a network namespace that its thread lives in) and an internet of
//! its own (another one), so that nothing it does concerns the real network.

mod walls;
mod world;

use std::collections::HashSet;
use std::net::{Ipv4Addr, UdpSocket};
use std::os::fd::OwnedFd;
use std::process::Command;
use std::time::Instant;

use forkd_net::{Error, GATEWAY_ADDRESS, GUEST_ADDRESS, Network, NetworkConfig, Pool, Slot};
use forkd_tests::eventually;
use rustix::mount::{MountPropagationFlags, mount_bind, mount_change};
use rustix::thread::UnshareFlags;

use world::*;

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
fn the_host_is_out_of_reach() {
    with_network(|network, internet, _| {
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        let host = UdpSocket::bind(("0.0.0.0", PORT)).unwrap();
        host.set_read_timeout(Some(FRAME_TIMEOUT)).unwrap();
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
        let socket = inside(&slots[1], || {
            assert!(Command::new("nft").args(["flush", "ruleset"]).status().unwrap().success());
            UdpSocket::bind((outer, PORT)).unwrap()
        });
        socket.set_read_timeout(Some(FRAME_TIMEOUT)).unwrap();
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
            Ipv4Addr::new(55, 9, 0, 9),
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

        let network = open(usual(run_dir));
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

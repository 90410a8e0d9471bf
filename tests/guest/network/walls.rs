//! What guests must not reach, and how much they may take.

use std::net::{Ipv4Addr, UdpSocket};
use std::process::{Command, Stdio};

use forkd_net::{FlowLimits, GATEWAY_ADDRESS, GUEST_ADDRESS, NetworkConfig};
use forkd_tests::eventually;
use rustix::thread::gettid;

use super::world::*;

/// A container of the host's, in a private network, and where it listens.
const CONTAINER: Ipv4Addr = Ipv4Addr::new(172, 17, 0, 2);
/// The address of a service that the host translates, though it has not got it.
const SERVICE: Ipv4Addr = Ipv4Addr::new(55, 9, 0, 9);

fn nft(rules: &str) {
    let mut child = Command::new("nft").args(["-f", "-"]).stdin(Stdio::piped()).spawn().unwrap();
    std::io::Write::write_all(&mut child.stdin.take().unwrap(), rules.as_bytes()).unwrap();
    assert!(child.wait().unwrap().success(), "{rules}");
}

/// Connects a container to the calling thread's namespace; its socket.
fn container() -> UdpSocket {
    let host = gettid().as_raw_nonzero();
    let socket = in_new_namespace(|| {
        ip(&format!("link add eth0 type veth peer name bridge netns {host}"));
        ip(&format!("address add {CONTAINER}/16 dev eth0"));
        ip("link set eth0 up");
        ip("route add default via 172.17.0.1");
        let socket = UdpSocket::bind((CONTAINER, PORT)).unwrap();
        socket.set_read_timeout(Some(FRAME_TIMEOUT)).unwrap();
        socket
    });
    ip("address add 172.17.0.1/16 dev bridge");
    ip("link set bridge up");
    socket
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
fn what_the_host_publishes_by_translating_addresses_is_out_of_reach() {
    with_network(|network, internet, _| {
        let container = container();
        // As programs that run containers do it: to all of the host's addresses, and to one of a service.
        nft(&format!(
            "table ip publish {{
                chain prerouting {{
                    type nat hook prerouting priority -100
                    fib daddr type local udp dport 8080 dnat to {CONTAINER}:{PORT}
                    ip daddr {SERVICE} udp dport 80 dnat to {CONTAINER}:{PORT}
                    ip daddr {SERVICE} udp dport 81 dnat to {SERVER}:{PORT}
                }}
            }}"
        ));
        // The rules work: for others, such as the internet.
        internet.socket.send_to(b"from outside", (HOST, 8080)).unwrap();
        assert_eq!(receive(&container).0, "from outside");

        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        let cable = Ipv4Addr::from(u32::from(slot.outer_address().unwrap()) - 1);
        for address in [HOST, cable, GATEWAY_ADDRESS, Ipv4Addr::new(172, 17, 0, 1)] {
            guest.say((address, 8080), &format!("to {address}"));
        }
        for port in [80, 81] {
            guest.say((SERVICE, port), &format!("to the service's {port}"));
        }
        guest.say((CONTAINER, PORT), "directly");
        guest.exchange(internet, "marker");
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"own", (CONTAINER, PORT)).unwrap();
        assert_eq!(receive(&container).0, "own", "the first datagram after the internet's");
        slot.destroy().unwrap();
    });
}

#[test]
fn a_name_server_that_the_host_translates_to_is_reached_and_nothing_else_there() {
    let config = |run_dir: &std::path::Path| NetworkConfig { resolver: Some(SERVICE), ..usual(run_dir) };
    with_network_of(config, |network, internet, _| {
        let container = container();
        nft(&format!(
            "table ip publish {{
                chain prerouting {{
                    type nat hook prerouting priority -100
                    ip daddr {SERVICE} udp dport {{ 53, 54 }} dnat to {CONTAINER}:{PORT}
                }}
            }}"
        ));
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        guest.say((SERVICE, 54), "something else");
        guest.say((GATEWAY_ADDRESS, 53), "a name");
        let (question, from) = receive(&container);
        assert_eq!(question, "a name");
        container.send_to(b"its address", from).unwrap();
        assert_eq!(guest.hear().payload, "its address");
        guest.exchange(internet, "marker");
        slot.destroy().unwrap();
    });
}

#[test]
fn networks_the_host_is_attached_to_are_out_of_reach_even_if_it_joins_them_later() {
    with_network(|network, internet, _| {
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        // The router itself, through which everything else goes.
        guest.say((ROUTER, PORT), "to a neighbour");
        guest.exchange(internet, "marker");

        let mut probes = 0;
        let mut is_reached = || {
            probes += 1;
            guest.say((SERVER, PORT), &format!("probe {probes}"));
            // Another flow, to an address that stays: it comes after the probe.
            guest.send_datagram((GUEST_ADDRESS, 4001), (FARTHER, PORT), &format!("marker {probes}"));
            let (first, _) = internet.receive();
            if first == format!("probe {probes}") {
                assert_eq!(internet.receive().0, format!("marker {probes}"));
                return true;
            }
            assert_eq!(first, format!("marker {probes}"));
            false
        };
        assert!(is_reached());
        ip("address add 55.7.0.2/24 dev wan");
        // The host reaches it, and knows its hardware address: no probe waits for that and comes late.
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"own", (SERVER, PORT)).unwrap();
        assert_eq!(internet.receive().0, "own");
        eventually("the new network is out of reach", || (!is_reached()).then_some(()));
        // And when it leaves, all is as before.
        ip("address delete 55.7.0.2/24 dev wan");
        eventually("the old network is the internet again", || is_reached().then_some(()));
        slot.destroy().unwrap();
    });
}

#[test]
fn an_operator_opens_networks_and_ports_but_never_the_host() {
    let [whole, one] = [FORBIDDEN[0], FORBIDDEN[12]];
    let config = |run_dir: &std::path::Path| {
        let opened = ["10.0.0.0/16", "192.168.1.1:9000", "55.1.0.0/24"];
        let opened = opened.iter().map(|opening| opening.parse().unwrap()).collect();
        NetworkConfig { opened, ..usual(run_dir) }
    };
    with_network_of(config, |network, internet, _| {
        let host = UdpSocket::bind((HOST, PORT)).unwrap();
        host.set_read_timeout(Some(FRAME_TIMEOUT)).unwrap();
        let mut slots = [network.make().unwrap(), network.make().unwrap()];
        let mut guest = Guest::of(&mut slots[0]);
        for address in [whole, one, ROUTER] {
            guest.say((address, PORT), &format!("to {address}"));
            assert_eq!(internet.receive().0, format!("to {address}"));
        }
        for address in FORBIDDEN.into_iter().filter(|address| ![whole, one].contains(address)) {
            guest.say((address, PORT), &format!("to {address}"));
        }
        guest.say((HOST, PORT), "to the host");
        guest.exchange(internet, "marker");
        UdpSocket::bind("0.0.0.0:0").unwrap().send_to(b"own", (HOST, PORT)).unwrap();
        assert_eq!(receive(&host).0, "own", "the first datagram that the host got");
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
    });
}

#[test]
fn an_adopted_slot_has_the_rules_of_the_daemon_that_adopts_it() {
    with_network(|network, internet, run_dir| {
        let mut slot = network.make().unwrap();
        let mut guest = Guest::of(&mut slot);
        let name = slot.name().to_owned();
        drop(slot);
        guest.exchange(internet, "before");
        guest.say((FORBIDDEN[0], PORT), "not yet");

        let opened = vec!["10.0.2.2".parse().unwrap()];
        let network = open(NetworkConfig { opened, ..usual(run_dir) });
        let mut slot = network.adopt(&name).unwrap();
        assert!(network.renew().is_empty());
        // A flow that was there goes on.
        guest.exchange(internet, "after");
        guest.say((FORBIDDEN[0], PORT), "now");
        assert_eq!(internet.receive().0, "now");
        slot.destroy().unwrap();
    });
}

/// Sends the first datagram of so many flows, and counts those that arrive before an old flow's next.
fn new_flows(guest: &mut Guest, internet: &Internet, count: u16) -> usize {
    for port in 10_000..10_000 + count {
        guest.send_datagram((GUEST_ADDRESS, port), (SERVER, PORT), "new");
    }
    guest.say((SERVER, PORT), "old");
    let arrived = || internet.receive().0;
    std::iter::from_fn(|| Some(arrived()).filter(|what| what != "old")).count()
}

#[test]
fn a_guest_with_too_many_flows_gets_no_more_while_old_ones_and_siblings_go_on() {
    let flows = FlowLimits { at_once: 20, per_sec: 1000, burst: 1000 };
    let config = move |run_dir: &std::path::Path| NetworkConfig { flows, ..usual(run_dir) };
    with_network_of(config, |network, internet, _| {
        let mut slots = [network.make().unwrap(), network.make().unwrap()];
        let [mut greedy, mut sibling] = [Guest::of(&mut slots[0]), Guest::of(&mut slots[1])];
        // However slow this computer is, none expires meanwhile.
        inside(&slots[0], || {
            std::fs::write("/proc/sys/net/netfilter/nf_conntrack_udp_timeout", "3000").unwrap()
        });
        greedy.exchange(internet, "the first flow");
        assert_eq!(new_flows(&mut greedy, internet, 60), 19);
        sibling.exchange(internet, "from a sibling");
        greedy.exchange(internet, "the first flow goes on");
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
    });
}

#[test]
fn a_guest_that_makes_flows_too_fast_is_slowed_down_while_old_ones_and_siblings_go_on() {
    let flows = FlowLimits { at_once: 4096, per_sec: 1, burst: 5 };
    let config = move |run_dir: &std::path::Path| NetworkConfig { flows, ..usual(run_dir) };
    with_network_of(config, |network, internet, _| {
        let mut slots = [network.make().unwrap(), network.make().unwrap()];
        let [mut greedy, mut sibling] = [Guest::of(&mut slots[0]), Guest::of(&mut slots[1])];
        // It is not answered at first: even so, its later packets are not new flows.
        greedy.say((SERVER, PORT), "the first flow");
        assert_eq!(internet.receive().0, "the first flow");
        let arrived = new_flows(&mut greedy, internet, 90);
        assert!((4..90).contains(&arrived), "{arrived}");
        for number in 0..20 {
            greedy.exchange(internet, &format!("number {number}"));
        }
        sibling.exchange(internet, "from a sibling");
        slots.iter_mut().for_each(|slot| slot.destroy().unwrap());
    });
}

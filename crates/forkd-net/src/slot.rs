//! One network slot: its creation, its parts, and its removal.

use std::net::Ipv4Addr;
use std::os::fd::{BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};

use crate::link::Links;
use crate::network::Network;
use crate::nft::Nft;
use crate::{
    Error, GATEWAY_ADDRESS, GATEWAY_MAC, GUEST_ADDRESS, GUEST_MAC, GUEST_PREFIX, Result, Tap, namespace,
};

/// Prefix of the names of slots, and so of their files and links.
pub(crate) const PREFIX: &str = "forkd-";
/// The tap, in its slot.
pub(crate) const TAP: &str = "tap0";
/// The way out, in its slot.
pub(crate) const UPLINK: &str = "uplink";
/// The prefix length of the network between a slot and the host.
const CABLE_PREFIX: u8 = 30;

/// The name of the slot with this index.
pub(crate) fn name(index: u32) -> String {
    format!("{PREFIX}{index}")
}

/// The index in a slot's name; `None` if it is not one we would have given.
pub(crate) fn index(slot: &str) -> Option<u32> {
    let index = slot.strip_prefix(PREFIX)?.parse().ok()?;
    (name(index) == slot).then_some(index)
}

/// What connects a slot to the outside.
pub(crate) struct Outbound<'a> {
    /// The namespace that the far end of the cable is in.
    pub(crate) host: BorrowedFd<'a>,
    pub(crate) nft: &'a Nft,
    pub(crate) rules: &'a str,
    /// The host's end.
    pub(crate) gateway: Ipv4Addr,
    /// The slot's end: the slot's outer address.
    pub(crate) address: Ipv4Addr,
}

/// A network namespace with a tap in it, and a way out if the host allows it.
///
/// Dropping one leaves it as it is, as a sandbox outlives the daemon that started it; only
/// [`destroy`](Slot::destroy) removes it.
#[derive(Debug)]
pub struct Slot {
    network: Network,
    index: u32,
    name: String,
    /// Until a caller takes it.
    tap: Option<OwnedFd>,
    outer: Option<Ipv4Addr>,
    destroyed: bool,
}

impl Slot {
    pub(crate) fn new(network: Network, index: u32, tap: Option<OwnedFd>, outer: Option<Ipv4Addr>) -> Self {
        Slot { network, index, name: name(index), tap, outer, destroyed: false }
    }

    /// Its name, such as `forkd-12`: also that of its link on the host.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The file its namespace is mounted on.
    pub fn namespace(&self) -> PathBuf {
        self.network.file(&self.name)
    }

    /// The address its traffic has between it and the host; `None` if it has no way out.
    pub fn outer_address(&self) -> Option<Ipv4Addr> {
        self.outer
    }

    /// The descriptor of its tap: it does not block, and every packet has a virtio header of 12
    /// bytes. Once taken, another can be had when the last copy of that one is closed.
    pub fn take_tap(&mut self) -> Result<OwnedFd> {
        match self.tap.take() {
            Some(tap) => Ok(tap),
            None => namespace::inside(&self.namespace(), make_tap)
                .map_err(Error::system("entering the network slot", &self.name))?,
        }
    }

    /// Removes all of it: link, namespace and name. A tap that is still open has no network any more. After a
    /// failure it can be tried again; after success it does nothing.
    pub fn destroy(&mut self) -> Result<()> {
        if !self.destroyed {
            self.tap = None;
            remove(&self.name, &self.namespace())?;
            self.network.release(self.index);
            self.destroyed = true;
        }
        Ok(())
    }
}

/// Makes the parts of slot `name` and returns its tap. `file` exists and is empty. After a failure the parts
/// made so far stay.
pub(crate) fn make(name: &str, file: &Path, outbound: Option<&Outbound<'_>>) -> Result<OwnedFd> {
    let tap = namespace::in_new(|| {
        // The name first: a crash after this leaves nothing that cannot be found.
        namespace::mount_current(file).map_err(Error::system("mounting the namespace", name))?;
        configure(name, outbound)
    })
    .map_err(Error::system("making the namespace", name))??;
    if let Some(outbound) = outbound {
        connect(name, outbound).map_err(Error::system("configuring the link", name))?;
    }
    Ok(tap)
}

/// The inside of a slot; its namespace is the calling thread's.
fn configure(name: &str, outbound: Option<&Outbound<'_>>) -> Result<OwnedFd> {
    let parameters = || {
        namespace::disable_ipv6("all")?;
        namespace::disable_ipv6("default")?;
        // Only its own address answers on an interface: guests never learn the outer one.
        namespace::set_parameter("ipv4/conf/all/arp_ignore", "1")
    };
    parameters().map_err(Error::system("setting kernel parameters of", name))?;
    if let Some(outbound) = outbound {
        // The rules before there is anything they could miss.
        outbound.nft.load(outbound.rules)?;
        let links = || {
            let links = Links::open()?;
            links.add_veth(UPLINK, name, outbound.host)?;
            links.bring_up(UPLINK, outbound.address, CABLE_PREFIX)?;
            links.set_default_route(outbound.gateway)?;
            namespace::set_parameter("ipv4/ip_forward", "1")
        };
        links().map_err(Error::system("making the link", name))?;
    }
    make_tap()
}

/// Makes the tap; the slot's namespace is the calling thread's.
fn make_tap() -> Result<OwnedFd> {
    let tap = Tap::create(TAP)?;
    let configured = || {
        let links = Links::open()?;
        links.set_mac(TAP, GATEWAY_MAC)?;
        links.bring_up(TAP, GATEWAY_ADDRESS, GUEST_PREFIX)?;
        links.set_neighbour(TAP, GUEST_ADDRESS, GUEST_MAC)
    };
    configured().map_err(Error::system("configuring the tap", TAP))?;
    Ok(tap.into_fd())
}

/// The host's end of a slot's cable; the host's namespace is the calling thread's.
fn connect(name: &str, outbound: &Outbound<'_>) -> std::io::Result<()> {
    namespace::disable_ipv6(name)?;
    // Besides the rules: packets from the slot must have its own address.
    namespace::set_parameter(&format!("ipv4/conf/{name}/rp_filter"), "1")?;
    Links::open()?.bring_up(name, outbound.gateway, CABLE_PREFIX)
}

/// Removes all parts of the slot that exist. The file goes last: it records that parts may be left.
pub(crate) fn remove(name: &str, file: &Path) -> Result<()> {
    if namespace::is_mounted(file).map_err(Error::system("looking at the namespace", name))? {
        // By hand: an open tap keeps the namespace and its contents alive. And from inside: a link on the
        // host that has the slot's name may be another daemon's.
        namespace::inside(file, || Links::open()?.remove(UPLINK))
            .and_then(|removed| removed)
            .map_err(Error::system("removing the link", name))?;
    }
    namespace::remove(file).map_err(Error::system("removing the namespace", name))
}

/// The byte counters of a slot's tap, seen from the host: bytes the guest sent are received ones.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Traffic {
    /// From the guest.
    pub received: u64,
    /// To the guest.
    pub sent: u64,
}

/// The traffic of the slot whose [namespace](Slot::namespace) is mounted on `file`.
pub fn traffic(file: &Path) -> std::io::Result<Traffic> {
    let table = namespace::inside(file, || std::fs::read_to_string("/proc/thread-self/net/dev"))??;
    counted(&table, TAP).ok_or_else(|| std::io::Error::other("the slot has no tap"))
}

/// One entry of the kernel's table of links.
fn counted(table: &str, link: &str) -> Option<Traffic> {
    let row = table.lines().find_map(|line| line.trim_start().strip_prefix(link)?.strip_prefix(':'))?;
    let mut columns = row.split_whitespace();
    let received = columns.next()?.parse().ok()?;
    let sent = columns.nth(7)?.parse().ok()?;
    Some(Traffic { received, sent })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_we_would_give_are_names_of_slots() {
        assert_eq!(index("forkd-0"), Some(0));
        assert_eq!(index("forkd-16383"), Some(16383));
        for other in
            ["forkd-", "forkd-01", "forkd-+1", "forkd--1", "forkd-1x", "eth0", "forkd-4294967296", ""]
        {
            assert_eq!(index(other), None, "{other}");
        }
    }

    #[test]
    fn names_of_slots_can_be_names_of_links() {
        assert!(name((1 << 22) - 1).len() <= 15);
    }

    #[test]
    fn the_bytes_of_a_link_are_found_among_those_of_others() {
        let table = "Inter-|   Receive                  |  Transmit\n \
                     face |bytes packets errs drop fifo frame compressed multicast|bytes packets\n\
                     uplink: 1 2 0 0 0 0 0 0 3 4 0 0 0 0 0 0\n  \
                     tap0: 1500 10 0 0 0 0 0 0 70 1 0 0 0 0 0 0\n";
        assert_eq!(counted(table, TAP), Some(Traffic { received: 1500, sent: 70 }));
        assert_eq!(counted(table, UPLINK), Some(Traffic { received: 1, sent: 3 }));
        assert_eq!(counted(table, "tap"), None);
        assert_eq!(counted("tap0: x", TAP), None);
    }
}

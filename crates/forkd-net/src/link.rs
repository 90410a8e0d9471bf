//! Links, addresses, routes and neighbours, over one netlink socket.
//!
//! Knows nothing of slots. A socket belongs to the namespace of the thread that opened it, for good.

use std::io;
use std::net::{IpAddr, Ipv4Addr};
use std::os::fd::{AsRawFd, BorrowedFd};

use netlink_packet_core::{
    NLM_F_ACK, NLM_F_CREATE, NLM_F_EXCL, NLM_F_REPLACE, NLM_F_REQUEST, NetlinkHeader, NetlinkMessage,
    NetlinkPayload,
};
use netlink_packet_route::address::{AddressAttribute, AddressMessage};
use netlink_packet_route::link::{
    InfoData, InfoKind, InfoVeth, LinkAttribute, LinkFlags, LinkInfo, LinkMessage,
};
use netlink_packet_route::neighbour::{
    NeighbourAddress, NeighbourAttribute, NeighbourMessage, NeighbourState,
};
use netlink_packet_route::route::{
    RouteAddress, RouteAttribute, RouteHeader, RouteMessage, RouteProtocol, RouteScope, RouteType,
};
use netlink_packet_route::{AddressFamily, RouteNetlinkMessage};
use netlink_sys::protocols::NETLINK_ROUTE;
use netlink_sys::{Socket, SocketAddr};
use rustix::io::Errno;
use rustix::net::{SocketFlags, SocketType, socket_with};

/// An acknowledgement with the request it answers fits in here.
const REPLY_SIZE: usize = 8192;

/// What asks the kernel for changes to the network of one namespace.
pub(crate) struct Links {
    socket: Socket,
}

impl Links {
    /// For the calling thread's namespace.
    pub(crate) fn open() -> io::Result<Self> {
        let mut socket = Socket::new(NETLINK_ROUTE)?;
        socket.bind_auto()?;
        socket.connect(&SocketAddr::new(0, 0))?;
        Ok(Links { socket })
    }

    /// Makes a cable with the end `name` here and the end `peer` in the namespace `there`.
    pub(crate) fn add_veth(&self, name: &str, peer: &str, there: BorrowedFd<'_>) -> io::Result<()> {
        let mut far = LinkMessage::default();
        far.attributes =
            vec![LinkAttribute::IfName(peer.to_owned()), LinkAttribute::NetNsFd(there.as_raw_fd())];
        let mut near = LinkMessage::default();
        near.attributes = vec![
            LinkAttribute::IfName(name.to_owned()),
            LinkAttribute::LinkInfo(vec![
                LinkInfo::Kind(InfoKind::Veth),
                LinkInfo::Data(InfoData::Veth(InfoVeth::Peer(far))),
            ]),
        ];
        self.request(RouteNetlinkMessage::NewLink(near), NLM_F_CREATE | NLM_F_EXCL)
    }

    /// Removes a link, and with it the other end of a cable. One that is not there is removed.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.attributes = vec![LinkAttribute::IfName(name.to_owned())];
        match self.request(RouteNetlinkMessage::DelLink(link), 0) {
            Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(()),
            other => other,
        }
    }

    /// Gives a link that is down its hardware address.
    pub(crate) fn set_mac(&self, name: &str, mac: [u8; 6]) -> io::Result<()> {
        let mut link = LinkMessage::default();
        link.header.index = index(name)?;
        link.attributes = vec![LinkAttribute::Address(mac.to_vec())];
        self.request(RouteNetlinkMessage::SetLink(link), 0)
    }

    /// Gives a link its address and sets it up.
    pub(crate) fn bring_up(&self, name: &str, address: Ipv4Addr, prefix: u8) -> io::Result<()> {
        let index = index(name)?;
        let mut given = AddressMessage::default();
        given.header.family = AddressFamily::Inet;
        given.header.prefix_len = prefix;
        given.header.index = index;
        let address = IpAddr::V4(address);
        given.attributes = vec![AddressAttribute::Local(address), AddressAttribute::Address(address)];
        self.request(RouteNetlinkMessage::NewAddress(given), NLM_F_CREATE | NLM_F_REPLACE)?;
        let mut link = LinkMessage::default();
        link.header.index = index;
        link.header.flags = LinkFlags::Up;
        link.header.change_mask = LinkFlags::Up;
        self.request(RouteNetlinkMessage::SetLink(link), 0)
    }

    /// Sends everything that has no better route to `gateway`.
    pub(crate) fn set_default_route(&self, gateway: Ipv4Addr) -> io::Result<()> {
        let mut route = RouteMessage::default();
        route.header.address_family = AddressFamily::Inet;
        route.header.table = RouteHeader::RT_TABLE_MAIN;
        route.header.protocol = RouteProtocol::Static;
        route.header.scope = RouteScope::Universe;
        route.header.kind = RouteType::Unicast;
        route.attributes = vec![RouteAttribute::Gateway(RouteAddress::Inet(gateway))];
        self.request(RouteNetlinkMessage::NewRoute(route), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Adds a permanent entry with a neighbour's hardware address.
    pub(crate) fn set_neighbour(&self, name: &str, address: Ipv4Addr, mac: [u8; 6]) -> io::Result<()> {
        let mut neighbour = NeighbourMessage::default();
        neighbour.header.family = AddressFamily::Inet;
        neighbour.header.ifindex = index(name)?;
        neighbour.header.state = NeighbourState::Permanent;
        neighbour.header.kind = RouteType::Unicast;
        neighbour.attributes = vec![
            NeighbourAttribute::Destination(NeighbourAddress::Inet(address)),
            NeighbourAttribute::LinkLayerAddress(mac.to_vec()),
        ];
        self.request(RouteNetlinkMessage::NewNeighbour(neighbour), NLM_F_CREATE | NLM_F_REPLACE)
    }

    /// Sends one request and waits for its acknowledgement.
    fn request(&self, message: RouteNetlinkMessage, flags: u16) -> io::Result<()> {
        let mut header = NetlinkHeader::default();
        header.flags = NLM_F_REQUEST | NLM_F_ACK | flags;
        let mut message = NetlinkMessage::new(header, NetlinkPayload::from(message));
        message.finalize();
        let mut bytes = vec![0; message.buffer_len()];
        message.serialize(&mut bytes);
        self.socket.send(&bytes, 0)?;
        // The only message that can come back: nothing is dumped and no group is joined.
        let mut reply = Vec::with_capacity(REPLY_SIZE);
        self.socket.recv(&mut reply, 0)?;
        let reply = NetlinkMessage::<RouteNetlinkMessage>::deserialize(&reply)
            .map_err(|error| io::Error::other(format!("unreadable answer of the kernel: {error}")))?;
        match reply.payload {
            NetlinkPayload::Error(answer) if answer.code.is_none() => Ok(()),
            NetlinkPayload::Error(answer) => Err(answer.to_io()),
            other => Err(io::Error::other(format!("unexpected answer of the kernel: {other:?}"))),
        }
    }
}

/// Whether the calling thread's namespace has the link.
pub(crate) fn exists(name: &str) -> io::Result<bool> {
    match index(name) {
        Ok(_) => Ok(true),
        Err(error) if error.raw_os_error() == Some(Errno::NODEV.raw_os_error()) => Ok(false),
        Err(error) => Err(error),
    }
}

fn index(name: &str) -> io::Result<u32> {
    let family = rustix::net::AddressFamily::INET;
    let socket = socket_with(family, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
    Ok(rustix::net::netdevice::name_to_index(&socket, name)?)
}

//! Ending single sockets through the kernel's `sock_diag`.
//!
//! That takes a kernel with `CONFIG_INET_DIAG_DESTROY` and `tcp_diag` or `udp_diag`, which a guest loads when
//! it boots. The owner of such a socket gets `ECONNABORTED` from whatever it does next.

use std::{io, net::IpAddr, os::fd::OwnedFd};

use rustix::{
    io::Errno,
    net::{AddressFamily, Protocol, RecvFlags, SendFlags, SocketFlags, SocketType, ipproto, netlink},
};

use super::{Ends, LISTENING};

/// Of `linux/sock_diag.h` and `linux/netlink.h`.
const SOCK_DIAG_BY_FAMILY: u16 = 20;
const SOCK_DESTROY: u16 = 21;
const NLMSG_ERROR: u16 = 2;
const NLM_F_REQUEST: u16 = 1;
const NLM_F_ACK: u16 = 4;
/// A message's header.
const HEADER: usize = 16;
/// Where the kernel's description of a socket has its cookie.
const COOKIE: usize = 44;
/// Stands for any cookie.
const NO_COOKIE: u64 = u64::MAX;

/// A conversation with one network namespace's `sock_diag`.
pub(super) struct Diag(OwnedFd);

impl Diag {
    /// With that of this thread's namespace.
    pub(super) fn open() -> io::Result<Diag> {
        Ok(Diag(rustix::net::socket_with(
            AddressFamily::NETLINK,
            SocketType::RAW,
            SocketFlags::CLOEXEC,
            Some(netlink::SOCK_DIAG),
        )?))
    }

    /// Ends the socket with these ends and this cookie, bound to `interface` if that is not zero.
    pub(super) fn end(&self, of: Protocol, ends: Ends, interface: u32, cookie: u64) -> io::Result<()> {
        self.ask(SOCK_DESTROY, NLM_F_ACK, of, ends, interface, cookie).map(drop)
    }

    /// Ends a TCP connection that waits to be accepted. One that is gone by now is no error, and the
    /// listening socket is never ended in its place.
    pub(super) fn end_waiting(&self, ends: Ends, interface: u32) -> io::Result<()> {
        let found = self.ask(SOCK_DIAG_BY_FAMILY, 0, ipproto::TCP, ends, interface, NO_COOKIE)?;
        let short = || io::Error::from(io::ErrorKind::UnexpectedEof);
        let state = *found.get(1).ok_or_else(short)?;
        let cookie = found.get(COOKIE..COOKIE + 8).and_then(|bytes| bytes.try_into().ok());
        if state == LISTENING {
            return Ok(());
        }
        match self.end(ipproto::TCP, ends, interface, u64::from_ne_bytes(cookie.ok_or_else(short)?)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
            ended => ended,
        }
    }

    /// Sends a request about one socket. Returns the kernel's answer, which is empty for a request without
    /// data.
    fn ask(
        &self,
        kind: u16,
        flags: u16,
        of: Protocol,
        ends: Ends,
        interface: u32,
        cookie: u64,
    ) -> io::Result<Vec<u8>> {
        let request = request(kind, flags, of, ends, interface, cookie);
        rustix::net::send(&self.0, &request, SendFlags::empty())?;
        // The kernel answers before it returns from that.
        let mut answer = vec![0; 8192];
        let (_, len) = rustix::net::recv(&self.0, &mut answer[..], RecvFlags::DONTWAIT)?;
        answer.truncate(len);
        let number = |at: usize| answer.get(at..at + 4).and_then(|bytes| bytes.try_into().ok());
        let (Some(kind), Some(error)) = (answer.get(4..6), number(HEADER)) else {
            return Err(io::ErrorKind::UnexpectedEof.into());
        };
        if *kind != NLMSG_ERROR.to_ne_bytes() {
            return Ok(answer.split_off(HEADER));
        }
        match i32::from_ne_bytes(error) {
            0 => Ok(Vec::new()),
            error => Err(Errno::from_raw_os_error(error.saturating_neg()).into()),
        }
    }
}

/// A netlink message with an `inet_diag_req_v2`.
fn request(kind: u16, flags: u16, of: Protocol, ends: Ends, interface: u32, cookie: u64) -> Vec<u8> {
    let family = if ends.local.address.is_ipv4() { libc::AF_INET } else { libc::AF_INET6 };
    let mut body = vec![family as u8, of.as_raw().get() as u8, 0, 0];
    // In any state.
    body.extend(u32::MAX.to_ne_bytes());
    body.extend(ends.local.port.to_be_bytes());
    body.extend(ends.remote.port.to_be_bytes());
    for address in [ends.local.address, ends.remote.address] {
        let bytes = match address {
            IpAddr::V4(address) => [address.octets().as_slice(), &[0; 12]].concat(),
            IpAddr::V6(address) => address.octets().to_vec(),
        };
        body.extend(bytes);
    }
    body.extend(interface.to_ne_bytes());
    body.extend(cookie.to_ne_bytes());
    let mut message = ((HEADER + body.len()) as u32).to_ne_bytes().to_vec();
    message.extend(kind.to_ne_bytes());
    message.extend((NLM_F_REQUEST | flags).to_ne_bytes());
    // The kernel fills in our port; the number stays zero, as one request waits for one answer.
    message.extend([0; 8]);
    message.append(&mut body);
    message
}

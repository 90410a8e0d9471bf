//! TCP connections and connected UDP sockets that a child inherited.
//!
//! A connection with both ends in the guest was copied whole, with the data on its way: it goes on. The peer
//! of any other one goes on talking with the guest that was copied, so the child ends its own end at once,
//! before a process waits for an answer that cannot come.
//!
//! A connection is *inside* if its peer has an address of the same network namespace (its packets never leave
//! that), or if its mirror, the same two addresses the other way round, is in any network namespace of the
//! guest. A handshake may have no mirror yet and a UDP socket needs none: for them it is enough that the
//! peer's address belongs to the guest. [`network`] reads the kernel's tables for that, and only where a
//! socket has a peer beyond loopback: reading them takes each child time.
//!
//! The sockets are taken from the user's processes, so the agent's own are never touched. Disconnecting a TCP
//! socket resets its connection and gives its owner `ECONNRESET`. [`diag`] ends the sockets that this does
//! not reach: single connections in the queue of a listening socket, and UDP sockets, whose readers would
//! wait on.

mod diag;
mod network;

use std::{
    collections::BTreeSet,
    fs, io,
    net::{IpAddr, SocketAddr},
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    net::{AddressFamily, SocketAddrAny, ipproto, sockopt},
    process::{ForeignRawFd, Pid, PidfdFlags, PidfdGetfdFlags},
};

use self::{diag::Diag, network::Network};
use crate::sys;

/// How long all of it may take. Thousands of sockets take a small part of it.
const LIMIT: Duration = Duration::from_secs(5);
/// States of a TCP socket, of `net/tcp_states.h`.
const ESTABLISHED: u8 = 1;
const SYN_RECEIVED: u8 = 3;
const CLOSED: u8 = 7;
const CLOSE_WAIT: u8 = 8;
const LISTENING: u8 = 10;

/// An address and a port. IPv4 is always IPv4, also in a socket of IPv6.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct End {
    address: IpAddr,
    port: u16,
}

impl From<SocketAddr> for End {
    fn from(address: SocketAddr) -> Self {
        End { address: address.ip().to_canonical(), port: address.port() }
    }
}

/// The two ends of a connection, seen from one of them.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
struct Ends {
    local: End,
    remote: End,
}

impl Ends {
    fn mirror(self) -> Ends {
        Ends { local: self.remote, remote: self.local }
    }
}

/// A socket that may have a peer outside, and where to take it from.
struct Inherited {
    pid: i32,
    fd: ForeignRawFd,
    inode: u64,
    /// Which network namespace it is in.
    namespace: u64,
    kind: Kind,
}

enum Kind {
    /// Without `ends` it is one that is being opened.
    Connection { ends: Option<Ends> },
    /// A listening socket with as many connections in its queue.
    Listener { local: End, waiting: u32 },
    /// A connected UDP socket.
    Datagrams { ends: Ends },
}

/// Ends every connection of these processes to the outside, and those that wait in the queues of their
/// listening sockets. Where only accepting can take one from a queue, the processes must be `frozen`, so
/// that none of them takes it first.
pub(super) fn reset(pids: &[i32], frozen: bool, warnings: &mut Vec<String>) {
    reset_with(Diag::open, pids, frozen, warnings);
}

fn reset_with(open: fn() -> io::Result<Diag>, pids: &[i32], frozen: bool, warnings: &mut Vec<String>) {
    let begun = Instant::now();
    let late = |limit, warnings: &mut Vec<String>| {
        let late = begun.elapsed() >= limit;
        if late {
            warnings.push("there are too many inherited sockets: some connections were not reset".into());
        }
        late
    };
    let mut network = None;
    let mut inherited = Vec::new();
    let mut seen = BTreeSet::new();
    'look: for &pid in pids {
        // One that is gone has no connections.
        let Ok(sockets) = sockets(pid) else { continue };
        for (fd, inode) in sockets {
            // The connections found still have to be ended.
            if late(LIMIT / 2, warnings) {
                break 'look;
            }
            // Processes share sockets.
            if seen.insert(inode)
                && let Ok(socket) = take(pid, fd)
            {
                match kind(&socket) {
                    Ok(None) => {}
                    Ok(Some(kind)) => {
                        let network = network.get_or_insert_with(|| Network::new(open));
                        let namespace = network.add_namespace_of(&socket);
                        inherited.push(Inherited { pid, fd, inode, namespace, kind });
                    }
                    Err(error) => warnings.push(format!("a socket of process {pid} is unknown: {error}")),
                }
            }
        }
    }
    let Some(mut network) = network else { return };
    pids.iter().for_each(|pid| network.add_namespace_of_process(*pid));
    network.read(begun + LIMIT, warnings);
    for socket in &inherited {
        if late(LIMIT, warnings) {
            return;
        }
        if let Err(error) = socket.end(&network, frozen) {
            warnings.push(format!("process {}: {error}", socket.pid));
        }
    }
}

impl Inherited {
    /// Ends what it has with the outside.
    fn end(&self, network: &Network, frozen: bool) -> io::Result<()> {
        match &self.kind {
            Kind::Connection { ends } => {
                let known = ends.or_else(|| network.ends_of(self.namespace, self.inode));
                let inside = known.is_some_and(|known| {
                    network.is_inside(self.namespace, known)
                        || ends.is_none() && network.has_address(known.remote.address)
                });
                match inside {
                    true => Ok(()),
                    false => reset_connection(&self.take()?)
                        .map_err(|error| explain("a TCP connection could not be reset", &error)),
                }
            }
            Kind::Listener { local, waiting } => self.clean_queue(network, *local, *waiting, frozen),
            Kind::Datagrams { ends } => match network.has_address(ends.remote.address) {
                true => Ok(()),
                false => self.end_datagrams(network, *ends),
            },
        }
    }

    /// Ends connections with the outside that no process has accepted yet.
    fn clean_queue(&self, network: &Network, local: End, waiting: u32, frozen: bool) -> io::Result<()> {
        let queue = network.queue(self.namespace, local);
        let (inside, outside): (Vec<Ends>, _) =
            queue.into_iter().partition(|ends| network.is_inside(self.namespace, *ends));
        if inside.is_empty() && frozen {
            return empty_queue(&self.take()?, waiting)
                .map_err(|error| explain("waiting TCP connections could not be reset", &error));
        }
        if outside.is_empty() {
            return Ok(());
        }
        let interface = bound_to(&self.take()?);
        network
            .with_diag(self.namespace, |diag| {
                outside.iter().try_for_each(|ends| diag.end_waiting(*ends, interface))
            })
            .map_err(|error| {
                let what = "TCP connections from outside wait beside ones from inside and were not reset";
                explain(&format!("{what} (that takes a kernel with tcp_diag)"), &error)
            })
    }

    fn end_datagrams(&self, network: &Network, ends: Ends) -> io::Result<()> {
        let socket = self.take()?;
        let (interface, cookie) = (bound_to(&socket), sockopt::socket_cookie(&socket)?);
        let ended = network.with_diag(self.namespace, |diag| diag.end(ipproto::UDP, ends, interface, cookie));
        ended.or_else(|error| {
            // Writers get an error from this, readers do not.
            disconnect(&socket)?;
            let what =
                "a UDP socket was disconnected from its peer outside, but a process that reads it waits";
            Err(explain(&format!("{what} (an error takes a kernel with udp_diag)"), &error))
        })
    }

    /// The socket, unless a process that is not frozen has closed it since.
    fn take(&self) -> io::Result<OwnedFd> {
        let socket = take(self.pid, self.fd)?;
        match rustix::fs::fstat(&socket)?.st_ino == self.inode {
            true => Ok(socket),
            false => Err(io::Error::new(io::ErrorKind::NotFound, "a socket was closed meanwhile")),
        }
    }
}

fn explain(what: &str, error: &io::Error) -> io::Error {
    io::Error::new(error.kind(), format!("{what}: {error}"))
}

/// Descriptors of a process that are sockets, each with the socket's inode.
fn sockets(pid: i32) -> io::Result<Vec<(ForeignRawFd, u64)>> {
    let mut sockets = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let inode = target.to_str().and_then(|name| name.strip_prefix("socket:[")?.strip_suffix(']'));
        if let Some(inode) = inode.and_then(|inode| inode.parse().ok())
            && let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok())
        {
            sockets.push((fd, inode));
        }
    }
    Ok(sockets)
}

/// A descriptor of our own for a socket of another process.
fn take(pid: i32, fd: ForeignRawFd) -> io::Result<OwnedFd> {
    let pid = Pid::from_raw(pid).ok_or(io::ErrorKind::InvalidInput)?;
    let process = rustix::process::pidfd_open(pid, PidfdFlags::empty())?;
    Ok(rustix::process::pidfd_getfd(process, fd, PidfdGetfdFlags::empty())?)
}

/// The kind of `socket`; `None` if it can have no peer outside.
fn kind(socket: &OwnedFd) -> io::Result<Option<Kind>> {
    if !matches!(sockopt::socket_domain(socket)?, AddressFamily::INET | AddressFamily::INET6) {
        return Ok(None);
    }
    let end = |address: SocketAddrAny| SocketAddr::try_from(address).ok().map(End::from);
    let local = end(rustix::net::getsockname(socket)?);
    let remote = rustix::net::getpeername(socket).ok().flatten().and_then(end);
    let ends = local.zip(remote).map(|(local, remote)| Ends { local, remote });
    if remote.is_some_and(|remote| remote.address.is_loopback()) {
        return Ok(None);
    }
    Ok(match sockopt::socket_protocol(socket)? {
        Some(ipproto::TCP | ipproto::MPTCP) => match (tcp_info(socket)?, local) {
            ((CLOSED, _) | (LISTENING, 0), _) => None,
            ((LISTENING, waiting), Some(local)) => Some(Kind::Listener { local, waiting }),
            _ => Some(Kind::Connection { ends }),
        },
        Some(ipproto::UDP) => ends.map(|ends| Kind::Datagrams { ends }),
        _ => None,
    })
}

fn reset_connection(socket: &OwnedFd) -> io::Result<()> {
    disconnect(socket).or_else(|_| {
        // A kernel that refuses while a thread waits in the socket, which only one that is not frozen
        // can: to that thread this reads as the end.
        Ok(rustix::net::shutdown(socket, rustix::net::Shutdown::Both)?)
    })
}

/// Resets the first `waiting` connections that no process has accepted yet.
fn empty_queue(listener: &OwnedFd, waiting: u32) -> io::Result<()> {
    for _ in 0..waiting {
        let mut fds = [PollFd::new(listener, PollFlags::IN)];
        sys::poll(&mut fds, Some(Duration::ZERO))?;
        if !fds[0].revents().contains(PollFlags::IN) {
            break;
        }
        let waiting = rustix::net::accept_with(listener, rustix::net::SocketFlags::CLOEXEC)?;
        // Closing with no time left to linger is a reset.
        sockopt::set_socket_linger(&waiting, Some(Duration::ZERO))?;
    }
    Ok(())
}

/// The state of a TCP socket and, if it listens, how many connections wait in its queue.
fn tcp_info(socket: impl AsFd) -> io::Result<(u8, u32)> {
    // SAFETY: the kernel's structure has only numbers, for which zero is a value.
    let mut info: libc::tcp_info = unsafe { std::mem::zeroed() };
    let mut len = size_of::<libc::tcp_info>() as libc::socklen_t;
    // SAFETY: the pointers describe `info`, whose length is `len`; both live through the call.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut info).cast(),
            &raw mut len,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok((info.tcpi_state, info.tcpi_unacked)) }
}

/// The interface that a socket is bound to; zero if it is bound to none.
fn bound_to(socket: impl AsFd) -> u32 {
    let mut interface = 0u32;
    let mut len = size_of::<u32>() as libc::socklen_t;
    // SAFETY: the pointers describe `interface`, whose length is `len`; both live through the call.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_BINDTOIFINDEX,
            (&raw mut interface).cast(),
            &raw mut len,
        )
    };
    if done < 0 { 0 } else { interface }
}

/// Connects a socket to nothing.
fn disconnect(socket: impl AsFd) -> io::Result<()> {
    let nothing = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the pointer and the length describe `nothing`, which lives through the call.
    let done = unsafe {
        libc::connect(
            socket.as_fd().as_raw_fd(),
            &raw const nothing,
            size_of::<libc::sockaddr>() as libc::socklen_t,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

#[cfg(test)]
mod tests;

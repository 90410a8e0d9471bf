//! The state of the guest's network namespaces: their addresses and their TCP connections.
//!
//! Connections are read from `/proc`, which every kernel has. A thread visits each namespace but the agent's:
//! one that no process is in any more still has sockets.

use std::{
    collections::{BTreeMap, BTreeSet},
    fs::{self, File},
    io::{self, BufRead, BufReader},
    net::{IpAddr, Ipv4Addr, Ipv6Addr},
    os::{
        fd::{AsFd, AsRawFd, FromRawFd, OwnedFd},
        linux::fs::MetadataExt,
    },
    path::Path,
    thread,
    time::Instant,
};

use rustix::thread::LinkNameSpaceType;

use super::{CLOSE_WAIT, Diag, ESTABLISHED, End, Ends, LISTENING, SYN_RECEIVED};

/// The network namespaces of a guest.
pub(super) struct Network {
    /// The agent's.
    own: u64,
    others: BTreeMap<u64, OwnedFd>,
    known: BTreeMap<u64, Namespace>,
    /// All TCP connections of all of them.
    connections: BTreeSet<Ends>,
    open_diag: fn() -> io::Result<Diag>,
}

/// The state of one namespace.
#[derive(Default)]
struct Namespace {
    addresses: BTreeSet<IpAddr>,
    /// Connections that are open or being opened.
    connections: Vec<TcpEntry>,
}

/// A line of the kernel's table of TCP sockets.
#[derive(Debug, PartialEq)]
struct TcpEntry {
    ends: Ends,
    state: u8,
    /// Zero if no process has it.
    inode: u64,
}

impl Network {
    pub(super) fn new(open_diag: fn() -> io::Result<Diag>) -> Self {
        let own = inode(Path::new("/proc/thread-self/ns/net")).unwrap_or(0);
        let (others, known, connections) = Default::default();
        Network { own, others, known, connections, open_diag }
    }

    /// The namespace that `socket` is in, which will be read. A kernel without namespaces has one.
    pub(super) fn add_namespace_of(&mut self, socket: &OwnedFd) -> u64 {
        // SAFETY: the call takes no pointer. It gives a new descriptor, which `OwnedFd` alone owns.
        let namespace = unsafe {
            match libc::ioctl(socket.as_raw_fd(), libc::SIOCGSKNS) {
                fd if fd < 0 => return self.own,
                fd => OwnedFd::from_raw_fd(fd),
            }
        };
        let Ok(inode) = rustix::fs::fstat(&namespace).map(|known| known.st_ino) else { return self.own };
        if inode != self.own {
            self.others.entry(inode).or_insert(namespace);
        }
        inode
    }

    /// The namespace of a process will be read: an end that was closed is in none of its descriptors.
    pub(super) fn add_namespace_of_process(&mut self, pid: i32) {
        let path = format!("/proc/{pid}/ns/net");
        // One that is gone has none.
        if let Ok(inode) = inode(Path::new(&path))
            && inode != self.own
            && !self.others.contains_key(&inode)
            && let Ok(file) = File::open(path)
        {
            self.others.insert(inode, file.into());
        }
    }

    /// Reads all namespaces. Unreadable ones count as outside.
    pub(super) fn read(&mut self, until: Instant, warnings: &mut Vec<String>) {
        for inode in [self.own].into_iter().chain(self.others.keys().copied()) {
            if Instant::now() >= until {
                warnings.push("there are too many network namespaces: some were not looked at".into());
                return;
            }
            match self.within(inode, Namespace::read) {
                Ok(namespace) => {
                    self.connections.extend(namespace.connections.iter().map(|known| known.ends));
                    self.known.insert(inode, namespace);
                }
                Err(error) => warnings.push(format!("a network namespace could not be read: {error}")),
            }
        }
    }

    /// Whether both ends of a TCP connection of `namespace` are in the guest.
    pub(super) fn is_inside(&self, namespace: u64, ends: Ends) -> bool {
        let remote = ends.remote.address;
        remote.is_loopback()
            || self.known.get(&namespace).is_some_and(|known| known.addresses.contains(&remote))
            || self.connections.contains(&ends.mirror())
    }

    /// Whether an address belongs to the guest.
    pub(super) fn has_address(&self, address: IpAddr) -> bool {
        address.is_loopback() || self.known.values().any(|known| known.addresses.contains(&address))
    }

    /// The ends of a TCP connection whose socket does not have them any more.
    pub(super) fn ends_of(&self, namespace: u64, inode: u64) -> Option<Ends> {
        let connections = &self.known.get(&namespace)?.connections;
        connections.iter().find(|known| known.inode == inode).map(|known| known.ends)
    }

    /// Connections that wait in the queue of the socket that listens at `local`, or are about to.
    pub(super) fn queue(&self, namespace: u64, local: End) -> Vec<Ends> {
        let connections = self.known.get(&namespace).into_iter().flat_map(|known| &known.connections);
        // A connection that a process closed is in none of these states.
        let waits = connections.filter(|known| {
            known.inode == 0 && matches!(known.state, ESTABLISHED | SYN_RECEIVED | CLOSE_WAIT)
        });
        let ends = waits.map(|known| known.ends).filter(|ends| {
            ends.local.port == local.port
                && (local.address.is_unspecified() || local.address == ends.local.address)
        });
        ends.collect()
    }

    /// Ends sockets of `namespace` that no process gave us.
    pub(super) fn with_diag(
        &self,
        namespace: u64,
        work: impl FnOnce(&Diag) -> io::Result<()>,
    ) -> io::Result<()> {
        work(&self.within(namespace, self.open_diag)?)
    }

    fn within<T: Send>(&self, inode: u64, work: fn() -> io::Result<T>) -> io::Result<T> {
        let Some(namespace) = self.others.get(&inode) else { return work() };
        thread::scope(|scope| {
            let visit = || {
                let kind = Some(LinkNameSpaceType::Network);
                rustix::thread::move_into_link_name_space(namespace.as_fd(), kind)?;
                work()
            };
            let visitor = thread::Builder::new().name("namespace".into()).spawn_scoped(scope, visit)?;
            visitor.join().unwrap_or_else(|_| Err(io::Error::other("its visitor panicked")))
        })
    }
}

impl Namespace {
    /// The state of this thread's namespace.
    fn read() -> io::Result<Namespace> {
        let mut connections = Vec::new();
        for table in ["tcp", "tcp6"] {
            let file = match File::open(format!("/proc/thread-self/net/{table}")) {
                // A kernel without IPv6.
                Err(error) if error.kind() == io::ErrorKind::NotFound && table == "tcp6" => continue,
                file => file?,
            };
            for line in BufReader::new(file).lines() {
                connections.extend(parse(&line?).filter(|known| known.state != LISTENING));
            }
        }
        Ok(Namespace { addresses: addresses()?, connections })
    }
}

fn inode(path: &Path) -> io::Result<u64> {
    Ok(fs::metadata(path)?.st_ino())
}

/// A line of `/proc/net/tcp` or `tcp6`; `None` for the first, which has titles.
fn parse(line: &str) -> Option<TcpEntry> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let ends = Ends { local: parse_end(fields.next()?)?, remote: parse_end(fields.next()?)? };
    let state = u8::from_str_radix(fields.next()?, 16).ok()?;
    let inode = fields.nth(5)?.parse().ok()?;
    Some(TcpEntry { ends, state, inode })
}

/// `0100007F:1B58`: words as this machine has them in memory, and a port as people write it.
fn parse_end(text: &str) -> Option<End> {
    let (address, port) = text.split_once(':')?;
    let word = |at: usize| {
        let digits = address.get(at * 8..at * 8 + 8)?;
        u32::from_str_radix(digits, 16).ok().map(u32::to_ne_bytes)
    };
    let address = match address.len() {
        8 => IpAddr::from(word(0)?),
        32 => {
            let mut bytes = [0; 16];
            for (at, chunk) in bytes.chunks_exact_mut(4).enumerate() {
                chunk.copy_from_slice(&word(at)?);
            }
            IpAddr::from(bytes).to_canonical()
        }
        _ => return None,
    };
    Some(End { address, port: u16::from_str_radix(port, 16).ok()? })
}

/// The addresses of this thread's namespace.
fn addresses() -> io::Result<BTreeSet<IpAddr>> {
    let mut addresses = BTreeSet::new();
    let mut first = std::ptr::null_mut::<libc::ifaddrs>();
    // SAFETY: the pointer leads to `first`, which lives through the call.
    if unsafe { libc::getifaddrs(&raw mut first) } < 0 {
        return Err(io::Error::last_os_error());
    }
    let mut next = first;
    // SAFETY: every pointer of the list leads to an entry or is null, until the list is freed below.
    while let Some(entry) = unsafe { next.as_ref() } {
        next = entry.ifa_next;
        // SAFETY: an entry's address is null or begins with its family.
        let family = unsafe { entry.ifa_addr.as_ref() }.map(|address| i32::from(address.sa_family));
        if family == Some(libc::AF_INET) {
            // SAFETY: by its family this is the type of the address.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in>().read_unaligned() };
            addresses.insert(Ipv4Addr::from(address.sin_addr.s_addr.to_ne_bytes()).into());
        } else if family == Some(libc::AF_INET6) {
            // SAFETY: by its family this is the type of the address.
            let address = unsafe { entry.ifa_addr.cast::<libc::sockaddr_in6>().read_unaligned() };
            addresses.insert(IpAddr::from(Ipv6Addr::from(address.sin6_addr.s6_addr)).to_canonical());
        }
    }
    // SAFETY: the list is the one from above, and nothing of it is used any more.
    unsafe { libc::freeifaddrs(first) };
    Ok(addresses)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn end(text: &str) -> End {
        text.parse::<std::net::SocketAddr>().unwrap().into()
    }

    #[test]
    fn lines_of_the_kernels_tables_are_understood() {
        let line = "   1: 0100007F:1B58 0200A8C0:D431 01 00000000:00000000 00:00000000 00000000  1000 \
                    0 43251 1 00000000a3b5c7d9 20 4 30 10 -1";
        let ends = Ends { local: end("127.0.0.1:7000"), remote: end("192.168.0.2:54321") };
        assert_eq!(parse(line), Some(TcpEntry { ends, state: ESTABLISHED, inode: 43251 }));
        let line = "  12: 0000000000000000FFFF00000100007F:0050 B80D0120000000000000000001000000:0051 08 \
                    00000000:00000000 00:00000000 00000000     0        0 0 1 0000000000000000 20 4 0 10 -1";
        let ends = Ends { local: end("127.0.0.1:80"), remote: end("[2001:db8::1]:81") };
        assert_eq!(parse(line), Some(TcpEntry { ends, state: CLOSE_WAIT, inode: 0 }));
        for other in ["  sl  local_address rem_address   st tx_queue", "", "0: é:1 2:3 01 0 0 0 0 0 0"] {
            assert_eq!(parse(other), None, "{other}");
        }
    }
}

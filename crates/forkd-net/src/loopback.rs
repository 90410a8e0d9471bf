//! The user behind a connection over loopback: the owner of the socket at its other end, as the kernel lists
//! it.
//!
//! The list is `/proc/net/tcp` of this process's network namespace, and `tcp6`, where a socket of IPv6 is that
//! speaks IPv4.

use std::io;
use std::net::{IpAddr, Ipv4Addr, Ipv6Addr, SocketAddr};
use std::os::fd::{AsFd, BorrowedFd};
use std::time::Duration;

use rustix::io::Errno;

/// States of a socket whose process may still wait for an answer: ESTABLISHED, FIN_WAIT1, FIN_WAIT2. In the
/// last two it has closed its own half.
const STATES: [&str; 3] = ["01", "04", "05"];

/// Before a connection that is not in the list is looked for again: the list is not made at one instant, and may
/// pass over one while others come and go.
const LOOK_AGAIN: Duration = Duration::from_millis(5);

/// A socket in the list.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Socket {
    uid: u32,
    /// 0 for one that no process has any more.
    inode: u64,
}

/// The user at the other end of a connection; `None` if that end is closed. Blocks, for milliseconds.
pub fn connected_user(stream: impl AsFd) -> io::Result<Option<u32>> {
    let stream = stream.as_fd();
    let user = look(stream)?;
    if user.is_some() {
        return Ok(user);
    }
    std::thread::sleep(LOOK_AGAIN);
    look(stream)
}

fn look(stream: BorrowedFd<'_>) -> io::Result<Option<u32>> {
    let (Some(here), Some(there)) = (local_address(stream)?, peer_address(stream)?) else { return Ok(None) };
    let Some(first) = find(here, there)? else { return Ok(None) };
    // A socket that is closed becomes root's. It stays closed: a user that still has it now had it a moment
    // ago.
    let second = find(here, there)?;
    // As long as our end is connected, no other connection can use these two addresses. Without this check, a
    // user that connects anew from there could be taken for the one before, whose request is still here.
    let is_connected = peer_address(stream)? == Some(there);
    Ok((second == Some(first) && is_connected).then_some(first.uid))
}

fn local_address(stream: BorrowedFd<'_>) -> io::Result<Option<SocketAddr>> {
    Ok(SocketAddr::try_from(rustix::net::getsockname(stream)?).ok())
}

/// `None` if it is not connected any more.
fn peer_address(stream: BorrowedFd<'_>) -> io::Result<Option<SocketAddr>> {
    match rustix::net::getpeername(stream) {
        Ok(address) => Ok(address.and_then(|address| SocketAddr::try_from(address).ok())),
        Err(Errno::NOTCONN) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The socket at `there` that is connected with `here`, if a process has it.
fn find(here: SocketAddr, there: SocketAddr) -> io::Result<Option<Socket>> {
    for list in ["/proc/self/net/tcp", "/proc/self/net/tcp6"] {
        match std::fs::read_to_string(list) {
            Ok(list) => {
                if let Some(socket) = list.lines().find_map(|line| matching(line, here, there)) {
                    return Ok(Some(socket));
                }
            }
            // Without IPv6 there is no such list.
            Err(error) if error.kind() == io::ErrorKind::NotFound && list.ends_with('6') => {}
            Err(error) => return Err(error),
        }
    }
    Ok(None)
}

/// The socket of a line of the list, if it is that one.
fn matching(line: &str, here: SocketAddr, there: SocketAddr) -> Option<Socket> {
    let mut fields = line.split_ascii_whitespace().skip(1);
    let (local, remote, state) = (fields.next()?, fields.next()?, fields.next()?);
    if address(local)? != canonical(there) || address(remote)? != canonical(here) || !STATES.contains(&state)
    {
        return None;
    }
    // Queues, timers, retransmissions; then the user, a time-out, the inode.
    let socket = Socket { uid: fields.nth(3)?.parse().ok()?, inode: fields.nth(1)?.parse().ok()? };
    (socket.inode != 0).then_some(socket)
}

/// An address as the kernel lists it: words of 32 bits as they are in memory, a colon, the port.
fn address(text: &str) -> Option<(IpAddr, u16)> {
    let (ip, port) = text.split_once(':')?;
    let port = u16::from_str_radix(port, 16).ok()?;
    let word = |index: usize| {
        let digits = ip.get(index * 8..index * 8 + 8)?;
        Some(u32::from_str_radix(digits, 16).ok()?.to_ne_bytes())
    };
    let ip = match ip.len() {
        8 => IpAddr::V4(Ipv4Addr::from(word(0)?)),
        32 => {
            let mut bytes = [0; 16];
            for (index, place) in bytes.chunks_mut(4).enumerate() {
                place.copy_from_slice(&word(index)?);
            }
            IpAddr::V6(Ipv6Addr::from(bytes)).to_canonical()
        }
        _ => return None,
    };
    Some((ip, port))
}

fn canonical(address: SocketAddr) -> (IpAddr, u16) {
    (address.ip().to_canonical(), address.port())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::net::{Shutdown, TcpListener, TcpStream};
    use std::os::fd::OwnedFd;

    /// Both ends of a connection.
    fn pair(listen: &str, connect: &str) -> Option<(TcpStream, TcpStream)> {
        let listener = TcpListener::bind((listen, 0)).ok()?;
        let client = TcpStream::connect((connect, listener.local_addr().ok()?.port())).ok()?;
        Some((client, listener.accept().unwrap().0))
    }

    fn user(server: &TcpStream) -> Option<u32> {
        connected_user(server).unwrap()
    }

    #[test]
    fn a_connection_is_its_users_as_long_as_it_is_open() {
        let us = rustix::process::geteuid().as_raw();
        let (client, server) = pair("127.0.0.1", "127.0.0.1").unwrap();
        assert_eq!(user(&server), Some(us));
        client.shutdown(Shutdown::Write).unwrap();
        assert_eq!(user(&server), Some(us), "half of it is closed");
        drop(client);
        // As the kernel lists it, this one is root's from here on.
        assert_eq!(user(&server), None);
    }

    /// A connection whose client is gone, and another one from where that was; `None` if its place is taken.
    fn succession(listener: &TcpListener) -> Option<(TcpStream, SocketAddr, OwnedFd)> {
        let here = listener.local_addr().unwrap();
        let first = TcpStream::connect(here).unwrap();
        let (server, there) = listener.accept().unwrap();
        // Closed like this, it is gone at once, and its address is free.
        rustix::net::sockopt::set_socket_linger(&first, Some(Duration::ZERO)).unwrap();
        drop(first);
        let again =
            rustix::net::socket(rustix::net::AddressFamily::INET, rustix::net::SocketType::STREAM, None);
        let again = again.unwrap();
        match rustix::net::bind(&again, &there) {
            // Another process on this host got the port, or had it, too.
            Err(Errno::ADDRINUSE) => return None,
            bound => bound.unwrap(),
        }
        rustix::net::connect(&again, &here).unwrap();
        Some((server, there, again))
    }

    #[test]
    fn who_left_is_not_taken_for_who_comes_after_them_from_the_same_place() {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let here = listener.local_addr().unwrap();
        let (server, there, _again) = (0..100).find_map(|_| succession(&listener)).expect("a free port");
        assert_eq!(find(here, there).unwrap().map(|it| it.uid), Some(rustix::process::geteuid().as_raw()));
        assert_eq!(user(&server), None);
    }

    #[test]
    fn a_connection_of_ipv6_is_found_whichever_it_speaks() {
        let us = rustix::process::geteuid().as_raw();
        for (listen, connect) in [("::1", "::1"), ("127.0.0.1", "::ffff:127.0.0.1")] {
            // Not every host has IPv6.
            let Some((_client, server)) = pair(listen, connect) else { continue };
            assert_eq!(user(&server), Some(us), "{listen}");
        }
    }

    #[test]
    fn what_is_listed_is_read_and_what_nobody_has_is_nobodys() {
        let (here, there) = ("127.0.0.1:8889".parse().unwrap(), "127.0.0.1:40000".parse().unwrap());
        let line = |state: &str, inode: &str| {
            format!(
                " 3: 0100007F:9C40 0100007F:22B9 {state} 00000000:00000000 00:00000000 00000000  1000        0 {inode} 1"
            )
        };
        assert_eq!(matching(&line("01", "77"), here, there), Some(Socket { uid: 1000, inode: 77 }));
        for (state, inode) in [("01", "0"), ("06", "77"), ("02", "77"), ("0A", "77")] {
            assert_eq!(matching(&line(state, inode), here, there), None, "{state} {inode}");
        }
        assert_eq!(matching(&line("01", "77"), there, here), None, "this end");
        for broken in
            ["", "sl local_address rem_address st", " 3: 0100007F:9C40 x 01", " 3: é:9C40 0100007F:22B9 01"]
        {
            assert_eq!(matching(broken, here, there), None);
        }
    }
}

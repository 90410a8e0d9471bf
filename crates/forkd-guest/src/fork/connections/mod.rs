//! TCP connections that a child inherited: its peers go on talking with the guest it was copied from,
//! so in the child they are reset at once, before anybody waits for an answer that cannot come.
//!
//! The sockets are taken from the processes that have them, not from the kernel's table of
//! connections: that needs a kernel with a certain option and two more modules, stops at network
//! namespaces, and would end the agent's own connections too. Disconnecting a socket resets its
//! connection and gives whoever reads or writes it `ECONNRESET`.

use std::{
    collections::BTreeSet,
    fs, io,
    os::fd::{AsFd, AsRawFd, OwnedFd},
    time::{Duration, Instant},
};

use rustix::{
    event::{PollFd, PollFlags},
    net::{AddressFamily, SocketType, sockopt},
    process::{ForeignRawFd, Pid, PidfdFlags, PidfdGetfdFlags},
};

use crate::sys;

/// How long all of it may take. Thousands of sockets take a small part of it.
const LIMIT: Duration = Duration::from_secs(5);
/// As many waiting connections as any queue holds.
const MAX_WAITING: usize = 1 << 16;
/// States of a TCP socket, of `net/tcp_states.h`.
const CLOSED: u8 = 7;
const LISTENING: u8 = 10;

/// Resets every TCP connection of these processes. Sockets that listen go on listening; what waits
/// in their queues is reset too if the processes are `frozen`, so that nobody else takes it.
pub(super) fn reset(pids: &[i32], frozen: bool, warnings: &mut Vec<String>) {
    let until = Instant::now() + LIMIT;
    let mut seen = BTreeSet::new();
    for pid in pids {
        // One that is gone has no connections.
        let Ok(sockets) = sockets(*pid) else { continue };
        for (fd, name) in sockets {
            if Instant::now() >= until {
                warnings.push("there are too many inherited sockets: some connections were not reset".into());
                return;
            }
            // Processes share sockets.
            if seen.insert(name)
                && let Ok(socket) = take(*pid, fd)
                && let Err(error) = reset_socket(&socket, frozen)
            {
                warnings.push(format!("a TCP connection of process {pid} could not be reset: {error}"));
            }
        }
    }
}

/// Descriptors of a process that are sockets, each with the name the kernel gives it.
fn sockets(pid: i32) -> io::Result<Vec<(ForeignRawFd, Vec<u8>)>> {
    let mut sockets = Vec::new();
    for entry in fs::read_dir(format!("/proc/{pid}/fd"))? {
        let entry = entry?;
        let Ok(target) = fs::read_link(entry.path()) else { continue };
        let target = target.into_os_string().into_encoded_bytes();
        if target.starts_with(b"socket:")
            && let Some(fd) = entry.file_name().to_str().and_then(|name| name.parse().ok())
        {
            sockets.push((fd, target));
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

fn reset_socket(socket: &OwnedFd, frozen: bool) -> io::Result<()> {
    let domain = sockopt::socket_domain(socket)?;
    let is_tcp = matches!(domain, AddressFamily::INET | AddressFamily::INET6)
        && sockopt::socket_type(socket)? == SocketType::STREAM;
    if !is_tcp {
        return Ok(());
    }
    match tcp_state(socket)? {
        CLOSED => Ok(()),
        LISTENING if frozen => empty_queue(socket),
        LISTENING => Ok(()),
        _ => disconnect(socket).or_else(|_| {
            // A kernel that refuses while somebody waits in the socket, which only one who is not
            // frozen can: to them this reads as the end.
            Ok(rustix::net::shutdown(socket, rustix::net::Shutdown::Both)?)
        }),
    }
}

/// Resets the connections that nobody has accepted yet.
fn empty_queue(listener: &OwnedFd) -> io::Result<()> {
    for _ in 0..MAX_WAITING {
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

/// The state of a TCP socket: the first byte of its `TCP_INFO`.
fn tcp_state(socket: impl AsFd) -> io::Result<u8> {
    let mut state = 0u8;
    let mut len: libc::socklen_t = 1;
    // SAFETY: the pointers describe `state`, whose length is `len`; both live through the call.
    let done = unsafe {
        libc::getsockopt(
            socket.as_fd().as_raw_fd(),
            libc::IPPROTO_TCP,
            libc::TCP_INFO,
            (&raw mut state).cast(),
            &raw mut len,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(state) }
}

/// Connects a socket to nobody.
fn disconnect(socket: impl AsFd) -> io::Result<()> {
    let nobody = libc::sockaddr { sa_family: libc::AF_UNSPEC as libc::sa_family_t, sa_data: [0; 14] };
    // SAFETY: the pointer and the length describe `nobody`, which lives through the call.
    let done = unsafe {
        libc::connect(
            socket.as_fd().as_raw_fd(),
            &raw const nobody,
            size_of::<libc::sockaddr>() as libc::socklen_t,
        )
    };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

//! System calls that neither std nor rustix offers, behind safe functions, and small helpers over
//! those that they do.

use std::{
    fs::File,
    io::{self, Read, Write},
    mem,
    net::SocketAddrV4,
    os::fd::{AsFd, AsRawFd, BorrowedFd, FromRawFd, OwnedFd},
    path::Path,
    time::Duration,
};

use rustix::{
    event::{PollFd, PollFlags, Timespec},
    fs::{Mode, OFlags},
    io::Errno,
    net::{RecvFlags, SendFlags},
};

/// The host's address on vsock.
const HOST_CID: u32 = 2;

/// A connected socket of any family: TCP, vsock or, in tests, unix.
#[derive(Debug)]
pub(crate) struct Socket(OwnedFd);

impl Socket {
    /// Limits each read and write; `None` waits for ever. A time that ran out reads as `WouldBlock`.
    pub(crate) fn set_timeouts(&self, read: Option<Duration>, write: Option<Duration>) -> io::Result<()> {
        use rustix::net::sockopt::{Timeout, set_socket_timeout};
        set_socket_timeout(&self.0, Timeout::Recv, read)?;
        set_socket_timeout(&self.0, Timeout::Send, write)?;
        Ok(())
    }

    /// Whether the peer is gone for good. One that only finished sending is not.
    pub(crate) fn is_gone(&self) -> bool {
        let mut fds = [PollFd::new(&self.0, PollFlags::empty())];
        let polled = rustix::event::poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        polled.is_ok() && fds[0].revents().intersects(PollFlags::HUP | PollFlags::ERR) || self.has_left()
    }

    /// Whether the peer takes nothing any more. A connection that was cut, as all are in a copy of a guest, is
    /// none that the peer has left.
    pub(crate) fn has_left(&self) -> bool {
        // A vsock reports that only to a sender, even one that sends nothing.
        let sent = rustix::net::send(&self.0, &[], SendFlags::NOSIGNAL | SendFlags::DONTWAIT);
        matches!(sent, Err(Errno::PIPE))
    }

    /// Waits until a read returns at once; `false` if it would still block after `wait`.
    pub(crate) fn wait_readable(&self, wait: Duration) -> io::Result<bool> {
        let mut fds = [PollFd::new(&self.0, PollFlags::IN)];
        poll(&mut fds, Some(wait))?;
        Ok(!fds[0].revents().is_empty())
    }

    /// Our address and the peer's, if this is TCP over IPv4.
    pub(crate) fn addresses(&self) -> Option<(SocketAddrV4, SocketAddrV4)> {
        let here = rustix::net::getsockname(&self.0).ok()?;
        let there = rustix::net::getpeername(&self.0).ok()??;
        Some((here.try_into().ok()?, there.try_into().ok()?))
    }

    /// Shuts down the sending direction.
    pub(crate) fn shutdown_write(&self) {
        let _ = rustix::net::shutdown(&self.0, rustix::net::Shutdown::Write);
    }
}

impl AsFd for Socket {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.0.as_fd()
    }
}

#[cfg(test)]
impl From<std::os::unix::net::UnixStream> for Socket {
    fn from(stream: std::os::unix::net::UnixStream) -> Self {
        Socket(stream.into())
    }
}

impl Read for Socket {
    fn read(&mut self, buf: &mut [u8]) -> io::Result<usize> {
        let (n, _) = rustix::io::retry_on_intr(|| rustix::net::recv(&self.0, &mut *buf, RecvFlags::empty()))?;
        Ok(n)
    }
}

impl Write for Socket {
    fn write(&mut self, buf: &[u8]) -> io::Result<usize> {
        Ok(rustix::io::retry_on_intr(|| rustix::net::send(&self.0, buf, SendFlags::NOSIGNAL))?)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// Listens on a vsock port of this guest.
pub(crate) fn listen_vsock(port: u32) -> io::Result<OwnedFd> {
    // SAFETY: plain system call; the result is checked before it is owned.
    let fd = unsafe { libc::socket(libc::AF_VSOCK, libc::SOCK_STREAM | libc::SOCK_CLOEXEC, 0) };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just returned by socket(2) and nothing else owns it.
    let fd = unsafe { OwnedFd::from_raw_fd(fd) };
    // SAFETY: sockaddr_vm is plain data for which all zeroes is a valid value.
    let mut address: libc::sockaddr_vm = unsafe { mem::zeroed() };
    address.svm_family = libc::AF_VSOCK as libc::sa_family_t;
    address.svm_cid = libc::VMADDR_CID_ANY;
    address.svm_port = port;
    // SAFETY: the pointer and the length describe `address`, which lives through the call.
    let bound = unsafe {
        libc::bind(
            fd.as_raw_fd(),
            (&raw const address).cast(),
            mem::size_of::<libc::sockaddr_vm>() as libc::socklen_t,
        )
    };
    if bound < 0 {
        return Err(io::Error::last_os_error());
    }
    rustix::net::listen(&fd, 128)?;
    Ok(fd)
}

/// Accepts one connection. On vsock only the host's: a process of the guest must not command the
/// agent, which is root.
pub(crate) fn accept(listener: BorrowedFd) -> io::Result<Socket> {
    // SAFETY: sockaddr_storage is plain data for which all zeroes is a valid value.
    let mut address: libc::sockaddr_storage = unsafe { mem::zeroed() };
    let mut len = mem::size_of::<libc::sockaddr_storage>() as libc::socklen_t;
    // SAFETY: the pointers describe `address` and `len`, which live through the call.
    let fd = unsafe {
        libc::accept4(listener.as_raw_fd(), (&raw mut address).cast(), &raw mut len, libc::SOCK_CLOEXEC)
    };
    if fd < 0 {
        return Err(io::Error::last_os_error());
    }
    // SAFETY: `fd` was just returned by accept4(2) and nothing else owns it.
    let socket = Socket(unsafe { OwnedFd::from_raw_fd(fd) });
    match i32::from(address.ss_family) {
        libc::AF_VSOCK => {
            // SAFETY: the kernel filled in a sockaddr_vm, by its family; it fits the storage.
            let peer = unsafe { *(&raw const address).cast::<libc::sockaddr_vm>() };
            if peer.svm_cid != HOST_CID {
                return Err(io::Error::from(io::ErrorKind::PermissionDenied));
            }
        }
        libc::AF_INET | libc::AF_INET6 => {
            // On a connection that is reset already these may fail: a read will report it.
            let _ = rustix::net::sockopt::set_tcp_nodelay(&socket.0, true);
            // A peer whose machine vanished is noticed only this way.
            let _ = rustix::net::sockopt::set_socket_keepalive(&socket.0, true);
        }
        _ => {}
    }
    Ok(socket)
}

/// Sets whose permissions the calling thread has on files. The raw calls, because libc's would
/// change the whole process.
pub(crate) fn set_thread_fs_ids(uid: u32, gid: u32) -> io::Result<()> {
    // Without effect, but it returns what is set now: setfsuid(2) reports no errors.
    const ASK: libc::c_long = -1;
    // SAFETY: these calls take plain integers and touch no memory.
    let (gid_now, uid_now) = unsafe {
        libc::syscall(libc::SYS_setfsgid, libc::c_long::from(gid));
        libc::syscall(libc::SYS_setfsuid, libc::c_long::from(uid));
        (libc::syscall(libc::SYS_setfsgid, ASK), libc::syscall(libc::SYS_setfsuid, ASK))
    };
    if gid_now == libc::c_long::from(gid) && uid_now == libc::c_long::from(uid) {
        Ok(())
    } else {
        Err(io::Error::from(io::ErrorKind::PermissionDenied))
    }
}

/// Bytes waiting to be read from a pipe.
pub(crate) fn bytes_waiting(fd: impl AsFd) -> u64 {
    rustix::io::ioctl_fionread(fd).unwrap_or(0)
}

/// Reads a small file of the image, such as `/etc/passwd`. Whatever sits at that path, this neither
/// blocks nor reads more than `limit` bytes.
pub(crate) fn read_small_file(path: &Path, limit: u64) -> io::Result<Vec<u8>> {
    let flags = OFlags::RDONLY | OFlags::CLOEXEC | OFlags::NONBLOCK | OFlags::NOCTTY;
    let file = File::from(rustix::fs::open(path, flags, Mode::empty())?);
    if !file.metadata()?.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    let mut bytes = Vec::new();
    file.take(limit).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Waits until one of `fds` is ready or `wait` is over; a signal ends the wait early.
pub(crate) fn poll(fds: &mut [PollFd], wait: Option<Duration>) -> io::Result<()> {
    let wait = wait.map(|wait| Timespec {
        // No timeout is a century long; the cast must not wrap into the past.
        tv_sec: wait.as_secs().min(1 << 31) as i64,
        tv_nsec: wait.subsec_nanos().into(),
    });
    match rustix::event::poll(fds, wait.as_ref()) {
        Ok(_) | Err(rustix::io::Errno::INTR) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

/// Milliseconds since the kernel started.
pub(crate) fn uptime_ms() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Boottime);
    (now.tv_sec.max(0) as u64).saturating_mul(1000).saturating_add(now.tv_nsec.max(0) as u64 / 1_000_000)
}

/// Whether two secrets are equal, in a time that does not depend on where they differ.
pub(crate) fn equal_secrets(a: &[u8], b: &[u8]) -> bool {
    let differences = a.iter().zip(b).fold(0, |acc, (a, b)| std::hint::black_box(acc | (a ^ b)));
    a.len() == b.len() && std::hint::black_box(differences) == 0
}

//! The ioctls of taps and interfaces, each behind a safe function.

use std::ffi::{c_char, c_short};
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, AsRawFd, BorrowedFd};

/// An interface request for the interface called `name`, which has room for its final NUL.
pub(crate) struct Request(libc::ifreq);

impl Request {
    /// `None` if the name is too long.
    pub(crate) fn new(name: &str) -> Option<Self> {
        // SAFETY: `ifreq` is plain data, for which all zeroes are valid.
        let mut request: libc::ifreq = unsafe { std::mem::zeroed() };
        if name.len() >= request.ifr_name.len() {
            return None;
        }
        for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
            *to = from as c_char;
        }
        Some(Request(request))
    }

    pub(crate) fn flags(mut self, flags: c_short) -> Self {
        self.0.ifr_ifru.ifru_flags = flags;
        self
    }

    pub(crate) fn address(mut self, address: Ipv4Addr) -> Self {
        // SAFETY: `sockaddr_in` is plain data, for which all zeroes are valid.
        let mut socket_address: libc::sockaddr_in = unsafe { std::mem::zeroed() };
        socket_address.sin_family = libc::AF_INET as libc::sa_family_t;
        socket_address.sin_addr.s_addr = u32::from(address).to_be();
        // SAFETY: both types have the same size and no invalid values; the kernel reads the first as
        // the second by its family.
        self.0.ifr_ifru.ifru_addr =
            unsafe { std::mem::transmute::<libc::sockaddr_in, libc::sockaddr>(socket_address) };
        self
    }

    /// Performs the ioctl `number`, one of those that take an `ifreq`, on `fd`.
    pub(crate) fn perform(mut self, fd: impl AsFd, number: InterfaceIoctl) -> io::Result<Self> {
        // SAFETY: these ioctls read and write one `ifreq`, which this is.
        check(unsafe { libc::ioctl(fd.as_fd().as_raw_fd(), number as libc::c_ulong, &raw mut self.0) })?;
        Ok(self)
    }

    pub(crate) fn get_flags(&self) -> c_short {
        // SAFETY: every bit pattern is a valid `c_short`.
        unsafe { self.0.ifr_ifru.ifru_flags }
    }
}

/// The ioctls that take an `ifreq`.
#[derive(Debug, Clone, Copy)]
#[repr(u64)]
pub(crate) enum InterfaceIoctl {
    TunSet = libc::TUNSETIFF,
    GetFlags = libc::SIOCGIFFLAGS,
    SetFlags = libc::SIOCSIFFLAGS,
    SetAddress = libc::SIOCSIFADDR,
    SetNetmask = libc::SIOCSIFNETMASK,
}

/// Sets the size of the header in front of every packet of a tap.
pub(crate) fn set_header_size(tap: BorrowedFd<'_>, size: libc::c_int) -> io::Result<()> {
    // SAFETY: the ioctl reads one `int`, which is there.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETVNETHDRSZ as libc::c_ulong, &raw const size) })
}

/// Declares the offloads that the reader of a tap supports: none.
pub(crate) fn clear_offloads(tap: BorrowedFd<'_>) -> io::Result<()> {
    // SAFETY: the ioctl takes its argument by value.
    check(unsafe { libc::ioctl(tap.as_raw_fd(), libc::TUNSETOFFLOAD as libc::c_ulong, 0 as libc::c_ulong) })
}

fn check(returned: libc::c_int) -> io::Result<()> {
    if returned < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

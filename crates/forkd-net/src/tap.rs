//! A tap: an interface of the host whose cable is a descriptor.

use std::io;
use std::net::Ipv4Addr;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use rustix::fs::{Mode, OFlags};
use rustix::net::{AddressFamily, SocketFlags, SocketType, socket_with};

use crate::sys::{InterfaceIoctl, Request, clear_offloads, set_header_size};
use crate::{Error, MAKING_A_TAP, Result};

/// Bytes in front of every packet, as virtio has them: flags, offload, four lengths, a count.
const HEADER_SIZE: i32 = 12;

/// An interface that lives as long as this, or a copy of its descriptor, does.
#[derive(Debug)]
pub struct Tap {
    name: String,
    fd: OwnedFd,
}

impl Tap {
    /// Makes the interface `name` in the calling thread's network namespace. The descriptor does
    /// not block, and every packet has a virtio header of 12 bytes. The interface is down.
    pub fn create(name: &str) -> Result<Self> {
        let valid = |b: u8| b.is_ascii_alphanumeric() || matches!(b, b'-' | b'_' | b'.');
        let bad = || Error::BadName(name.to_owned());
        // An empty name, or one with a `%`, would have the kernel choose.
        if name.is_empty() || name == "." || name == ".." || !name.bytes().all(valid) {
            return Err(bad());
        }
        let request = Request::new(name).ok_or_else(bad)?;
        let flags = OFlags::RDWR | OFlags::NONBLOCK | OFlags::CLOEXEC;
        let made =
            rustix::fs::open("/dev/net/tun", flags, Mode::empty()).map_err(io::Error::from).and_then(|fd| {
                // Exclusive: never a second queue of an interface that another process made.
                let flags = libc::IFF_TAP | libc::IFF_NO_PI | libc::IFF_VNET_HDR | libc::IFF_TUN_EXCL;
                request.flags(flags as u16 as i16).perform(&fd, InterfaceIoctl::TunSet)?;
                set_header_size(fd.as_fd(), HEADER_SIZE)?;
                clear_offloads(fd.as_fd())?;
                Ok(fd)
            });
        let fd = made.map_err(Error::system(MAKING_A_TAP, name))?;
        Ok(Tap { name: name.to_owned(), fd })
    }

    /// Gives the interface an address and a network, such as `10.42.0.1` and 24, and sets it up.
    pub fn bring_up(&self, address: Ipv4Addr, prefix: u8) -> Result<()> {
        if prefix > 32 {
            return Err(Error::BadAddress(format!("{address}/{prefix}")));
        }
        let netmask = Ipv4Addr::from(u32::MAX.checked_shl(32 - u32::from(prefix)).unwrap_or(0));
        let configured = || -> io::Result<()> {
            let socket = socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?;
            let request = || Request::new(&self.name).ok_or(io::Error::from(rustix::io::Errno::NAMETOOLONG));
            request()?.address(address).perform(&socket, InterfaceIoctl::SetAddress)?;
            request()?.address(netmask).perform(&socket, InterfaceIoctl::SetNetmask)?;
            let flags = request()?.perform(&socket, InterfaceIoctl::GetFlags)?.get_flags();
            let up = flags | libc::IFF_UP as i16;
            request()?.flags(up).perform(&socket, InterfaceIoctl::SetFlags)?;
            Ok(())
        };
        configured().map_err(Error::system("configuring the tap", &self.name))
    }

    /// The interface's name.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// The descriptor alone. The interface goes when its last copy is closed.
    pub fn into_fd(self) -> OwnedFd {
        self.fd
    }
}

impl AsFd for Tap {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.fd.as_fd()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_the_kernel_would_change_are_refused() {
        for bad in ["", "tap%d", "a/b", "..", "a b", "sixteen-letters!", "0123456789abcdef", "ä"] {
            assert!(matches!(Tap::create(bad), Err(Error::BadName(_))), "{bad}");
        }
    }

    #[test]
    fn a_tap_has_its_address_while_its_descriptor_is_open() {
        let name = format!("fk{}", std::process::id() % 1_000_000);
        let tap = match Tap::create(&name) {
            Ok(tap) => tap,
            Err(Error::System { source, .. })
                if matches!(source.kind(), io::ErrorKind::NotFound | io::ErrorKind::PermissionDenied) =>
            {
                // Listed, not hidden: the lab's machine is root and has the module.
                // Past the harness, which swallows what passing tests print.
                let _ = std::io::Write::write_fmt(
                    &mut io::stderr(),
                    format_args!("NOT RUN: a tap has its address: taps cannot be made here: {source}\n"),
                );
                return;
            }
            Err(error) => panic!("{error}"),
        };
        tap.bring_up(Ipv4Addr::new(10, 222, 7, 1), 24).unwrap();
        let interfaces = || std::fs::read_to_string("/proc/net/dev").unwrap();
        assert!(interfaces().contains(&name));
        let routes = std::fs::read_to_string("/proc/net/route").unwrap();
        assert!(routes.lines().any(|line| line.starts_with(&name) && line.contains("0007DE0A")), "{routes}");
        assert!(matches!(Tap::create(&name), Err(Error::System { .. })), "no second owner");
        let fd = tap.into_fd();
        assert!(interfaces().contains(&name));
        drop(fd);
        assert!(!interfaces().contains(&name));
    }
}

//! Addresses of interfaces, set with the old ioctls: no tools of the image are needed.

use std::{
    io, mem,
    net::Ipv4Addr,
    os::fd::{AsRawFd, OwnedFd},
    path::Path,
    time::Duration,
};

use forkd_protocol::init::InterfacePlan;
use rustix::net::{AddressFamily, SocketFlags, SocketType};

use super::wait_for;
use crate::log;

/// How long an interface may take to appear.
const APPEARS: Duration = Duration::from_secs(2);

/// Brings `lo` up and configures the interfaces of the plan that exist. A guest without its network
/// can still be reached, so nothing here is fatal.
pub(super) fn configure(plans: &[InterfacePlan]) {
    if let Err(error) = bring_up("lo") {
        log::error!("cannot bring lo up: {error}");
    }
    for plan in plans {
        if !wait_for(&Path::new("/sys/class/net").join(&plan.name), APPEARS) {
            log::info!("there is no interface {}", plan.name);
            continue;
        }
        if let Err(error) = configure_one(plan) {
            log::error!("cannot configure {} as {}: {error}", plan.name, plan.address);
        }
    }
}

fn configure_one(plan: &InterfacePlan) -> io::Result<()> {
    let (address, mask) = parse_address(&plan.address)
        .ok_or_else(|| io::Error::new(io::ErrorKind::InvalidInput, "not an address such as 10.0.0.2/24"))?;
    set_address(&plan.name, libc::SIOCSIFADDR, address)?;
    set_address(&plan.name, libc::SIOCSIFNETMASK, mask)?;
    bring_up(&plan.name)?;
    if let Some(gateway) = &plan.gateway {
        let gateway = gateway
            .parse()
            .map_err(|_| io::Error::new(io::ErrorKind::InvalidInput, "the gateway is not an IPv4 address"))?;
        add_default_route(gateway)?;
    }
    Ok(())
}

/// `10.0.0.2/24` as address and mask.
fn parse_address(text: &str) -> Option<(Ipv4Addr, Ipv4Addr)> {
    let (address, bits) = text.split_once('/')?;
    let bits: u32 = bits.parse().ok().filter(|bits| *bits <= 32)?;
    let mask = u32::MAX.checked_shl(32 - bits).unwrap_or(0);
    Some((address.parse().ok()?, Ipv4Addr::from_bits(mask)))
}

fn socket() -> io::Result<OwnedFd> {
    Ok(rustix::net::socket_with(AddressFamily::INET, SocketType::DGRAM, SocketFlags::CLOEXEC, None)?)
}

fn request(name: &str) -> io::Result<libc::ifreq> {
    // SAFETY: ifreq is plain data for which all zeroes is a valid value.
    let mut request: libc::ifreq = unsafe { mem::zeroed() };
    if name.len() >= request.ifr_name.len() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "the name is too long"));
    }
    for (to, from) in request.ifr_name.iter_mut().zip(name.bytes()) {
        *to = from as libc::c_char;
    }
    Ok(request)
}

fn ioctl<T>(number: libc::c_ulong, argument: &mut T) -> io::Result<()> {
    let socket = socket()?;
    // SAFETY: every caller passes the structure that its request number takes.
    let done = unsafe { libc::ioctl(socket.as_raw_fd(), number as _, &raw mut *argument) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_address(name: &str, number: libc::c_ulong, address: Ipv4Addr) -> io::Result<()> {
    let mut request = request(name)?;
    request.ifr_ifru.ifru_addr = socket_address(address);
    ioctl(number, &mut request)
}

fn bring_up(name: &str) -> io::Result<()> {
    let mut request = request(name)?;
    ioctl(libc::SIOCGIFFLAGS, &mut request)?;
    // SAFETY: the request above filled in the flags.
    let flags = unsafe { request.ifr_ifru.ifru_flags };
    request.ifr_ifru.ifru_flags = flags | (libc::IFF_UP | libc::IFF_RUNNING) as libc::c_short;
    ioctl(libc::SIOCSIFFLAGS, &mut request)
}

fn add_default_route(gateway: Ipv4Addr) -> io::Result<()> {
    // SAFETY: rtentry is plain data for which all zeroes is a valid value.
    let mut route: libc::rtentry = unsafe { mem::zeroed() };
    route.rt_dst = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_genmask = socket_address(Ipv4Addr::UNSPECIFIED);
    route.rt_gateway = socket_address(gateway);
    route.rt_flags = (libc::RTF_UP | libc::RTF_GATEWAY) as libc::c_ushort;
    match ioctl(libc::SIOCADDRT, &mut route) {
        Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
        other => other,
    }
}

fn socket_address(address: Ipv4Addr) -> libc::sockaddr {
    let mut data = [0; 14];
    // Two bytes of port first.
    for (to, from) in data[2..].iter_mut().zip(address.octets()) {
        *to = from as libc::c_char;
    }
    libc::sockaddr { sa_family: libc::AF_INET as libc::sa_family_t, sa_data: data }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_with_their_masks() {
        let parse = |text| parse_address(text).map(|(address, mask)| (address.to_string(), mask.to_string()));
        assert_eq!(parse("10.42.0.2/24"), Some(("10.42.0.2".into(), "255.255.255.0".into())));
        assert_eq!(parse("10.42.0.2/32").unwrap().1, "255.255.255.255");
        assert_eq!(parse("10.42.0.2/0").unwrap().1, "0.0.0.0");
        for bad in ["", "10.0.0.1", "10.0.0.1/33", "10.0.0.1/-1", "fe80::1/64", "10.0.0/8"] {
            assert_eq!(parse(bad), None, "{bad}");
        }
    }
}

//! What guests may not reach, what an operator opens of it, and how many flows a guest may have.

use std::fmt;
use std::net::Ipv4Addr;
use std::str::FromStr;

use crate::{Error, Result};

/// Where no guest may go: IANA's list of special-purpose IPv4 networks, which has private, shared,
/// link-local (metadata services of clouds), loopback, documentation, benchmarking and reserved ones;
/// multicast; and 168.63.129.16, where Azure tells a machine its secrets.
pub(crate) const FORBIDDEN: &str = "0.0.0.0/8, 10.0.0.0/8, 100.64.0.0/10, 127.0.0.0/8, 168.63.129.16/32, \
                                    169.254.0.0/16, 172.16.0.0/12, 192.0.0.0/24, 192.0.2.0/24, \
                                    192.31.196.0/24, 192.52.193.0/24, 192.88.99.0/24, 192.168.0.0/16, \
                                    192.175.48.0/24, 198.18.0.0/15, 198.51.100.0/24, 203.0.113.0/24, \
                                    224.0.0.0/3";

/// The largest network that counts as one: shorter prefixes are a way to everywhere, such as the halves
/// of the address space that a tunnel takes.
pub(crate) const SHORTEST_PREFIX: u8 = 8;

/// An IPv4 network: its first address and its length.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Prefix {
    address: Ipv4Addr,
    length: u8,
}

impl Prefix {
    /// `None` if the length is none, or if the address is not the network's first.
    pub(crate) fn new(address: Ipv4Addr, length: u8) -> Option<Self> {
        let rest = u32::MAX.checked_shr(length.into()).unwrap_or(0);
        (length <= 32 && u32::from(address) & rest == 0).then_some(Prefix { address, length })
    }

    pub(crate) fn length(self) -> u8 {
        self.length
    }
}

impl fmt::Display for Prefix {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}/{}", self.address, self.length)
    }
}

/// A network that guests may reach although it is private, or the host is attached to it; as an operator
/// writes it: `10.20.0.0/16`, or `10.20.0.5/32:5432` for one port of TCP and UDP.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Opening {
    pub(crate) prefix: Prefix,
    pub(crate) port: Option<u16>,
}

impl FromStr for Opening {
    type Err = Error;

    fn from_str(text: &str) -> Result<Self> {
        let bad = |reason: String| Error::BadOpening { text: text.to_owned(), reason };
        if text.matches(':').count() > 1 {
            return Err(bad("guests have no IPv6".into()));
        }
        let (network, port) = match text.split_once(':') {
            Some((network, port)) => (network, Some(port)),
            None => (text, None),
        };
        let (address, length) = match network.split_once('/') {
            Some((address, length)) => (address, length),
            None => (network, "32"),
        };
        let address: Ipv4Addr =
            address.parse().map_err(|_| bad(format!("`{address}` is not an IPv4 address")))?;
        let length: u8 =
            length.parse().ok().filter(|length| (SHORTEST_PREFIX..=32).contains(length)).ok_or_else(
                || bad(format!("`{length}` is not a prefix length from {SHORTEST_PREFIX} to 32")),
            )?;
        let prefix = Prefix::new(address, length).ok_or_else(|| {
            let first = u32::from(address) & !u32::MAX.checked_shr(length.into()).unwrap_or(0);
            bad(format!("the network that {address} is in begins at {}/{length}", Ipv4Addr::from(first)))
        })?;
        let port = port
            .map(|port| match port.parse() {
                Ok(0) | Err(_) => Err(bad(format!("`{port}` is not a port from 1 to 65535"))),
                Ok(port) => Ok(port),
            })
            .transpose()?;
        Ok(Opening { prefix, port })
    }
}

impl fmt::Display for Opening {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.port {
            Some(port) => write!(f, "{}:{port}", self.prefix),
            None => self.prefix.fmt(f),
        }
    }
}

/// How many flows one slot may have. A flow takes an entry in the host's connection tracking, whose table
/// all share.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct FlowLimits {
    /// At the same time.
    pub at_once: u32,
    /// New ones in a second.
    pub per_sec: u32,
    /// New ones at once, after a rest.
    pub burst: u32,
}

impl Default for FlowLimits {
    fn default() -> Self {
        FlowLimits { at_once: 4096, per_sec: 500, burst: 2000 }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_opening_is_a_network_and_perhaps_a_port() {
        for (written, meant) in [
            ("10.20.0.0/16", "10.20.0.0/16"),
            ("10.20.0.5", "10.20.0.5/32"),
            ("10.20.0.5:5432", "10.20.0.5/32:5432"),
            ("10.0.0.0/8:65535", "10.0.0.0/8:65535"),
        ] {
            assert_eq!(written.parse::<Opening>().unwrap().to_string(), meant);
        }
    }

    #[test]
    fn an_opening_that_makes_no_sense_is_refused_with_the_reason() {
        for (written, reason) in [
            ("", "is not an IPv4 address"),
            ("database", "is not an IPv4 address"),
            ("10.20.0.1/16", "begins at 10.20.0.0/16"),
            ("0.0.0.0/0", "is not a prefix length from 8 to 32"),
            ("10.20.0.0/33", "is not a prefix length"),
            ("10.20.0.0/x", "is not a prefix length"),
            ("10.20.0.0/16:0", "is not a port"),
            ("10.20.0.0/16:65536", "is not a port"),
            ("10.20.0.0/16:", "is not a port"),
            ("fd00::/8", "no IPv6"),
            ("10.20.0.0/16 }; drop", "is not a prefix length"),
        ] {
            let error = written.parse::<Opening>().unwrap_err().to_string();
            assert!(error.contains(reason) && error.contains("such as 10.20.0.0/16"), "{written}: {error}");
        }
    }
}

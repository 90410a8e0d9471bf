//! Which name server guests get: the first one of this host that is reachable from elsewhere.

use std::fs::File;
use std::io::Read;
use std::net::Ipv4Addr;

/// Where resolvers are written, the usual place first. A local stub listens on loopback only; the
/// second place is where the most common stub names the servers behind it.
const FILES: [&str; 2] = ["/etc/resolv.conf", "/run/systemd/resolve/resolv.conf"];
/// Name servers are in the first few lines.
const MAX_SIZE: u64 = 64 << 10;

/// The address of this host's name server, if it has one that guests can use.
pub(crate) fn of_this_host() -> Option<Ipv4Addr> {
    FILES.iter().find_map(|file| {
        let mut text = Vec::new();
        File::open(file).ok()?.take(MAX_SIZE).read_to_end(&mut text).ok()?;
        first(&String::from_utf8_lossy(&text))
    })
}

/// The first IPv4 name server that is not on loopback.
fn first(text: &str) -> Option<Ipv4Addr> {
    text.lines()
        .filter_map(|line| {
            line.trim_start().strip_prefix("nameserver")?.split_whitespace().next()?.parse().ok()
        })
        .find(|address: &Ipv4Addr| !address.is_loopback() && !address.is_unspecified())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_name_server_that_is_not_on_loopback_is_used() {
        let text = "# a comment\nsearch example\nnameserver ::1\nnameserver 127.0.0.53\n nameserver\t192.0.2.7 \nnameserver 192.0.2.8\n";
        assert_eq!(first(text), Some(Ipv4Addr::new(192, 0, 2, 7)));
    }

    #[test]
    fn a_host_with_only_a_stub_has_none() {
        assert_eq!(first("nameserver 127.0.0.53\noptions edns0\n"), None);
        assert_eq!(first("nameserver\nnameserver 0.0.0.0\nnameserver x; drop\n"), None);
    }
}

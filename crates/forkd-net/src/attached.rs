//! The networks this host is directly attached to, and the thread that keeps the rules up to date with
//! them.
//!
//! A network is attached if the main routing table has a route to it without gateway. Other routing tables do not count.
//! The thread sees a new network after a few seconds.

use std::collections::BTreeSet;
use std::io;
use std::net::Ipv4Addr;
use std::sync::mpsc::{self, RecvTimeoutError};
use std::thread::JoinHandle;
use std::time::Duration;

use crate::egress::{Prefix, SHORTEST_PREFIX};
use crate::nft::{self, Nft};
use crate::slot::PREFIX;

/// Between two looks at the routing table.
const EVERY: Duration = Duration::from_secs(2);
/// Flags of routes, part of the kernel's interface (linux/route.h).
const UP: u32 = 0x1;
const THROUGH_GATEWAY: u32 = 0x2;
const REJECT: u32 = 0x200;

/// The networks that the calling thread's namespace is attached to, cables to slots aside.
pub(crate) fn networks() -> io::Result<BTreeSet<Prefix>> {
    Ok(in_table(&std::fs::read_to_string("/proc/thread-self/net/route")?))
}

/// Those in the text of a routing table. The first line names the columns, and parses as no route.
fn in_table(table: &str) -> BTreeSet<Prefix> {
    table.lines().filter_map(in_line).collect()
}

fn in_line(line: &str) -> Option<Prefix> {
    let columns: Vec<&str> = line.split_whitespace().collect();
    let number = |column: usize| u32::from_str_radix(columns.get(column)?, 16).ok();
    // Addresses are in the order of the network, read as numbers of this computer.
    let (destination, mask) = (u32::from_be(number(1)?), u32::from_be(number(7)?));
    let flags = number(3)?;
    let is_attached = flags & UP != 0 && flags & (THROUGH_GATEWAY | REJECT) == 0;
    let prefix = Prefix::new(Ipv4Addr::from(destination), mask.leading_ones() as u8)?;
    let counts = is_attached && prefix.length() >= SHORTEST_PREFIX && !columns.first()?.starts_with(PREFIX);
    counts.then_some(prefix)
}

/// A thread that looks at the routing table now and then. Dropped, it ends.
#[derive(Debug)]
pub(crate) struct Watch {
    /// Never sent to: its end is the signal.
    stop: Option<mpsc::Sender<()>>,
    thread: Option<JoinHandle<()>>,
}

impl Watch {
    /// Keeps the rules of the calling thread's namespace up to date, which know `networks` already.
    pub(crate) fn start(nft: Nft, networks: BTreeSet<Prefix>) -> io::Result<Self> {
        let (stop, stopped) = mpsc::channel();
        let thread = std::thread::Builder::new().name("network-attached".into()).spawn(move || {
            let mut known = networks;
            while stopped.recv_timeout(EVERY) == Err(RecvTimeoutError::Timeout) {
                let updated = self::networks().map_err(|error| error.to_string()).and_then(|networks| {
                    if networks != known {
                        let text = nft::attached_networks(&networks);
                        nft.load(&text).map_err(|error| error.to_string())?;
                        tracing::info!(count = networks.len(), "networks this host is attached to changed");
                        known = networks;
                    }
                    Ok(())
                });
                if let Err(error) = updated {
                    tracing::warn!(error, "cannot keep guests from networks this host is newly attached to");
                }
            }
        })?;
        Ok(Watch { stop: Some(stop), thread: Some(thread) })
    }
}

impl Drop for Watch {
    fn drop(&mut self) {
        drop(self.stop.take());
        if let Some(thread) = self.thread.take() {
            // It does not panic; and if it did, there is nothing left to do for it.
            let _ = thread.join();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn networks_without_a_gateway_are_attached_and_nothing_else_is() {
        let table = "Iface\tDestination\tGateway\tFlags\tRefCnt\tUse\tMetric\tMask\tMTU\tWindow\tIRTT\n\
                     eth0\t00000000\t0102A8C0\t0003\t0\t0\t0\t00000000\t0\t0\t0\n\
                     eth0\t0002A8C0\t00000000\t0001\t0\t0\t0\t00FFFFFF\t0\t0\t0\n\
                     eth0\t00000A0A\t0102A8C0\t0003\t0\t0\t0\t0000FFFF\t0\t0\t0\n\
                     eth0\t01020304\t00000000\t0005\t0\t0\t0\tFFFFFFFF\t0\t0\t0\n\
                     tun0\t00000000\t00000000\t0001\t0\t0\t0\t00000080\t0\t0\t0\n\
                     *\t0000000B\t00000000\t0201\t0\t0\t0\t000000FF\t0\t0\t0\n\
                     forkd-0\t00002B0A\t00000000\t0001\t0\t0\t0\tFCFFFFFF\t0\t0\t0\n\
                     garbage\n";
        let found: Vec<_> = in_table(table).iter().map(ToString::to_string).collect();
        assert_eq!(found, ["4.3.2.1/32", "192.168.2.0/24"]);
    }
}

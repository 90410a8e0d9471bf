//! The other end of a connection: its address or, for the unix socket, the user id that the kernel reports.

use std::fmt;
use std::net::SocketAddr;

/// The other end of a connection; in the extensions of every request that comes over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    Tcp(SocketAddr),
    Unix {
        /// The user id of the process that connected.
        uid: u32,
    },
}

impl fmt::Display for Peer {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Peer::Tcp(address) => address.fmt(f),
            Peer::Unix { uid } => write!(f, "unix:uid={uid}"),
        }
    }
}

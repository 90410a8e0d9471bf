//! Who is at the other end of a connection, as far as the kernel knows.

use std::fmt;
use std::net::SocketAddr;

/// The other end of a connection; in the extensions of every request that comes over it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Peer {
    Tcp(SocketAddr),
    Unix {
        /// The user who connected.
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

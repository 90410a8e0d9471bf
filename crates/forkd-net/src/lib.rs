//! The host's end of a guest's network.
//!
//! A [`Slot`] is the network of one sandbox: a namespace of its own with a tap in it, whose other end is a
//! descriptor for a monitor. All slots look the same from inside (the guest is always [`GUEST_ADDRESS`], its
//! gateway and name server always [`GATEWAY_ADDRESS`]), so that a forked guest need not be reconfigured; each
//! has an outer address of its own, which its traffic is translated to.
//!
//! A [`Network`] makes slots and recognises those a killed process left behind; a [`Pool`] makes them in
//! advance. [`Tap`] is the interface alone, without a namespace.
//!
//! All calls need root, except the use of a tap and [`connected_user`], which uses no slots. Every call blocks. No code
//! here handles guests, sandboxes or monitors: the caller names the slots in use.

mod attached;
mod egress;
mod leftovers;
mod link;
mod loopback;
mod namespace;
mod network;
mod nft;
mod pool;
mod resolver;
mod slot;
mod sys;
mod tap;

use std::net::Ipv4Addr;

pub use egress::{FlowLimits, Opening};
pub use leftovers::{Leftovers, leftovers, remove_namespace, remove_rules};
pub use loopback::connected_user;
pub use network::{Network, NetworkConfig};
pub use pool::Pool;
pub use slot::{Slot, Traffic, traffic};
pub use tap::Tap;

/// The address of every guest in its slot.
pub const GUEST_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 42, 0, 2);
/// The address of every guest's gateway and name server.
pub const GATEWAY_ADDRESS: Ipv4Addr = Ipv4Addr::new(10, 42, 0, 1);
/// The prefix length of the network both are in.
pub const GUEST_PREFIX: u8 = 24;
/// The hardware address that every guest's interface must have: the slot has a fixed entry and never asks.
pub const GUEST_MAC: [u8; 6] = [0x06, 0xfc, 0x0a, 0x2a, 0x00, 0x02];
/// The hardware address of every gateway: a forked guest remembers its parent's.
pub const GATEWAY_MAC: [u8; 6] = [0x06, 0xfc, 0x0a, 0x2a, 0x00, 0x01];

/// Result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why a part of the network could not be made or configured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name cannot be an interface's.
    #[error("`{0}` cannot be the name of an interface: give 1 to 15 letters, digits, '-', '_' or '.'")]
    BadName(String),
    /// An address or prefix that makes no sense.
    #[error("`{0}` is not an address with a prefix length, such as 10.42.0.1/24")]
    BadAddress(String),
    /// This network cannot be split into slots.
    #[error(
        "{0} cannot be the outer network of slots: give its first address and a length from 8 to 28, such as 10.43.0.0/16, apart from 10.42.0.0/24"
    )]
    BadOuterNetwork(String),
    /// The text names no network that can be opened for guests.
    #[error(
        "`{text}` cannot be opened for guests: {reason}; give a network and perhaps a port, such as 10.20.0.0/16 or 10.20.0.5/32:5432"
    )]
    BadOpening {
        /// The given text.
        text: String,
        /// The fault in it.
        reason: String,
    },
    /// Not root.
    #[error("network slots need root: run as root, or without network")]
    NotRoot,
    /// All slots are in use.
    #[error("all {0} network slots are in use: end sandboxes, or configure a larger outer network")]
    Full(u32),
    /// The name is not that of a slot that can be adopted.
    #[error("`{name}` is not a network slot to adopt: {reason}")]
    BadSlot {
        /// The name.
        name: String,
        /// The fault in it.
        reason: &'static str,
    },
    /// The program `nft` did not accept the rules, or did not run.
    #[error("loading packet filter rules with nft failed: {0}")]
    Nft(String),
    /// The kernel refused.
    #[error("{doing} {name} failed{hint}", hint = hint(.doing, .source))]
    System {
        /// The failed step.
        doing: &'static str,
        /// On what.
        name: String,
        /// Why.
        source: std::io::Error,
    },
}

impl Error {
    /// Makes the error of a system call, as `map_err` wants it.
    pub(crate) fn system<E: Into<std::io::Error>>(
        doing: &'static str,
        name: &str,
    ) -> impl FnOnce(E) -> Error {
        move |source| Error::System { doing, name: name.to_owned(), source: source.into() }
    }
}

/// The step that fails on a kernel without taps.
pub(crate) const MAKING_A_TAP: &str = "making the tap";

/// The fix for the failures that have a common one.
fn hint(doing: &str, error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => " (run as root)",
        std::io::ErrorKind::NotFound if doing == MAKING_A_TAP => " (load the `tun` kernel module)",
        std::io::ErrorKind::ResourceBusy => " (it is in use)",
        _ => "",
    }
}

//! The host's end of a guest's network.
//!
//! So far this is one thing: a [`Tap`], a network interface whose other end is a descriptor that a
//! monitor can be given. It needs the right to configure the network (`CAP_NET_ADMIN`); what it
//! hands out does not. This crate knows nothing of guests, sandboxes or policies.

mod sys;
mod tap;

pub use tap::Tap;

/// Result with this crate's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// Why an interface could not be made or configured.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The name cannot be an interface's.
    #[error("`{0}` cannot be the name of an interface: give 1 to 15 letters, digits, '-', '_' or '.'")]
    BadName(String),
    /// An address or prefix that makes no sense.
    #[error("`{0}` is not an address with a prefix length, such as 10.42.0.1/24")]
    BadAddress(String),
    /// The kernel refused.
    #[error("{doing} of interface {name} failed{hint}", hint = hint(.source))]
    System {
        /// What was tried.
        doing: &'static str,
        /// On which interface.
        name: String,
        /// Why.
        source: std::io::Error,
    },
}

/// The fix for the failures that have a common one.
fn hint(error: &std::io::Error) -> &'static str {
    match error.kind() {
        std::io::ErrorKind::PermissionDenied => " (run as root)",
        std::io::ErrorKind::NotFound => " (load the `tun` kernel module)",
        std::io::ErrorKind::ResourceBusy => " (it is in use: choose another name)",
        _ => "",
    }
}

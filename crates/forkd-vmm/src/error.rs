//! Errors of a monitor, one variant for each way a caller reacts.

use std::error::Error as _;
use std::fmt::Write as _;
use std::io;

/// Why a VM could not be built or run. Texts name the remedy; causes are chained.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The request cannot be met: another one may be.
    #[error("{0}")]
    Config(String),
    /// The kernel's file does not hold a kernel this monitor can start.
    #[error("not a Linux kernel: {0}; give an x86-64 vmlinux (ELF) or bzImage")]
    NotAKernel(String),
    /// KVM refused something every working KVM does.
    #[error("KVM refused {call}; `forkd doctor` checks the host")]
    Kvm {
        /// The ioctl's name.
        call: &'static str,
        /// Its errno.
        source: kvm_ioctls::Error,
    },
    /// The operating system refused something.
    #[error("cannot {what}")]
    System {
        /// The failed step, to follow "cannot".
        what: &'static str,
        /// Why.
        source: io::Error,
    },
}

/// A result of this crate.
pub type Result<T> = std::result::Result<T, Error>;

impl Error {
    /// For `map_err`: the ioctl `call` failed.
    pub fn kvm(call: &'static str) -> impl FnOnce(kvm_ioctls::Error) -> Error {
        move |source| Error::Kvm { call, source }
    }

    /// For `map_err`: we cannot do `what`.
    pub fn system<E: Into<io::Error>>(what: &'static str) -> impl FnOnce(E) -> Error {
        move |source| Error::System { what, source: source.into() }
    }

    /// The error and its causes in one line, for a peer that gets text only.
    pub fn chain(&self) -> String {
        let mut text = self.to_string();
        let mut cause = self.source();
        while let Some(error) = cause {
            let _ = write!(text, ": {error}");
            cause = error.source();
        }
        text
    }
}

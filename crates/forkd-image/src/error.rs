//! Errors, one variant for each way a caller reacts.

use std::io;
use std::path::{Path, PathBuf};

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// An image, a kernel or an initramfs could not be found or made. Every message names the failure and, where
/// there is one, the remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing of that name is in the library.
    #[error("{0}")]
    NotFound(String),
    /// Invalid input: a bad name, a broken tar, a file that is no kernel.
    #[error("{0}")]
    Invalid(String),
    /// The host lacks something: a program, a permission, a package source.
    #[error("{0}")]
    Host(String),
    /// A program of the host failed; its last output is in the message.
    #[error("{0}")]
    Tool(String),
    /// Reading or writing failed.
    #[error("cannot {doing} {}{}", path.display(), hint(source))]
    Io {
        /// The failed step, to follow "cannot".
        doing: &'static str,
        /// On which file or folder.
        path: PathBuf,
        /// Why it failed.
        source: io::Error,
    },
}

impl Error {
    /// For `map_err`: gives an I/O error its place.
    pub(crate) fn io<E: Into<io::Error>>(doing: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { doing, path, source: source.into() }
    }
}

/// The fix for the I/O errors that have one.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (free some space, or set FORKD_DATA_DIR to a folder on a larger disk)"
        }
        io::ErrorKind::ReadOnlyFilesystem => " (set FORKD_DATA_DIR to a folder that can be written)",
        io::ErrorKind::PermissionDenied => {
            " (run as its owner or as root, or set FORKD_DATA_DIR to a folder of your own)"
        }
        _ => "",
    }
}

//! Errors, one variant for each way a caller reacts.

use std::io;
use std::path::{Path, PathBuf};

/// `Result` with this crate's [`Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// A snapshot could not be found, made or used. Every message names the failure and, where there is one, the
/// remedy.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Invalid input: a bad tag, a bad file name, properties that contradict each other.
    #[error("{0}")]
    Invalid(String),
    /// There is no snapshot of that tag.
    #[error("{0}")]
    NotFound(String),
    /// The tag is taken.
    #[error("{0}")]
    Exists(String),
    /// The snapshot is there and cannot be used: a file is missing, truncated or edited, or it is
    /// from another version. The message names the file.
    #[error("{message}")]
    Unusable {
        /// The tag of the damaged snapshot. It may differ from the tag of the call, such as for a branch whose parent is
        /// damaged.
        tag: String,
        /// The failure and the remedy.
        message: String,
    },
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
    /// The database is of a newer version.
    #[error("{0}")]
    Newer(String),
    /// The database failed.
    #[error("cannot {what}: {source}")]
    Database {
        /// The failed step, to follow "cannot".
        what: &'static str,
        /// Why it failed.
        source: rusqlite::Error,
    },
}

impl Error {
    /// For `map_err`: gives an I/O error its place.
    pub(crate) fn io<E: Into<io::Error>>(doing: &'static str, path: &Path) -> impl FnOnce(E) -> Error {
        let path = path.to_owned();
        move |source| Error::Io { doing, path, source: source.into() }
    }

    /// The message with all its causes.
    pub(crate) fn full(&self) -> String {
        match self {
            Error::Io { source, .. } => format!("{self}: {source}"),
            _ => self.to_string(),
        }
    }

    /// The snapshot `tag` cannot be used, because of `why`.
    pub(crate) fn unusable(tag: &str, why: impl std::fmt::Display) -> Error {
        let message = format!(
            "snapshot {tag} cannot be used: {why}; remove it with `forkd rmi {tag}` and make it again, \
             with `forkd snapshot` or `forkd branch`"
        );
        Error::Unusable { tag: tag.to_owned(), message }
    }
}

/// The fix for the I/O errors that have one.
fn hint(error: &io::Error) -> &'static str {
    match error.kind() {
        io::ErrorKind::StorageFull | io::ErrorKind::QuotaExceeded => {
            " (free some space, for example with `forkd rmi`, or set FORKD_DATA_DIR to a folder on a \
             larger disk)"
        }
        io::ErrorKind::ReadOnlyFilesystem => " (set FORKD_DATA_DIR to a folder that can be written)",
        io::ErrorKind::PermissionDenied => {
            " (run as its owner or as root, or set FORKD_DATA_DIR to a folder of your own)"
        }
        _ => "",
    }
}

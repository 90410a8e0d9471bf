//! The daemon's unix socket. It has the right permissions from the first moment; it replaces the socket of a dead
//! daemon, but never that of a running one.

use std::io;
use std::os::unix::fs::{FileTypeExt, MetadataExt, PermissionsExt};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::{Path, PathBuf};

use crate::error::{Code, Error, Result};
use crate::host::groups;
use crate::util::fs::make_private_dir;

/// Members of this group may use the socket.
pub(crate) const GROUP: &str = "forkd";

/// A listening socket with a name. Dropping it removes the name, unless another process has replaced the socket.
#[derive(Debug)]
pub(crate) struct NamedSocket {
    path: PathBuf,
    inode: u64,
}

/// Listens at `path`. Blocks.
pub(crate) fn listen(path: &Path) -> Result<(NamedSocket, UnixListener)> {
    refuse_if_taken(path)?;
    let failed = |error: io::Error| Error::host(format!("cannot listen on {}", path.display()), error);
    if let Some(parent) = path.parent() {
        std::fs::create_dir_all(parent).map_err(failed)?;
    }
    // A socket is open to all users from `bind` to `chmod`. So it is created in a private folder and moved
    // into place when it is ready, over a stale one if need be.
    let private = path.with_extension(format!("new-{}", std::process::id()));
    // A daemon with the same pid, killed at this point, may have left one: pids repeat after a boot.
    let _ = std::fs::remove_dir_all(&private);
    make_private_dir(&private).map_err(failed)?;
    let made = make(&private.join("s"), path);
    let _ = std::fs::remove_dir_all(&private);
    made.map_err(failed)
}

fn make(temporary: &Path, path: &Path) -> io::Result<(NamedSocket, UnixListener)> {
    let listener = UnixListener::bind(temporary)?;
    listener.set_nonblocking(true)?;
    std::fs::set_permissions(temporary, std::fs::Permissions::from_mode(0o660))?;
    // A failed lookup is no reason not to start: root can use the socket.
    let group = groups::id_of(GROUP).unwrap_or_else(|error| {
        tracing::warn!(%error, group = GROUP, "group of the socket not found: only root may use it");
        None
    });
    if let Some(group) = group {
        match std::os::unix::fs::chown(temporary, None, Some(group)) {
            Err(error) if error.kind() == io::ErrorKind::PermissionDenied => {
                tracing::warn!(
                    group = GROUP,
                    "group of the socket not set: only root or a member of the group can"
                );
            }
            other => other?,
        }
    }
    let inode = std::fs::symlink_metadata(temporary)?.ino();
    std::fs::rename(temporary, path)?;
    Ok((NamedSocket { path: path.to_owned(), inode }, listener))
}

fn refuse_if_taken(path: &Path) -> Result<()> {
    let Ok(metadata) = std::fs::symlink_metadata(path) else { return Ok(()) };
    if !metadata.file_type().is_socket() {
        let text = format!("{} exists and is not a socket; name another, or remove it", path.display());
        return Err(Error::new(Code::AddressInUse, text));
    }
    match UnixStream::connect(path) {
        Ok(_) => {
            let text =
                format!("another daemon listens on {}; stop it, or name another socket", path.display());
            Err(Error::new(Code::AddressInUse, text))
        }
        Err(_) => Ok(()),
    }
}

/// Whether a user is a member of the group [`GROUP`]. Blocks.
pub(crate) fn has_member(uid: u32) -> io::Result<bool> {
    groups::has_member(GROUP, uid)
}

impl Drop for NamedSocket {
    fn drop(&mut self) {
        if std::fs::symlink_metadata(&self.path).is_ok_and(|metadata| metadata.ino() == self.inode) {
            let _ = std::fs::remove_file(&self.path);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_dead_daemons_socket_is_replaced_and_a_living_ones_is_not() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forkd.sock");
        drop(UnixListener::bind(&path).unwrap());
        let half_made = path.with_extension(format!("new-{}", std::process::id()));
        std::fs::create_dir(&half_made).unwrap();
        drop(UnixListener::bind(half_made.join("s")).unwrap());
        let (named, listener) = listen(&path).unwrap();
        assert_eq!(std::fs::metadata(&path).unwrap().mode() & 0o777, 0o660);
        assert!(listen(&path).unwrap_err().code() == Code::AddressInUse);
        drop((named, listener));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 0, "nothing is left");
    }

    #[test]
    fn a_file_that_is_not_a_socket_is_left_alone() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("forkd.sock");
        std::fs::write(&path, "precious").unwrap();
        assert!(listen(&path).is_err());
        assert_eq!(std::fs::read_to_string(&path).unwrap(), "precious");
    }
}

//! Disk layers: files without a name that take a guest's disk writes.

use std::os::fd::OwnedFd;
use std::path::Path;

use crate::error::{Error, Result};
use crate::util::fs::create;

/// An empty file on the file system of `folder` for a guest's disk writes. It has no name, so the kernel removes it
/// with the last process that has it open, even if the daemon dies.
pub(crate) fn layer(folder: &Path) -> Result<OwnedFd> {
    use rustix::fs::{Mode, OFlags};
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(layer) => Ok(layer),
        // A file system without such files: create a file and remove its name at once.
        Err(rustix::io::Errno::OPNOTSUPP | rustix::io::Errno::ISDIR) => {
            let name = crate::util::random::new_id(".layer-")?;
            let layer = file(folder, &name)?;
            let _ = std::fs::remove_file(folder.join(name));
            Ok(layer)
        }
        Err(error) => Err(Error::host(format!("cannot create a disk layer in {}", folder.display()), error)),
    }
}

/// The empty file `name` in `folder`.
pub(crate) fn file(folder: &Path, name: &str) -> Result<OwnedFd> {
    let path = folder.join(name);
    let made = create(&path).map_err(|error| Error::host(format!("cannot create {}", path.display()), error));
    made.map(OwnedFd::from)
}

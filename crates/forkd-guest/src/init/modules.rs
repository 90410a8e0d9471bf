//! Kernel modules, from the initramfs.

use std::{
    fs::File,
    path::{Component, Path},
};

use rustix::io::Errno;

use crate::log;

/// Where they are.
const FOLDER: &str = "/forkd/modules";
/// `MODULE_INIT_COMPRESSED_FILE`: the kernel unpacks.
const COMPRESSED: i32 = 4;

/// Loads modules in the order given. A failure is only logged: if the module's device is needed, that fails
/// later, and the log has the reason.
pub(super) fn load_all(names: &[String]) {
    for name in names {
        if let Err(error) = load(name) {
            log::error!("cannot load the module {name}: {error}");
        }
    }
}

fn load(name: &str) -> std::io::Result<()> {
    // The plan is the host's, but a name is a name and not a path.
    if !Path::new(name).components().eq([Component::Normal(name.as_ref())]) {
        return Err(std::io::Error::new(std::io::ErrorKind::InvalidInput, "not a file name"));
    }
    let file = File::open(Path::new(FOLDER).join(name))?;
    let flags = if name.ends_with(".ko") { 0 } else { COMPRESSED };
    match rustix::system::finit_module(&file, c"", flags) {
        // Built in, or loaded already.
        Ok(()) | Err(Errno::EXIST) => Ok(()),
        Err(errno) => Err(errno.into()),
    }
}

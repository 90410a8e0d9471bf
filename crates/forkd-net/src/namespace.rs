//! Network namespaces that have a name: a file somewhere that the namespace is mounted on.
//!
//! The mount keeps a namespace alive without processes in it, and is how it is found again after a crash. A
//! namespace is only ever entered by a thread that ends in it, so that no other work can happen in the wrong
//! one.

use std::fs::File;
use std::io;
use std::os::fd::AsFd;
use std::path::Path;

use rustix::io::Errno;
use rustix::mount::UnmountFlags;
use rustix::thread::{LinkNameSpaceType, UnshareFlags};

/// The calling thread's network namespace.
const CURRENT: &str = "/proc/thread-self/ns/net";
/// The type that `fstatfs` returns for a file on which a namespace is mounted.
const NSFS_MAGIC: i64 = 0x6e73_6673;

/// The calling thread's network namespace.
pub(crate) fn current() -> io::Result<File> {
    File::open(CURRENT)
}

/// Does `work` in a new namespace, which goes when nothing refers to it any more.
pub(crate) fn in_new<T: Send>(work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_own_thread(|| {
        // SAFETY: a new network namespace takes no descriptor and no memory away; it concerns this thread
        // alone.
        unsafe { rustix::thread::unshare_unsafe(UnshareFlags::NEWNET) }?;
        Ok(work())
    })
}

/// Does `work` in the namespace mounted on `file`.
pub(crate) fn inside<T: Send>(file: &Path, work: impl FnOnce() -> T + Send) -> io::Result<T> {
    on_own_thread(|| {
        let namespace = File::open(file)?;
        rustix::thread::move_into_link_name_space(namespace.as_fd(), Some(LinkNameSpaceType::Network))?;
        Ok(work())
    })
}

/// Mounts the calling thread's namespace on a file that exists.
pub(crate) fn mount_current(file: &Path) -> io::Result<()> {
    Ok(rustix::mount::mount_bind(CURRENT, file)?)
}

/// Whether a namespace is mounted on the file.
pub(crate) fn is_mounted(file: &Path) -> io::Result<bool> {
    match rustix::fs::statfs(file) {
        Ok(stat) => Ok(stat.f_type == NSFS_MAGIC),
        Err(Errno::NOENT) => Ok(false),
        Err(error) => Err(error.into()),
    }
}

/// Takes the name from a namespace. One that has none has lost it.
///
/// Other mount namespaces may have copies of the mount: unlinking the file ends those too.
pub(crate) fn remove(file: &Path) -> io::Result<()> {
    while is_mounted(file)? {
        rustix::mount::unmount(file, UnmountFlags::DETACH)?;
    }
    match std::fs::remove_file(file) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Sets a kernel parameter of the calling thread's namespace, such as `ipv4/ip_forward`.
pub(crate) fn set_parameter(name: &str, value: &str) -> io::Result<()> {
    std::fs::write(Path::new("/proc/sys/net").join(name), value)
}

/// Without IPv6 in the kernel there is nothing to switch off.
pub(crate) fn disable_ipv6(interface: &str) -> io::Result<()> {
    match set_parameter(&format!("ipv6/conf/{interface}/disable_ipv6"), "1") {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

fn on_own_thread<T: Send>(work: impl FnOnce() -> io::Result<T> + Send) -> io::Result<T> {
    std::thread::scope(|scope| {
        let thread = std::thread::Builder::new().name("namespace".into()).spawn_scoped(scope, work)?;
        thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
    })
}

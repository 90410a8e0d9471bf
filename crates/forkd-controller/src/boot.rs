//! Preparing a boot: the files in a sandbox's folder, and the descriptors a monitor gets.

use std::fs::{File, OpenOptions};
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::fs::OpenOptionsExt;
use std::os::unix::net::UnixListener;
use std::path::Path;

use forkd_protocol::control::{BootConfig, DiskConfig, FdRef, VsockConfig};

use crate::assets::Assets;
use crate::error::{Error, Result};
use crate::sandbox::Spec;

/// The file in a sandbox's folder that its console goes to.
pub(crate) const CONSOLE: &str = "console.log";
/// The socket in a sandbox's folder by which the guest is reached.
pub(crate) const VSOCK: &str = "vsock.sock";
/// The file in a sandbox's folder that takes what the guest writes to its disk.
const LAYER: &str = "disk.layer";
/// The guest's own vsock address. Every guest has the same: each has its own transport.
const GUEST_CID: u32 = 3;

/// Makes the files of a boot in `folder`, empty, also when an earlier boot left some. Blocks.
pub(crate) fn prepare(
    folder: &Path,
    spec: &Spec,
    assets: &Assets,
    console_limit: u64,
) -> Result<(BootConfig, Vec<OwnedFd>)> {
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm").map_err(|error| {
        Error::host("cannot open /dev/kvm", format!("{error}; `forkd doctor` says what is missing"))
    })?;
    let file = |name: &str| {
        let path = folder.join(name);
        create(&path).map_err(|error| Error::host(format!("cannot create {}", path.display()), error))
    };
    let vsock = stream_listener(&folder.join(VSOCK))
        .map_err(|error| Error::host("cannot listen for the guest", error))?;
    let files = assets.open()?;

    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut attach = |fd: OwnedFd| {
        fds.push(fd);
        FdRef(fds.len() - 1)
    };
    let config = BootConfig {
        kvm: attach(kvm.into()),
        vcpus: spec.vcpus,
        mem_mib: spec.mem_mib,
        kernel: attach(files.kernel),
        initramfs: Some(attach(files.initramfs)),
        cmdline: String::new(),
        console: attach(file(CONSOLE)?.into()),
        console_limit,
        disks: vec![DiskConfig { base: attach(files.disk), layer: Some(attach(file(LAYER)?.into())) }],
        net: None,
        // Nothing here waits for calls of a guest.
        vsock: Some(VsockConfig { cid: GUEST_CID, listener: attach(vsock), guest_ports: Vec::new() }),
    };
    Ok((config, fds))
}

/// A listening stream socket at `path`.
fn stream_listener(path: &Path) -> io::Result<OwnedFd> {
    remove_stale(path)?;
    Ok(UnixListener::bind(path)?.into())
}

/// Removes what an earlier boot left at `path`.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// An empty file for us alone.
pub(crate) fn create(path: &Path) -> io::Result<File> {
    OpenOptions::new().read(true).write(true).create(true).truncate(true).mode(0o600).open(path)
}

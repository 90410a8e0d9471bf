//! The files and descriptors of a boot: files in the sandbox's folder, descriptors for the monitor.

use std::fs::OpenOptions;
use std::io;
use std::os::fd::OwnedFd;
use std::os::unix::net::UnixListener;
use std::path::{Path, PathBuf};

use forkd_protocol::control::{BootConfig, DiskConfig, FdRef, NetConfig, VsockConfig};

use crate::error::{Error, Result};
use crate::host::disk_layer::file;
use crate::host::images::BootSource;

/// The file in a sandbox's folder for the console's output.
pub(crate) const CONSOLE: &str = "console.log";
/// The socket in a sandbox's folder that connects to the guest's vsock.
pub(crate) const VSOCK: &str = "vsock.sock";
/// The guest's own vsock address. All guests have the same one, because each has its own transport.
const GUEST_CID: u32 = 3;
/// Ports of the host that guests may connect to, whether they were booted or loaded. None: the daemon accepts
/// no guest connections.
pub(crate) const GUEST_PORTS: &[u32] = &[];

/// A VM to boot.
#[derive(Debug)]
pub(crate) struct BootPlan {
    /// The folder for its files.
    pub(crate) folder: PathBuf,
    pub(crate) vcpus: u8,
    pub(crate) mem_mib: u64,
    pub(crate) console_limit: u64,
    /// The tap device of its network interface, if it has one.
    pub(crate) tap: Option<OwnedFd>,
    /// The layer that takes the guest's disk writes, if it has a disk.
    pub(crate) layer: Option<OwnedFd>,
}

/// Creates the boot's files in the plan's folder, and empties those of an earlier boot. Blocks.
pub(crate) fn prepare(plan: BootPlan, assets: &BootSource) -> Result<(BootConfig, Vec<OwnedFd>)> {
    let folder = &plan.folder;
    let kvm = kvm()?;
    let console = file(folder, CONSOLE)?;
    let files = assets.open()?;

    let mut fds: Vec<OwnedFd> = Vec::new();
    let mut attach = |fd: OwnedFd| {
        fds.push(fd);
        FdRef(fds.len() - 1)
    };
    let mut config = BootConfig {
        kvm: attach(kvm),
        vcpus: plan.vcpus,
        mem_mib: plan.mem_mib,
        kernel: attach(files.kernel),
        initramfs: None,
        cmdline: String::new(),
        console: attach(console),
        console_limit: plan.console_limit,
        disks: Vec::new(),
        disk_state: None,
        net: plan.tap.map(|tap| NetConfig { tap: attach(tap), mac: forkd_net::GUEST_MAC }),
        vsock: None,
    };
    // A guest with an agent has these; a bare kernel has none of them.
    if let Some(root) = files.root {
        let vsock = listener(folder)?;
        config.initramfs = Some(attach(root.initramfs));
        let base = attach(root.disk);
        let mut frozen = Vec::new();
        if let Some(disk) = files.disk_layers {
            frozen = disk.layers.into_iter().map(&mut attach).collect();
            config.disk_state = Some(attach(disk.state));
        }
        config.disks = vec![DiskConfig { base, layer: plan.layer.map(&mut attach), frozen }];
        let guest_ports = GUEST_PORTS.into();
        config.vsock = Some(VsockConfig { cid: GUEST_CID, listener: attach(vsock), guest_ports });
    }
    Ok((config, fds))
}

/// The host's KVM.
pub(crate) fn kvm() -> Result<OwnedFd> {
    let kvm = OpenOptions::new().read(true).write(true).open("/dev/kvm");
    let kvm = kvm.map_err(|error| {
        Error::host("cannot open /dev/kvm", format!("{error}; `forkd doctor` says what is missing"))
    });
    kvm.map(OwnedFd::from)
}

/// A listening socket in `folder` for connections to the guest.
pub(crate) fn listener(folder: &Path) -> Result<OwnedFd> {
    stream_listener(&folder.join(VSOCK)).map_err(|error| Error::host("cannot listen for the guest", error))
}

/// A listening stream socket at `path`.
fn stream_listener(path: &Path) -> io::Result<OwnedFd> {
    match UnixListener::bind(path) {
        Err(error) if error.kind() == io::ErrorKind::AddrInUse => {
            remove_stale(path)?;
            Ok(UnixListener::bind(path)?.into())
        }
        bound => Ok(bound?.into()),
    }
}

/// Removes the socket of an earlier boot at `path`.
pub(crate) fn remove_stale(path: &Path) -> io::Result<()> {
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

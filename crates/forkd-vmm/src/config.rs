//! From a controller's request to the parts of a VM. Every number and descriptor is checked before anything
//! is built, so that a refusal changes nothing and names the mistake.

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use forkd_protocol::control::{
    BootConfig, DiskConfig, FdRef, MAX_VCPUS, MIN_MEM_MIB, NetConfig, VsockConfig,
};
use rustix::fs::OFlags;

use crate::boot::BootSource;
use crate::devices::serial::ConsoleLog;
use crate::devices::virtio::VirtioDevice;
use crate::devices::virtio::block::{Block, Disk};
use crate::devices::virtio::net::Net;
use crate::devices::virtio::rng::Rng;
use crate::devices::virtio::vsock::{GuestConnections, Vsock};
use crate::layout::MAX_MEM_MIB;
use crate::template::share_all;
use crate::vm::VmParts;
use crate::{Error, Result, state};

/// Checks `config` and the descriptors `fds` that came with it and makes a VM's parts of them.
pub fn resolve(
    config: BootConfig,
    fds: Vec<OwnedFd>,
    guest_connections: GuestConnections,
) -> Result<VmParts> {
    check_range("vcpus", config.vcpus.into(), 1, MAX_VCPUS.into())?;
    check_range("mem_mib", config.mem_mib, MIN_MEM_MIB, MAX_MEM_MIB)?;
    let mut fds = Attached::new(fds);

    let kvm = fds.take("kvm", config.kvm, Access::Both)?;
    let kernel = fds.share("kernel", config.kernel)?;
    let initramfs = config.initramfs.map(|fd| fds.share("initramfs", fd)).transpose()?;
    let console = fds.take("console", config.console, Access::Both)?;
    let console = ConsoleLog::new(console.into(), config.console_limit)
        .map_err(|error| Error::Config(format!("console: {error}")))?;

    let mut devices: Vec<Box<dyn VirtioDevice>> = Vec::new();
    match config.disk_state {
        Some(state) => {
            for disk in open_frozen_disks(&mut fds, &config.disks, state)? {
                devices.push(Box::new(disk));
            }
        }
        None => {
            for (index, disk) in config.disks.iter().enumerate() {
                devices.push(Box::new(open_disk(&mut fds, index, disk)?));
            }
        }
    }
    if let Some(net) = config.net {
        devices.push(Box::new(open_net(&mut fds, &net)?));
    }
    if let Some(vsock) = config.vsock {
        devices.push(Box::new(open_vsock(&mut fds, &vsock, guest_connections)?));
    }
    devices.push(Box::new(Rng::new()));

    Ok(VmParts {
        kvm: kvm.into(),
        vcpus: config.vcpus,
        mem_mib: config.mem_mib,
        source: BootSource {
            kernel: kernel.into(),
            initramfs: initramfs.map(File::from),
            cmdline: config.cmdline,
        },
        console: Arc::new(console),
        devices,
    })
}

/// Disks with frozen layers. Their state, which says where each block is, is as little trusted as that of a
/// restored VM.
fn open_frozen_disks(fds: &mut Attached, configs: &[DiskConfig], state: FdRef) -> Result<Vec<Block>> {
    let state = File::from(fds.share("disk_state", state)?);
    let mut opened = Vec::with_capacity(configs.len());
    let mut disk_bytes = 0u64;
    for (index, config) in configs.iter().enumerate() {
        let base = File::from(fds.share(&format!("disks[{index}].base"), config.base)?);
        disk_bytes =
            disk_bytes.saturating_add(base.metadata().map_err(Error::system("look at a disk"))?.len());
        let frozen = share_all(fds, &format!("disks[{index}].frozen"), &config.frozen)?;
        let layer = config.layer.map(|fd| fds.take(&format!("disks[{index}].layer"), fd, Access::Both));
        opened.push((base, frozen, layer.transpose()?.map(File::from)));
    }
    let states = state::file::read_disks(&state, disk_bytes)?;
    if states.len() != opened.len() {
        let (expected, found) = (states.len(), opened.len());
        return Err(Error::Config(format!("disk_state is of {expected} disks, but {found} were given")));
    }
    let disks = opened.into_iter().zip(states).enumerate();
    let disks = disks.map(|(index, ((base, frozen, layer), state))| {
        let disk = Disk::frozen(base, frozen, &state).and_then(|mut disk| {
            disk.add_layer(layer)?;
            Ok(disk)
        });
        let disk = disk.map_err(|error| Error::Config(format!("disks[{index}]: {error}")))?;
        Ok(Block::with_id(disk, state.id))
    });
    disks.collect()
}

fn open_disk(fds: &mut Attached, index: usize, config: &DiskConfig) -> Result<Block> {
    if !config.frozen.is_empty() {
        let text = "it has frozen layers, but there is no disk_state that says what they hold";
        return Err(Error::Config(format!("disks[{index}]: {text}")));
    }
    let base = fds.share(&format!("disks[{index}].base"), config.base)?;
    let layer =
        config.layer.map(|fd| fds.take(&format!("disks[{index}].layer"), fd, Access::Both)).transpose()?;
    let disk = Disk::new(base.into(), layer.map(File::from))
        .map_err(|error| Error::Config(format!("disks[{index}]: {error}")))?;
    Ok(Block::new(disk, &format!("disk{index}")))
}

fn open_net(fds: &mut Attached, config: &NetConfig) -> Result<Net> {
    Ok(Net::new(fds.take_tap("net.tap", config.tap)?, config.mac))
}

fn open_vsock(fds: &mut Attached, config: &VsockConfig, connections: GuestConnections) -> Result<Vsock> {
    // 0 to 2 are the hypervisor, loopback and the host; the last one means "any".
    check_range("vsock.cid", config.cid.into(), 3, u64::from(u32::MAX) - 1)?;
    let listener = fds.take_listener("vsock.listener", config.listener)?;
    Vsock::new(config.cid, UnixListener::from(listener), connections)
        .map(|device| device.limit_calls(config.guest_ports.clone()))
        .map_err(|error| Error::Config(format!("vsock: {error}")))
}

fn check_range(name: &str, value: u64, least: u64, most: u64) -> Result<()> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(Error::Config(format!("{name} is {value}: it must be between {least} and {most}")))
}

/// How a descriptor must have been opened.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) enum Access {
    Read,
    Both,
}

/// The descriptors of a message. A descriptor that is written to belongs to one device only: it can be taken
/// once, and a taken one cannot be shared.
pub(crate) struct Attached {
    fds: Vec<AttachedFd>,
}

enum AttachedFd {
    Unused(OwnedFd),
    Shared(OwnedFd),
    Taken,
}

impl Attached {
    pub(crate) fn new(fds: Vec<OwnedFd>) -> Attached {
        Attached { fds: fds.into_iter().map(AttachedFd::Unused).collect() }
    }

    fn entry(&mut self, name: &str, FdRef(index): FdRef) -> Result<&mut AttachedFd> {
        let count = self.fds.len();
        self.fds.get_mut(index).ok_or_else(|| {
            Error::Config(format!("{name} is descriptor {index}, but {count} came with the message"))
        })
    }

    /// A descriptor with one user.
    pub(crate) fn take(&mut self, name: &str, fd: FdRef, access: Access) -> Result<OwnedFd> {
        let entry = self.entry(name, fd)?;
        match std::mem::replace(entry, AttachedFd::Taken) {
            AttachedFd::Unused(owned) => check_access(name, owned, access),
            AttachedFd::Shared(_) | AttachedFd::Taken => Err(used_twice(name, fd)),
        }
    }

    /// A listening socket with one user.
    pub(crate) fn take_listener(&mut self, name: &str, fd: FdRef) -> Result<OwnedFd> {
        let listener = self.take(name, fd, Access::Both)?;
        if rustix::net::sockopt::socket_acceptconn(&listener).unwrap_or(false) {
            return Ok(listener);
        }
        Err(Error::Config(format!("{name}: the descriptor is not a listening socket")))
    }

    /// A tap with one user.
    pub(crate) fn take_tap(&mut self, name: &str, fd: FdRef) -> Result<OwnedFd> {
        let tap = self.take(name, fd, Access::Both)?;
        let flags = rustix::fs::fcntl_getfl(&tap).map_err(Error::system("look at a descriptor"))?;
        // Waiting for a packet would hold up all devices, and the end of the VM.
        if flags.contains(OFlags::NONBLOCK) {
            return Ok(tap);
        }
        Err(Error::Config(format!("{name}: the descriptor blocks; open it with O_NONBLOCK")))
    }

    /// A descriptor that is only read from.
    pub(crate) fn share(&mut self, name: &str, fd: FdRef) -> Result<OwnedFd> {
        let entry = self.entry(name, fd)?;
        match std::mem::replace(entry, AttachedFd::Taken) {
            AttachedFd::Unused(owned) | AttachedFd::Shared(owned) => {
                let copy = owned.try_clone().map_err(Error::system("copy a descriptor"))?;
                *entry = AttachedFd::Shared(owned);
                check_access(name, copy, Access::Read)
            }
            AttachedFd::Taken => Err(used_twice(name, fd)),
        }
    }
}

fn used_twice(name: &str, FdRef(index): FdRef) -> Error {
    Error::Config(format!("{name} is descriptor {index}, which is used for something else too"))
}

/// A descriptor opened the wrong way would only fail later, inside the guest.
fn check_access(name: &str, fd: OwnedFd, access: Access) -> Result<OwnedFd> {
    let flags = rustix::fs::fcntl_getfl(fd.as_fd()).map_err(Error::system("look at a descriptor"))?;
    let mode = flags & OFlags::RWMODE;
    let (fits, wanted) = match access {
        Access::Read => (mode == OFlags::RDONLY || mode == OFlags::RDWR, "reading"),
        Access::Both => (mode == OFlags::RDWR, "reading and writing"),
    };
    if fits && !flags.contains(OFlags::PATH) {
        return Ok(fd);
    }
    Err(Error::Config(format!("{name}: the descriptor is not open for {wanted}")))
}

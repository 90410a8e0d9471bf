//! The walls around a monitor, put up before it reads its first byte.
//!
//! The process that runs a hostile guest must be worth nothing to an attacker who takes it over: no file
//! system, no network, no other process's secrets, no way to privileges. Everything the monitor needs
//! afterwards comes as descriptors over its control socket. Processes it forks later inherit the jail.

use std::io;
use std::os::fd::AsFd;

use forkd_protocol::control::LISTENER_FD;
use rustix::fs::Mode;
use rustix::mount::{FsMountFlags, FsOpenFlags, MountAttrFlags, MountFlags, MoveMountFlags, UnmountFlags};
use rustix::process::{Resource, Rlimit};
use rustix::thread::{Gid, Uid, UnshareFlags};

use crate::{Error, Result};

/// The user and group of a jailed monitor. The controller picks one pair per lineage of VMs, and nothing else
/// uses it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct JailIds {
    /// User id; not 0.
    pub uid: u32,
    /// Group id; not 0.
    pub gid: u32,
}

/// Descriptors a monitor may hold: one per vsock connection, and a few for everything else. A template
/// needs no more: it closes its copies of what a child gets as soon as the child exists.
const MAX_DESCRIPTORS: u64 = 4096;
/// Processes and threads of a lineage, which is counted by its user id: thousands of children of a
/// handful of threads each. A child that falls can fill this up, for its lineage only. Where the host has
/// cgroups, the child's own stops it earlier: it has room for the child's threads and its branches.
const MAX_THREADS: u64 = 32 << 10;

/// Puts up the walls. Without an identity (not started by root: tests, development) only those that
/// need no privileges.
pub fn enter(ids: Option<JailIds>) -> Result<()> {
    close_inherited()?;
    if let Some(ids) = ids {
        unshare_namespaces(ids)?;
    }
    set_limits(ids.is_some())?;
    // No set-user-id program may give back what was given up; also what seccomp filters ask for.
    rustix::thread::set_no_new_privs(true).map_err(Error::system("set no_new_privs"))?;
    // After the change of user, which resets it: no process of the same lineage may trace this process or
    // read its memory through /proc, and no core file may hold guest memory.
    rustix::process::set_dumpable_behavior(rustix::process::DumpableBehavior::NotDumpable)
        .map_err(Error::system("become undumpable"))
}

/// Closes descriptors that were inherited by mistake: a descriptor of the controller's would be a hole in every
/// other wall. Standard input, output, error and the control socket stay.
fn close_inherited() -> Result<()> {
    // SAFETY: the process has just started and no object owns a descriptor above the control socket.
    let result = unsafe { libc::close_range(LISTENER_FD as u32 + 1, u32::MAX, 0) };
    if result == 0 {
        Ok(())
    } else {
        Err(Error::system("close inherited descriptors")(io::Error::last_os_error()))
    }
}

/// Everything that takes root, ending with not being root.
fn unshare_namespaces(ids: JailIds) -> Result<()> {
    if ids.uid == 0 || ids.gid == 0 {
        return Err(Error::Config(
            "--uid and --gid must not be 0: the jail is there to stop being root".into(),
        ));
    }
    // A signal for the controller's terminal or process group is not for the VM.
    match rustix::process::setsid() {
        Ok(_) | Err(rustix::io::Errno::PERM) => {}
        Err(error) => return Err(Error::system("start a session")(error)),
    }
    // Own mounts, so that the root below is ours alone; own System V and POSIX queues; own host name;
    // an empty network. No pid namespace: the death of its first process would take all forks along.
    let namespaces = UnshareFlags::NEWNS | UnshareFlags::NEWIPC | UnshareFlags::NEWUTS | UnshareFlags::NEWNET;
    // SAFETY: these flags change what the process sees of the system, not memory or descriptors.
    unsafe { rustix::thread::unshare_unsafe(namespaces) }.map_err(Error::system(
        "unshare mount, ipc, uts and net namespaces (is the monitor started by root?)",
    ))?;
    empty_root()?;

    drop_bounding_set()?;
    rustix::thread::set_thread_groups(&[]).map_err(Error::system("drop supplementary groups"))?;
    let (uid, gid) = (Uid::from_raw(ids.uid), Gid::from_raw(ids.gid));
    // The group first: it takes a privilege that goes with the user. All three of each kind, so that
    // there is no saved id to go back to.
    rustix::thread::set_thread_res_gid(gid, gid, gid).map_err(Error::system("become the lineage's group"))?;
    rustix::thread::set_thread_res_uid(uid, uid, uid).map_err(Error::system("become the lineage's user"))?;
    drop_capabilities()
}

/// An empty, read-only root: no path leads anywhere.
fn empty_root() -> Result<()> {
    use rustix::mount as m;
    let step = |what| Error::system::<rustix::io::Errno>(what);
    // Nothing done here may show up in the host's mounts.
    m::mount_change("/", m::MountPropagationFlags::PRIVATE | m::MountPropagationFlags::REC)
        .map_err(step("make mounts private"))?;
    let context = m::fsopen("tmpfs", FsOpenFlags::FSOPEN_CLOEXEC).map_err(step("create an empty root"))?;
    m::fsconfig_create(context.as_fd()).map_err(step("create an empty root"))?;
    let attributes = MountAttrFlags::MOUNT_ATTR_NOSUID
        | MountAttrFlags::MOUNT_ATTR_NODEV
        | MountAttrFlags::MOUNT_ATTR_NOEXEC;
    let root = m::fsmount(context.as_fd(), FsMountFlags::FSMOUNT_CLOEXEC, attributes)
        .map_err(step("mount an empty root"))?;
    // Only root may look into it.
    rustix::fs::mkdirat(&root, CELL, Mode::empty()).map_err(step("create an empty root"))?;
    let flags = MoveMountFlags::MOVE_MOUNT_F_EMPTY_PATH;
    m::move_mount(root.as_fd(), "", rustix::fs::CWD, "/", flags).map_err(step("mount an empty root"))?;
    rustix::process::fchdir(&root).map_err(step("enter the empty root"))?;
    let read_only =
        MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID | MountFlags::NODEV | MountFlags::NOEXEC;
    m::mount_remount(".", read_only, "").map_err(step("make the empty root read-only"))?;
    match rustix::process::pivot_root(".", ".") {
        // The old root is now on top of the new one; without it no host file system is held busy.
        Ok(()) => m::unmount(".", UnmountFlags::DETACH).map_err(step("leave the host's root"))?,
        // A host that runs from its initial RAM file system, or in a chroot, cannot pivot. Without
        // capabilities and open folders a process cannot leave a chroot either.
        Err(rustix::io::Errno::INVAL) => {}
        Err(error) => return Err(step("leave the host's root")(error)),
    }
    // A folder below the root instead of the root itself: the kernel makes no user namespace for a
    // process whose root is not that of its mounts, and with one `clone3` would hand out privileges.
    rustix::process::chroot(CELL).map_err(step("enter the empty root"))?;
    rustix::process::chdir("/").map_err(step("enter the empty root"))
}

/// The folder that ends up as the root.
const CELL: &str = "cell";

/// Lets the process map no more than `bytes` from now on. For one that reads what may be any bytes and has
/// no cgroup of its own.
pub fn limit_memory(bytes: u64) -> Result<()> {
    set(Resource::As, bytes)
}

fn set(resource: Resource, most: u64) -> Result<()> {
    // Where less is allowed, only root could have more.
    let most = rustix::process::getrlimit(resource).maximum.map_or(most, |limit| limit.min(most));
    rustix::process::setrlimit(resource, Rlimit { current: Some(most), maximum: Some(most) })
        .map_err(Error::system("set resource limits"))
}

fn set_limits(jailed: bool) -> Result<()> {
    // Core files would hold guest memory.
    set(Resource::Core, 0)?;
    set(Resource::Nofile, MAX_DESCRIPTORS)?;
    if jailed {
        // Not for a shared user: its other processes would count.
        set(Resource::Nproc, MAX_THREADS)?;
    }
    // Nothing here locks memory or plays with message queues.
    set(Resource::Memlock, 0)?;
    set(Resource::Msgqueue, 0)
}

/// Takes every capability out of what any program started from here could ever get.
fn drop_bounding_set() -> Result<()> {
    for capability in 0..64 {
        // SAFETY: `prctl` with this option reads its integer arguments only.
        let result = unsafe { libc::prctl(libc::PR_CAPBSET_DROP, capability, 0, 0, 0) };
        if result != 0 {
            let error = io::Error::last_os_error();
            // Past the last capability this kernel knows.
            if error.raw_os_error() == Some(libc::EINVAL) && capability > 0 {
                return Ok(());
            }
            return Err(Error::system("drop the capability bounding set")(error));
        }
    }
    Ok(())
}

fn drop_capabilities() -> Result<()> {
    use rustix::thread as t;
    let none = t::CapabilitySets {
        effective: t::CapabilitySet::empty(),
        permitted: t::CapabilitySet::empty(),
        inheritable: t::CapabilitySet::empty(),
    };
    t::clear_ambient_capability_set().map_err(Error::system("drop ambient capabilities"))?;
    t::set_capabilities(None, none).map_err(Error::system("drop capabilities"))
}

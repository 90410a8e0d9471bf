//! File systems: the few the initramfs needs, the root, and those of a running system.

use std::{
    ffi::CString,
    fs, io,
    os::unix::fs::{PermissionsExt, symlink},
    path::{Path, PathBuf},
    thread,
    time::Instant,
};

use forkd_protocol::init::{MountPlan, RootPlan};
use rustix::{io::Errno, mount::MountFlags};

use super::{DEVICE_TICK, DEVICE_TIME, Fatal, RUN_DIR, attempt, wait_for};
use crate::log;

/// Where the new root is put together, in the initramfs.
const NEW_ROOT: &str = "/newroot";
/// The parts of an overlay root.
const LOWER: &str = "/lower";
const UPPER: &str = "/upper";

/// Mounts the file systems needed for devices and for the console.
pub(super) fn mount_early() -> Result<(), Fatal> {
    mount("proc", "/proc", "proc", "nosuid,nodev,noexec")?;
    mount("sysfs", "/sys", "sysfs", "nosuid,nodev,noexec")?;
    mount("devtmpfs", "/dev", "devtmpfs", "nosuid,mode=0755")
}

/// Mounts the root at [`NEW_ROOT`].
pub(super) fn mount_root(plan: &RootPlan) -> Result<(), Fatal> {
    match plan {
        RootPlan::Disk { device, fstype, read_only } => {
            mount(device, NEW_ROOT, fstype, if *read_only { "ro" } else { "noatime" })
        }
        RootPlan::Overlay { lower } => {
            mount(&lower.source, LOWER, &lower.fstype, &lower.options)?;
            mount("tmpfs", UPPER, "tmpfs", "size=75%,mode=0755")?;
            for folder in ["files", "work"] {
                let path = Path::new(UPPER).join(folder);
                attempt(fs::create_dir(&path), || format!("cannot create {}", path.display()))?;
            }
            let options = format!("lowerdir={LOWER},upperdir={UPPER}/files,workdir={UPPER}/work");
            mount("overlay", NEW_ROOT, "overlay", &options)
        }
    }
}

/// Makes [`NEW_ROOT`] the root. The files of the initramfs are out of reach afterwards; this program runs on
/// from a file that has no name any more.
pub(super) fn switch_root() -> Result<(), Fatal> {
    for name in ["proc", "sys", "dev"] {
        let target = Path::new(NEW_ROOT).join(name);
        make_folder(&target)?;
        let moved = rustix::mount::mount_move(format!("/{name}"), &target);
        attempt(moved, || format!("cannot move /{name} into the new root"))?;
    }
    let switched = rustix::process::chdir(NEW_ROOT)
        .and_then(|()| rustix::mount::mount_move(".", "/"))
        .and_then(|()| rustix::process::chroot("."))
        .and_then(|()| rustix::process::chdir("/"));
    attempt(switched, || "cannot switch to the new root".into())
}

/// Mounts what programs expect of a running system, and what the plan adds.
pub(super) fn mount_rest(plans: &[MountPlan]) -> Result<(), Fatal> {
    mount("devpts", "/dev/pts", "devpts", "nosuid,noexec,gid=5,mode=0620,ptmxmode=0666")?;
    mount("tmpfs", "/dev/shm", "tmpfs", "nosuid,nodev,mode=1777")?;
    mount("tmpfs", "/run", "tmpfs", "nosuid,nodev,mode=0755,size=20%")?;
    mount("cgroup2", "/sys/fs/cgroup", "cgroup2", "nosuid,nodev,noexec")?;
    for (name, target) in [("fd", "fd"), ("stdin", "fd/0"), ("stdout", "fd/1"), ("stderr", "fd/2")] {
        let _ = symlink(format!("/proc/self/{target}"), format!("/dev/{name}"));
    }
    make_run_folder();
    make_tmp();
    for plan in plans {
        mount(&plan.source, &plan.target, &plan.fstype, &plan.options)?;
    }
    Ok(())
}

/// The agent's own folder; users may pass through it to what is theirs.
fn make_run_folder() {
    if let Err(error) = fs::create_dir_all(RUN_DIR) {
        log::error!("cannot create {RUN_DIR}: {error}");
    }
}

/// A `/tmp` that everybody can write to, in any image.
fn make_tmp() {
    let tmp = Path::new("/tmp");
    let made = fs::create_dir_all(tmp).and_then(|()| {
        if fs::symlink_metadata(tmp)?.permissions().mode() & 0o7777 != 0o1777 {
            fs::set_permissions(tmp, fs::Permissions::from_mode(0o1777))?;
        }
        Ok(())
    });
    let read_only = rustix::fs::access(tmp, rustix::fs::Access::WRITE_OK) == Err(Errno::ROFS);
    if (made.is_err() || read_only)
        && let Err(error) = mount("tmpfs", "/tmp", "tmpfs", "nosuid,nodev,mode=1777")
    {
        log::error!("{error}");
    }
}

fn make_folder(path: &Path) -> Result<(), Fatal> {
    attempt(fs::create_dir_all(path), || format!("cannot create the mount point {}", path.display()))
}

/// Mounts `source`, waiting for it if it is a device that has not appeared yet.
fn mount(source: &str, target: &str, fstype: &str, options: &str) -> Result<(), Fatal> {
    let what = || match target {
        NEW_ROOT | LOWER => format!("cannot mount {source} as {fstype}"),
        _ => format!("cannot mount {source} as {fstype} at {target}"),
    };
    make_folder(Path::new(target))?;
    if source.starts_with("/dev/") && !wait_for(Path::new(source), DEVICE_TIME) {
        let cause = io::Error::new(
            io::ErrorKind::NotFound,
            format!("the device did not appear in {} s", DEVICE_TIME.as_secs()),
        );
        return Err(Fatal { what: what(), cause });
    }
    let (flags, data) = parse_options(options);
    let data = attempt(CString::new(data), what)?;
    let until = Instant::now() + DEVICE_TIME;
    loop {
        match rustix::mount::mount(source, target, fstype, flags, data.as_c_str()) {
            // Shares have no device to wait for: until theirs appears, the mount itself finds nothing.
            Err(Errno::NOENT) if fstype == "9p" && Instant::now() < until => thread::sleep(DEVICE_TICK),
            // The kernel may have mounted its own file systems itself.
            Err(Errno::BUSY) if source == fstype => return Ok(()),
            other => return attempt(other.map_err(|errno| explain(errno, fstype)), what),
        }
    }
}

/// The cause of the two errors that every damaged or foreign disk gives.
fn explain(errno: Errno, fstype: &str) -> io::Error {
    let hint = match errno {
        Errno::INVAL => format!("it holds no valid {fstype}, or the options are wrong"),
        Errno::NODEV => format!("the kernel knows no {fstype}; its module belongs into the initramfs"),
        _ => return errno.into(),
    };
    io::Error::new(io::Error::from(errno).kind(), format!("{errno}: {hint}"))
}

/// Options as `mount -o` takes them: some are flags, the rest is for the file system.
fn parse_options(options: &str) -> (MountFlags, String) {
    let mut flags = MountFlags::empty();
    let mut data = Vec::new();
    for option in options.split(',').map(str::trim).filter(|option| !option.is_empty()) {
        match option {
            "ro" => flags |= MountFlags::RDONLY,
            "nosuid" => flags |= MountFlags::NOSUID,
            "nodev" => flags |= MountFlags::NODEV,
            "noexec" => flags |= MountFlags::NOEXEC,
            "noatime" => flags |= MountFlags::NOATIME,
            "nodiratime" => flags |= MountFlags::NODIRATIME,
            "relatime" => flags |= MountFlags::RELATIME,
            "sync" => flags |= MountFlags::SYNCHRONOUS,
            "dirsync" => flags |= MountFlags::DIRSYNC,
            "rw" | "defaults" => {}
            other => data.push(other),
        }
    }
    (flags, data.join(","))
}

/// Mount points of file systems that keep something, innermost first.
pub(super) fn mounted() -> Vec<PathBuf> {
    let table = fs::read_to_string("/proc/self/mounts").unwrap_or_default();
    table.lines().rev().filter_map(keeps_something).collect()
}

fn keeps_something(line: &str) -> Option<PathBuf> {
    let mut fields = line.split(' ');
    let (_source, target, fstype) = (fields.next()?, fields.next()?, fields.next()?);
    let kept = !matches!(
        fstype,
        "proc"
            | "sysfs"
            | "devtmpfs"
            | "devpts"
            | "tmpfs"
            | "cgroup2"
            | "rootfs"
            | "ramfs"
            | "mqueue"
            | "debugfs"
    );
    // The table writes blanks and the like as octal escapes.
    kept.then(|| PathBuf::from(target.replace("\\040", " ").replace("\\011", "\t").replace("\\134", "\\")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn options_become_flags_and_the_rest_stays() {
        let (flags, data) = parse_options("trans=virtio,version=9p2000.L,ro,,cache=loose,noatime,rw");
        assert_eq!(flags, MountFlags::RDONLY | MountFlags::NOATIME);
        assert_eq!(data, "trans=virtio,version=9p2000.L,cache=loose");
        assert_eq!(parse_options(""), (MountFlags::empty(), String::new()));
    }

    #[test]
    fn only_what_keeps_data_is_unmounted() {
        assert_eq!(keeps_something("/dev/vdb /a\\040b ext4 rw 0 0"), Some(PathBuf::from("/a b")));
        assert_eq!(keeps_something("proc /proc proc rw 0 0"), None);
        assert_eq!(keeps_something("garbage"), None);
    }
}

//! `/proc/sys/kernel/random/boot_id`: programs use it as the id of this boot. The kernel draws it once a
//! boot, so all copies of a guest would have the same.
//!
//! A file of the agent is bound over it, once, before there are copies: a copy overwrites the file's one page.
//! The id is made of the kernel's own and the sandbox's id. So each child has another one, and a sandbox that is
//! paused, resumed or rolled back keeps its own.
//!
//! Programs that mount a `/proc` of their own, such as containers, see the kernel's.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    hash::{DefaultHasher, Hash, Hasher},
    io,
    os::unix::fs::{DirBuilderExt, FileExt, PermissionsExt},
    path::Path,
};

use rustix::mount::{MountFlags, mount, mount_bind, mount_remount};

/// The kernel's own.
const KERNELS: &str = "/proc/sys/kernel/random/boot_id";
/// How `/proc` is mounted, here and elsewhere.
const PROC: MountFlags = MountFlags::NOSUID.union(MountFlags::NODEV).union(MountFlags::NOEXEC);

/// The boot id of this machine.
#[derive(Debug)]
pub struct BootId {
    /// The kernel's own id.
    kernels: String,
    /// The file that programs read.
    file: File,
}

impl BootId {
    /// Mounts a file in `run_dir` over the kernel's id. It holds the same id until a sandbox id is known.
    pub(crate) fn take_over(run_dir: &Path) -> io::Result<Self> {
        let (kernels, path) = (fs::read_to_string(KERNELS)?, run_dir.join("boot-id"));
        let id = BootId::new(kernels.trim(), &path)?;
        // Processes without privileges may mount a `/proc` in a namespace of their own only as long as there is
        // one that nothing is mounted over.
        let hidden = run_dir.join("private");
        fs::DirBuilder::new().recursive(true).mode(0o700).create(&hidden)?;
        let whole = hidden.join("proc");
        fs::DirBuilder::new().recursive(true).create(&whole)?;
        mount("proc", &whole, "proc", PROC, c"")?;
        mount_bind(&path, KERNELS)?;
        mount_remount(KERNELS, MountFlags::BIND | MountFlags::RDONLY | PROC, c"")?;
        Ok(id)
    }

    /// One in the file at `path`.
    pub(super) fn new(kernels: &str, path: &Path) -> io::Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path)?;
        file.set_permissions(Permissions::from_mode(0o444))?;
        let id = BootId { kernels: kernels.into(), file };
        id.write(kernels)?;
        Ok(id)
    }

    /// Makes it that of the sandbox `sandbox_id`.
    pub(super) fn become_that_of(&self, sandbox_id: &str) -> io::Result<()> {
        self.write(&derive(&self.kernels, sandbox_id))
    }

    /// In place: ids are all of one length.
    fn write(&self, id: &str) -> io::Result<()> {
        self.file.write_all_at(format!("{id}\n").as_bytes(), 0)
    }
}

/// A random UUID (version 4) of a boot and a sandbox. Nothing is to be kept secret by it, and the program that
/// made it once makes it again: it is in memory since the boot.
fn derive(kernels: &str, sandbox_id: &str) -> String {
    let half = |which: u8| {
        let mut hasher = DefaultHasher::new();
        (which, kernels, sandbox_id).hash(&mut hasher);
        hasher.finish()
    };
    let (high, low) = (half(0), half(1));
    let (high, low) = (high & !0xf000 | 0x4000, low & !(3 << 62) | 2 << 62);
    let (first, second, third) = (high >> 32, high >> 16 & 0xffff, high & 0xffff);
    format!("{first:08x}-{second:04x}-{third:04x}-{:04x}-{:012x}", low >> 48, low & 0xffff_ffff_ffff)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KERNEL: &str = "c3075f7e-701a-47dd-9b34-fb4ecf34ccf2";

    #[test]
    fn each_sandbox_of_each_boot_has_a_boot_id_of_its_own_and_always_the_same() {
        let one = derive(KERNEL, "sb1");
        assert_eq!(derive(KERNEL, "sb1"), one);
        let other_boot = KERNEL.replace('c', "d");
        let all =
            [one.as_str(), KERNEL, &derive(KERNEL, "sb2"), &derive(&other_boot, "sb1")].map(str::to_owned);
        assert_eq!(all.iter().collect::<std::collections::BTreeSet<_>>().len(), all.len(), "{all:?}");
    }

    #[test]
    fn a_boot_id_is_a_random_uuid_as_the_kernel_writes_it() {
        for number in 0..200 {
            let id = derive(KERNEL, &format!("sb{number}"));
            let lengths: Vec<usize> = id.split('-').map(str::len).collect();
            assert_eq!(lengths, [8, 4, 4, 4, 12], "{id}");
            let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
            assert!(id.bytes().all(|byte| byte == b'-' || is_digit(byte)), "{id}");
            assert!(id.as_bytes()[14] == b'4' && b"89ab".contains(&id.as_bytes()[19]), "{id}");
        }
    }

    #[test]
    fn programs_read_the_kernels_until_the_sandbox_is_known_and_never_a_part_of_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("boot-id");
        let read = || fs::read_to_string(&path).unwrap();
        let id = BootId::new(KERNEL, &path).unwrap();
        assert_eq!(read(), format!("{KERNEL}\n"));
        id.become_that_of("sb1").unwrap();
        assert_eq!(read(), format!("{}\n", derive(KERNEL, "sb1")));
        let inode = std::os::unix::fs::MetadataExt::ino(&fs::metadata(&path).unwrap());
        id.become_that_of("sb2").unwrap();
        assert_eq!(read(), format!("{}\n", derive(KERNEL, "sb2")));
        assert_eq!(std::os::unix::fs::MetadataExt::ino(&fs::metadata(&path).unwrap()), inode, "another file");
    }

    /// Runs `test` in a thread with mounts of its own, where this machine allows that.
    fn with_own_mounts(test: impl FnOnce() + Send + 'static) {
        let thread = std::thread::spawn(|| {
            // SAFETY: it changes nothing but the namespace this thread, which ends with the test, is in.
            if unsafe { libc::unshare(libc::CLONE_NEWNS) } != 0 {
                return false;
            }
            let private =
                rustix::mount::MountPropagationFlags::PRIVATE | rustix::mount::MountPropagationFlags::REC;
            rustix::mount::mount_change("/", private).unwrap();
            test();
            true
        });
        if !thread.join().unwrap() {
            use io::Write;
            let _ = writeln!(io::stderr(), "NOT RUN: taking the boot id over: no mounts of its own here");
        }
    }

    #[test]
    fn taken_over_the_boot_id_is_the_sandboxs_and_users_can_still_mount_a_proc_of_their_own() {
        with_own_mounts(|| {
            let folder = tempfile::tempdir().unwrap();
            let read = || fs::read_to_string(KERNELS).unwrap();
            let own_proc = || {
                let mut command = std::process::Command::new("unshare");
                command.args(["-Urpf", "--mount-proc", "cat", KERNELS]).output().unwrap()
            };
            let (kernels, allowed) = (read(), own_proc().status.success());
            let id = BootId::take_over(folder.path()).unwrap();
            assert_eq!(read(), kernels);
            id.become_that_of("sb1").unwrap();
            assert_eq!(read(), format!("{}\n", derive(kernels.trim(), "sb1")));
            assert!(fs::write(KERNELS, "x").is_err());
            if allowed {
                let output = own_proc();
                assert_eq!(String::from_utf8_lossy(&output.stdout), kernels, "{output:?}");
            }
            // So that the folder can be removed.
            rustix::mount::unmount(KERNELS, rustix::mount::UnmountFlags::DETACH).unwrap();
            let whole = folder.path().join("private/proc");
            rustix::mount::unmount(&whole, rustix::mount::UnmountFlags::DETACH).unwrap();
        });
    }
}

//! Checks of the host: its hardware and system, and other programs that forkd uses.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::{Check, Runs};
use crate::host::kvm::Kvm;
use crate::host::paths::{DataDir, find_program};
use crate::machine::find_qemu;
use crate::ui::bytes;

/// The oldest tested kernel: the emulated machine's own.
const OLDEST_KERNEL: (u32, u32) = (6, 1);
/// Space for an image, a kernel and a few sandboxes.
const COMFORTABLE_SPACE: u64 = 10 << 30;
/// The least space for one image.
const NEEDED_SPACE: u64 = 2 << 30;

pub(super) fn platform() -> Check {
    const NAME: &str = "platform";
    let system = rustix::system::uname();
    let release = system.release().to_string_lossy().into_owned();
    let detail = format!("{} {release} on {}", std::env::consts::OS, std::env::consts::ARCH);
    if (std::env::consts::OS, std::env::consts::ARCH) != ("linux", "x86_64") {
        return Check::fail(NAME, detail, "use Linux on x86_64").essential();
    }
    match kernel_version(&release) {
        Some(version) if version >= OLDEST_KERNEL => Check::pass(NAME, detail),
        _ => Check::warn(NAME, detail, "use Linux 6.1 or later; older kernels are not tested"),
    }
}

pub(super) fn kernel_version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(|c: char| !c.is_ascii_digit());
    Some((numbers.next()?.parse().ok()?, numbers.next()?.parse().ok()?))
}

pub(super) fn virtualization() -> Check {
    describe_cpu(&fs::read_to_string("/proc/cpuinfo").unwrap_or_default())
}

/// What the CPU reports. This proves nothing: the check `kvm` does.
fn describe_cpu(info: &str) -> Check {
    const NAME: &str = "virtualization";
    let flags = info.lines().find_map(|line| line.strip_prefix("flags")).unwrap_or_default();
    let has = |name: &str| flags.split_whitespace().any(|flag| flag == name);
    let kind = if has("vmx") { Some("VT-x") } else { has("svm").then_some("AMD-V") };
    match (kind, has("hypervisor")) {
        (Some(kind), false) => Check::pass(NAME, format!("hardware with {kind}")),
        (Some(kind), true) => Check::pass(NAME, format!("a virtual machine with nested {kind}")),
        (None, true) => Check::warn(
            NAME,
            "a virtual machine without nested virtualization",
            "enable nested virtualization for this machine, or use a machine type that has it; until then sandboxes are emulated",
        ),
        (None, false) => Check::warn(
            NAME,
            "the CPU does not offer virtualization",
            "enable VT-x or AMD-V in the firmware; until then sandboxes are emulated",
        ),
    }
}

pub(super) fn kvm(kvm: &Kvm) -> Check {
    const NAME: &str = "kvm";
    if kvm.runs_linux {
        return Check::pass(NAME, kvm.describe());
    }
    let detail = format!("{}; the emulated machine will be used", kvm.describe());
    let fix = if kvm.opens {
        "nothing to do; on hardware, or in a VM with nested virtualization, sandboxes are many times faster"
    } else {
        "for speed, enable virtualization (in the firmware, or as nested virtualization of a VM), load kvm_intel or \
         kvm_amd, and give this user access to /dev/kvm"
    };
    Check::warn(NAME, detail, fix)
}

pub(super) fn machine(will_use: Runs) -> Check {
    const NAME: &str = "machine";
    const FIX: &str = "install QEMU: apt install qemu-system-x86";
    let problem = match find_qemu().map(|qemu| (offers_9p(&qemu), qemu)) {
        Ok((true, qemu)) => return Check::pass(NAME, format!("QEMU is at {}", qemu.display())),
        Ok((false, qemu)) => format!("{} cannot share folders (virtio-9p)", qemu.display()),
        Err(_) => "qemu-system-x86_64 is missing".to_owned(),
    };
    match will_use {
        Runs::Machine => {
            Check::fail(NAME, format!("{problem}, and KVM does not run Linux here"), FIX).essential()
        }
        Runs::Kvm => Check::pass(NAME, format!("{problem}; not needed on this host")),
    }
}

fn offers_9p(qemu: &Path) -> bool {
    let output = Command::new(qemu).args(["-device", "help"]).output();
    output.is_ok_and(|output| String::from_utf8_lossy(&output.stdout).contains("virtio-9p-pci"))
}

pub(super) fn cgroups(will_use: Runs) -> Check {
    const NAME: &str = "cgroups";
    if will_use == Runs::Machine {
        return Check::skip(NAME, "not needed: the emulated machine has its own cgroup v2");
    }
    let controllers = fs::read_to_string("/sys/fs/cgroup/cgroup.controllers").unwrap_or_default();
    let missing: Vec<_> = ["cpu", "memory", "pids"]
        .into_iter()
        .filter(|name| !controllers.split_whitespace().any(|c| c == *name))
        .collect();
    if missing.is_empty() {
        return Check::pass(NAME, "cgroup v2 with cpu, memory and pids");
    }
    let detail = format!("cgroup v2 lacks {}: sandboxes have no limits in these", missing.join(", "));
    Check::warn(NAME, detail, "boot with systemd.unified_cgroup_hierarchy=1")
}

pub(super) fn huge_pages() -> Check {
    const NAME: &str = "huge-pages";
    let text = fs::read_to_string("/sys/kernel/mm/transparent_hugepage/enabled").unwrap_or_default();
    let chosen = text.split(['[', ']']).nth(1).unwrap_or("not supported");
    match chosen {
        "always" | "madvise" => Check::pass(NAME, format!("transparent huge pages: {chosen}")),
        _ => Check::warn(
            NAME,
            format!("transparent huge pages: {chosen}; guests are slower"),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        ),
    }
}

pub(super) fn nftables() -> Check {
    program("nftables", "nft", "sandboxes cannot have a network", "install nftables: apt install nftables")
}

pub(super) fn ip() -> Check {
    program("ip", "ip", "sandboxes cannot have a network", "install iproute2: apt install iproute2")
}

pub(super) fn e2fsprogs() -> Check {
    match find_program("mke2fs") {
        Some(path) => Check::pass("e2fsprogs", format!("mke2fs is at {}", path.display())),
        None => {
            let fix = "install e2fsprogs: apt install e2fsprogs";
            Check::fail("e2fsprogs", "mke2fs is missing: no disk can be made", fix).essential()
        }
    }
}

pub(super) fn image_tools() -> Check {
    const NAME: &str = "image-tools";
    if find_program("fakeroot").is_none() {
        let fix = "install fakeroot: apt install fakeroot";
        return Check::warn(NAME, "fakeroot is missing: no image can be built", fix);
    }
    match ["mmdebstrap", "debootstrap"].into_iter().find_map(find_program) {
        Some(path) => Check::pass(NAME, format!("{} builds images from packages", path.display())),
        None => Check::warn(
            NAME,
            "mmdebstrap is missing: images can be built from a tar or a folder only",
            "install mmdebstrap: apt install mmdebstrap",
        ),
    }
}

fn program(name: &'static str, program: &str, without: &str, fix: &str) -> Check {
    match find_program(program) {
        Some(path) => Check::pass(name, format!("{program} is at {}", path.display())),
        None => Check::warn(name, format!("{program} is missing: {without}"), fix),
    }
}

pub(super) fn data_dir(data: &DataDir) -> Check {
    const NAME: &str = "data-dir";
    const ELSEWHERE: &str = "choose another place with --data-dir or FORKD_DATA_DIR";
    // The data directory is created on demand: until then its parent folder is checked.
    let Some(existing) = data.root().ancestors().find(|path| path.exists()) else {
        return Check::fail(NAME, format!("cannot create {}", data.root().display()), ELSEWHERE).essential();
    };
    let path = data.root().display();
    let writable =
        rustix::fs::access(existing, rustix::fs::Access::WRITE_OK | rustix::fs::Access::EXEC_OK).is_ok();
    if !existing.is_dir() || !writable {
        return Check::fail(NAME, format!("this user may not write to {path}"), ELSEWHERE).essential();
    }
    let free = match rustix::fs::statvfs(existing) {
        Ok(stat) => stat.f_bavail.saturating_mul(stat.f_frsize),
        Err(error) => return Check::fail(NAME, format!("{path}: {error}"), ELSEWHERE).essential(),
    };
    let (kind, fits) = file_system(existing);
    let detail = format!("{path}: {} free on {kind}", bytes(free));
    if free < NEEDED_SPACE {
        return Check::fail(NAME, detail, format!("free at least {}, or {ELSEWHERE}", bytes(NEEDED_SPACE)))
            .essential();
    }
    if free < COMFORTABLE_SPACE {
        return Check::warn(
            NAME,
            detail,
            format!("free at least {}, or {ELSEWHERE}", bytes(COMFORTABLE_SPACE)),
        );
    }
    if !fits {
        return Check::warn(NAME, format!("{detail}, which is not meant for disk images"), ELSEWHERE);
    }
    Check::pass(NAME, detail)
}

/// The file system's name, and whether it suits large sparse files that must survive a reboot.
fn file_system(path: &Path) -> (String, bool) {
    // The numbers are part of the kernel's interface (linux/magic.h).
    match rustix::fs::statfs(path).map(|stat| stat.f_type as u64) {
        Ok(0xef53) => ("ext4".into(), true),
        Ok(0x5846_5342) => ("xfs".into(), true),
        Ok(0x9123_683e) => ("btrfs".into(), true),
        Ok(0x2fc1_2fc1) => ("zfs".into(), true),
        Ok(0x794c_7630) => ("overlayfs".into(), true),
        Ok(0x0102_1994) => ("tmpfs".into(), false),
        Ok(0x6969) => ("nfs".into(), false),
        Ok(0x0102_1997) => ("9p".into(), false),
        Ok(other) => (format!("file system {other:#x}"), true),
        Err(_) => ("an unknown file system".into(), true),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::*;

    #[test]
    fn kernel_versions_are_compared_as_numbers() {
        assert_eq!(kernel_version("6.1.0-54-amd64"), Some((6, 1)));
        assert_eq!(kernel_version("5.10.1"), Some((5, 10)));
        assert!(kernel_version("6.18").unwrap() > OLDEST_KERNEL);
        assert_eq!(kernel_version("x"), None);
    }

    #[test]
    fn kvm_that_opens_but_does_not_run_linux_is_said_so() {
        let kvm = super::kvm(&Kvm {
            opens: true,
            tiny_guest: true,
            reason: "it emulates".into(),
            ..Kvm::default()
        });
        assert_eq!(kvm.status, CheckStatus::Warn);
        assert_eq!(
            kvm.detail,
            "/dev/kvm opens but does not run Linux: it emulates; the emulated machine will be used"
        );
    }

    #[test]
    fn nested_hardware_and_missing_virtualization_are_told_apart() {
        let check = |flags: &str| describe_cpu(&format!("processor\t: 0\nflags\t\t: fpu {flags}\n"));
        assert_eq!(check("vmx").detail, "hardware with VT-x");
        assert_eq!(check("svm hypervisor").detail, "a virtual machine with nested AMD-V");
        assert_eq!(check("hypervisor").status, CheckStatus::Warn);
        assert_eq!(describe_cpu("").status, CheckStatus::Warn);
    }

    #[test]
    fn a_data_directory_that_is_a_file_fails() {
        let folder = tempfile::tempdir().unwrap();
        let file = folder.path().join("file");
        fs::write(&file, "").unwrap();
        let check = data_dir(&DataDir::resolve(Some(file)).unwrap());
        assert_eq!(check.status, CheckStatus::Fail);
    }
}

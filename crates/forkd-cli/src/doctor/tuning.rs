//! Checks of settings that decide how fast guests start and run on a real host. forkd works with any of them,
//! so a bad one is a warning. A missing file means that the kernel lacks the feature.

use super::Check;
use super::root::Root;

/// The first kernel whose VMs have their helper thread as a task of their process, which needs no cgroup
/// semaphore.
const HELPER_IN_PROCESS: (u32, u32) = (6, 13);
/// The first kernel with `favordynmods`; earlier ones always behave as with it.
const FAVORDYNMODS: (u32, u32) = (6, 0);
/// The first kernel that adds devices to a VM without waiting for a grace period.
const NO_GRACE_PERIOD: (u32, u32) = (6, 18);

/// KVM attaches a thread to the cgroup of each VM. Without this option, attaching waits for every CPU.
pub(super) fn favordynmods(root: &Root) -> Check {
    const NAME: &str = "favordynmods";
    let Some((place, options)) = root.mounts("cgroup2").into_iter().next() else {
        return Check::skip(NAME, "there is no cgroup v2");
    };
    if options.split(',').any(|option| option == "favordynmods") {
        return Check::pass(NAME, format!("{place} is mounted with it"));
    }
    match root.kernel() {
        Some(version) if version < FAVORDYNMODS => Check::pass(NAME, "this kernel always behaves as with it"),
        Some(version) if version < HELPER_IN_PROCESS => Check::warn(
            NAME,
            format!(
                "{place} is mounted without it: creating a VM in a cgroup takes 10 to 30 ms on this kernel"
            ),
            format!("mount -o remount,favordynmods {place}"),
        ),
        Some(_) => Check::pass(NAME, "off; this kernel creates VMs without it as fast"),
        None => Check::skip(NAME, "the kernel's version is not known"),
    }
}

/// The workaround for a bug of some Intel CPUs: KVM splits huge pages in which guests run code, and each VM
/// has a thread that merges them again.
pub(super) fn nx_huge_pages(root: &Root) -> Check {
    const NAME: &str = "nx-huge-pages";
    const FILE: &str = "/sys/module/kvm/parameters/nx_huge_pages";
    let Some(value) = root.read(FILE) else {
        return Check::skip(NAME, "KVM is not loaded, or has no such setting");
    };
    let needed = root
        .read("/sys/devices/system/cpu/vulnerabilities/itlb_multihit")
        .map(|answer| !answer.starts_with("Not affected"));
    match (value.as_str(), needed) {
        // Speed is no reason to disable a protection of the host.
        ("Y", Some(true)) => Check::pass(NAME, "on, and this CPU needs it"),
        ("Y", None) => Check::pass(NAME, "on; the kernel does not report whether this CPU needs it"),
        ("N" | "never", Some(true)) => Check::warn(
            NAME,
            "off, but this CPU needs it: a guest can stop the host",
            format!("echo auto > {FILE}, or boot with kvm.nx_huge_pages=auto where that is refused"),
        ),
        ("Y", Some(false)) => Check::warn(
            NAME,
            "on, but this CPU does not need it: guests lose huge pages, and each VM has one more thread",
            format!("echo never > {FILE}, while no VM runs"),
        ),
        ("N", Some(false)) if root.kernel().is_some_and(|version| version < HELPER_IN_PROCESS) => {
            Check::warn(
                NAME,
                "off, but each VM still starts a thread for it, which takes 10 to 30 ms in a cgroup on this kernel",
                format!("echo never > {FILE}, while no VM runs"),
            )
        }
        (value, _) => Check::pass(NAME, format!("{value}: this CPU does not need it")),
    }
}

/// How long KVM polls on a CPU, in case an idle guest wakes again.
pub(super) fn halt_polling(root: &Root) -> Check {
    const NAME: &str = "halt-polling";
    const FILE: &str = "/sys/module/kvm/parameters/halt_poll_ns";
    match root.number(FILE) {
        None => Check::skip(NAME, "KVM is not loaded, or has no such setting"),
        Some(0) => Check::pass(NAME, "KVM does not poll for idle guests"),
        Some(time) => Check::warn(
            NAME,
            format!(
                "KVM polls up to {} µs each time a guest goes idle: many idle guests take CPU time from others",
                time.div_ceil(1000)
            ),
            format!("echo 0 > {FILE}"),
        ),
    }
}

/// The kernel unmaps pages to see which CPUs use them. Guests then fault on shared memory.
pub(super) fn numa_balancing(root: &Root) -> Check {
    const NAME: &str = "numa-balancing";
    let Some(setting) = root.number("/proc/sys/kernel/numa_balancing") else {
        return Check::skip(NAME, "this kernel does not balance memory");
    };
    // A list such as `0` or `0-1`.
    let several = root.read("/sys/devices/system/node/online").is_some_and(|nodes| nodes != "0");
    match (setting, several) {
        (0, _) => Check::pass(NAME, "off"),
        (_, false) => Check::pass(NAME, "on, but this host has one node"),
        (_, true) => Check::warn(
            NAME,
            "on: the kernel repeatedly unmaps pages that guests share, to see which node uses them",
            "sysctl -w kernel.numa_balancing=0",
        ),
    }
}

/// KVM creates a folder of statistics for each VM, even if no program reads them.
pub(super) fn debugfs(root: &Root) -> Check {
    const NAME: &str = "debugfs";
    let Some(known) = root.read("/proc/filesystems") else {
        return Check::skip(NAME, "the kernel's file systems are not known");
    };
    let line = root.read("/proc/cmdline").unwrap_or_default();
    let chosen = line.split_whitespace().filter_map(|word| word.strip_prefix("debugfs=")).next_back();
    // KVM creates the files without a mount as well; only `off` avoids them.
    let there = known.lines().any(|one| one.split_whitespace().next_back() == Some("debugfs"));
    if chosen == Some("off") || (!there && chosen != Some("no-mount")) {
        return Check::pass(NAME, "off: KVM creates no statistics of each VM");
    }
    Check::warn(
        NAME,
        "on: KVM creates about 60 files of statistics for each VM, one VM at a time: 0.1 to 0.2 ms per child",
        "add debugfs=off to GRUB_CMDLINE_LINUX in /etc/default/grub, run update-grub, and reboot",
    )
}

/// Adding a device to a VM waits until no CPU uses the old list of devices.
pub(super) fn grace_periods(root: &Root) -> Check {
    const NAME: &str = "srcu";
    match root.kernel() {
        None => Check::skip(NAME, "the kernel's version is not known"),
        Some(version) if version >= NO_GRACE_PERIOD => {
            Check::pass(NAME, "this kernel adds devices to a VM without waiting")
        }
        Some((major, minor)) => Check::warn(
            NAME,
            format!(
                "Linux {major}.{minor} waits for a grace period for each device of a VM: a quarter of its start"
            ),
            "install Linux 6.18 or later",
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::root::FakeHost;
    use super::*;

    const MULTIHIT: &str = "/sys/devices/system/cpu/vulnerabilities/itlb_multihit";
    const NX: &str = "/sys/module/kvm/parameters/nx_huge_pages";

    fn linux(version: &str) -> FakeHost {
        FakeHost::new().with("/proc/sys/kernel/osrelease", version)
    }

    /// A warning, and its command.
    fn warns(check: &Check, command: &str) {
        assert_eq!((check.status, check.fix.as_deref()), (CheckStatus::Warn, Some(command)), "{check:?}");
    }

    fn passes(check: &Check) {
        assert_eq!((check.status, &check.fix), (CheckStatus::Pass, &None), "{check:?}");
    }

    fn is_skipped(check: &Check) {
        assert_eq!((check.status, &check.fix), (CheckStatus::Skip, &None), "{check:?}");
    }

    #[test]
    fn cgroups_without_favordynmods_are_warned_of_where_vms_wait_for_them() {
        let mounted = |version: &str, options: &str| {
            let mount = format!("31 24 0:27 / /sys/fs/cgroup rw shared:9 - cgroup2 cgroup2 {options}");
            favordynmods(&linux(version).with("/proc/self/mountinfo", &mount).root())
        };
        for version in ["6.1.0-55-amd64", "6.8.0", "6.12.3"] {
            warns(&mounted(version, "rw,nsdelegate"), "mount -o remount,favordynmods /sys/fs/cgroup");
        }
        for (version, options) in [("6.1.0", "rw,favordynmods"), ("6.13.0", "rw"), ("5.15.0", "rw")] {
            passes(&mounted(version, options));
        }
        is_skipped(&favordynmods(&linux("6.1.0").root()));
        is_skipped(&favordynmods(&FakeHost::new().root()));
    }

    #[test]
    fn splitting_huge_pages_is_warned_of_only_on_cpus_that_do_not_need_it() {
        const NEVER: &str = "echo never > /sys/module/kvm/parameters/nx_huge_pages, while no VM runs";
        let set = |version: &str, value: &str, cpu: &str| {
            nx_huge_pages(&linux(version).with(NX, value).with(MULTIHIT, cpu).root())
        };
        warns(&set("6.18.0", "Y", "Not affected"), NEVER);
        warns(&set("6.1.0", "N", "Not affected"), NEVER);
        passes(&set("6.18.0", "N", "Not affected"));
        passes(&set("6.1.0", "never", "Not affected"));
        passes(&set("6.1.0", "Y", "KVM: Mitigation: Split huge pages"));
        is_skipped(&nx_huge_pages(&linux("6.1.0").root()));
        // No fix is offered if the kernel does not report that disabling it is safe.
        passes(&nx_huge_pages(&linux("6.1.0").with(NX, "Y").root()));
    }

    #[test]
    fn a_cpu_that_needs_its_huge_pages_split_is_told_to_do_so() {
        for value in ["N", "never"] {
            let host = linux("6.18.0").with(NX, value).with(MULTIHIT, "KVM: Vulnerable");
            let check = nx_huge_pages(&host.root());
            assert_eq!(check.status, CheckStatus::Warn, "{check:?}");
            assert!(check.fix.unwrap().starts_with("echo auto > /sys/module/kvm/parameters/nx_huge_pages"));
        }
    }

    #[test]
    fn polling_for_idle_guests_is_warned_of() {
        const FILE: &str = "/sys/module/kvm/parameters/halt_poll_ns";
        let set = |value| halt_polling(&FakeHost::new().with(FILE, value).root());
        warns(&set("200000"), "echo 0 > /sys/module/kvm/parameters/halt_poll_ns");
        passes(&set("0"));
        is_skipped(&set("nonsense"));
        is_skipped(&halt_polling(&FakeHost::new().root()));
    }

    #[test]
    fn balancing_memory_is_warned_of_where_there_are_several_nodes() {
        let set = |value, nodes| {
            let host = FakeHost::new().with("/proc/sys/kernel/numa_balancing", value);
            numa_balancing(&host.with("/sys/devices/system/node/online", nodes).root())
        };
        warns(&set("1", "0-1"), "sysctl -w kernel.numa_balancing=0");
        passes(&set("0", "0-1"));
        passes(&set("1", "0"));
        passes(&numa_balancing(&FakeHost::new().with("/proc/sys/kernel/numa_balancing", "1").root()));
        is_skipped(&numa_balancing(&FakeHost::new().root()));
    }

    #[test]
    fn statistics_of_each_vm_are_warned_of_unless_they_are_off() {
        let set = |file_systems: &str, line: &str| {
            let host = FakeHost::new().with("/proc/filesystems", file_systems);
            debugfs(&host.with("/proc/cmdline", line).root())
        };
        const CURE: &str =
            "add debugfs=off to GRUB_CMDLINE_LINUX in /etc/default/grub, run update-grub, and reboot";
        warns(&set("nodev\tsysfs\nnodev\tdebugfs\n\text4", "quiet"), CURE);
        // Nothing is mounted, and the files are made all the same.
        warns(&set("nodev\tsysfs", "quiet debugfs=no-mount"), CURE);
        passes(&set("nodev\tsysfs", "quiet debugfs=off"));
        passes(&set("nodev\tsysfs\n\text4", "quiet"));
        is_skipped(&debugfs(&FakeHost::new().root()));
    }

    #[test]
    fn kernels_that_wait_for_each_device_are_warned_of() {
        for version in ["6.1.0-55-amd64", "6.17.9"] {
            warns(&grace_periods(&linux(version).root()), "install Linux 6.18 or later");
        }
        for version in ["6.18.44", "7.0.0"] {
            passes(&grace_periods(&linux(version).root()));
        }
        is_skipped(&grace_periods(&FakeHost::new().root()));
    }
}

//! Checks of the host's limits: memory overcommit, processes, connections.

use super::root::Root;
use super::{Check, Runs};

/// Enough tasks for sixteen thousand sandboxes of one vCPU, which take four each.
const ENOUGH_TASKS: u64 = 64 << 10;
/// The maximum on a 64-bit kernel.
const MOST_PIDS: u64 = 4 << 20;

/// A fork commits all memory of the parent to each child, which writes little of it.
pub(super) fn overcommit(root: &Root) -> Check {
    const NAME: &str = "overcommit";
    match root.number("/proc/sys/vm/overcommit_memory") {
        None => Check::skip(NAME, "not known"),
        // This is not about speed: forks fail.
        Some(2) => Check::fail(
            NAME,
            "strict: the kernel reserves all memory of the parent for each child, so forks fail after a few children",
            "sysctl -w vm.overcommit_memory=0",
        ),
        Some(_) => {
            Check::pass(NAME, "the kernel reserves no memory for pages that children have not written")
        }
    }
}

/// The limit of processes and threads.
pub(super) fn process_ids(root: &Root) -> Check {
    const NAME: &str = "process-ids";
    let setting = |name: &str| Some((name.to_owned(), root.number(&format!("/proc/sys/kernel/{name}"))?));
    let settings: Vec<_> = ["pid_max", "threads-max"].into_iter().filter_map(setting).collect();
    let small: Vec<_> = settings.iter().filter(|(_, most)| *most < ENOUGH_TASKS).collect();
    if settings.is_empty() {
        return Check::skip(NAME, "not known");
    }
    if small.is_empty() {
        let least = settings.iter().map(|(_, most)| *most).min().unwrap_or_default();
        return Check::pass(NAME, format!("room for {least} processes and threads"));
    }
    let name = |(name, most): &&(String, u64)| format!("kernel.{name} is {most}");
    let cure = |(name, _): &&(String, u64)| {
        let most = if name == "pid_max" { MOST_PIDS } else { ENOUGH_TASKS };
        format!("kernel.{name}={most}")
    };
    let (found, cures): (Vec<_>, Vec<_>) = small.iter().map(|one| (name(one), cure(one))).unzip();
    Check::warn(
        NAME,
        format!("{}; a sandbox takes four or more tasks, and spawns fail at the limit", found.join(", ")),
        format!("sysctl -w {}", cures.join(" ")),
    )
}

/// The task limits of the cgroups above this one, such as systemd's `TasksMax`. Sandboxes are in a cgroup
/// beside the daemon's, so the limits above apply to them.
pub(super) fn task_limit(root: &Root) -> Check {
    const NAME: &str = "task-limit";
    let own = root.read("/proc/self/cgroup");
    let own = own.as_deref().and_then(|text| text.lines().find_map(|line| line.strip_prefix("0::")));
    let place = root.mounts("cgroup2").into_iter().next();
    let (Some(own), Some((place, _))) = (own, place) else {
        return Check::skip(NAME, "there is no cgroup v2");
    };
    let mut above = Some(own.trim_end_matches('/'));
    while let Some(path) = above.filter(|path| !path.is_empty()) {
        // `max` is not a number.
        let file = format!("{place}{path}/pids.max");
        if let Some(most) = root.number(&file).filter(|most| *most < ENOUGH_TASKS) {
            let name = path.rsplit('/').next().unwrap_or_default();
            let unit = [".slice", ".service", ".scope"].iter().any(|kind| name.ends_with(kind));
            let fix = if unit {
                format!("systemctl set-property {name} TasksMax=infinity")
            } else {
                format!("echo max > {file}")
            };
            let detail = format!(
                "{name} allows {most} tasks; a sandbox takes four or more, and spawns fail at the limit"
            );
            return Check::warn(NAME, detail, fix);
        }
        above = path.rsplit_once('/').map(|(parent, _)| parent);
    }
    Check::pass(NAME, "the cgroups above this one allow enough tasks")
}

/// The flows of all guests and of the host share one table.
pub(super) fn connection_tracking(root: &Root, will_use: Runs) -> Check {
    const NAME: &str = "conntrack";
    /// The default of Linux with a GiB of memory: enough for the limits of 64 guests.
    const ENOUGH_FLOWS: u64 = 262_144;
    if will_use == Runs::Machine {
        return Check::skip(NAME, "not needed: the emulated machine tracks connections by itself");
    }
    match root.read("/proc/sys/net/netfilter/nf_conntrack_max").map(|most| most.parse::<u64>()) {
        None => Check::skip(NAME, "not loaded yet; the first network loads it"),
        Some(Ok(most)) if most >= ENOUGH_FLOWS => Check::pass(NAME, format!("room for {most} flows")),
        Some(Ok(most)) => Check::warn(
            NAME,
            format!(
                "room for {most} flows: a few guests with many connections can fill the table and block the host"
            ),
            format!("sysctl -w net.netfilter.nf_conntrack_max={ENOUGH_FLOWS}, or lower --slot-max-flows"),
        ),
        Some(Err(_)) => Check::warn(NAME, "nf_conntrack_max is not a number", "check the kernel"),
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::super::root::FakeHost;
    use super::*;

    #[test]
    fn strict_overcommit_fails_with_its_command() {
        let set = |value| overcommit(&FakeHost::new().with("/proc/sys/vm/overcommit_memory", value).root());
        let strict = set("2");
        assert_eq!(strict.status, CheckStatus::Fail, "forks fail, which is no matter of speed");
        assert_eq!(strict.fix.as_deref(), Some("sysctl -w vm.overcommit_memory=0"));
        assert_eq!((set("0").status, set("1").status), (CheckStatus::Pass, CheckStatus::Pass));
        assert_eq!(overcommit(&FakeHost::new().root()).status, CheckStatus::Skip);
    }

    #[test]
    fn few_process_ids_are_warned_of_with_the_setting_that_is_low() {
        let set = |pids, threads| {
            let host = FakeHost::new().with("/proc/sys/kernel/pid_max", pids);
            process_ids(&host.with("/proc/sys/kernel/threads-max", threads).root())
        };
        let fix = |check: Check| (check.status, check.fix.unwrap_or_default());
        let pids = fix(set("32768", "190000"));
        assert_eq!(pids, (CheckStatus::Warn, "sysctl -w kernel.pid_max=4194304".into()));
        let threads = fix(set("4194304", "15000"));
        assert_eq!(threads, (CheckStatus::Warn, "sysctl -w kernel.threads-max=65536".into()));
        let both = fix(set("32768", "15000"));
        assert_eq!(both.1, "sysctl -w kernel.pid_max=4194304 kernel.threads-max=65536");
        assert_eq!(set("4194304", "190000").status, CheckStatus::Pass);
        let one = FakeHost::new().with("/proc/sys/kernel/pid_max", "4194304");
        assert_eq!(process_ids(&one.root()).status, CheckStatus::Pass);
        assert_eq!(process_ids(&FakeHost::new().root()).status, CheckStatus::Skip);
    }

    #[test]
    fn a_unit_that_allows_few_tasks_is_named_with_its_command() {
        const SLICE: &str = "/sys/fs/cgroup/user.slice/user-1000.slice/pids.max";
        let host = |most: &str| {
            FakeHost::new()
                .with("/proc/self/mountinfo", "31 24 0:27 / /sys/fs/cgroup rw - cgroup2 cgroup2 rw")
                .with(
                    "/proc/self/cgroup",
                    "1:name=systemd:/x\n0::/user.slice/user-1000.slice/session-3.scope",
                )
                .with(SLICE, most)
                .with("/sys/fs/cgroup/user.slice/pids.max", "max")
        };
        let check = task_limit(&host("10813").root());
        assert_eq!(check.status, CheckStatus::Warn);
        assert_eq!(check.fix.as_deref(), Some("systemctl set-property user-1000.slice TasksMax=infinity"));
        assert_eq!(task_limit(&host("max").root()).status, CheckStatus::Pass);
        assert_eq!(task_limit(&host("1384120").root()).status, CheckStatus::Pass);
        assert_eq!(task_limit(&FakeHost::new().root()).status, CheckStatus::Skip);
        // A cgroup that is not systemd's.
        let host =
            host("max").with("/proc/self/cgroup", "0::/box/inner").with("/sys/fs/cgroup/box/pids.max", "100");
        assert_eq!(task_limit(&host.root()).fix.as_deref(), Some("echo max > /sys/fs/cgroup/box/pids.max"));
    }

    #[test]
    fn a_small_table_of_connections_is_warned_of() {
        const FILE: &str = "/proc/sys/net/netfilter/nf_conntrack_max";
        let set = |value| connection_tracking(&FakeHost::new().with(FILE, value).root(), Runs::Kvm);
        let small = set("65536");
        assert_eq!(small.status, CheckStatus::Warn);
        assert!(small.fix.unwrap().starts_with("sysctl -w net.netfilter.nf_conntrack_max=262144"));
        assert_eq!(set("262144").status, CheckStatus::Pass);
        assert_eq!(connection_tracking(&FakeHost::new().root(), Runs::Kvm).status, CheckStatus::Skip);
        let machine = FakeHost::new().with(FILE, "1");
        assert_eq!(connection_tracking(&machine.root(), Runs::Machine).status, CheckStatus::Skip);
    }
}

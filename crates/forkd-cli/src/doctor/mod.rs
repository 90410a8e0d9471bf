//! The checks of `forkd doctor`. [`host`] checks the host, [`kernel`] settings of its kernel, [`tuning`] its
//! speed, [`limits`] its limits, [`disk`] the data directory's file system, [`ours`] forkd's own programs and
//! data. Checks change nothing.

mod disk;
mod host;
mod kernel;
mod limits;
mod ours;
mod root;
mod tuning;

use serde::Serialize;

use crate::args::DaemonArgs;
use crate::host::kvm::Kvm;
use crate::host::paths::{Binaries, DataDir};
use crate::ui::Ui;
use root::Root;

/// The result of a check.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum CheckStatus {
    /// All right.
    Pass,
    /// A feature is slow, weak, or missing until it is needed.
    Warn,
    /// Broken.
    Fail,
    /// Not checked: it does not matter here, or cannot be known.
    Skip,
}

/// One check.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct Check {
    pub(crate) name: &'static str,
    pub(crate) status: CheckStatus,
    /// What the check found.
    pub(crate) detail: String,
    /// How to fix it; absent if there is nothing to fix.
    pub(crate) fix: Option<String>,
    /// Whether forkd cannot work at all if this fails.
    #[serde(skip)]
    essential: bool,
}

impl Check {
    fn pass(name: &'static str, detail: impl Into<String>) -> Self {
        Check { name, status: CheckStatus::Pass, detail: detail.into(), fix: None, essential: false }
    }

    fn warn(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Check { status: CheckStatus::Warn, fix: Some(fix.into()), ..Check::pass(name, detail) }
    }

    fn fail(name: &'static str, detail: impl Into<String>, fix: impl Into<String>) -> Self {
        Check { status: CheckStatus::Fail, fix: Some(fix.into()), ..Check::pass(name, detail) }
    }

    fn skip(name: &'static str, detail: impl Into<String>) -> Self {
        Check { status: CheckStatus::Skip, ..Check::pass(name, detail) }
    }

    /// Marks a check as essential: forkd cannot work if it fails.
    fn essential(self) -> Self {
        Check { essential: true, ..self }
    }
}

/// Where sandboxes will run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Runs {
    /// On the host's KVM.
    Kvm,
    /// In the emulated machine.
    Machine,
}

/// All checks.
#[derive(Debug, Serialize)]
pub(crate) struct Report {
    pub(crate) checks: Vec<Check>,
    pub(crate) will_use: Runs,
    pub(crate) totals: Totals,
}

/// The number of checks by result.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize)]
pub(crate) struct Totals {
    pub(crate) pass: usize,
    pub(crate) warn: usize,
    pub(crate) fail: usize,
    pub(crate) skip: usize,
}

impl Report {
    fn new(checks: Vec<Check>, will_use: Runs) -> Self {
        let count = |status| checks.iter().filter(|check| check.status == status).count();
        let totals = Totals {
            pass: count(CheckStatus::Pass),
            warn: count(CheckStatus::Warn),
            fail: count(CheckStatus::Fail),
            skip: count(CheckStatus::Skip),
        };
        Report { checks, will_use, totals }
    }

    /// Failed essential checks.
    pub(crate) fn gates(&self) -> impl Iterator<Item = &Check> {
        self.checks.iter().filter(|check| check.essential && check.status == CheckStatus::Fail)
    }

    /// Whether forkd can work here.
    pub(crate) fn usable(&self) -> bool {
        self.gates().next().is_none()
    }

    /// The report as text.
    pub(crate) fn to_text(&self) -> String {
        let width = self.checks.iter().map(|check| check.name.len()).max().unwrap_or(0);
        let mut lines = Vec::new();
        for check in &self.checks {
            let status = match check.status {
                CheckStatus::Pass => "pass",
                CheckStatus::Warn => "warn",
                CheckStatus::Fail => "FAIL",
                CheckStatus::Skip => "skip",
            };
            lines.push(format!("{status}  {:width$}  {}", check.name, check.detail));
            if let Some(fix) = &check.fix {
                lines.push(format!("      {:width$}  fix: {fix}", ""));
            }
        }
        let Totals { pass, warn, fail, skip } = self.totals;
        lines.push(String::new());
        lines.push(format!("{pass} passed, {warn} warned, {fail} failed, {skip} skipped"));
        lines.push(match (self.usable(), self.will_use) {
            (false, _) => "forkd cannot work here until the failed checks are fixed.".to_owned(),
            (true, Runs::Kvm) => "Sandboxes will run on this host's KVM.".to_owned(),
            (true, Runs::Machine) => {
                "Sandboxes will run in the emulated machine: the same, but many times slower.".to_owned()
            }
        });
        lines.join("\n")
    }
}

/// Runs all checks.
pub(crate) async fn examine(data: &DataDir, daemon: &DaemonArgs, ui: Ui) -> Report {
    let binaries = Binaries::find();
    let unknown = |why: String| Kvm { reason: format!("cannot check KVM: {why}"), ..Kvm::default() };
    let kvm = match &binaries {
        Ok(binaries) => {
            crate::host::kvm::look_now(&binaries.vmm).unwrap_or_else(|error| unknown(format!("{error:#}")))
        }
        Err(_) => unknown("forkd-vmm is missing".to_owned()),
    };
    let will_use = if kvm.runs_linux { Runs::Kvm } else { Runs::Machine };
    let found = ours::find_daemon(data, daemon, ui).await;
    let mut checks = vec![host::platform(), host::virtualization(), host::kvm(&kvm), host::machine(will_use)];
    checks.extend([host::cgroups(will_use), host::huge_pages(), kernel::same_page_merging()]);
    checks.extend([kernel::userfaultfd(), kernel::forwarding(will_use)]);
    let root = Root::host();
    checks.extend([limits::connection_tracking(&root, will_use), host::nftables(), host::ip()]);
    checks.extend(of_a_kvm_host(&root, will_use));
    checks.extend([host::e2fsprogs(), host::image_tools(), host::data_dir(data), disk::features(data)]);
    checks.extend([ours::binaries(&binaries), ours::images(data), ours::kernel(data)]);
    checks.extend([ours::daemon(&found).await, ours::snapshots(&found, data, &binaries, will_use).await]);
    checks.extend([ours::token(data), ours::machine_shutdown(data), ours::leftovers(data)]);
    Report::new(checks, will_use)
}

/// Skips a check that matters only if guests run on the host's KVM.
fn of_a_kvm_host(root: &Root, will_use: Runs) -> Vec<Check> {
    let checks = [limits::overcommit, limits::process_ids, limits::task_limit, tuning::favordynmods];
    let checks =
        checks.into_iter().chain([tuning::nx_huge_pages, tuning::halt_polling, tuning::numa_balancing]);
    let checks = checks.chain([tuning::debugfs, tuning::grace_periods]).map(|check| check(root));
    match will_use {
        Runs::Kvm => checks.collect(),
        Runs::Machine => {
            let skip =
                |check: Check| Check::skip(check.name, "not needed: guests run in the emulated machine");
            checks.map(skip).collect()
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn report(checks: Vec<Check>) -> Report {
        Report::new(checks, Runs::Machine)
    }

    #[test]
    fn the_json_names_every_check_with_status_detail_and_fix() {
        let checks = vec![Check::pass("platform", "fine"), Check::warn("kvm", "slow", "nothing").essential()];
        assert_eq!(
            serde_json::to_value(report(checks)).unwrap(),
            serde_json::json!({
                "checks": [
                    {"name": "platform", "status": "pass", "detail": "fine", "fix": null},
                    {"name": "kvm", "status": "warn", "detail": "slow", "fix": "nothing"},
                ],
                "will_use": "machine",
                "totals": {"pass": 1, "warn": 1, "fail": 0, "skip": 0},
            })
        );
    }

    #[test]
    fn only_the_failure_of_something_essential_makes_forkd_unusable() {
        assert!(report(vec![Check::fail("token", "open", "chmod")]).usable());
        assert!(report(vec![Check::warn("x", "y", "z").essential()]).usable());
        assert!(!report(vec![Check::fail("x", "y", "z").essential()]).usable());
    }

    #[test]
    fn how_a_host_is_tuned_matters_only_where_guests_run_on_it() {
        let host = root::FakeHost::new().with("/proc/sys/vm/overcommit_memory", "2");
        let on_kvm = of_a_kvm_host(&host.root(), Runs::Kvm);
        let emulated = of_a_kvm_host(&host.root(), Runs::Machine);
        assert_eq!(on_kvm.iter().filter(|check| check.status == CheckStatus::Fail).count(), 1);
        assert!(emulated.iter().all(|check| check.status == CheckStatus::Skip && check.fix.is_none()));
        let names = |checks: &[Check]| checks.iter().map(|check| check.name).collect::<Vec<_>>();
        assert_eq!(names(&on_kvm), names(&emulated));
        let json = serde_json::to_value(Report::new(on_kvm, Runs::Kvm)).unwrap();
        assert_eq!(json["checks"][0]["fix"], "sysctl -w vm.overcommit_memory=0");
    }

    #[tokio::test]
    async fn an_examination_makes_every_check_once_and_every_problem_has_a_fix() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDir::resolve(Some(folder.path().to_path_buf())).unwrap();
        let report = examine(&data, &DaemonArgs::default(), Ui::new(true)).await;
        let names: Vec<_> = report.checks.iter().map(|check| check.name).collect();
        assert_eq!(
            names,
            [
                "platform",
                "virtualization",
                "kvm",
                "machine",
                "cgroups",
                "huge-pages",
                "ksm",
                "userfaultfd",
                "ip-forward",
                "conntrack",
                "nftables",
                "ip",
                "overcommit",
                "process-ids",
                "task-limit",
                "favordynmods",
                "nx-huge-pages",
                "halt-polling",
                "numa-balancing",
                "debugfs",
                "srcu",
                "e2fsprogs",
                "image-tools",
                "data-dir",
                "file-system",
                "binaries",
                "images",
                "kernel",
                "daemon",
                "snapshots",
                "token",
                "machine-shutdown",
                "leftovers"
            ]
        );
        for check in &report.checks {
            assert!(!check.detail.is_empty(), "{check:?}");
            let fine = matches!(check.status, CheckStatus::Pass | CheckStatus::Skip);
            assert!(fine || check.fix.is_some(), "{check:?}");
        }
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0, "looking changed something");
    }
}

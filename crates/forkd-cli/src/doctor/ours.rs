//! Checks of forkd's own programs, images, daemon, snapshots and leftovers.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;
use hyper::Method;
use serde_json::Value;

use super::{Check, Runs};
use crate::args::DaemonArgs;
use crate::cleanup::{self, Action};
use crate::client::Daemon;
use crate::client::types::{self, Snapshot};
use crate::host::paths::{Binaries, DataDir};
use crate::images;
use crate::machine::Machine;
use crate::machine::state::{Folder, Phase};
use crate::ui::Ui;

pub(super) fn binaries(binaries: &Result<Binaries>) -> Check {
    const NAME: &str = "binaries";
    const FIX: &str = "build them with `make build`, or reinstall forkd";
    let found = match binaries {
        Ok(found) => found,
        Err(error) => return Check::fail(NAME, format!("{error:#}"), FIX).essential(),
    };
    match is_static(&found.guest) {
        Some(true) => {
            Check::pass(NAME, format!("forkd-vmm and forkd-guest are next to {}", found.forkd.display()))
        }
        Some(false) => {
            let detail = format!("{} is not static: it cannot run in a guest", found.guest.display());
            Check::fail(NAME, detail, FIX).essential()
        }
        None => Check::fail(NAME, format!("{} is not a program", found.guest.display()), FIX).essential(),
    }
}

/// Whether an ELF file needs no interpreter; `None` if it is not a 64-bit ELF file.
fn is_static(path: &Path) -> Option<bool> {
    const INTERPRETER: u32 = 3;
    let bytes = fs::read(path).ok()?;
    if bytes.get(..5)? != b"\x7fELF\x02" {
        return None;
    }
    let number = |at: usize, size: usize| -> Option<u64> {
        let field = bytes.get(at..at.checked_add(size)?)?;
        Some(field.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte)))
    };
    let (table, size, count) = (number(32, 8)?, number(54, 2)?, number(56, 2)?);
    for index in 0..count {
        let at = table.checked_add(index.checked_mul(size)?)?;
        if number(usize::try_from(at).ok()?, 4)? == u64::from(INTERPRETER) {
            return Some(false);
        }
    }
    Some(true)
}

pub(super) fn images(data: &DataDir) -> Check {
    const NAME: &str = "images";
    match images::list(data) {
        Ok(images) if images.is_empty() => {
            Check::warn(NAME, "none yet; forkd builds `python` at its first use", "forkd image build python")
        }
        Ok(images) if images.iter().any(|image| image.problem.is_some()) => {
            let problems: Vec<_> = images.iter().filter_map(|image| image.problem.as_deref()).collect();
            Check::fail(NAME, problems.join("; "), "build them again, or remove them with `forkd image rm`")
        }
        Ok(images) => {
            let names: Vec<_> = images.iter().map(|image| image.name.as_str()).collect();
            Check::pass(NAME, names.join(", "))
        }
        Err(error) => Check::fail(
            NAME,
            format!("{error:#}"),
            "remove the broken image with `forkd image rm` and build it again",
        ),
    }
}

pub(super) fn kernel(data: &DataDir) -> Check {
    const NAME: &str = "kernel";
    match images::installed_kernel(data) {
        Ok(Some(kernel)) => Check::pass(NAME, kernel),
        Ok(None) => Check::warn(
            NAME,
            "none yet; forkd fetches Debian's kernel at its first use",
            "nothing to do, or use `forkd serve --kernel FILE`",
        ),
        Err(error) => {
            Check::fail(NAME, format!("{error:#}"), "remove the folder `kernels` of the data directory")
        }
    }
}

/// The result of the search for a daemon.
pub(super) enum Found {
    /// It answers.
    Answers(Daemon),
    /// The user named it, or its machine runs, but it does not answer: the address, and what to do.
    Silent(String, &'static str),
    /// No daemon runs.
    None,
}

/// Searches a daemon, without starting one.
pub(super) async fn find_daemon(data: &DataDir, args: &DaemonArgs, ui: Ui) -> Found {
    const FIND_TIMEOUT: Duration = Duration::from_secs(10);
    let (daemon, fix) = match crate::client::discover::find(data, args, ui).await {
        Ok(Some(daemon)) => (daemon, "start it, or unset FORKD_URL to let forkd find a daemon"),
        Ok(None) => {
            let machine = Machine::new(data, ui);
            let Ok(Some(running)) = machine.running() else { return Found::None };
            match machine.daemon(&running.state) {
                Ok(daemon) => (daemon, "forkd machine stop"),
                Err(error) => return Found::Silent(format!("{error:#}"), "forkd machine stop"),
            }
        }
        Err(error) => return Found::Silent(format!("{error:#}"), "correct FORKD_URL"),
    };
    if daemon.is_healthy(FIND_TIMEOUT).await {
        return Found::Answers(daemon);
    }
    Found::Silent(format!("does not answer at {}", daemon.url()), fix)
}

pub(super) async fn daemon(found: &Found) -> Check {
    const NAME: &str = "daemon";
    let daemon = match found {
        Found::Answers(daemon) => daemon,
        Found::Silent(detail, fix) => return Check::fail(NAME, detail, *fix),
        Found::None => {
            let detail = "none runs; `forkd run` starts one on demand";
            return Check::warn(
                NAME,
                detail,
                "nothing to do, or `forkd machine start` or `sudo forkd serve`",
            );
        }
    };
    let url = daemon.url();
    match daemon.ask(Method::GET, "/version", None).await {
        Ok(answer) => {
            let version = answer.get("version").and_then(Value::as_str).unwrap_or("unknown");
            let detail = format!("answers at {url}, version {version}");
            match version == env!("CARGO_PKG_VERSION") {
                true => Check::pass(NAME, detail),
                false => Check::warn(
                    NAME,
                    format!("{detail}; this command has version {}", env!("CARGO_PKG_VERSION")),
                    "restart the daemon; sandboxes keep running meanwhile",
                ),
            }
        }
        Err(error) => Check::fail(NAME, format!("{url}: {error:#}"), "give its token in FORKD_TOKEN"),
    }
}

/// Whether every snapshot is usable here, according to the daemon's report and to the CPU of its guest.
pub(super) async fn snapshots(
    found: &Found,
    data: &DataDir,
    binaries: &Result<Binaries>,
    will_use: Runs,
) -> Check {
    const NAME: &str = "snapshots";
    const FIX: &str = "create them again, or remove them with `forkd rmi`; snapshots of another CPU need a host like theirs";
    let mut problems = Vec::new();
    let mut count = None;
    if let Found::Answers(daemon) = found {
        match types::get::<Vec<Snapshot>>(daemon, "/v1/snapshots").await {
            Ok(snapshots) => {
                count = Some(snapshots.len());
                problems.extend(snapshots.iter().filter_map(|one| {
                    let why = one.error.as_ref().or(one.warning.as_ref())?;
                    Some(format!("{}: {why}", one.tag))
                }));
            }
            Err(error) => return Check::fail(NAME, format!("{error:#}"), "see the daemon's log"),
        }
    }
    // The machine's snapshots are on its own disk, for a CPU that is always the same.
    if let (Runs::Kvm, Ok(binaries)) = (will_use, binaries) {
        let tags = tags(&data.root().join("snapshots"));
        count.get_or_insert(tags.len());
        for (tag, state) in tags {
            match crate::host::kvm::check_state(&binaries.vmm, &state) {
                Ok(Ok(())) => {}
                Ok(Err(why)) => problems.push(format!("{tag}: {why}")),
                Err(error) => problems.push(format!("{tag}: {error:#}")),
            }
        }
    }
    match (count, problems.is_empty()) {
        (None, _) => Check::skip(NAME, "no daemon runs that could list them"),
        (Some(count), true) => Check::pass(NAME, format!("{count}, all of them usable")),
        (Some(_), false) => Check::warn(NAME, problems.join("; "), FIX),
    }
}

/// Snapshots in a folder, with their state files.
fn tags(folder: &Path) -> Vec<(String, std::path::PathBuf)> {
    let entries = fs::read_dir(folder).into_iter().flatten().flatten();
    let snapshot = |entry: fs::DirEntry| {
        let (tag, state) = (entry.file_name().to_str()?.to_owned(), entry.path().join("state"));
        (forkd_protocol::names::is_valid_name(&tag) && state.is_file()).then_some((tag, state))
    };
    entries.filter_map(snapshot).collect()
}

pub(super) fn token(data: &DataDir) -> Check {
    const NAME: &str = "token";
    let files = [data.token_file(), Folder::new(data.machine()).token()];
    let found: Vec<_> = files.into_iter().filter(|file| file.exists()).collect();
    for file in &found {
        let open = fs::metadata(file).is_ok_and(|data| data.permissions().mode() & 0o077 != 0);
        if open {
            let path = file.display();
            return Check::fail(NAME, format!("other users can read {path}"), format!("chmod 600 {path}"));
        }
    }
    match found.first() {
        Some(file) => Check::pass(NAME, format!("{} is private", file.display())),
        None => Check::pass(NAME, "none yet; the daemon creates it at its first start"),
    }
}

pub(super) fn machine_shutdown(data: &DataDir) -> Check {
    const NAME: &str = "machine-shutdown";
    match Folder::new(data.machine()).state() {
        Ok(Some(state))
            if !state.supervisor.is_alive() && !matches!(state.phase, Phase::Stopped | Phase::Failed) =>
        {
            let detail = "the emulated machine was not shut down; the next start checks its disk";
            Check::warn(NAME, detail, "nothing to do: saved data is on the disk")
        }
        Ok(Some(_)) => Check::pass(NAME, "the emulated machine runs, or was shut down"),
        Ok(None) => Check::skip(NAME, "there is no emulated machine"),
        Err(error) => {
            let fix = "stop the machine with the version of forkd that started it (`forkd machine stop`)";
            Check::warn(NAME, format!("{error:#}"), fix)
        }
    }
}

pub(super) fn leftovers(data: &DataDir) -> Check {
    const NAME: &str = "leftovers";
    let found = cleanup::find(data);
    let left: Vec<_> = found.iter().filter(|one| one.action == Action::Delete).collect();
    match left.first() {
        None => Check::pass(NAME, format!("nothing is left over; {} in use", found.len())),
        Some(first) => {
            let more = if left.len() > 1 { " and more" } else { "" };
            let count = crate::ui::count(left.len(), "thing", "things");
            let detail = format!("{count} without an owner: {}{more}", first.path);
            Check::warn(NAME, detail, "sudo forkd cleanup --yes")
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::*;

    #[test]
    fn a_program_with_an_interpreter_is_not_static() {
        assert_eq!(is_static(Path::new("/bin/sh")), Some(false));
        assert_eq!(is_static(Path::new("/etc/passwd")), None);
        assert_eq!(is_static(Path::new("/nonexistent")), None);
    }

    #[test]
    fn a_token_others_can_read_fails_with_the_command_that_mends_it() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDir::resolve(Some(folder.path().to_path_buf())).unwrap();
        let file = data.token_file();
        fs::write(&file, "secret").unwrap();
        fs::set_permissions(&file, fs::Permissions::from_mode(0o644)).unwrap();
        let check = token(&data);
        assert_eq!(check.status, CheckStatus::Fail);
        assert_eq!(check.fix.unwrap(), format!("chmod 600 {}", file.display()));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(token(&data).status, CheckStatus::Pass);
    }
}

//! Checks of what belongs to forkd: programs, images, the daemon, and what was left behind.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::time::Duration;

use anyhow::Result;

use super::Check;
use crate::args::DaemonArgs;
use crate::library;
use crate::machine::Machine;
use crate::machine::state::{Folder, Phase};
use crate::paths::{Binaries, DataDir};
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
    match library::list(data) {
        Ok(images) if images.is_empty() => {
            Check::warn(NAME, "none yet; `python` is built when it is first used", "forkd image build python")
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
    match library::installed_kernel(data) {
        Ok(Some(kernel)) => Check::pass(NAME, kernel),
        Ok(None) => Check::warn(
            NAME,
            "none yet; Debian's is fetched when it is first needed",
            "nothing to do, or give one to `forkd serve --kernel`",
        ),
        Err(error) => {
            Check::fail(NAME, format!("{error:#}"), "remove the folder `kernels` of the data directory")
        }
    }
}

pub(super) async fn daemon(data: &DataDir, args: &DaemonArgs, ui: Ui) -> Check {
    const NAME: &str = "daemon";
    const LIMIT: Duration = Duration::from_secs(5);
    match crate::daemon::find(data, args, ui).await {
        Ok(Some(daemon)) if daemon.is_healthy(LIMIT).await => {
            Check::pass(NAME, format!("answers at {}", daemon.url()))
        }
        Ok(Some(daemon)) => {
            let detail = format!("does not answer at {}", daemon.url());
            Check::fail(NAME, detail, "start it, or unset FORKD_URL to have one found")
        }
        Ok(None) => in_machine(data, ui).await,
        Err(error) => Check::fail(NAME, format!("{error:#}"), "correct FORKD_URL"),
    }
}

async fn in_machine(data: &DataDir, ui: Ui) -> Check {
    const NAME: &str = "daemon";
    let machine = Machine::new(data, ui);
    let Ok(Some(running)) = machine.running() else {
        let detail = "none runs; `forkd run` starts one when it needs it";
        return Check::warn(NAME, detail, "nothing to do, or `forkd machine start` or `sudo forkd serve`");
    };
    match machine.daemon(&running.state) {
        Ok(daemon) if daemon.is_healthy(Duration::from_secs(10)).await => {
            Check::pass(NAME, format!("answers at {}, in the emulated machine", daemon.url()))
        }
        _ => Check::fail(
            NAME,
            "the emulated machine runs, but its daemon does not answer",
            "forkd machine stop",
        ),
    }
}

pub(super) fn token(data: &DataDir) -> Check {
    const NAME: &str = "token";
    let files = [data.token_file(), Folder::new(data.machine()).token()];
    let found: Vec<_> = files.into_iter().filter(|file| file.exists()).collect();
    for file in &found {
        let open = fs::metadata(file).is_ok_and(|data| data.permissions().mode() & 0o077 != 0);
        if open {
            let path = file.display();
            return Check::fail(NAME, format!("others can read {path}"), format!("chmod 600 {path}"));
        }
    }
    match found.first() {
        Some(file) => Check::pass(NAME, format!("{} is private", file.display())),
        None => Check::pass(NAME, "none yet; made at the first start of the daemon"),
    }
}

pub(super) fn leftovers(data: &DataDir) -> Check {
    const NAME: &str = "leftovers";
    let folder = Folder::new(data.machine());
    let killed = match folder.state() {
        Ok(Some(state)) => {
            !state.supervisor.is_alive() && !matches!(state.phase, Phase::Stopped | Phase::Failed)
        }
        _ => false,
    };
    if killed {
        let detail = "the emulated machine was not shut down; its disk is checked at the next start";
        return Check::warn(NAME, detail, "nothing to do: what was saved is on the disk");
    }
    let sandboxes = sandbox_folders(&data.root().join("sandboxes"));
    let monitors = monitors();
    if monitors == 0 && sandboxes > 0 {
        let detail = format!("{sandboxes} folders of sandboxes that do not run");
        return Check::warn(NAME, detail, "start the daemon: it removes them");
    }
    Check::pass(NAME, format!("{sandboxes} sandbox folders, {monitors} monitor processes"))
}

fn sandbox_folders(folder: &Path) -> usize {
    let Ok(entries) = fs::read_dir(folder) else { return 0 };
    let is_sandbox = |name: &str| forkd_protocol::names::is_valid_sandbox_id(name);
    entries.flatten().filter(|entry| entry.file_name().to_str().is_some_and(is_sandbox)).count()
}

/// How many `forkd-vmm` processes there are.
fn monitors() -> usize {
    let Ok(entries) = fs::read_dir("/proc") else { return 0 };
    let is_monitor = |entry: &fs::DirEntry| {
        fs::read_to_string(entry.path().join("comm")).is_ok_and(|name| name.trim() == "forkd-vmm")
    };
    entries.flatten().filter(is_monitor).count()
}

#[cfg(test)]
mod tests {
    use super::super::Status;
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
        assert_eq!(check.status, Status::Fail);
        assert_eq!(check.fix.unwrap(), format!("chmod 600 {}", file.display()));
        fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
        assert_eq!(token(&data).status, Status::Pass);
    }
}

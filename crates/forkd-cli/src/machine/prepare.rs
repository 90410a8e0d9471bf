//! Prepares the start of the machine: programs, kernel, initramfs, disk, token.

use std::fs;
use std::os::unix::fs::{DirBuilderExt, PermissionsExt};
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

use super::qemu;
use super::state::{Build, Folder, Plan};
use super::{builds, disk};
use crate::host::files;
use crate::host::paths::{Binaries, DataDir, find_program};
use crate::images;
use crate::settings;
use crate::ui::Ui;

/// Memory of the machine, unless `FORKD_MACHINE_MIB` is set.
const MEMORY_MIB: u64 = 4096;
/// Seconds without an answer after which the machine counts as hung, unless `FORKD_MACHINE_WATCHDOG_SECS` is
/// set.
const WATCHDOG_SECS: u64 = 120;

/// Creates missing files and returns the plan of the start.
pub(super) fn prepare(
    data: &DataDir,
    folder: &Folder,
    binaries: &Binaries,
    build: &Build,
    ui: Ui,
) -> Result<Plan> {
    let qemu = find_qemu()?;
    let memory_mib = number("machine_mib", "FORKD_MACHINE_MIB", MEMORY_MIB, 1024..=1 << 20)?;
    let watchdog_secs =
        number("machine_watchdog_secs", "FORKD_MACHINE_WATCHDOG_SECS", WATCHDOG_SECS, 10..=86_400)?;
    let kernel = images::machine_kernel(data, ui)?;
    make_private_folder(&folder.programs())?;
    builds::publish(binaries, build, folder)?;
    builds::remove_others(folder, build);
    disk::prepare(&folder.disk())?;
    make_token(&folder.token())?;
    let agent_token = files::random_hex(32)?;
    let initramfs = kernel.initramfs(&binaries.guest, qemu::init_plan(&agent_token))?;
    // It holds the agent's token.
    files::write_private(&folder.initramfs(), &initramfs)?;
    Ok(Plan { qemu, kernel: kernel.path, memory_mib, agent_token, build: build.clone(), watchdog_secs })
}

/// The path of QEMU.
pub(crate) fn find_qemu() -> Result<PathBuf> {
    if let Some(path) = settings::value("qemu", "FORKD_QEMU") {
        return Ok(path.into());
    }
    find_program("qemu-system-x86_64").context(
        "KVM cannot run Linux here, and qemu-system-x86_64, which emulates a machine, is missing: install the \
        package qemu-system-x86",
    )
}

/// Creates a folder that only its owner can read, or makes an existing one private.
pub(super) fn make_private_folder(path: &Path) -> Result<()> {
    fs::DirBuilder::new()
        .recursive(true)
        .mode(0o700)
        .create(path)
        .with_context(|| format!("cannot make {}; choose another place with --data-dir", path.display()))?;
    fs::set_permissions(path, fs::Permissions::from_mode(0o700))
        .with_context(|| format!("cannot make {} private", path.display()))
}

fn make_token(path: &Path) -> Result<()> {
    let there = files::read_small(path)?.is_some_and(|token| !token.is_empty());
    if there { Ok(()) } else { files::write_private(path, files::random_hex(32)?.as_bytes()) }
}

fn number(key: &str, name: &str, default: u64, range: std::ops::RangeInclusive<u64>) -> Result<u64> {
    let Some(text) = settings::value(key, name) else { return Ok(default) };
    match text.to_str().and_then(|text| text.parse().ok()) {
        Some(number) if range.contains(&number) => Ok(number),
        _ => bail!(
            "{name}, or {key} in the configuration file, must be a number from {} to {}",
            range.start(),
            range.end()
        ),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_token_is_made_once_and_kept() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("token");
        make_token(&path).unwrap();
        let first = fs::read(&path).unwrap();
        make_token(&path).unwrap();
        assert_eq!(fs::read(&path).unwrap(), first);
        assert_eq!(first.len(), 64);
    }

    #[test]
    fn the_machines_folder_is_private_even_if_it_was_not() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a/machine");
        fs::create_dir_all(&path).unwrap();
        make_private_folder(&path).unwrap();
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o700);
    }
}

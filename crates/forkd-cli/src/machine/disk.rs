//! The machine's own disk: one sparse file with an ext4 in it.

use std::fs::{self, OpenOptions};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::process::Command;

use anyhow::{Context, Result, bail};

use crate::host::paths::find_program;

/// Size of a new disk; the file is sparse.
const SIZE: u64 = 20 << 30;

/// Creates the disk if it is missing, and repairs it if the machine was not shut down cleanly.
pub(super) fn prepare(disk: &Path) -> Result<()> {
    if disk.exists() { repair(disk) } else { make(disk) }
}

fn make(disk: &Path) -> Result<()> {
    let mke2fs = find_program("mke2fs").context("mke2fs is missing: install the package e2fsprogs")?;
    // Under another name until it is complete.
    let temporary = disk.with_extension("new");
    let file = OpenOptions::new()
        .write(true)
        .create(true)
        .truncate(true)
        .mode(0o600)
        .open(&temporary)
        .with_context(|| format!("cannot write {}", temporary.display()))?;
    file.set_len(SIZE).with_context(|| format!("cannot make a sparse file of {SIZE} bytes"))?;
    let mut command = Command::new(mke2fs);
    command
        .args(["-q", "-F", "-t", "ext4", "-m", "0", "-L", "forkd-machine"])
        // The file is all zeros already: writing the journal's zeros would only take space.
        .args(["-E", "lazy_journal_init=1"])
        .arg(&temporary);
    run(&mut command, 0)?;
    file.sync_all().context("cannot write the disk")?;
    fs::rename(&temporary, disk).with_context(|| format!("cannot make {}", disk.display()))
}

/// Replays the journal and repairs the disk after a power-off; takes no time on a clean disk.
fn repair(disk: &Path) -> Result<()> {
    let Some(e2fsck) = find_program("e2fsck") else { return Ok(()) };
    // 1 and 2: errors were corrected.
    run(Command::new(e2fsck).arg("-p").arg(disk), 2).with_context(|| {
        let path = disk.display();
        format!(
            "the machine's disk is damaged; repair it with `e2fsck {path}`, or remove it to get an empty one"
        )
    })
}

fn run(command: &mut Command, worst: i32) -> Result<()> {
    let program = command.get_program().display().to_string();
    let output = command.output().with_context(|| format!("cannot run {program}"))?;
    if output.status.code().is_none_or(|code| code > worst) {
        let text = String::from_utf8_lossy(&output.stderr);
        let text = if text.trim().is_empty() { String::from_utf8_lossy(&output.stdout) } else { text };
        bail!("{program} failed with {}: {}", output.status, text.trim());
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_new_disk_is_large_and_takes_little_room_and_a_second_look_leaves_it_alone() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("data.img");
        prepare(&disk).unwrap();
        let data = fs::metadata(&disk).unwrap();
        assert_eq!(data.len(), SIZE);
        assert!(data.blocks() * 512 < 64 << 20, "{} blocks", data.blocks());
        prepare(&disk).unwrap();
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_disk_that_is_none_is_refused_with_its_name() {
        let folder = tempfile::tempdir().unwrap();
        let disk = folder.path().join("data.img");
        fs::write(&disk, "not a disk").unwrap();
        assert!(prepare(&disk).unwrap_err().to_string().contains("data.img"));
    }
}

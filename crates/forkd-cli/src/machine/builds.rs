//! The programs that the machine runs: copies of this build, in a folder named after their content.
//!
//! The machine reads them from the host's disk while they run, so a file is never replaced: each build has
//! its own folder.

use std::fs::{self, File};
use std::io::Read;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use anyhow::{Context, Result};
use sha2::{Digest, Sha256};

use super::qemu;
use super::state::{Build, Folder};
use crate::host::files::{self, hex};
use crate::host::paths::Binaries;

/// The build of these programs. An earlier result is reused if the files' sizes and times are the same:
/// reading them all would cost every command a tenth of a second.
pub(super) fn identify(binaries: &Binaries, known: Option<&Build>) -> Result<Build> {
    let seen = quick_fingerprint(binaries)?;
    if let Some(known) = known.filter(|known| known.seen == seen) {
        return Ok(known.clone());
    }
    let guest = digest(&binaries.guest)?;
    let mut whole = Sha256::new();
    for part in [digest(&binaries.forkd)?, digest(&binaries.vmm)?, guest] {
        whole.update(part);
    }
    let mut boot = Sha256::new();
    boot.update(guest);
    boot.update(serde_json::to_vec(&(qemu::init_plan(""), crate::images::MACHINE_MODULES))?);
    let name = |hasher: Sha256| hex(&hasher.finalize()[..8]);
    Ok(Build { id: name(whole), boot: name(boot), seen })
}

/// Copies the programs of `build` into the machine's folder, if they are not there yet.
pub(super) fn publish(binaries: &Binaries, build: &Build, folder: &Folder) -> Result<()> {
    let target = folder.programs().join(&build.id);
    if target.is_dir() {
        return Ok(());
    }
    let temporary = folder.programs().join(format!(".{}-{}", build.id, files::random_hex(4)?));
    let copied = copy_all(binaries, &temporary).and_then(|()| match fs::rename(&temporary, &target) {
        // Another command copied the same build at the same time.
        Err(_) if target.is_dir() => Ok(()),
        other => other.with_context(|| format!("cannot make {}", target.display())),
    });
    if temporary.exists() {
        let _ = fs::remove_dir_all(&temporary);
    }
    copied
}

fn copy_all(binaries: &Binaries, target: &Path) -> Result<()> {
    fs::create_dir_all(target).with_context(|| format!("cannot make {}", target.display()))?;
    let programs: [(&Path, &str); 3] =
        [(&binaries.forkd, "forkd"), (&binaries.vmm, "forkd-vmm"), (&binaries.guest, "forkd-guest")];
    for (source, name) in programs {
        fs::copy(source, target.join(name))
            .with_context(|| format!("cannot copy {} to {}", source.display(), target.display()))?;
    }
    Ok(())
}

/// Removes unused builds. Only while the machine is down.
pub(super) fn remove_others(folder: &Folder, build: &Build) {
    let Ok(entries) = fs::read_dir(folder.programs()) else { return };
    for entry in entries.flatten().filter(|entry| entry.file_name() != build.id.as_str()) {
        // A build that cannot be removed only takes space.
        let _ = fs::remove_dir_all(entry.path());
    }
}

fn quick_fingerprint(binaries: &Binaries) -> Result<String> {
    let mut text = String::new();
    for path in [&binaries.forkd, &binaries.vmm, &binaries.guest] {
        let data = fs::metadata(path).with_context(|| format!("cannot read {}", path.display()))?;
        text.push_str(&format!("{}:{}:{}.{} ", data.ino(), data.len(), data.mtime(), data.mtime_nsec()));
    }
    Ok(text)
}

fn digest(path: &Path) -> Result<[u8; 32]> {
    let failed = || format!("cannot read {}", path.display());
    let mut file = File::open(path).with_context(failed)?;
    let mut hasher = Sha256::new();
    let mut buffer = vec![0u8; 1 << 20];
    loop {
        let count = file.read(&mut buffer).with_context(failed)?;
        if count == 0 {
            return Ok(hasher.finalize().into());
        }
        hasher.update(&buffer[..count]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn binaries(folder: &Path, guest: &str) -> Binaries {
        let write = |name: &str, text: &str| {
            let path = folder.join(name);
            fs::write(&path, text).unwrap();
            path
        };
        Binaries {
            forkd: write("forkd", "a"),
            vmm: write("forkd-vmm", "b"),
            guest: write("forkd-guest", guest),
        }
    }

    #[test]
    fn another_agent_is_another_build_and_the_old_one_stays_until_it_is_removed() {
        let temporary = tempfile::tempdir().unwrap();
        let folder = Folder::new(temporary.path().join("machine"));
        let first = identify(&binaries(temporary.path(), "c"), None).unwrap();
        publish(&binaries(temporary.path(), "c"), &first, &folder).unwrap();
        let second = identify(&binaries(temporary.path(), "d"), Some(&first)).unwrap();
        assert_ne!(first.id, second.id);
        assert_ne!(first.boot, second.boot);
        publish(&binaries(temporary.path(), "d"), &second, &folder).unwrap();
        let agent = |build: &Build| folder.programs().join(&build.id).join("forkd-guest");
        assert_eq!(fs::read_to_string(agent(&first)).unwrap(), "c");
        assert_eq!(fs::read_to_string(agent(&second)).unwrap(), "d");
        remove_others(&folder, &second);
        assert!(!agent(&first).exists() && agent(&second).exists());
    }

    #[test]
    fn files_that_look_the_same_are_not_read_again() {
        let temporary = tempfile::tempdir().unwrap();
        let binaries = binaries(temporary.path(), "c");
        let first = identify(&binaries, None).unwrap();
        let known = Build { id: "taken over".into(), ..first };
        assert_eq!(identify(&binaries, Some(&known)).unwrap().id, "taken over");
    }
}

//! Small files that must never be seen half-written, and locks that die with their holder.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result};
use rustix::fs::FlockOperation;
use serde::{Serialize, de::DeserializeOwned};

/// The longest file of ours that is read whole.
const MAX_SMALL_FILE: u64 = 1 << 20;

/// Replaces `path` by `bytes`, readable by its owner only: another process sees the old content or
/// the new, also after a power cut.
pub(crate) fn write_private(path: &Path, bytes: &[u8]) -> Result<()> {
    let failed = || format!("cannot write {}", path.display());
    let temporary = path.with_extension(format!("tmp{}", std::process::id()));
    let mut options = OpenOptions::new();
    let mut file =
        options.write(true).create(true).truncate(true).mode(0o600).open(&temporary).with_context(failed)?;
    let written =
        file.write_all(bytes).and_then(|()| file.sync_all()).and_then(|()| fs::rename(&temporary, path));
    if written.is_err() {
        let _ = fs::remove_file(&temporary);
    }
    written.with_context(failed)?;
    if let Some(folder) = path.parent() {
        File::open(folder).and_then(|folder| folder.sync_all()).with_context(failed)?;
    }
    Ok(())
}

/// Writes `value` as JSON, as [`write_private`] does.
pub(crate) fn write_json<T: Serialize>(path: &Path, value: &T) -> Result<()> {
    write_private(path, &serde_json::to_vec_pretty(value)?)
}

/// Reads a small file; `None` if there is none.
pub(crate) fn read_small(path: &Path) -> Result<Option<Vec<u8>>> {
    let file = match File::open(path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(None),
        Err(error) => return Err(error).with_context(|| format!("cannot read {}", path.display())),
    };
    let mut bytes = Vec::new();
    file.take(MAX_SMALL_FILE)
        .read_to_end(&mut bytes)
        .with_context(|| format!("cannot read {}", path.display()))?;
    Ok(Some(bytes))
}

/// Reads JSON; `None` if there is no file, or one that some other version wrote.
pub(crate) fn read_json<T: DeserializeOwned>(path: &Path) -> Result<Option<T>> {
    Ok(read_small(path)?.and_then(|bytes| serde_json::from_slice(&bytes).ok()))
}

/// A lock on a file, held until it is dropped or its process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock if nobody has it.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = open_lock(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno).with_context(|| format!("cannot lock {}", path.display())),
        }
    }

    /// Takes the lock; calls `waiting` first if somebody else has it.
    pub(crate) fn take(path: &Path, waiting: impl FnOnce()) -> Result<Self> {
        if let Some(lock) = Self::try_take(path)? {
            return Ok(lock);
        }
        waiting();
        let file = open_lock(path)?;
        rustix::io::retry_on_intr(|| rustix::fs::flock(&file, FlockOperation::LockExclusive))
            .with_context(|| format!("cannot lock {}", path.display()))?;
        Ok(Lock { _file: file })
    }
}

fn open_lock(path: &Path) -> Result<File> {
    let mut options = OpenOptions::new();
    options.write(true).create(true).truncate(false).mode(0o600);
    options.open(path).with_context(|| format!("cannot open {}", path.display()))
}

/// `bytes` random bytes in hexadecimal.
pub(crate) fn random_hex(bytes: usize) -> Result<String> {
    let mut buffer = vec![0u8; bytes];
    let mut filled = 0;
    while filled < bytes {
        let flags = rustix::rand::GetRandomFlags::empty();
        filled += rustix::rand::getrandom(&mut buffer[filled..], flags).context("no random numbers")?;
    }
    Ok(hex(&buffer))
}

/// `bytes` in hexadecimal.
pub(crate) fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|byte| format!("{byte:02x}")).collect()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn a_written_file_is_private_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        write_json(&path, &vec![1, 2]).unwrap();
        write_json(&path, &vec![3]).unwrap();
        assert_eq!(read_json::<Vec<i32>>(&path).unwrap(), Some(vec![3]));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_file_of_another_version_counts_as_missing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert_eq!(read_json::<Vec<i32>>(&path).unwrap(), None);
        fs::write(&path, "{").unwrap();
        assert_eq!(read_json::<Vec<i32>>(&path).unwrap(), None);
    }

    #[test]
    fn a_lock_is_held_by_one_at_a_time_and_freed_when_dropped() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("lock");
        let held = Lock::try_take(&path).unwrap().unwrap();
        assert!(Lock::try_take(&path).unwrap().is_none());
        drop(held);
        let mut waited = false;
        Lock::take(&path, || waited = true).unwrap();
        assert!(!waited);
    }
}

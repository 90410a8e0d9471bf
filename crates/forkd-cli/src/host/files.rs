//! Small files that are replaced atomically, and locks that end with their holder.

use std::fs::{self, File, OpenOptions};
use std::io::{Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use anyhow::{Context, Result, bail};
use rustix::fs::FlockOperation;
use serde::{Deserialize, Serialize, de::DeserializeOwned};

/// The limit of a small file's length.
const MAX_SMALL_FILE: u64 = 1 << 20;

/// Replaces the content of `path` by `bytes`, readable by its owner only. Another process sees the old
/// content or the new one, also after a power cut.
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

/// A record that later commands read. A new field needs `serde(default)`: `tests/golden` has every version.
pub(crate) trait Record: Serialize + DeserializeOwned {
    /// The version that is written. This version and all earlier ones are read. A file without a version is 0.
    const VERSION: u32 = 1;
}

/// Writes a record, as [`write_private`] does.
pub(crate) fn write_record<T: Record>(path: &Path, record: &T) -> Result<()> {
    write_private(path, &record_bytes(record)?)
}

fn record_bytes<T: Record>(record: &T) -> Result<Vec<u8>> {
    #[derive(Serialize)]
    struct Versioned<'a, T> {
        version: u32,
        #[serde(flatten)]
        record: &'a T,
    }
    Ok(serde_json::to_vec_pretty(&Versioned { version: T::VERSION, record })?)
}

/// Reads a small file; `None` if it does not exist.
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

/// Reads a record; `None` if there is no file. A record that cannot be read is an error: it is damaged or from
/// a newer forkd, and the objects it names may exist.
pub(crate) fn read_record<T: Record>(path: &Path) -> Result<Option<T>> {
    let fix = || {
        format!(
            "cannot read the record {}; use the version of forkd that wrote it, or remove the file if nothing of it runs",
            path.display()
        )
    };
    read_small(path)?.map(|bytes| parse_record(&bytes).with_context(fix)).transpose()
}

fn parse_record<T: Record>(bytes: &[u8]) -> Result<T> {
    #[derive(Deserialize)]
    struct Header {
        #[serde(default)]
        version: u64,
    }
    let Header { version } = serde_json::from_slice(bytes)?;
    // Before the rest: a newer version may have any other fields.
    if version > u64::from(T::VERSION) {
        bail!("it has version {version}, and this forkd reads versions up to {}", T::VERSION);
    }
    Ok(serde_json::from_slice(bytes)?)
}

/// Asserts that every version of `name` in `tests/golden` is read, and written as the newest.
#[cfg(test)]
pub(crate) fn assert_golden<T: Record>(name: &str) {
    let golden = |version: u32| {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        fs::read(folder.join(format!("{name}.v{version}.json"))).unwrap()
    };
    let value = |bytes: &[u8]| serde_json::from_slice::<serde_json::Value>(bytes).unwrap();
    for version in 0..=T::VERSION {
        let record: T = parse_record(&golden(version)).unwrap();
        let written = value(&record_bytes(&record).unwrap());
        assert_eq!(written, value(&golden(T::VERSION)), "{name} version {version}");
    }
}

/// A lock on a file, held until it is dropped or its process dies.
#[derive(Debug)]
pub(crate) struct Lock {
    _file: File,
}

impl Lock {
    /// Takes the lock if it is free.
    pub(crate) fn try_take(path: &Path) -> Result<Option<Self>> {
        let file = open_lock(path)?;
        match rustix::fs::flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => Ok(Some(Lock { _file: file })),
            Err(rustix::io::Errno::WOULDBLOCK) => Ok(None),
            Err(errno) => Err(errno).with_context(|| format!("cannot lock {}", path.display())),
        }
    }

    /// Takes the lock; calls `waiting` first if another process has it.
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

    #[derive(Debug, PartialEq, Serialize, Deserialize)]
    struct Note {
        text: String,
    }

    impl Record for Note {}

    fn note(text: &str) -> Note {
        Note { text: text.into() }
    }

    #[test]
    fn a_written_file_is_private_and_whole() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("state.json");
        write_record(&path, &note("one")).unwrap();
        write_record(&path, &note("two")).unwrap();
        assert_eq!(read_record(&path).unwrap(), Some(note("two")));
        assert_eq!(fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert_eq!(fs::read_dir(folder.path()).unwrap().count(), 1);
    }

    #[test]
    fn a_record_that_cannot_be_read_is_not_a_missing_one() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("x");
        assert_eq!(read_record::<Note>(&path).unwrap(), None);
        fs::write(&path, r#"{"text":"old"}"#).unwrap();
        assert_eq!(read_record(&path).unwrap(), Some(note("old")));
        for bad in ["", "{", r#"{"version":2,"text":"new"}"#, r#"{"version":1}"#] {
            fs::write(&path, bad).unwrap();
            assert!(read_record::<Note>(&path).is_err(), "{bad}");
        }
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

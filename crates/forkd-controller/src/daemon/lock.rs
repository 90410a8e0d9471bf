//! One daemon per data directory.

use std::fs::{File, OpenOptions};
use std::io::{Read, Seek, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;

use rustix::fs::{FlockOperation, flock};

use crate::error::{Code, Error, Result};

/// Holds a data directory. The kernel releases the lock when the daemon ends, however it ends.
#[derive(Debug)]
pub(crate) struct DataLock {
    _file: File,
}

impl DataLock {
    /// Takes the lock of `data_dir`. The error names the process that holds it.
    pub(crate) fn take(data_dir: &Path) -> Result<Self> {
        let path = data_dir.join("daemon.lock");
        let failed = |error: std::io::Error| Error::host(format!("cannot lock {}", path.display()), error);
        let mut file = OpenOptions::new()
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .mode(0o600)
            .open(&path)
            .map_err(failed)?;
        match flock(&file, FlockOperation::NonBlockingLockExclusive) {
            Ok(()) => {}
            Err(rustix::io::Errno::WOULDBLOCK) => {
                let mut holder = String::new();
                let _ = (&file).take(16).read_to_string(&mut holder);
                let holder = holder.trim();
                let text = format!(
                    "{} is in use by another daemon (pid {holder}); stop that daemon, or choose another \
                     data directory",
                    data_dir.display()
                );
                return Err(Error::new(Code::AddressInUse, text));
            }
            Err(error) => return Err(failed(error.into())),
        }
        file.set_len(0).map_err(failed)?;
        file.rewind().map_err(failed)?;
        writeln!(file, "{}", std::process::id()).map_err(failed)?;
        Ok(DataLock { _file: file })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_second_daemon_gets_the_pid_of_the_holder_of_the_directory() {
        let dir = tempfile::tempdir().unwrap();
        let first = DataLock::take(dir.path()).unwrap();
        let error = DataLock::take(dir.path()).unwrap_err();
        assert_eq!(error.code(), Code::AddressInUse);
        assert!(error.public().contains(&format!("(pid {})", std::process::id())), "{error}");
        drop(first);
        DataLock::take(dir.path()).unwrap();
    }
}

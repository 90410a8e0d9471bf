//! Logs that cannot fill the disk: they keep the newest bytes, at most twice the limit.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use parking_lot::Mutex;

use crate::host::clock;
use crate::ui;

/// A log that starts a new file when the current one is full, and keeps the previous one as `.old`.
#[derive(Debug)]
pub(super) struct BoundedLog {
    path: PathBuf,
    file: File,
    length: u64,
    limit: u64,
}

impl BoundedLog {
    /// Opens the log for appending.
    pub(super) fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok(BoundedLog { path: path.to_path_buf(), file, length, limit })
    }

    /// Writes a line with a timestamp.
    pub(super) fn line(&mut self, text: &str) {
        let line = format!("{} {text}\n", clock::timestamp(clock::now()));
        // A full disk must not end the machine.
        let _ = self.write_all(line.as_bytes());
    }
}

impl Write for BoundedLog {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        if self.length >= self.limit {
            fs::rename(&self.path, self.path.with_extension("log.old"))?;
            self.file = OpenOptions::new().create(true).append(true).open(&self.path)?;
            self.length = 0;
        }
        let room = usize::try_from(self.limit - self.length).unwrap_or(usize::MAX);
        let written = self.file.write(&bytes[..bytes.len().min(room)])?;
        self.length += written as u64;
        Ok(written)
    }

    fn flush(&mut self) -> io::Result<()> {
        self.file.flush()
    }
}

/// A log that several threads write to.
#[derive(Debug, Clone)]
pub(super) struct Log(Arc<Mutex<BoundedLog>>);

impl Log {
    pub(super) fn open(path: &Path, limit: u64) -> io::Result<Self> {
        Ok(Log(Arc::new(Mutex::new(BoundedLog::open(path, limit)?))))
    }

    /// Writes a line with a timestamp.
    pub(super) fn line(&self, text: &str) {
        self.0.lock().line(text);
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The last `count` bytes of a log as text, for a message; empty if there is no log. The text has no control
/// characters, so a machine's output cannot control the user's terminal.
pub(crate) fn tail(path: &Path, count: u64) -> String {
    let read = || -> io::Result<Vec<u8>> {
        let mut file = File::open(path)?;
        let length = file.metadata()?.len();
        file.seek(SeekFrom::Start(length.saturating_sub(count)))?;
        let mut bytes = Vec::new();
        file.take(count).read_to_end(&mut bytes)?;
        Ok(bytes)
    };
    printable(&read().unwrap_or_default())
}

/// `bytes` as text without control characters; lines and tabs stay.
pub(super) fn printable(bytes: &[u8]) -> String {
    ui::without_control_chars(&String::from_utf8_lossy(bytes)).trim().to_owned()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_flooded_log_keeps_the_newest_and_stays_under_twice_its_limit() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.log");
        let mut log = BoundedLog::open(&path, 1000).unwrap();
        for number in 0..1000 {
            writeln!(log, "line {number}").unwrap();
        }
        let old = fs::metadata(folder.path().join("console.log.old")).unwrap().len();
        let new = fs::metadata(&path).unwrap().len();
        assert!(old <= 1000 && new <= 1000, "{old} {new}");
        assert!(tail(&path, 20).ends_with("line 999"));
    }

    #[test]
    fn a_log_cannot_control_the_terminal_it_is_shown_on() {
        assert_eq!(printable(b"\0\0a\x1b[2Jb\r\n\tc\n"), "a[2Jb\n\tc");
    }
}

//! Logs that cannot fill the disk: the newest bytes are kept, twice the limit at most.

use std::fs::{self, File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex};
use std::time::{SystemTime, UNIX_EPOCH};

/// A log that starts a new file when the current one is full; the one before is kept as `.old`.
#[derive(Debug)]
pub(super) struct BoundedLog {
    path: PathBuf,
    file: File,
    length: u64,
    limit: u64,
}

impl BoundedLog {
    /// Opens the log, to write after what is there.
    pub(super) fn open(path: &Path, limit: u64) -> io::Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(path)?;
        let length = file.metadata()?.len();
        Ok(BoundedLog { path: path.to_path_buf(), file, length, limit })
    }

    /// Writes a line with the time before it.
    pub(super) fn line(&mut self, text: &str) {
        let line = format!("{} {text}\n", timestamp());
        // A full disk must not take the machine down.
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

    /// Writes a line with the time before it.
    pub(super) fn line(&self, text: &str) {
        if let Ok(mut log) = self.0.lock() {
            log.line(text);
        }
    }
}

impl Write for Log {
    fn write(&mut self, bytes: &[u8]) -> io::Result<usize> {
        self.0.lock().map_err(|_| io::Error::other("the log is broken"))?.write(bytes)
    }

    fn flush(&mut self) -> io::Result<()> {
        Ok(())
    }
}

/// The last `count` bytes of a log as text, for a message; empty if there is none. What a machine
/// wrote cannot control the reader's terminal.
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
    let text = String::from_utf8_lossy(bytes);
    let harmless = |c: &char| matches!(c, '\n' | '\t') || !c.is_control();
    text.chars().filter(harmless).collect::<String>().trim().to_owned()
}

/// Seconds since 1970.
pub(super) fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map(|duration| duration.as_secs()).unwrap_or_default()
}

fn timestamp() -> String {
    let time = now();
    let (days, rest) = (time / 86_400, time % 86_400);
    let (year, month, day) = civil(days);
    format!("{year:04}-{month:02}-{day:02}T{:02}:{:02}:{:02}Z", rest / 3600, rest % 3600 / 60, rest % 60)
}

/// The date `days` after 1970-01-01, in the Gregorian calendar, whose years are counted from March
/// here so that the leap day comes last.
fn civil(days: u64) -> (u64, u64, u64) {
    let days = days + 719_468;
    let era = days / 146_097;
    let day_of_era = days % 146_097;
    let year_of_era = (day_of_era - day_of_era / 1460 + day_of_era / 36_524 - day_of_era / 146_096) / 365;
    let day_of_year = day_of_era - (365 * year_of_era + year_of_era / 4 - year_of_era / 100);
    let shifted = (5 * day_of_year + 2) / 153;
    let day = day_of_year - (153 * shifted + 2) / 5 + 1;
    let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
    (year_of_era + era * 400 + u64::from(month <= 2), month, day)
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

    #[test]
    fn dates_are_right_around_leap_days() {
        assert_eq!(civil(0), (1970, 1, 1));
        assert_eq!(civil(59), (1970, 3, 1));
        assert_eq!(civil(11_016), (2000, 2, 29));
        assert_eq!(civil(11_017), (2000, 3, 1));
        assert_eq!(civil(20_454), (2026, 1, 1));
    }
}

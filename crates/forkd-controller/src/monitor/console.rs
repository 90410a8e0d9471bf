//! The console output of a guest, and the log of a monitor.
//!
//! The processes that write these files are not trusted to be brief or printable. So reads are limited, and
//! control characters never reach a terminal.

use std::fs::File;
use std::io::{self, Read, Seek, SeekFrom};
use std::path::Path;

/// How many bytes of a message an error quotes.
const BRIEF: usize = 200;

/// The last `max` bytes of a file as printable text. A file that cannot be read counts as empty: the text only
/// adds to an error and must not cause one.
pub(crate) fn tail(path: &Path, max: u64) -> String {
    read_end(path, max).map(|bytes| printable(&bytes)).unwrap_or_default()
}

fn read_end(path: &Path, max: u64) -> io::Result<Vec<u8>> {
    let mut file = File::open(path)?;
    let len = file.metadata()?.len();
    file.seek(SeekFrom::Start(len.saturating_sub(max)))?;
    let mut bytes = Vec::new();
    file.take(max).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// The text without control characters, with which a guest could rewrite the reader's screen. Line breaks and
/// tabs stay.
pub(crate) fn printable(bytes: &[u8]) -> String {
    let mut text = String::with_capacity(bytes.len());
    for c in String::from_utf8_lossy(bytes).chars() {
        match c {
            '\n' | '\t' => text.push(c),
            '\r' => {}
            c if c.is_control() => text.push('\u{fffd}'),
            c => text.push(c),
        }
    }
    text
}

/// The beginning of a message, for a line in a log or an error.
pub(crate) fn brief(said: &impl std::fmt::Debug) -> String {
    struct Begin(String);
    impl std::fmt::Write for Begin {
        fn write_str(&mut self, text: &str) -> std::fmt::Result {
            for c in text.chars() {
                if self.0.len() >= BRIEF {
                    return Err(std::fmt::Error);
                }
                self.0.push(c);
            }
            Ok(())
        }
    }
    let mut begin = Begin(String::new());
    if std::fmt::write(&mut begin, format_args!("{said:?}")).is_err() {
        begin.0.push('…');
    }
    printable(begin.0.as_bytes())
}

/// `message`, followed by the end of the console if it is not empty.
pub(crate) fn with_tail(message: &str, tail: &str) -> String {
    match tail.trim() {
        "" => format!("{message}; its console is empty"),
        tail => format!("{message}; the end of its console:\n{tail}"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_beginning_of_a_processs_message_is_repeated() {
        assert_eq!(brief(&Some("x")), "Some(\"x\")");
        let text = brief(&"é".repeat(1 << 20));
        assert!(text.len() < 300 && text.ends_with('…'), "{text}");
    }

    #[test]
    fn a_console_cannot_send_escape_sequences_to_the_reader() {
        assert_eq!(printable(b"a\x1b[2Jb\r\n\tc\xff\x07"), "a\u{fffd}[2Jb\n\tc\u{fffd}\u{fffd}");
    }

    #[test]
    fn only_the_end_of_a_long_file_is_read() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("console.log");
        std::fs::write(&path, [vec![b'x'; 10_000], b"the end".to_vec()].concat()).unwrap();
        assert_eq!(tail(&path, 7), "the end");
        assert_eq!(tail(&path, 1 << 20).len(), 10_007);
        assert_eq!(tail(&dir.path().join("none"), 7), "");
    }
}

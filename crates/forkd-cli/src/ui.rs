//! What people see. Results go to standard output; progress, notes, warnings and errors to standard
//! error, so that output can be piped.

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::sync::Mutex;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use serde::Serialize;

/// How much to say, and to whom.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ui {
    quiet: bool,
    terminal: bool,
}

impl Ui {
    pub(crate) fn new(quiet: bool) -> Self {
        Ui { quiet, terminal: io::stderr().is_terminal() }
    }

    /// Something the user did not ask for but should know.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            complain(&format!("forkd: {}", text.as_ref()));
        }
    }

    /// Something that went wrong without ending the command; said even when quiet.
    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        complain(&format!("forkd: warning: {}", text.as_ref()));
    }

    /// Begins a step too usual to leave lines in a log: shown on a terminal only.
    pub(crate) fn spinner(&self, title: impl Into<String>) -> Option<Progress> {
        (self.terminal && !self.quiet).then(|| self.progress(title))
    }

    /// Begins a step that takes a while.
    pub(crate) fn progress(&self, title: impl Into<String>) -> Progress {
        let title = title.into();
        let bar = (self.terminal && !self.quiet).then(|| {
            let bar = ProgressBar::new_spinner();
            if let Ok(style) = ProgressStyle::with_template("{spinner} {msg} ({elapsed})") {
                bar.set_style(style);
            }
            bar.enable_steady_tick(Duration::from_millis(200));
            bar.set_message(title.clone());
            bar
        });
        if bar.is_none() {
            self.note(format!("{title} …"));
        }
        Progress { ui: *self, title, bar, started: Instant::now(), last: Mutex::new(String::new()) }
    }
}

/// A step under way: a spinner on a terminal, plain lines elsewhere.
#[derive(Debug)]
pub(crate) struct Progress {
    ui: Ui,
    title: String,
    bar: Option<ProgressBar>,
    started: Instant,
    /// The last line said, so that plain output does not repeat it.
    last: Mutex<String>,
}

impl Progress {
    /// How far it is.
    pub(crate) fn update(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}: {text}", self.title));
            return;
        }
        if let Ok(mut last) = self.last.lock()
            && *last != text
        {
            text.clone_into(&mut last);
            self.ui.note(format!("{}: {text}", self.title));
        }
    }

    /// A detail that changes often: shown on a terminal only.
    pub(crate) fn tick(&self, text: &str) {
        if self.bar.is_some() {
            self.update(text);
        }
    }

    /// It is done.
    pub(crate) fn done(self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
        self.ui.note(format!("{text} ({:.1} s)", self.started.elapsed().as_secs_f64()));
    }
}

impl Drop for Progress {
    fn drop(&mut self) {
        if let Some(bar) = &self.bar {
            bar.finish_and_clear();
        }
    }
}

/// Prints a result. Nobody reading it any more is not an error.
pub(crate) fn print(text: &str) -> Result<()> {
    let mut out = io::stdout().lock();
    let written =
        out.write_all(text.as_bytes()).and_then(|()| out.write_all(b"\n")).and_then(|()| out.flush());
    match written {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Prints a result as JSON.
pub(crate) fn print_json<T: Serialize>(value: &T) -> Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Prints rows under a header, in columns.
pub(crate) fn print_table(header: &[&str], rows: &[Vec<String>]) -> Result<()> {
    print(&table(header, rows))
}

fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let lines: Vec<Vec<&str>> = std::iter::once(header.to_vec())
        .chain(rows.iter().map(|row| row.iter().map(String::as_str).collect()))
        .collect();
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let render = |line: &Vec<&str>| {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    lines.iter().map(render).collect::<Vec<_>>().join("\n")
}

/// A number of bytes as people write it.
pub(crate) fn bytes(count: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = count as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{count} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}

/// A duration as people write it.
pub(crate) fn seconds(total: u64) -> String {
    match total {
        0..60 => format!("{total} s"),
        60..3600 => format!("{} min {} s", total / 60, total % 60),
        _ => format!("{} h {} min", total / 3600, total % 3600 / 60),
    }
}

/// Reports why a command failed: the whole chain, each cause once.
pub(crate) fn fail(error: &anyhow::Error, status: u8) -> ExitCode {
    let mut text = format!("forkd: {error}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(&format!(": {cause}"));
        }
    }
    complain(&text);
    ExitCode::from(status)
}

fn complain(line: &str) {
    // Standard error may be closed; there is nobody left to tell.
    let _ = writeln!(io::stderr().lock(), "{line}");
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn columns_are_as_wide_as_their_widest_cell() {
        let rows = vec![vec!["python".to_owned(), "1 B".to_owned()], vec!["x".to_owned(), "20 B".to_owned()]];
        assert_eq!(table(&["NAME", "SIZE"], &rows), "NAME    SIZE\npython  1 B\nx       20 B");
    }

    #[test]
    fn sizes_and_times_read_well() {
        assert_eq!(bytes(12), "12 B");
        assert_eq!(bytes(3 << 30), "3.0 GiB");
        assert_eq!(seconds(59), "59 s");
        assert_eq!(seconds(61), "1 min 1 s");
        assert_eq!(seconds(3700), "1 h 1 min");
    }
}

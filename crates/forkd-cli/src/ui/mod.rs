//! Output for the user. Results go to standard output; progress, notes, warnings and errors to standard
//! error, so that output can be piped.

pub(crate) mod columns;

use std::io::{self, IsTerminal, Write};
use std::process::ExitCode;
use std::time::{Duration, Instant};

use anyhow::Result;
use indicatif::{ProgressBar, ProgressStyle};
use parking_lot::Mutex;
use serde::Serialize;

use crate::stream::signals;

/// The verbosity of a command.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Ui {
    quiet: bool,
    terminal: bool,
}

impl Ui {
    pub(crate) fn new(quiet: bool) -> Self {
        Ui { quiet, terminal: io::stderr().is_terminal() }
    }

    /// Prints something that the user did not ask for but should know.
    pub(crate) fn note(&self, text: impl AsRef<str>) {
        if !self.quiet {
            print_error(&format!("forkd: {}", text.as_ref()));
        }
    }

    /// Prints a problem that does not end the command, even if quiet.
    pub(crate) fn warn(&self, text: impl AsRef<str>) {
        print_error(&format!("forkd: warning: {}", text.as_ref()));
    }

    /// Begins a step that is shown on a terminal only: it is too frequent for a log.
    pub(crate) fn spinner(&self, title: impl Into<String>) -> Option<Progress> {
        (self.terminal && !self.quiet).then(|| self.progress(title))
    }

    /// Begins a step that takes time.
    pub(crate) fn progress(&self, title: impl Into<String>) -> Progress {
        let title = title.into();
        let bar = (self.terminal && !self.quiet).then(|| {
            signals::clean_terminal_on_signal();
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
    /// The last printed line, so that plain output does not repeat it.
    last: Mutex<String>,
}

impl Progress {
    /// Shows the progress.
    pub(crate) fn update(&self, text: &str) {
        if let Some(bar) = &self.bar {
            bar.set_message(format!("{}: {text}", self.title));
            return;
        }
        let mut last = self.last.lock();
        if *last != text {
            text.clone_into(&mut last);
            self.ui.note(format!("{}: {text}", self.title));
        }
    }

    /// Shows a detail that changes often, on a terminal only.
    pub(crate) fn tick(&self, text: &str) {
        if self.bar.is_some() {
            self.update(text);
        }
    }

    /// Ends the step.
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

/// Prints a result.
pub(crate) fn print(text: &str) -> Result<()> {
    write_raw(&mut io::stdout().lock(), format!("{text}\n").as_bytes())
}

/// Prints a result as JSON.
pub(crate) fn print_json<T: Serialize>(value: &T) -> Result<()> {
    print(&serde_json::to_string_pretty(value)?)
}

/// Rows under a header, in columns.
pub(crate) fn table(header: &[&str], rows: &[Vec<String>]) -> String {
    let cleaned = rows.iter().map(|row| row.iter().map(|cell| without_control_chars(cell)).collect());
    let lines: Vec<Vec<String>> =
        std::iter::once(header.iter().map(|&cell| cell.to_owned()).collect()).chain(cleaned).collect();
    let width = |column: usize| {
        lines.iter().filter_map(|line| line.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..header.len()).map(width).collect();
    let render = |line: &Vec<String>| {
        let cells = line.iter().zip(&widths).map(|(cell, width)| format!("{cell:<width$}"));
        cells.collect::<Vec<_>>().join("  ").trim_end().to_owned()
    };
    lines.iter().map(render).collect::<Vec<_>>().join("\n")
}

/// Names and values, one pair per line.
pub(crate) fn pairs(pairs: &[(&str, String)]) -> String {
    let width = pairs.iter().map(|(name, _)| name.chars().count()).max().unwrap_or(0);
    let line = |(name, value): &(&str, String)| format!("{name:<width$}  {}", without_control_chars(value));
    pairs.iter().map(line).collect::<Vec<_>>().join("\n")
}

/// A number of bytes in a readable unit.
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

/// A duration in readable units.
pub(crate) fn seconds(total: u64) -> String {
    match total {
        0..60 => format!("{total} s"),
        60..3600 => format!("{} min {} s", total / 60, total % 60),
        _ => format!("{} h {} min", total / 3600, total % 3600 / 60),
    }
}

/// An age, in one unit.
pub(crate) fn age(total: u64) -> String {
    match total {
        0..60 => format!("{total} s"),
        60..3600 => format!("{} min", total / 60),
        3600..86_400 => format!("{} h", total / 3600),
        _ => format!("{} d", total / 86_400),
    }
}

/// A duration in milliseconds or seconds.
pub(crate) fn milliseconds(total: f64) -> String {
    if total < 1000.0 { format!("{total:.1} ms") } else { format!("{:.2} s", total / 1000.0) }
}

/// A number of things: `1 child`, `2 children`.
pub(crate) fn count(number: usize, one: &str, many: &str) -> String {
    format!("{number} {}", if number == 1 { one } else { many })
}

/// Writes bytes of another program unchanged. A reader that has left is not an error.
pub(crate) fn write_raw(target: &mut impl Write, bytes: &[u8]) -> Result<()> {
    match target.write_all(bytes).and_then(|()| target.flush()) {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Ok(()),
        other => Ok(other?),
    }
}

/// Reports the error of a command: the whole chain, each cause once.
pub(crate) fn fail(error: &anyhow::Error, status: u8) -> ExitCode {
    let mut text = format!("forkd: {error}");
    for cause in error.chain().skip(1) {
        let cause = cause.to_string();
        if !text.contains(&cause) {
            text.push_str(&format!(": {cause}"));
        }
    }
    print_error(&text);
    ExitCode::from(status)
}

/// Reports a refusal of the daemon, for programs.
pub(crate) fn fail_json<T: Serialize>(body: &T, status: u8) -> ExitCode {
    print_error(&serde_json::to_string(body).unwrap_or_default());
    ExitCode::from(status)
}

fn print_error(line: &str) {
    // Standard error may be closed; then there is nowhere to report it.
    let _ = writeln!(io::stderr().lock(), "{}", without_control_chars(line));
}

/// Text without control characters; line ends and tabs stay. With control characters, quoted output of a
/// guest could write anywhere on the terminal.
pub(crate) fn without_control_chars(text: &str) -> String {
    text.chars().filter(|c| matches!(c, '\n' | '\t') || !c.is_control()).collect()
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
        assert_eq!([age(59), age(119), age(7200), age(200_000)], ["59 s", "1 min", "2 h", "2 d"]);
        assert_eq!([milliseconds(8.26), milliseconds(1234.0)], ["8.3 ms", "1.23 s"]);
        assert_eq!([count(1, "child", "children"), count(0, "child", "children")], ["1 child", "0 children"]);
    }

    #[test]
    fn a_quoted_guest_cannot_write_elsewhere_on_the_terminal() {
        assert_eq!(without_control_chars("a\x1b[2Jb\r\n\tc"), "a[2Jb\n\tc");
        assert_eq!(table(&["A"], &[vec!["\x1b[2J".to_owned()]]), "A\n[2J");
    }
}

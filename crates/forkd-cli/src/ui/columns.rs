//! Tables that fit the terminal's width: they cut long names and leave out the least important columns.

use std::io::IsTerminal;

use crate::stream::terminal::RawTerminal;
use crate::ui;

/// The number of spaces between two columns.
const GAP: usize = 2;
/// The length to which names are cut before a column is left out.
const SHORT: usize = 12;

/// A column of a table.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Column {
    name: &'static str,
    /// Columns with the highest rank are left out first; those of rank 0 stay.
    rank: u8,
    /// Whether its cells may be cut.
    cut: bool,
}

impl Column {
    /// A column that always stays uncut.
    pub(crate) const fn key(name: &'static str) -> Self {
        Column { name, rank: 0, cut: false }
    }

    /// A column that stays, with cells that may be cut.
    pub(crate) const fn text(name: &'static str) -> Self {
        Column { name, rank: 0, cut: true }
    }

    /// A column that is left out if there is no room: the highest rank goes first.
    pub(crate) const fn extra(name: &'static str, rank: u8) -> Self {
        Column { name, rank, cut: false }
    }
}

/// The width that a table may take: `None`, without limit, if `wide` or if the output is not a terminal.
pub(crate) fn width(wide: bool) -> Option<usize> {
    if wide || !std::io::stdout().is_terminal() {
        return None;
    }
    let told = std::env::var("COLUMNS").ok().and_then(|text| text.parse().ok());
    Some(told.filter(|columns| *columns > 0).unwrap_or_else(|| RawTerminal::size().0.into()))
}

/// Rows under a header, in lines of at most `width` characters.
pub(crate) fn table(columns: &[Column], rows: &[Vec<String>], width: Option<usize>) -> String {
    let cell = |row: &Vec<String>, column: usize| row.get(column).map(|cell| ui::without_control_chars(cell));
    let clean = |row| (0..columns.len()).map(|column| cell(row, column).unwrap_or_default()).collect();
    let mut rows: Vec<Vec<String>> = rows.iter().map(clean).collect();
    let mut columns = columns.to_vec();
    while let Some(width) = width {
        let wanted = widths(&columns, &rows);
        let spare = |(column, wanted): (&Column, &usize)| match column.cut {
            true => wanted.saturating_sub(SHORT.max(column.name.len())),
            false => 0,
        };
        let most = columns.iter().zip(&wanted).map(spare).sum::<usize>();
        let least = columns.iter().enumerate().max_by_key(|(_, column)| column.rank);
        match least.filter(|(_, column)| column.rank > 0) {
            Some((index, _)) if total(&wanted).saturating_sub(most) > width => {
                columns.remove(index);
                rows.iter_mut().for_each(|row| drop(row.remove(index)));
            }
            _ => {
                shorten(&columns, &mut rows, wanted, width);
                break;
            }
        }
    }
    let header: Vec<&str> = columns.iter().map(|column| column.name).collect();
    let text = ui::table(&header, &rows);
    match width {
        // A terminal narrower than the columns that always stay.
        Some(width) => text.lines().map(|line| shortened(line, width)).collect::<Vec<_>>().join("\n"),
        None => text,
    }
}

fn widths(columns: &[Column], rows: &[Vec<String>]) -> Vec<usize> {
    let widest = |index: usize| rows.iter().map(|row| row[index].chars().count()).max().unwrap_or(0);
    columns.iter().enumerate().map(|(index, column)| widest(index).max(column.name.len())).collect()
}

fn total(widths: &[usize]) -> usize {
    widths.iter().sum::<usize>() + GAP * widths.len().saturating_sub(1)
}

/// Cuts the widest cells until all fit, or all that may be cut are short.
fn shorten(columns: &[Column], rows: &mut [Vec<String>], mut widths: Vec<usize>, width: usize) {
    while total(&widths) > width {
        let longer = |(index, wanted): &(usize, &usize)| {
            columns[*index].cut && **wanted > SHORT.max(columns[*index].name.len())
        };
        let widest = widths.iter().enumerate().filter(longer).max_by_key(|(_, wanted)| **wanted);
        let Some((index, _)) = widest else { break };
        widths[index] -= 1;
    }
    for row in rows {
        for (cell, width) in row.iter_mut().zip(&widths) {
            *cell = shortened(cell, *width);
        }
    }
}

/// The text, or its beginning and an ellipsis.
fn shortened(text: &str, width: usize) -> String {
    if text.chars().count() <= width {
        return text.to_owned();
    }
    let kept: String = text.chars().take(width.saturating_sub(1)).collect();
    if width == 0 { String::new() } else { kept + "…" }
}

#[cfg(test)]
mod tests {
    use super::*;

    const COLUMNS: [Column; 5] = [
        Column::key("ID"),
        Column::text("FROM"),
        Column::extra("PID", 1),
        Column::extra("AGE", 2),
        Column::extra("CPUS", 3),
    ];

    fn rows(name: &str) -> Vec<Vec<String>> {
        let row = |id: &str, name: &str| [id, name, "1234567", "12 min", "1"].map(str::to_owned).into();
        vec![row("sb4k2n", name), row("sb7x1q", "numpy")]
    }

    fn widest(text: &str) -> usize {
        text.lines().map(|line| line.chars().count()).max().unwrap_or(0)
    }

    fn header(text: &str) -> Vec<&str> {
        text.lines().next().unwrap_or_default().split_whitespace().collect()
    }

    #[test]
    fn a_table_that_fits_is_whole_and_so_is_one_without_a_width() {
        let long = "n".repeat(100);
        for (name, width) in [("numpy", Some(80)), (long.as_str(), None), (long.as_str(), Some(200))] {
            let text = table(&COLUMNS, &rows(name), width);
            assert_eq!(header(&text), ["ID", "FROM", "PID", "AGE", "CPUS"]);
            assert!(text.contains(name), "{text}");
        }
    }

    #[test]
    fn long_names_are_cut_before_a_column_is_left_out() {
        let text = table(&COLUMNS, &rows(&"n".repeat(100)), Some(80));
        assert_eq!(header(&text), ["ID", "FROM", "PID", "AGE", "CPUS"]);
        assert_eq!(widest(&text), 80, "{text}");
        assert!(text.contains("nnn…  1234567"), "{text}");
    }

    #[test]
    fn the_least_important_columns_are_left_out_first() {
        for (width, expected) in [
            (40, &["ID", "FROM", "PID", "AGE"][..]),
            (32, &["ID", "FROM", "PID"]),
            (24, &["ID", "FROM"]),
            (5, &["ID"]),
        ] {
            let text = table(&COLUMNS, &rows(&"n".repeat(100)), Some(width));
            assert!(widest(&text) <= width, "{width}: {text}");
            assert_eq!(header(&text)[..expected.len()], expected[..], "{width}: {text}");
        }
    }

    #[test]
    fn no_width_is_too_small() {
        for width in 0..100 {
            assert!(widest(&table(&COLUMNS, &rows("é\u{1b}[2J"), Some(width))) <= width);
        }
        assert_eq!(table(&COLUMNS, &[], Some(80)), "ID  FROM  PID  AGE  CPUS");
    }
}

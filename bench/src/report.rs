//! Results as lines for programs and as a table for people, and whether the goals are met.

use serde::{Deserialize, Serialize};

use crate::host::Conditions;
use crate::{Error, Result};

/// One result: a case at one number of children. Written as one JSON object per line; what is not
/// known is null.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// `floor`, `tiny`, `linux`, `firecracker` or `eval`.
    pub case: String,
    /// How many children one call asked for; for `eval`, how many evaluations were timed.
    pub n: usize,
    /// How many of them answered, in the worst of the runs.
    pub ok: usize,
    /// Median time from asking until a child had answered.
    pub p50_ms: Option<f64>,
    /// The time 99 in 100 children needed at most.
    pub p99_ms: Option<f64>,
    /// Time until all had answered, in the median run.
    pub all_ms: Option<f64>,
    /// Private memory of one child, right after its answer.
    pub private_kib: Option<u64>,
    /// The same with its part of what it shares.
    pub pss_kib: Option<u64>,
    /// What the host's available memory lost, divided by `n`.
    pub host_kib: Option<i64>,
    /// How often it was measured.
    #[serde(default)]
    pub runs: usize,
    /// `eval` only: how many times faster than a new Python.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub ratio: Option<f64>,
    /// `eval` only: how long a new Python takes for the same expression.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub python_ms: Option<f64>,
    /// Why children failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
    /// Where and when.
    #[serde(default)]
    pub conditions: Conditions,
}

impl Line {
    /// As one line of JSON.
    pub fn to_json(&self) -> String {
        // Numbers and strings only: it cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }
}

/// The lines in a results file.
pub fn parse(text: &str) -> Result<Vec<Line>> {
    let lines = text.lines().enumerate().filter(|(_, line)| !line.trim().is_empty());
    lines
        .map(|(index, line)| {
            serde_json::from_str(line).map_err(|error| {
                Error::Invalid(format!("line {} is no result of `forkd bench spawn`: {error}", index + 1))
            })
        })
        .collect()
}

/// The time to all of `line` as a multiple of the floor's of the same number and host; only for cases
/// that run the floor's guest.
pub fn times_floor(lines: &[Line], line: &Line) -> Option<f64> {
    if !matches!(line.case.as_str(), "tiny" | "firecracker") {
        return None;
    }
    let same = |other: &&Line| {
        other.case == "floor" && other.n == line.n && other.conditions.emulated == line.conditions.emulated
    };
    let floor = lines.iter().find(same)?.all_ms.filter(|ms| *ms > 0.0)?;
    Some(line.all_ms? / floor)
}

/// All lines as a table that is readable as it is and as Markdown.
pub fn table(lines: &[Line]) -> String {
    let head =
        ["case", "n", "ok", "p50 ms", "p99 ms", "all ms", "× floor", "private KiB", "PSS KiB", "host KiB"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for line in lines {
        let ms = |value: Option<f64>| value.map(|ms| format!("{ms:.2}"));
        let cells = [
            Some(line.case.clone()),
            Some(line.n.to_string()),
            Some(line.ok.to_string()),
            ms(line.p50_ms),
            ms(line.p99_ms),
            ms(line.all_ms),
            ms(times_floor(lines, line)),
            line.private_kib.map(|kib| kib.to_string()),
            line.pss_kib.map(|kib| kib.to_string()),
            line.host_kib.map(|kib| kib.to_string()),
        ];
        rows.push(cells.into_iter().map(|cell| cell.unwrap_or_else(|| "–".to_owned())).collect());
    }
    markdown(&rows, 1)
}

/// Rows, the first of which is the head, as a table that is readable as it is and as Markdown. The first
/// `words` columns are words, the others are numbers.
pub(crate) fn markdown(rows: &[Vec<String>], words: usize) -> String {
    let columns = rows.first().map_or(0, Vec::len);
    let width = |column: usize| {
        rows.iter().filter_map(|row| row.get(column)).map(|cell| cell.chars().count()).max().unwrap_or(0)
    };
    let widths: Vec<usize> = (0..columns).map(width).collect();
    let render = |row: &Vec<String>| {
        let cells = row.iter().zip(&widths).enumerate().map(|(column, (cell, width))| {
            if column < words { format!("{cell:<width$}") } else { format!("{cell:>width$}") }
        });
        format!("| {} |", cells.collect::<Vec<_>>().join(" | "))
    };
    let rule = |(column, width): (usize, &usize)| {
        if column < words { "-".repeat(width + 2) } else { format!("{}:", "-".repeat(width + 1)) }
    };
    let rule = format!("|{}|", widths.iter().enumerate().map(rule).collect::<Vec<_>>().join("|"));
    let mut text: Vec<String> = rows.iter().map(render).collect();
    text.insert(1, rule);
    text.join("\n")
}

/// A goal, and what became of it.
#[derive(Debug, Clone, PartialEq)]
pub struct Verdict {
    /// What was to be reached.
    pub goal: String,
    /// What was measured.
    pub measured: String,
    /// Whether that is enough.
    pub met: bool,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = if self.met { "met" } else { "NOT MET" };
        write!(out, "{word}: {} ({})", self.goal, self.measured)
    }
}

/// Tiny children: at each number, how many times the floor all of them may take.
const TINY_GOALS: [(usize, f64); 3] = [(1, 3.0), (100, 2.0), (1000, 2.0)];
/// What a Linux child may take of its own right after its first answer.
const LINUX_PRIVATE_KIB: u64 = 4096;
/// How many times faster than a new Python a warmed evaluation is.
const EVAL_RATIO: f64 = 20.0;

/// The verdicts on the goals that the lines cover.
pub fn verdicts(lines: &[Line]) -> Vec<Verdict> {
    let mut verdicts = Vec::new();
    for (n, limit) in TINY_GOALS {
        let tiny = lines.iter().filter(|line| line.case == "tiny" && line.n == n);
        // Without a floor in the same run there is nothing to compare with.
        for (line, ratio) in tiny.filter_map(|line| Some((line, times_floor(lines, line)?))) {
            let place = if line.conditions.emulated { " (emulated; the goal is for real hosts)" } else { "" };
            verdicts.push(Verdict {
                goal: format!("tiny, n = {n}: all running within {limit} × the floor{place}"),
                measured: format!("{ratio:.2} ×, {} of {n} answered", line.ok),
                met: ratio <= limit && line.ok == n,
            });
        }
    }
    let linux = lines.iter().filter(|line| line.case == "linux");
    if let Some(line) = linux.max_by_key(|line| line.n) {
        let n = line.n;
        verdicts.push(Verdict {
            goal: format!("linux, n = {n}: at most {LINUX_PRIVATE_KIB} KiB private memory per child"),
            measured: match line.private_kib {
                Some(kib) => format!("{kib} KiB, {} of {n} answered", line.ok),
                None => format!("not known, {} of {n} answered", line.ok),
            },
            met: line.private_kib.is_some_and(|kib| kib <= LINUX_PRIVATE_KIB) && line.ok == n,
        });
    }
    for line in lines.iter().filter(|line| line.case == "eval") {
        verdicts.push(Verdict {
            goal: format!("a warmed eval at least {EVAL_RATIO} × faster than a new Python"),
            measured: line.ratio.map_or("not known".into(), |ratio| format!("{ratio:.1} ×")),
            met: line.ratio.is_some_and(|ratio| ratio >= EVAL_RATIO),
        });
    }
    verdicts
}

/// The conditions of all cases, each once, in words.
pub fn conditions<'a>(cases: impl Iterator<Item = (&'a str, &'a Conditions)>) -> Vec<String> {
    let mut seen: Vec<(&Conditions, Vec<&str>)> = Vec::new();
    for (case, under) in cases {
        match seen.iter_mut().find(|(conditions, _)| *conditions == under) {
            Some((_, cases)) if cases.contains(&case) => {}
            Some((_, cases)) => cases.push(case),
            None => seen.push((under, vec![case])),
        }
    }
    seen.into_iter()
        .map(|(on, cases)| {
            format!(
                "{}: {}, {}, {} core{}, {} MiB, Linux {}, {}, forkd {}, {}",
                cases.join(", "),
                if on.emulated { "emulated" } else { "native" },
                on.cpu,
                on.cores,
                if on.cores == 1 { "" } else { "s" },
                on.memory_mib,
                on.kernel,
                if on.cgroups { "with cgroups" } else { "no cgroup v2 controllers: without cgroups" },
                on.forkd,
                on.date,
            )
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(case: &str, n: usize, all_ms: f64) -> Line {
        Line { case: case.into(), n, ok: n, all_ms: Some(all_ms), ..Line::default() }
    }

    #[test]
    fn a_line_begins_with_the_promised_fields_and_says_null_for_what_is_unknown() {
        let json = line("floor", 1, 0.5).to_json();
        let promised = r#"{"case":"floor","n":1,"ok":1,"p50_ms":null,"p99_ms":null,"all_ms":0.5,"private_kib":null,"pss_kib":null,"host_kib":null,"#;
        assert!(json.starts_with(promised), "{json}");
        assert_eq!(
            parse(&format!("{json}\n\n{json}\n")).unwrap(),
            [line("floor", 1, 0.5), line("floor", 1, 0.5)]
        );
        let error = parse("nonsense").unwrap_err().to_string();
        assert!(error.contains("line 1"), "{error}");
    }

    #[test]
    fn goals_are_judged_by_the_floor_of_the_same_host() {
        let mut lines = vec![line("floor", 1, 1.0), line("tiny", 1, 2.9), line("floor", 100, 40.0)];
        lines.push(line("tiny", 100, 81.0));
        let met: Vec<bool> = verdicts(&lines).iter().map(|verdict| verdict.met).collect();
        assert_eq!(met, [true, false]);
        lines[1].conditions.emulated = true;
        assert_eq!(verdicts(&lines).len(), 1, "a floor of another host is no measure");
    }

    #[test]
    fn a_goal_is_not_met_by_children_that_failed() {
        let mut tiny = line("tiny", 100, 10.0);
        tiny.ok = 99;
        let mut linux = line("linux", 20, 10.0);
        linux.private_kib = Some(4097);
        let verdicts = verdicts(&[line("floor", 100, 10.0), tiny, linux]);
        assert!(verdicts.iter().all(|verdict| !verdict.met), "{verdicts:?}");
        assert!(verdicts[0].to_string().starts_with("NOT MET: "));
    }

    #[test]
    fn an_eval_is_judged_by_its_ratio_and_linux_by_its_largest_number() {
        let mut eval = line("eval", 20, 1.0);
        eval.ratio = Some(20.0);
        let (mut small, mut large) = (line("linux", 1, 1.0), line("linux", 20, 1.0));
        (small.private_kib, large.private_kib) = (Some(9000), Some(4096));
        let verdicts = verdicts(&[small, large, eval]);
        assert_eq!(verdicts.len(), 2);
        assert!(verdicts.iter().all(|verdict| verdict.met), "{verdicts:?}");
    }

    #[test]
    fn the_table_has_a_row_per_line_and_the_ratio_to_the_floor() {
        let text = table(&[line("floor", 10, 4.0), line("tiny", 10, 6.0)]);
        let rows: Vec<&str> = text.lines().collect();
        assert_eq!(rows.len(), 4);
        assert!(rows[3].starts_with("| tiny ") && rows[3].contains(" 1.50 |"), "{text}");
        let widths: Vec<usize> = rows.iter().map(|row| row.chars().count()).collect();
        assert!(widths.iter().all(|width| *width == widths[0]), "{text}");
    }

    #[test]
    fn conditions_are_said_once_for_all_cases_they_hold_for() {
        let mut linux = line("linux", 1, 1.0);
        linux.conditions.emulated = true;
        let lines = [line("floor", 1, 1.0), line("floor", 10, 1.0), line("tiny", 1, 1.0), linux];
        let said = conditions(lines.iter().map(|line| (line.case.as_str(), &line.conditions)));
        assert_eq!(said.len(), 2);
        assert!(said[0].starts_with("floor, tiny: native") && said[1].starts_with("linux: emulated"));
    }
}

//! Results of the E2B API: each operation over that API, in turns with the same operation another way.
//!
//! A ratio compares the two times of one turn, so that both meet the same load on the host. So it holds in the emulated
//! machine, too; its times do not.

use serde::{Deserialize, Serialize};

use crate::burst::{median, quantile, rounded};
use crate::host::Conditions;
use crate::report::markdown;
use crate::{Error, Result};

/// A request through the daemon takes at most this many times the same request to the agent.
const FORWARDED: f64 = 1.5;

/// The other way to do the same.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Beside {
    /// The daemon's own API.
    Native,
    /// The guest's agent, over the sandbox's own socket.
    Agent,
}

impl Beside {
    /// As results have it.
    pub fn name(self) -> &'static str {
        match self {
            Beside::Native => "native",
            Beside::Agent => "agent",
        }
    }
}

/// One operation. What is not known is null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// `create`, `first_command`, `command`, `write_1mib`, `read_1mib`, `run_code` or `fork`.
    pub case: String,
    /// The other way.
    pub beside: Beside,
    /// How many children one `fork` makes; 1 of all other operations.
    pub children: usize,
    /// How many turns there were.
    pub n: usize,
    /// In how many of them both ways succeeded.
    pub ok: usize,
    /// Median time over the E2B API.
    pub p50_ms: Option<f64>,
    /// What 99 in 100 needed at most.
    pub p99_ms: Option<f64>,
    /// Median time the other way.
    pub beside_p50_ms: Option<f64>,
    /// Median of the turns' ratios: the first time through the second.
    pub ratio: Option<f64>,
    /// Why turns failed.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
    /// Where and when.
    #[serde(default)]
    pub conditions: Conditions,
}

/// The turns of one operation.
#[derive(Debug, Clone, Default)]
pub struct Turns {
    /// Both times of each turn in milliseconds, the one over the E2B API first.
    pub times_ms: Vec<(f64, f64)>,
    /// Why the other turns failed.
    pub errors: Vec<String>,
}

impl Line {
    /// What these turns amount to.
    pub fn of(case: &str, beside: Beside, children: usize, turns: &Turns, conditions: &Conditions) -> Line {
        let over: Vec<f64> = turns.times_ms.iter().map(|(over, _)| *over).collect();
        let other: Vec<f64> = turns.times_ms.iter().map(|(_, other)| *other).collect();
        let timed = turns.times_ms.iter().filter(|(_, other)| *other > 0.0);
        let ratios: Vec<f64> = timed.map(|(over, other)| over / other).collect();
        let mut errors = turns.errors.clone();
        errors.sort();
        errors.dedup();
        errors.truncate(3);
        Line {
            case: case.to_owned(),
            beside,
            children,
            n: turns.times_ms.len() + turns.errors.len(),
            ok: turns.times_ms.len(),
            p50_ms: median(&over).map(rounded),
            p99_ms: quantile(&over, 0.99).map(rounded),
            beside_p50_ms: median(&other).map(rounded),
            ratio: median(&ratios).map(rounded),
            errors,
            conditions: conditions.clone(),
        }
    }
}

/// The goal of a forwarded operation, and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Verdict {
    /// `verdict`.
    pub case: String,
    /// Which operation.
    pub figure: String,
    /// The measured ratio.
    pub measured: f64,
    /// What it may be at most.
    pub limit: f64,
    /// Whether that is reached.
    pub met: bool,
    /// Whether the host is emulated in software.
    pub emulated: bool,
}

impl std::fmt::Display for Verdict {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = if self.met { "met" } else { "NOT MET" };
        let place = if self.emulated { ", in the emulated machine" } else { "" };
        let Verdict { figure, measured, limit, .. } = self;
        write!(
            out,
            "{word}: {figure} through the daemon at most {limit:.1} × the agent ({measured:.2} ×{place})"
        )
    }
}

/// A line of results; the variants differ in their fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "documented at their types")]
pub enum Record {
    Verdict(Verdict),
    Line(Line),
}

impl Record {
    /// As one line of JSON.
    pub fn to_json(&self) -> String {
        // Numbers and strings only: it cannot fail.
        serde_json::to_string(self).unwrap_or_default()
    }

    /// From one line of JSON.
    pub fn from_json(line: &str) -> Result<Record> {
        serde_json::from_str(line)
            .map_err(|error| Error::Invalid(format!("this is no result of `forkd bench e2b`: {error}")))
    }
}

/// The lines among the records.
pub fn lines(records: &[Record]) -> impl Iterator<Item = &Line> {
    records.iter().filter_map(|record| match record {
        Record::Line(line) => Some(line),
        Record::Verdict(_) => None,
    })
}

/// All lines as a table that is readable as it is and as Markdown.
pub fn table(records: &[Record]) -> String {
    let head = ["operation", "beside", "n", "ok", "p50 ms", "p99 ms", "beside p50 ms", "ratio"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    for line in lines(records) {
        let number = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |value| format!("{value:.2}"));
        let case = match line.children {
            1 => line.case.clone(),
            children => format!("{} of {children}", line.case),
        };
        rows.push(vec![
            case,
            line.beside.name().to_owned(),
            line.n.to_string(),
            line.ok.to_string(),
            number(line.p50_ms),
            number(line.p99_ms),
            number(line.beside_p50_ms),
            number(line.ratio),
        ]);
    }
    markdown(&rows, 2)
}

/// The verdicts on the lines that have a goal: those of forwarded requests.
pub fn verdicts(records: &[Record]) -> Vec<Verdict> {
    let forwarded = lines(records).filter(|line| line.beside == Beside::Agent);
    forwarded
        .filter_map(|line| {
            let measured = line.ratio?;
            Some(Verdict {
                case: "verdict".into(),
                figure: line.case.clone(),
                measured,
                limit: FORWARDED,
                // A goal is not met by turns that failed.
                met: measured <= FORWARDED && line.ok == line.n,
                emulated: line.conditions.emulated,
            })
        })
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(case: &str, beside: Beside, times: &[(f64, f64)], errors: &[&str]) -> Record {
        let errors = errors.iter().map(|&error| error.to_owned()).collect();
        let turns = Turns { times_ms: times.to_vec(), errors };
        Record::Line(Line::of(case, beside, 1, &turns, &Conditions::default()))
    }

    #[test]
    fn a_ratio_compares_the_times_of_one_turn() {
        // The host slows down in between: each turn's ratio is 1.5.
        let Record::Line(line) =
            line("command", Beside::Agent, &[(3.0, 2.0), (30.0, 20.0), (15.0, 10.0)], &[])
        else {
            panic!("no line")
        };
        assert_eq!((line.n, line.ok, line.p50_ms, line.beside_p50_ms), (3, 3, Some(15.0), Some(10.0)));
        assert_eq!(line.ratio, Some(1.5));
        let text = Record::Line(line.clone()).to_json();
        assert_eq!(Record::from_json(&text).unwrap(), Record::Line(line));
    }

    #[test]
    fn only_forwarded_requests_have_a_goal_and_failed_turns_do_not_meet_it() {
        let records = [
            line("create", Beside::Native, &[(9.0, 1.0)], &[]),
            line("command", Beside::Agent, &[(1.5, 1.0)], &[]),
            line("read_1mib", Beside::Agent, &[(1.6, 1.0)], &[]),
            line("write_1mib", Beside::Agent, &[(1.0, 1.0)], &["status 500"]),
            line("run_code", Beside::Agent, &[], &["status 502"]),
        ];
        let met: Vec<(String, bool)> =
            verdicts(&records).into_iter().map(|verdict| (verdict.figure, verdict.met)).collect();
        let expected = [("command", true), ("read_1mib", false), ("write_1mib", false)];
        assert_eq!(met, expected.map(|(figure, met)| (figure.to_owned(), met)));
        let shown = verdicts(&records)[1].to_string();
        assert_eq!(shown, "NOT MET: read_1mib through the daemon at most 1.5 × the agent (1.60 ×)");
    }

    #[test]
    fn a_record_of_another_benchmark_is_refused() {
        assert!(Record::from_json(r#"{"case": "tiny", "n": 1, "ok": 1}"#).is_err());
    }
}

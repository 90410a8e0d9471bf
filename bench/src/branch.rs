//! Results of branching: lines for programs, a table for people, and verdicts on the goals.
//!
//! Goals compare lines of one run on one host, and are judged on real hosts only: times in an emulated
//! machine mean nothing by themselves.

use serde::{Deserialize, Serialize};

use crate::bare::Kind;
use crate::burst::{median, quantile, rounded};
use crate::host::Conditions;
use crate::report::markdown;
use crate::{Error, Result};

/// What was branched.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct Subject {
    /// `tiny`, the guest that keeps writing, or `linux`.
    pub guest: String,
    /// Where its memory comes from.
    pub memory: Kind,
    /// How much memory.
    pub mem_mib: u64,
    /// How many percent of its pages it keeps writing to.
    pub dirty_pct: u64,
}

/// One case of one subject. What is not known is null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Line {
    /// What was timed:
    ///
    /// - `forkd`: how long the vCPUs stood still for a branch;
    /// - `fork`, `fork_plain`, `uffd_wp`, `copy`: see [`crate::bare::Method`];
    /// - `over_fork`: how much longer a pause was than the fork right before or after it;
    /// - `firecracker_full`, `firecracker_diff`: how long its guest stood still for a snapshot;
    /// - `live_call`: how long the call for a branch took that does not wait for the disk;
    /// - `live_beyond`: how much of that was more than the pause of that branch;
    /// - `first_child`: from the branch call to the first instruction of a child of that branch, without the
    ///   caller's own work between its two calls;
    /// - `first_pause`: how long the guests of these branches stood still;
    /// - `spawn`: from asking for a child of a snapshot of the same size to its first instruction;
    /// - `chain_spawn`: the same, of a snapshot of `depth` layers over its base;
    /// - `layer_bytes`: nothing; how large a layer is.
    pub case: String,
    #[serde(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub subject: Subject,
    /// How often it was tried.
    pub n: usize,
    /// How often it could be done.
    pub ok: usize,
    /// Median.
    pub p50_ms: Option<f64>,
    /// What 99 in 100 needed at most.
    pub p99_ms: Option<f64>,
    /// Layers over the base.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub depth: Option<u64>,
    /// Room a layer takes on disk.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub bytes: Option<u64>,
    /// The pages that really differ, in bytes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub differing_bytes: Option<u64>,
    /// Why it could not be done.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub errors: Vec<String>,
    /// Where and when.
    #[serde(default)]
    pub conditions: Conditions,
}

impl Line {
    /// What these attempts amount to.
    pub fn of(case: &str, subject: &Subject, attempts: &Attempts, conditions: &Conditions) -> Line {
        let mut errors = attempts.errors.clone();
        errors.sort();
        errors.dedup();
        errors.truncate(3);
        Line {
            case: case.to_owned(),
            subject: subject.clone(),
            n: attempts.times_ms.len() + attempts.errors.len(),
            ok: attempts.times_ms.len(),
            p50_ms: median(&attempts.times_ms).map(rounded),
            p99_ms: quantile(&attempts.times_ms, 0.99).map(rounded),
            depth: None,
            bytes: None,
            differing_bytes: None,
            errors,
            conditions: conditions.clone(),
        }
    }

    fn complete(&self) -> bool {
        self.n > 0 && self.ok == self.n
    }
}

/// Times of what was tried several times, and why it failed.
#[derive(Debug, Clone, Default)]
pub struct Attempts {
    /// In milliseconds, of those that succeeded.
    pub times_ms: Vec<f64>,
    /// Of those that failed.
    pub errors: Vec<String>,
}

impl Attempts {
    /// One more.
    pub fn add<E: std::fmt::Display>(&mut self, outcome: std::result::Result<f64, E>) {
        match outcome {
            Ok(ms) => self.times_ms.push(ms),
            Err(error) => self.errors.push(error.to_string()),
        }
    }

    /// Whether nothing was tried.
    pub fn is_empty(&self) -> bool {
        self.times_ms.is_empty() && self.errors.is_empty()
    }
}

/// One of several branches that were taken of one sandbox, one after the other, all kept.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct InRow {
    /// `forkd`.
    pub case: String,
    #[serde(flatten)]
    #[allow(missing_docs, reason = "documented at its type")]
    pub subject: Subject,
    /// Which of them, from 0.
    pub index: usize,
    /// How long the vCPUs stood still.
    pub pause_ms: f64,
    /// Where and when.
    #[serde(default)]
    pub conditions: Conditions,
}

/// A goal, and what became of it.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct BranchVerdict {
    /// `verdict`.
    pub case: String,
    /// Which goal: `pause_fork`, `pause_copy`, `in_row`, `first_child`, `chain_spawn`, `layer_bytes` or
    /// `live_call`.
    pub figure: String,
    /// In words.
    pub goal: String,
    /// What was measured.
    pub measured: f64,
    /// What it may be at most, or must be at least.
    pub limit: f64,
    /// Which of the two.
    pub bound: Bound,
    /// `ms` or `x`, times.
    pub unit: String,
    /// Whether that is reached.
    pub met: bool,
}

/// Which way a limit works.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
#[allow(missing_docs, reason = "their names say it")]
pub enum Bound {
    AtMost,
    AtLeast,
}

impl std::fmt::Display for BranchVerdict {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let word = if self.met { "met" } else { "NOT MET" };
        let bound = if self.bound == Bound::AtMost { "at most" } else { "at least" };
        let unit = if self.unit == "x" { "×" } else { &self.unit };
        write!(out, "{word}: {} ({:.2} {unit}, {bound} {:.2} {unit})", self.goal, self.measured, self.limit)
    }
}

/// A line of results; the variants differ in their fields.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
#[allow(missing_docs, reason = "documented at their types")]
pub enum Record {
    Verdict(BranchVerdict),
    InRow(InRow),
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
            .map_err(|error| Error::Invalid(format!("this is no result of `forkd bench branch`: {error}")))
    }

    /// Where and when; a verdict has those of what it judges.
    pub fn conditions(&self) -> Option<(&str, &Conditions)> {
        match self {
            Record::Verdict(_) => None,
            Record::InRow(row) => Some((&row.case, &row.conditions)),
            Record::Line(line) => Some((&line.case, &line.conditions)),
        }
    }
}

/// The lines among the records.
pub fn lines(records: &[Record]) -> impl Iterator<Item = &Line> {
    records.iter().filter_map(|record| match record {
        Record::Line(line) => Some(line),
        _ => None,
    })
}

/// Branches in a row, of each subject that has any, in their order.
pub fn rows(records: &[Record]) -> Vec<(&Subject, Vec<&InRow>)> {
    let mut rows: Vec<(&Subject, Vec<&InRow>)> = Vec::new();
    let all = records.iter().filter_map(|record| match record {
        Record::InRow(row) => Some(row),
        _ => None,
    });
    for row in all {
        match rows.iter_mut().find(|(subject, _)| *subject == &row.subject) {
            Some((_, rows)) => rows.push(row),
            None => rows.push((&row.subject, vec![row])),
        }
    }
    rows.iter_mut().for_each(|(_, rows)| rows.sort_by_key(|row| row.index));
    rows
}

/// All lines as a table that is readable as it is and as Markdown.
pub fn table(records: &[Record]) -> String {
    let head = ["case", "guest", "memory", "MiB", "dirty %", "n", "ok", "p50 ms", "p99 ms", ""];
    let mut table = vec![head.map(str::to_owned).to_vec()];
    for line in lines(records) {
        let ms = |value: Option<f64>| value.map_or_else(|| "–".to_owned(), |ms| format!("{ms:.2}"));
        let note = match (line.depth, line.bytes, line.differing_bytes) {
            (_, Some(bytes), Some(differing)) => format!("{bytes} bytes for {differing}"),
            (Some(depth), ..) => format!("depth {depth}"),
            _ if line.ok == 0 && !line.errors.is_empty() => "impossible".to_owned(),
            _ => String::new(),
        };
        let Subject { guest, memory, mem_mib, dirty_pct } = &line.subject;
        let cells = [
            line.case.clone(),
            guest.clone(),
            memory.name().to_owned(),
            mem_mib.to_string(),
            dirty_pct.to_string(),
            line.n.to_string(),
            line.ok.to_string(),
            ms(line.p50_ms),
            ms(line.p99_ms),
            note,
        ];
        table.push(cells.to_vec());
    }
    markdown(&table, 3)
}

/// A pause may take this much longer than a bare fork.
const PAUSE_OVER_FORK_MS: f64 = 2.0;
/// A copy must take this many times as long as a pause, for memory of this size and dirtiness.
const COPY_RATIO: f64 = 10.0;
const COPY_SUBJECT: (Kind, u64, u64) = (Kind::Layer, 1536, 10);
/// The last pauses in a row may be this many times as long as the first.
const ROW_RATIO: f64 = 1.5;
const ROW_ENDS: usize = 5;
/// A first child may take this many plain spawns, and the pause.
const FIRST_CHILD_SPAWNS: f64 = 2.0;
/// A spawn from a long chain may take this many times a spawn without one.
const CHAIN_RATIO: f64 = 1.2;
const CHAIN_DEPTH: u64 = 8;
/// A layer may be this many times as large as the pages that differ.
const LAYER_RATIO: f64 = 1.1;
/// A call that does not wait for the disk may take this much longer than the pause.
const CALL_OVER_PAUSE_MS: f64 = 5.0;

/// The verdicts on the goals that the records cover.
pub fn verdicts(records: &[Record]) -> Vec<BranchVerdict> {
    let judged: Vec<&Line> = lines(records).filter(|line| !line.conditions.emulated).collect();
    let same = |case: &str, line: &Line| {
        let found = judged.iter().find(|other| other.case == case && other.subject == line.subject);
        found.and_then(|other| other.p50_ms)
    };
    let of = |case: &'static str| judged.iter().copied().filter(move |line| line.case == case);
    let mut verdicts = Vec::new();
    for line in of("forkd") {
        if let Some((pause, fork)) = line.p50_ms.zip(same("fork", line)) {
            let goal = format!("{}: pause at most a bare fork and 2 ms", name(&line.subject));
            verdicts.push(at_most(line, "pause_fork", goal, pause, fork + PAUSE_OVER_FORK_MS, "ms"));
        }
    }
    for line in of("forkd") {
        let Subject { memory, mem_mib, dirty_pct, .. } = line.subject;
        if (memory, mem_mib, dirty_pct) == COPY_SUBJECT
            && let Some((pause, copy)) = line.p50_ms.filter(|ms| *ms > 0.0).zip(same("copy", line))
        {
            let goal = format!("{}: pause at least 10 × shorter than a copy", name(&line.subject));
            let mut verdict = at_most(line, "pause_copy", goal, copy / pause, COPY_RATIO, "x");
            verdict.bound = Bound::AtLeast;
            verdict.met = copy / pause >= COPY_RATIO && line.complete();
            verdicts.push(verdict);
        }
    }
    verdicts.extend(rows(records).into_iter().filter_map(|(subject, row)| in_row(subject, &row)));
    for line in of("first_child") {
        let pause = same("first_pause", line);
        if let Some(((first, spawn), pause)) = line.p50_ms.zip(same("spawn", line)).zip(pause) {
            let goal = format!(
                "{}: from branch to a child's first instruction at most two spawns and the pause",
                name(&line.subject)
            );
            let limit = FIRST_CHILD_SPAWNS * spawn + pause;
            verdicts.push(at_most(line, "first_child", goal, first, limit, "ms"));
        }
    }
    let chain = |depth| of("chain_spawn").find(|line| line.depth == Some(depth));
    if let Some((base, deep)) = chain(0).zip(chain(CHAIN_DEPTH))
        && let Some((base, took)) = base.p50_ms.filter(|ms| *ms > 0.0).zip(deep.p50_ms)
    {
        let goal = "spawn from a chain of depth 8, of scattered pages, at most 1.2 × depth 0".to_owned();
        verdicts.push(at_most(deep, "chain_spawn", goal, took / base, CHAIN_RATIO, "x"));
    }
    for line in of("layer_bytes") {
        if let Some((bytes, differing)) = line.bytes.zip(line.differing_bytes.filter(|bytes| *bytes > 0)) {
            let goal = "a layer on disk at most 1.1 × the pages that differ".to_owned();
            let ratio = bytes as f64 / differing as f64;
            let mut verdict = at_most(line, "layer_bytes", goal, ratio, LAYER_RATIO, "x");
            // Less than what differs means that the guest had not written it yet.
            verdict.met &= bytes >= differing;
            verdicts.push(verdict);
        }
    }
    for line in of("live_beyond") {
        if let Some(beyond) = line.p50_ms {
            let goal =
                format!("{}: `live` without waiting returns within pause and 5 ms", name(&line.subject));
            verdicts.push(at_most(line, "live_call", goal, beyond, CALL_OVER_PAUSE_MS, "ms"));
        }
    }
    verdicts
}

fn name(subject: &Subject) -> String {
    let Subject { guest, memory, mem_mib, dirty_pct } = subject;
    format!("{guest}, {}, {mem_mib} MiB, {dirty_pct} % dirty", memory.name())
}

/// A goal is not met by attempts that failed.
fn at_most(line: &Line, figure: &str, goal: String, measured: f64, limit: f64, unit: &str) -> BranchVerdict {
    BranchVerdict {
        case: "verdict".into(),
        figure: figure.into(),
        goal,
        measured: rounded(measured),
        limit: rounded(limit),
        bound: Bound::AtMost,
        unit: unit.into(),
        met: measured <= limit && line.complete(),
    }
}

fn in_row(subject: &Subject, row: &[&InRow]) -> Option<BranchVerdict> {
    if row.len() < 2 * ROW_ENDS || row.iter().any(|one| one.conditions.emulated) {
        return None;
    }
    let middle = |part: &[&InRow]| median(&part.iter().map(|one| one.pause_ms).collect::<Vec<_>>());
    let first = middle(&row[..ROW_ENDS]).filter(|ms| *ms > 0.0)?;
    let ratio = middle(&row[row.len() - ROW_ENDS..])? / first;
    Some(BranchVerdict {
        case: "verdict".into(),
        figure: "in_row".into(),
        goal: format!(
            "{}: of {} branches in a row, the last 5 at most 1.5 × the first 5",
            name(subject),
            row.len()
        ),
        measured: rounded(ratio),
        limit: ROW_RATIO,
        bound: Bound::AtMost,
        unit: "x".into(),
        met: ratio <= ROW_RATIO,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn subject(memory: Kind, mem_mib: u64, dirty_pct: u64) -> Subject {
        Subject { guest: "tiny".into(), memory, mem_mib, dirty_pct }
    }

    fn line(case: &str, ms: f64) -> Line {
        let attempts = Attempts { times_ms: vec![ms; 3], errors: Vec::new() };
        Line::of(case, &subject(Kind::Layer, 1536, 10), &attempts, &Conditions::default())
    }

    fn met(lines: Vec<Line>) -> Vec<(String, bool)> {
        let records: Vec<Record> = lines.into_iter().map(Record::Line).collect();
        verdicts(&records).into_iter().map(|verdict| (verdict.figure, verdict.met)).collect()
    }

    fn all(expected: &[(&str, bool)]) -> Vec<(String, bool)> {
        expected.iter().map(|(figure, met)| ((*figure).to_owned(), *met)).collect()
    }

    #[test]
    fn a_line_has_the_promised_fields_and_says_null_for_what_is_unknown() {
        let mut attempts = Attempts::default();
        attempts.add(Err::<f64, _>("no"));
        let line = Line::of("uffd_wp", &subject(Kind::Layer, 512, 0), &attempts, &Conditions::default());
        let json = Record::Line(line.clone()).to_json();
        let promised = r#"{"case":"uffd_wp","guest":"tiny","memory":"layer","mem_mib":512,"dirty_pct":0,"n":1,"ok":0,"p50_ms":null,"p99_ms":null,"errors":["no"],"#;
        assert!(json.starts_with(promised), "{json}");
        assert_eq!(Record::from_json(&json).unwrap(), Record::Line(line));
        assert!(Record::from_json("{}").is_err());
    }

    #[test]
    fn all_kinds_of_records_come_back_from_json_as_what_they_were() {
        let row = InRow {
            case: "forkd".into(),
            subject: subject(Kind::Huge, 512, 10),
            index: 3,
            pause_ms: 1.5,
            conditions: Conditions::default(),
        };
        let records = [Record::InRow(row), Record::Line(line("forkd", 1.0))];
        let judged = verdicts(&[Record::Line(line("forkd", 1.0)), Record::Line(line("fork", 1.0))]);
        for record in records.into_iter().chain(judged.into_iter().map(Record::Verdict)) {
            assert_eq!(Record::from_json(&record.to_json()).unwrap(), record);
        }
    }

    #[test]
    fn a_pause_is_judged_by_the_fork_and_the_copy_of_the_same_memory() {
        let lines = |pause| vec![line("forkd", pause), line("fork", 6.0), line("copy", 80.0)];
        assert_eq!(met(lines(8.0)), all(&[("pause_fork", true), ("pause_copy", true)]));
        assert_eq!(met(lines(8.1)), all(&[("pause_fork", false), ("pause_copy", false)]));
        let mut other = lines(1.0);
        other[1].subject.dirty_pct = 100;
        other[2].subject.memory = Kind::Huge;
        assert_eq!(met(other), all(&[]), "other memory is no measure");
    }

    #[test]
    fn attempts_that_failed_meet_no_goal_and_emulated_ones_are_not_judged() {
        let mut failed = line("forkd", 1.0);
        failed.ok -= 1;
        assert_eq!(met(vec![failed, line("fork", 1.0)]), all(&[("pause_fork", false)]));
        let mut emulated = line("forkd", 1.0);
        emulated.conditions.emulated = true;
        assert_eq!(met(vec![emulated, line("fork", 1.0)]), all(&[]));
    }

    #[test]
    fn calls_children_chains_and_layers_have_their_limits() {
        let chain = |depth, ms| Line { depth: Some(depth), ..line("chain_spawn", ms) };
        let layer =
            |bytes| Line { bytes: Some(bytes), differing_bytes: Some(1000), ..line("layer_bytes", 0.0) };
        let lines = |first, deep, bytes, beyond| {
            vec![
                line("spawn", 3.0),
                line("first_pause", 4.0),
                line("first_child", first),
                chain(0, 10.0),
                chain(8, deep),
                layer(bytes),
                line("live_beyond", beyond),
            ]
        };
        let figures = ["first_child", "chain_spawn", "layer_bytes", "live_call"];
        assert_eq!(met(lines(10.0, 12.0, 1100, 5.0)), all(&figures.map(|figure| (figure, true))));
        assert_eq!(met(lines(10.1, 12.1, 1101, 5.1)), all(&figures.map(|figure| (figure, false))));
        // Its own branch's pause counts, not that of others.
        let own = [("forkd", 9.0), ("first_pause", 4.0), ("spawn", 3.0), ("first_child", 10.1)];
        assert_eq!(met(own.map(|(case, ms)| line(case, ms)).into()), all(&[("first_child", false)]));
    }

    #[test]
    fn the_last_of_a_row_are_compared_with_the_first() {
        let row = |slow: f64| -> Vec<Record> {
            let one = |index: usize| InRow {
                case: "forkd".into(),
                subject: subject(Kind::Layer, 512, 10),
                index,
                pause_ms: if index < 15 { 2.0 } else { slow },
                conditions: Conditions::default(),
            };
            (0..20).rev().map(one).map(Record::InRow).collect()
        };
        assert!(verdicts(&row(3.0))[0].met);
        let late = &verdicts(&row(3.1))[0];
        assert!(!late.met && late.to_string().starts_with("NOT MET: "), "{late}");
        assert!(verdicts(&row(3.0)[..9]).is_empty(), "too few to say");
    }

    #[test]
    fn the_table_has_a_row_per_line() {
        let text = table(&[Record::Line(line("forkd", 1.0)), Record::Line(line("fork", 1.0))]);
        assert_eq!(text.lines().count(), 4, "{text}");
        assert!(text.contains("| forkd | tiny  | layer  | 1536 |      10 | 3 |  3 |   1.00 |"), "{text}");
    }
}

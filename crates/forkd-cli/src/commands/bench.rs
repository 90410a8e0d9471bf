//! `forkd bench`: drives `forkd-bench`, and measures the real path over the daemon's API.

mod emulated;
mod server;
mod spawn;

use std::collections::BTreeSet;
use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand, ValueEnum};
use forkd_bench::{chart, floor, report};

use super::Context;
use crate::ui;

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Spawn(SpawnArgs),
    Report(ReportArgs),
    /// One burst of the floor, in a process of its own: it forks, and must have one thread.
    #[command(hide = true)]
    Floor(FloorArgs),
}

/// Measure fan-outs: how long until children answer, and what memory they take.
///
/// Compares the same tiny guest made by bare KVM calls (floor) and by the real path (tiny: daemon,
/// template, jailed child, no network), and measures Linux guests to the first answer of their agent
/// (linux) and a warmed Python (eval). Starts a daemon of its own. Where KVM cannot run Linux, the
/// Linux cases run in the emulated machine, where only ratios and memory mean anything.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd bench spawn
  sudo forkd bench spawn --case floor,tiny --n 1,100 --json
  sudo forkd bench spawn --out results.jsonl && forkd bench report results.jsonl --charts .

Exit status: 0 when all cases could be measured, whether or not the goals are met; 1 otherwise.")]
pub(crate) struct SpawnArgs {
    /// What to measure [default: floor,tiny,linux,eval, and firecracker if one is given].
    #[arg(long = "case", value_delimiter = ',', value_name = "CASE,…")]
    cases: Vec<Case>,

    /// Numbers of tiny children [default: 1,10,100,1000; without the last when quick or emulated].
    #[arg(long, value_delimiter = ',', value_parser = parse_count, value_name = "N,…")]
    n: Vec<usize>,

    /// Numbers of Linux children.
    #[arg(long, value_delimiter = ',', default_value = "1,10,20", value_parser = parse_count, value_name = "N,…")]
    linux_n: Vec<usize>,

    /// Memory of every guest in MiB.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u64).range(64..=3072), value_name = "MIB")]
    mem_size_mib: u64,

    /// Fewer repetitions.
    #[arg(long)]
    quick: bool,

    /// Give the Linux children no network.
    #[arg(long)]
    no_network: bool,

    /// Measure the same fan-out with this firecracker program, too.
    #[arg(long, value_name = "FILE")]
    firecracker: Option<PathBuf>,

    /// Measure the daemon behind this unix socket instead of starting one.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    /// Print one JSON object per line instead of a table.
    #[arg(long)]
    json: bool,

    /// Also write those lines to a file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// What can be measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Case {
    Floor,
    Tiny,
    Firecracker,
    Linux,
    Eval,
}

impl SpawnArgs {
    fn cases(&self) -> BTreeSet<Case> {
        if !self.cases.is_empty() {
            return self.cases.iter().copied().collect();
        }
        let mut cases = BTreeSet::from([Case::Floor, Case::Tiny, Case::Linux, Case::Eval]);
        cases.extend(self.firecracker.as_ref().map(|_| Case::Firecracker));
        cases
    }
}

/// Print results as a table, and draw them.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  forkd bench report bench/results/spawn.jsonl --charts bench/charts")]
pub(crate) struct ReportArgs {
    /// What `forkd bench spawn --json` printed.
    #[arg(required = true, value_name = "FILE")]
    results: Vec<PathBuf>,

    /// Write spawn-times.svg and spawn-memory.svg to this folder.
    #[arg(long, value_name = "DIR")]
    charts: Option<PathBuf>,
}

#[derive(Debug, Args)]
pub(crate) struct FloorArgs {
    #[arg(long)]
    n: usize,

    /// The guest's memory.
    #[arg(long)]
    memory: PathBuf,
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=forkd_bench::burst::MAX_CHILDREN) => Ok(n),
        _ => Err(format!("it must be 1 to {}", forkd_bench::burst::MAX_CHILDREN)),
    }
}

pub(crate) fn bench(context: &Context, command: BenchCommand) -> Result<u8> {
    match command {
        BenchCommand::Spawn(args) => spawn::spawn(context, &args),
        BenchCommand::Report(args) => print_report(&args).map(|()| 0),
        BenchCommand::Floor(args) => {
            ui::print(&serde_json::to_string(&floor::burst(args.n, &args.memory)?)?)?;
            Ok(0)
        }
    }
}

fn print_report(args: &ReportArgs) -> Result<()> {
    let mut lines = Vec::new();
    for path in &args.results {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        lines.extend(report::parse(&text).with_context(|| format!("in {}", path.display()))?);
    }
    if let Some(folder) = &args.charts {
        fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
        for (name, svg) in [("spawn-times", chart::times(&lines)), ("spawn-memory", chart::memory(&lines))] {
            let path = folder.join(name).with_extension("svg");
            fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
        }
    }
    ui::print(&summary(&lines))
}

/// Conditions, table and verdicts: what people read.
fn summary(lines: &[report::Line]) -> String {
    let conditions = report::conditions(lines).into_iter().map(|text| format!("- {text}"));
    let verdicts = report::verdicts(lines).into_iter().map(|verdict| format!("- {verdict}"));
    let errors = lines.iter().flat_map(|line| {
        line.errors.iter().map(move |error| format!("- {}, n = {}: FAILED: {error}", line.case, line.n))
    });
    let block = |lines: Vec<String>| lines.join("\n");
    let parts = [block(conditions.collect()), report::table(lines), block(verdicts.chain(errors).collect())];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn parsed(line: &[&str]) -> Result<SpawnArgs, clap::Error> {
        match Cli::try_parse_from(["forkd", "bench", "spawn"].iter().chain(line))?.command {
            Command::Bench(BenchCommand::Spawn(args)) => Ok(args),
            _ => panic!("not bench spawn"),
        }
    }

    #[test]
    fn firecracker_is_measured_when_one_is_given() {
        assert!(!parsed(&[]).unwrap().cases().contains(&Case::Firecracker));
        assert!(parsed(&["--firecracker", "/x"]).unwrap().cases().contains(&Case::Firecracker));
        assert_eq!(parsed(&["--case", "tiny,floor"]).unwrap().cases(), [Case::Floor, Case::Tiny].into());
    }

    #[test]
    fn numbers_that_no_call_allows_are_wrong_usage() {
        assert_eq!(parsed(&["--n", "1,1000"]).unwrap().n, [1, 1000]);
        for n in ["0", "1001", "x", "1,,2", "-1"] {
            assert_eq!(parsed(&["--n", n]).unwrap_err().exit_code(), 2, "{n}");
        }
    }
}

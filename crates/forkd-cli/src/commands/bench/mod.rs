//! `forkd bench`: drives `forkd-bench`, and measures the real path over the daemon's API.

mod branch;
mod chain;
mod companion;
mod e2b;
mod emulated;
mod quick;
mod results;
mod server;
mod spawn;
mod turns;
mod wire;

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context as _, Result};
use clap::{Args, Subcommand, ValueEnum};
use forkd_bench::bare::Kind;
use forkd_bench::branch::Record;
use forkd_bench::{bare, chart, floor, host, report, writer};

use self::e2b::BenchE2bArgs;
use self::results::OutputArgs;
use super::Context;
use crate::args::QuickBenchArgs;
use crate::host::kvm;
use crate::host::paths::Binaries;
use crate::images;
use crate::ui;

/// Measure the speed of forkd on this host.
///
/// Without a subcommand: the time in which the running daemon spawns a child, runs a command in it, branches
/// it, forks the branch and removes both. Each subcommand measures one operation in detail, with its own
/// daemon.
#[derive(Debug, Args)]
#[command(
    args_conflicts_with_subcommands = true,
    after_help = "Examples:
  forkd bench
  forkd bench --tag numpy --n 20 --json | jq '.steps[] | {name, ms}'
  sudo forkd bench spawn --quick

Exit status: 0 measured, 1 failed, 130 interrupted by ^C, 2 wrong usage."
)]
pub(crate) struct BenchArgs {
    #[command(subcommand)]
    pub(crate) command: Option<BenchCommand>,

    #[command(flatten)]
    quick: QuickBenchArgs,
}

#[derive(Debug, Subcommand)]
pub(crate) enum BenchCommand {
    Spawn(BenchSpawnArgs),
    Branch(BenchBranchArgs),
    E2b(BenchE2bArgs),
    Report(ReportArgs),
    /// One burst of bare KVM forks, in a separate process, because it must have one thread.
    #[command(hide = true)]
    Floor(FloorArgs),
    /// Memory to fork, write-protect and copy, in a separate process for the same reason.
    #[command(hide = true)]
    Bare(BareArgs),
}

/// Measure fan-outs: the time until children answer, and their memory.
///
/// Compares a tiny guest forked by bare KVM calls (floor) with the same guest on the real path (tiny: daemon,
/// template, jailed child, no network). Measures Linux guests until their agent answers (linux) and until a
/// warmed Python answers (eval). Starts its own daemon. Where KVM cannot run Linux, the Linux cases run in the
/// emulated machine; only ratios and memory are meaningful there.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd bench spawn
  sudo forkd bench spawn --case floor,tiny --n 1,100 --json
  sudo forkd bench spawn --out results.jsonl && forkd bench report results.jsonl --charts .

Exit status: 0 all cases measured, whether or not they meet the goals; 1 otherwise.")]
pub(crate) struct BenchSpawnArgs {
    /// Cases to measure [default: floor,tiny,linux,eval, and firecracker with --firecracker].
    #[arg(long = "case", value_delimiter = ',', value_name = "CASE,…")]
    cases: Vec<Case>,

    /// Numbers of tiny children [default: 1,10,100,1000; without the last if quick or emulated].
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

    /// Also measure the same fan-out with this firecracker program.
    #[arg(long, value_name = "FILE")]
    firecracker: Option<PathBuf>,

    /// Measure the daemon behind this unix socket instead of starting one.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

/// A case to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, ValueEnum)]
enum Case {
    Floor,
    Tiny,
    Firecracker,
    Linux,
    Eval,
}

impl BenchSpawnArgs {
    fn cases(&self) -> BTreeSet<Case> {
        if !self.cases.is_empty() {
            return self.cases.iter().copied().collect();
        }
        let mut cases = BTreeSet::from([Case::Floor, Case::Tiny, Case::Linux, Case::Eval]);
        cases.extend(self.firecracker.as_ref().map(|_| Case::Firecracker));
        cases
    }
}

/// Measure branches: the pause of a running sandbox, and the children of the branch.
///
/// Branches a tiny guest that keeps writing to its memory. In turns with that, it measures the same memory
/// outside of forkd: as a VM's memory it forks (fork), write-protects (uffd_wp) and copies it (copy), and it
/// forks it as plain memory (fork_plain). Then it measures branches in a row, the first child of a branch and
/// chains of layers, and the same with Linux. Where KVM cannot run Linux, that runs in the emulated machine;
/// only ratios are meaningful there. Starts its own daemon. Compares the results with the goals.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd bench branch
  sudo forkd bench branch --guest tiny --mem-size-mib 1536 --dirty 10 --json
  sudo forkd bench branch --out results.jsonl && forkd bench report results.jsonl --charts .

Exit status: 0 all cases measured, whether or not they meet the goals; 1 otherwise.")]
pub(crate) struct BenchBranchArgs {
    /// Guests to branch [default: tiny,linux; only tiny if quick].
    #[arg(long, value_delimiter = ',', value_name = "GUEST,…")]
    guest: Vec<Guest>,

    /// Kind of memory of tiny guests.
    #[arg(long, value_delimiter = ',', default_value = "layer,huge", value_name = "KIND,…")]
    memory: Vec<MemoryKind>,

    /// Memory of tiny guests in MiB [default: 512,1536,4096; only the first if quick].
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u64).range(64..=4096), value_name = "MIB,…")]
    mem_size_mib: Vec<u64>,

    /// Percentages of pages that the guests keep writing [default: 0,10,100; without the last if quick].
    #[arg(long, value_delimiter = ',', value_parser = parse_percentage, value_name = "PERCENT,…")]
    dirty: Vec<u64>,

    /// Fewer repetitions and smaller sizes.
    #[arg(long)]
    quick: bool,

    /// Also measure snapshots of this firecracker program.
    #[arg(long, value_name = "FILE")]
    firecracker: Option<PathBuf>,

    /// Measure the daemon behind this unix socket instead of starting one.
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

/// A guest to branch.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Guest {
    Tiny,
    Linux,
}

/// The kind of a guest's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum MemoryKind {
    Layer,
    Huge,
}

impl From<MemoryKind> for Kind {
    fn from(kind: MemoryKind) -> Kind {
        match kind {
            MemoryKind::Layer => Kind::Layer,
            MemoryKind::Huge => Kind::Huge,
        }
    }
}

/// Print results as a table, and draw charts of them.
#[derive(Debug, Args)]
#[command(after_help = "Example:
  forkd bench report bench/results/spawn.jsonl --charts bench/charts

Exit status: 0 printed, 1 failed, 2 wrong usage.")]
pub(crate) struct ReportArgs {
    /// Files with the output of `forkd bench spawn --json`, `forkd bench branch --json` and `forkd bench e2b --json`.
    #[arg(required = true, value_name = "FILE")]
    results: Vec<PathBuf>,

    /// Draw the results as SVG files in this folder.
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

#[derive(Debug, Args)]
pub(crate) struct BareArgs {
    #[arg(long)]
    memory: MemoryKind,

    /// File of the same length as the memory.
    #[arg(long)]
    file: PathBuf,

    #[arg(long)]
    mem_size_mib: u64,

    #[arg(long)]
    dirty: u64,

    /// CPU to run on.
    #[arg(long)]
    cpu: usize,
}

fn parse_percentage(text: &str) -> Result<u64, String> {
    let percent: u64 = text.parse().map_err(|_| "it must be a number".to_owned())?;
    writer::distance(percent).map(|_| percent).map_err(|error| error.to_string())
}

fn parse_count(text: &str) -> Result<usize, String> {
    match text.parse() {
        Ok(n @ 1..=forkd_bench::burst::MAX_CHILDREN) => Ok(n),
        _ => Err(format!("it must be 1 to {}", forkd_bench::burst::MAX_CHILDREN)),
    }
}

pub(crate) fn bench(context: &Context, args: BenchArgs) -> Result<u8> {
    let Some(command) = args.command else { return quick::quick(context, &args.quick) };
    match command {
        BenchCommand::Spawn(args) => spawn::spawn(context, &args),
        BenchCommand::Branch(args) => branch::branch(context, &args),
        BenchCommand::E2b(args) => e2b::e2b(context, &args),
        BenchCommand::Bare(args) => {
            host::keep_on(args.cpu, None)?;
            let (input, output) = (std::io::stdin().lock(), std::io::stdout());
            bare::serve(args.memory.into(), &args.file, args.mem_size_mib, args.dirty, input, output)?;
            Ok(0)
        }
        BenchCommand::Report(args) => print_report(&args).map(|()| 0),
        BenchCommand::Floor(args) => {
            ui::print(&serde_json::to_string(&floor::burst(args.n, &args.memory)?)?)?;
            Ok(0)
        }
    }
}

/// The reason to measure Linux guests in the emulated machine, if there is one. Builds the image and the
/// kernel if they are missing.
fn linux_elsewhere(context: &Context, socket: Option<&Path>, image: &str) -> Result<Option<String>> {
    if socket.is_some() {
        // A user who names a daemon wants that one measured.
        return Ok(None);
    }
    let kvm = kvm::probe_cached(&Binaries::find()?.vmm, &context.data.kvm_cache())?;
    images::ensure_image(&context.data, image, context.ui)?;
    images::ensure_guest_kernel(&context.data, context.ui)?;
    Ok((!kvm.runs_linux).then(|| kvm.describe()))
}

fn print_report(args: &ReportArgs) -> Result<()> {
    let (mut lines, mut records, mut e2b_records) = (Vec::new(), Vec::new(), Vec::new());
    for path in &args.results {
        let text = fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))?;
        let whole = || text.lines().filter(|line| !line.trim().is_empty());
        let first: serde_json::Value =
            whole().next().and_then(|line| serde_json::from_str(line).ok()).unwrap_or_default();
        let has = |name: &str| first.get(name).is_some();
        let named = || format!("in {}", path.display());
        // Only lines of branch results have a guest or a verdict, and only those of the E2B API another way beside.
        if has("beside") {
            for line in whole() {
                e2b_records.push(forkd_bench::e2b::Record::from_json(line).with_context(named)?);
            }
        } else if has("guest") || has("figure") {
            for line in whole() {
                records.push(Record::from_json(line).with_context(named)?);
            }
        } else {
            lines.extend(report::parse(&text).with_context(named)?);
        }
    }
    if let Some(folder) = &args.charts {
        draw(folder, &lines, &records)?;
    }
    if !lines.is_empty() {
        ui::print(&summary(&lines))?;
    }
    if !records.is_empty() {
        ui::print(&branch::summary(&records))?;
    }
    if !e2b_records.is_empty() {
        ui::print(&e2b::summary(&e2b_records))?;
    }
    Ok(())
}

/// Draws a chart for each kind of result.
fn draw(folder: &Path, lines: &[report::Line], records: &[Record]) -> Result<()> {
    fs::create_dir_all(folder).with_context(|| format!("cannot make {}", folder.display()))?;
    let mut charts = Vec::new();
    if !lines.is_empty() {
        charts.extend([("spawn-times", chart::times(lines)), ("spawn-memory", chart::memory(lines))]);
    }
    if !records.is_empty() {
        charts.extend([
            ("branch-layer", chart::pauses(records, Kind::Layer)),
            ("branch-huge", chart::pauses(records, Kind::Huge)),
            ("branch-rows", chart::rows(records)),
        ]);
        charts.extend(chart::standstills(records).map(|svg| ("branch-firecracker", svg)));
    }
    for (name, svg) in charts {
        let path = folder.join(name).with_extension("svg");
        fs::write(&path, svg).with_context(|| format!("cannot write {}", path.display()))?;
    }
    Ok(())
}

/// The report as text: conditions, table and verdicts.
fn summary(lines: &[report::Line]) -> String {
    let cases = lines.iter().map(|line| (line.case.as_str(), &line.conditions));
    let conditions = report::conditions(cases).into_iter().map(|text| format!("- {text}"));
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

    fn parsed(line: &[&str]) -> Result<BenchSpawnArgs, clap::Error> {
        match Cli::try_parse_from(["forkd", "bench", "spawn"].iter().chain(line))?.command {
            Command::Bench(BenchArgs { command: Some(BenchCommand::Spawn(args)), .. }) => Ok(args),
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
    fn percentages_that_cannot_be_spread_evenly_and_memory_without_tables_are_wrong_usage() {
        let parse = |line: &[&str]| Cli::try_parse_from(["forkd", "bench", "branch"].iter().chain(line));
        assert!(parse(&["--dirty", "0,10,50,100", "--mem-size-mib", "64,4096", "--memory", "huge"]).is_ok());
        for line in [["--dirty", "33"], ["--dirty", "101"], ["--mem-size-mib", "4097"], ["--memory", "swap"]]
        {
            assert_eq!(parse(&line).unwrap_err().exit_code(), 2, "{line:?}");
        }
    }

    #[test]
    fn numbers_that_no_call_allows_are_wrong_usage() {
        assert_eq!(parsed(&["--n", "1,1000"]).unwrap().n, [1, 1000]);
        for n in ["0", "1001", "x", "1,,2", "-1"] {
            assert_eq!(parsed(&["--n", n]).unwrap_err().exit_code(), 2, "{n}");
        }
    }
}

//! `forkd bench spawn`: the cases, repetitions and order of the measurement.

use std::fs;
use std::path::Path;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use forkd_bench::burst::{Burst, median, rounded};
use forkd_bench::firecracker::Firecracker;
use forkd_bench::guest;
use forkd_bench::host::Conditions;
use forkd_bench::report::{self, Line};
use hyper::Method;
use serde_json::json;

use super::results::{BenchResult, Results};
use super::server::{BenchDaemon, DaemonSource, MeasurementEnd, in_bench_folder};
use super::{BenchSpawnArgs, Case, emulated, linux_elsewhere, summary};
use crate::commands::{Context, runtime};
use crate::host::paths::Binaries;

/// The measured expression.
const EXPRESSION: &str = "numpy.zeros(5).tolist()";
const EXPECTED: &str = "[0.0, 0.0, 0.0, 0.0, 0.0]";
/// The number of evaluations, and of evaluations in a new Python.
const EVALUATIONS: usize = 20;
const NEW_PYTHONS: usize = 3;

/// Measures, prints, and returns the exit status.
pub(super) fn spawn(context: &Context, args: &BenchSpawnArgs) -> Result<u8> {
    let cases = args.cases();
    let mut results = Results::new(&args.output);
    let conditions = Conditions::here();
    if !conditions.cgroups {
        context.ui.note("no cgroup v2 controllers on this host: children run without cgroups");
    }
    let linux: Vec<Case> =
        cases.iter().copied().filter(|case| matches!(case, Case::Linux | Case::Eval)).collect();
    let elsewhere = match linux.is_empty() {
        true => None,
        false => linux_elsewhere(context, args.socket.as_deref(), "python")?,
    };
    let here = cases.iter().copied().filter(|case| elsewhere.is_none() || !linux.contains(case));
    let here: Vec<Case> = here.collect();
    if !here.is_empty() {
        let run = SpawnRun { context, args, cases: &here, conditions: &conditions };
        if let MeasurementEnd::Caught(caught) = runtime()?.block_on(run.measure(&mut results))? {
            return Ok(caught.status());
        }
    }
    if let Some(why) = elsewhere {
        match in_machine(context, args, &linux, &why) {
            Ok((lines, complete)) => {
                // The command in the machine has reported missing results.
                results.status |= u8::from(!complete);
                lines.into_iter().try_for_each(|line| results.add(line))?;
            }
            Err(error) => results.failed(context, "linux, eval", &error),
        }
    }
    results.conclude()
}

/// Measures `cases` in the emulated machine; returns whether all succeeded.
fn in_machine(
    context: &Context,
    args: &BenchSpawnArgs,
    cases: &[Case],
    why: &str,
) -> Result<(Vec<Line>, bool)> {
    let mut inside = vec!["spawn".to_owned(), "--case".into()];
    let names = cases.iter().map(|case| format!("{case:?}").to_lowercase());
    inside.push(names.collect::<Vec<_>>().join(","));
    let numbers = args.linux_n.iter().map(usize::to_string);
    inside.extend(["--linux-n".into(), numbers.collect::<Vec<_>>().join(",")]);
    inside.extend(["--mem-size-mib".into(), args.mem_size_mib.to_string()]);
    inside.extend(args.quick.then(|| "--quick".into()));
    inside.extend(args.no_network.then(|| "--no-network".into()));
    let (printed, complete) = emulated::measure(context, &inside, why)?;
    Ok((report::parse(&printed).context("what `forkd bench` in the emulated machine printed")?, complete))
}

impl BenchResult for Line {
    fn to_json(&self) -> String {
        Line::to_json(self)
    }

    fn summary(all: &[Line]) -> String {
        summary(all)
    }
}

/// The measurements on this host.
struct SpawnRun<'a> {
    context: &'a Context,
    args: &'a BenchSpawnArgs,
    cases: &'a [Case],
    conditions: &'a Conditions,
}

impl SpawnRun<'_> {
    fn has(&self, case: Case) -> bool {
        self.cases.contains(&case)
    }

    async fn measure(&self, results: &mut Results<'_, Line>) -> Result<MeasurementEnd> {
        let needed = |case: &Case| matches!(case, Case::Tiny | Case::Linux | Case::Eval);
        let place = match self.cases.iter().any(needed) {
            true => DaemonSource::Daemon(self.args.socket.as_deref()),
            false => DaemonSource::Nothing,
        };
        in_bench_folder(self.context, place, async |server, folder| self.all(server, folder, results).await)
            .await
    }

    async fn all(
        &self,
        mut server: Option<&mut BenchDaemon>,
        folder: &Path,
        results: &mut Results<'_, Line>,
    ) -> Result<()> {
        if self.has(Case::Floor) || self.has(Case::Tiny) {
            let tiny = server.as_deref_mut().filter(|_| self.has(Case::Tiny));
            if let Err(error) = self.floor_and_tiny(tiny, folder, results).await {
                results.failed(self.context, "floor, tiny", &error);
            }
        }
        if self.has(Case::Firecracker)
            && let Err(error) = self.firecracker(folder, results)
        {
            results.failed(self.context, "firecracker", &error);
        }
        if let Some(server) = server
            && (self.has(Case::Linux) || self.has(Case::Eval))
            && let Err(error) = self.linux(server, results).await
        {
            results.failed(self.context, "linux, eval", &error);
        }
        Ok(())
    }

    fn numbers(&self) -> Vec<usize> {
        match &self.args.n[..] {
            [] if self.args.quick || self.conditions.emulated => vec![1, 10, 100],
            [] => vec![1, 10, 100, 1000],
            given => given.to_vec(),
        }
    }

    /// The repetitions of a burst of `n`: small bursts are short and vary most.
    fn repetitions(&self, n: usize) -> usize {
        let full: usize = match n {
            0..=4 => 20,
            5..=49 => 10,
            50..=499 => 5,
            _ => 2,
        };
        if self.args.quick { full.div_ceil(4) } else { full }
    }

    /// Measures the floor and the real path in turns, so that both meet the same load on the host.
    async fn floor_and_tiny(
        &self,
        mut server: Option<&mut BenchDaemon>,
        folder: &Path,
        results: &mut Results<'_, Line>,
    ) -> Result<()> {
        let memory = folder.join("memory");
        guest::write_memory_file(&memory, self.args.mem_size_mib)?;
        let tag = format!("bench-tiny-{}", std::process::id());
        if let Some(there) = server.as_deref_mut()
            && let Err(error) = self.prepare_tiny(there, folder, &tag).await
        {
            results.failed(self.context, "tiny", &error);
            server = None;
        }
        for n in self.numbers() {
            let progress = self.context.ui.spinner(format!("{n} tiny children"));
            let (mut floors, mut tinies) = (Vec::new(), Vec::new());
            for _ in 0..self.repetitions(n) {
                if self.has(Case::Floor) {
                    floors.push(floor(n, &memory).await?);
                }
                if let Some(server) = server.as_deref() {
                    let (burst, children) = server.fan_out(&tag, n, false).await?;
                    server.delete(&children).await?;
                    tinies.push(burst);
                }
            }
            drop(progress);
            for (case, bursts) in [("floor", floors), ("tiny", tinies)] {
                if !bursts.is_empty() {
                    results.add(Line::of_bursts(case, n, &bursts, self.conditions))?;
                }
            }
        }
        Ok(())
    }

    /// Creates a snapshot of the tiny guest, and a first child, which pays for everything that the others share.
    async fn prepare_tiny(&self, server: &mut BenchDaemon, folder: &Path, tag: &str) -> Result<()> {
        let kernel = folder.join("tiny-kernel");
        fs::write(&kernel, guest::kernel()).with_context(|| format!("cannot write {}", kernel.display()))?;
        let request = json!({ "kernel": kernel, "network": false, "mem_size_mib": self.args.mem_size_mib });
        server.snapshot(tag, request).await?;
        let (burst, children) = server.fan_out(tag, 1, false).await?;
        server.delete(&children).await?;
        match burst.errors.first() {
            Some(error) => bail!("a first child did not run: {error}"),
            None => Ok(()),
        }
    }

    fn firecracker(&self, folder: &Path, results: &mut Results<'_, Line>) -> Result<()> {
        let program = self.args.firecracker.as_deref().context("give the program with --firecracker FILE")?;
        let folder = folder.join("firecracker");
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        let snapshot = Firecracker::snapshot(program, &folder, self.args.mem_size_mib)?;
        snapshot.burst(1)?;
        for n in self.numbers() {
            let bursts: Result<Vec<Burst>, _> = (0..self.repetitions(n)).map(|_| snapshot.burst(n)).collect();
            results.add(Line::of_bursts("firecracker", n, &bursts?, self.conditions))?;
        }
        Ok(())
    }

    /// Measures Linux guests, warmed with numpy, until their agent answers; then Python in a child.
    async fn linux(&self, server: &mut BenchDaemon, results: &mut Results<'_, Line>) -> Result<()> {
        let ui = self.context.ui;
        let (tag, network) = (format!("bench-linux-{}", std::process::id()), !self.args.no_network);
        let progress = ui.progress("booting and warming a Linux guest");
        let request = json!({
            "image": "python", "warm_python": "import numpy", "network": network,
            "mem_size_mib": self.args.mem_size_mib,
        });
        server.snapshot(&tag, request).await?;
        let (first, children) = server.fan_out(&tag, 1, network).await?;
        progress.done("a Linux guest is warm");
        let Some(child) = children.first() else {
            let why = first.errors.first().map_or("for a reason not given", String::as_str);
            bail!("a first Linux child did not run: {why}");
        };
        let eval = if self.has(Case::Eval) { Some(self.eval(server, &child.id).await) } else { None };
        server.delete(&children).await?;
        if self.has(Case::Linux) {
            for n in self.args.linux_n.iter().copied() {
                let progress = ui.progress(format!("{n} Linux children"));
                let mut bursts = Vec::new();
                for _ in 0..if self.args.quick || n > 1 { 1 } else { 3 } {
                    let (burst, children) = server.fan_out(&tag, n, network).await?;
                    server.delete(&children).await?;
                    bursts.push(burst);
                }
                let line = Line::of_bursts("linux", n, &bursts, self.conditions);
                progress.done(&format!("{} of {n} Linux children answered", line.ok));
                results.add(line)?;
            }
        }
        match eval {
            Some(Ok(line)) => results.add(line),
            Some(Err(error)) => {
                results.failed(self.context, "eval", &error);
                Ok(())
            }
            None => Ok(()),
        }
    }

    /// Measures an evaluation in the warmed Python and in a new Python, both with the same API.
    async fn eval(&self, server: &BenchDaemon, id: &str) -> Result<Line> {
        let path = |verb: &str| format!("/v1/sandboxes/{id}/{verb}");
        let imported = json!({ "code": "import numpy", "timeout_secs": 300 });
        server.call(Method::POST, &path("eval"), Some(&imported)).await?;
        let mut warm = Vec::new();
        for _ in 0..EVALUATIONS {
            let request = json!({ "code": EXPRESSION });
            let begin = Instant::now();
            let answer = server.call(Method::POST, &path("eval"), Some(&request)).await?;
            warm.push(milliseconds(begin.elapsed()));
            if answer["result"] != EXPECTED {
                bail!("`{EXPRESSION}` gave {answer}");
            }
        }
        let program = format!("import numpy; print({EXPRESSION})");
        let mut cold = Vec::new();
        for _ in 0..NEW_PYTHONS {
            let request = json!({ "args": ["python3", "-c", program], "timeout_secs": 600 });
            let begin = Instant::now();
            let answer = server.call(Method::POST, &path("exec"), Some(&request)).await?;
            cold.push(milliseconds(begin.elapsed()));
            if answer["stdout"].as_str().map(str::trim) != Some(EXPECTED) {
                bail!("a new Python gave {answer}");
            }
        }
        let all_ms = warm.iter().sum();
        let burst = Burst { asked: warm.len(), times_ms: warm, all_ms, ..Burst::default() };
        let mut line = Line::of_bursts("eval", burst.asked, std::slice::from_ref(&burst), self.conditions);
        line.python_ms = median(&cold).map(rounded);
        let ratio = line.python_ms.zip(line.p50_ms).filter(|(_, warm)| *warm > 0.0);
        line.ratio = ratio.map(|(cold, warm)| rounded(cold / warm));
        Ok(line)
    }
}

fn milliseconds(time: Duration) -> f64 {
    time.as_secs_f64() * 1e3
}

/// Measures one burst of the floor, in a separate process.
async fn floor(n: usize, memory: &Path) -> Result<Burst> {
    let mut command = tokio::process::Command::new(Binaries::find()?.forkd);
    command.args(["bench", "floor", "--n", &n.to_string(), "--memory"]).arg(memory).kill_on_drop(true);
    let output = command.output().await.context("cannot start the floor's process")?;
    if !output.status.success() {
        bail!("the floor could not be measured: {}", String::from_utf8_lossy(&output.stderr).trim());
    }
    serde_json::from_slice(&output.stdout).context("the floor's process printed something else")
}

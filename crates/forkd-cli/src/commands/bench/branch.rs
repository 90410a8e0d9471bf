//! `forkd bench branch`: the guests, repetitions and order of the measurement.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result, bail};
use forkd_bench::bare::Kind;
use forkd_bench::branch::{self, Attempts, InRow, Line, Record, Subject};
use forkd_bench::host::Conditions;
use forkd_bench::report;
use forkd_bench::writer::{self, HUGE_PAGE, PAGE, Writer};
use hyper::Method as Verb;
use serde_json::{Value, json};

use super::results::{BenchResult, Results};
use super::server::{BenchDaemon, DaemonSource, MeasurementEnd, in_bench_folder};
use super::turns::{Turns, WRITES};
use super::{BenchBranchArgs, Guest, chain, emulated, linux_elsewhere};
use crate::commands::{Context, runtime};

/// The number of branches in a row, and the guests for them.
const IN_ROW: usize = 20;
const IN_ROW_SUBJECT: (u64, u64) = (512, 10);
/// Memory of the guest whose first children are timed.
const FIRST_CHILD_MIB: u64 = 512;
/// The number of copies of the memory that count; one more comes before them.
const COPIES: usize = 3;
/// The number of rounds. The place of a process's pages in the host's memory makes its forks slower or faster
/// for its whole life, so each guest is started several times.
const ROUNDS: usize = 3;
/// The number of branches of a sandbox in a round; fewer where each rewrites gigabytes, which takes seconds.
/// Multiples of six, so that the comparison is fair: every turn changes which one is measured first, and
/// every three turns the written pages go round between the guest, the process beside it and free memory.
const TURNS: usize = 12;
const LONG_TURNS: usize = 6;
/// Memory of the Linux guest, and the part that its program writes.
const LINUX_MIB: u64 = 512;
const LINUX_DIRTY: [u64; 2] = [0, 10];
const LINUX_TURNS: usize = 6;

/// Measures, prints, and returns the exit status.
pub(super) fn branch(context: &Context, args: &BenchBranchArgs) -> Result<u8> {
    let mut results = Results::new(&args.output);
    let conditions = Conditions::here();
    let guests = match &args.guest[..] {
        [] if args.quick => vec![Guest::Tiny],
        [] => vec![Guest::Tiny, Guest::Linux],
        given => given.to_vec(),
    };
    let elsewhere = match guests.contains(&Guest::Linux) {
        true => linux_elsewhere(context, args.socket.as_deref(), "python")?,
        false => None,
    };
    let here = guests.iter().copied().filter(|guest| elsewhere.is_none() || *guest != Guest::Linux);
    let here: Vec<Guest> = here.collect();
    if !here.is_empty() {
        let measured = measure(context, args, &here, &conditions, &mut results);
        if let MeasurementEnd::Caught(caught) = runtime()?.block_on(measured)? {
            return Ok(caught.status());
        }
    }
    if let Some(why) = elsewhere {
        let inside = ["branch", "--guest", "linux"].into_iter().chain(args.quick.then_some("--quick"));
        let inside: Vec<String> = inside.map(str::to_owned).collect();
        match emulated::measure(context, &inside, &why) {
            Ok((printed, complete)) => {
                // The command in the machine has reported missing results.
                results.status |= u8::from(!complete);
                for line in printed.lines().filter(|line| !line.trim().is_empty()) {
                    let record = Record::from_json(line);
                    let record = record.context("what `forkd bench` in the emulated machine printed")?;
                    // Judged below, with the other results.
                    if !matches!(record, Record::Verdict(_)) {
                        results.add(record)?;
                    }
                }
            }
            Err(error) => results.failed(context, "linux", &error),
        }
    }
    for verdict in branch::verdicts(&results.all) {
        results.add(Record::Verdict(verdict))?;
    }
    results.conclude()
}

impl BenchResult for Record {
    fn to_json(&self) -> String {
        Record::to_json(self)
    }

    fn summary(all: &[Record]) -> String {
        summary(all)
    }
}

/// The report as text: conditions, table and verdicts.
pub(super) fn summary(records: &[Record]) -> String {
    let conditions = report::conditions(records.iter().filter_map(Record::conditions));
    let rows = branch::rows(records).into_iter().map(|(subject, row)| {
        let pauses: Vec<String> = row.iter().map(|one| format!("{:.2}", one.pause_ms)).collect();
        let Subject { guest, memory, mem_mib, dirty_pct } = subject;
        format!(
            "- {} branches in a row, {guest}, {}, {mem_mib} MiB, {dirty_pct} % dirty, pauses in ms: {}",
            row.len(),
            memory.name(),
            pauses.join(" "),
        )
    });
    let errors = branch::lines(records).flat_map(|line| {
        let Subject { guest, memory, mem_mib, dirty_pct } = &line.subject;
        line.errors.iter().map(move |error| {
            format!("- {}, {guest}, {}, {mem_mib} MiB, {dirty_pct} %: {error}", line.case, memory.name())
        })
    });
    let parts = [
        conditions.into_iter().map(|text| format!("- {text}")).collect(),
        vec![branch::table(records)],
        rows.collect(),
        branch::verdicts(records).iter().map(|verdict| format!("- {verdict}")).collect(),
        errors.collect::<Vec<String>>(),
    ];
    let parts = parts.into_iter().map(|lines: Vec<String>| lines.join("\n"));
    parts.filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
}

async fn measure(
    context: &Context,
    args: &BenchBranchArgs,
    guests: &[Guest],
    conditions: &Conditions,
    results: &mut Results<'_, Record>,
) -> Result<MeasurementEnd> {
    let place = DaemonSource::Daemon(args.socket.as_deref());
    in_bench_folder(context, place, async |server, folder| {
        let server = server.context("there is no daemon to measure")?;
        BranchRun { context, args, conditions, folder }.all(guests, server, results).await
    })
    .await
}

/// The measurements on this host.
pub(super) struct BranchRun<'a> {
    pub(super) context: &'a Context,
    args: &'a BenchBranchArgs,
    pub(super) conditions: &'a Conditions,
    /// The folder for files.
    folder: &'a Path,
}

impl BranchRun<'_> {
    async fn all(
        &self,
        guests: &[Guest],
        server: &mut BenchDaemon,
        results: &mut Results<'_, Record>,
    ) -> Result<()> {
        if guests.contains(&Guest::Tiny) {
            for subject in self.subjects() {
                if let Err(error) = self.tiny(server, &subject, results).await {
                    results.failed(self.context, &describe(&subject), &error);
                }
            }
            for dirty_pct in self.dirty() {
                let subject = tiny(Kind::Layer, FIRST_CHILD_MIB, dirty_pct);
                if dirty_pct <= 10
                    && let Err(error) = self.first_child(server, &subject, results).await
                {
                    results.failed(self.context, "first_child", &error);
                }
            }
            if let Err(error) = chain::measure(self, server, results).await {
                results.failed(self.context, "chain_spawn, layer_bytes", &error);
            }
        }
        if guests.contains(&Guest::Linux)
            && let Err(error) = self.linux(server, results).await
        {
            results.failed(self.context, "linux", &error);
        }
        Ok(())
    }

    fn subjects(&self) -> Vec<Subject> {
        let sizes = match &self.args.mem_size_mib[..] {
            [] if self.args.quick => vec![512],
            [] => vec![512, 1536, 4096],
            given => given.to_vec(),
        };
        let mut subjects = Vec::new();
        for mem_mib in sizes {
            for kind in &self.args.memory {
                subjects.extend(self.dirty().into_iter().map(|dirty| tiny((*kind).into(), mem_mib, dirty)));
            }
        }
        subjects
    }

    fn dirty(&self) -> Vec<u64> {
        match &self.args.dirty[..] {
            [] if self.args.quick => vec![0, 10],
            [] => vec![0, 10, 100],
            given => given.to_vec(),
        }
    }

    /// The number of repetitions, if a full run has `full`.
    pub(super) fn turns(&self, full: usize) -> usize {
        if self.args.quick { full.div_ceil(5).next_multiple_of(2).min(4) } else { full }
    }

    /// A unique name for a snapshot.
    pub(super) fn tag(&self, name: &str) -> String {
        format!("bench-{name}-{}", std::process::id())
    }

    /// The request for a snapshot of this guest.
    pub(super) fn kernel(&self, writer: &Writer, name: &str) -> Result<Value> {
        let path = self.folder.join(name);
        fs::write(&path, writer.kernel()?).with_context(|| format!("cannot write {}", path.display()))?;
        Ok(json!({ "kernel": path, "network": false, "mem_size_mib": writer.mem_mib }))
    }

    /// Snapshots a writing guest: its running children are the subjects.
    async fn prepare(&self, server: &mut BenchDaemon, subject: &Subject, name: &str) -> Result<String> {
        let tag = self.tag(name);
        let Subject { memory, mem_mib, dirty_pct, .. } = *subject;
        let dirty = writer::distance(dirty_pct)?;
        match memory {
            Kind::Layer => {
                // Every page has content, so a later write copies a page of the layer.
                let writer = Writer { mem_mib, booted: PAGE, value: u64::MAX, dirty, each: 0 };
                server.snapshot(&tag, self.kernel(&writer, name)?).await?;
            }
            Kind::Huge => {
                // All memory is resident in huge pages of zeros: there is nothing to save.
                let writer = Writer { mem_mib, booted: HUGE_PAGE, value: 0, dirty, each: 0 };
                server.snapshot_in_memory(&tag, self.kernel(&writer, name)?).await?;
            }
        }
        Ok(tag)
    }

    /// Branches one sandbox, in turns with operations on the same memory without forkd.
    async fn tiny(
        &self,
        server: &mut BenchDaemon,
        subject: &Subject,
        results: &mut Results<'_, Record>,
    ) -> Result<()> {
        let progress = self.context.ui.progress(describe(subject));
        let name = format!("{}-{}-{}", subject.memory.name(), subject.mem_mib, subject.dirty_pct);
        let tag = self.prepare(server, subject, &name).await?;
        let full = if subject.mem_mib * subject.dirty_pct > 100_000 { LONG_TURNS } else { TURNS };
        let mut turns = self.turns_of(subject);
        for _ in 0..if self.args.quick { 1 } else { ROUNDS } {
            let (sandbox, _) = server.child(&tag, false).await?;
            turns.round(server, &sandbox, self.turns(full)).await?;
            server.delete(&[sandbox]).await?;
        }
        turns.lines(self.conditions).into_iter().try_for_each(|line| results.add(line))?;
        drop(turns);
        if (subject.mem_mib, subject.dirty_pct) == IN_ROW_SUBJECT {
            let (sandbox, _) = server.child(&tag, false).await?;
            self.in_row(server, subject, &sandbox.id, results).await?;
            server.delete(&[sandbox]).await?;
        }
        server.remove(&tag).await?;
        progress.done(&describe(subject));
        Ok(())
    }

    /// No turns yet.
    fn turns_of<'a>(&'a self, subject: &'a Subject) -> Turns<'a> {
        let slow_turns = if self.args.quick { 1 } else { COPIES };
        Turns::new(subject, self.folder, self.tag("branch"), slow_turns, self.args.firecracker.as_deref())
    }

    /// Takes branches one after the other. All are kept until the last, and saved meanwhile.
    async fn in_row(
        &self,
        server: &mut BenchDaemon,
        subject: &Subject,
        sandbox: &str,
        results: &mut Results<'_, Record>,
    ) -> Result<()> {
        let mut tags = Vec::new();
        for index in 0..if self.args.quick { IN_ROW / 2 } else { IN_ROW } {
            let tag = self.tag(&format!("row-{index}"));
            tokio::time::sleep(WRITES).await;
            let (branch, _) = server.branch(sandbox, &tag, &json!({ "mode": "live", "wait": false })).await?;
            tags.push(tag);
            results.add(Record::InRow(InRow {
                case: "forkd".into(),
                subject: subject.clone(),
                index,
                pause_ms: branch.pause_ms,
                conditions: self.conditions.clone(),
            }))?;
        }
        for tag in tags {
            server.remove(&tag).await?;
        }
        Ok(())
    }

    /// Measures from the branch call to the first instruction of its child, in turns with plain spawns.
    async fn first_child(
        &self,
        server: &mut BenchDaemon,
        subject: &Subject,
        results: &mut Results<'_, Record>,
    ) -> Result<()> {
        // Children of this snapshot report at once that they run: they write no pages first.
        let plain = self.prepare(server, &Subject { dirty_pct: 0, ..subject.clone() }, "plain").await?;
        let tag = self.prepare(server, subject, &format!("first-{}", subject.dirty_pct)).await?;
        let (sandbox, _) = server.child(&tag, false).await?;
        let (warmed, _) = server.child(&plain, false).await?;
        server.delete(&[warmed]).await?;
        let [mut firsts, mut spawns, mut pauses] = [(); 3].map(|()| Attempts::default());
        for turn in 0..self.turns(40) {
            tokio::time::sleep(WRITES).await;
            let (child, burst) = server.child(&plain, false).await?;
            spawns.add(Ok::<_, String>(burst.all_ms));
            server.delete(&[child]).await?;

            let branch = self.tag(&format!("first-branch-{turn}"));
            let order = json!({ "mode": "live", "wait": false });
            let (taken, took) = server.branch(&sandbox.id, &branch, &order).await?;
            let (child, burst) = server.child(&branch, false).await?;
            firsts.add(Ok::<_, String>(took + burst.all_ms));
            pauses.add(Ok::<_, String>(taken.pause_ms));
            server.delete(&[child]).await?;
            server.remove(&branch).await?;
        }
        for (case, attempts) in [("spawn", spawns), ("first_pause", pauses), ("first_child", firsts)] {
            results.add(Record::Line(Line::of(case, subject, &attempts, self.conditions)))?;
        }
        server.delete(&[sandbox]).await?;
        server.remove(&tag).await?;
        server.remove(&plain).await
    }

    /// Linux, with a program that keeps writing.
    async fn linux(&self, server: &mut BenchDaemon, results: &mut Results<'_, Record>) -> Result<()> {
        let progress = self.context.ui.progress("booting a Linux guest");
        let tag = self.tag("linux");
        let request = json!({ "image": "python", "network": false, "mem_size_mib": LINUX_MIB });
        server.snapshot(&tag, request).await?;
        progress.done("a Linux guest is ready");
        for dirty_pct in LINUX_DIRTY {
            let subject =
                Subject { guest: "linux".into(), memory: Kind::Layer, mem_mib: LINUX_MIB, dirty_pct };
            let progress = self.context.ui.progress(describe(&subject));
            let (sandbox, _) = server.child(&tag, false).await?;
            if dirty_pct > 0 {
                keep_writing(server, &sandbox.id, (LINUX_MIB << 20) / 100 * dirty_pct).await?;
            }
            let mut turns = self.turns_of(&subject);
            turns.round(server, &sandbox, self.turns(LINUX_TURNS)).await?;
            turns.lines(self.conditions).into_iter().try_for_each(|line| results.add(line))?;
            server.delete(&[sandbox]).await?;
            progress.done(&describe(&subject));
        }
        Ok(())
    }
}

/// Starts a program in the guest that keeps writing this much memory, and waits until it has written all of
/// it once.
async fn keep_writing(server: &BenchDaemon, id: &str, bytes: u64) -> Result<()> {
    let program = format!(
        "b = bytearray({bytes})\n\
         while True:\n  \
           for i in range(0, {bytes}, 4096): b[i] = b[i] + 1 & 255\n  \
           open('/tmp/written', 'w').close()\n"
    );
    let path = format!("/v1/sandboxes/{id}/exec");
    let start = "setsid python3 -c \"$1\" </dev/null >/dev/null 2>&1 &";
    let request = json!({ "args": ["sh", "-c", start, "sh", program], "timeout_secs": 60 });
    server.call(Verb::POST, &path, Some(&request)).await?;
    let wait = "while ! test -e /tmp/written; do sleep 0.2; done";
    let request = json!({ "args": ["sh", "-c", wait], "timeout_secs": 300 });
    let answer = server.call(Verb::POST, &path, Some(&request)).await?;
    if answer["exit_code"] != 0 {
        bail!("the program in the guest did not write all memory in time: {answer}");
    }
    Ok(())
}

fn tiny(memory: Kind, mem_mib: u64, dirty_pct: u64) -> Subject {
    Subject { guest: "tiny".into(), memory, mem_mib, dirty_pct }
}

fn describe(subject: &Subject) -> String {
    let Subject { guest, memory, mem_mib, dirty_pct } = subject;
    format!("branches of {guest}, {}, {mem_mib} MiB, {dirty_pct} % dirty", memory.name())
}

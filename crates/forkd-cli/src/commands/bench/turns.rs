//! Branches of a sandbox, in turns with operations on the same memory without forkd.

use std::fs;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use forkd_bench::bare::{Kind, Method};
use forkd_bench::branch::{Attempts, Line, Record, Subject};
use forkd_bench::firecracker::{SnapshotKind, Writing};
use forkd_bench::host::{self, Conditions};
use forkd_bench::writer;
use serde_json::json;

use super::companion::Companion;
use super::server::{BenchDaemon, Child};

/// The time in which the guest writes between two turns.
pub(super) const WRITES: Duration = Duration::from_millis(200);
/// The time in which the guest must write everything again, and the KiB that may be missing besides a
/// hundredth: private memory of its process that it need not write again.
const REWRITE_TIMEOUT: Duration = Duration::from_secs(120);
const REWRITE_SLACK_KIB: u64 = 4 << 10;

/// The results for one kind of guest.
pub(super) struct Turns<'a> {
    subject: &'a Subject,
    /// The folder for files.
    folder: &'a Path,
    /// The prefix of the tags of its branches.
    tag: String,
    /// The number of measurements of slow operations.
    slow_turns: usize,
    /// The firecracker program to measure as well.
    firecracker_program: Option<&'a Path>,
    turn: usize,
    pauses: Attempts,
    calls: Attempts,
    /// The time of each call minus its pause.
    beyond: Attempts,
    forks: Attempts,
    /// Each pause minus the bare fork of the same turn.
    over: Attempts,
    others: [(Method, Attempts); 3],
    firecracker: [(SnapshotKind, Attempts); 2],
}

impl<'a> Turns<'a> {
    /// None yet.
    pub(super) fn new(
        subject: &'a Subject,
        folder: &'a Path,
        tag: String,
        slow_turns: usize,
        firecracker_program: Option<&'a Path>,
    ) -> Turns<'a> {
        Turns {
            subject,
            folder,
            tag,
            slow_turns,
            firecracker_program,
            turn: 0,
            pauses: Attempts::default(),
            calls: Attempts::default(),
            beyond: Attempts::default(),
            forks: Attempts::default(),
            over: Attempts::default(),
            others: [Method::ForkPlain, Method::UffdWp, Method::Copy].map(|one| (one, Attempts::default())),
            firecracker: [SnapshotKind::Full, SnapshotKind::Diff].map(|one| (one, Attempts::default())),
        }
    }

    /// Takes turns with branches of `sandbox`. Each round has a new process beside it; slow operations are only in
    /// the first round.
    pub(super) async fn round(
        &mut self,
        server: &mut BenchDaemon,
        sandbox: &Child,
        turns: usize,
    ) -> Result<()> {
        // Other work on a core of the host slows everything on it for moments: so the compared operations run on
        // one core, right after each other.
        let cpu = host::last_cpu()?;
        sandbox.keep_on(cpu)?;
        let mut companion = Companion::start(self.subject, &self.layer(), cpu).await?;
        let firecracker = if self.turn == 0 { self.boot_firecracker()? } else { None };
        for _ in 0..turns {
            tokio::time::sleep(WRITES).await;
            let own = sandbox.private_kib();
            let tag = format!("{}-{}", self.tag, self.turn);
            if self.compare(server, sandbox, &mut companion, &tag).await? {
                if self.subject.guest == "tiny" {
                    rewritten(sandbox, own).await?;
                }
                server.remove(&tag).await?;
            }
            server.pause(sandbox).await?;
            companion.rewrite().await?;
            self.slow_ones(&mut companion, firecracker.as_ref()).await?;
            server.resume(sandbox).await?;
            self.turn += 1;
        }
        Ok(())
    }

    /// A branch and a bare fork, one right after the other; every second turn starts with the other one. Returns
    /// whether the branch succeeded.
    async fn compare(
        &mut self,
        server: &mut BenchDaemon,
        sandbox: &Child,
        companion: &mut Companion,
        tag: &str,
    ) -> Result<bool> {
        let (mut branched, mut pause, mut fork) = (false, None, None);
        for branches in [self.turn.is_multiple_of(2), !self.turn.is_multiple_of(2)] {
            if branches {
                match server.branch(&sandbox.id, tag, &json!({ "mode": "live", "wait": false })).await {
                    Ok((branch, took)) => {
                        self.pauses.add(Ok::<_, String>(branch.pause_ms));
                        self.calls.add(Ok::<_, String>(took));
                        self.beyond.add(Ok::<_, String>(took - branch.pause_ms));
                        (branched, pause) = (true, Some(branch.pause_ms));
                    }
                    Err(error) => self.pauses.add(Err(format!("{error:#}"))),
                }
            } else {
                // A branch is taken while its guest is paused, and so is this fork.
                server.pause(sandbox).await?;
                let took = companion.time(Method::Fork).await?;
                fork = took.as_ref().ok().copied();
                self.forks.add(took);
                server.resume(sandbox).await?;
            }
        }
        if let Some((pause, fork)) = pause.zip(fork) {
            self.over.add(Ok::<_, String>(pause - fork));
        }
        Ok(branched)
    }

    /// Operations that are too slow for every turn.
    async fn slow_ones(&mut self, companion: &mut Companion, firecracker: Option<&Writing>) -> Result<()> {
        if self.turn <= self.slow_turns {
            for (method, attempts) in &mut self.others {
                let took = companion.time(*method).await?;
                companion.rewrite().await?;
                // The first copy may take memory that the host never touched before.
                if self.turn > 0 {
                    attempts.add(took);
                }
            }
        }
        if let Some(firecracker) = firecracker.filter(|_| self.turn < self.slow_turns) {
            for (kind, attempts) in &mut self.firecracker {
                attempts.add(firecracker.snapshot(*kind));
            }
        }
        Ok(())
    }

    /// A guest like the subject in Firecracker, if a program is given. Firecracker boots its guests in small
    /// pages, so it is compared with memory from a layer.
    fn boot_firecracker(&self) -> Result<Option<Writing>> {
        let Subject { mem_mib, dirty_pct, .. } = *self.subject;
        let fits = self.subject.guest == "tiny" && self.subject.memory == Kind::Layer;
        let Some(program) = self.firecracker_program.filter(|_| fits) else { return Ok(None) };
        let folder = self.folder.join(format!("firecracker-{mem_mib}-{dirty_pct}"));
        fs::create_dir(&folder).with_context(|| format!("cannot make {}", folder.display()))?;
        Ok(Some(Writing::boot(program, &folder, mem_mib, writer::distance(dirty_pct)?)?))
    }

    /// The file from which the process beside the sandbox maps memory of a layer.
    fn layer(&self) -> PathBuf {
        self.folder.join("companion")
    }

    /// One line for each case with an attempt.
    pub(super) fn lines(&self, conditions: &Conditions) -> Vec<Record> {
        let cases = [("forkd", &self.pauses), ("live_call", &self.calls), ("live_beyond", &self.beyond)];
        let cases = cases.into_iter().chain([(Method::Fork.name(), &self.forks), ("over_fork", &self.over)]);
        let cases = cases.chain(self.others.iter().map(|(method, all)| (method.name(), all)));
        let cases = cases.chain(self.firecracker.iter().map(|(kind, all)| (kind.name(), all)));
        cases
            .filter(|(_, attempts)| !attempts.is_empty())
            .map(|(case, attempts)| Record::Line(Line::of(case, self.subject, attempts, conditions)))
            .collect()
    }
}

/// Removes the file: the next subject may need gigabytes of disk as well.
impl Drop for Turns<'_> {
    fn drop(&mut self) {
        let _ = fs::remove_file(self.layer());
    }
}

/// Waits until a guest has written its private memory at the branch, `own`, again: the process beside it also
/// rewrites its memory before its next fork.
async fn rewritten(sandbox: &Child, own: Option<u64>) -> Result<()> {
    let begun = Instant::now();
    while let (Some(own), Some(now)) = (own, sandbox.private_kib())
        && now + own / 100 + REWRITE_SLACK_KIB < own
    {
        if begun.elapsed() > REWRITE_TIMEOUT {
            bail!("the guest did not write its memory again within {} s", REWRITE_TIMEOUT.as_secs());
        }
        tokio::time::sleep(WRITES).await;
    }
    Ok(())
}

//! The process beside the sandbox: has the same memory without forkd, and is measured in turns with it.

use std::fs::File;
use std::io::{self, Write};
use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use forkd_bench::bare::{Answer, Kind, Method, Request};
use forkd_bench::branch::Subject;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::host::paths::Binaries;

/// The process beside the sandbox. Ends on drop.
pub(super) struct Companion {
    questions: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl Companion {
    /// Starts a process with memory like the subject's, on `cpu`, and waits until it is ready. Memory from a layer
    /// is mapped from `file`, which is written if it is missing.
    pub(super) async fn start(subject: &Subject, file: &Path, cpu: usize) -> Result<Companion> {
        write_layer(subject, file).with_context(|| format!("cannot write {}", file.display()))?;
        let mut command = tokio::process::Command::new(Binaries::find()?.forkd);
        command.args(["bench", "bare", "--memory", Kind::name(subject.memory), "--file"]).arg(file);
        command.args(["--mem-size-mib", &subject.mem_mib.to_string()]);
        command.args(["--dirty", &subject.dirty_pct.to_string(), "--cpu", &cpu.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().context("cannot start a process beside the sandbox")?;
        let questions = process.stdin.take().context("a process without input")?;
        let answers = BufReader::new(process.stdout.take().context("a process without output")?).lines();
        let mut companion = Companion { questions, answers, _process: process };
        companion.ready().await?;
        Ok(companion)
    }

    /// The milliseconds that `method` takes, or the reason why it is impossible.
    pub(super) async fn time(&mut self, method: Method) -> Result<Result<f64, String>> {
        self.ask(Request::Do(method)).await?;
        match self.answer().await? {
            Answer::Ms(ms) => Ok(Ok(ms)),
            Answer::Impossible(why) => Ok(Err(why)),
            Answer::Ready => bail!("the process beside the sandbox sent `Ready` instead of a time"),
        }
    }

    /// Makes it write its pages again, and waits until it has.
    pub(super) async fn rewrite(&mut self) -> Result<()> {
        self.ask(Request::Rewrite).await?;
        self.ready().await
    }

    async fn ask(&mut self, request: Request) -> Result<()> {
        let question = serde_json::to_string(&request)? + "\n";
        self.questions.write_all(question.as_bytes()).await.context("cannot ask it")
    }

    async fn ready(&mut self) -> Result<()> {
        match self.answer().await? {
            Answer::Ready => Ok(()),
            other => bail!("the process beside the sandbox sent {other:?} instead of `Ready`"),
        }
    }

    async fn answer(&mut self) -> Result<Answer> {
        let line = self.answers.next_line().await?.context("the process beside the sandbox has ended")?;
        serde_json::from_str(&line).context("the process beside the sandbox printed something else")
    }
}

/// Writes a file of the length of the subject's memory, with content in every page, unless it exists. Syncs
/// it, so that its writeback does not disturb the next measurement.
fn write_layer(subject: &Subject, file: &Path) -> io::Result<()> {
    let mib = if subject.memory == Kind::Layer { subject.mem_mib } else { 0 };
    if file.metadata().is_ok_and(|found| found.len() == mib << 20) {
        return Ok(());
    }
    let mut file = File::create(file)?;
    let something = vec![0xff; 1 << 20];
    (0..mib).try_for_each(|_| file.write_all(&something))?;
    file.sync_all()
}

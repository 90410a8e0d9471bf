//! The process beside the sandbox: holds the same memory without a VM, and takes turns with it.

use std::path::Path;
use std::process::Stdio;

use anyhow::{Context as _, Result, bail};
use forkd_bench::bare::{Answer, Kind, Method};
use forkd_bench::branch::Subject;
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, Lines};
use tokio::process::{Child, ChildStdin, ChildStdout};

use crate::paths::Binaries;

/// Ends when it is dropped.
pub(super) struct Companion {
    questions: ChildStdin,
    answers: Lines<BufReader<ChildStdout>>,
    _process: Child,
}

impl Companion {
    /// Starts one whose memory is like the subject's, and waits until it is. `file` is for memory from a
    /// file, and is made as long as that.
    pub(super) async fn start(subject: &Subject, file: &Path) -> Result<Companion> {
        let failed = || format!("cannot write {}", file.display());
        let made = std::fs::File::create(file).and_then(|made| made.set_len(subject.mem_mib << 20));
        made.with_context(failed)?;
        let mut command = tokio::process::Command::new(Binaries::find()?.forkd);
        command.args(["bench", "bare", "--memory", Kind::name(subject.memory), "--file"]).arg(file);
        command.args(["--mem-size-mib", &subject.mem_mib.to_string()]);
        command.args(["--dirty", &subject.dirty_pct.to_string()]);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).kill_on_drop(true);
        let mut process = command.spawn().context("cannot start a process beside the sandbox")?;
        let questions = process.stdin.take().context("a process without input")?;
        let answers = BufReader::new(process.stdout.take().context("a process without output")?).lines();
        let mut companion = Companion { questions, answers, _process: process };
        match companion.answer().await? {
            Answer::Ready => Ok(companion),
            other => bail!("the process beside the sandbox said {other:?} before it was asked"),
        }
    }

    /// How long it takes, in milliseconds; or why it cannot be done.
    pub(super) async fn time(&mut self, method: Method) -> Result<Result<f64, String>> {
        let question = serde_json::to_string(&method)? + "\n";
        self.questions.write_all(question.as_bytes()).await.context("cannot ask it")?;
        match self.answer().await? {
            Answer::Ms(ms) => Ok(Ok(ms)),
            Answer::Impossible(why) => Ok(Err(why)),
            Answer::Ready => bail!("the process beside the sandbox did not answer what it was asked"),
        }
    }

    async fn answer(&mut self) -> Result<Answer> {
        let line = self.answers.next_line().await?.context("the process beside the sandbox has ended")?;
        serde_json::from_str(&line).context("the process beside the sandbox printed something else")
    }
}

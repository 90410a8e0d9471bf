//! The measured daemon: one that the benchmark starts and ends, or a running one.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::process::Stdio;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use forkd_bench::burst::Burst;
use forkd_bench::host::{self, MEMORY_SAMPLE, Memory};
use futures_util::StreamExt;
use hyper::Method;
use rustix::process::{Pid, Signal};
use serde_json::{Value, json};

use crate::cleanup;
use crate::client::{Address, Daemon};
use crate::commands::Context;
use crate::host::paths::{self, Binaries};
use crate::host::process;
use crate::stream::signals::{Caught, ExitAction, Forwarded};
use crate::ui::Ui;

/// The time in which the daemon must start or stop, and processes must end.
const DAEMON_TIMEOUT: Duration = Duration::from_secs(60);
/// The number of children that are deleted at a time.
const DELETES: usize = 16;

/// A daemon, and the snapshots that the benchmark created in it.
pub(super) struct BenchDaemon {
    daemon: Daemon,
    /// The process, if the benchmark started it.
    child: Option<tokio::process::Child>,
    /// Snapshots to remove at the end.
    tags: Vec<String>,
    ui: Ui,
}

/// A child that answered.
pub(super) struct Child {
    pub(super) id: String,
    pid: Option<i64>,
}

/// A taken branch.
pub(super) struct Branch {
    /// The pause of the sandbox's vCPUs.
    pub(super) pause_ms: f64,
    /// The size of its layer on disk, if it is there yet.
    pub(super) bytes: Option<u64>,
}

impl Child {
    pub(super) fn parse(info: &Value) -> Option<Child> {
        let id = info.get("id")?.as_str()?.to_owned();
        Some(Child { id, pid: info.get("pid").and_then(Value::as_i64) })
    }

    fn pid(&self) -> Option<i32> {
        i32::try_from(self.pid?).ok()
    }

    /// Pins its guest to one CPU.
    pub(super) fn keep_on(&self, cpu: usize) -> Result<()> {
        let threads = self.pid().map(host::vcpu_threads).unwrap_or_default();
        threads.into_iter().try_for_each(|thread| Ok(host::keep_on(cpu, Some(thread))?))
    }

    /// The private memory of its process.
    pub(super) fn private_kib(&self) -> Option<u64> {
        let pid = self.pid()?;
        host::memory_of([pid].into_iter()).first().map(|memory| memory.private_kib)
    }
}

impl BenchDaemon {
    fn existing(socket: PathBuf, ui: Ui) -> BenchDaemon {
        BenchDaemon { daemon: Daemon::unix(socket), child: None, tags: Vec::new(), ui }
    }

    /// The daemon behind `socket`, or a new one with all its files in `folder`.
    async fn open(context: &Context, socket: Option<&Path>, folder: &Path) -> Result<BenchDaemon> {
        match socket {
            Some(socket) => Ok(BenchDaemon::existing(socket.to_owned(), context.ui)),
            None if !paths::is_root() => bail!("the measured daemon needs root: use `sudo`"),
            None => BenchDaemon::start(context, folder).await,
        }
    }

    async fn start(context: &Context, folder: &Path) -> Result<BenchDaemon> {
        let (socket, log) = (folder.join("forkd.sock"), folder.join("daemon.log"));
        let output = File::create(&log).with_context(|| format!("cannot write {}", log.display()))?;
        let mut command = std::process::Command::new(Binaries::find()?.forkd);
        // The host's configuration file must not change the measurement.
        command.args(["--config", "/dev/null"]);
        command.arg("--data-dir").arg(folder).arg("serve").arg("--library").arg(context.data.root());
        command.arg("--socket").arg(&socket).args(["--bind", "127.0.0.1:0"]);
        command.arg("--token-file").arg(folder.join("token"));
        command.stdin(Stdio::null()).stdout(output.try_clone()?).stderr(output);
        process::die_with_parent(&mut command);
        // ^C goes to this process only, which ends the daemon after its children.
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        // A signal may come before it has sockets by which it could be found.
        let mut command = tokio::process::Command::from(command);
        let mut child = command.kill_on_drop(true).spawn().context("cannot start the daemon")?;
        let daemon = Daemon::unix(socket);
        let begin = Instant::now();
        while !daemon.is_healthy(Duration::from_secs(5)).await {
            let tail = || crate::machine::log_tail(&log, 2000);
            if let Some(status) = child.try_wait()? {
                bail!("the daemon ended during its start, {status}:\n{}", tail());
            }
            if begin.elapsed() > DAEMON_TIMEOUT {
                bail!("the daemon does not answer after {} s:\n{}", DAEMON_TIMEOUT.as_secs(), tail());
            }
            tokio::time::sleep(Duration::from_millis(20)).await;
        }
        Ok(BenchDaemon { daemon, child: Some(child), tags: Vec::new(), ui: context.ui })
    }

    /// The unix socket of the daemon.
    pub(super) fn socket(&self) -> Result<&Path> {
        match &self.daemon.address {
            Address::Unix(path) => Ok(path),
            _ => bail!("the measured daemon has no unix socket"),
        }
    }

    /// Sends a request that has to succeed.
    pub(super) async fn call(&self, method: Method, path: &str, body: Option<&Value>) -> Result<Value> {
        let what = format!("{method} {path}");
        let (status, answer) = self.daemon.call(method, path, body).await?;
        if !status.is_success() {
            bail!("{what}: {}", reason(status, &answer));
        }
        Ok(answer)
    }

    /// Creates a snapshot whose children come from a template loaded from disk.
    pub(super) async fn snapshot(&mut self, tag: &str, request: Value) -> Result<()> {
        self.snapshot_in_memory(tag, request).await?;
        self.unload(tag).await
    }

    /// Creates a snapshot. Until it is unloaded, children come from the guest that was warmed.
    pub(super) async fn snapshot_in_memory(&mut self, tag: &str, mut request: Value) -> Result<()> {
        request["tag"] = tag.into();
        self.tags.push(tag.to_owned());
        self.call(Method::POST, "/v1/snapshots", Some(&request)).await.map(drop)
    }

    /// Unloads a snapshot, so that the next children come from a template loaded from disk.
    pub(super) async fn unload(&self, tag: &str) -> Result<()> {
        self.call(Method::POST, &format!("/v1/snapshots/{tag}/unload"), None).await.map(drop)
    }

    pub(super) async fn pause(&self, sandbox: &Child) -> Result<()> {
        self.call(Method::POST, &format!("/v1/sandboxes/{}/pause", sandbox.id), None).await.map(drop)
    }

    pub(super) async fn resume(&self, sandbox: &Child) -> Result<()> {
        self.call(Method::POST, &format!("/v1/sandboxes/{}/resume", sandbox.id), None).await.map(drop)
    }

    /// Branches a sandbox; returns the daemon's reply and the milliseconds of the call.
    pub(super) async fn branch(&mut self, id: &str, tag: &str, how: &Value) -> Result<(Branch, f64)> {
        let mut request = how.clone();
        request["tag"] = tag.into();
        self.tags.push(tag.to_owned());
        let begin = Instant::now();
        let answer = self.call(Method::POST, &format!("/v1/sandboxes/{id}/branch"), Some(&request)).await?;
        let took = begin.elapsed().as_secs_f64() * 1e3;
        let pause_ms = answer.get("pause_ms").and_then(Value::as_f64);
        let pause_ms = pause_ms.context("the daemon's reply has no pause of the sandbox")?;
        Ok((Branch { pause_ms, bytes: answer.get("diff_physical_bytes").and_then(Value::as_u64) }, took))
    }

    /// Removes a snapshot and waits until its template has ended, so that the next measurement does not pay for
    /// it.
    pub(super) async fn remove(&mut self, tag: &str) -> Result<()> {
        let path = format!("/v1/snapshots/{tag}");
        let info = self.call(Method::GET, &path, None).await?;
        let template = info.pointer("/template/pid").and_then(Value::as_i64);
        self.call(Method::DELETE, &path, None).await?;
        self.tags.retain(|other| other != tag);
        gone(template, tag).await?;
        tokio::time::sleep(Duration::from_millis(50)).await;
        Ok(())
    }

    /// Forks `n` children; returns the time and memory, and the children that run.
    pub(super) async fn fan_out(&self, tag: &str, n: usize, network: bool) -> Result<(Burst, Vec<Child>)> {
        let (mut burst, children) = self.children(tag, n, network).await?;
        for child in children.iter().take(MEMORY_SAMPLE) {
            burst.memory.extend(self.memory(&child.id).await);
        }
        Ok((burst, children))
    }

    /// Forks one child that has to run; returns it, and the time and memory.
    pub(super) async fn child(&self, tag: &str, network: bool) -> Result<(Child, Burst)> {
        let (burst, children) = self.children(tag, 1, network).await?;
        match children.into_iter().next() {
            Some(child) => Ok((child, burst)),
            None => {
                let why = burst.errors.first().map_or("for a reason not given", String::as_str);
                bail!("a child of {tag} did not run: {why}")
            }
        }
    }

    async fn children(&self, tag: &str, n: usize, network: bool) -> Result<(Burst, Vec<Child>)> {
        let body = json!({ "snapshot_tag": tag, "n": n, "network": network });
        let available = host::available_kib();
        let begin = Instant::now();
        let (status, answer) =
            self.daemon.call(Method::POST, "/v1/sandboxes?results=each", Some(&body)).await?;
        let all_ms = begin.elapsed().as_secs_f64() * 1e3;
        let mut burst = Burst { asked: n, all_ms, ..Burst::default() };
        if !status.is_success() {
            burst.errors.push(reason(status, &answer));
            return Ok((burst, Vec::new()));
        }
        let list = |name: &str| answer.get(name).and_then(Value::as_array).cloned().unwrap_or_default();
        let mut children = Vec::new();
        for child in list("children") {
            burst.times_ms.extend(child.get("ready_ms").and_then(Value::as_f64));
            children.push(Child::parse(&child).context("the daemon's reply has a child without an id")?);
        }
        if burst.times_ms.len() < children.len() {
            burst.errors.push("the daemon's reply has no time for some children".into());
        }
        for failed in list("errors") {
            let why = failed.get("error").and_then(Value::as_str).unwrap_or("for a reason not given");
            burst.errors.push(why.to_owned());
        }
        burst.host_kib = host::difference_per_child(available, host::available_kib(), children.len());
        Ok((burst, children))
    }

    async fn memory(&self, id: &str) -> Option<Memory> {
        let stats = self.call(Method::GET, &format!("/v1/sandboxes/{id}/stats"), None).await.ok()?;
        let kib = |name: &str| stats.get(name).and_then(Value::as_u64);
        Some(Memory { private_kib: kib("private_kib")?, pss_kib: kib("pss_kib")? })
    }

    /// Deletes children and waits until their processes have ended, so that the next measurement does not pay for
    /// it.
    pub(super) async fn delete(&self, children: &[Child]) -> Result<()> {
        let calls = children.iter().map(|child| {
            let path = format!("/v1/sandboxes/{}", child.id);
            async move { self.call(Method::DELETE, &path, None).await.map(drop) }
        });
        let calls: Vec<Result<()>> =
            futures_util::stream::iter(calls).buffer_unordered(DELETES).collect().await;
        calls.into_iter().collect::<Result<()>>()?;
        for child in children {
            gone(child.pid, &child.id).await?;
        }
        // The kernel does deferred work, such as freeing VMs, after the end of the process.
        tokio::time::sleep(Duration::from_millis(50 + children.len() as u64 / 2)).await;
        Ok(())
    }

    /// Removes the snapshots, and ends the daemon if the benchmark started it.
    pub(super) async fn stop(mut self) {
        if let Err(error) = self.delete_all_children().await {
            self.ui.warn(format!("children of the measurement may be left: {error:#}"));
        }
        // Later snapshots are built on earlier ones.
        for tag in self.tags.iter().rev() {
            let path = format!("/v1/snapshots/{tag}");
            // Without a template there is nothing to unload.
            let _ = self.call(Method::POST, &format!("{path}/unload"), None).await;
            match self.daemon.call(Method::DELETE, &path, None).await {
                // It was never created.
                Ok((status, _)) if status.is_success() || status == hyper::StatusCode::NOT_FOUND => {}
                Ok((status, answer)) => {
                    self.ui.warn(format!("snapshot {tag} may be left: {}", reason(status, &answer)))
                }
                Err(error) => self.ui.warn(format!("snapshot {tag} may be left: {error:#}")),
            }
        }
        if let Some(mut child) = self.child.take() {
            let pid = child.id().and_then(|pid| Pid::from_raw(pid as i32));
            pid.map(|pid| rustix::process::kill_process(pid, Signal::TERM));
            if tokio::time::timeout(DAEMON_TIMEOUT, child.wait()).await.is_err() {
                self.ui.warn("the daemon did not end after SIGTERM, so it is killed");
                let _ = child.kill().await;
            }
        }
    }

    /// Deletes all children of the benchmark's snapshots, also those of a cancelled request that the daemon still
    /// works on.
    async fn delete_all_children(&self) -> Result<()> {
        if self.tags.is_empty() {
            return Ok(());
        }
        let ours = |child: &Value| {
            let tag = child.get("snapshot_tag").and_then(Value::as_str)?;
            self.tags.iter().any(|ours| ours == tag).then(|| Child::parse(child)).flatten()
        };
        for _ in 0..5 {
            let all = self.call(Method::GET, "/v1/sandboxes", None).await?;
            let left: Vec<Child> = all.as_array().into_iter().flatten().filter_map(ours).collect();
            if left.is_empty() {
                return Ok(());
            }
            self.delete(&left).await?;
        }
        bail!("the daemon still lists children that were deleted")
    }
}

/// Waits until a process that was asked to end has ended.
async fn gone(pid: Option<i64>, name: &str) -> Result<()> {
    let begin = Instant::now();
    while pid.is_some_and(|pid| Path::new(&format!("/proc/{pid}")).exists()) {
        if begin.elapsed() > DAEMON_TIMEOUT {
            bail!("{name} was deleted, but its process still runs after {} s", DAEMON_TIMEOUT.as_secs());
        }
        tokio::time::sleep(Duration::from_millis(10)).await;
    }
    Ok(())
}

/// How a measurement ended.
pub(super) enum MeasurementEnd {
    /// It is complete.
    Done,
    /// A signal interrupted it.
    Caught(Caught),
}

/// Measures with a daemon, in a new folder, until `work` is done or a signal comes. `work` gets the daemon and
/// the folder. Everything created is removed afterwards; `forkd cleanup` finds leftovers.
pub(super) async fn in_bench_folder(
    context: &Context,
    place: DaemonSource<'_>,
    work: impl AsyncFnOnce(Option<&mut BenchDaemon>, &Path) -> Result<()>,
) -> Result<MeasurementEnd> {
    // Before anything is created that has to be removed.
    let mut signals = Forwarded::listen()?;
    let workplace = BenchFolder::make(context)?;
    let mut server = match place {
        DaemonSource::Nothing => None,
        DaemonSource::Daemon(socket) => {
            tokio::select! {
                opened = BenchDaemon::open(context, socket, workplace.path()) => Some(opened?),
                caught = signals.next() => return Ok(MeasurementEnd::Caught(caught)),
            }
        }
    };
    let (outcome, caught) = tokio::select! {
        outcome = work(server.as_mut(), workplace.path()) => (outcome, None),
        caught = signals.next() => (Ok(()), Some(caught)),
    };
    match (server, caught) {
        // The removal of the folder ends it and its sandboxes: there is no time for a clean stop.
        (Some(server), Some(_)) if server.child.is_some() => drop(server),
        (Some(server), _) => server.stop().await,
        (None, _) => {}
    }
    match caught {
        Some(caught) => Ok(MeasurementEnd::Caught(caught)),
        None => outcome.map(|()| MeasurementEnd::Done),
    }
}

/// The daemon that a measurement needs.
pub(super) enum DaemonSource<'a> {
    /// No daemon.
    Nothing,
    /// The daemon behind this socket, or a new one.
    Daemon(Option<&'a Path>),
}

/// The daemon's reason for a refusal.
fn reason(status: hyper::StatusCode, answer: &Value) -> String {
    match answer.get("error").and_then(Value::as_str) {
        Some(text) => text.to_owned(),
        None => format!("status {status}"),
    }
}

/// A folder for one run. On drop it is removed, with the daemon started in it and its sandboxes.
struct BenchFolder {
    path: PathBuf,
    _at_end: ExitAction,
}

impl BenchFolder {
    fn make(context: &Context) -> Result<BenchFolder> {
        context.data.create()?;
        let path = cleanup::bench_folder(context.data.root());
        fs::create_dir(&path).with_context(|| format!("cannot make {}", path.display()))?;
        let place = path.clone();
        let at_end = ExitAction::new(move || cleanup::remove_bench(&place))?;
        let made = BenchFolder { path, _at_end: at_end };
        cleanup::claim_bench(&made.path)?;
        Ok(made)
    }

    fn path(&self) -> &Path {
        &self.path
    }
}

impl Drop for BenchFolder {
    fn drop(&mut self) {
        cleanup::remove_bench(&self.path);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Write};
    use std::os::unix::net::UnixListener;
    use std::sync::mpsc;

    /// A daemon that gives these replies, one after the other, and sends the requests back.
    fn stub(folder: &Path, answers: Vec<(u16, Value)>) -> (BenchDaemon, mpsc::Receiver<String>) {
        let socket = folder.join("stub.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let (told, asked) = mpsc::channel();
        std::thread::spawn(move || {
            for (status, body) in answers {
                let mut stream = listener.accept().unwrap().0;
                let mut request = [0; 4096];
                let count = stream.read(&mut request).unwrap();
                let request = String::from_utf8_lossy(&request[..count]).into_owned();
                told.send(request.lines().next().unwrap_or_default().to_owned()).unwrap();
                let body = body.to_string();
                let head = format!("HTTP/1.1 {status} x\r\ncontent-length: {}\r\n\r\n", body.len());
                stream.write_all((head + &body).as_bytes()).unwrap();
            }
        });
        (BenchDaemon::existing(socket, Ui::new(true)), asked)
    }

    #[tokio::test]
    async fn a_child_that_failed_is_counted_and_its_reason_kept() {
        let folder = tempfile::tempdir().unwrap();
        let answer = json!({
            "children": [{ "id": "sba", "pid": 1, "ready_ms": 1.5 }, { "id": "sbb", "ready_ms": 2.5 }],
            "errors": [{ "index": 2, "error": "no memory left" }],
        });
        let stats = json!({ "private_kib": 300, "pss_kib": 400, "rss_kib": 500 });
        let answers = vec![(201, answer), (200, stats), (404, json!({ "error": "gone" }))];
        let (server, asked) = stub(folder.path(), answers);
        let (burst, children) = server.fan_out("t", 3, false).await.unwrap();
        assert_eq!((burst.asked, burst.times_ms.as_slice()), (3, &[1.5, 2.5][..]));
        assert_eq!(burst.errors, ["no memory left"]);
        assert_eq!(burst.memory, [Memory { private_kib: 300, pss_kib: 400 }]);
        assert_eq!(children.iter().map(|child| child.id.as_str()).collect::<Vec<_>>(), ["sba", "sbb"]);
        assert_eq!(asked.recv().unwrap(), "POST /v1/sandboxes?results=each HTTP/1.1");
        assert_eq!(asked.recv().unwrap(), "GET /v1/sandboxes/sba/stats HTTP/1.1");
    }

    #[tokio::test]
    async fn a_call_the_daemon_refuses_is_a_burst_in_which_nobody_answered() {
        let folder = tempfile::tempdir().unwrap();
        let (server, _asked) = stub(folder.path(), vec![(503, json!({ "error": "too many sandboxes" }))]);
        let (burst, children) = server.fan_out("t", 1000, false).await.unwrap();
        assert!(burst.times_ms.is_empty() && children.is_empty());
        assert_eq!(burst.errors, ["too many sandboxes"]);
    }

    #[tokio::test]
    async fn a_branch_tells_its_pause_and_goes_away_when_removed() {
        let folder = tempfile::tempdir().unwrap();
        let answers = vec![
            (202, json!({ "tag": "b", "pause_ms": 1.5 })),
            (200, json!({ "tag": "b", "status": "writing" })),
            (204, Value::Null),
        ];
        let (mut server, asked) = stub(folder.path(), answers);
        let how = json!({ "mode": "live", "wait": false });
        let (branch, took) = server.branch("sba", "b", &how).await.unwrap();
        assert!(took > 0.0);
        assert_eq!((branch.pause_ms, branch.bytes), (1.5, None));
        server.remove("b").await.unwrap();
        server.stop().await;
        let asked: Vec<String> = asked.iter().collect();
        assert_eq!(
            asked.iter().map(|line| line.trim_end_matches(" HTTP/1.1")).collect::<Vec<_>>(),
            ["POST /v1/sandboxes/sba/branch", "GET /v1/snapshots/b", "DELETE /v1/snapshots/b"],
            "what was removed is not removed again"
        );
    }

    #[tokio::test]
    async fn a_branch_that_does_not_tell_its_pause_is_no_result() {
        let folder = tempfile::tempdir().unwrap();
        let (mut server, _asked) = stub(folder.path(), vec![(201, json!({ "tag": "b" }))]);
        assert!(server.branch("sba", "b", &json!({})).await.is_err());
    }

    #[tokio::test]
    async fn only_what_was_made_here_is_removed_at_the_end() {
        let folder = tempfile::tempdir().unwrap();
        let all = json!([{ "id": "sba", "snapshot_tag": "ours" }, { "id": "sbb", "snapshot_tag": "theirs" }, { "id": "sbc" }]);
        let rest = json!([{ "id": "sbb", "snapshot_tag": "theirs" }]);
        let done = || (204, Value::Null);
        let answers = vec![(201, json!({})), done(), (200, all), done(), (200, rest), done(), done()];
        let (mut server, asked) = stub(folder.path(), answers);
        server.snapshot("ours", json!({ "image": "x" })).await.unwrap();
        server.stop().await;
        let asked: Vec<String> = asked.iter().collect();
        assert_eq!(
            asked.iter().map(|line| line.trim_end_matches(" HTTP/1.1")).collect::<Vec<_>>(),
            [
                "POST /v1/snapshots",
                "POST /v1/snapshots/ours/unload",
                "GET /v1/sandboxes",
                "DELETE /v1/sandboxes/sba",
                "GET /v1/sandboxes",
                "POST /v1/snapshots/ours/unload",
                "DELETE /v1/snapshots/ours",
            ]
        );
    }
}

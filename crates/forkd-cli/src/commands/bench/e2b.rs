//! `forkd bench e2b`: the operations of E2B's clients, each in turns with the same operation another way.
//!
//! Create and fork are compared with the daemon's own API. A command, a file and code are compared with the same
//! request to the guest's agent, over the sandbox's own socket: the difference is the daemon and its forwarding.

use std::path::{Path, PathBuf};
use std::time::Instant;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use clap::Args;
use forkd_bench::e2b::{self, Beside, Line, Record, Turns};
use forkd_bench::host::Conditions;
use forkd_bench::report;
use forkd_protocol::agent::DEFAULT_USER_HEADER;
use forkd_protocol::connect;
use http_body_util::Full;
use hyper::{Method, Request};
use serde_json::{Value, json};

use super::results::{BenchResult, OutputArgs, Results};
use super::server::{BenchDaemon, Child, DaemonSource, MeasurementEnd, in_bench_folder};
use super::wire::Peer;
use super::{emulated, linux_elsewhere, parse_count};
use crate::commands::{Context, runtime};

/// The port of E2B's agent, and that of its code interpreter.
const ENVD_PORT: u16 = 49983;
const CODE_PORT: u16 = 49999;
/// If this process is killed, the daemon ends its sandboxes after this many seconds.
const LIFE_SECS: u64 = 900;
/// Memory of the guest: the code interpreter's needs it.
const MEM_MIB: u64 = 1024;
/// The written and read file.
const FILE_BYTES: usize = 1 << 20;
const FILE: &str = "/files?path=/home/user/bench.bin";
const BOUNDARY: &str = "forkd-bench-boundary";
/// Turns of operations that make sandboxes, and of all others.
const FEW_TURNS: usize = 5;
const TURNS: usize = 30;

/// Measure the E2B API: create, first command, command, file, code, fork.
///
/// Create and fork are measured in turns with the daemon's own API. Commands, files and code are measured in turns
/// with the same request to the guest's agent, over the sandbox's own socket; the goal is at most 1.5 times. No
/// client library is measured. Starts its own daemon and boots the image. Where KVM cannot run Linux, all of it runs
/// in the emulated machine; only ratios are meaningful there.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  sudo forkd bench e2b
  forkd bench e2b --tag code-interpreter-v1 --out results.jsonl
  sudo forkd bench e2b --image base --quick --json

Exit status: 0 all operations measured, whether or not they meet the goal; 1 otherwise.")]
pub(crate) struct BenchE2bArgs {
    /// Image to boot. Without a code interpreter in it, code is not measured.
    #[arg(long, default_value = "code-interpreter-v1", value_name = "NAME")]
    image: String,

    /// Fork this snapshot instead of booting an image: of the emulated machine's daemon, or of the one behind --socket.
    #[arg(long, conflicts_with = "image", value_name = "TAG")]
    tag: Option<String>,

    /// Number of children of one fork.
    #[arg(short = 'n', long = "n", default_value_t = 10, value_parser = parse_count, value_name = "N")]
    children: usize,

    /// Fewer repetitions.
    #[arg(long)]
    quick: bool,

    /// Measure the daemon behind this unix socket instead of starting one. Its data directory must be the one in use
    /// here (--data-dir).
    #[arg(long, value_name = "PATH")]
    socket: Option<PathBuf>,

    #[command(flatten)]
    output: OutputArgs,
}

/// Measures, prints, and returns the exit status.
pub(super) fn e2b(context: &Context, args: &BenchE2bArgs) -> Result<u8> {
    let mut results = Results::new(&args.output);
    let image = if args.tag.is_some() { "python" } else { &args.image };
    match linux_elsewhere(context, args.socket.as_deref(), image)? {
        Some(why) => {
            let (printed, complete) = emulated::measure(context, &inside(args), &why)?;
            // The command in the machine has reported missing results.
            results.status |= u8::from(!complete);
            for line in printed.lines().filter(|line| !line.trim().is_empty()) {
                let record = Record::from_json(line);
                results.add(record.context("what `forkd bench` in the emulated machine printed")?)?;
            }
        }
        None => {
            if args.tag.is_some() && args.socket.is_none() {
                bail!("a daemon that the benchmark starts has no snapshots: name yours with --socket PATH");
            }
            let run = E2bRun { context, args, conditions: Conditions::here() };
            if let MeasurementEnd::Caught(caught) = runtime()?.block_on(run.measure(&mut results))? {
                return Ok(caught.status());
            }
            for verdict in e2b::verdicts(&results.all) {
                results.add(Record::Verdict(verdict))?;
            }
        }
    }
    results.conclude()
}

/// The arguments of the same command in the emulated machine.
fn inside(args: &BenchE2bArgs) -> Vec<String> {
    let mut inside = vec!["e2b".to_owned(), "--n".into(), args.children.to_string()];
    match &args.tag {
        Some(tag) => inside.extend(["--tag".into(), tag.clone()]),
        None => inside.extend(["--image".into(), args.image.clone()]),
    }
    inside.extend(args.quick.then(|| "--quick".into()));
    inside
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
    let block = |lines: Vec<String>| lines.join("\n");
    let conditions = e2b::lines(records).map(|line| (line.case.as_str(), &line.conditions));
    let conditions = report::conditions(conditions).into_iter().map(|text| format!("- {text}"));
    let verdicts = e2b::verdicts(records).into_iter().map(|verdict| format!("- {verdict}"));
    let errors = e2b::lines(records)
        .flat_map(|line| line.errors.iter().map(move |error| format!("- {}: FAILED: {error}", line.case)));
    let parts = [block(conditions.collect()), e2b::table(records), block(verdicts.chain(errors).collect())];
    parts.into_iter().filter(|part| !part.is_empty()).collect::<Vec<_>>().join("\n\n")
}

/// An operation to measure.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Operation {
    Create,
    FirstCommand,
    Command,
    Write,
    Read,
    Code,
    Fork,
}

impl Operation {
    fn name(self) -> &'static str {
        match self {
            Operation::Create => "create",
            Operation::FirstCommand => "first_command",
            Operation::Command => "command",
            Operation::Write => "write_1mib",
            Operation::Read => "read_1mib",
            Operation::Code => "run_code",
            Operation::Fork => "fork",
        }
    }

    fn beside(self) -> Beside {
        match self {
            Operation::Create | Operation::FirstCommand | Operation::Fork => Beside::Native,
            _ => Beside::Agent,
        }
    }
}

/// A measurement on this host.
struct E2bRun<'a> {
    context: &'a Context,
    args: &'a BenchE2bArgs,
    conditions: Conditions,
}

impl E2bRun<'_> {
    async fn measure(&self, results: &mut Results<'_, Record>) -> Result<MeasurementEnd> {
        let place = DaemonSource::Daemon(self.args.socket.as_deref());
        in_bench_folder(self.context, place, async |server, folder| {
            let server = server.context("there is no daemon to measure")?;
            let data = if self.args.socket.is_some() { self.context.data.root() } else { folder };
            self.all(server, data, results).await
        })
        .await
    }

    async fn all(
        &self,
        server: &mut BenchDaemon,
        data: &Path,
        results: &mut Results<'_, Record>,
    ) -> Result<()> {
        let ui = self.context.ui;
        let tag = match &self.args.tag {
            Some(tag) => tag.clone(),
            None => {
                let tag = format!("bench-e2b-{}", std::process::id());
                let progress = ui.progress("booting and warming a Linux guest");
                server.snapshot(&tag, json!({ "image": self.args.image, "mem_size_mib": MEM_MIB })).await?;
                progress.done("a Linux guest is warm");
                tag
            }
        };
        let mut bench = Bench::open(server, &tag, data, self.args.children).await?;
        let mut operations = vec![
            Operation::Create,
            Operation::FirstCommand,
            Operation::Command,
            Operation::Write,
            Operation::Read,
        ];
        match bench.has_interpreter().await {
            Ok(()) => operations.push(Operation::Code),
            Err(error) => {
                ui.note(format!("run_code is not measured: no code interpreter answers ({error:#})"))
            }
        }
        operations.push(Operation::Fork);
        for operation in operations {
            let progress = ui.progress(operation.name());
            let turns = bench.turns(operation, self.repetitions(operation)).await;
            let children = if operation == Operation::Fork { self.args.children } else { 1 };
            let line = Line::of(operation.name(), operation.beside(), children, &turns, &self.conditions);
            progress.done(&format!("{}: {} of {} turns", operation.name(), line.ok, line.n));
            if line.ok < line.n {
                results.status = 1;
            }
            results.add(Record::Line(line))?;
        }
        bench.close().await
    }

    fn repetitions(&self, operation: Operation) -> usize {
        let full = match operation {
            Operation::Create | Operation::FirstCommand | Operation::Fork => FEW_TURNS,
            _ => TURNS,
        };
        if self.args.quick { full.div_ceil(5) } else { full }
    }
}

/// A sandbox of the E2B API.
struct Sandbox {
    id: String,
    token: String,
}

/// The connection to a daemon, and the sandbox that requests go to.
struct Bench<'a> {
    server: &'a BenchDaemon,
    daemon: Peer,
    tag: String,
    data: PathBuf,
    children: usize,
    sandbox: Sandbox,
}

impl<'a> Bench<'a> {
    async fn open(server: &'a BenchDaemon, tag: &str, data: &Path, children: usize) -> Result<Bench<'a>> {
        let mut daemon = Peer::daemon(server.socket()?).await?;
        let sandbox = create(&mut daemon, tag).await?;
        Ok(Bench { server, daemon, tag: tag.to_owned(), data: data.to_owned(), children, sandbox })
    }

    async fn close(self) -> Result<()> {
        delete(self.server, &[self.sandbox.id]).await
    }

    /// The socket that connects to a guest's vsock.
    fn socket(&self, id: &str) -> Result<PathBuf> {
        // Without a file system in memory there is no run directory.
        let folders = [self.data.join("run/sandboxes"), self.data.join("sandboxes")];
        let found = folders.into_iter().map(|folder| folder.join(id)).find(|folder| folder.exists());
        let folder = found.with_context(|| {
            let data = self.data.display();
            format!("sandbox {id} has no folder in {data}: give the daemon's own folder with --data-dir")
        })?;
        // The path behind the link is shorter, and the path of a socket has a limit.
        Ok(folder.canonicalize()?.join("vsock.sock"))
    }

    async fn has_interpreter(&self) -> Result<()> {
        let mut peer = Peer::guest_port(&self.socket(&self.sandbox.id)?, CODE_PORT).await?;
        peer.send(Request::get("/health").header("host", "guest").body(Full::default())?).await.map(drop)
    }

    /// Measures an operation both ways, in turns. The first turn pays for what all others share, and does not count.
    async fn turns(&mut self, operation: Operation, repetitions: usize) -> Turns {
        let mut turns = Turns::default();
        for turn in 0..=repetitions {
            let both = self.turn(operation, turn % 2 == 1).await;
            match both {
                Ok(_) if turn == 0 => {}
                Ok(both) => turns.times_ms.push(both),
                Err(error) => turns.errors.push(format!("{error:#}")),
            }
        }
        turns
    }

    /// One turn: the time over the E2B API, and the time the other way.
    async fn turn(&mut self, operation: Operation, other_first: bool) -> Result<(f64, f64)> {
        let first_other = if other_first { Some(self.other_way(operation).await?) } else { None };
        let over = self.over_e2b(operation).await?;
        let other = match first_other {
            Some(other) => other,
            None => self.other_way(operation).await?,
        };
        Ok((over, other))
    }

    async fn over_e2b(&mut self, operation: Operation) -> Result<f64> {
        let begun = Instant::now();
        match operation {
            Operation::Create | Operation::FirstCommand => {
                let made = create(&mut self.daemon, &self.tag).await?;
                let ran = match operation {
                    Operation::FirstCommand => self.send_over(&made, Operation::Command).await,
                    _ => Ok(()),
                };
                let took = ms(begun);
                delete(self.server, &[made.id]).await?;
                ran.map(|()| took)
            }
            Operation::Fork => {
                let path = format!("/sandboxes/{}/fork", self.sandbox.id);
                let body = json!({ "count": self.children, "timeout": LIFE_SECS });
                let answer = self.daemon.send(json_request(Method::POST, &path, &body)?).await?;
                let took = ms(begun);
                let answer: Vec<Value> = serde_json::from_slice(&answer)?;
                let ids = answer.iter().filter_map(|child| child.pointer("/sandbox/sandboxID"));
                let ids: Vec<String> = ids.filter_map(Value::as_str).map(str::to_owned).collect();
                delete(self.server, &ids).await?;
                if ids.len() < self.children {
                    let failed = answer.iter().find_map(|child| child.pointer("/error/message"));
                    bail!("{} of {} children: {failed:?}", ids.len(), self.children);
                }
                Ok(took)
            }
            _ => {
                let sandbox = Sandbox { id: self.sandbox.id.clone(), token: self.sandbox.token.clone() };
                let begun = Instant::now();
                self.send_over(&sandbox, operation).await?;
                Ok(ms(begun))
            }
        }
    }

    /// Sends the request of an operation through the daemon.
    async fn send_over(&mut self, sandbox: &Sandbox, operation: Operation) -> Result<()> {
        let mut request = guest_request(operation)?;
        let port = if operation == Operation::Code { CODE_PORT } else { ENVD_PORT };
        let headers = request.headers_mut();
        headers.insert("e2b-sandbox-id", sandbox.id.parse()?);
        headers.insert("e2b-sandbox-port", port.into());
        headers.insert("x-access-token", sandbox.token.parse()?);
        check(operation, &self.daemon.send(request).await?)
    }

    async fn other_way(&mut self, operation: Operation) -> Result<f64> {
        match operation {
            Operation::Create | Operation::FirstCommand => {
                let path = "/v1/sandboxes";
                let body = json!({ "snapshot_tag": self.tag, "timeout_secs": LIFE_SECS });
                let begun = Instant::now();
                let answer = self.daemon.send(json_request(Method::POST, path, &body)?).await?;
                let ids = ids(&answer)?;
                let id = ids.first().context("the daemon's reply has no child")?;
                let ran = match operation {
                    Operation::FirstCommand => self.send_direct(id, Operation::Command).await,
                    _ => Ok(()),
                };
                let took = ms(begun);
                delete(self.server, &ids).await?;
                ran.map(|()| took)
            }
            Operation::Fork => {
                let path = format!("/v1/sandboxes/{}/fork", self.sandbox.id);
                let body = json!({ "n": self.children, "timeout_secs": LIFE_SECS });
                let begun = Instant::now();
                let answer = self.daemon.send(json_request(Method::POST, &path, &body)?).await?;
                let took = ms(begun);
                delete(self.server, &ids(&answer)?).await?;
                Ok(took)
            }
            _ => {
                let begun = Instant::now();
                self.send_direct(&self.sandbox.id, operation).await?;
                Ok(ms(begun))
            }
        }
    }

    /// Sends the request of an operation to the guest, without the daemon.
    async fn send_direct(&self, id: &str, operation: Operation) -> Result<()> {
        let socket = self.socket(id)?;
        let mut peer = match operation {
            Operation::Code => Peer::guest_port(&socket, CODE_PORT).await?,
            _ => Peer::agent(&socket).await?,
        };
        check(operation, &peer.send(guest_request(operation)?).await?)
    }
}

fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

fn json_request(method: Method, path: &str, body: &Value) -> Result<Request<Full<Bytes>>> {
    let request = Request::builder().method(method).uri(path).header("host", "localhost");
    let request = request.header("content-type", "application/json");
    Ok(request.body(Full::from(serde_json::to_vec(body)?))?)
}

/// The request of an operation, as E2B's Python client sends it.
fn guest_request(operation: Operation) -> Result<Request<Full<Bytes>>> {
    let post = |path: &str, kind: &str| {
        let request = Request::post(path).header("host", "localhost").header("content-type", kind);
        request.header(DEFAULT_USER_HEADER, "user")
    };
    let request = match operation {
        Operation::Command => {
            let process = json!({ "cmd": "/bin/bash", "args": ["-l", "-c", "true"] });
            let start = connect::encode(0, &json!({ "process": process, "stdin": false }));
            let request = post("/process.Process/Start", connect::STREAM_TYPE);
            request.header("connect-protocol-version", "1").body(Full::from(start))?
        }
        Operation::Write => {
            let head = format!(
                "--{BOUNDARY}\r\nContent-Disposition: form-data; name=\"file\"; filename=\"bench.bin\"\r\n\
                 Content-Type: application/octet-stream\r\n\r\n"
            );
            let content = (0..FILE_BYTES).map(|index| index as u8);
            let body: Vec<u8> =
                head.bytes().chain(content).chain(format!("\r\n--{BOUNDARY}--\r\n").into_bytes()).collect();
            let kind = format!("multipart/form-data; boundary={BOUNDARY}");
            post(FILE, &kind).body(Full::from(body))?
        }
        Operation::Read => {
            let request = Request::get(FILE).header("host", "localhost").header(DEFAULT_USER_HEADER, "user");
            request.body(Full::default())?
        }
        Operation::Code => {
            let body = json!({ "code": "1+1", "context_id": null, "language": null, "env_vars": null });
            post("/execute", "application/json").body(Full::from(serde_json::to_vec(&body)?))?
        }
        Operation::Create | Operation::FirstCommand | Operation::Fork => {
            bail!("{} is no request to a guest", operation.name())
        }
    };
    Ok(request)
}

/// Fails unless the response is the operation's result.
fn check(operation: Operation, body: &[u8]) -> Result<()> {
    let has = |part: &str| body.windows(part.len()).any(|window| window == part.as_bytes());
    let is_right = match operation {
        Operation::Command => has("\"exit status 0\""),
        Operation::Write => has("bench.bin"),
        Operation::Read => body.len() == FILE_BYTES && body[255] == 255,
        Operation::Code => has("\"end_of_execution\"") && has("\"text\": \"2\"") | has("\"text\":\"2\""),
        Operation::Create | Operation::FirstCommand | Operation::Fork => true,
    };
    if !is_right {
        let shown: String = String::from_utf8_lossy(body).chars().take(200).collect();
        bail!("{}: an unexpected result: {shown}", operation.name());
    }
    Ok(())
}

/// Creates a sandbox over the E2B API.
async fn create(daemon: &mut Peer, tag: &str) -> Result<Sandbox> {
    let body = json!({ "templateID": tag, "timeout": LIFE_SECS, "metadata": {}, "envVars": {} });
    let answer = daemon.send(json_request(Method::POST, "/v2/sandboxes", &body)?).await?;
    let answer: Value = serde_json::from_slice(&answer)?;
    let text = |name: &str| answer.get(name).and_then(Value::as_str).map(str::to_owned);
    let (id, token) =
        text("sandboxID").zip(text("envdAccessToken")).context("a reply without id or token")?;
    Ok(Sandbox { id, token })
}

/// The ids in a reply of the daemon's own API.
fn ids(answer: &[u8]) -> Result<Vec<String>> {
    let answer: Vec<Value> = serde_json::from_slice(answer)?;
    let ids = answer.iter().filter_map(|child| child.get("id")?.as_str().map(str::to_owned));
    Ok(ids.collect())
}

/// Ends sandboxes and waits until their processes have ended, so that the next measurement does not pay for it.
async fn delete(server: &BenchDaemon, ids: &[String]) -> Result<()> {
    let mut children = Vec::new();
    for id in ids {
        let info = server.call(Method::GET, &format!("/v1/sandboxes/{id}"), None).await?;
        children.push(Child::parse(&info).context("the daemon's reply has a child without an id")?);
    }
    server.delete(&children).await
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_right_result_counts() {
        check(Operation::Command, b"..{\"end\":{\"status\":\"exit status 0\"}}").unwrap();
        check(Operation::Command, b"..{\"end\":{\"status\":\"exit status 1\"}}").unwrap_err();
        check(Operation::Code, b"{\"text\": \"2\"}\n{\"type\":\"end_of_execution\"}").unwrap();
        check(Operation::Code, b"{\"text\": \"2\"}").unwrap_err();
        check(Operation::Read, &[0; 10]).unwrap_err();
        let content: Vec<u8> = (0..FILE_BYTES).map(|index| index as u8).collect();
        check(Operation::Read, &content).unwrap();
    }

    #[test]
    fn the_same_request_goes_both_ways() {
        for operation in [Operation::Command, Operation::Write, Operation::Read, Operation::Code] {
            let request = guest_request(operation).unwrap();
            assert_eq!(request.headers()[DEFAULT_USER_HEADER], "user");
            assert_eq!(operation.beside(), Beside::Agent);
        }
        assert!(guest_request(Operation::Fork).is_err());
    }

    #[test]
    fn the_command_in_the_machine_has_the_same_snapshot_and_repetitions() {
        let parse = |line: &[&str]| {
            use clap::Parser;
            let line = ["forkd", "bench", "e2b"].iter().chain(line);
            match crate::args::Cli::try_parse_from(line).unwrap().command {
                crate::args::Command::Bench(super::super::BenchArgs {
                    command: Some(super::super::BenchCommand::E2b(args)),
                    ..
                }) => inside(&args).join(" "),
                _ => panic!("not bench e2b"),
            }
        };
        assert_eq!(parse(&[]), "e2b --n 10 --image code-interpreter-v1");
        assert_eq!(parse(&["--tag", "mine", "--quick", "-n", "3"]), "e2b --n 3 --tag mine --quick");
    }
}

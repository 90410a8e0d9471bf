//! The process service: commands, their input, output, signals and end.

mod cgroup;
mod output;
pub(crate) mod reaper;
mod running;
mod signals;
pub(crate) mod spawn;

use std::{
    collections::{BTreeMap, VecDeque},
    io,
    sync::{Arc, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::{
        End, Event, Output as OutputMessage, ProcessEvent, ProcessInput, ProcessList, ProcessRef,
        ProcessSelector, SendInputRequest, SendSignalRequest, StartRequest, StreamInputRequest,
        UpdateRequest,
    },
    connect::{Code, Error, exit_code},
};
use serde_json::{Value, json};

pub(crate) use cgroup::{Cgroup, Cgroups, Part};
pub(crate) use output::{Listener, Next, Outcome, Source};
pub(crate) use reaper::ExitStatus;
pub(crate) use running::{Launch, Process, explain};

use crate::{
    http::{Exchange, Head},
    rpc::{self, ClientStream, NextMessage, Outgoing},
    users::User,
};

/// The default search path for programs.
pub(crate) const DEFAULT_PATH: &str = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin";
/// The most processes that the agent runs at once.
const MAX_RUNNING: usize = 512;
/// The most ended ones that it still lists.
const MAX_ENDED: usize = 32;

/// All processes the agent started.
pub(crate) struct Processes {
    table: Arc<Mutex<Table>>,
    pub(crate) cgroups: Arc<Cgroups>,
    pub(crate) variables: Arc<Variables>,
}

/// Variables that every process started from now on gets, whatever starts it.
#[derive(Debug, Default)]
pub(crate) struct Variables(Mutex<BTreeMap<String, String>>);

#[derive(Default)]
struct Table {
    running: Vec<Arc<Process>>,
    ended: VecDeque<Arc<Process>>,
}

fn lock(table: &Mutex<Table>) -> MutexGuard<'_, Table> {
    table.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Table {
    fn end(&mut self, process: &Arc<Process>) {
        self.running.retain(|other| !Arc::ptr_eq(other, process));
        self.ended.push_back(process.clone());
        if self.ended.len() > MAX_ENDED {
            self.ended.pop_front();
        }
    }
}

impl Processes {
    pub(crate) fn new(cgroups: Arc<Cgroups>, variables: Arc<Variables>) -> Self {
        Processes { table: Arc::default(), cgroups, variables }
    }

    /// Starts a process; a `limit` kills it when it is over.
    pub(crate) fn start(
        &self,
        request: &StartRequest,
        user: &User,
        limit: Option<Duration>,
    ) -> Result<(Arc<Process>, Listener), Error> {
        self.start_in(Part::Commands, request, user, limit)
    }

    /// Starts a process in one of the cgroups. An error that is about the command has its exit status.
    pub(crate) fn start_in(
        &self,
        part: Part,
        request: &StartRequest,
        user: &User,
        limit: Option<Duration>,
    ) -> Result<(Arc<Process>, Listener), Error> {
        self.attempt(part, request, user, limit).map_err(|error| match error {
            Error { code: Code::InvalidArgument, exit_code: None, .. } => {
                error.with_exit_code(exit_code::CANNOT_EXECUTE)
            }
            error => error,
        })
    }

    fn attempt(
        &self,
        part: Part,
        request: &StartRequest,
        user: &User,
        limit: Option<Duration>,
    ) -> Result<(Arc<Process>, Listener), Error> {
        if request.process.cmd.is_empty() {
            return Err(Error::new(
                Code::InvalidArgument,
                "there is no program to run: process.cmd is empty",
            ));
        }
        let env = self.variables.environment(user, request.pty.is_some(), &request.process.envs)?;
        if lock(&self.table).running.len() >= MAX_RUNNING {
            let message = format!("{MAX_RUNNING} processes are running: end some before starting others");
            return Err(Error::new(Code::ResourceExhausted, message));
        }
        let launch = Launch { request, user, env, limit, cgroups: &self.cgroups, part };
        let table = self.table.clone();
        Process::start(
            launch,
            |process| lock(&self.table).running.push(process.clone()),
            move |process| lock(&table).end(process),
        )
    }

    /// A process that runs or ended recently; of several with one tag, the newest.
    fn find(&self, selector: &ProcessSelector) -> Result<Arc<Process>, Error> {
        let matches = |process: &&Arc<Process>| match selector {
            ProcessSelector { pid: Some(pid), .. } => process.info.pid == *pid,
            ProcessSelector { tag: Some(tag), .. } => process.info.tag.as_ref() == Some(tag),
            _ => false,
        };
        let table = lock(&self.table);
        let found =
            table.running.iter().rev().find(matches).or_else(|| table.ended.iter().rev().find(matches));
        found.cloned().ok_or_else(|| {
            let message = match selector {
                ProcessSelector { pid: Some(pid), .. } => format!("there is no process {pid}"),
                ProcessSelector { tag: Some(tag), .. } => format!("there is no process with the tag {tag:?}"),
                _ => return Error::new(Code::InvalidArgument, "name a process by pid or tag"),
            };
            Error::new(Code::NotFound, message)
        })
    }

    fn find_running(&self, selector: &ProcessSelector) -> Result<Arc<Process>, Error> {
        let process = self.find(selector)?;
        if process.has_ended() {
            return Err(ended(&process));
        }
        Ok(process)
    }

    /// Answers one call; `None` if there is no such method. `user` looks up the user that the caller names.
    pub(crate) fn call(
        &self,
        method: &str,
        user: &dyn Fn(&Head) -> Result<User, Error>,
        exchange: &mut Exchange,
    ) -> Option<io::Result<()>> {
        Some(match method {
            "Start" => self.start_call(user, exchange),
            "Connect" => self.connect_call(exchange),
            "List" => rpc::unary(exchange, |_: Value, _| Ok(self.list())),
            "SendInput" => rpc::unary(exchange, |request: SendInputRequest, _| {
                self.find_running(&request.process)?.send_input(&bytes_of(request.input))?;
                Ok(json!({}))
            }),
            "StreamInput" => self.stream_input_call(exchange),
            "CloseStdin" => rpc::unary(exchange, |request: ProcessRef, _| {
                self.find_running(&request.process)?.close_input()?;
                Ok(json!({}))
            }),
            "SendSignal" => rpc::unary(exchange, |request: SendSignalRequest, _| {
                let signal = signals::number(&request.signal).ok_or_else(|| {
                    let message = format!("{:?} is not a signal; one is SIGNAL_SIGTERM", request.signal);
                    Error::new(Code::InvalidArgument, message)
                })?;
                let process = self.find_running(&request.process)?;
                if process.signal(signal) {
                    return Ok(json!({}));
                }
                Err(ended(&process))
            }),
            "Update" => rpc::unary(exchange, |request: UpdateRequest, _| {
                let process = self.find_running(&request.process)?;
                if let Some(pty) = request.pty {
                    process.resize(pty.size)?;
                }
                Ok(json!({}))
            }),
            _ => return None,
        })
    }

    fn list(&self) -> ProcessList {
        ProcessList {
            processes: lock(&self.table).running.iter().map(|process| process.info.clone()).collect(),
        }
    }

    fn start_call(
        &self,
        user: &dyn Fn(&Head) -> Result<User, Error>,
        exchange: &mut Exchange,
    ) -> io::Result<()> {
        let request = rpc::stream_request::<StartRequest>(exchange)?;
        let keepalive = rpc::keepalive(exchange.head());
        let started = request.and_then(|request| {
            // From when the request came: its client counts from when it sent it, and should get the error here.
            let received = exchange.head().received;
            let limit = rpc::timeout(exchange.head())?.map(|limit| limit.saturating_sub(received.elapsed()));
            self.start(&request, &user(exchange.head())?, limit)
        });
        let stream = Outgoing::begin(exchange)?;
        match started {
            Ok((process, listener)) => relay(stream, &process, &listener, keepalive, None),
            Err(error) => stream.end(Some(error)),
        }
    }

    fn stream_input_call(&self, exchange: &mut Exchange) -> io::Result<()> {
        let result = match ClientStream::begin(exchange) {
            Ok(messages) => self.feed(messages)?,
            Err(error) => Err(error),
        };
        let mut stream = Outgoing::begin(exchange)?;
        match result {
            Ok(()) => {
                stream.send(&json!({}))?;
                stream.end(None)
            }
            Err(error) => stream.end(Some(error)),
        }
    }

    /// Writes what a client streams to the process that its first message names, until the client ends the stream.
    fn feed(&self, mut messages: ClientStream) -> io::Result<Result<(), Error>> {
        let mut process: Option<Arc<Process>> = None;
        loop {
            let message = match messages.next::<StreamInputRequest>(rpc::PEER_TICK)? {
                Ok(NextMessage::Message(message)) => message,
                Ok(NextMessage::End) if process.is_some() => return Ok(Ok(())),
                Ok(NextMessage::End) => return Ok(Err(no_start())),
                Ok(NextMessage::Idle) if messages.peer_is_gone() => {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                Ok(NextMessage::Idle) => match &process {
                    Some(process) if process.has_ended() => return Ok(Err(ended(process))),
                    _ => continue,
                },
                Err(error) => return Ok(Err(error)),
            };
            let done = match (message, &process) {
                (StreamInputRequest { start: Some(start), .. }, None) => {
                    self.find_running(&start.process).map(|found| process = Some(found))
                }
                (StreamInputRequest { start: Some(_), .. }, Some(_)) => {
                    Err(Error::new(Code::InvalidArgument, "a stream of input has one start message"))
                }
                (_, None) => Err(no_start()),
                (StreamInputRequest { data: Some(data), .. }, Some(process)) => {
                    process.send_input(&bytes_of(data.input))
                }
                // A keepalive, or a message of a newer client.
                (_, Some(_)) => Ok(()),
            };
            if let Err(error) = done {
                return Ok(Err(error));
            }
        }
    }

    fn connect_call(&self, exchange: &mut Exchange) -> io::Result<()> {
        let request = rpc::stream_request::<ProcessRef>(exchange)?;
        let keepalive = rpc::keepalive(exchange.head());
        let found = request.and_then(|request| {
            let limit = rpc::timeout(exchange.head())?;
            Ok((self.find(&request.process)?, limit))
        });
        let stream = Outgoing::begin(exchange)?;
        match found {
            // The time is that of the call here: the process was started with its own.
            Ok((process, limit)) => relay(stream, &process, &process.listen(), keepalive, limit),
            Err(error) => stream.end(Some(error)),
        }
    }
}

fn bytes_of(input: ProcessInput) -> Vec<u8> {
    input.pty.or(input.stdin).unwrap_or_default()
}

fn ended(process: &Process) -> Error {
    Error::new(Code::NotFound, format!("process {} has ended", process.info.pid))
}

fn no_start() -> Error {
    Error::new(Code::InvalidArgument, "the first message of a stream of input is start, with the process")
}

/// Sends what happens to a process to one peer, until it ends or `limit` is over.
fn relay(
    mut stream: Outgoing,
    process: &Process,
    listener: &Listener,
    keepalive: Duration,
    limit: Option<Duration>,
) -> io::Result<()> {
    let deadline = limit.and_then(|limit| Instant::now().checked_add(limit));
    let send = |stream: &mut Outgoing, event| stream.send(&ProcessEvent { event });
    send(&mut stream, Event::Start { pid: process.info.pid })?;
    let mut last_sent = Instant::now();
    loop {
        let mut wait = rpc::PEER_TICK.min(keepalive.saturating_sub(last_sent.elapsed()));
        if let Some(deadline) = deadline {
            let left = deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                let message = "the time of this call is over; the process goes on";
                return stream.end(Some(Error::new(Code::DeadlineExceeded, message)));
            }
            wait = wait.min(left);
        }
        match listener.next(wait) {
            Next::Piece((source, bytes)) => {
                send(&mut stream, Event::Data(output_message(source, bytes.to_vec())))?;
                last_sent = Instant::now();
            }
            Next::End(Outcome::Ended(status)) => {
                send(&mut stream, Event::End(end_message(status)))?;
                return stream.end(None);
            }
            Next::End(Outcome::DeadlineExceeded) => {
                let message = "the command took longer than it was given and was killed";
                return stream.end(Some(Error::new(Code::DeadlineExceeded, message)));
            }
            Next::Idle => {
                if stream.peer_is_gone() {
                    return Err(io::ErrorKind::BrokenPipe.into());
                }
                if last_sent.elapsed() >= keepalive {
                    send(&mut stream, Event::Keepalive {})?;
                    last_sent = Instant::now();
                }
            }
        }
    }
}

fn output_message(source: Source, bytes: Vec<u8>) -> OutputMessage {
    match source {
        Source::Stdout => OutputMessage { stdout: Some(bytes), ..OutputMessage::default() },
        Source::Stderr => OutputMessage { stderr: Some(bytes), ..OutputMessage::default() },
        Source::Terminal => OutputMessage { pty: Some(bytes), ..OutputMessage::default() },
    }
}

fn end_message(status: ExitStatus) -> End {
    let words = describe(status);
    match status {
        ExitStatus::Code(exit_code) => {
            let error = (exit_code != 0).then(|| words.clone());
            End { exit_code, exited: true, status: words, error, signal: None }
        }
        ExitStatus::Signal { number, .. } => End {
            exit_code: -1,
            exited: false,
            status: words.clone(),
            error: Some(words),
            signal: Some(number),
        },
    }
}

/// `exit status 7` or `signal: killed`.
pub(crate) fn describe(status: ExitStatus) -> String {
    match status {
        ExitStatus::Code(code) => format!("exit status {code}"),
        ExitStatus::Signal { number, core_dumped } => {
            format!(
                "signal: {}{}",
                signals::describe(number),
                if core_dumped { " (core dumped)" } else { "" }
            )
        }
    }
}

impl Variables {
    pub(crate) fn set(&self, variables: BTreeMap<String, String>) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) = variables;
    }

    /// The environment of a user's process. The caller's variables override those of a fork.
    pub(crate) fn environment(
        &self,
        user: &User,
        terminal: bool,
        extra: &BTreeMap<String, String>,
    ) -> Result<BTreeMap<String, String>, Error> {
        check_variables(extra)?;
        let mut env: BTreeMap<String, String> = [
            ("PATH", DEFAULT_PATH),
            ("HOME", &user.home),
            ("USER", &user.name),
            ("LOGNAME", &user.name),
            ("SHELL", &user.shell),
            ("FORKD_SANDBOX", "true"),
        ]
        .map(|(name, value)| (name.to_string(), value.to_string()))
        .into();
        if terminal {
            env.insert("TERM".into(), "xterm-256color".into());
        }
        env.extend(self.0.lock().unwrap_or_else(PoisonError::into_inner).clone());
        env.extend(extra.clone());
        Ok(env)
    }
}

/// Whether these can be variables of a process.
pub(crate) fn check_variables(variables: &BTreeMap<String, String>) -> Result<(), Error> {
    for (name, value) in variables {
        if name.is_empty() || name.contains(['=', '\0']) || value.contains('\0') {
            let message =
                format!("{name:?} cannot be the name of an environment variable, or its value holds NUL");
            return Err(Error::new(Code::InvalidArgument, message));
        }
    }
    Ok(())
}

#[cfg(test)]
mod input_tests;
#[cfg(test)]
mod tests;

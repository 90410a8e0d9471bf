//! A client of the agent in a guest (over the sandbox's vsock socket) or in the emulated machine
//! (over TCP with a token).
//!
//! The agent runs beside untrusted code, so the client does not trust it: every call has a time limit, every
//! response a size limit, and anything but a valid response is an error.
//! Every call opens its own connection, except where order matters ([`Input`]).

pub(crate) mod bringup;
pub(crate) mod budget;
pub(crate) mod connection;
mod files;
pub(crate) mod forward;
mod messages;
mod tree;

use std::collections::BTreeMap;
use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use base64::Engine;
use base64::prelude::BASE64_STANDARD;
use bytes::Bytes;
use forkd_protocol::agent::{
    BecomeRequest, BecomeResponse, EvalRequest, EvalResponse, Event, FreezeRequest, FreezeResponse,
    NameRequest, Pong, ProcessEvent, ProcessInput, ProcessList, ProcessRef, ProcessSelector, Pty,
    SendInputRequest, SendSignalRequest, StartRequest, UpdateRequest, Usage, WarmRequest, WarmStatus,
    WrittenFile,
};
use forkd_protocol::connect::{Code, TIMEOUT_HEADER};
use forkd_protocol::names::percent;
use hyper::header::AUTHORIZATION;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_json::value::RawValue;

use crate::agent::connection::{Call, Connection};
use crate::agent::messages::Messages;

pub use crate::agent::budget::ResponseBudget;
pub use files::{Download, Upload};

/// The largest response that is accepted; the output of an evaluation is the largest legitimate one.
const MAX_ANSWER: usize = 40 << 20;
/// The largest response of all other calls, which report a result in a few words.
const MAX_SHORT_ANSWER: usize = 1 << 20;
/// Extra time to read or write a whole file, beside the limit of any call.
const FILE_TIME: Duration = Duration::from_secs(30);

/// The address of an agent.
#[derive(Debug, Clone)]
pub enum Endpoint {
    /// Behind the unix socket on which a monitor serves its guest's vsock.
    Vsock {
        /// The socket.
        socket: PathBuf,
        /// The port the agent listens on.
        port: u32,
    },
    /// On a TCP port.
    Tcp {
        /// Such as `127.0.0.1:1024`.
        address: String,
        /// The token that the agent expects.
        token: String,
    },
}

/// Why a call failed.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Nothing listens at the endpoint, or the connection broke.
    #[error("the agent cannot be reached: {0}")]
    Unreachable(String),
    /// The agent answered, with an error of its own.
    #[error("{0}")]
    Refused(#[from] forkd_protocol::connect::Error),
    /// The guest's disk has no room for that.
    #[error("the guest's disk is full: {0}")]
    DiskFull(String),
    /// The response does not follow the agent's protocol.
    #[error("the agent does not speak its protocol: {0}")]
    Protocol(String),
    /// The global budget for responses is used up.
    #[error(
        "it was done, but there is no room for the answer: too much output of guests waits for slow clients; read \
         the answers that wait"
    )]
    NoRoom,
    /// The call exceeded its time limit.
    #[error("the agent did not answer within {0:?}")]
    Timeout(Duration),
}

impl Error {
    /// The text for any client. The reason for a missing connection is for the operator only.
    pub(crate) fn public(&self) -> String {
        match self {
            Error::Unreachable(_) => "the agent cannot be reached".into(),
            other => other.to_string(),
        }
    }

    /// Whether the agent reported that the call's own time limit expired.
    pub fn is_deadline(&self) -> bool {
        matches!(self, Error::Refused(error) if error.code == Code::DeadlineExceeded)
    }
}

/// Result of a call.
pub type Result<T> = std::result::Result<T, Error>;

/// A client. Cheap to clone.
#[derive(Debug, Clone)]
pub struct Agent {
    endpoint: Arc<Endpoint>,
    patience: Duration,
}

/// How to start a process, beside the request itself.
#[derive(Debug, Clone, Default)]
pub struct StartOptions {
    /// The user it runs as; the agent's default when absent.
    pub user: Option<String>,
    /// After this long the agent kills it.
    pub timeout: Option<Duration>,
}

/// A response without content.
#[derive(Debug, Default, Serialize, Deserialize)]
#[serde(default)]
struct Empty {}

impl Agent {
    /// A client of the agent at `endpoint`. `patience` is the time limit of calls that the agent answers at once.
    pub fn new(endpoint: Endpoint, patience: Duration) -> Self {
        Agent { endpoint: Arc::new(endpoint), patience }
    }

    /// Checks that the agent answers.
    pub async fn ping(&self) -> Result<Pong> {
        self.unary("/forkd.Agent/Ping", &Empty {}, self.patience).await
    }

    /// What the guest uses.
    pub async fn usage(&self) -> Result<Usage> {
        self.unary("/forkd.Agent/Usage", &Empty {}, self.patience).await
    }

    /// Starts the image's warm-up, or returns its progress.
    pub async fn warm(&self, request: &WarmRequest) -> Result<WarmStatus> {
        self.unary("/forkd.Agent/Warm", request, self.patience).await
    }

    /// Prepares the guest for forks. If that takes longer than `limit` the error
    /// [is a deadline](Error::is_deadline), and all of the guest's processes run.
    pub async fn freeze(&self, limit: Duration, request: FreezeRequest) -> Result<FreezeResponse> {
        let request = FreezeRequest { timeout_ms: limit.as_millis().max(1) as u64, ..request };
        let patience = self.patience.saturating_mul(2).saturating_add(limit);
        self.unary("/forkd.Agent/Freeze", &request, patience).await
    }

    /// Lets a guest that was frozen run on.
    pub async fn thaw(&self) -> Result<()> {
        self.unary::<serde_json::Value>("/forkd.Agent/Thaw", &Empty {}, self.patience).await.map(drop)
    }

    /// Sends a booted guest the id of its sandbox and variables for its processes.
    pub async fn name(&self, sandbox_id: &str, envs: &BTreeMap<String, String>) -> Result<()> {
        let request = NameRequest { sandbox_id: sandbox_id.to_owned(), envs: envs.clone() };
        self.unary::<serde_json::Value>("/forkd.Agent/Name", &request, self.patience).await.map(drop)
    }

    /// Gives a forked guest its own identity. The time in `request` is set right before it is sent.
    pub async fn become_sandbox(&self, mut request: BecomeRequest) -> Result<BecomeResponse> {
        let answer = within(self.patience, async {
            let mut connection = self.connect().await?;
            request.unix_nanos = crate::util::time::unix_nanos();
            connection.call(Call::unary("/forkd.Agent/Become", &request)?, MAX_SHORT_ANSWER).await
        });
        parse(&answer.await?)
    }

    /// Evaluates Python. When `limit` is over the agent interrupts it and the error
    /// [is a deadline](Error::is_deadline).
    pub async fn eval(
        &self,
        request: &EvalRequest,
        limit: Duration,
    ) -> Result<(EvalResponse<Box<RawValue>>, ResponseBudget)> {
        let call = Call::unary("/forkd.Agent/Eval", request)?.header(TIMEOUT_HEADER, millis(limit));
        // The agent enforces `limit`, and needs time to report that.
        self.long_answer(call, limit.saturating_add(self.patience)).await
    }

    /// Asks the guest to power off.
    pub async fn shutdown(&self) -> Result<()> {
        let _: Empty = self.unary("/forkd.Agent/Shutdown", &Empty {}, self.patience).await?;
        Ok(())
    }

    /// Starts a process and returns the stream of its events. Dropping the stream does not end the process.
    pub async fn start(&self, request: &StartRequest, options: &StartOptions) -> Result<Process> {
        let mut call = Call::stream("/process.Process/Start", request);
        if let Some(user) = &options.user {
            call = call.header(AUTHORIZATION.as_str(), basic(user));
        }
        if let Some(limit) = options.timeout {
            call = call.header(TIMEOUT_HEADER, millis(limit));
        }
        let stream = async {
            let mut connection = self.connect().await?;
            let body = connection.open_stream(call).await?;
            Ok(Process { messages: Messages::new(connection, body) })
        };
        within(self.patience, stream).await
    }

    /// The running processes that the agent started.
    pub async fn list(&self) -> Result<ProcessList> {
        self.unary("/process.Process/List", &Empty {}, self.patience).await
    }

    /// Sends a process a signal, named as in `SIGINT`.
    pub async fn signal(&self, pid: u32, signal: &str) -> Result<()> {
        let signal = format!("SIGNAL_{signal}");
        let request = SendSignalRequest { process: by_pid(pid), signal };
        let _: Empty = self.unary("/process.Process/SendSignal", &request, self.patience).await?;
        Ok(())
    }

    /// Sends a signal to the process that was started with `tag`.
    pub async fn signal_tagged(&self, tag: &str, signal: &str) -> Result<()> {
        let process = ProcessSelector { pid: None, tag: Some(tag.to_owned()) };
        let request = SendSignalRequest { process, signal: format!("SIGNAL_{signal}") };
        let _: Empty = self.unary("/process.Process/SendSignal", &request, self.patience).await?;
        Ok(())
    }

    /// Sets the size of a process's terminal.
    pub async fn resize(&self, pid: u32, size: Pty) -> Result<()> {
        let request = UpdateRequest { process: by_pid(pid), pty: Some(size) };
        let _: Empty = self.unary("/process.Process/Update", &request, self.patience).await?;
        Ok(())
    }

    /// The input of a process: its terminal if it has one (`tty`), else its standard input.
    pub async fn input(&self, pid: u32, tty: bool) -> Result<Input> {
        let connection = within(self.patience, self.connect()).await?;
        Ok(Input { connection, pid, tty, patience: self.patience })
    }

    /// Reads a file of at most `max` bytes.
    pub async fn read_file(&self, path: &str, user: Option<&str>, max: usize) -> Result<Bytes> {
        let call = Call::get(&files_uri(path, user));
        within(FILE_TIME.saturating_add(self.patience), async { self.connect().await?.call(call, max).await })
            .await
    }

    /// Writes a file, and creates its folders.
    pub async fn write_file(&self, path: &str, user: Option<&str>, data: Bytes) -> Result<Vec<WrittenFile>> {
        let call = Call::post(&files_uri(path, user), "application/octet-stream", data);
        self.answer(call, FILE_TIME.saturating_add(self.patience)).await
    }

    async fn connect(&self) -> Result<Connection> {
        Connection::open(&self.endpoint).await
    }

    async fn unary<T: DeserializeOwned>(
        &self,
        path: &'static str,
        request: &impl Serialize,
        limit: Duration,
    ) -> Result<T> {
        self.answer(Call::unary(path, request)?, limit).await
    }

    async fn answer<T: DeserializeOwned>(&self, call: Call, limit: Duration) -> Result<T> {
        let answer =
            within(limit, async { self.connect().await?.call(call, MAX_SHORT_ANSWER).await }).await?;
        parse(&answer)
    }

    /// A response that may be long, and its share of the global budget.
    async fn long_answer<T: DeserializeOwned>(
        &self,
        call: Call,
        limit: Duration,
    ) -> Result<(T, ResponseBudget)> {
        let mut room = ResponseBudget::default();
        let answer = async { self.connect().await?.call_counted(call, MAX_ANSWER, &mut room).await };
        let answer = parse(&within(limit, answer).await?)?;
        Ok((answer, room))
    }
}

/// A started process: the stream of its events.
#[derive(Debug)]
pub struct Process {
    messages: Messages,
}

impl Process {
    /// The next event; `None` after the last one. Waits without limit while the process is silent, so the
    /// caller also watches the sandbox. Cancel-safe.
    pub async fn next(&mut self) -> Result<Option<Event>> {
        Ok(self.messages.next::<ProcessEvent>().await?.map(|message| message.event))
    }
}

/// The input of a process, in order. Calls wait while the process does not read, so the caller also watches
/// whether the process still runs.
#[derive(Debug)]
pub struct Input {
    connection: Connection,
    pid: u32,
    tty: bool,
    patience: Duration,
}

impl Input {
    /// Writes `data` and returns when the process's pipe has taken all of it.
    pub async fn send(&mut self, data: &[u8]) -> Result<()> {
        let data = Some(data.to_vec());
        let input = match self.tty {
            true => ProcessInput { pty: data, ..ProcessInput::default() },
            false => ProcessInput { stdin: data, ..ProcessInput::default() },
        };
        let request = SendInputRequest { process: by_pid(self.pid), input };
        let call = Call::unary("/process.Process/SendInput", &request)?;
        self.connection.call(call, MAX_SHORT_ANSWER).await?;
        Ok(())
    }

    /// Ends the input. On a terminal that is a character, as a terminal has no end of input.
    pub async fn close(mut self) -> Result<()> {
        if self.tty {
            return self.send(&[4]).await;
        }
        let request = ProcessRef { process: by_pid(self.pid) };
        let call = Call::unary("/process.Process/CloseStdin", &request)?;
        within(self.patience, self.connection.call(call, MAX_SHORT_ANSWER)).await?;
        Ok(())
    }
}

fn by_pid(pid: u32) -> ProcessSelector {
    ProcessSelector { pid: Some(pid), tag: None }
}

fn basic(user: &str) -> String {
    format!("Basic {}", BASE64_STANDARD.encode(format!("{user}:")))
}

fn millis(limit: Duration) -> String {
    limit.as_millis().to_string()
}

fn files_uri(path: &str, user: Option<&str>) -> String {
    let mut uri = format!("/files?path={}", percent(path));
    if let Some(user) = user {
        uri.push_str("&username=");
        uri.push_str(&percent(user));
    }
    uri
}

fn parse<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    serde_json::from_slice(bytes).map_err(|error| Error::Protocol(error.to_string()))
}

async fn within<T>(limit: Duration, work: impl Future<Output = Result<T>>) -> Result<T> {
    tokio::time::timeout(limit, work).await.unwrap_or(Err(Error::Timeout(limit)))
}

#[cfg(test)]
mod tests;

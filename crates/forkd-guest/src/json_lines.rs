//! The [JSON-lines protocol](forkd_protocol::json_lines), on TCP port 8888 of the guest, for clients of the
//! reference. It uses the code of the other services.
//!
//! # Access
//!
//! It needs no token and acts as the image's default user, so it only serves peers that could do that anyway:
//!
//! - the host: the gateway of the guest's network, which is the sandbox's own. No other machine is in that
//!   network, and none outside of it can open a connection into it.
//! - processes of this guest that are root's or the default user's. The kernel's table of connections has the
//!   owner; a connection that the process has closed before the lookup has none.
//!
//! Everybody else's connection is closed without an answer.

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, SocketAddrV4},
    os::fd::OwnedFd,
    panic::{AssertUnwindSafe, catch_unwind},
    path::Path,
    sync::Arc,
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::{ProcessConfig, StartRequest, WarmState},
    connect::{Code, Error, exit_code},
    json_lines::{Evaluated, Failure, Incoming, Pong, Ran, Reply, Request},
};

use crate::{
    agent::Agent,
    listener::{BACK_OFF, Service, accept_all},
    process::{ExitStatus, Next, Outcome, Source},
    sys::{self, Socket},
};

/// The most peers served at once.
const MAX_CONNECTIONS: usize = 64;
/// How long a request may take to come.
const REQUEST_TIME: Duration = Duration::from_secs(30);
/// How long the peer may take to read its answer.
const ANSWER_TIME: Duration = Duration::from_secs(60);
/// How long unexpected input is read on, so that the peer sees the answer and not a reset.
const DISCARD_TIME: Duration = Duration::from_secs(1);
/// How much of each stream of a command's output is kept.
const MAX_OUTPUT: usize = 4 << 20;
/// How often a silent command's peer is looked after.
const PEER_TICK: Duration = Duration::from_secs(2);
/// The most that is read of the kernel's table of connections.
const TABLE_LIMIT: u64 = 16 << 20;

/// Serves all connections that reach `listener`. Returns when that is broken.
pub(crate) fn serve(listener: &OwnedFd, agent: Arc<Agent>, gateway: Option<Ipv4Addr>) -> io::Error {
    let serve = Box::new(move |mut socket: Socket| {
        // A peer that left is no trouble of ours.
        let _ = serve_connection(&mut socket, &agent, gateway);
    });
    accept_all(listener, Service { name: "line", max: MAX_CONNECTIONS, turn_away, serve })
}

fn turn_away(mut socket: Socket) {
    let _ = socket.set_timeouts(Some(BACK_OFF), Some(BACK_OFF));
    let failure = Failure::new(format!("{MAX_CONNECTIONS} requests are under way; try again"));
    let _ = socket.write_all(&Reply::Failed(failure).to_line());
}

fn serve_connection(socket: &mut Socket, agent: &Agent, gateway: Option<Ipv4Addr>) -> io::Result<()> {
    if !may_come_in(socket, agent, gateway) {
        return Ok(());
    }
    let reply: Reply = match read_request(socket)? {
        // A service that panics costs its own connection and no more.
        Ok(request) => catch_unwind(AssertUnwindSafe(|| agent.answer_line(request, socket)))
            .unwrap_or_else(|_| Err(Failure::new("the agent failed; its console has the reason")))
            .into(),
        Err(failure) => Reply::Failed(failure),
    };
    socket.set_timeouts(Some(DISCARD_TIME), Some(ANSWER_TIME))?;
    socket.write_all(&reply.to_line())?;
    socket.shutdown_write();
    let until = Instant::now() + DISCARD_TIME;
    let mut rest = [0; 4 << 10];
    while Instant::now() < until && socket.read(&mut rest)? > 0 {}
    Ok(())
}

fn read_request(socket: &mut Socket) -> io::Result<Result<Request, Failure>> {
    let until = Instant::now() + REQUEST_TIME;
    let mut incoming = Incoming::default();
    let mut piece = [0; 8 << 10];
    loop {
        // A peer that sends a byte now and then still has to finish in time.
        let left = until.saturating_duration_since(Instant::now());
        if left.is_zero() {
            return Ok(Err(Failure::new("the request took too long to come")));
        }
        socket.set_timeouts(Some(left), Some(ANSWER_TIME))?;
        let n = match socket.read(&mut piece) {
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::WouldBlock => continue,
            Err(error) => return Err(error),
        };
        match incoming.push(&piece[..n]) {
            Ok(complete) if complete || n == 0 => return Ok(incoming.request()),
            Ok(_) => {}
            Err(failure) => return Ok(Err(failure)),
        }
    }
}

impl Agent {
    fn answer_line(&self, request: Request, socket: &Socket) -> Result<Reply, Failure> {
        match request {
            Request::Ping => {
                let pong = self.ping();
                Ok(Reply::Pong(Pong {
                    pong: true,
                    numpy_version: pong.numpy_version,
                    pid: std::process::id(),
                    agent_lang: if pong.python { "python" } else { "none" }.into(),
                    warmup_ready: pong.warm.state == WarmState::Ready,
                }))
            }
            Request::Exec { args, timeout } => self.exec_line(args, timeout, socket),
            Request::Eval { code, timeout } => {
                let user = self.user(None).map_err(failure)?;
                let answer = self.python.eval(&code, &user, Some(timeout)).map_err(failure)?;
                let (stdout, stderr) = (answer.stdout, answer.stderr);
                match answer.error {
                    None => {
                        Ok(Reply::Eval(Evaluated { result: answer.result, exit_code: 0, stdout, stderr }))
                    }
                    Some(error) => {
                        Err(Failure { error, exit_code: 1, traceback: answer.traceback, stdout, stderr })
                    }
                }
            }
        }
    }

    fn exec_line(&self, args: Vec<String>, timeout: Duration, socket: &Socket) -> Result<Reply, Failure> {
        let mut args = args.into_iter();
        let cmd = args.next().unwrap_or_default();
        let process = ProcessConfig { cmd, args: args.collect(), ..ProcessConfig::default() };
        let request = StartRequest { process, stdin: Some(false), ..StartRequest::default() };
        let user = self.user(None).map_err(failure)?;
        let (_, listener) = self.processes.start(&request, &user, Some(timeout)).map_err(failure)?;
        let (mut stdout, mut stderr) = (CappedOutput::default(), CappedOutput::default());
        let outcome = loop {
            match listener.next(PEER_TICK) {
                Next::Piece((Source::Stderr, bytes)) => stderr.add(&bytes),
                Next::Piece((_, bytes)) => stdout.add(&bytes),
                Next::End(outcome) => break outcome,
                Next::Idle if socket.is_gone() => return Err(Failure::new("the caller has left")),
                Next::Idle => {}
            }
        };
        let (exit_code, error) = match outcome {
            Outcome::Ended(ExitStatus::Code(code)) => (code, None),
            Outcome::Ended(ExitStatus::Signal { number, .. }) => (128 + number, None),
            Outcome::DeadlineExceeded => {
                (1, Some(format!("its time ran out: it was killed after {} s", timeout.as_secs_f64())))
            }
        };
        Ok(Reply::Exec(Ran {
            stdout: String::from_utf8_lossy(&stdout.bytes).into_owned(),
            stderr: String::from_utf8_lossy(&stderr.bytes).into_owned(),
            exit_code,
            error,
            stdout_truncated: stdout.truncated,
            stderr_truncated: stderr.truncated,
        }))
    }
}

/// Output up to a limit. The rest is read and dropped: the command must be able to end.
#[derive(Default)]
struct CappedOutput {
    bytes: Vec<u8>,
    truncated: bool,
}

impl CappedOutput {
    fn add(&mut self, new: &[u8]) {
        let room = MAX_OUTPUT - self.bytes.len();
        self.bytes.extend_from_slice(&new[..new.len().min(room)]);
        self.truncated |= new.len() > room;
    }
}

fn failure(error: Error) -> Failure {
    let exit_code = match (error.exit_code, error.code) {
        (Some(exit_code), _) => exit_code,
        (None, Code::InvalidArgument) => exit_code::CANNOT_EXECUTE,
        (None, _) => 1,
    };
    Failure { error: error.message, exit_code, ..Failure::default() }
}

/// See the module's page.
fn may_come_in(socket: &Socket, agent: &Agent, gateway: Option<Ipv4Addr>) -> bool {
    let Some((here, there)) = socket.addresses() else { return false };
    if gateway == Some(*there.ip()) {
        return true;
    }
    // One socket of IPv6 can reach IPv4, and is in the other table then.
    let owner = ["/proc/self/net/tcp", "/proc/self/net/tcp6"].into_iter().find_map(|path| {
        let table = sys::read_small_file(Path::new(path), TABLE_LIMIT).ok()?;
        owner(&String::from_utf8_lossy(&table), there, here)
    });
    owner.is_some_and(|uid| uid == 0 || agent.user(None).is_ok_and(|user| user.uid == uid))
}

/// The owner of the connection's end `local`, from a table such as `/proc/net/tcp` or `tcp6`.
fn owner(table: &str, local: SocketAddrV4, remote: SocketAddrV4) -> Option<u32> {
    let names = |address: SocketAddrV4| {
        let ip = u32::from_ne_bytes(address.ip().octets());
        let port = address.port();
        [format!("{ip:08X}:{port:04X}"), format!("0000000000000000FFFF0000{ip:08X}:{port:04X}")]
    };
    let (local, remote) = (names(local), names(remote));
    table.lines().skip(1).find_map(|row| {
        let columns: Vec<&str> = row.split_ascii_whitespace().collect();
        let &[_, from, to, _, _, _, _, uid, _, inode, ..] = columns.as_slice() else { return None };
        let is_it = local.iter().any(|name| name == from) && remote.iter().any(|name| name == to);
        // Without a file it has no owner any more, and the kernel reports 0, which would be root.
        if is_it && inode != "0" { uid.parse().ok() } else { None }
    })
}

#[cfg(test)]
mod tests;

//! One interpreter process and the conversation with it.

use std::{
    collections::BTreeMap,
    fs::{self, File},
    io::{self, Seek, Write},
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc,
        atomic::{AtomicBool, Ordering},
    },
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::EvalResponse,
    connect::{Code, Error},
};
use rustix::{
    event::{PollFd, PollFlags},
    fs::{MemfdFlags, Mode, OFlags},
    io::Errno,
    pipe::PipeFlags,
};
use serde_json::{Value, json};

use crate::{
    process::{self, Cgroup, Cgroups, Part, reaper, spawn},
    sys,
    users::User,
};

/// The script that runs in the interpreter.
const DRIVER: &str = include_str!("driver.py");
/// How it is started: descriptor 5 holds [`DRIVER`].
const BOOTSTRAP: &str = "exec(compile(open(5).read(), '<forkd>', 'exec'), {'__name__': 'forkd'})";
/// The longest message taken from it. Its own limits are lower.
const MAX_MESSAGE: usize = 8 << 20;
/// How much of each output stream one evaluation gives back.
const MAX_OUTPUT: usize = 1 << 20;
/// How long it may take to be gone when it has closed its pipes.
const END_TIME: Duration = Duration::from_secs(1);
/// The size of its output pipes, which fill while nothing is evaluated: threads may go on printing.
const PIPE_SIZE: usize = 1 << 20;

/// The size of the notices pipe: two notices of the greatest length.
const NOTICES_SIZE: usize = 128 << 10;
/// Makes the interpreter read its notices. A real-time signal from the far end of their range, which programs
/// rarely use; `driver.py` knows it too.
const NOTICE_SIGNAL: i32 = 60;
/// The interpreter's reply when it has read all notices.
const HEARD: u8 = b'h';
/// Its message when the first function is registered.
const REGISTERED: u8 = b'r';
/// As much of that as its pipe holds.
const MAX_REPLIES: usize = 64 << 10;

/// Why an evaluation has no answer.
pub(super) enum Stop {
    /// The time was over; it stopped on the interrupt.
    Interrupted,
    /// The time was over; it did not stop.
    Killed,
    /// The interpreter is gone.
    Ended(Ended),
}

/// How the interpreter ended, and what it printed until then.
pub(super) struct Ended {
    pub(super) why: String,
    pub(super) stdout: String,
    pub(super) stderr: String,
}

/// A running interpreter.
pub(super) struct Interpreter {
    child: spawn::Child,
    cgroup: Option<Cgroup>,
    requests: OwnedFd,
    responses: OwnedFd,
    pub(super) notices: Arc<Notices>,
    stdout: Captured,
    stderr: Captured,
    /// Bytes of the message that is arriving.
    incoming: Vec<u8>,
}

/// The way to an interpreter that does not depend on whose turn it is.
pub(crate) struct Notices {
    pid: i32,
    pipe: OwnedFd,
    /// The pipe for [`HEARD`] and [`REGISTERED`].
    replies: OwnedFd,
    /// Whether it had functions or threads when it answered last.
    wakes: AtomicBool,
    /// Whether it does anything but wait for a request.
    evaluating: AtomicBool,
}

impl Notices {
    pub(crate) fn pid(&self) -> i32 {
        self.pid
    }

    /// Whether functions or threads of the interpreter are affected by a fork. To be asked before a
    /// notice is sent.
    pub(super) fn have_listeners(&self) -> bool {
        // Replies to earlier notices, too, are read here.
        let registered = self.read_replies().is_ok_and(|replies| replies.contains(&REGISTERED));
        let has_threads =
            || fs::read_dir(format!("/proc/{}/task", self.pid)).is_ok_and(|tasks| tasks.take(2).count() > 1);
        self.wakes.load(Ordering::Relaxed)
            || self.evaluating.load(Ordering::Relaxed) && (registered || has_threads())
    }

    /// Waits until the interpreter has taken in all notices, or is gone; `false` if that takes longer
    /// than `limit`.
    pub(crate) fn has_heard_within(&self, limit: Duration) -> bool {
        let until = Instant::now() + limit;
        loop {
            match self.read_replies() {
                Ok(replies) if !replies.contains(&HEARD) => {}
                _ => return true,
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return false;
            }
            if sys::poll(&mut [PollFd::new(&self.replies, PollFlags::IN)], Some(left)).is_err() {
                std::thread::sleep(Duration::from_millis(50));
            }
        }
    }

    /// Its messages since the last call; an error if it is gone.
    fn read_replies(&self) -> io::Result<Vec<u8>> {
        let mut replies = Vec::new();
        let mut buf = [0; 256];
        while replies.len() < MAX_REPLIES {
            match rustix::io::read(&self.replies, &mut buf) {
                Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
                Ok(n) => replies.extend_from_slice(&buf[..n]),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => break,
                Err(errno) => return Err(errno.into()),
            }
        }
        Ok(replies)
    }

    /// Sends the news of a fork. A signal goes with it, because the interpreter may be evaluating.
    pub(super) fn send(&self, variables: &BTreeMap<String, String>) -> io::Result<()> {
        let mut notice = vec![0; 4];
        for (name, value) in variables {
            for piece in [name.as_bytes(), b"=", value.as_bytes(), b"\0"] {
                notice.extend_from_slice(piece);
            }
        }
        let len = u32::try_from(notice.len() - 4).map_err(io::Error::other)?;
        notice[..4].copy_from_slice(&len.to_be_bytes());
        let mut rest = notice.as_slice();
        while !rest.is_empty() {
            match rustix::io::write(&self.pipe, rest) {
                Ok(n) => rest = rest.get(n..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                // It ended: the next evaluation reports that.
                Err(Errno::PIPE) => return Ok(()),
                Err(errno) => return Err(errno.into()),
            }
        }
        reaper::signal_main_thread(self.pid, NOTICE_SIGNAL);
        Ok(())
    }
}

/// An output pipe and what one evaluation printed into it.
struct Captured {
    pipe: OwnedFd,
    open: bool,
    bytes: Vec<u8>,
    dropped: u64,
}

impl Captured {
    fn new(pipe: OwnedFd) -> Self {
        Captured { pipe, open: true, bytes: Vec::new(), dropped: 0 }
    }

    /// Reads all that is there, and keeps the beginning.
    fn read(&mut self) {
        let mut buf = [0; 16 << 10];
        // As much as the pipe holds and no more: a process may be writing without end.
        let mut left = PIPE_SIZE + buf.len();
        while self.open && left > 0 {
            match rustix::io::read(&self.pipe, &mut buf) {
                Ok(n) if n > 0 => {
                    let kept = n.min(MAX_OUTPUT.saturating_sub(self.bytes.len()));
                    self.bytes.extend_from_slice(&buf[..kept]);
                    self.dropped += (n - kept) as u64;
                    left = left.saturating_sub(n);
                }
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => return,
                Ok(_) | Err(_) => self.open = false,
            }
        }
    }

    fn take(&mut self) -> String {
        let bytes = std::mem::take(&mut self.bytes);
        let mut text = String::from_utf8_lossy(&bytes).into_owned();
        let dropped = std::mem::take(&mut self.dropped);
        if dropped > 0 {
            text.push_str(&format!("\n[{dropped} bytes more]\n"));
        }
        text
    }
}

impl Interpreter {
    /// Starts `python` and waits until it is ready.
    pub(super) fn start(
        python: &str,
        user: &User,
        env: &BTreeMap<String, String>,
        cgroups: &Arc<Cgroups>,
        deadline: Option<Instant>,
    ) -> Result<Interpreter, Error> {
        let failed = |error: io::Error| {
            Error::new(Code::ResourceExhausted, format!("the guest cannot start an interpreter now: {error}"))
        };
        let pipes = Pipes::new().map_err(failed)?;
        let cgroup = cgroups.create(Part::Python);
        let args = ["-u", "-X", "utf8", "-c", BOOTSTRAP].map(String::from);
        let home = user.resolve("")?;
        let child = spawn::spawn(spawn::Program {
            cmd: python,
            args: &args,
            env,
            cwd: &home,
            cwd_may_be_missing: true,
            user,
            fds: pipes.theirs,
            terminal: false,
            cgroup: cgroup.as_ref().map(Cgroup::folder),
        })
        .map_err(|error| process::explain(error, python, Path::new(&home), user))?;
        let mut interpreter = Interpreter {
            notices: Arc::new(Notices {
                pid: child.pid,
                pipe: pipes.notices,
                replies: pipes.replies,
                wakes: AtomicBool::new(false),
                evaluating: AtomicBool::new(true),
            }),
            child,
            cgroup,
            requests: pipes.requests,
            responses: pipes.responses,
            stdout: Captured::new(pipes.stdout),
            stderr: Captured::new(pipes.stderr),
            incoming: Vec::new(),
        };
        // An interpreter that takes for ever to start cannot be interrupted in any useful way.
        match interpreter.wait_for_answer(deadline, Duration::ZERO) {
            Ok(_) => Ok(interpreter),
            Err(Stop::Ended(ended)) => {
                let message =
                    format!("{python} of this image does not start ({}): {}", ended.why, ended.stderr);
                Err(Error::new(Code::FailedPrecondition, message))
            }
            Err(_) => {
                let message = "the time given is over: the interpreter had not started yet";
                Err(Error::new(Code::DeadlineExceeded, message))
            }
        }
    }

    /// How it ended, if it has.
    pub(super) fn ended(&self) -> Option<String> {
        self.ended_within(Duration::ZERO)
    }

    fn ended_within(&self, wait: Duration) -> Option<String> {
        let mut fds = [PollFd::new(&self.child.pidfd, PollFlags::IN)];
        sys::poll(&mut fds, Some(wait)).ok()?;
        (!fds[0].revents().is_empty()).then(|| process::describe(self.child.exit.wait()))
    }

    /// Evaluates `code`. At the deadline it is interrupted, and killed if it does not stop in `grace`.
    pub(super) fn eval(
        &mut self,
        code: &str,
        deadline: Option<Instant>,
        grace: Duration,
    ) -> Result<EvalResponse, Stop> {
        let request = json!({ "op": "eval", "code": code }).to_string();
        let mut message = (request.len() as u32).to_be_bytes().to_vec();
        message.extend_from_slice(request.as_bytes());
        self.notices.evaluating.store(true, Ordering::Relaxed);
        self.send(&message, deadline)?;
        let answer = self.wait_for_answer(deadline, grace)?;
        let mut response = match serde_json::from_value::<EvalResponse>(answer) {
            Ok(response) => response,
            Err(_) => return Err(Stop::Ended(self.end())),
        };
        response.stdout = self.stdout.take();
        response.stderr = self.stderr.take();
        Ok(response)
    }

    /// Writes a request. The driver is waiting for one; but evaluated code may have stopped it.
    fn send(&mut self, mut message: &[u8], deadline: Option<Instant>) -> Result<(), Stop> {
        while !message.is_empty() {
            match rustix::io::write(&self.requests, message) {
                Ok(n) => message = message.get(n..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    let wait = deadline.map(|deadline| deadline.saturating_duration_since(Instant::now()));
                    if wait.is_some_and(|wait| wait.is_zero()) {
                        self.kill();
                        return Err(Stop::Killed);
                    }
                    let mut fds = [PollFd::new(&self.requests, PollFlags::OUT)];
                    if sys::poll(&mut fds, wait).is_err() {
                        return Err(Stop::Ended(self.end()));
                    }
                }
                Err(_) => return Err(Stop::Ended(self.end())),
            }
        }
        Ok(())
    }

    /// Collects output until an answer is there.
    fn wait_for_answer(&mut self, deadline: Option<Instant>, grace: Duration) -> Result<Value, Stop> {
        let mut interrupted: Option<Instant> = None;
        loop {
            let now = Instant::now();
            let until = match interrupted {
                Some(at) => Some(at + grace),
                None => deadline,
            };
            if until.is_some_and(|until| now >= until) {
                if interrupted.is_some() || grace.is_zero() {
                    self.kill();
                    return Err(Stop::Killed);
                }
                interrupted = Some(now);
                reaper::signal_group(self.child.pid, libc::SIGINT);
                continue;
            }
            let (answered, gone) = self.wait_for_something(until.map(|until| until - now));
            if answered {
                match self.read_answer() {
                    Ok(None) => {}
                    Ok(Some(answer)) => {
                        let wakes = answer.get("wakes").and_then(Value::as_bool).unwrap_or(false);
                        self.notices.wakes.store(wakes, Ordering::Relaxed);
                        self.notices.evaluating.store(false, Ordering::Relaxed);
                        // All it printed before answering is in the pipes by now.
                        self.stdout.read();
                        self.stderr.read();
                        if interrupted.is_some() {
                            self.stdout.take();
                            self.stderr.take();
                            return Err(Stop::Interrupted);
                        }
                        return Ok(answer);
                    }
                    Err(_) => return Err(Stop::Ended(self.end())),
                }
            } else if gone {
                return Err(Stop::Ended(self.end()));
            }
        }
    }

    /// Waits and reads output; returns whether there is something to read of an answer, and whether
    /// the interpreter has ended.
    fn wait_for_something(&mut self, wait: Option<Duration>) -> (bool, bool) {
        let mut fds =
            vec![PollFd::new(&self.responses, PollFlags::IN), PollFd::new(&self.child.pidfd, PollFlags::IN)];
        for captured in [&self.stdout, &self.stderr] {
            if captured.open {
                fds.push(PollFd::new(&captured.pipe, PollFlags::IN));
            }
        }
        if sys::poll(&mut fds, wait).is_err() {
            std::thread::sleep(Duration::from_millis(50));
        }
        let ready = (!fds[0].revents().is_empty(), !fds[1].revents().is_empty());
        self.stdout.read();
        self.stderr.read();
        ready
    }

    /// Reads what is there of an answer; `None` if more is to come. An error means that the writer is not our
    /// driver any more.
    fn read_answer(&mut self) -> io::Result<Option<Value>> {
        let mut buf = [0; 16 << 10];
        match rustix::io::read(&self.responses, &mut buf) {
            Ok(0) => return Err(io::ErrorKind::UnexpectedEof.into()),
            Ok(n) => self.incoming.extend_from_slice(&buf[..n]),
            Err(Errno::AGAIN | Errno::INTR) => return Ok(None),
            Err(errno) => return Err(errno.into()),
        }
        let Some((len, rest)) = self.incoming.split_first_chunk::<4>() else { return Ok(None) };
        let len = u32::from_be_bytes(*len) as usize;
        if len > MAX_MESSAGE || rest.len() > len {
            return Err(io::ErrorKind::InvalidData.into());
        }
        if rest.len() < len {
            return Ok(None);
        }
        let answer = serde_json::from_slice(rest)?;
        self.incoming.clear();
        Ok(Some(answer))
    }

    /// Ends it, if it has not ended already, and returns its exit status.
    fn end(&mut self) -> Ended {
        // Its pipes close a little before it is gone.
        let by_itself = self.ended_within(END_TIME);
        self.kill();
        self.stdout.read();
        self.stderr.read();
        let why = by_itself.unwrap_or_else(|| "it broke the conversation with the agent".into());
        Ended { why, stdout: self.stdout.take(), stderr: self.stderr.take() }
    }

    fn kill(&self) {
        if let Some(cgroup) = &self.cgroup {
            cgroup.kill();
        }
        reaper::signal_group(self.child.pid, libc::SIGKILL);
    }
}

impl Drop for Interpreter {
    fn drop(&mut self) {
        self.kill();
        self.child.exit.wait();
    }
}

/// The pipes between agent and interpreter.
struct Pipes {
    theirs: Vec<OwnedFd>,
    requests: OwnedFd,
    responses: OwnedFd,
    notices: OwnedFd,
    replies: OwnedFd,
    stdout: OwnedFd,
    stderr: OwnedFd,
}

impl Pipes {
    fn new() -> io::Result<Pipes> {
        let pipe = || rustix::pipe::pipe_with(PipeFlags::CLOEXEC);
        let (stdout, their_stdout) = pipe()?;
        let (stderr, their_stderr) = pipe()?;
        let (their_requests, requests) = pipe()?;
        let (responses, their_responses) = pipe()?;
        let (their_notices, notices) = pipe()?;
        let (replies, their_replies) = pipe()?;
        for fd in [&stdout, &stderr, &requests, &responses, &notices, &replies] {
            rustix::io::ioctl_fionbio(fd, true)?;
        }
        for fd in [&stdout, &stderr] {
            // More would be nice, less works.
            let _ = rustix::pipe::fcntl_setpipe_size(fd, PIPE_SIZE);
        }
        let _ = rustix::pipe::fcntl_setpipe_size(&notices, NOTICES_SIZE);
        let null = rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?;
        let mut driver = File::from(rustix::fs::memfd_create("forkd-driver", MemfdFlags::CLOEXEC)?);
        driver.write_all(DRIVER.as_bytes())?;
        driver.rewind()?;
        let theirs = vec![
            null,
            their_stdout,
            their_stderr,
            their_requests,
            their_responses,
            driver.into(),
            their_notices,
            their_replies,
        ];
        Ok(Pipes { theirs, requests, responses, notices, replies, stdout, stderr })
    }
}

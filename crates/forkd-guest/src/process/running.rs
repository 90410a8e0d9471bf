//! One process: starting it, moving its output, feeding it, killing it.

use std::{
    collections::BTreeMap,
    io,
    os::fd::OwnedFd,
    path::Path,
    sync::{
        Arc, Mutex, PoisonError,
        atomic::{AtomicBool, Ordering},
        mpsc,
    },
    thread,
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::{ProcessInfo, PtySize, StartRequest},
    connect::{Code, Error, exit_code},
};
use rustix::{
    event::{PollFd, PollFlags},
    fs::{Mode, OFlags},
    io::Errno,
    pipe::PipeFlags,
    pty::OpenptFlags,
    termios::Winsize,
};

use super::{
    cgroup::{Cgroup, Cgroups, Part},
    output::{Listener, Outcome, Output, PIECE, Source},
    reaper,
    spawn::{self, Child, Program, SpawnError},
};
use crate::{sys, users::User};

/// How long after the end of a process its output is awaited, when another process still holds it open.
const DRAIN_TIME: Duration = Duration::from_millis(200);
/// How often a blocked write looks whether it still makes sense.
const INPUT_TICK: Duration = Duration::from_millis(200);
/// No terminal is larger.
const MAX_TERMINAL: u32 = 10_000;
/// Small: these threads only copy.
const STACK: usize = 128 << 10;

/// A process the agent started.
#[derive(Debug)]
pub(crate) struct Process {
    pub(crate) info: ProcessInfo,
    output: Arc<Output>,
    input: Mutex<Option<OwnedFd>>,
    terminal: Option<OwnedFd>,
    /// Taken when the process has ended.
    cgroup: Mutex<Option<Cgroup>>,
    pid: i32,
    timed_out: AtomicBool,
    /// Set when the process itself is gone, before any listener gets the event.
    gone: AtomicBool,
}

/// The agent's ends of a process's descriptors, and the process's own.
struct Wiring {
    theirs: Vec<OwnedFd>,
    outputs: Vec<(Source, OwnedFd)>,
    input: Option<OwnedFd>,
    terminal: Option<OwnedFd>,
}

/// How a process is to run.
pub(crate) struct Launch<'l> {
    pub(crate) request: &'l StartRequest,
    pub(crate) user: &'l User,
    pub(crate) env: BTreeMap<String, String>,
    pub(crate) limit: Option<Duration>,
    pub(crate) cgroups: &'l Arc<Cgroups>,
    pub(crate) part: Part,
}

impl Process {
    /// Starts a process, with a first listener. `started` is called before anything else happens to it,
    /// `ended` once it is over and before listeners get the event.
    pub(crate) fn start(
        launch: Launch,
        started: impl FnOnce(&Arc<Process>),
        ended: impl FnOnce(&Arc<Process>) + Send + 'static,
    ) -> Result<(Arc<Process>, Listener), Error> {
        // The thread first: without it, a started process could not be undone.
        let (hand_over, pump) = mpsc::sync_channel::<Pump>(1);
        let looks_after = move || {
            if let Ok(pump) = pump.recv() {
                pump.run(ended);
            }
        };
        let thread = thread::Builder::new().name("process".into()).stack_size(STACK);
        thread.spawn(looks_after).map_err(no_resources)?;

        let config = &launch.request.process;
        let Wiring { theirs, outputs, input, terminal } = wire(launch.request, launch.user)?;
        let output = Output::new().map_err(no_resources)?;
        let listener = output.listen();
        let cwd = launch.user.resolve(config.cwd.as_deref().unwrap_or_default())?;
        let cgroup = launch.cgroups.create(launch.part);
        let child = spawn::spawn(Program {
            cmd: &config.cmd,
            args: &config.args,
            env: &launch.env,
            cwd: &cwd,
            cwd_may_be_missing: config.cwd.is_none(),
            user: launch.user,
            fds: theirs,
            terminal: terminal.is_some(),
            cgroup: cgroup.as_ref().map(Cgroup::folder),
        })
        .map_err(|error| explain(error, &config.cmd, &cwd, launch.user))?;

        let pid = child.pid;
        let process = Arc::new(Process {
            info: ProcessInfo { config: config.clone(), pid: pid as u32, tag: launch.request.tag.clone() },
            output,
            input: Mutex::new(input),
            terminal,
            cgroup: Mutex::new(cgroup),
            pid,
            timed_out: AtomicBool::new(false),
            gone: AtomicBool::new(false),
        });
        // A limit beyond what the clock can count is none.
        let deadline = launch.limit.and_then(|limit| Instant::now().checked_add(limit));
        started(&process);
        // The thread is waiting for exactly this.
        let _ = hand_over.send(Pump { process: process.clone(), child, outputs, deadline });
        Ok((process, listener))
    }

    /// Starts to listen to its output.
    pub(crate) fn listen(&self) -> Listener {
        self.output.listen()
    }

    /// Whether it is over.
    pub(crate) fn has_ended(&self) -> bool {
        self.output.is_finished()
    }

    /// Signals its process group. `false` if it has ended.
    pub(crate) fn signal(&self, signal: i32) -> bool {
        reaper::signal_group(self.pid, signal)
    }

    /// Kills it and everything it started.
    pub(crate) fn kill_all(&self) {
        if let Some(cgroup) = &*self.cgroup.lock().unwrap_or_else(PoisonError::into_inner) {
            cgroup.kill();
        }
        reaper::signal_group(self.pid, libc::SIGKILL);
    }

    /// Writes all of `bytes` to its standard input or terminal, as fast as it reads.
    pub(crate) fn send_input(&self, bytes: &[u8]) -> Result<(), Error> {
        // Held while writing: the bytes of two calls must not mix.
        let input = self.input.lock().unwrap_or_else(PoisonError::into_inner);
        let Some(fd) = input.as_ref() else {
            return Err(Error::new(Code::FailedPrecondition, "its standard input is closed"));
        };
        let mut left = bytes;
        while !left.is_empty() {
            match rustix::io::write(fd, left) {
                Ok(n) => left = left.get(n..).unwrap_or_default(),
                Err(Errno::INTR) => {}
                Err(Errno::AGAIN) => {
                    // A background process may hold the pipe open and never read it.
                    if self.gone.load(Ordering::Relaxed) {
                        return Err(Error::new(Code::NotFound, "the process has ended"));
                    }
                    let mut fds = [PollFd::new(fd, PollFlags::OUT)];
                    sys::poll(&mut fds, Some(INPUT_TICK)).map_err(no_resources)?;
                }
                Err(Errno::PIPE | Errno::IO) => {
                    let message = "the process has closed its standard input";
                    return Err(Error::new(Code::FailedPrecondition, message));
                }
                Err(errno) => return Err(no_resources(errno.into())),
            }
        }
        Ok(())
    }

    /// Lets it read the end of its standard input.
    pub(crate) fn close_input(&self) -> Result<(), Error> {
        if self.terminal.is_some() {
            let message = "a terminal has no end of input; send it the byte 0x04 instead";
            return Err(Error::new(Code::FailedPrecondition, message));
        }
        *self.input.lock().unwrap_or_else(PoisonError::into_inner) = None;
        Ok(())
    }

    /// Gives its terminal another size.
    pub(crate) fn resize(&self, size: PtySize) -> Result<(), Error> {
        let Some(terminal) = &self.terminal else {
            return Err(Error::new(Code::FailedPrecondition, "the process has no terminal"));
        };
        rustix::termios::tcsetwinsize(terminal, winsize(size)?).map_err(|errno| no_resources(errno.into()))
    }
}

fn no_resources(error: io::Error) -> Error {
    Error::new(Code::ResourceExhausted, format!("the guest cannot start or serve a process now: {error}"))
}

fn winsize(size: PtySize) -> Result<Winsize, Error> {
    let side = |n: u32| u16::try_from(n.min(MAX_TERMINAL)).ok().filter(|n| *n > 0);
    let (Some(ws_col), Some(ws_row)) = (side(size.cols), side(size.rows)) else {
        return Err(Error::new(Code::InvalidArgument, "a terminal has at least one column and one row"));
    };
    Ok(Winsize { ws_col, ws_row, ws_xpixel: 0, ws_ypixel: 0 })
}

/// Makes the descriptors a process starts with.
fn wire(request: &StartRequest, user: &User) -> Result<Wiring, Error> {
    match request.pty {
        Some(pty) => wire_terminal(winsize(pty.size)?, user).map_err(no_resources),
        None => wire_pipes(request.stdin != Some(false)).map_err(no_resources),
    }
}

fn wire_terminal(size: Winsize, user: &User) -> io::Result<Wiring> {
    let flags = OpenptFlags::RDWR | OpenptFlags::NOCTTY | OpenptFlags::CLOEXEC;
    let master = rustix::pty::openpt(flags)?;
    rustix::pty::unlockpt(&master)?;
    rustix::termios::tcsetwinsize(&master, size)?;
    let slave = rustix::pty::ioctl_tiocgptpeer(&master, flags)?;
    // Programs open their terminal again by name.
    rustix::fs::fchown(&slave, Some(rustix::fs::Uid::from_raw(user.uid)), None)?;
    rustix::io::ioctl_fionbio(&master, true)?;
    let theirs = vec![slave.try_clone()?, slave.try_clone()?, slave];
    let (input, terminal) = (Some(master.try_clone()?), Some(master.try_clone()?));
    Ok(Wiring { theirs, outputs: vec![(Source::Terminal, master)], input, terminal })
}

fn wire_pipes(with_stdin: bool) -> io::Result<Wiring> {
    let (stdout, their_stdout) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    let (stderr, their_stderr) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
    // Only our ends must not block: the flag sits on each end by itself.
    rustix::io::ioctl_fionbio(&stdout, true)?;
    rustix::io::ioctl_fionbio(&stderr, true)?;
    let (their_stdin, input) = if with_stdin {
        let (theirs, ours) = rustix::pipe::pipe_with(PipeFlags::CLOEXEC)?;
        rustix::io::ioctl_fionbio(&ours, true)?;
        (theirs, Some(ours))
    } else {
        (rustix::fs::open("/dev/null", OFlags::RDONLY | OFlags::CLOEXEC, Mode::empty())?, None)
    };
    let theirs = vec![their_stdin, their_stdout, their_stderr];
    Ok(Wiring {
        theirs,
        outputs: vec![(Source::Stdout, stdout), (Source::Stderr, stderr)],
        input,
        terminal: None,
    })
}

/// The reason why a program did not start, the remedy, and the exit status for it.
pub(crate) fn explain(error: SpawnError, cmd: &str, cwd: &Path, user: &User) -> Error {
    let cannot = |message: String| (exit_code::CANNOT_EXECUTE, message);
    let (exit_code, message) = match error {
        SpawnError::Nul => cannot(error.to_string()),
        SpawnError::Cwd(cause) => {
            cannot(format!("cannot use {} as the working directory of {}: {cause}", cwd.display(), user.name))
        }
        SpawnError::Exec(cause) => match cause.raw_os_error() {
            Some(libc::ENOENT) if cmd.contains('/') && Path::new(cmd).exists() => {
                cannot(format!("{cmd}: the interpreter or loader it names is not in this image"))
            }
            // Daemons of earlier versions look for these words: they do not know the exit status.
            Some(libc::ENOENT | libc::ENOTDIR) => {
                (exit_code::NOT_FOUND, format!("{cmd}: not found in this image"))
            }
            Some(libc::EACCES) => {
                cannot(format!("{cmd}: {} may not execute it (permission denied)", user.name))
            }
            Some(libc::ENOEXEC) => {
                cannot(format!("{cmd}: not a program; a script needs a first line such as #!/bin/sh"))
            }
            Some(libc::E2BIG) => cannot(format!("{cmd}: its arguments and environment are too long")),
            _ => cannot(format!("{cmd}: cannot be executed: {cause}")),
        },
        SpawnError::System(cause) => return no_resources(cause),
    };
    Error::new(Code::InvalidArgument, message).with_exit_code(exit_code)
}

/// The thread of a process: moves output, keeps the deadline, notices the end.
struct Pump {
    process: Arc<Process>,
    child: Child,
    outputs: Vec<(Source, OwnedFd)>,
    deadline: Option<Instant>,
}

/// The remaining output once the process has ended.
struct Draining {
    /// Bytes that were in each pipe at the end, and so may be the process's own: these are never
    /// given up. In the order of the outputs.
    owed: Vec<u64>,
    /// When to stop waiting for processes that still hold the pipes.
    until: Instant,
}

impl Pump {
    fn run(mut self, ended: impl FnOnce(&Arc<Process>)) {
        let mut draining: Option<Draining> = None;
        while !self.is_done(draining.as_ref()) {
            let wait = self.enforce_deadline(draining.as_ref());
            let room = self.process.output.has_room();
            let (exited, readable) = self.wait_for_something(wait, room, draining.is_none());
            if exited && draining.is_none() {
                let owed = self.outputs.iter().map(|(_, fd)| sys::bytes_waiting(fd)).collect();
                self.process.gone.store(true, Ordering::Relaxed);
                draining = Some(Draining { owed, until: Instant::now() + DRAIN_TIME });
            }
            self.move_output(&readable, draining.as_mut());
        }
        let status = self.child.exit.wait();
        let outcome = match self.process.timed_out.load(Ordering::Relaxed) {
            true => Outcome::DeadlineExceeded,
            false => Outcome::Ended(status),
        };
        *self.process.input.lock().unwrap_or_else(PoisonError::into_inner) = None;
        *self.process.cgroup.lock().unwrap_or_else(PoisonError::into_inner) = None;
        ended(&self.process);
        self.process.output.finish(outcome);
        drop(self.process);
        discard(self.outputs);
    }

    fn is_done(&self, draining: Option<&Draining>) -> bool {
        draining.is_some_and(|draining| {
            self.outputs.is_empty()
                || (draining.owed.iter().all(|owed| *owed == 0) && Instant::now() >= draining.until)
        })
    }

    /// Kills the process if its time is over; returns how long nothing has to be done.
    fn enforce_deadline(&self, draining: Option<&Draining>) -> Option<Duration> {
        let now = Instant::now();
        if let Some(draining) = draining {
            // With output owed to a slow reader there is no hurry, but the clock must not spin either.
            return Some(draining.until.saturating_duration_since(now).max(Duration::from_millis(5)));
        }
        let deadline = self.deadline?;
        if self.process.timed_out.load(Ordering::Relaxed) {
            return None;
        }
        if now >= deadline {
            self.process.timed_out.store(true, Ordering::Relaxed);
            self.process.kill_all();
            return None;
        }
        Some(deadline.saturating_duration_since(now))
    }

    /// Waits; returns whether the process has ended and which outputs can be read.
    fn wait_for_something(&self, wait: Option<Duration>, room: bool, running: bool) -> (bool, Vec<bool>) {
        let nothing = PollFlags::empty();
        let mut fds: Vec<PollFd> = vec![PollFd::from_borrowed_fd(self.process.output.room(), PollFlags::IN)];
        if running {
            fds.push(PollFd::new(&self.child.pidfd, PollFlags::IN));
        }
        let first_output = fds.len();
        if room {
            fds.extend(self.outputs.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)));
        }
        if sys::poll(&mut fds, wait).is_err() {
            // Out of memory, which passes: do not spin meanwhile.
            thread::sleep(Duration::from_millis(50));
            return (false, vec![false; self.outputs.len()]);
        }
        let exited = running && fds[1].revents() != nothing;
        let mut readable: Vec<bool> = fds[first_output..].iter().map(|fd| fd.revents() != nothing).collect();
        readable.resize(self.outputs.len(), false);
        (exited, readable)
    }

    /// Reads a piece from each readable output, and removes those that have ended.
    fn move_output(&mut self, readable: &[bool], mut draining: Option<&mut Draining>) {
        let mut buf = [0; PIECE];
        let mut index = 0;
        for readable in readable {
            let (source, fd) = &self.outputs[index];
            let read = if *readable { rustix::io::read(fd, &mut buf) } else { Err(Errno::AGAIN) };
            match read {
                Ok(n) if n > 0 => {
                    self.process.output.publish(*source, &buf[..n]);
                    if let Some(draining) = &mut draining {
                        draining.owed[index] = draining.owed[index].saturating_sub(n as u64);
                    }
                    index += 1;
                }
                Err(Errno::AGAIN | Errno::INTR) => index += 1,
                // The end of a pipe, or EIO: the end of a terminal.
                Ok(_) | Err(_) => {
                    self.outputs.remove(index);
                    if let Some(draining) = &mut draining {
                        draining.owed.remove(index);
                    }
                }
            }
        }
    }
}

/// Reads and discards the output of background processes: without a reader SIGPIPE would kill them, or they
/// would block.
fn discard(mut outputs: Vec<(Source, OwnedFd)>) {
    let mut buf = [0; PIECE];
    while !outputs.is_empty() {
        let mut fds: Vec<PollFd> = outputs.iter().map(|(_, fd)| PollFd::new(fd, PollFlags::IN)).collect();
        if sys::poll(&mut fds, None).is_err() {
            return;
        }
        outputs.retain(|(_, fd)| {
            !matches!(rustix::io::read(fd, &mut buf), Ok(0) | Err(Errno::IO | Errno::BADF | Errno::INVAL))
        });
    }
}

//! The listening socket for clients on the host, and their connections until they have sent a port.
//!
//! Also the descriptors the device has watched: the listening socket, the timer and the socket of every
//! client and connection. A socket keeps its token from here when it becomes a connection.

use std::collections::HashMap;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::time::{Duration, Instant};

use rustix::io::{Errno, read, retry_on_intr};
use rustix::net::{RecvFlags, SocketFlags, accept_with, recv};
use rustix::time::{
    Itimerspec, TimerfdClockId, TimerfdFlags, TimerfdTimerFlags, Timespec, timerfd_create, timerfd_settime,
};

use crate::event_loop::{Interest, Poller};

/// Token of the listening socket.
pub(super) const LISTENER: u32 = 0;
/// Token of the timer.
pub(super) const TIMER: u32 = 1;
const FIRST_TOKEN: u32 = 2;
/// The most clients that have not sent a port yet; the others wait in the listening socket.
const MAX_PENDING: usize = 64;
/// How long a client has to send it.
const CONNECT_TIMEOUT: Duration = Duration::from_secs(5);
/// The longest line, with its end: `CONNECT 4294967295\n` and a little.
const MAX_LINE: usize = 32;
/// Period, in seconds, of the check for expired deadlines, while there are any.
const TICK: i64 = 1;

struct PendingConnect {
    socket: OwnedFd,
    deadline: Instant,
}

/// The watched descriptors, once a loop serves the device.
struct Watch {
    poller: Poller,
    timer: OwnedFd,
    timer_runs: bool,
}

pub(super) struct HostListener {
    listener: UnixListener,
    pending: HashMap<u32, PendingConnect>,
    next_token: u32,
    /// Clients may wait in the listening socket.
    waiting: bool,
    watch: Option<Watch>,
}

impl HostListener {
    pub(super) fn new(listener: UnixListener) -> HostListener {
        HostListener {
            listener,
            pending: HashMap::new(),
            next_token: FIRST_TOKEN,
            waiting: true,
            watch: None,
        }
    }

    pub(super) fn len(&self) -> usize {
        self.pending.len()
    }

    pub(super) fn attach(&mut self, poller: Poller) -> io::Result<()> {
        let timer =
            timerfd_create(TimerfdClockId::Monotonic, TimerfdFlags::NONBLOCK | TimerfdFlags::CLOEXEC)?;
        poller.add(self.listener.as_fd(), LISTENER, Interest::Read)?;
        poller.add(timer.as_fd(), TIMER, Interest::Read)?;
        self.watch = Some(Watch { poller, timer, timer_runs: false });
        self.waiting = true;
        Ok(())
    }

    /// A token that neither a caller nor anything that is `taken` has.
    pub(super) fn new_token(&mut self, taken: impl Fn(u32) -> bool) -> u32 {
        loop {
            let token = self.next_token;
            self.next_token = token.wrapping_add(1).max(FIRST_TOKEN);
            if !taken(token) && !self.pending.contains_key(&token) {
                return token;
            }
        }
    }

    pub(super) fn watch(&self, socket: BorrowedFd<'_>, token: u32) -> io::Result<()> {
        self.watch.as_ref().map_or(Ok(()), |watch| watch.poller.add(socket, token, Interest::ReadWrite))
    }

    pub(super) fn unwatch(&self, socket: BorrowedFd<'_>) {
        if let Some(watch) = &self.watch {
            watch.poller.remove(socket);
        }
    }

    /// The listening socket became ready.
    pub(super) fn accept_ready(&mut self) {
        self.waiting = true;
    }

    /// Accepts clients, until there are `room` of them. While the guest has no driver they are turned away at
    /// once: a client that is too early can try again.
    pub(super) fn accept(&mut self, room: usize, active: bool, taken: impl Fn(u32) -> bool) {
        for _ in 0..MAX_PENDING {
            if !self.waiting || self.pending.len() >= room.min(MAX_PENDING) {
                return;
            }
            match retry_on_intr(|| accept_with(&self.listener, SocketFlags::CLOEXEC)) {
                Ok(socket) if active => self.add_pending(socket, &taken),
                Ok(_) | Err(Errno::CONNABORTED) => {}
                Err(Errno::AGAIN) => self.waiting = false,
                // Out of descriptors or memory: the timer tries again.
                Err(_) => return self.start_timer(),
            }
        }
        self.start_timer();
    }

    fn add_pending(&mut self, socket: OwnedFd, taken: impl Fn(u32) -> bool) {
        let token = self.new_token(taken);
        if self.watch(socket.as_fd(), token).is_ok() {
            self.pending.insert(token, PendingConnect { socket, deadline: Instant::now() + CONNECT_TIMEOUT });
            self.start_timer();
        }
    }

    /// A client's socket became ready. Once it has sent its port, it is not pending any more: its socket and
    /// the port are returned. A client that sends anything else is turned away.
    pub(super) fn read_port(&mut self, token: u32) -> Option<(OwnedFd, u32)> {
        let connect = self.pending.get(&token)?;
        let mut line = [0; MAX_LINE];
        // Looked at first and taken then, so that what follows the line stays in the socket.
        let len =
            match retry_on_intr(|| recv(&connect.socket, &mut line, RecvFlags::PEEK | RecvFlags::DONTWAIT)) {
                Err(Errno::AGAIN) => return None,
                other => other.map_or(0, |(len, _)| len),
            };
        let end = line[..len].iter().position(|byte| *byte == b'\n');
        if end.is_none() && (1..MAX_LINE).contains(&len) {
            return None;
        }
        let connect = self.pending.remove(&token)?;
        let port = end.and_then(|end| parse(&line[..end]));
        let taken = end.map(|end| {
            retry_on_intr(|| recv(&connect.socket, &mut line[..=end], RecvFlags::DONTWAIT))
                .map(|(len, _)| len)
        });
        match port {
            Some(port) if taken == end.map(|end| Ok(end + 1)) => Some((connect.socket, port)),
            _ => {
                self.unwatch(connect.socket.as_fd());
                None
            }
        }
    }

    /// The timer ticked: turns away clients that have not sent a port in time. `others` is whether a
    /// connection needs the next tick.
    pub(super) fn sweep(&mut self, now: Instant, others: bool) {
        let late = self.pending.extract_if(|_, connect| connect.deadline <= now);
        for (_, connect) in late.collect::<Vec<_>>() {
            self.unwatch(connect.socket.as_fd());
        }
        let Some(watch) = &mut self.watch else { return };
        // How often it has ticked does not matter.
        let _ = read(&watch.timer, &mut [0u8; 8]);
        if !others && self.pending.is_empty() && !self.waiting {
            watch.set_timer(false);
        }
    }

    /// Makes the timer tick: there is a deadline.
    pub(super) fn start_timer(&mut self) {
        if let Some(watch) = &mut self.watch {
            watch.set_timer(true);
        }
    }

    /// Turns everybody away.
    pub(super) fn clear(&mut self) {
        for (_, connect) in std::mem::take(&mut self.pending) {
            self.unwatch(connect.socket.as_fd());
        }
    }
}

impl Watch {
    fn set_timer(&mut self, runs: bool) {
        if self.timer_runs == runs {
            return;
        }
        let tick = Timespec { tv_sec: if runs { TICK } else { 0 }, tv_nsec: 0 };
        let setting = Itimerspec { it_interval: tick, it_value: tick };
        // It cannot fail for a timer and a time that are valid.
        if timerfd_settime(&self.timer, TimerfdTimerFlags::empty(), &setting).is_ok() {
            self.timer_runs = runs;
        }
    }
}

/// The port of `CONNECT port`.
fn parse(line: &[u8]) -> Option<u32> {
    std::str::from_utf8(line).ok()?.strip_prefix("CONNECT ")?.parse().ok()
}

//! Forwarding: the host connects to a TCP port of the guest, through vsock.
//!
//! The host opens a connection to [`FORWARD_PORT`] and sends the port's number as a line (`49999\n`). The agent
//! connects to that port on the guest's loopback and answers `OK\n`, or `NO ` and the reason as a line. After `OK`
//! it passes bytes both ways, until both ends have finished sending or one of them fails. So a server in the guest
//! needs no network, and needs to listen on loopback only.
//!
//! Clients of most ports need no token, and may hold their connections for ever. So some of the connections are for
//! the code interpreter alone. The agent's own JSON-lines port is never forwarded: that service trusts processes of
//! root on loopback, and the agent is one.
//!
//! [`FORWARD_PORT`]: forkd_protocol::agent::FORWARD_PORT

use std::{
    io::{self, Read, Write},
    net::{Ipv4Addr, Ipv6Addr, SocketAddr, TcpStream},
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, atomic::AtomicUsize},
    time::Duration,
};

use forkd_protocol::agent::{CODE_PORT, FORWARD_LINE};
use rustix::{
    event::{PollFd, PollFlags},
    io::Errno,
    net::{RecvFlags, SendFlags, Shutdown},
};

use crate::{
    listener::{BACK_OFF, Service, Slot, accept_all},
    sys::{self, Socket},
};

/// The most connections at once to all ports but the code interpreter's.
const MAX_CONNECTIONS: usize = 256;
/// The connections that the code interpreter's port has besides.
const CODE_RESERVE: usize = 32;
/// The answer to a connection without a place. The daemon knows it by these words.
const TOO_MANY: &str = "too many connections";
/// How long the host may take to name the port.
const REQUEST_TIME: Duration = Duration::from_secs(10);
/// How long a server in the guest may take to accept.
const CONNECT_TIME: Duration = Duration::from_secs(5);
/// How often a silent connection looks whether its host is still there: poll does not report that on vsock.
const PEER_TICK: Duration = Duration::from_secs(2);
/// Bytes buffered for each direction.
const BUFFER: usize = 64 << 10;

/// Serves all connections that reach `listener`. `line_port` is the port of the agent's own JSON-lines service, if it
/// runs. Returns when the listener itself is broken.
pub(crate) fn serve(listener: &OwnedFd, line_port: Option<u16>) -> io::Error {
    let forwarder = Forwarder { line_port, others: Arc::default() };
    let serve = Box::new(move |host| forwarder.forward(host));
    accept_all(listener, Service { name: "forward", max: MAX_CONNECTIONS + CODE_RESERVE, turn_away, serve })
}

fn turn_away(mut host: Socket) {
    let _ = host.set_timeouts(Some(BACK_OFF), Some(BACK_OFF));
    let _ = host.write_all(format!("NO {TOO_MANY}\n").as_bytes());
}

/// What all connections share.
struct Forwarder {
    line_port: Option<u16>,
    /// The number of connections to other ports than the code interpreter's.
    others: Arc<AtomicUsize>,
}

impl Forwarder {
    /// Serves one connection. An error ends it; the host sees the end.
    fn forward(&self, mut host: Socket) {
        if host.set_timeouts(Some(REQUEST_TIME), Some(REQUEST_TIME)).is_err() {
            return;
        }
        let connected = read_port(&mut host).and_then(|port| {
            let slot = self.admit(port)?;
            Ok((connect(port)?, slot))
        });
        match connected {
            Ok((server, _slot)) => {
                if host.write_all(b"OK\n").is_ok() {
                    let _ = relay(&host, &server);
                }
            }
            Err(error) => _ = host.write_all(format!("NO {error}\n").as_bytes()),
        }
    }

    /// The place of a connection to `port`; the code interpreter's port has places of its own.
    fn admit(&self, port: u16) -> io::Result<Option<Slot>> {
        if self.line_port == Some(port) {
            let text = "this port is the agent's own, and is not forwarded";
            return Err(io::Error::new(io::ErrorKind::PermissionDenied, text));
        }
        if port == CODE_PORT {
            return Ok(None);
        }
        let slot = Slot::take(&self.others, MAX_CONNECTIONS);
        slot.map(Some).ok_or_else(|| io::Error::other(TOO_MANY))
    }
}

fn read_port(host: &mut Socket) -> io::Result<u16> {
    let bad = || io::Error::new(io::ErrorKind::InvalidInput, "the first line must be a TCP port, 1 to 65535");
    let mut line = Vec::new();
    let mut byte = [0];
    // One byte at a time: what follows the line belongs to the server.
    while host.read(&mut byte)? == 1 {
        match byte[0] {
            b'\n' => {
                let port = std::str::from_utf8(&line).ok().and_then(|line| line.parse().ok());
                return port.filter(|port| *port != 0).ok_or_else(bad);
            }
            byte if line.len() < FORWARD_LINE => line.push(byte),
            _ => return Err(bad()),
        }
    }
    Err(bad())
}

/// Connects to the port on loopback. A server may listen on either of its addresses.
fn connect(port: u16) -> io::Result<TcpStream> {
    let over = |address: SocketAddr| TcpStream::connect_timeout(&address, CONNECT_TIME);
    let server = over((Ipv4Addr::LOCALHOST, port).into()).or_else(|first| match first.kind() {
        io::ErrorKind::ConnectionRefused => over((Ipv6Addr::LOCALHOST, port).into()).map_err(|_| first),
        _ => Err(first),
    })?;
    server.set_nodelay(true)?;
    Ok(server)
}

/// One direction of a connection.
struct Direction<'s> {
    from: BorrowedFd<'s>,
    to: BorrowedFd<'s>,
    buffer: Box<[u8]>,
    /// The bytes of the buffer that are to be sent.
    pending: std::ops::Range<usize>,
    /// Whether `from` has finished sending.
    ended: bool,
    /// Whether that was passed on.
    closed: bool,
}

impl<'s> Direction<'s> {
    fn new(from: BorrowedFd<'s>, to: BorrowedFd<'s>) -> Self {
        Direction { from, to, buffer: vec![0; BUFFER].into(), pending: 0..0, ended: false, closed: false }
    }

    fn wants_input(&self) -> bool {
        !self.ended && self.pending.is_empty()
    }

    /// Moves what can be moved without waiting.
    fn advance(&mut self) -> io::Result<()> {
        loop {
            if !self.pending.is_empty() {
                let flags = SendFlags::NOSIGNAL | SendFlags::DONTWAIT;
                match rustix::net::send(self.to, &self.buffer[self.pending.clone()], flags) {
                    Ok(sent) => self.pending.start += sent,
                    Err(Errno::AGAIN) => return Ok(()),
                    Err(Errno::INTR) => {}
                    Err(error) => return Err(error.into()),
                }
                continue;
            }
            if self.ended {
                if !self.closed {
                    self.closed = true;
                    // The peer may be gone already.
                    let _ = rustix::net::shutdown(self.to, Shutdown::Write);
                }
                return Ok(());
            }
            match rustix::net::recv(self.from, &mut *self.buffer, RecvFlags::DONTWAIT) {
                Ok((0, _)) => self.ended = true,
                Ok((received, _)) => self.pending = 0..received,
                Err(Errno::AGAIN) => return Ok(()),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }
}

/// Passes bytes both ways.
fn relay(host: &Socket, server: &TcpStream) -> io::Result<()> {
    let (host_fd, server_fd) = (host.as_fd(), server.as_fd());
    let mut inward = Direction::new(host_fd, server_fd);
    let mut outward = Direction::new(server_fd, host_fd);
    loop {
        inward.advance()?;
        outward.advance()?;
        if inward.closed && outward.closed {
            return Ok(());
        }
        let events = |input: &Direction, output: &Direction| {
            let mut events = PollFlags::empty();
            events.set(PollFlags::IN, input.wants_input());
            events.set(PollFlags::OUT, !output.pending.is_empty());
            events
        };
        // A descriptor without events is left out: its hang-up would be reported again and again.
        let mut fds = Vec::with_capacity(2);
        for (fd, events) in [(host_fd, events(&inward, &outward)), (server_fd, events(&outward, &inward))] {
            if !events.is_empty() {
                fds.push(PollFd::from_borrowed_fd(fd, events));
            }
        }
        sys::poll(&mut fds, Some(PEER_TICK))?;
        if fds.iter().all(|fd| fd.revents().is_empty()) && host.has_left() {
            return Ok(());
        }
    }
}

#[cfg(test)]
mod tests {
    use std::{
        net::{TcpListener, TcpStream},
        os::unix::net::UnixStream,
        thread,
    };

    use super::*;

    /// The port of the JSON-lines service.
    const LINES: u16 = 1;

    /// The host's end of a new connection.
    fn dial(request: &[u8]) -> UnixStream {
        let (mut host, agent) = UnixStream::pair().unwrap();
        host.set_read_timeout(Some(Duration::from_secs(20))).unwrap();
        let forwarder = Forwarder { line_port: Some(LINES), others: Arc::default() };
        thread::spawn(move || forwarder.forward(agent.into()));
        host.write_all(request).unwrap();
        host
    }

    fn line(host: &mut UnixStream) -> String {
        let mut line = Vec::new();
        let mut byte = [0];
        while host.read(&mut byte).unwrap() == 1 && byte[0] != b'\n' {
            line.push(byte[0]);
        }
        String::from_utf8(line).unwrap()
    }

    fn serve_once(serve: impl FnOnce(TcpStream) + Send + 'static) -> u16 {
        let listener = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap();
        let port = listener.local_addr().unwrap().port();
        thread::spawn(move || serve(listener.accept().unwrap().0));
        port
    }

    #[test]
    fn bytes_go_both_ways_and_each_end_can_finish_first() {
        // More than all buffers between the ends hold, so that both directions have to wait.
        let sent: Vec<u8> = (0..8_000_000u32).map(|n| (n / 7) as u8).collect();
        let echo = |mut stream: TcpStream| {
            let mut all = Vec::new();
            stream.read_to_end(&mut all).unwrap();
            stream.write_all(&all).unwrap();
        };
        let port = serve_once(echo);
        // The first bytes for the server come in one piece with the line.
        let mut host = dial(&[format!("{port}\n").as_bytes(), &sent[..10]].concat());
        assert_eq!(line(&mut host), "OK");
        let (mut writer, rest) = (host.try_clone().unwrap(), sent[10..].to_vec());
        let writing = thread::spawn(move || {
            writer.write_all(&rest).unwrap();
            writer.shutdown(std::net::Shutdown::Write).unwrap();
        });
        let mut received = Vec::new();
        host.read_to_end(&mut received).unwrap();
        writing.join().unwrap();
        assert!(received == sent, "{} bytes of {}", received.len(), sent.len());

        let port = serve_once(|mut stream| stream.write_all(b"bye").unwrap());
        let mut host = dial(format!("{port}\n").as_bytes());
        assert_eq!(line(&mut host), "OK");
        let mut received = Vec::new();
        host.read_to_end(&mut received).unwrap();
        assert_eq!(received, b"bye");
    }

    #[test]
    fn a_server_sees_that_its_host_has_gone() {
        let (sender, receiver) = std::sync::mpsc::channel();
        let port = serve_once(move |mut stream| {
            sender.send(stream.read_to_end(&mut Vec::new()).is_ok()).unwrap();
        });
        let mut host = dial(format!("{port}\n").as_bytes());
        assert_eq!(line(&mut host), "OK");
        drop(host);
        receiver.recv_timeout(Duration::from_secs(20)).unwrap();
    }

    #[test]
    fn a_closed_port_and_a_bad_request_get_a_reason() {
        let closed = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).unwrap().local_addr().unwrap().port();
        let mut host = dial(format!("{closed}\n").as_bytes());
        assert!(line(&mut host).contains("refused"));
        for bad in ["\n", "0\n", "65536\n", "-1\n", "http\n", "80 \n", "1234567890123\n"] {
            let answer = line(&mut dial(bad.as_bytes()));
            assert!(answer.starts_with("NO ") && answer.contains("1 to 65535"), "{bad:?}: {answer}");
        }
    }

    #[test]
    fn clients_of_other_ports_leave_places_for_the_code_interpreter() {
        let forwarder = Forwarder { line_port: None, others: Arc::default() };
        let held: Vec<_> = (0..MAX_CONNECTIONS).map(|_| forwarder.admit(8000).unwrap()).collect();
        let refused = forwarder.admit(8001).err().unwrap();
        assert_eq!(refused.to_string(), TOO_MANY);
        forwarder.admit(CODE_PORT).unwrap();
        drop(held);
        forwarder.admit(8001).unwrap();
    }

    #[test]
    fn the_agents_own_port_is_not_forwarded() {
        let answer = line(&mut dial(format!("{LINES}\n").as_bytes()));
        assert!(answer.starts_with("NO ") && answer.contains("the agent's own"), "{answer}");
    }
}

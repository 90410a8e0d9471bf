//! Programs in network namespaces of their own stand for a guest, and one for the outside. No packet leaves
//! those namespaces.

use std::{
    io::{BufRead, BufReader, Write},
    process::{Child, ChildStdin, ChildStdout, Command, Stdio},
};

use rustix::io::Errno;

use super::*;

/// Executes its standard input line by line, and answers each with a line.
const PROGRAM: &str = r#"
import ctypes, errno, os, select, socket, subprocess, sys, time
def ip(line): subprocess.run(["ip", *line.split()], check=True)
def connect(address, source=None):
    family = socket.AF_INET6 if ":" in address[0] else socket.AF_INET
    s = socket.socket(family)
    s.settimeout(60)
    if source: s.bind(source)
    s.connect(address)
    return s
def server(address, **more):
    s = socket.create_server(address, family=socket.AF_INET6 if ":" in address[0] else socket.AF_INET, **more)
    s.settimeout(60)
    return s
def pair(host, listen=None, **more):
    listener = server((listen or host, 0), **more)
    client = connect((host, listener.getsockname()[1]))
    return client, listener.accept()[0]
def get(s, size=100):
    s.settimeout(60)
    try: return s.recv(size)
    except OSError as error: return errno.errorcode.get(error.errno, str(error))
def put(s, data):
    try: return s.send(data)
    except OSError as error: return errno.errorcode[error.errno]
def goes_on(a, b):
    for one, other in ((a, b), (b, a)):
        assert put(one, b"ping") == 4
        assert (got := get(other)) == b"ping", got
    return True
def datagrams(address, peer):
    s = socket.socket(socket.AF_INET6 if ":" in address[0] else socket.AF_INET, socket.SOCK_DGRAM)
    s.settimeout(60)
    s.bind(address)
    if peer: s.connect(peer)
    return s
def wait_for(address):
    s = datagrams((address, 0), None)
    s.settimeout(0.1)
    while True:
        s.sendto(b"up?", s.getsockname())
        try: return s.recv(10)
        except OSError: pass
ip("link set lo up")
for line in sys.stdin:
    try:
        try: answer = eval(line)
        except SyntaxError: answer = exec(line)
    except BaseException as error: answer = "FAILED " + repr(error)
    print(answer, flush=True)
"#;

struct TestProgram {
    child: Child,
    input: ChildStdin,
    output: BufReader<ChildStdout>,
}

impl TestProgram {
    fn start() -> TestProgram {
        assert!(rustix::process::geteuid().is_root(), "the agent runs as root, and so do its tests");
        let mut command = Command::new("unshare");
        command.args(["--net", "python3", "-u", "-c", PROGRAM]);
        let mut child = command.stdin(Stdio::piped()).stdout(Stdio::piped()).spawn().unwrap();
        let (input, output) = (child.stdin.take().unwrap(), BufReader::new(child.stdout.take().unwrap()));
        let mut program = TestProgram { child, input, output };
        // From here on it is in its namespace.
        assert_eq!(program.ask("1"), "1");
        program
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Has it do something.
    #[track_caller]
    fn run(&mut self, code: &str) {
        self.ask(code);
    }

    /// What something is to it.
    #[track_caller]
    fn ask(&mut self, code: &str) -> String {
        writeln!(self.input, "{code}").unwrap();
        let mut answer = String::new();
        self.output.read_line(&mut answer).unwrap();
        assert!(!answer.starts_with("FAILED"), "{code}: {answer}");
        answer.trim_end().to_owned()
    }

    /// Joins its network with another's: this one is 198.51.100.2, the other 198.51.100.1.
    fn join(&mut self, other: &mut TestProgram) {
        self.run(&format!("ip('link add eth0 type veth peer name eth0 netns {}')", other.pid()));
        for (program, host) in [(&mut *self, 2), (&mut *other, 1)] {
            program.run(&format!("ip('address add 198.51.100.{host}/24 dev eth0')"));
            program.run(&format!("ip('address add 2001:db8::{host}/64 dev eth0 nodad')"));
            program.run("ip('link set eth0 up')");
        }
        // An address of IPv6 takes a moment.
        self.run("wait_for('2001:db8::2')");
        other.run("wait_for('2001:db8::1')");
    }
}

impl Drop for TestProgram {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
    }
}

/// As in a child whose user processes these are. Programs that wait for input stand as still as frozen ones.
#[track_caller]
fn forked(programs: &[&TestProgram]) {
    assert_eq!(forked_with(Diag::open, programs), Vec::<String>::new());
}

fn forked_with(open: fn() -> io::Result<Diag>, programs: &[&TestProgram]) -> Vec<String> {
    let pids: Vec<i32> = programs.iter().map(|program| program.pid()).collect();
    let mut warnings = Vec::new();
    reset_with(open, &pids, true, &mut warnings);
    warnings
}

/// A kernel without `sock_diag`.
fn no_diag() -> io::Result<Diag> {
    Err(Errno::PROTONOSUPPORT.into())
}

/// Whether this machine's kernel can end single sockets.
fn can_end_sockets() -> bool {
    let mut program = TestProgram::start();
    program.run("ip('link add eth0 type veth peer name eth1')");
    program.run("ip('address add 198.51.100.2/24 dev eth0')");
    program.run("ip('link set eth0 up')");
    program.run("s = datagrams(('198.51.100.2', 0), ('198.51.100.1', 9))");
    let can = forked_with(Diag::open, &[&program]).is_empty();
    if !can {
        let _ = writeln!(io::stderr(), "NOT RUN: ending single sockets: no CONFIG_INET_DIAG_DESTROY here");
    }
    can
}

#[test]
fn connections_inside_a_guest_go_on_and_those_to_the_outside_fail_at_once() {
    let (mut guest, mut outside) = (TestProgram::start(), TestProgram::start());
    guest.join(&mut outside);
    outside.run("s, peers = server(('', 9000)), []");
    outside.run("s6 = server(('2001:db8::1', 9000))");
    // What does not answer: a handshake that cannot end.
    guest.run("ip('neighbour add 198.51.100.99 lladdr 02:00:00:00:00:99 dev eth0')");

    guest.run("a = pair('127.0.0.1')");
    guest.run("b = pair('::1')");
    guest.run("c = pair('127.0.0.1', '::', dualstack_ipv6=True)");
    guest.run("d = pair('198.51.100.2')");
    guest.run("e = pair('2001:db8::2')");
    guest.run("f = pair('::ffff:198.51.100.2', '0.0.0.0')");
    let inside = ["a", "b", "c", "d", "e", "f"];
    for name in inside {
        guest.run(&format!("sent = [s.sendall(b'on its way ' * 1000) for s in {name}] and None"));
    }
    // The other end is closed by the time of the fork; what it sent is not read yet.
    guest.run("g = pair('198.51.100.2')");
    guest.run("g[1].sendall(b'last words'); g[1].close()");
    // And one whose other end the kernel has removed by then: it has no mirror.
    guest.run("h = pair('198.51.100.2'); port = '%04X' % h[1].getpeername()[1]");
    guest.run("open('/proc/sys/net/ipv4/tcp_fin_timeout', 'w').write('1')");
    guest.run("h[1].sendall(b'last words'); h[1].close()");
    guest.run("while open('/proc/net/tcp').read().count(':' + port) > 1: time.sleep(0.1)");

    guest.run("out = connect(('198.51.100.1', 9000))");
    guest.run("mapped = connect(('::ffff:198.51.100.1', 9000))");
    guest.run("out6 = connect(('2001:db8::1', 9000))");
    guest.run("closing = connect(('198.51.100.1', 9000)); closing.shutdown(socket.SHUT_WR)");
    guest.run("opening = socket.socket(); opening.setblocking(False)");
    assert_eq!(guest.ask("errno.errorcode[opening.connect_ex(('198.51.100.99', 9000))]"), "EINPROGRESS");
    outside.run("peers += [s.accept()[0] for _ in range(3)] + [s6.accept()[0]]");

    forked(&[&guest]);
    for name in inside {
        guest.run(&format!("got = [s.recv(11000, socket.MSG_WAITALL) for s in {name}]"));
        assert_eq!(guest.ask("got == [b'on its way ' * 1000] * 2"), "True", "{name}");
        assert_eq!(guest.ask(&format!("goes_on(*{name})")), "True", "{name}");
    }
    for name in ["g", "h"] {
        assert_eq!(guest.ask(&format!("get({name}[0]), get({name}[0])")), "(b'last words', b'')", "{name}");
    }
    for name in ["out", "mapped", "out6", "closing", "opening"] {
        assert_eq!(guest.ask(&format!("get({name})")), "ECONNRESET", "{name}");
    }
    assert_eq!(guest.ask("put(out, b'x')"), "EPIPE");
    // In a fork of a VM the peers get nothing. Here they do; one had read the end before.
    assert_eq!(outside.ask("[get(peer) for peer in peers].count('ECONNRESET')"), "3");
}

#[test]
fn connections_between_network_namespaces_of_a_guest_go_on() {
    let (mut one, mut other) = (TestProgram::start(), TestProgram::start());
    one.join(&mut other);
    other.run("s, u = server(('198.51.100.1', 7000)), datagrams(('198.51.100.1', 7001), None)");
    one.run("c = connect(('198.51.100.1', 7000))");
    one.run("u = datagrams(('198.51.100.2', 7002), ('198.51.100.1', 7001))");
    other.run("p = s.accept()[0]; u.connect(('198.51.100.2', 7002))");
    // One that is being opened: its first packet is lost, so it has no mirror yet.
    other.run("full = server(('198.51.100.1', 7003), backlog=0); s1 = []");
    one.run("fill = connect(('198.51.100.1', 7003))");
    one.run("late = socket.socket(); late.setblocking(False)");
    assert_eq!(one.ask("errno.errorcode[late.connect_ex(('198.51.100.1', 7003))]"), "EINPROGRESS");
    // The end of one that was closed belongs to no process.
    one.run("left = connect(('198.51.100.1', 7000))");
    other.run("gone = s.accept()[0]; gone.send(b'last words'); gone.close()");
    // One in a namespace that no process is in any more.
    other.run("libc = ctypes.CDLL(None); home = open('/proc/self/ns/net')");
    other.run("assert libc.unshare(0x40000000) == 0");
    other.run("ip('link set lo up'); hidden = server(('127.0.0.1', 7000))");
    other.run("hc = connect(('127.0.0.1', 7000)); hp = hidden.accept()[0]");
    other.run("assert libc.setns(home.fileno(), 0) == 0");
    one.run("c.send(b'on its way')");

    forked(&[&one, &other]);
    assert_eq!(other.ask("get(p)"), "b'on its way'");
    one.run("c.send(b'to there'); u.send(b'datagram')");
    assert_eq!(other.ask("get(p), get(u)"), "(b'to there', b'datagram')");
    other.run("p.send(b'and back'); u.send(b'another')");
    assert_eq!(one.ask("get(c), get(u)"), "(b'and back', b'another')");
    assert_eq!(one.ask("get(left), get(left)"), "(b'last words', b'')");
    assert_eq!(other.ask("goes_on(hc, hp)"), "True");
    other.run("s1.append(full.accept()[0])");
    assert_eq!(one.ask("select.select([], [late], [], 60)[1] == [late] and late.getsockopt(1, 4)"), "0");

    // With the other namespace out of the guest, the same connection is one to the outside.
    forked(&[&one]);
    assert_eq!(one.ask("get(c)"), "ECONNRESET");
    assert_eq!(other.ask("get(p)"), "ECONNRESET");
}

/// A guest that listens on all addresses, with connections from the inside and from outside waiting.
fn mixed_queue() -> (TestProgram, TestProgram) {
    let (mut guest, mut outside) = (TestProgram::start(), TestProgram::start());
    guest.join(&mut outside);
    guest.run("s = server(('::', 9000), dualstack_ipv6=True)");
    guest.run("mine = [connect(('127.0.0.1', 9000))]");
    outside.run("theirs = [connect(('198.51.100.2', 9000)), connect(('2001:db8::2', 9000))]");
    guest.run("mine += [connect(('198.51.100.2', 9000)), connect(('2001:db8::2', 9000))]");
    outside.run("theirs[0].send(b'request')");
    guest.run("mine[2].send(b'on its way')");
    (guest, outside)
}

#[test]
fn connections_from_inside_stay_in_a_queue_from_which_those_from_outside_go() {
    if !can_end_sockets() {
        return;
    }
    let (mut guest, mut outside) = mixed_queue();
    forked(&[&guest]);
    assert_eq!(outside.ask("[get(s) for s in theirs]"), "['ECONNRESET', 'ECONNRESET']");
    guest.run("accepted = [s.accept()[0] for _ in range(5)]");
    // What one of them had sent before the fork can still be read.
    assert_eq!(
        guest.ask("[get(accepted[n]) for n in (1, 1, 2)]"),
        "[b'request', 'ECONNABORTED', 'ECONNABORTED']"
    );
    assert_eq!(guest.ask("get(accepted[4])"), "b'on its way'");
    assert_eq!(guest.ask("[goes_on(m, accepted[n]) for m, n in zip(mine, (0, 3, 4))]"), "[True, True, True]");
    // And it goes on listening, to all.
    outside.run("new = connect(('198.51.100.2', 9000))");
    guest.run("new = s.accept()[0]; new.send(b'hello')");
    assert_eq!(outside.ask("get(new)"), "b'hello'");
}

#[test]
fn a_kernel_that_cannot_end_single_connections_ends_no_inside_one_and_says_so() {
    let (mut guest, _outside) = mixed_queue();
    let warnings = forked_with(no_diag, &[&guest]);
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    assert!(warnings[0].contains("beside ones from inside"), "{warnings:?}");
    guest.run("accepted = [s.accept()[0] for _ in range(5)]");
    assert_eq!(guest.ask("get(accepted[4])"), "b'on its way'");
    assert_eq!(guest.ask("[goes_on(m, accepted[n]) for m, n in zip(mine, (0, 3, 4))]"), "[True, True, True]");
}

#[test]
fn a_queue_of_connections_from_outside_is_emptied_on_every_kernel() {
    let (mut guest, mut outside) = (TestProgram::start(), TestProgram::start());
    guest.join(&mut outside);
    guest.run("s = server(('', 9000))");
    outside.run("theirs = [connect(('198.51.100.2', 9000)) for _ in range(3)]");
    assert_eq!(forked_with(no_diag, &[&guest]), Vec::<String>::new());
    assert_eq!(outside.ask("[get(s) for s in theirs]"), "['ECONNRESET', 'ECONNRESET', 'ECONNRESET']");
    guest.run("mine = connect(('127.0.0.1', 9000)); accepted = s.accept()[0]");
    assert_eq!(guest.ask("goes_on(mine, accepted)"), "True");
}

/// A guest with UDP sockets of every kind.
fn datagrams() -> (TestProgram, TestProgram) {
    let (mut guest, mut outside) = (TestProgram::start(), TestProgram::start());
    guest.join(&mut outside);
    outside.run("peer = datagrams(('198.51.100.1', 9000), None)");
    for host in ["127.0.0.1", "::1", "198.51.100.2", "2001:db8::2"] {
        guest.run(&format!("a = datagrams(('{host}', 7000), ('{host}', 7001))"));
        // One is connected, as its mirror is, the other only bound where it is expected.
        guest.run(&format!("b = datagrams(('{host}', 7001), ('{host}', 7000))"));
        guest.run(&format!("c = datagrams(('{host}', 7003), ('{host}', 7002))"));
        guest.run(&format!("d = datagrams(('{host}', 7002), None)"));
        guest.run("inside = globals().get('inside', []) + [(a, b, c, d)]");
        guest.run("a.send(b'on its way')");
    }
    for name in ["x", "y"] {
        guest.run(&format!("{name} = datagrams(('198.51.100.2', 0), ('198.51.100.1', 9000))"));
        guest.run(&format!("{name}6 = datagrams(('2001:db8::2', 0), ('2001:db8::1', 9000))"));
        guest.run(&format!("{name}m = datagrams(('::', 0), ('::ffff:198.51.100.1', 9000))"));
    }
    guest.run("open = datagrams(('198.51.100.2', 7005), None)");
    (guest, outside)
}

fn inside_datagrams_go_on(guest: &mut TestProgram, outside: &mut TestProgram) {
    guest.run("for a, b, c, d in inside: got = get(b); assert got == b'on its way', got");
    guest.run("for a, b, c, d in inside: goes_on(a, b); c.send(b'1'); assert get(d) == b'1'");
    // One that is connected to nothing may be a server: it is left as it is.
    outside.run("peer.sendto(b'2', ('198.51.100.2', 7005))");
    assert_eq!(guest.ask("get(open)"), "b'2'");
}

#[test]
fn udp_sockets_connected_to_the_outside_get_an_error_at_their_next_use() {
    if !can_end_sockets() {
        return;
    }
    let (mut guest, mut outside) = datagrams();
    forked(&[&guest]);
    for suffix in ["", "6", "m"] {
        assert_eq!(guest.ask(&format!("get(x{suffix})")), "ECONNABORTED", "{suffix}");
        assert_eq!(guest.ask(&format!("type(put(y{suffix}, b'x')).__name__")), "str", "{suffix}");
    }
    inside_datagrams_go_on(&mut guest, &mut outside);
    // It is usable again.
    guest.run("x.connect(('198.51.100.1', 9000)); x.send(b'new')");
    assert_eq!(outside.ask("get(peer)"), "b'new'");
}

#[test]
fn a_kernel_that_cannot_end_udp_sockets_disconnects_them_and_says_so() {
    let (mut guest, mut outside) = datagrams();
    let warnings = forked_with(no_diag, &[&guest]);
    assert_eq!(warnings.len(), 6, "{warnings:?}");
    assert!(warnings.iter().all(|warning| warning.contains("udp_diag")), "{warnings:?}");
    for name in ["x", "y6", "ym"] {
        assert_eq!(guest.ask(&format!("type(put({name}, b'x')).__name__")), "str", "{name}");
    }
    inside_datagrams_go_on(&mut guest, &mut outside);
}

#[test]
fn a_guest_that_talks_only_to_itself_over_loopback_reads_no_tables() {
    let mut guest = TestProgram::start();
    guest.run("a = pair('127.0.0.1'); u = datagrams(('::1', 7000), ('::1', 7000)); s = server(('', 7000))");
    for (fd, _) in sockets(guest.pid()).unwrap() {
        assert!(kind(&take(guest.pid(), fd).unwrap()).unwrap().is_none());
    }
    forked(&[&guest]);
    assert_eq!(guest.ask("goes_on(*a)"), "True");
}

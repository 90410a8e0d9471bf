//! Children and the network: all have the same address inside, and none is in another's way.

use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::process::Command;
use std::thread::JoinHandle;

use forkd_tests::daemon::Daemon;
use rustix::thread::{UnshareFlags, gettid, unshare_unsafe};
use serde_json::json;

/// The server, with an ordinary address, and the router on the way to it: the networks a host is attached to
/// are out of reach.
const SERVER: &str = "55.7.0.1";
const ROUTER: &str = "55.1.0.1";
const PORT: u16 = 9000;

fn ip(arguments: &str) {
    let output = Command::new("ip").args(arguments.split(' ')).output().unwrap();
    assert!(output.status.success(), "ip {arguments}: {}", String::from_utf8_lossy(&output.stderr));
}

/// A server somewhere outside, which sends back every line with where it came from.
struct Outside {
    _serving: JoinHandle<()>,
}

impl Outside {
    /// It lives in a network namespace of its own, and goes with this process.
    fn start() -> Outside {
        let host = gettid().as_raw_nonzero();
        // Before and after there is a server, nothing that looks for it leaves this host.
        ip("route add unreachable 55.0.0.0/8 metric 4000");
        let (ready, wait) = std::sync::mpsc::channel();
        let serving = std::thread::spawn(move || {
            // SAFETY: a new network namespace takes no descriptor and no memory away.
            unsafe { unshare_unsafe(UnshareFlags::NEWNET) }.expect("run as root");
            ip(&format!("link add lan type veth peer name fwan netns {host}"));
            ip(&format!("address add {ROUTER}/24 dev lan"));
            ip(&format!("address add {SERVER}/32 dev lo"));
            ip("link set lo up");
            ip("link set lan up");
            let listener = TcpListener::bind((SERVER, PORT)).unwrap();
            ready.send(()).unwrap();
            for stream in listener.incoming() {
                std::thread::spawn(move || echo(stream.unwrap()));
            }
        });
        wait.recv().unwrap();
        ip("address add 55.1.0.2/24 dev fwan");
        ip("link set fwan up");
        ip(&format!("route add {SERVER}/32 via {ROUTER}"));
        Outside { _serving: serving }
    }
}

impl Drop for Outside {
    fn drop(&mut self) {
        ip("link delete fwan");
        ip("route delete unreachable 55.0.0.0/8 metric 4000");
    }
}

fn echo(stream: TcpStream) {
    let from = stream.peer_addr().unwrap();
    let mut lines = BufReader::new(&stream).lines();
    while let Some(Ok(line)) = lines.next() {
        let _ = writeln!(&stream, "{line} {from}");
    }
}

const WARM: &str = "
import errno, itertools, socket, struct, subprocess, threading, time
def outside():
    connection = socket.create_connection(('55.7.0.1', 9000), timeout=60)
    return connection
def say(connection, word):
    connection.sendall(word.encode() + b'\\n')
    return connection.makefile().readline().split()[0]
def fails_soon(connection):
    # A peer without a reset would keep this waiting for many minutes.
    connection.settimeout(60)
    try:
        connection.sendall(b'still there?\\n')
        data = connection.recv(100)
        return 'ended' if data == b'' else repr(data)
    except TimeoutError:
        return 'waited in vain'
    except OSError:
        return 'failed'
def named(call):
    try:
        return call()
    except OSError as error:
        return errno.errorcode.get(error.errno, str(error))
inherited = outside()
assert say(inherited, 'parent') == 'parent'
server = socket.create_server(('127.0.0.1', 7000))
inner = socket.create_connection(('127.0.0.1', 7000))
peer, _ = server.accept()
# Two threads that talk with each other. One is always behind, so that data is on its way whenever a copy is made.
heard, trouble = [0], []
def watched(work):
    def run():
        try:
            work()
        except BaseException as error:
            trouble.append(repr(error))
    threading.Thread(target=run, daemon=True).start()
def talk():
    for number in itertools.count():
        inner.sendall(struct.pack('>Q', number) * 512)
def listen():
    for number in itertools.count():
        data = peer.recv(4096, socket.MSG_WAITALL)
        assert data == struct.pack('>Q', number) * 512, (number, data)
        heard[0] = number
        time.sleep(0.05)
inner.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 32768)
watched(talk)
watched(listen)
# A queue in which one waits whose peer is not in the guest (it left without a word), and one whose peer is.
queue = socket.create_server(('', 7001))
queue.settimeout(60)
def ip(line):
    subprocess.run(['ip', *line.split()], check=True)
def datagrams(peer):
    made = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    made.settimeout(60)
    made.connect(peer)
    return made
def prepare():
    global ours, read, written, near, far
    ip('address add 192.0.2.7/32 dev lo')
    stranger = socket.create_connection(('127.0.0.1', 7001), source_address=('192.0.2.7', 0))
    repair = 19
    stranger.setsockopt(socket.IPPROTO_TCP, repair, 1)
    stranger.close()
    ip('address delete 192.0.2.7/32 dev lo')
    ours = socket.create_connection(('127.0.0.1', 7001))
    ours.sendall(b'waiting')
    read, written = (datagrams(inherited_from) for _ in range(2))
    far = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    far.bind(('127.0.0.1', 0))
    near = datagrams(far.getsockname())
    near.send(b'sent')
inherited_from = inherited.getpeername()
prepare()
def fares():
    until, enough = time.monotonic() + 60, heard[0] + 20
    while heard[0] < enough and not trouble and time.monotonic() < until:
        time.sleep(0.05)
    gone, here = queue.accept()[0], queue.accept()[0]
    gone.settimeout(60)
    return {
        'threads': 'talk' if heard[0] >= enough and not trouble else trouble,
        'queue': (named(lambda: gone.recv(1)), here.recv(7)),
        'datagrams outside': (named(lambda: read.recv(1)), type(named(lambda: written.send(b'x')))),
        'datagrams inside': (far.recv(4), near.send(b'on')),
    }
";

/// How what a child inherited fares: what is inside the guest goes on, what is not fails.
const FARES: &str = "{'threads': 'talk', 'queue': ('ECONNABORTED', b'waiting'), \
                     'datagrams outside': ('ECONNABORTED', <class 'str'>), 'datagrams inside': (b'sent', 2)}";

#[test]
fn children_reach_the_network_at_once_and_only_connections_inside_the_guest_go_on() {
    let _outside = Outside::start();
    let daemon = &Daemon::start();
    daemon.snapshot(json!({"tag": "net", "image": "python", "warm_python": WARM}));
    let children = daemon.fork("net", 3);
    std::thread::scope(|scope| {
        for id in &children {
            scope.spawn(move || {
                // New connections work, all at once, though all have one address and draw from one
                // range of ports: each gets its own answers.
                for round in 0..3 {
                    let code = format!("say(outside(), '{id}-{round}')");
                    assert_eq!(daemon.eval(id, &code), format!("'{id}-{round}'"));
                }
                assert_ne!(daemon.eval(id, "fails_soon(inherited)"), "'waited in vain'");
                assert_eq!(daemon.eval(id, "fares()"), FARES);
                // A socket that listened goes on listening.
                assert_eq!(
                    daemon.eval(
                        id,
                        "again = socket.create_connection(('127.0.0.1', 7000)); server.accept()[1][0]"
                    ),
                    "'127.0.0.1'"
                );
            });
        }
    });
    let address = daemon.sh(&children[0], "ip -4 -o address show eth0");
    assert!(address.contains("10.42.0.2/24"), "{address}");

    // Nothing of the host is in reach, not even through the slot's own gateway.
    let blocked = format!("socket.create_connection(('10.42.0.1', {}), timeout=5)\n", daemon.port());
    let code = format!("try:\n    {blocked}    reached = True\nexcept OSError:\n    reached = False");
    daemon.eval(&children[0], &code);
    assert_eq!(daemon.eval(&children[0], "reached"), "False");

    // A branch is nothing to the source's connections, only to those its children inherit; and a sandbox
    // that is rolled back has its network at once.
    let source = &children[1];
    assert_eq!(daemon.eval(source, "prepare(); kept = outside(); say(kept, 'before')"), "'before'");
    daemon.branch(source, json!({"tag": "net-branch", "mode": "live"}));
    assert_eq!(daemon.eval(source, "say(kept, 'after')"), "'after'");
    let child = daemon.fork("net-branch", 1).remove(0);
    assert_ne!(daemon.eval(&child, "fails_soon(kept)"), "'waited in vain'");
    assert_eq!(daemon.eval(&child, "say(outside(), 'new')"), "'new'");
    assert_eq!(daemon.eval(&child, "fares()"), FARES);
    daemon.tell(source, "rollback", json!({}));
    assert_ne!(daemon.eval(source, "fails_soon(kept)"), "'waited in vain'");
    assert_eq!(daemon.eval(source, "say(outside(), 'back')"), "'back'");
    assert_eq!(daemon.eval(source, "fares()"), FARES);
    daemon.delete(&[child]);

    let cut_off = daemon.spawn(json!({"snapshot_tag": "net", "n": 1, "network": false}));
    let cut_off = cut_off[0]["id"].as_str().unwrap().to_owned();
    assert_eq!(daemon.sh(&cut_off, "cat /sys/class/net/eth0/carrier").trim(), "0");
    let code = "try:\n    socket.create_connection(('55.7.0.1', 9000), timeout=5)\n    reached = True\n\
                except OSError:\n    reached = False";
    daemon.eval(&cut_off, code);
    assert_eq!(daemon.eval(&cut_off, "reached"), "False");
    daemon.delete(&[children, vec![cut_off]].concat());
}

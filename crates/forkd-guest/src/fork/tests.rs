//! Freezing, thawing and becoming another guest, with this machine's own clock and name left alone.

use std::{
    fs,
    io::{Read, Write},
    net::TcpListener,
    os::unix::net::{UnixListener, UnixStream},
    sync::{
        Condvar, Mutex, OnceLock,
        atomic::{AtomicBool, AtomicUsize, Ordering},
    },
    thread,
};

use serde_json::{Value, json};

use super::*;
use crate::agent::{
    Agent, Config,
    tests::{TestAgent, eventually},
};

/// What was done to the machines of all tests.
static DONE: Mutex<Vec<Done>> = Mutex::new(Vec::new());

#[derive(Debug, Clone, PartialEq)]
enum Done {
    Reseeded(Vec<u8>),
    Clock(Duration),
    Hostname(String),
}

fn done(what: Done) -> io::Result<()> {
    DONE.lock().unwrap().push(what);
    Ok(())
}

/// A machine that only remembers what is done to it.
pub(crate) fn system(root: PathBuf) -> System {
    System {
        root,
        boot_id: None,
        reseed: |entropy| done(Done::Reseeded(entropy.to_vec())),
        set_clock: |time| done(Done::Clock(time)),
        set_hostname: |name| match name {
            "refused" => Err(io::ErrorKind::PermissionDenied.into()),
            name => done(Done::Hostname(name.into())),
        },
        sync: || (),
        unsynced: || Some(0),
        file_systems: FileSystemCalls {
            mounts: || Ok(String::new()),
            freeze: |_| Err(io::ErrorKind::Unsupported.into()),
            thaw: |_| Err(io::ErrorKind::Unsupported.into()),
        },
    }
}

/// An agent whose processes can be frozen, where this machine allows that.
pub(super) fn freezable() -> Option<TestAgent> {
    let agent = TestAgent::new();
    if agent.cgroup.is_none() {
        let _ = writeln!(io::stderr(), "NOT RUN: freezing user processes: no cgroup v2 here");
    }
    agent.cgroup.is_some().then_some(agent)
}

pub(super) fn warnings(answer: &Value) -> Vec<String> {
    answer.get("warnings").map_or(Vec::new(), |list| serde_json::from_value(list.clone()).unwrap())
}

#[test]
fn a_child_is_who_it_is_told_to_be() {
    let Some(agent) = freezable() else { return };
    let entropy: Vec<u8> = (100..150).collect();
    let answer = agent
        .become_child(
            "sbwhoami",
            json!({
                "hostname": "child-7", "unixNanos": "1800000000000000001",
                "entropy": base64::Engine::encode(&base64::prelude::BASE64_STANDARD, &entropy),
                "envs": {"SECRET": "a=b c"},
            }),
        )
        .unwrap();
    assert_eq!(warnings(&answer), Vec::<String>::new());
    assert!(answer["unixNanos"].as_str().unwrap().parse::<u64>().unwrap() > 1_700_000_000_000_000_000);
    let done = DONE.lock().unwrap().clone();
    assert!(done.contains(&Done::Reseeded(entropy)), "{done:?}");
    assert!(done.contains(&Done::Hostname("child-7".into())), "{done:?}");
    let sent = Duration::from_nanos(1_800_000_000_000_000_001);
    let is_ours =
        |done: &Done| matches!(done, Done::Clock(t) if *t >= sent && *t < sent + Duration::from_secs(60));
    assert!(done.iter().any(is_ours), "{done:?}");

    let read = |name: &str| fs::read_to_string(agent.path(name)).unwrap();
    assert_eq!(read("root/etc/hostname"), "child-7\n");
    assert_eq!(read("root/etc/machine-id"), "0123456789abcdef0123456789abcdef\n");
    assert_eq!(read("run/sandbox-id"), "sbwhoami");
    assert_eq!(agent.sh("echo $FORKD_SANDBOX_ID $SECRET").out(), "sbwhoami a=b c\n");
    // What a caller gives for one command goes before that.
    let request =
        json!({"process": {"cmd": "sh", "args": ["-c", "echo $SECRET"], "envs": {"SECRET": "mine"}}});
    assert_eq!(agent.start(request).collect().out(), "mine\n");
    // Once more, as another sandbox: nothing of the first is left.
    agent.become_child("sbother", json!({})).unwrap();
    assert_eq!(agent.sh("echo $FORKD_SANDBOX_ID $SECRET").out(), "sbother\n");
}

#[test]
fn a_guest_that_was_booted_is_told_which_sandbox_it_is_and_keeps_its_boot_id_as_long_as_it_is_that() {
    let folder = tempfile::tempdir().unwrap();
    let mut forking = forking(folder.path(), None, || ());
    let path = folder.path().join("boot-id");
    forking.system.boot_id = Some(BootId::new("c3075f7e-701a-47dd-9b34-fb4ecf34ccf2", &path).unwrap());
    let name = |id: &str| forking.name(&NameRequest { sandbox_id: id.into(), ..NameRequest::default() });
    let boot_id = || fs::read_to_string(&path).unwrap();
    let kernels = boot_id();
    assert_eq!(name("../sb").unwrap_err().code, Code::InvalidArgument);
    assert_eq!(boot_id(), kernels);
    name("sbbooted").unwrap();
    assert_eq!(fs::read_to_string(folder.path().join("sandbox-id")).unwrap(), "sbbooted");
    assert_eq!(fs::read_to_string(folder.path().join("ssh-host-keys-of")).unwrap(), "sbbooted");
    let first = boot_id();
    assert_ne!(first, kernels);
    let become_that = |id: &str| {
        let request = BecomeRequest {
            sandbox_id: id.into(),
            hostname: id.into(),
            machine_id: "0".repeat(32),
            unix_nanos: 1,
            entropy: Some(vec![1; 32]),
            envs: BTreeMap::new(),
        };
        forking.become_child(request, Instant::now()).unwrap();
        boot_id()
    };
    assert_ne!(become_that("sbchild"), first);
    assert_eq!(become_that("sbbooted"), first, "rolled back, it has another one");
}

#[test]
fn a_request_that_is_wrong_in_any_part_changes_nothing() {
    let agent = TestAgent::new();
    let short = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, [1; 31]);
    for (wrong, about) in [
        (json!({"sandboxId": ""}), "sandbox id"),
        (json!({"sandboxId": "../../etc/passwd"}), "sandbox id"),
        (json!({"hostname": ""}), "host name"),
        (json!({"hostname": "a b"}), "host name"),
        (json!({"hostname": "-a"}), "host name"),
        (json!({"hostname": "a\nb"}), "host name"),
        (json!({"hostname": "a".repeat(64)}), "host name"),
        (json!({"machineId": "0123"}), "machine id"),
        (json!({"machineId": "0123456789ABCDEF0123456789ABCDEF"}), "machine id"),
        (json!({"unixNanos": "0"}), "unixNanos"),
        (json!({"unixNanos": "-1"}), "JSON"),
        (json!({"entropy": null}), "entropy"),
        (json!({"entropy": short}), "entropy"),
        (json!({"entropy": "%"}), "JSON"),
        (json!({"envs": {"A=B": "x"}}), "environment variable"),
        (json!({"envs": {"A\0": "x"}}), "environment variable"),
        (json!({"envs": {"A": "x\0"}}), "environment variable"),
        (json!({"envs": {"": "x"}}), "environment variable"),
        (json!({"envs": {"A": "x".repeat(MAX_VARIABLES)}}), "envs"),
    ] {
        let mut request = json!({"hostname": "never-set"});
        request.as_object_mut().unwrap().extend(wrong.as_object().unwrap().clone());
        let error = agent.become_child("sbnever", request).unwrap_err();
        assert_eq!(error.code, Code::InvalidArgument, "{wrong}");
        assert!(error.message.contains(about), "{wrong}: {}", error.message);
    }
    assert!(!DONE.lock().unwrap().contains(&Done::Hostname("never-set".into())));
    assert_eq!(fs::read_dir(agent.path("root/etc")).unwrap().count(), 0);
    assert!(!agent.path("run/sandbox-id").exists());
    assert_eq!(agent.sh("echo $FORKD_SANDBOX_ID").out(), "\n");
}

#[test]
fn what_does_not_work_but_can_be_lived_with_is_a_warning() {
    let Some(agent) = freezable() else { return };
    fs::remove_dir(agent.path("root/etc")).unwrap();
    let answer = agent.become_child("sbwarn", json!({"hostname": "refused"})).unwrap();
    let warnings = warnings(&answer);
    assert_eq!(warnings.len(), 4, "{warnings:?}");
    assert!(warnings[0].contains("host name"), "{warnings:?}");
    assert!(warnings[2].contains("etc/machine-id"), "{warnings:?}");
    assert_eq!(fs::read_to_string(agent.path("run/sandbox-id")).unwrap(), "sbwarn");
}

#[test]
fn frozen_processes_stand_still_until_they_are_thawed_or_become_another_guests() {
    let Some(agent) = freezable() else { return };
    let file = agent.path("ticks");
    let script = format!("(while :; do echo x >> {}; sleep 0.01; done) & wait", file.display());
    let _running = agent.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}}));
    let size = || fs::metadata(&file).map_or(0, |known| known.len());
    for (how, call) in [("thaw", "/forkd.Agent/Thaw"), ("become", ""), ("freeze twice", "/forkd.Agent/Thaw")]
    {
        let before = size();
        eventually("ticks", || size() > before);
        let frozen = agent.call("/forkd.Agent/Freeze", json!({"fileSystems": true})).unwrap();
        assert_eq!(frozen, json!({"frozen": true, "fileSystems": true}), "{how}");
        if how == "freeze twice" {
            let again = agent.call("/forkd.Agent/Freeze", json!({"timeoutMs": 60_000}));
            assert_eq!(again.unwrap()["frozen"], true);
        }
        let frozen_at = size();
        thread::sleep(Duration::from_millis(300));
        assert_eq!(size(), frozen_at, "{how}");
        assert!(agent.call("/forkd.Agent/Ping", json!({})).is_ok(), "the agent itself runs on");
        match call {
            "" => _ = agent.become_child("sbthaw", json!({})).unwrap(),
            call => assert_eq!(agent.call(call, json!({})).unwrap(), json!({})),
        }
        eventually("ticks after it", || size() > frozen_at);
    }
}

/// The parts of a guest that is frozen in `cgroup`, if it has cgroups, and synced by `sync`.
fn forking(folder: &Path, cgroup: Option<PathBuf>, sync: fn()) -> ForkService {
    let processes = Arc::new(Processes::new(process::Cgroups::new(cgroup), Arc::default()));
    let python = Arc::new(Python::new(process::Cgroups::new(None), Arc::default()));
    ForkService::new(System { sync, ..system(folder.into()) }, folder.into(), processes, python)
}

/// A fake cgroup folder that reports itself as frozen.
fn still(folder: &Path) -> Option<PathBuf> {
    fs::write(folder.join("cgroup.events"), "populated 1\nfrozen 1\n").unwrap();
    Some(folder.into())
}

/// The last order to its processes: `1` to freeze, `0` to go on.
fn told(folder: &Path) -> String {
    fs::read_to_string(folder.join("cgroup.freeze")).unwrap_or_default()
}

fn full(ms: u64) -> FreezeRequest {
    FreezeRequest { sync: FreezeSync::Full, ..within(ms) }
}

fn within(ms: u64) -> FreezeRequest {
    FreezeRequest { timeout_ms: ms, ..FreezeRequest::default() }
}

#[test]
fn a_guest_without_cgroups_says_that_nothing_is_frozen() {
    let folder = tempfile::tempdir().unwrap();
    let forking = forking(folder.path(), None, || ());
    let answer = forking.freeze(&FreezeRequest::default(), Instant::now(), || true);
    assert_eq!(answer, Ok(FreezeResponse::default()));
    assert!(forking.thaw().is_ok());
}

/// What a disk that takes its time lets through only when it is opened.
struct Gate {
    waiting: Mutex<usize>,
    open: AtomicBool,
    opened: Condvar,
}

impl Gate {
    const fn new() -> Self {
        Gate { waiting: Mutex::new(0), open: AtomicBool::new(false), opened: Condvar::new() }
    }

    fn pass(&self) {
        let mut waiting = self.waiting.lock().unwrap();
        if !self.open.load(Ordering::SeqCst) {
            *waiting += 1;
            drop(self.opened.wait_while(waiting, |_| !self.open.load(Ordering::SeqCst)).unwrap());
        }
    }

    /// How many had to wait so far.
    fn waiting(&self) -> usize {
        *self.waiting.lock().unwrap()
    }

    fn open(&self) {
        let _waiting = self.waiting.lock().unwrap();
        self.open.store(true, Ordering::SeqCst);
        self.opened.notify_all();
    }
}

#[test]
fn a_sync_that_never_ends_keeps_no_guest_from_being_frozen() {
    static GATE: Gate = Gate::new();
    let folder = tempfile::tempdir().unwrap();
    let forking = forking(folder.path(), still(folder.path()), || GATE.pass());
    let freezes = |request: &FreezeRequest| {
        let answer = forking.freeze(request, Instant::now(), || true);
        assert_eq!(answer, Ok(FreezeResponse { frozen: true, ..FreezeResponse::default() }), "{request:?}");
        assert_eq!(told(folder.path()), "1", "{request:?}");
        forking.thaw().unwrap();
    };
    freezes(&within(3000));
    eventually("the sync to hang", || GATE.waiting() == 1);
    // Later ones do not wait for it: this test would take hours.
    freezes(&within(600_000));
    freezes(&full(3000));
    assert_eq!(GATE.waiting(), 1, "another one joined it");
    GATE.open();
}

#[test]
fn processes_stay_frozen_when_what_they_wrote_last_cannot_be_synced_in_time() {
    static GATE: Gate = Gate::new();
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let kept = tempfile::tempdir().unwrap();
    let folder = FOLDER.get_or_init(|| kept.path().into());
    // Slow only once they stand still.
    let sync = || {
        if FOLDER.get().is_some_and(|folder| told(folder) == "1") {
            GATE.pass();
        }
    };
    let forking = forking(folder, still(folder), sync);
    for request in [within(60_000), full(3000)] {
        assert!(forking.freeze(&request, Instant::now(), || true).unwrap().frozen, "{request:?}");
        assert_eq!(told(folder), "1", "{request:?}");
        forking.thaw().unwrap();
    }
    GATE.open();
}

#[test]
fn how_much_is_synced_depends_on_the_request_and_on_what_is_dirty() {
    static SYNCS: AtomicUsize = AtomicUsize::new(0);
    static DIRTY: Mutex<Option<u64>> = Mutex::new(None);
    let folder = tempfile::tempdir().unwrap();
    let mut forking = forking(folder.path(), still(folder.path()), || {
        SYNCS.fetch_add(1, Ordering::SeqCst);
    });
    forking.system.unsynced = || *DIRTY.lock().unwrap();
    let syncs = |sync, dirty| {
        *DIRTY.lock().unwrap() = dirty;
        SYNCS.store(0, Ordering::SeqCst);
        let request = FreezeRequest { sync, ..within(60_000) };
        assert!(forking.freeze(&request, Instant::now(), || true).unwrap().frozen);
        forking.thaw().unwrap();
        SYNCS.load(Ordering::SeqCst)
    };
    for (sync, dirty, expected) in [
        (FreezeSync::Skip, Some(0), 0),
        (FreezeSync::Quick, Some(QUICK_SYNC_BYTES + 1), 1),
        (FreezeSync::Quick, None, 1),
        (FreezeSync::Full, Some(QUICK_SYNC_BYTES + 1), 2),
    ] {
        assert_eq!(syncs(sync, dirty), expected, "{sync:?} {dirty:?}");
    }
    // The second one has so little time that a busy computer may not see it.
    eventually("a second sync of a little", || syncs(FreezeSync::Quick, Some(QUICK_SYNC_BYTES)) == 2);
}

#[test]
fn a_freeze_whose_caller_is_gone_when_it_is_done_is_undone() {
    static GATE: Gate = Gate::new();
    static FOLDER: OnceLock<PathBuf> = OnceLock::new();
    let kept = tempfile::tempdir().unwrap();
    let folder = FOLDER.get_or_init(|| kept.path().into());
    let sync = || {
        if FOLDER.get().is_some_and(|folder| told(folder) == "1") {
            GATE.pass();
        }
    };
    let agent = Agent::new(Config {
        default_user: None,
        token: None,
        cgroup: still(folder),
        run_dir: folder.join("run"),
        system: System { sync, ..system(folder.join("root")) },
        shut_down: || (),
    });
    let socket = folder.join("agent.sock");
    let listener = UnixListener::bind(&socket).unwrap();
    thread::spawn(move || agent.serve(&listener.into()));

    let request = full(60_000);
    let body = serde_json::to_string(&request).unwrap();
    let head = "POST /forkd.Agent/Freeze HTTP/1.1\r\ncontent-type: application/json\r\n";
    let mut caller = UnixStream::connect(&socket).unwrap();
    write!(caller, "{head}content-length: {}\r\n\r\n{body}", body.len()).unwrap();
    eventually("everything stands still", || GATE.waiting() == 1);
    assert_eq!(told(folder), "1");
    drop(caller);
    GATE.open();
    eventually("everything goes on", || told(folder) == "0");
}

#[test]
fn a_freeze_whose_time_is_over_before_its_turn_comes_changes_nothing() {
    static SYNCED: AtomicBool = AtomicBool::new(false);
    let folder = tempfile::tempdir().unwrap();
    let forking = forking(folder.path(), still(folder.path()), || SYNCED.store(true, Ordering::SeqCst));
    // Another test's, which may have come first.
    fs::write(folder.path().join("cgroup.freeze"), "1").unwrap();
    let long_ago = Instant::now().checked_sub(Duration::from_secs(1)).unwrap();
    let error = forking.freeze(&within(500), long_ago, || true).unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded, "{error}");
    assert!(error.message.contains("500ms"), "{error}");
    assert_eq!((told(folder.path()).as_str(), SYNCED.load(Ordering::SeqCst)), ("1", false));
}

#[test]
fn a_freeze_nobody_waits_for_when_its_turn_comes_undoes_nobody_elses() {
    let folder = tempfile::tempdir().unwrap();
    let forking = forking(folder.path(), still(folder.path()), || ());
    fs::write(folder.path().join("cgroup.freeze"), "1").unwrap();
    let error = forking.freeze(&within(60_000), Instant::now(), || false).unwrap_err();
    assert_eq!(error.code, Code::Canceled, "{error}");
    assert_eq!(told(folder.path()), "1");
}

/// Connects to `port`, begins to connect to an address that does not answer, listens with a connection
/// waiting, and reports the state of each.
const CLIENT: &str = r#"
import ctypes, errno, os, socket, subprocess, sys
def named(call):
    try: return call()
    except OSError as error: return errno.errorcode[error.errno]
home, libc = open("/proc/self/ns/net"), ctypes.CDLL(None)
assert libc.unshare(0x40000000) == 0
for line in (
    "link add eth0 type veth peer name eth1", "address add 198.51.100.2/24 dev eth0", "link set eth0 up",
    "neighbour add 198.51.100.1 lladdr 02:00:00:00:00:01 dev eth0",
): subprocess.run(["ip", *line.split()], check=True)
opening = socket.socket()
opening.setblocking(False)
opening.connect_ex(("198.51.100.1", 9000))
opening.settimeout(60)
assert libc.setns(home.fileno(), 0) == 0
inner = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
os.dup(inner.fileno())
unix, other = socket.socketpair()
listener = socket.create_server(("::1", 0), family=socket.AF_INET6)
waiting = socket.create_connection(listener.getsockname()[:2])
print("ready", flush=True)
print("opening", named(lambda: opening.recv(1)))
print("read", named(lambda: inner.recv(100)))
print("write", named(lambda: inner.send(b"x")))
conn, peer = listener.accept()
print("accepted", peer == waiting.getsockname())
unix.send(b"u")
print("unix", other.recv(1))
"#;

#[test]
fn a_child_keeps_connections_inside_the_guest_and_loses_those_to_the_outside_at_once() {
    let Some(agent) = freezable() else { return };
    let server = TcpListener::bind("127.0.0.1:0").unwrap();
    let port = server.local_addr().unwrap().port().to_string();
    let mut running = agent
        .start(json!({"process": {"cmd": "python3", "args": ["-u", "-c", CLIENT, port]}, "stdin": false}));
    let (mut peer, _) = server.accept().unwrap();
    running.until("ready\n");
    peer.write_all(b"on its way").unwrap();
    assert_eq!(agent.call("/forkd.Agent/Freeze", json!({})).unwrap()["frozen"], true);
    assert_eq!(warnings(&agent.become_child("sbtcp", json!({})).unwrap()), Vec::<String>::new());
    let collected = running.collect();
    assert_eq!(
        collected.out(),
        "opening ECONNRESET\nread b'on its way'\nwrite 1\naccepted True\nunix b'u'\n",
        "{}",
        String::from_utf8_lossy(&collected.stderr)
    );
    let mut answer = [0];
    peer.read_exact(&mut answer).unwrap();
    assert_eq!(answer, *b"x");
}

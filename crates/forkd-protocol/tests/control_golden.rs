//! Every control message as it is on the wire, against `tests/golden/control.txt`.
//!
//! A monitor lives longer than the daemon that started it: a message that changes its form breaks sandboxes that
//! run. A line is the kind of a message, a space, and its JSON:
//!
//! - `request`: the controller writes it, the monitor reads it;
//! - `message`: the monitor writes it, the controller reads it;
//! - `older-request`: controllers before this one write it. Today's monitor reads it and writes another form;
//! - `save-progress`: the beginning of a saver's progress file, in hexadecimal.
//!
//! - `older-message`: monitors of version 1 write it. Today's controller reads it.
//!
//! A change of a line is a change of the protocol. The lines of version 2 are the reply with `newest`, the boot with
//! `disk_state`, and the save with `"memory":null`; all others are as in version 1.
//! `FORKD_WRITE_GOLDEN=1 cargo test --release -p forkd-protocol --test control_golden` writes the file anew.

#![allow(clippy::unwrap_used, reason = "a test that cannot go on fails")]

use std::collections::BTreeSet;
use std::fmt::Write as _;
use std::path::PathBuf;
use std::sync::OnceLock;

use forkd_protocol::control::{
    BootConfig, BranchConfig, Child, DiskConfig, DiskFiles, EndReason, Event, FdRef, ForkConfig, LoadConfig,
    MergeConfig, Message, NetConfig, OLDEST_VERSION, ReplacedLayers, Reply, Request, Role, SaveConfig,
    SaveProgress, Status, VERSION, VmEnd, VsockConfig, WaitStatus,
};

/// Lists the variants of an enum. A variant that is not listed here does not compile, and one that is listed
/// and has no line in the golden file fails `every_variant_has_a_golden_line`.
macro_rules! variants {
    ($name:ident of $enum:ident: $($variant:ident),+ $(,)?) => {
        /// The names of all variants, and of this one.
        fn $name(of: &$enum) -> (&'static [&'static str], &'static str) {
            let name = match of {
                $($enum::$variant { .. } => concat!(stringify!($enum), "::", stringify!($variant)),)+
            };
            (&[$(concat!(stringify!($enum), "::", stringify!($variant))),+], name)
        }
    };
}

variants!(request_variants of Request:
    Hello, Boot, Freeze, Seal, Branch, Pause, Resume, ReplaceLayers, Layers, Load, Fork, Save, Merge, Children,
    Acknowledge, Status, Stop);
variants!(message_variants of Message: Reply, Event);
variants!(reply_variants of Reply:
    Hello, Booted, Frozen, Sealed, Loaded, Branched, Paused, Resumed, Replaced, Layers, Forked, Children,
    Acknowledged, Status, Stopped, Error);
variants!(event_variants of Event: Ended, Ready, DiskFull, ChildEnded, GuestConnection);
variants!(role_variants of Role: Idle, Sandbox, Template);
variants!(wait_status_variants of WaitStatus: Exited, Signaled);
variants!(end_reason_variants of EndReason: PoweredOff, Reset, Panicked, Failed);

/// Each request, those with options with all and with none of them.
fn requests() -> Vec<Request> {
    let layers = vec![Some(FdRef(1)), None];
    let replaced = vec![Some(ReplacedLayers { count: 8, layer: FdRef(0) }), None];
    vec![
        Request::Hello { version: OLDEST_VERSION },
        Request::Boot(BootConfig {
            kvm: FdRef(0),
            vcpus: 2,
            mem_mib: 512,
            kernel: FdRef(1),
            initramfs: Some(FdRef(2)),
            cmdline: "quiet".into(),
            console: FdRef(3),
            console_limit: 1 << 20,
            disks: vec![
                DiskConfig { base: FdRef(4), layer: Some(FdRef(5)), frozen: Vec::new() },
                DiskConfig { base: FdRef(6), layer: None, frozen: Vec::new() },
            ],
            disk_state: None,
            net: Some(NetConfig { tap: FdRef(7), mac: [2, 0, 0, 0, 0, 1] }),
            vsock: Some(VsockConfig { cid: 3, listener: FdRef(8), guest_ports: vec![1024] }),
        }),
        Request::Boot(BootConfig {
            kvm: FdRef(0),
            vcpus: 1,
            mem_mib: 64,
            kernel: FdRef(1),
            initramfs: None,
            cmdline: String::new(),
            console: FdRef(2),
            console_limit: 0,
            disks: Vec::new(),
            disk_state: None,
            net: None,
            vsock: None,
        }),
        Request::Boot(BootConfig {
            kvm: FdRef(0),
            vcpus: 1,
            mem_mib: 64,
            kernel: FdRef(1),
            initramfs: None,
            cmdline: String::new(),
            console: FdRef(2),
            console_limit: 0,
            disks: vec![DiskConfig {
                base: FdRef(3),
                layer: Some(FdRef(6)),
                frozen: vec![FdRef(4), FdRef(5)],
            }],
            disk_state: Some(FdRef(7)),
            net: None,
            vsock: None,
        }),
        Request::Freeze,
        Request::Seal { layers: layers.clone() },
        Request::Branch(BranchConfig { control: FdRef(0), layers: layers.clone() }),
        Request::Pause,
        Request::Resume,
        Request::ReplaceLayers { disks: replaced.clone() },
        Request::Layers,
        Request::Load(LoadConfig {
            kvm: FdRef(0),
            state: FdRef(1),
            memory: vec![FdRef(2), FdRef(3)],
            disks: vec![DiskFiles { base: FdRef(4), layers: vec![FdRef(5)] }],
            vcpus: Some(2),
            mem_mib: Some(512),
            guest_ports: vec![1024],
        }),
        bare_load(),
        Request::Fork(ForkConfig {
            child: "sb-1".into(),
            control: FdRef(0),
            console: FdRef(2),
            console_limit: 1 << 20,
            layers,
            tap: Some(FdRef(3)),
            vsock: Some(FdRef(4)),
            cgroup: Some(FdRef(5)),
        }),
        Request::Fork(ForkConfig {
            child: "sb-2".into(),
            control: FdRef(0),
            console: FdRef(1),
            console_limit: 0,
            layers: Vec::new(),
            tap: None,
            vsock: None,
            cgroup: None,
        }),
        Request::Save(SaveConfig {
            child: "saver-1".into(),
            state: FdRef(0),
            memory: Some(FdRef(1)),
            parent: vec![FdRef(2)],
            pagemap: Some(FdRef(3)),
            disks: vec![Some(FdRef(4)), None],
            progress: Some(FdRef(5)),
        }),
        Request::Save(SaveConfig {
            child: "saver-2".into(),
            state: FdRef(0),
            memory: Some(FdRef(1)),
            parent: Vec::new(),
            pagemap: None,
            disks: Vec::new(),
            progress: None,
        }),
        Request::Save(SaveConfig {
            child: "saver-3".into(),
            state: FdRef(0),
            memory: None,
            parent: Vec::new(),
            pagemap: None,
            disks: vec![Some(FdRef(1))],
            progress: Some(FdRef(2)),
        }),
        Request::Merge(MergeConfig { child: "merge-1".into(), disks: replaced }),
        Request::Children,
        Request::Acknowledge { children: vec!["sb-1".into(), "sb-2".into()] },
        Request::Status,
        Request::Stop,
    ]
}

fn bare_load() -> Request {
    Request::Load(LoadConfig {
        kvm: FdRef(0),
        state: FdRef(1),
        memory: vec![FdRef(2)],
        disks: Vec::new(),
        vcpus: None,
        mem_mib: None,
        guest_ports: Vec::new(),
    })
}

/// What controllers before this one write, and what it means today.
fn older_requests() -> Vec<(&'static str, Request)> {
    // Before a controller said what the state must have.
    vec![(r#"{"load":{"kvm":0,"state":1,"memory":[2],"disks":[]}}"#, bare_load())]
}

/// What monitors of version 1 write, and what it means today.
fn older_messages() -> Vec<(&'static str, Message)> {
    let hello = Reply::Hello { version: 1, monitor: "0.1.0".into(), newest: 1 };
    vec![(r#"{"reply":{"hello":{"version":1,"monitor":"0.1.0"}}}"#, Message::Reply(hello))]
}

/// Each reply and event.
fn messages() -> Vec<Message> {
    let child = |name: &str, status| Child { name: name.into(), pid: 4242, status };
    let children = vec![
        child("sb-1", None),
        child("sb-2", Some(WaitStatus::Exited(0))),
        child("sb-3", Some(WaitStatus::Signaled(9))),
    ];
    let status = |role, running, ready| Reply::Status(Status { role, running, ready });
    let replies = [
        Reply::Hello { version: OLDEST_VERSION, monitor: "0.1.0".into(), newest: VERSION },
        Reply::Booted,
        Reply::Frozen,
        Reply::Sealed,
        Reply::Loaded,
        Reply::Branched { pid: 4242, pause_us: 1234, layers: vec![Some(FdRef(1)), None] },
        Reply::Paused,
        Reply::Resumed,
        Reply::Replaced,
        Reply::Layers { disks: vec![vec![FdRef(0), FdRef(1)], Vec::new()] },
        Reply::Forked { pid: 4242 },
        Reply::Children { children },
        Reply::Acknowledged,
        status(Role::Idle, false, false),
        status(Role::Sandbox, true, true),
        status(Role::Template, false, false),
        Reply::Stopped,
        Reply::Error { message: "there is no VM; boot one".into() },
    ];
    let reasons = [EndReason::PoweredOff, EndReason::Reset, EndReason::Panicked, EndReason::Failed];
    let end =
        |reason| Event::Ended(VmEnd { reason, detail: "a sentence".into(), console_tail: "a line\n".into() });
    let others = [
        Event::Ready,
        Event::DiskFull,
        Event::ChildEnded { child: "sb-1".into(), status: WaitStatus::Exited(1) },
        Event::ChildEnded { child: "sb-2".into(), status: WaitStatus::Signaled(9) },
        Event::GuestConnection { port: 1024 },
    ];
    let events = reasons.into_iter().map(end).chain(others);
    replies.into_iter().map(Message::Reply).chain(events.map(Message::Event)).collect()
}

fn save_progress() -> SaveProgress {
    SaveProgress { scanned_bytes: 1 << 20, total: 512 << 20, written: 4096 }
}

fn hexadecimal(bytes: &[u8]) -> String {
    bytes.iter().fold(String::new(), |mut text, byte| {
        let _ = write!(text, "{byte:02x}");
        text
    })
}

/// What today's code writes.
fn written() -> String {
    let requests =
        requests().into_iter().map(|one| format!("request {}", serde_json::to_string(&one).unwrap()));
    let older = older_requests().into_iter().map(|(text, _)| format!("older-request {text}"));
    let messages =
        messages().into_iter().map(|one| format!("message {}", serde_json::to_string(&one).unwrap()));
    let older_messages = older_messages().into_iter().map(|(text, _)| format!("older-message {text}"));
    let lines = requests.chain(older).chain(messages).chain(older_messages);
    let progress = format!("save-progress {}", hexadecimal(&save_progress().to_bytes()));
    lines.chain([progress]).map(|line| line + "\n").collect()
}

fn path() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/golden/control.txt")
}

/// The golden file, written anew first where that is asked for.
fn golden() -> &'static str {
    static GOLDEN: OnceLock<String> = OnceLock::new();
    GOLDEN.get_or_init(|| {
        if std::env::var_os("FORKD_WRITE_GOLDEN").is_some() {
            std::fs::create_dir_all(path().parent().unwrap()).unwrap();
            std::fs::write(path(), written()).unwrap();
        }
        std::fs::read_to_string(path()).unwrap()
    })
}

/// The rest of the golden lines of a kind.
fn lines_of<'a>(golden: &'a str, kind: &str) -> Vec<&'a str> {
    golden.lines().filter_map(|line| line.strip_prefix(kind)?.strip_prefix(' ')).collect()
}

#[test]
fn every_message_is_written_as_in_the_golden_file() {
    let (written, golden) = (written(), golden());
    for (line, (expected, found)) in golden.lines().zip(written.lines()).enumerate() {
        assert_eq!(found, expected, "line {} of {}", line + 1, path().display());
    }
    assert_eq!(written.lines().count(), golden.lines().count());
}

#[test]
fn every_golden_line_is_read_back_as_what_was_written() {
    let golden = golden();
    let read: Vec<Request> =
        lines_of(golden, "request").into_iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(read, requests());
    let read: Vec<Message> =
        lines_of(golden, "message").into_iter().map(|line| serde_json::from_str(line).unwrap()).collect();
    assert_eq!(read, messages());
    let older = lines_of(golden, "older-request");
    assert_eq!(older.len(), older_requests().len());
    for (line, (_, meaning)) in older.into_iter().zip(older_requests()) {
        assert_eq!(serde_json::from_str::<Request>(line).unwrap(), meaning, "{line}");
    }
    let older = lines_of(golden, "older-message");
    assert_eq!(older.len(), older_messages().len());
    for (line, (_, meaning)) in older.into_iter().zip(older_messages()) {
        assert_eq!(serde_json::from_str::<Message>(line).unwrap(), meaning, "{line}");
    }
    assert_eq!(lines_of(golden, "save-progress"), [hexadecimal(&save_progress().to_bytes())]);
    assert_eq!(SaveProgress::from_bytes(save_progress().to_bytes()), save_progress());
}

#[test]
fn every_variant_has_a_golden_line() {
    let golden = golden();
    let (mut all, mut found) = (BTreeSet::new(), BTreeSet::new());
    let mut seen = |(names, name): (&'static [&'static str], &'static str)| {
        all.extend(names);
        found.insert(name);
    };
    for line in lines_of(golden, "request") {
        seen(request_variants(&serde_json::from_str(line).unwrap()));
    }
    for line in lines_of(golden, "message") {
        let message = serde_json::from_str(line).unwrap();
        seen(message_variants(&message));
        match message {
            Message::Reply(reply) => {
                seen(reply_variants(&reply));
                match reply {
                    Reply::Status(status) => seen(role_variants(&status.role)),
                    Reply::Children { children } => children
                        .iter()
                        .filter_map(|child| child.status.as_ref())
                        .for_each(|status| seen(wait_status_variants(status))),
                    _ => {}
                }
            }
            Message::Event(event) => {
                seen(event_variants(&event));
                if let Event::Ended(end) = event {
                    seen(end_reason_variants(&end.reason));
                }
            }
        }
    }
    let missing: Vec<_> = all.difference(&found).collect();
    assert!(missing.is_empty(), "no line in {}: {missing:?}", path().display());
    // Of each of the seven kinds there was at least one.
    let kinds: BTreeSet<_> =
        all.iter().filter_map(|name| name.split_once("::")).map(|(kind, _)| kind).collect();
    assert_eq!(kinds.len(), 7, "{kinds:?}");
}

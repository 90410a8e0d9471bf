//! Folders with all below them.

use std::{
    ffi::OsStr,
    fs,
    io::Write,
    net::TcpStream,
    os::unix::{
        ffi::OsStrExt,
        fs::{PermissionsExt, symlink},
    },
    path::PathBuf,
    thread,
    time::Duration,
};

use forkd_protocol::connect::encode;
use rustix::fs::{FileType, Mode};
use serde_json::{Value, json};
use sha2::{Digest, Sha256};

use super::*;
use crate::agent::tests::{Response, TestAgent, basic};

const TREE: &str = "/forkd.Agent/Tree";

/// All entries of a stream, or its error.
fn tree_with(agent: &TestAgent, headers: &[(&str, &str)], request: Value) -> Result<Vec<TreeEntry>, Error> {
    let mut messages = agent.messages(TREE, headers, request);
    let mut all = Vec::new();
    loop {
        match messages.next() {
            Ok(message) => all.extend(serde_json::from_value::<TreeEntries>(message).unwrap().entries),
            Err(None) => return Ok(all),
            Err(Some(error)) => return Err(error),
        }
    }
}

fn tree(agent: &TestAgent, path: &str, hash: bool) -> Result<Vec<TreeEntry>, Error> {
    tree_with(agent, &[], json!({"path": agent.path(path), "hash": hash}))
}

fn hex(data: &[u8]) -> String {
    Sha256::digest(data).iter().map(|byte| format!("{byte:02x}")).collect()
}

#[test]
fn entries_come_in_the_order_of_the_bytes_of_their_paths_with_kind_size_mode_and_hash() {
    let agent = TestAgent::new();
    for folder in ["t/a/c", "t/a-"] {
        fs::create_dir_all(agent.path(folder)).unwrap();
    }
    let big: Vec<u8> = (0..200_000u32).map(|n| n as u8).collect();
    for (path, data) in
        [("t/a/b", &big[..]), ("t/a/c/d", b""), ("t/a-b", b"x"), ("t/a-/e", b"y"), ("t/b", b"z")]
    {
        fs::write(agent.path(path), data).unwrap();
    }
    fs::set_permissions(agent.path("t/b"), fs::Permissions::from_mode(0o4750)).unwrap();
    let time = std::time::UNIX_EPOCH - Duration::from_millis(1500);
    fs::File::options().write(true).open(agent.path("t/b")).unwrap().set_modified(time).unwrap();
    symlink("../nowhere", agent.path("t/link")).unwrap();
    rustix::fs::mknodat(rustix::fs::CWD, agent.path("t/pipe"), FileType::Fifo, Mode::RWXU, 0).unwrap();
    let all = tree(&agent, "t", true).unwrap();
    let paths: Vec<_> = all.iter().map(|entry| entry.path.as_str()).collect();
    assert_eq!(paths, ["a", "a-", "a-/e", "a-b", "a/b", "a/c", "a/c/d", "b", "link", "pipe"]);
    assert!(paths.is_sorted());
    let of = |path: &str| all.iter().find(|entry| entry.path == path).unwrap();
    assert_eq!((of("a/b").size, of("a/b").sha256.clone()), (200_000, Some(hex(&big))));
    assert_eq!(of("a/c/d").sha256, Some(hex(b"")));
    let b = of("b");
    assert_eq!((b.r#type.as_str(), b.mode, b.modified_ms), ("FILE_TYPE_FILE", 0o4750, -1500));
    let a = of("a");
    assert_eq!((a.r#type.as_str(), a.size, a.sha256.as_ref()), ("FILE_TYPE_DIRECTORY", 0, None));
    let link = of("link");
    assert_eq!(
        (link.r#type.as_str(), link.size, link.target.as_deref()),
        ("FILE_TYPE_SYMLINK", 10, Some("../nowhere"))
    );
    // A walk that opened the pipe would wait for a writer.
    assert_eq!((of("pipe").r#type.as_str(), of("pipe").size), ("FILE_TYPE_UNSPECIFIED", 0));
    assert!(all.iter().all(|entry| entry.incomplete.is_none()), "{all:?}");
    let plain = tree(&agent, "t", false).unwrap();
    assert!(plain.iter().all(|entry| entry.sha256.is_none()));
    assert_eq!(plain.len(), all.len());
}

#[test]
fn links_are_followed_to_the_folder_of_the_request_and_nowhere_else() {
    let agent = TestAgent::new();
    fs::create_dir_all(agent.path("t/inside")).unwrap();
    fs::create_dir(agent.path("outside")).unwrap();
    fs::write(agent.path("outside/secret"), "x").unwrap();
    symlink(agent.path("outside"), agent.path("t/out")).unwrap();
    symlink("t", agent.path("link")).unwrap();
    let all = tree(&agent, "link", true).unwrap();
    let paths: Vec<_> = all.iter().map(|entry| entry.path.as_str()).collect();
    assert_eq!(paths, ["inside", "out"]);
    assert!(all.iter().all(|entry| entry.sha256.is_none()));
}

#[test]
fn a_folder_that_becomes_a_link_while_the_walk_runs_does_not_lead_it_out() {
    let agent = TestAgent::new();
    fs::create_dir_all(agent.path("t/a")).unwrap();
    fs::create_dir(agent.path("outside")).unwrap();
    fs::write(agent.path("outside/secret"), "x").unwrap();
    symlink(agent.path("outside"), agent.path("t/b")).unwrap();
    let (a, b) = (agent.path("t/a"), agent.path("t/b"));
    let swap = |from: &PathBuf, to: &PathBuf| {
        let flags = rustix::fs::RenameFlags::EXCHANGE;
        rustix::fs::renameat_with(rustix::fs::CWD, from, rustix::fs::CWD, to, flags).unwrap();
    };
    let done = std::sync::atomic::AtomicBool::new(false);
    thread::scope(|scope| {
        scope.spawn(|| {
            while !done.load(Ordering::SeqCst) {
                swap(&a, &b);
            }
        });
        for _ in 0..200 {
            let all = tree(&agent, "t", true).unwrap();
            assert!(all.iter().all(|entry| !entry.path.contains("secret")), "{all:?}");
        }
        done.store(true, Ordering::SeqCst);
    });
}

#[test]
fn names_that_are_not_text_come_with_their_bytes() {
    let agent = TestAgent::new();
    fs::create_dir(agent.path("t")).unwrap();
    for name in [&b"a\xff"[..], b"a\xfe"] {
        fs::write(agent.path("t").join(OsStr::from_bytes(name)), name).unwrap();
    }
    symlink(OsStr::from_bytes(b"\xff"), agent.path("t/link")).unwrap();
    let all = tree(&agent, "t", true).unwrap();
    let names: Vec<_> = all.iter().map(|entry| (entry.path.as_str(), entry.path_bytes.clone())).collect();
    let replaced = "a\u{fffd}";
    assert_eq!(
        names,
        [(replaced, Some(b"a\xfe".to_vec())), (replaced, Some(b"a\xff".to_vec())), ("link", None)]
    );
    assert_eq!(all[1].sha256, Some(hex(b"a\xff")));
    assert_eq!((all[2].target.as_deref(), all[2].target_bytes.clone()), (Some("\u{fffd}"), Some(vec![0xff])));
}

#[test]
fn the_walk_has_the_permissions_of_the_user_and_shows_what_they_do_not_allow() {
    let agent = TestAgent::new();
    fs::create_dir_all(agent.path("t/closed/inside")).unwrap();
    fs::write(agent.path("t/secret"), "x").unwrap();
    fs::write(agent.path("t/public"), "x").unwrap();
    fs::set_permissions(agent.path("t/closed"), fs::Permissions::from_mode(0o700)).unwrap();
    fs::set_permissions(agent.path("t/secret"), fs::Permissions::from_mode(0o600)).unwrap();
    let user = basic("65534");
    let headers = [("authorization", user.as_str())];
    let all = tree_with(&agent, &headers, json!({"path": agent.path("t"), "hash": true})).unwrap();
    let seen: Vec<_> = all
        .iter()
        .map(|entry| (entry.path.as_str(), entry.sha256.is_some(), entry.incomplete.as_deref()))
        .collect();
    let unreadable = Some("unreadable");
    assert_eq!(seen, [("closed", false, unreadable), ("public", true, None), ("secret", false, unreadable)]);
    assert_eq!(tree(&agent, "t", true).unwrap().len(), 4);
    let closed = tree_with(&agent, &headers, json!({"path": agent.path("t/closed")}));
    assert_eq!(closed.unwrap_err().code, Code::PermissionDenied);
}

#[test]
fn what_is_no_folder_or_no_real_file_system_is_refused() {
    let agent = TestAgent::new();
    fs::write(agent.path("file"), "").unwrap();
    assert_eq!(tree(&agent, "missing", false).unwrap_err().code, Code::NotFound);
    assert_eq!(tree(&agent, "file", false).unwrap_err().code, Code::InvalidArgument);
    let error = tree_with(&agent, &[], json!({"path": "/proc"})).unwrap_err();
    assert_eq!(error.code, Code::InvalidArgument);
    assert!(error.message.contains("choose another folder"), "{error}");
}

/// Takes entries and counts them.
struct Counter(usize);

impl Visit for Counter {
    fn found(&mut self, _: TreeEntry) -> Result<(), Stop> {
        self.0 += 1;
        Ok(())
    }
    fn tick(&mut self) -> Result<(), Stop> {
        Ok(())
    }
}

#[test]
fn too_many_entries_and_too_deep_folders_are_refused() {
    let agent = TestAgent::new();
    fs::create_dir_all(agent.path("t/a")).unwrap();
    for n in 0..10 {
        fs::write(agent.path(&format!("t/a/{n}")), "").unwrap();
    }
    let root = walk::open_root(&agent.path("t")).unwrap();
    let walk = |max_entries| {
        let mut counter = Counter(0);
        walk::walk(&root, Options { hash: false, max_entries }, &mut counter).map(|()| counter.0)
    };
    assert_eq!(walk(11).unwrap(), 11);
    match walk(10) {
        Err(Stop::Refused(error)) => {
            assert_eq!(error.code, Code::OutOfRange);
            assert!(error.message.contains("choose a smaller folder"), "{error}");
        }
        other => panic!("{other:?}"),
    }
    fs::create_dir_all(agent.path(&format!("deep/{}", "d/".repeat(250)))).unwrap();
    assert_eq!(tree(&agent, "deep", false).unwrap_err().code, Code::OutOfRange);
}

/// A file that takes longer to hash than any test.
fn endless(agent: &TestAgent) -> PathBuf {
    let folder = agent.path("endless");
    fs::create_dir(&folder).unwrap();
    fs::File::create(folder.join("file")).unwrap().set_len(1 << 43).unwrap();
    folder
}

#[test]
fn a_walk_ends_when_its_time_is_over() {
    let agent = TestAgent::new();
    let request = json!({"path": endless(&agent), "hash": true});
    let error = tree_with(&agent, &[("connect-timeout-ms", "100")], request).unwrap_err();
    assert_eq!(error.code, Code::DeadlineExceeded);
    assert!(error.message.contains("choose a smaller folder"), "{error}");
}

#[test]
fn a_walk_shows_that_it_works_and_ends_when_its_caller_leaves() {
    let agent = TestAgent::new();
    let message = encode(0, &json!({"path": endless(&agent), "hash": true}));
    let begin = || -> TcpStream {
        let mut stream = agent.connect();
        let head = format!(
            "POST {TREE} HTTP/1.1\r\nhost: guest\r\ncontent-type: application/connect+json\r\n\
             content-length: {}\r\n\r\n",
            message.len()
        );
        stream.write_all(head.as_bytes()).unwrap();
        stream.write_all(&message).unwrap();
        stream
    };
    let running: Vec<_> = (0..MAX_WALKS).map(|_| Response::read(begin())).collect();
    let refused = || tree(&agent, "root", false);
    assert_eq!(refused().unwrap_err().code, Code::Unavailable);
    let mut running = running.into_iter();
    let piece = running.next().unwrap().piece().unwrap();
    assert_eq!(piece, encode(0, &TreeEntries::default()));
    drop(running);
    for _ in 0..600 {
        if refused().is_ok() {
            return;
        }
        thread::sleep(Duration::from_millis(100));
    }
    panic!("walks go on without their callers");
}

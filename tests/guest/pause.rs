//! How long sandboxes with Linux in them live.

use std::io::{Read, Write};
use std::os::unix::net::UnixStream;

use forkd_protocol::agent::{AGENT_PORT, FreezeRequest};
use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use forkd_tests::monitor::connect_to_guest;
use serde_json::json;

use crate::parent::{SMALL, TAG, alone, daemon, fork};

#[test]
fn an_idle_sandbox_stands_still_and_the_next_command_finds_it_as_it_was() {
    let daemon = daemon();
    let body = json!({"snapshot_tag": TAG, "idle_timeout_secs": 3, "on_timeout": "pause"});
    let sandbox = daemon.spawn(body)[0]["id"].as_str().unwrap().to_owned();
    // One that runs for longer is not idle.
    assert_eq!(daemon.sh(&sandbox, "echo kept > /run/it; sleep 6; cat /run/it"), "kept\n");
    eventually("it stands still", || (daemon.sandbox(&sandbox)["state"] == "paused").then_some(()));
    assert_eq!(daemon.sh(&sandbox, "cat /run/it"), "kept\n");
    daemon.delete(&[sandbox]);
}

#[test]
fn a_freeze_that_is_read_after_its_caller_has_gone_leaves_nothing_frozen() {
    let daemon = daemon();
    let sandbox = fork(1).remove(0);
    let folder = daemon.run_dir().join("sandboxes").join(&sandbox);
    let mut caller = connect_to_guest(&folder, AGENT_PORT).unwrap();
    // A busy computer gets its time.
    let body = serde_json::to_string(&FreezeRequest { timeout_ms: 60_000, ..Default::default() }).unwrap();
    let ask = |caller: &mut UnixStream, call: &str| {
        let head = "HTTP/1.1\r\nhost: guest\r\ncontent-type: application/json\r\ncontent-length:";
        write!(caller, "POST /forkd.Agent/{call} {head} {}\r\n\r\n{body}", body.len()).unwrap();
    };
    // This does freeze, as long as the caller waits for the answer.
    for (call, answer) in [("Freeze", "{\"frozen\":true}"), ("Thaw", "{}")] {
        ask(&mut caller, call);
        let mut said = String::new();
        while !said.ends_with(answer) {
            let mut piece = [0; 1024];
            let count = caller.read(&mut piece).unwrap();
            assert_ne!(count, 0, "{said}");
            said.push_str(std::str::from_utf8(&piece[..count]).unwrap());
        }
        assert!(said.starts_with("HTTP/1.1 200 "), "{said}");
    }
    // The guest gets no CPU: it reads this request only after the caller has left.
    daemon.tell(&sandbox, "pause", json!({}));
    ask(&mut caller, "Freeze");
    drop(caller);
    daemon.tell(&sandbox, "resume", json!({}));
    // For longer than the freeze takes.
    for word in 0..10 {
        let args = json!({"args": ["sh", "-c", format!("sleep 0.2; echo {word}")], "timeout_secs": 60});
        assert_eq!(daemon.exec(&sandbox, args)["stdout"], format!("{word}\n"));
    }
    daemon.delete(&[sandbox]);
}

#[test]
fn a_paused_sandbox_is_quiesced_for_the_next_daemon_too_which_lets_its_processes_go_on() {
    let mut daemon = alone();
    let source = daemon.fork(SMALL, 1).remove(0);
    daemon.sh(&source, "setsid sh -c 'while :; do echo x >> /run/ticks; sleep 0.1; done' >/dev/null 2>&1 &");
    let goes_on = |daemon: &Daemon, id: &str| {
        let ticks = || daemon.sh(id, "cat /run/ticks 2>/dev/null | wc -l").trim().parse::<u64>().unwrap();
        let before = ticks();
        eventually("its program to go on", || (ticks() > before).then_some(()));
    };
    goes_on(&daemon, &source);
    let branch =
        |daemon: &Daemon| daemon.branch(&source, json!({"tag": "still", "mode": "live", "wait": false}));
    // A busy computer may not have them stand still in time. Right after the pause: what a daemon notes later, of a
    // branch for one, has the pause in it, too.
    eventually("a pause before which its processes stood still", || {
        daemon.tell(&source, "pause", json!({}));
        daemon.restart();
        assert_eq!(daemon.sandbox(&source)["state"], "paused");
        if branch(&daemon)["quiesced"] == true {
            return Some(());
        }
        assert_eq!(daemon.delete_snapshot("still", "").status, 204);
        daemon.tell(&source, "resume", json!({}));
        None
    });
    let child = daemon.fork("still", 1).remove(0);
    goes_on(&daemon, &child);
    daemon.tell(&source, "resume", json!({}));
    goes_on(&daemon, &source);
    daemon.delete(&[source, child]);
    assert_eq!(daemon.delete_snapshot("still", "").status, 204);
}

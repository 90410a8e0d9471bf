//! Branches of sandboxes that do something: the source does not notice, the branch's children are their
//! own, and the source can be taken back.

use std::collections::BTreeSet;

use forkd_tests::eventually;
use serde_json::{Value, json};

use crate::parent::{self, daemon, fork};

/// A connection within the guest, and what becomes of it.
const CONNECTED: &str = "
import socket
server = socket.create_server(('127.0.0.1', 7100))
inner = socket.create_connection(('127.0.0.1', 7100))
peer, _ = server.accept()
def say(word):
    try:
        inner.settimeout(60); peer.settimeout(60)
        inner.sendall(word)
        return peer.recv(100)
    except TimeoutError:
        return 'waited in vain'
    except OSError:
        return 'failed'
thought = 'half'
with open('/root/note', 'w') as file:
    file.write('never synced')
";

#[test]
fn a_source_does_not_notice_its_branch_whose_children_are_their_own() {
    let daemon = daemon();
    let source = fork(1).remove(0);
    let names = "hostname; cat /etc/machine-id /proc/sys/kernel/random/boot_id";
    let name = daemon.sh(&source, names);
    daemon.eval(&source, CONNECTED);
    let counting =
        "i=0; while [ ! -e /run/enough ]; do echo $i; i=$((i + 1)); echo $i > /run/ticks; sleep 0.1; done";
    let ticks = |id: &str| daemon.sh(id, "cat /run/ticks 2>/dev/null || echo 0").trim().parse::<u64>().ok();
    let (children, printed) = std::thread::scope(|scope| {
        // A command that runs on through the branch, over a connection that must survive it.
        let command = scope.spawn(|| daemon.sh(&source, counting));
        eventually("the command to count", || ticks(&source).filter(|ticks| *ticks > 2));
        let info = daemon.branch(&source, json!({"tag": "mid", "mode": "live", "wait": false}));
        assert!(["writing", "ready"].contains(&info["status"].as_str().unwrap()), "{info}");
        // Whether its processes froze in time depends on load; the report of it does not.
        let (pause, quiesced) = (info["pause_ms"].as_f64().unwrap(), info["quiesced"].as_bool().unwrap());
        let frozen = info["frozen_ms"].as_f64();
        assert!(if quiesced { frozen.is_none_or(|ms| ms >= pause) } else { frozen.is_none() }, "{info}");
        let children = daemon.fork("mid", 2);
        let now = eventually("a number", || ticks(&source));
        eventually("the command to go on", || ticks(&source).filter(|ticks| *ticks > now));
        daemon.sh(&source, "touch /run/enough");
        (children, command.join().unwrap())
    });
    let lines: Vec<u64> = printed.lines().map(|line| line.parse().unwrap()).collect();
    assert_eq!(lines, (0..lines.len() as u64).collect::<Vec<_>>(), "lost or twice");

    // Connections inside the guest go on, in the source and in the children; sockets that listen do, too.
    assert_eq!(daemon.eval(&source, "say(b'on')"), "b'on'");
    for id in &children {
        assert_eq!(daemon.eval(id, "say(b'on')"), "b'on'");
        let again = "again = socket.create_connection(('127.0.0.1', 7100)); server.accept()[1][0]";
        assert_eq!(daemon.eval(id, again), "'127.0.0.1'");
    }

    // What each has of its own.
    let everybody = [vec![source.clone()], children.clone()].concat();
    for code in [
        "os.urandom(16).hex()",
        "random.random()",
        "numpy.random.rand()",
        "str(uuid.uuid4())",
        "uuid.getnode()",
    ] {
        let drawn: BTreeSet<String> = everybody.iter().map(|id| daemon.eval(id, code)).collect();
        assert_eq!(drawn.len(), everybody.len(), "{code}: {drawn:?}");
    }
    assert_eq!(daemon.sh(&source, names), name, "the source was renamed");
    for line in 1..=3 {
        let one = format!("({names}) | sed -n {line}p");
        let told: BTreeSet<String> = everybody.iter().map(|id| daemon.sh(id, &one)).collect();
        assert_eq!(told.len(), everybody.len(), "{told:?}");
    }

    // They share one state, and from then on each changes only its own.
    for id in &everybody {
        assert_eq!(daemon.eval(id, "thought"), "'half'");
        assert_eq!(daemon.sh(id, "cat /root/note /root/parent.txt"), "never syncedof the parent");
        daemon.eval(id, &format!("thought = '{id}'"));
        daemon.sh(id, &format!("echo {id} > /root/note; sync; echo 3 > /proc/sys/vm/drop_caches"));
    }
    for id in &everybody {
        assert_eq!(daemon.eval(id, "thought"), format!("'{id}'"));
        assert_eq!(daemon.sh(id, "cat /root/note").trim(), id);
    }
    let later = daemon.fork("mid", 1);
    assert_eq!(daemon.eval(&later[0], "thought"), "'half'");
    assert_eq!(daemon.sh(&later[0], "cat /root/note"), "never synced");

    let told = daemon.sandbox(&source);
    assert_eq!(
        (&told["has_branched"], &told["branch_count"], &told["last_branch_tag"]),
        (&json!(true), &json!(1), &json!("mid")),
        "{told}"
    );
    let info = daemon.when_ready("mid");
    assert_eq!((&info["mode"], &info["parent_tag"]), (&json!("live"), &json!(parent::TAG)), "{info}");
    assert_eq!(info["branched_from"], json!(source), "{info}");
    assert!(info["bytes_written"].as_u64().unwrap() > 0, "{info}");
    daemon.delete(&[everybody, later].concat());
    assert_eq!(daemon.delete_snapshot("mid", "").status, 204);
}

#[test]
fn a_branch_outlives_its_source_however_soon_that_goes() {
    let daemon = daemon();
    for round in 0..3 {
        let source = fork(1).remove(0);
        daemon.eval(&source, &format!("thought = {round}"));
        let tag = format!("soon-{round}");
        daemon.branch(&source, json!({"tag": tag, "mode": "live", "wait": false}));
        if round == 1 {
            // What it is taken back to is the branch that has just been taken.
            daemon.eval(&source, "thought = 'lost'");
            daemon.tell(&source, "rollback", json!({}));
            assert_eq!(daemon.eval(&source, "thought"), "1");
        }
        daemon.delete(std::slice::from_ref(&source));
        let child = daemon.fork(&tag, 1);
        assert_eq!(daemon.eval(&child[0], "thought"), round.to_string());
        daemon.when_ready(&tag);
        daemon.delete(&child);
        assert_eq!(daemon.delete_snapshot(&tag, "").status, 204);
    }
}

#[test]
fn sandboxes_branched_at_the_same_time_are_not_mixed_up() {
    let daemon = daemon();
    let sources = fork(3);
    for id in &sources {
        daemon.eval(id, &format!("who = '{id}'"));
        daemon.sh(id, &format!("echo {id} > /root/who"));
    }
    let twice: Vec<u16> = std::thread::scope(|scope| {
        for id in &sources {
            scope.spawn(move || daemon.branch(id, json!({"tag": format!("of-{id}"), "mode": "live"})));
        }
        // And one tag for two, which only one of them can have.
        let same = sources[..2].iter().map(|id| {
            scope.spawn(move || daemon.try_branch(id, json!({"tag": "same", "mode": "live"})).status)
        });
        let same: Vec<_> = same.collect();
        same.into_iter().map(|asked| asked.join().unwrap()).collect()
    });
    assert!(twice.contains(&201) && twice.contains(&409), "{twice:?}");
    for id in &sources {
        let tag = format!("of-{id}");
        assert_eq!(daemon.when_ready(&tag)["branched_from"], json!(id));
        let child = daemon.fork(&tag, 1);
        assert_eq!(daemon.eval(&child[0], "who"), format!("'{id}'"));
        assert_eq!(daemon.sh(&child[0], "cat /root/who").trim(), id);
        assert_eq!(daemon.eval(id, "who"), format!("'{id}'"));
        daemon.delete(&child);
        assert_eq!(daemon.delete_snapshot(&tag, "").status, 204);
    }
    assert_eq!(daemon.delete_snapshot("same", "").status, 204);
    daemon.delete(&sources);
}

#[test]
fn a_guest_whose_agent_does_not_answer_is_branched_all_the_same() {
    let daemon = daemon();
    let source = fork(1).remove(0);
    daemon.eval(&source, "kept = 'in memory'");
    // A real-time loop on the only CPU, with the kernel's safety margin off: nothing else runs until it is
    // over, the agent included. It waits until the call that starts it has been answered.
    let hog = "import os, time\nos.sched_setscheduler(0, os.SCHED_FIFO, os.sched_param(99))\ntime.sleep(4)\n\
               console = os.open('/dev/console', os.O_WRONLY)\nos.write(console, b'nobody else runs\\n')\n\
               until = time.monotonic() + 12\nwhile time.monotonic() < until: pass";
    daemon.sh(&source, "echo -1 > /proc/sys/kernel/sched_rt_runtime_us");
    let start = format!("import subprocess\nhog = subprocess.Popen(['python3', '-IS', '-c', {hog:?}])");
    daemon.eval(&source, &start);
    eventually("the guest to have no time for its agent", || {
        let console = daemon.request("GET", &format!("/v1/sandboxes/{source}/console"), None);
        String::from_utf8_lossy(&console.body).contains("nobody else runs").then_some(())
    });
    let info = daemon.branch(&source, json!({"tag": "deaf", "mode": "live"}));
    assert_eq!(info["quiesced"], false, "{info}");
    // When the loop is over, in the source and in a child, both answer.
    let child = daemon.fork("deaf", 1).remove(0);
    for id in [&source, &child] {
        assert_eq!(daemon.eval(id, "hog.wait(); kept"), "'in memory'");
    }
    daemon.delete(&[source, child]);
    assert_eq!(daemon.delete_snapshot("deaf", "").status, 204);
}

/// Ticks of the CPU the guest of a sandbox has had so far.
fn guest_ticks(info: &Value) -> u64 {
    let stat = std::fs::read_to_string(format!("/proc/{}/stat", info["pid"])).unwrap();
    // The name may hold anything; the time guests ran is the 43rd field.
    stat.rsplit_once(") ").unwrap().1.split(' ').nth(40).unwrap().parse().unwrap()
}

#[test]
fn a_paused_sandbox_stands_still_until_it_is_resumed() {
    let daemon = daemon();
    let source = fork(1).remove(0);
    daemon.eval(
        &source,
        "import threading\nticks = [0]\ndef tick():\n    while True: ticks[0] += 1\n\
         threading.Thread(target=tick, daemon=True).start()\nwho = 'paused'",
    );
    let path = |verb: &str| format!("/v1/sandboxes/{source}/{verb}");
    // It can be branched, and its processes stand still in the branch: they did before the pause, unless they
    // did not do so in time on a busy computer.
    let still = eventually("a pause before which its processes stood still", || {
        let info = daemon.tell(&source, "pause", json!({}));
        assert_eq!(info["state"], "paused", "{info}");
        let still = guest_ticks(&info);
        let branch = daemon.branch(&source, json!({"tag": "asleep", "mode": "live"}));
        if branch["quiesced"] == true {
            return Some(still);
        }
        assert_eq!(daemon.delete_snapshot("asleep", "").status, 204);
        daemon.tell(&source, "resume", json!({}));
        None
    });
    let refused = daemon.request("POST", &path("exec"), Some(json!({"args": ["true"]})));
    assert_eq!(refused.status, 409, "{refused:?}");
    assert!(String::from_utf8_lossy(&refused.body).contains("resume"), "{refused:?}");
    assert_eq!(daemon.request("POST", &path("eval"), Some(json!({"code": "1"}))).status, 409);
    // It stays paused, and the branch's children run.
    let child = daemon.fork("asleep", 1).remove(0);
    assert_eq!(daemon.eval(&child, "who"), "'paused'");
    let info = daemon.sandbox(&source);
    assert_eq!((&info["state"], guest_ticks(&info)), (&json!("paused"), still), "{info}");

    assert_eq!(daemon.tell(&source, "resume", json!({}))["state"], "running");
    let first: u64 = daemon.eval(&source, "ticks[0]").parse().unwrap();
    eventually("its thread to go on", || {
        (daemon.eval(&source, "ticks[0]").parse::<u64>().unwrap() > first).then_some(())
    });
    daemon.delete(&[source, child]);
    assert_eq!(daemon.delete_snapshot("asleep", "").status, 204);
}

#[test]
fn rolled_back_a_sandbox_goes_on_from_its_branch_under_the_same_name() {
    let daemon = daemon();
    let source = fork(1).remove(0);
    let state = |id: &str| (daemon.eval(id, "stage"), daemon.sh(id, "cat /root/stage; hostname"));
    let at = |stage: &str| (format!("'{stage}'"), format!("{stage}\n{source}\n"));
    let reach = |stage: &str| {
        daemon.eval(&source, &format!("stage = '{stage}'"));
        daemon.sh(&source, &format!("echo {stage} > /root/stage"));
    };
    let before = daemon.sandbox(&source);
    let boot_id = || daemon.sh(&source, "cat /proc/sys/kernel/random/boot_id");
    let boot = boot_id();
    reach("one");
    daemon.branch(&source, json!({"tag": "one", "mode": "live", "wait": false}));
    reach("two");
    daemon.branch(&source, json!({"tag": "two", "mode": "live"}));
    reach("three");
    daemon.sh(&source, "touch /root/three; sync");

    // To the latest branch; then to an older one; and to what it was spawned from.
    let rolled = daemon.tell(&source, "rollback", json!({}));
    assert_eq!((&rolled["id"], &rolled["rolled_back_to"]), (&json!(source), &json!("two")), "{rolled}");
    for field in ["netns", "guest_addr", "network", "memory_limit_mib", "mem_size_mib", "vcpus"] {
        assert_eq!(rolled[field], before[field], "{field}: {rolled}");
    }
    assert_eq!(state(&source), at("two"));
    assert_eq!(boot_id(), boot, "the same sandbox, the same boot");
    assert_eq!(daemon.sh(&source, "ls /root/three 2>/dev/null | wc -l").trim(), "0");
    let rolled = daemon.tell(&source, "rollback", json!({"to": "one"}));
    assert_eq!(rolled["rolled_back_to"], "one", "{rolled}");
    assert_eq!(state(&source), at("one"));
    // It lives like any other: it is branched, and its branch is of what it is now.
    reach("four");
    daemon.branch(&source, json!({"tag": "four", "mode": "diff"}));
    let child = daemon.fork("four", 1).remove(0);
    assert_eq!(daemon.eval(&child, "stage"), "'four'");
    daemon.tell(&source, "rollback", json!({"to": parent::TAG}));
    assert_eq!(daemon.eval(&source, "'stage' in globals()"), "False");
    assert_eq!(daemon.sh(&source, "cat /root/parent.txt"), "of the parent");

    // What cannot be rolled back to leaves it as it is.
    let path = format!("/v1/sandboxes/{source}/rollback");
    assert_eq!(daemon.request("POST", &path, Some(json!({"to": "nobody"}))).status, 404);
    assert_eq!(daemon.sh(&source, "hostname").trim(), source);
    daemon.delete(&[source, child]);
    for tag in ["four", "two", "one"] {
        assert_eq!(daemon.delete_snapshot(tag, "").status, 204, "{tag}");
    }
}

//! Commands, run for real on this machine through an agent.

use std::{fs, os::unix::fs::PermissionsExt, path::Path, thread, time::Duration};

use base64::{Engine, prelude::BASE64_STANDARD};
use forkd_protocol::agent::Event;
use serde_json::json;

use super::*;
use crate::agent::tests::{Collected, Events, TestAgent, basic, eventually};

fn is_alive(pid: u32) -> bool {
    let stat = fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    // The state comes after the name in parentheses. A zombie is not alive.
    stat.rsplit(") ").next().is_some_and(|rest| !rest.is_empty() && !rest.starts_with(['Z', 'X']))
}

fn read_pid(path: &Path) -> u32 {
    eventually("the pid file", || fs::read_to_string(path).is_ok_and(|text| text.ends_with('\n')));
    fs::read_to_string(path).unwrap().trim().parse().unwrap()
}

#[test]
fn a_command_gets_its_arguments_as_they_are() {
    let agent = TestAgent::new();
    let args = ["%s|", "a b", "", "$HOME", "*", "'\"\\", "ü\n"];
    let all = agent.start(json!({"process": {"cmd": "printf", "args": args}, "stdin": false})).collect();
    assert_eq!(all.out(), "a b||$HOME|*|'\"\\|ü\n|");
    let end = all.end.unwrap();
    assert_eq!((end.exit_code, end.exited, end.status.as_str(), end.error), (0, true, "exit status 0", None));
}

#[test]
fn a_command_has_the_environment_of_its_user_and_what_the_caller_adds() {
    let agent = TestAgent::new();
    let request = json!({"process": {"cmd": "env", "envs": {"GREETING": "hi there", "HOME": "/elsewhere"}}});
    let out = agent.start(request).collect().out();
    let lines: Vec<&str> = out.lines().collect();
    for expected in
        ["USER=root", "LOGNAME=root", "FORKD_SANDBOX=true", "GREETING=hi there", "HOME=/elsewhere"]
    {
        assert!(lines.contains(&expected), "{expected} in {out}");
    }
    assert!(out.contains("PATH=/usr/local/sbin:"));
    assert!(!out.contains("CARGO"), "the agent's own environment leaks: {out}");
}

#[test]
fn a_command_runs_as_its_user_in_its_session_without_the_agents_privileges() {
    let agent = TestAgent::new();
    let script = "id -u; id -g; cat /proc/self/oom_score_adj; ls /proc/self/fd | wc -l; umask; ps -o pid=,pgid=,sid= -p $$";
    let headers = [("authorization", &*basic("nobody"))];
    let request = json!({"process": {"cmd": "sh", "args": ["-c", script], "cwd": "/"}, "stdin": false});
    let all = agent.stream("/process.Process/Start", &headers, request).collect();
    let out = all.out();
    let lines: Vec<&str> = out.lines().collect();
    // Four descriptors: the three standard ones and the listing's own.
    assert_eq!(lines[..5], ["65534", "65534", "0", "4", "0022"], "{out}");
    let ids: Vec<&str> = lines[5].split_whitespace().collect();
    assert_eq!((ids[0], ids[0]), (ids[1], ids[2]), "leads its group and its session");
}

#[test]
fn a_command_starts_where_it_should() {
    let agent = TestAgent::new();
    let pwd = |cwd: serde_json::Value, user: &str| {
        let request = json!({"process": {"cmd": "pwd", "cwd": cwd}, "stdin": false});
        agent.stream("/process.Process/Start", &[("authorization", &*basic(user))], request).collect()
    };
    assert_eq!(pwd(json!(null), "root").out(), "/root\n");
    assert_eq!(pwd(json!("/usr/lib"), "root").out(), "/usr/lib\n");
    assert_eq!(pwd(json!("."), "root").out(), "/root\n");
    // A home that does not exist, as that of the user `nobody`.
    assert_eq!(pwd(json!(null), "nobody").out(), "/\n");
    assert_eq!(pwd(json!("/no/such/folder"), "root").failure().code, Code::InvalidArgument);
    assert_eq!(pwd(json!("/root"), "nobody").failure().code, Code::InvalidArgument);
    assert_eq!(pwd(json!(null), "whoever").failure().code, Code::Unauthenticated);
}

#[test]
fn what_cannot_be_executed_is_explained() {
    let agent = TestAgent::new();
    let write = |name: &str, content: &str, mode: u32| {
        let path = agent.path(name);
        fs::write(&path, content).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(mode)).unwrap();
        path.to_string_lossy().into_owned()
    };
    for (cmd, exit_code, expected) in [
        ("no-such-program".to_string(), 127, "no-such-program: not found in this image"),
        ("/no/such/program".to_string(), 127, "not found in this image"),
        (write("plain", "#!/bin/sh\n", 0o644), 126, "permission denied"),
        // Its name does not matter.
        (write("not found in this image", "#!/bin/sh\n", 0o644), 126, "permission denied"),
        (write("shebangless", "echo hi\n", 0o755), 126, "#!/bin/sh"),
        (write("lost", "#!/no/such/interpreter\n", 0o755), 126, "interpreter"),
        ("/etc".to_string(), 126, "permission denied"),
        (String::new(), 126, "process.cmd is empty"),
        ("a\0b".to_string(), 126, "NUL"),
    ] {
        let error = agent.start(json!({"process": {"cmd": cmd}})).collect().failure();
        assert_eq!((error.code, error.exit_code), (Code::InvalidArgument, Some(exit_code)), "{cmd}");
        assert!(error.message.contains(expected), "{cmd}: {}", error.message);
    }
    let bad_name = json!({"process": {"cmd": "true", "envs": {"A=B": "c"}}});
    let error = agent.start(bad_name).collect().failure();
    assert_eq!((error.code, error.exit_code), (Code::InvalidArgument, Some(126)));
    let too_long = json!({"process": {"cmd": "true", "args": ["x".repeat(3 << 20)]}});
    assert!(agent.start(too_long).collect().failure().message.contains("too long"));
}

#[test]
fn every_way_to_end_is_reported() {
    let agent = TestAgent::new();
    for code in [0, 1, 7, 255] {
        assert_eq!(agent.sh(&format!("exit {code}")).code(), code);
    }
    let end = agent.sh("kill -KILL $$").end.unwrap();
    assert_eq!((end.exit_code, end.exited, end.signal), (-1, false, Some(9)));
    assert_eq!((end.status.as_str(), end.error.as_deref()), ("signal: killed", Some("signal: killed")));
    assert_eq!(agent.sh("kill -TERM $$").end.unwrap().status, "signal: terminated");
}

#[test]
fn standard_input_is_what_is_sent_until_it_is_closed() {
    let agent = TestAgent::new();
    let mut events = agent.start(json!({"process": {"cmd": "cat"}}));
    let pid = events.pid();
    let send = |bytes: &[u8]| {
        let input = json!({"stdin": BASE64_STANDARD.encode(bytes)});
        agent.call("/process.Process/SendInput", json!({"process": {"pid": pid}, "input": input}))
    };
    send(b"one\n").unwrap();
    assert_eq!(events.until("one"), "one\n");
    // More than a pipe holds: the call waits until it is read.
    let big = vec![b'x'; 1 << 20];
    let reader = thread::spawn(move || events.collect());
    send(&big).unwrap();
    agent.call("/process.Process/CloseStdin", json!({"process": {"pid": pid}})).unwrap();
    let all = reader.join().unwrap();
    assert_eq!((all.stdout.len(), all.code()), (1 << 20, 0));
    assert_eq!(send(b"late").unwrap_err().code, Code::NotFound);
}

#[test]
fn input_to_a_process_that_does_not_read_fails_when_it_ends() {
    let agent = TestAgent::new();
    let mut events = agent.start(json!({"process": {"cmd": "sleep", "args": ["1"]}}));
    let pid = events.pid();
    let input = json!({"stdin": BASE64_STANDARD.encode(vec![0; 1 << 20])});
    let sent = agent.call("/process.Process/SendInput", json!({"process": {"pid": pid}, "input": input}));
    assert!(matches!(sent.unwrap_err().code, Code::NotFound | Code::FailedPrecondition));
    assert_eq!(events.collect().code(), 0);
}

#[test]
fn input_that_only_a_background_process_could_read_does_not_hold_the_end() {
    let agent = TestAgent::new();
    let mut events = agent.start(
        json!({"process": {"cmd": "sh", "args": ["-c", "exec 3<&0; sleep 1000 & sleep 0.5; exit 6"]}}),
    );
    let pid = events.pid();
    let input = json!({"stdin": BASE64_STANDARD.encode(vec![0; 1 << 20])});
    let sent = agent.call("/process.Process/SendInput", json!({"process": {"pid": pid}, "input": input}));
    assert_eq!(sent.unwrap_err().code, Code::NotFound);
    assert_eq!(events.collect().code(), 6);
}

#[test]
fn a_command_without_input_reads_the_end_at_once() {
    let agent = TestAgent::new();
    assert_eq!(agent.sh("cat; echo done").out(), "done\n");
}

#[test]
fn a_command_whose_time_is_over_is_killed_with_all_it_started() {
    let agent = TestAgent::new();
    let (inner, outer) = (agent.path("inner"), agent.path("outer"));
    // One child in the same group, one that left the session.
    let leave = if agent.cgroup.is_some() { "setsid" } else { "" };
    let script = format!(
        "{leave} sh -c 'echo $$ > {}; exec sleep 1000' & (echo $$ > {}; exec sleep 1000) & echo before; wait",
        inner.display(),
        outer.display(),
    );
    let request = json!({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": false});
    let all = agent.stream("/process.Process/Start", &[("connect-timeout-ms", "5000")], request).collect();
    assert_eq!(all.out(), "before\n");
    assert!(all.end.is_none(), "no end event");
    assert_eq!(all.failure().code, Code::DeadlineExceeded);
    for path in [inner, outer] {
        let pid = read_pid(&path);
        eventually("the death of its child", || !is_alive(pid));
    }
}

#[test]
fn a_deadline_is_kept_even_while_nobody_reads_the_output() {
    let agent = TestAgent::new();
    let request = json!({"process": {"cmd": "yes"}, "stdin": false});
    let mut events = agent.stream("/process.Process/Start", &[("connect-timeout-ms", "500")], request);
    let pid = events.pid();
    eventually("the death of a flooding process", || !is_alive(pid));
    assert_eq!(events.collect().failure().code, Code::DeadlineExceeded);
}

#[test]
fn fifty_megabytes_arrive_whole_and_in_order() {
    let agent = TestAgent::new();
    let script = "i=0; while [ $i -lt 50 ]; do head -c 1000000 /dev/zero | tr '\\0' \"\\\\$(printf %03o $((i + 65)))\"; \
                  i=$((i + 1)); done; echo err >&2";
    let all = agent.sh(script);
    assert_eq!(all.code(), 0);
    assert_eq!(all.stdout.len(), 50_000_000);
    assert!(all.stdout.chunks(1_000_000).zip(65..).all(|(part, byte)| part.iter().all(|b| *b == byte)));
    assert_eq!(all.stderr, b"err\n");
}

#[test]
fn a_slow_reader_slows_the_process_down() {
    let agent = TestAgent::new();
    let done = agent.path("done");
    let script = format!("head -c 60000000 /dev/zero; touch {}", done.display());
    let mut events = agent.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": false}));
    events.pid();
    thread::sleep(Duration::from_millis(700));
    assert!(!done.exists(), "the process ran ahead of its reader");
    assert_eq!(events.collect().stdout.len(), 60_000_000);
    assert!(done.exists());
}

#[test]
fn a_client_that_goes_away_neither_ends_nor_blocks_its_process() {
    let agent = TestAgent::new();
    let (go, done) = (agent.path("go"), agent.path("done"));
    let script = format!(
        "echo first; until [ -e {} ]; do sleep 0.1; done; head -c 5000000 /dev/zero; echo last; touch {}; sleep 1000",
        go.display(),
        done.display()
    );
    let mut events = agent.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}, "tag": "t"}));
    let pid = events.pid();
    events.until("first");
    drop(events);
    // Time to be noticed, on a busy computer too.
    std::thread::sleep(Duration::from_secs(2));
    std::fs::write(go, "").unwrap();
    eventually("the process going on", || done.exists());
    // The next one to listen gets the end of what was missed.
    let mut again = agent.stream("/process.Process/Connect", &[], json!({"process": {"tag": "t"}}));
    assert_eq!(again.pid(), pid);
    assert!(again.until("last").len() <= 64 << 10);
    agent
        .call("/process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGKILL"}))
        .unwrap();
    assert_eq!(again.collect().end.unwrap().signal, Some(9));
}

#[test]
fn a_process_that_ended_recently_can_still_be_asked() {
    let agent = TestAgent::new();
    let pid = agent.sh("echo gone; exit 5").pid;
    let all = agent.stream("/process.Process/Connect", &[], json!({"process": {"pid": pid}})).collect();
    assert_eq!((all.pid, all.code()), (pid, 5));
    let unknown = agent.stream("/process.Process/Connect", &[], json!({"process": {"pid": 1}})).collect();
    assert_eq!(unknown.failure().code, Code::NotFound);
    let signal = json!({"process": {"pid": pid}, "signal": "SIGNAL_SIGTERM"});
    assert_eq!(agent.call("/process.Process/SendSignal", signal).unwrap_err().code, Code::NotFound);
}

#[test]
fn a_stream_that_only_listens_can_end_without_the_process() {
    let agent = TestAgent::new();
    let mut events = agent.start(json!({"process": {"cmd": "sleep", "args": ["1000"]}, "tag": "sleeper"}));
    let pid = events.pid();
    let headers = [("connect-timeout-ms", "200")];
    let all =
        agent.stream("/process.Process/Connect", &headers, json!({"process": {"tag": "sleeper"}})).collect();
    assert_eq!(all.failure().code, Code::DeadlineExceeded);
    assert!(is_alive(pid));
}

#[test]
fn a_process_in_the_background_does_not_hold_the_end_and_is_not_harmed_by_it() {
    let agent = TestAgent::new();
    let (pid_file, go, done) = (agent.path("pid"), agent.path("go"), agent.path("done"));
    let script = format!(
        "(echo in the background; until [ -e {} ]; do sleep 0.1; done; echo nobody hears this; \
         head -c 1000000 /dev/zero; touch {}; sleep 1000) & echo $! > {}; echo over",
        go.display(),
        done.display(),
        pid_file.display()
    );
    // Held, it would never come to an end: the other waits for what is done after that.
    let all = agent.sh(&script);
    std::fs::write(go, "").unwrap();
    assert!(all.out().contains("over"));
    assert_eq!(all.code(), 0);
    eventually("the background process going on", || done.exists());
    assert!(is_alive(read_pid(&pid_file)));
}

#[test]
fn signals_reach_the_whole_group() {
    let agent = TestAgent::new();
    let pid_file = agent.path("pid");
    let script = format!(
        "sleep 1000 & echo $! > {}; trap 'echo caught; exit 4' TERM; echo ready; wait",
        pid_file.display()
    );
    let mut events = agent.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}}));
    let pid = events.pid();
    events.until("ready");
    let signal = |name: &str| {
        agent.call("/process.Process/SendSignal", json!({"process": {"pid": pid}, "signal": name}))
    };
    assert_eq!(signal("SIGNAL_SIGNONSENSE").unwrap_err().code, Code::InvalidArgument);
    signal("SIGNAL_SIGTERM").unwrap();
    let all = events.collect();
    assert_eq!((all.out().as_str(), all.code()), ("caught\n", 4));
    let child = read_pid(&pid_file);
    eventually("the death of its child", || !is_alive(child));
}

#[test]
fn running_processes_are_listed_and_ended_ones_are_not() {
    let agent = TestAgent::new();
    let mut events = agent.start(json!({"process": {"cmd": "sleep", "args": ["1000"]}, "tag": "a"}));
    let pid = events.pid();
    let list = || agent.call("/process.Process/List", json!({})).unwrap();
    assert_eq!(
        list(),
        json!({"processes": [{"config": {"cmd": "sleep", "args": ["1000"]}, "pid": pid, "tag": "a"}]})
    );
    let kill = json!({"process": {"tag": "a"}, "signal": "SIGNAL_SIGKILL"});
    agent.call("/process.Process/SendSignal", kill).unwrap();
    events.collect();
    assert_eq!(list(), json!({"processes": []}));
}

#[test]
fn a_terminal_has_a_size_and_takes_input() {
    let agent = TestAgent::new();
    // A signal that is trapped ends a `read`.
    let script = "trap 'stty size' WINCH; tty; stty size; echo $TERM; read a; echo got $a; until read b; do :; done; exit 3";
    let mut events = agent.start(json!({
        "process": {"cmd": "sh", "args": ["-c", script]},
        "pty": {"size": {"cols": 80, "rows": 24}},
    }));
    let pid = events.pid();
    let shown = events.until("xterm");
    assert!(shown.contains("/dev/pts/") && shown.contains("24 80"), "{shown}");
    let input = |text: &str| {
        let input = json!({"pty": BASE64_STANDARD.encode(text)});
        agent.call("/process.Process/SendInput", json!({"process": {"pid": pid}, "input": input})).unwrap();
    };
    input("word\n");
    events.until("got word");
    let size = json!({"size": {"cols": 100, "rows": 50}});
    agent.call("/process.Process/Update", json!({"process": {"pid": pid}, "pty": size})).unwrap();
    input("\n");
    let all = events.collect();
    assert_eq!(all.code(), 3);
    let shown = String::from_utf8_lossy(&all.pty);
    assert!(shown.contains("50 100"), "{shown}");
    let bad = json!({"process": {"cmd": "true"}, "pty": {"size": {"cols": 0, "rows": 1}}});
    assert_eq!(agent.start(bad).collect().failure().code, Code::InvalidArgument);
}

#[test]
fn the_terminals_user_can_open_it_by_name() {
    let agent = TestAgent::new();
    let request = json!({
        "process": {"cmd": "sh", "args": ["-c", "echo ok > $(tty); echo also ok > /dev/tty"]},
        "pty": {"size": {"cols": 80, "rows": 24}},
    });
    let all =
        agent.stream("/process.Process/Start", &[("authorization", &*basic("nobody"))], request).collect();
    assert_eq!(String::from_utf8_lossy(&all.pty), "ok\r\nalso ok\r\n");
}

#[test]
fn a_silent_stream_says_that_it_is_alive() {
    let agent = TestAgent::new();
    let request = json!({"process": {"cmd": "sleep", "args": ["3.5"]}});
    let begun = Instant::now();
    let all = agent.stream("/process.Process/Start", &[("keepalive-ping-interval", "1")], request).collect();
    // No more than one a second, however long it took.
    assert!((1..=begun.elapsed().as_secs()).contains(&all.keepalives.into()), "{}", all.keepalives);
    assert_eq!(all.code(), 0);
}

#[test]
fn many_commands_at_once_keep_their_outputs_apart() {
    let agent = TestAgent::new();
    let collected: Vec<Collected> = thread::scope(|scope| {
        let agent = &agent;
        let threads: Vec<_> =
            (0..40).map(|n| scope.spawn(move || agent.sh(&format!("echo {n}; exit {n}")))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    });
    for (n, all) in collected.iter().enumerate() {
        assert_eq!((all.out(), all.code()), (format!("{n}\n"), n as i32));
    }
}

#[test]
fn orphans_are_reaped() {
    rustix::process::set_child_subreaper(Some(rustix::process::getpid())).unwrap();
    let agent = TestAgent::new();
    let pid_file = agent.path("pid");
    // The inner process outlives its parent and becomes ours.
    let all = agent.sh(&format!("(sleep 0.5 & echo $! > {}) >/dev/null 2>&1", pid_file.display()));
    assert_eq!(all.code(), 0);
    let orphan = read_pid(&pid_file);
    let path = format!("/proc/{orphan}");
    eventually("the reaping of the orphan", || !Path::new(&path).exists());
}

#[test]
fn cgroups_go_away_with_their_processes() {
    let agent = TestAgent::new();
    let Some(cgroup) = agent.cgroup.clone() else { return };
    let out = agent.sh("cat /proc/self/cgroup").out();
    assert!(out.contains("/p1\n"), "{out}");
    // One that leaves something behind, which ends later.
    agent.sh("sleep 0.3 >/dev/null 2>&1 &");
    thread::sleep(Duration::from_millis(500));
    agent.sh("true");
    eventually("empty cgroups being removed", || {
        agent.sh("true");
        let folders =
            fs::read_dir(cgroup.join("commands")).unwrap().flatten().filter(|entry| entry.path().is_dir());
        folders.count() == 0
    });
}

#[test]
fn a_stream_call_with_the_wrong_content_type_is_told_so() {
    let agent = TestAgent::new();
    let mut response =
        agent.send("POST", "/process.Process/Start", &[("content-type", "application/json")], b"{}");
    let body = String::from_utf8_lossy(&response.body()).into_owned();
    assert!(body.contains("application/connect+json"), "{body}");
    for garbage in [
        &b""[..],
        b"\x00\x00\x00\x00\x05{",
        b"\x01\x00\x00\x00\x00",
        b"\x00\xff\xff\xff\xff",
        b"\0\0\0\0\x02[]",
    ] {
        let headers = [("content-type", "application/connect+json")];
        let mut response = agent.send("POST", "/process.Process/Start", &headers, garbage);
        let body = String::from_utf8_lossy(&response.body()).into_owned();
        assert!(body.contains("error"), "{garbage:?}: {body}");
    }
}

#[test]
fn the_first_event_is_the_start() {
    let mut events: Events = TestAgent::new().start(json!({"process": {"cmd": "true"}}));
    assert!(matches!(events.next(), Ok(Event::Start { .. })));
}

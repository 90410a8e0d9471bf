//! The JSON-lines protocol: ports that this command serves, and ports that it uses.

use std::io::{BufRead, BufReader, Read, Write};
use std::net::{Shutdown, TcpListener, TcpStream};
use std::process::{Child, Stdio};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::Duration;

use serde_json::{Value, json};

use crate::fake_daemon::FakeDaemon;
use crate::{FORK, child};

const LINE: &str = "POST /v1/sandboxes/sb1/line";
const LIST: &str = "GET /v1/sandboxes";

fn daemon() -> FakeDaemon {
    FakeDaemon::start(|line| match line {
        FORK => (201, json!({ "children": [child("sb1"), child("sb2")], "errors": [] })),
        LIST => (200, json!([child("sb1"), child("sb2")])),
        LINE => (200, json!({ "stdout": "hi\n", "stderr": "", "exit_code": 3 })),
        _ => (404, json!({ "error": "there is no such sandbox" })),
    })
}

fn say(target: &str, bytes: &str) -> Value {
    let mut stream = TcpStream::connect(target).unwrap();
    stream.set_read_timeout(Some(Duration::from_secs(60))).unwrap();
    stream.write_all(bytes.as_bytes()).unwrap();
    stream.shutdown(Shutdown::Write).unwrap();
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    serde_json::from_str(&answer).unwrap()
}

/// The first line of output with an address.
fn target(command: &mut Child) -> String {
    let mut lines = BufReader::new(command.stdout.as_mut().unwrap()).lines();
    let line = lines.find_map(|line| line.unwrap().strip_prefix("FORKD_TARGET=").map(String::from));
    line.unwrap().split(' ').next().unwrap().to_owned()
}

fn end(mut command: Child) {
    let pid = rustix::process::Pid::from_child(&command);
    rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
    assert_eq!(command.wait().unwrap().code(), Some(143));
}

#[test]
fn lines_are_passed_on_to_the_daemon_and_nothing_else_is() {
    let daemon = daemon();
    let mut command = daemon.forkd(&["agent-port", "sb1", "sbgone"]).stderr(Stdio::piped()).spawn().unwrap();
    let mut warnings = command.stderr.take().unwrap();
    let target = target(&mut command);
    let line = "{\"action\": \"exec\", \"args\": [\"true\"]}\n";
    assert_eq!(say(&target, line), json!({ "stdout": "hi\n", "stderr": "", "exit_code": 3 }));
    // Now and then it also looks whether the sandbox lives.
    let passed_on = || daemon.asked().into_iter().filter(|(line, _)| line == LINE).collect::<Vec<_>>();
    assert_eq!(passed_on(), [(LINE.into(), json!({ "action": "exec", "args": ["true"] }))]);
    for other in [format!("POST / HTTP/1.1\r\nContent-Length: {}\r\n\r\n{line}", line.len()), "{\n".into()] {
        let refused = say(&target, &other);
        assert!(refused["error"].is_string() && refused["exit_code"] == 1, "{refused}");
    }
    assert_eq!(passed_on().len(), 1, "the daemon heard of what was refused");

    // The other commands speak with that port themselves.
    let said = daemon.run(&["exec", "--target", &target, "--child", "forkd-child-1", "--", "true"]);
    assert_eq!((said.status, said.stdout.as_str()), (Some(3), "hi\n"), "{said:?}");
    assert!(said.stderr.contains("--child"), "{said:?}");
    let mut by_environment = daemon.forkd(&["ping"]);
    by_environment.env("FORKD_TARGET", &target);
    assert_eq!(by_environment.output().unwrap().status.code(), Some(1), "that was no pong");
    end(command);
    assert!(TcpStream::connect(&target).is_err());
    let mut text = String::new();
    warnings.read_to_string(&mut text).unwrap();
    assert!(text.contains("no sandbox sbgone"), "{text}");
}

#[test]
fn a_port_is_served_as_long_as_its_sandbox_lives_and_for_one_user() {
    let alive = Arc::new(AtomicBool::new(true));
    let lives = alive.clone();
    let daemon = FakeDaemon::start(move |line| match line {
        LINE => (200, json!({ "pong": true })),
        LIST if lives.load(Ordering::Relaxed) => (200, json!([child("sb1"), child("sb2")])),
        LIST => (200, json!([child("sb2")])),
        _ => (404, json!({ "error": "there is nothing like that" })),
    });
    let mut command = daemon.forkd(&["line", "sb1"]).spawn().unwrap();
    let target = target(&mut command);
    assert_eq!(say(&target, "{\"action\": \"ping\"}"), json!({ "pong": true }));
    // Only root can become another user.
    if rustix::process::geteuid().is_root() {
        let (host, port) = target.split_once(':').unwrap();
        let talk = format!("exec 3<>/dev/tcp/{host}/{port}; echo '{{\"action\": \"ping\"}}' >&3; cat <&3");
        let mut other = std::process::Command::new("setpriv");
        other.args(["--reuid=65534", "--regid=65534", "--clear-groups", "bash", "-c", &talk]);
        let refused: Value = serde_json::from_slice(&other.output().unwrap().stdout).unwrap();
        assert!(refused["error"].as_str().unwrap().contains("not for user 65534"), "{refused}");
    }
    alive.store(false, Ordering::Relaxed);
    assert_eq!(command.wait().unwrap().code(), Some(0));
    assert!(TcpStream::connect(&target).is_err());
}

#[test]
fn a_port_ends_with_the_right_to_it_and_several_are_told_at_once() {
    let may = Arc::new(AtomicBool::new(true));
    let still = may.clone();
    let daemon = FakeDaemon::start(move |line| match line {
        LIST if still.load(Ordering::Relaxed) => (200, json!([child("sb1"), child("sb2")])),
        _ => (401, json!({ "error": "this token is not known" })),
    });
    let mut command = daemon.forkd(&["line", "sb1", "sb9", "sb2", "--json"]).spawn().unwrap();
    let mut line = String::new();
    BufReader::new(command.stdout.as_mut().unwrap()).read_line(&mut line).unwrap();
    let told: Vec<Value> = serde_json::from_str(&line).unwrap();
    assert_eq!((&told[0]["id"], &told[1]["id"], told.len()), (&json!("sb1"), &json!("sb2"), 2));
    may.store(false, Ordering::Relaxed);
    let said = command.wait_with_output().unwrap();
    assert_eq!(said.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&said.stderr).contains("this token is not known"), "{said:?}");
}

#[test]
fn a_fork_that_stays_serves_its_first_child_where_forkd_target_says() {
    let daemon = daemon();
    let wanted = TcpListener::bind("127.0.0.1:0").unwrap().local_addr().unwrap().to_string();
    let mut command = daemon.forkd(&["fork", "--tag", "t", "-n", "2", "--settle-secs", "600"]);
    let mut command = command.env("FORKD_TARGET", &wanted).stderr(Stdio::null()).spawn().unwrap();
    assert_eq!(target(&mut command), wanted);
    assert_eq!(say(&wanted, "{\"action\": \"ping\"}")["exit_code"], 3);
    // A second one there would be taken for the first.
    let asked = daemon.lines().len();
    let mut second = daemon.forkd(&["fork", "--tag", "t", "--settle-secs", "600"]);
    let second = second.env("FORKD_TARGET", &wanted).output().unwrap();
    assert_eq!(second.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&second.stderr).contains(&wanted), "{second:?}");
    assert_eq!(daemon.lines().len(), asked, "a child was made");
    end(command);
    assert!(TcpStream::connect(&wanted).is_err());
}

#[test]
fn what_is_not_on_loopback_or_not_there_is_refused_with_the_reason() {
    let daemon = daemon();
    for (args, why) in [
        (&["line", "sb1", "--listen", "0.0.0.0:0"][..], "not on loopback"),
        (&["line", "sb9"], "there is no sandbox sb9"),
        (&["ping", "--target", "nonsense"], "HOST:PORT"),
        (&["exec", "--target", "127.0.0.1:1", "--", "true"], "no answer from 127.0.0.1:1"),
    ] {
        let said = daemon.run(args);
        assert!(said.status.is_some_and(|status| status != 0), "{said:?}");
        assert!(said.stderr.contains(why), "{args:?}: {said:?}");
    }
    assert_eq!(daemon.run(&["exec", "--", "true"]).status, Some(2), "neither an id nor a target");
}

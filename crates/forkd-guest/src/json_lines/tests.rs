use std::{
    io::{Read, Write},
    net::Shutdown,
    os::unix::process::CommandExt,
    process::{Command, Stdio},
};

use serde_json::{Value, json};

use super::*;
use crate::agent::tests::TestAgent;

/// What comes back for bytes, until the agent closes.
fn say(agent: &TestAgent, bytes: &[u8], half_close: bool) -> String {
    let mut stream = agent.connect_for_lines();
    stream.write_all(bytes).unwrap();
    if half_close {
        stream.shutdown(Shutdown::Write).unwrap();
    }
    let mut answer = String::new();
    stream.read_to_string(&mut answer).unwrap();
    answer
}

fn ask(agent: &TestAgent, request: Value) -> Value {
    let answer = say(agent, format!("{request}\n").as_bytes(), true);
    assert!(answer.ends_with('\n') && answer.lines().count() == 1, "{answer:?}");
    serde_json::from_str(&answer).unwrap()
}

#[test]
fn one_line_gets_one_line_whether_or_not_the_client_closes_its_half() {
    let agent = TestAgent::new();
    let line = br#"{"action": "exec", "args": ["sh", "-c", "echo out; echo err >&2; exit 3"]}"#;
    let expected = "{\"stdout\":\"out\\n\",\"stderr\":\"err\\n\",\"exit_code\":3}\n";
    let with_newline = [&line[..], b"\n"].concat();
    assert_eq!(say(&agent, &with_newline, false), expected);
    assert_eq!(say(&agent, &with_newline, true), expected);
    assert_eq!(say(&agent, line, true), expected, "without a newline, but with an end");
    let two = [&with_newline[..], &with_newline[..]].concat();
    assert_eq!(say(&agent, &two, false), expected, "one request per connection");
}

#[test]
fn a_ping_says_what_the_published_clients_look_for() {
    let agent = TestAgent::new();
    let pong = ask(&agent, json!({ "action": "ping" }));
    assert_eq!(pong["pong"], true);
    assert_eq!(pong["pid"], std::process::id());
    assert_eq!(pong["numpy_version"], Value::Null);
    assert_eq!((&pong["agent_lang"], &pong["warmup_ready"]), (&json!("python"), &json!(false)));
}

#[test]
fn a_warmed_guest_says_so_and_which_numpy_it_has() {
    let agent = TestAgent::new();
    let code = "import sys, types\nsys.modules['numpy'] = types.SimpleNamespace(__version__='9.8.7')";
    agent.call("/forkd.Agent/Warm", json!({ "python": code })).unwrap();
    let until = Instant::now() + Duration::from_secs(60);
    loop {
        let pong = ask(&agent, json!({ "action": "ping" }));
        if pong["warmup_ready"] == true {
            assert_eq!(pong["numpy_version"], "9.8.7");
            break;
        }
        assert!(Instant::now() < until, "{pong}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

#[test]
fn a_command_whose_time_runs_out_gives_what_it_wrote_until_then() {
    let agent = TestAgent::new();
    let command = ["sh", "-c", "echo so far; sleep 600"];
    let answer = ask(&agent, json!({ "action": "exec", "args": command, "timeout": 0.5 }));
    assert_eq!((&answer["stdout"], &answer["exit_code"]), (&json!("so far\n"), &json!(1)));
    assert!(answer["error"].as_str().unwrap().contains("time ran out"), "{answer}");
}

#[test]
fn a_program_that_is_not_there_is_an_error_without_output() {
    let agent = TestAgent::new();
    let answer = ask(&agent, json!({ "action": "exec", "args": ["no-such-program"] }));
    assert!(answer["error"].as_str().unwrap().contains("no-such-program"), "{answer}");
    assert_eq!(answer["exit_code"], 127);
    assert!(answer.get("stdout").is_none(), "a client would take the error for output: {answer}");
    // A program that cannot be executed, whatever its name.
    let path = agent.path("not found");
    std::fs::write(&path, "#!/bin/sh\n").unwrap();
    let answer = ask(&agent, json!({ "action": "exec", "args": [path] }));
    assert_eq!(answer["exit_code"], 126, "{answer}");
}

#[test]
fn a_command_that_is_killed_has_the_status_a_shell_gives() {
    let agent = TestAgent::new();
    let answer = ask(&agent, json!({ "action": "exec", "args": ["sh", "-c", "kill -9 $$"] }));
    assert_eq!(answer["exit_code"], 137);
}

#[test]
fn evaluations_are_those_of_the_warmed_interpreter() {
    let agent = TestAgent::new();
    agent.call("/forkd.Agent/Eval", json!({ "code": "answer = 42" })).unwrap();
    let eval = |code: &str| ask(&agent, json!({ "action": "eval", "code": code }));
    assert_eq!(eval("answer"), json!({ "result": "42", "exit_code": 0 }));
    let raised = eval("nothing");
    assert_eq!(
        (&raised["error"], &raised["exit_code"]),
        (&json!("NameError: name 'nothing' is not defined"), &json!(1))
    );
    assert!(raised["traceback"].as_str().unwrap().contains("Traceback"), "{raised}");
    let late = ask(&agent, json!({ "action": "eval", "code": "while True: pass", "timeout": 0.3 }));
    assert!(late["error"].as_str().unwrap().contains("time given is over"), "{late}");
    assert_eq!(eval("answer")["result"], "42", "the interpreter lives on");
}

#[test]
fn what_is_not_a_request_is_an_error_and_unknown_actions_too() {
    let agent = TestAgent::new();
    for request in [json!({ "action": "reboot" }), json!({}), json!({ "action": "exec", "args": [] })] {
        let answer = ask(&agent, request.clone());
        assert!(answer["error"].is_string() && answer["exit_code"] == 1, "{request}: {answer}");
    }
}

#[test]
fn a_line_in_the_body_of_an_http_request_is_not_executed() {
    let agent = TestAgent::new();
    let file = agent.path("written-by-a-browser");
    let line = json!({ "action": "exec", "args": ["touch", file] }).to_string();
    let length = line.len() + 1;
    let post = format!("POST / HTTP/1.1\r\nHost: guest\r\nContent-Length: {length}\r\n\r\n{line}\n");
    for request in [post.clone(), format!("\r\n{post}"), format!("\n{line}\n")] {
        let answer: Value = serde_json::from_str(&say(&agent, request.as_bytes(), true)).unwrap();
        assert!(answer["error"].as_str().unwrap().contains("not HTTP"), "{answer}");
    }
    assert!(!file.exists());
}

#[test]
fn a_process_of_another_user_gets_nothing() {
    let agent = TestAgent::new();
    let file = agent.path("written-by-another-user");
    let line = json!({ "action": "exec", "args": ["touch", file] });
    let client = r#"
import socket, sys
s = socket.create_connection(("127.0.0.1", int(sys.argv[1])), timeout=60)
try:
    s.sendall(sys.argv[2].encode() + b"\n")
    if sys.argv[3] == "leave":
        sys.exit(0)
    s.shutdown(socket.SHUT_WR)
    sys.stdout.write(s.recv(1000).decode())
except OSError:
    pass
"#;
    let as_user = |uid: u32, how: &str| {
        let mut python = Command::new("python3");
        python.args(["-c", client, &agent.lines.port().to_string(), &line.to_string(), how]);
        let mut python = python.uid(uid).gid(uid).current_dir("/").stdout(Stdio::piped()).spawn().unwrap();
        let mut said = String::new();
        python.stdout.take().unwrap().read_to_string(&mut said).unwrap();
        // An agent of another test may have reaped it: that is what an init does.
        let _ = python.wait();
        said
    };
    assert_eq!(as_user(65534, "stay"), "");
    // One that is gone before it is looked at is not taken for root.
    assert_eq!(as_user(65534, "leave"), "");
    // Connections are served in no particular order; this one has all of its conversation after them.
    assert_eq!(ask(&agent, json!({ "action": "ping" }))["pong"], true);
    assert!(!file.exists());
    assert!(as_user(0, "stay").contains("\"exit_code\":0"));
    assert!(file.exists());
}

#[test]
fn whose_a_connection_is_comes_from_the_kernels_table_and_nobodys_is_not_roots() {
    let table = "  sl  local_address rem_address   st tx_queue rx_queue tr tm->when retrnsmt   uid  timeout inode\n\
        \x20  0: 0100007F:A001 0100007F:22B8 01 00000000:00000000 00:00000000 00000000  1000        0 4711 1\n\
        \x20  1: 0100007F:A002 0100007F:22B8 06 00000000:00000000 00:00000000 00000000     0        0 0 3\n\
        \x20  2: 0000000000000000FFFF00000100007F:A003 0000000000000000FFFF00000100007F:22B8 01 0:0 0:0 0 7 0 9 1\n\
        nonsense\n";
    let here = "127.0.0.1:8888".parse().unwrap();
    let of = |peer: &str| owner(table, peer.parse().unwrap(), here);
    assert_eq!(of("127.0.0.1:40961"), Some(1000));
    assert_eq!(of("127.0.0.1:40962"), None, "closed: the kernel says 0, which is not root here");
    assert_eq!(of("127.0.0.1:40963"), Some(7));
    assert_eq!(of("127.0.0.1:40964"), None);
    assert_eq!(owner("", here, here), None);
}

//! Commands in a sandbox over a WebSocket, with a fake guest behind a real socket.

use std::collections::BTreeMap;
use std::sync::Arc;

use bytes::Bytes;
use forkd_api::stream::{Channel, MAX_CHUNK, STDIN_WINDOW, pack, unpack};
use futures_util::{SinkExt, StreamExt};
use serde_json::{Value, json};
use tokio::net::UnixStream;
use tokio_tungstenite::WebSocketStream;
use tokio_tungstenite::tungstenite::{Error, Message};

use crate::sandbox::{End, Phase};
use crate::testing::fake_guest::{FakeDaemon, ID, eventually};

type Socket = WebSocketStream<UnixStream>;

async fn open(daemon: &FakeDaemon, id: &str) -> Result<Socket, Error> {
    let uri = format!("ws://localhost/v1/sandboxes/{id}/exec/stream");
    tokio_tungstenite::client_async(uri, daemon.connect().await).await.map(|(socket, _)| socket)
}

/// Starts a command and waits until it runs.
async fn begin(daemon: &FakeDaemon, request: Value) -> Socket {
    let mut socket = open(daemon, ID).await.unwrap();
    socket.send(Message::text(request.to_string())).await.unwrap();
    assert_eq!(event(&mut socket).await, json!({"event": "started", "sandbox": ID, "pid": 7}));
    socket
}

/// The next event other than an acknowledgement.
async fn event(socket: &mut Socket) -> Value {
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Text(text) if text.contains("stdin_ack") => {}
            Message::Text(text) => return serde_json::from_str(&text).unwrap(),
            Message::Ping(_) => {}
            other => panic!("{other:?}"),
        }
    }
}

#[tokio::test]
async fn a_stream_carries_input_output_the_terminal_size_and_the_exit() {
    let daemon = FakeDaemon::start().await;
    let request =
        json!({"args": ["cat", "-u"], "env": {"A": "b"}, "cwd": "/tmp", "pty": {"cols": 80, "rows": 24}});
    let mut socket = begin(&daemon, request).await;
    let asked = &daemon.guest.calls_of("Start")[0];
    assert_eq!(asked["process"], json!({"cmd": "cat", "args": ["-u"], "envs": {"A": "b"}, "cwd": "/tmp"}));
    assert_eq!(asked["pty"]["size"], json!({"cols": 80, "rows": 24}));
    let resize = json!({"type": "resize", "cols": 100, "rows": 30});
    socket.send(Message::text(resize.to_string())).await.unwrap();
    eventually("the new size", || {
        let sizes = daemon.guest.calls_of("Update");
        sizes.first().is_some_and(|size| size["pty"]["size"] == json!({"cols": 100, "rows": 30}))
    })
    .await;
    socket.close(None).await.unwrap();

    // A megabyte in each direction, within the window.
    let mut socket = begin(&daemon, json!({"args": ["cat"]})).await;
    let data: Vec<u8> = (0..1u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    let (mut sent, mut window, mut back) = (0, STDIN_WINDOW, Vec::new());
    while back.len() < data.len() {
        while sent < data.len() && window > 0 {
            let count = window.min(MAX_CHUNK).min(data.len() - sent);
            socket.send(Message::binary(pack(Channel::Stdin, &data[sent..sent + count]))).await.unwrap();
            (sent, window) = (sent + count, window - count);
        }
        match socket.next().await.unwrap().unwrap() {
            Message::Binary(frame) => back.extend_from_slice(&unpack(frame).unwrap().1),
            Message::Text(text) => {
                let ack: Value = serde_json::from_str(&text).unwrap();
                window += ack["bytes"].as_u64().unwrap() as usize;
            }
            _ => {}
        }
    }
    assert!(back == data);
    socket.send(Message::text(r#"{"type":"stdin_eof"}"#)).await.unwrap();
    assert_eq!(event(&mut socket).await, json!({"event": "exit", "exit_code": 0}));
    drop(socket);
    daemon.app.sessions.wait().await;
    // The daemon killed the first command; this one ended by itself.
    assert_eq!(daemon.guest.calls_of("SendSignal").len(), 1);
}

#[tokio::test]
async fn a_disconnect_kills_the_command_unless_the_client_asked_to_keep_it() {
    let daemon = FakeDaemon::start().await;
    for keep in [true, false] {
        let socket = begin(&daemon, json!({"args": ["sleep"], "keep": keep})).await;
        drop(socket);
        daemon.app.sessions.wait().await;
        let killed = daemon.guest.calls_of("SendSignal");
        assert_eq!(killed.len(), usize::from(!keep), "{killed:?}");
    }
    let tag = daemon.guest.calls_of("Start")[1]["tag"].clone();
    let killed = &daemon.guest.calls_of("SendSignal")[0];
    assert_eq!((&killed["process"]["tag"], &killed["signal"]), (&tag, &json!("SIGNAL_SIGKILL")));
}

#[tokio::test]
async fn a_command_fails_with_the_reason_when_its_sandbox_is_paused_rolled_back_or_ends() {
    let daemon = FakeDaemon::start().await;
    let panicked = End::new("panicked", "the kernel panicked", String::new());
    for (phase, status, code) in [
        (Phase::Paused, 409, "sandbox_paused"),
        (Phase::Ended(Arc::new(End::rolled_back())), 409, "sandbox_replaced"),
        (Phase::Ended(Arc::new(panicked)), 502, "sandbox_lost"),
    ] {
        daemon.sandbox.phase.send_replace(Phase::Running);
        let mut socket = begin(&daemon, json!({"args": ["sleep"]})).await;
        let paused = matches!(phase, Phase::Paused);
        daemon.sandbox.phase.send_replace(phase);
        let last = event(&mut socket).await;
        assert_eq!((&last["event"], &last["status"]), (&json!("error"), &json!(status)), "{last}");
        assert_eq!(last["code"], code, "{last}");
        drop(socket);
        if paused {
            daemon.app.sessions.wait().await;
            assert!(daemon.guest.calls_of("SendSignal").is_empty(), "a paused guest takes no signal");
            daemon.sandbox.phase.send_replace(Phase::Running);
            eventually("its end", || daemon.guest.calls_of("SendSignal").len() == 1).await;
        }
    }
    daemon.app.sessions.wait().await;
    assert_eq!(daemon.guest.calls_of("SendSignal").len(), 1, "an ended sandbox has no processes");
}

#[tokio::test]
async fn a_stream_with_a_bad_target_or_request_is_refused() {
    let daemon = FakeDaemon::start().await;
    let refused = |opened: Result<Socket, Error>| match opened {
        Err(Error::Http(response)) => response.status().as_u16(),
        other => panic!("{other:?}"),
    };
    assert_eq!(refused(open(&daemon, "sbnone").await), 404);
    daemon.sandbox.phase.send_replace(Phase::Paused);
    assert_eq!(refused(open(&daemon, ID).await), 409);
    daemon.sandbox.phase.send_replace(Phase::Running);
    for first in
        [r#"{"args":[]}"#, r#"{"args":["x"],"timeout_secs":0}"#, r#"{"args":["x"],"surprise":1}"#, "nonsense"]
    {
        let mut socket = open(&daemon, ID).await.unwrap();
        socket.send(Message::text(first)).await.unwrap();
        let last = event(&mut socket).await;
        assert_eq!((&last["event"], &last["status"]), (&json!("error"), &json!(400)), "{last}");
        assert_eq!(last["code"], "invalid_request", "{last}");
    }
    assert!(daemon.guest.calls_of("Start").is_empty());
}

#[tokio::test]
async fn a_client_that_sends_more_than_its_window_loses_its_command() {
    let daemon = FakeDaemon::start().await;
    let mut socket = begin(&daemon, json!({"args": ["cat"]})).await;
    // Never reads the output, so that input stays unacknowledged for long.
    let chunk = Bytes::from(vec![0; MAX_CHUNK * 8 + 1]);
    socket.send(Message::binary(chunk)).await.unwrap();
    loop {
        match socket.next().await.unwrap().unwrap() {
            Message::Text(text) if text.contains(r#""event":"error""#) => {
                assert!(text.contains("stdin_ack"), "{text}");
                break;
            }
            Message::Close(_) => panic!("it closes without a reason"),
            _ => {}
        }
    }
    drop(socket);
    daemon.app.sessions.wait().await;
    assert_eq!(daemon.guest.calls_of("SendSignal").len(), 1);
}

/// A line that `/metrics` must contain.
fn execs(outcomes: &[(&str, u64)]) -> BTreeMap<String, u64> {
    let all = outcomes.iter().map(|(_, count)| count).sum();
    outcomes.iter().chain(&[("all", all)]).map(|(name, count)| ((*name).to_owned(), *count)).collect()
}

#[tokio::test]
async fn streamed_commands_count_by_outcome() {
    let daemon = FakeDaemon::start().await;
    let mut socket = begin(&daemon, json!({"args": ["cat"]})).await;
    socket.send(Message::text(r#"{"type":"stdin_eof"}"#)).await.unwrap();
    assert_eq!(event(&mut socket).await["exit_code"], 0);
    assert_eq!(daemon.execs().await, execs(&[("ok", 1)]));
    // Killed by a signal.
    let mut socket = begin(&daemon, json!({"args": ["cat"]})).await;
    socket.send(Message::text(r#"{"type":"signal","signal":"SIGTERM"}"#)).await.unwrap();
    assert_eq!(event(&mut socket).await["exit_code"], 143);
    assert_eq!(daemon.execs().await, execs(&[("ok", 1), ("nonzero", 1)]));
    // The client disconnects.
    for keep in [true, false] {
        drop(begin(&daemon, json!({"args": ["sleep"], "keep": keep})).await);
        daemon.app.sessions.wait().await;
    }
    let cancelled = [("ok", 1), ("nonzero", 1), ("cancelled", 2)];
    assert_eq!(daemon.execs().await, execs(&cancelled));
    // The sandbox ends.
    let mut socket = begin(&daemon, json!({"args": ["sleep"]})).await;
    daemon.sandbox.phase.send_replace(Phase::Ended(Arc::new(End::deleted())));
    assert_eq!(event(&mut socket).await["event"], "error");
    assert_eq!(daemon.execs().await, execs(&[&cancelled[..], &[("failed", 1)]].concat()));
    // A rejected request starts no command.
    daemon.sandbox.phase.send_replace(Phase::Running);
    let mut socket = open(&daemon, ID).await.unwrap();
    socket.send(Message::text(r#"{"args":[]}"#)).await.unwrap();
    assert_eq!(event(&mut socket).await["event"], "error");
    assert_eq!(daemon.execs().await["all"], 5);
}

#[tokio::test]
async fn a_command_that_does_not_start_or_times_out_has_the_same_exit_code_streamed_or_not() {
    let daemon = FakeDaemon::start().await;
    for (cmd, exit_code, timed_out) in [
        ("missing", 127, false),
        ("broken", 126, false),
        ("missing-of-old", 127, false),
        ("broken-of-old", 126, false),
        ("late", 124, true),
    ] {
        let mut socket = open(&daemon, ID).await.unwrap();
        socket.send(Message::text(json!({"args": [cmd]}).to_string())).await.unwrap();
        let last = loop {
            match socket.next().await.unwrap().unwrap() {
                Message::Text(text) => break serde_json::from_str::<Value>(&text).unwrap(),
                Message::Binary(_) | Message::Ping(_) => {}
                other => panic!("{other:?}"),
            }
        };
        assert_eq!((&last["event"], &last["exit_code"]), (&json!("exit"), &json!(exit_code)), "{cmd} {last}");
        assert_eq!(last["timed_out"].as_bool().unwrap_or(false), timed_out, "{cmd} {last}");
        let body = json!({"args": [cmd]}).to_string();
        let (status, _, reply) = daemon
            .ask("POST /v1/sandboxes/sbfake/exec", "Content-Type: application/json\r\n", body.as_bytes())
            .await;
        let reply: Value = serde_json::from_slice(&reply).unwrap();
        assert_eq!((status, &reply["exit_code"]), (200, &json!(exit_code)), "{cmd} {reply}");
        assert_eq!(reply["timed_out"].as_bool().unwrap_or(false), timed_out, "{cmd} {reply}");
    }
    assert_eq!(daemon.execs().await, execs(&[("nonzero", 8), ("timed_out", 2)]));
    let mut socket = open(&daemon, ID).await.unwrap();
    socket.send(Message::text(r#"{"args":["crowded"]}"#)).await.unwrap();
    assert_eq!(event(&mut socket).await["status"], 503);
    assert_eq!(daemon.execs().await["failed"], 1);
}

#[test]
fn the_last_event_shows_the_cause_only_to_principals_that_may_read_it() {
    let error = crate::error::Error::host("cannot open /srv/x", std::io::Error::from_raw_os_error(13));
    for reads_causes in [false, true] {
        let reader = crate::error::Reader { request_id: "r-1".into(), reads_causes };
        let forkd_api::stream::ServerEvent::Error { message, status, code, request_id } =
            super::failed(&reader, &error)
        else {
            panic!()
        };
        assert_eq!((status, code.as_str(), request_id.as_str()), (500, "internal", "r-1"));
        assert_eq!(message.contains("/srv/x") && message.contains("os error"), reads_causes, "{message}");
        assert_eq!(message.contains("/srv") || message.contains("os error"), reads_causes, "{message}");
    }
}

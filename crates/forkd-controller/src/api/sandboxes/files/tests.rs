//! Files over HTTP, with a fake guest behind a real socket.

use serde_json::{Value, json};
use tokio::io::{AsyncReadExt, AsyncWriteExt};

use crate::sandbox::Phase;
use crate::testing::fake_guest::{FakeDaemon, ID, eventually};

fn files(path: &str) -> String {
    format!("/v1/sandboxes/{ID}/files?path={path}")
}

#[tokio::test]
async fn a_file_larger_than_any_other_body_goes_in_and_comes_out() {
    let daemon = FakeDaemon::start().await;
    let data: Vec<u8> = (0..5u32 << 20).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect();
    assert!(data.len() > daemon.app.config.limits.max_body);
    let line = format!("PUT {}&user=me&mode=0640", files("/a%20b"));
    let (status, _, body) = daemon.ask(&line, "", &data).await;
    let written: Value = serde_json::from_slice(&body).unwrap();
    assert_eq!(
        (status, written),
        (200, json!({"path": "/a b", "size": data.len(), "atomic": true, "whole": true}))
    );
    let query = daemon.guest.files.lock().unwrap()["/a b"].1.clone();
    for part in [r#""mode": "640""#, r#""username": "me""#, r#""whole": "true""#] {
        assert!(query.contains(part), "{query}");
    }
    let (status, head, body) = daemon.ask(&format!("GET {}", files("/a%20b")), "", b"").await;
    assert!(head.contains(&format!("content-length: {}", data.len())), "{head}");
    assert!(status == 200 && body == data, "{status}, {} bytes", body.len());
    assert_eq!(daemon.ask(&format!("PUT {}", files("/empty")), "", b"").await.0, 200);
}

#[tokio::test]
async fn each_refusal_of_a_guest_has_its_own_status() {
    let daemon = FakeDaemon::start().await;
    let list = |path: &str| format!("GET /v1/sandboxes/{ID}/files/list?path={path}");
    let stat = |path: &str| format!("GET /v1/sandboxes/{ID}/files/stat?path={path}");
    let mkdir = format!("POST /v1/sandboxes/{ID}/files/mkdir");
    let rename = format!("POST /v1/sandboxes/{ID}/files/move");
    let path = |path: &str| Some(json!({ "path": path }));
    for (status, line, body) in [
        (404, format!("GET {}", files("/missing")), None),
        (400, format!("GET {}", files("/folder")), None),
        (403, format!("GET {}", files("/secret")), None),
        (502, format!("GET {}", files("/garbage")), None),
        (400, format!("GET {}", files("relative")), None),
        (400, format!("GET {}", files("")), None),
        (400, format!("GET {}", files("/nul%00")), None),
        (400, format!("GET {}&surprise=1", files("/x")), None),
        (400, format!("GET /v1/sandboxes/{ID}/files"), None),
        (404, "GET /v1/sandboxes/sbnone/files?path=/x".into(), None),
        (400, format!("PUT {}&mode=999", files("/x")), None),
        (400, format!("PUT {}", files("relative")), None),
        (404, format!("DELETE {}", files("/missing")), None),
        (404, format!("DELETE {}&recursive=true", files("/missing")), None),
        (409, format!("DELETE {}", files("/nonempty")), None),
        (400, format!("DELETE {}&recursive=perhaps", files("/x")), None),
        (404, list("/missing"), None),
        (400, list("/crowded"), None),
        (400, format!("{}&depth=0", list("/d")), None),
        (403, stat("/secret"), None),
        (409, mkdir.clone(), path("/there")),
        (507, mkdir.clone(), path("/full")),
        (400, mkdir, path("x")),
        (404, rename.clone(), Some(json!({"from": "/missing", "to": "/x"}))),
        (400, rename, Some(json!({"from": "/x", "to": "y"}))),
    ] {
        let (got, answer) = daemon.json(&line, body).await;
        assert_eq!(got, status, "{line}: {answer}");
        assert!(answer["error"].as_str().is_some_and(|why| !why.is_empty()), "{line}: {answer}");
    }
    daemon.sandbox.phase.send_replace(Phase::Paused);
    for line in [format!("GET {}", files("/x")), format!("PUT {}", files("/x")), stat("/x")] {
        assert_eq!(daemon.json(&line, None).await.0, 409, "{line}");
    }
    let daemon = FakeDaemon::impatient_with_guests().await;
    let (status, answer) = daemon.json(&format!("GET {}", files("/silent")), None).await;
    assert_eq!(status, 504, "{answer}");
    assert!(answer["error"].as_str().is_some_and(|why| !why.is_empty()), "{answer}");
}

#[tokio::test]
async fn folders_are_listed_files_described_moved_and_removed() {
    let daemon = FakeDaemon::start().await;
    let (status, list) =
        daemon.json(&format!("GET /v1/sandboxes/{ID}/files/list?path=/d&depth=3"), None).await;
    assert_eq!(status, 200);
    assert_eq!((&list["entries"][0]["type"], &list["entries"][0]["size"]), (&json!("file"), &json!(5)));
    let link = &list["entries"][1];
    assert_eq!((&link["type"], &link["target_type"]), (&json!("symlink"), &json!("directory")));
    assert_eq!(daemon.guest.calls_of("ListDir"), [json!({"path": "/d", "depth": 3})]);
    let made =
        daemon.json(&format!("POST /v1/sandboxes/{ID}/files/mkdir"), Some(json!({"path": "/n"}))).await;
    assert_eq!((made.0, &made.1["name"]), (201, &json!("file")));
    let request = json!({"from": "/a", "to": "/b", "user": "me"});
    assert_eq!(daemon.json(&format!("POST /v1/sandboxes/{ID}/files/move"), Some(request)).await.0, 200);
    assert_eq!(daemon.guest.calls_of("Move"), [json!({"source": "/a", "destination": "/b"})]);
    assert_eq!(daemon.json(&format!("DELETE {}", files("/nonempty")), None).await.0, 409);
    assert_eq!(daemon.json(&format!("DELETE {}&recursive=true", files("/nonempty")), None).await.0, 204);
    assert_eq!(daemon.guest.calls_of("Remove").len(), 1);
}

#[tokio::test]
async fn an_upload_that_breaks_off_or_stalls_is_never_taken_for_a_file() {
    let begin = async |daemon: &FakeDaemon, length: usize| {
        let mut stream = daemon.connect().await;
        let line = format!("PUT {} HTTP/1.1", files("/part"));
        let head = format!("{line}\r\nHost: localhost\r\nContent-Length: {length}\r\n\r\n");
        stream.write_all(head.as_bytes()).await.unwrap();
        stream.write_all(&[1; 1000]).await.unwrap();
        stream
    };
    let daemon = FakeDaemon::start().await;
    let leaving = begin(&daemon, 5000).await;
    eventually("the guest to get something", || *daemon.guest.begun.lock().unwrap() == 1).await;
    drop(leaving);
    eventually("the guest to see it break off", || *daemon.guest.broken.lock().unwrap() == 1).await;
    assert!(daemon.guest.files.lock().unwrap().is_empty());

    let daemon = FakeDaemon::impatient_with_clients().await;
    let mut stalled = begin(&daemon, 5000).await;
    let mut answer = Vec::new();
    stalled.read_to_end(&mut answer).await.unwrap();
    let answer = String::from_utf8(answer).unwrap();
    assert!(answer.starts_with("HTTP/1.1 408 "), "{answer}");
    eventually("the guest to see the other break off", || *daemon.guest.broken.lock().unwrap() == 1).await;
    assert!(daemon.guest.files.lock().unwrap().is_empty());
}

#[tokio::test]
async fn an_upload_to_a_full_or_stuck_guest_fails_while_the_client_still_sends() {
    let data = vec![7; 8 << 20];
    let (patient, impatient) = (FakeDaemon::start().await, FakeDaemon::impatient_with_guests().await);
    for (daemon, path, status, code) in
        [(patient, "/full", 507, "guest_disk_full"), (impatient, "/stuck", 504, "guest_timeout")]
    {
        let (got, _, body) = daemon.ask(&format!("PUT {}", files(path)), "", &data).await;
        let body = String::from_utf8(body).unwrap();
        assert_eq!(got, status, "{body}");
        let body: forkd_api::ErrorBody = serde_json::from_str(&body).expect(&body);
        assert_eq!(body.code, code, "{body:?}");
    }
}

#[tokio::test]
async fn a_client_that_does_not_take_its_file_is_hung_up_on_and_the_guest_is_free() {
    let daemon = FakeDaemon::impatient_with_clients().await;
    let sending = || *daemon.guest.sending.lock().unwrap();
    let begin = async || {
        let mut stream = daemon.connect().await;
        let line = format!("GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n", files("/endless"));
        stream.write_all(line.as_bytes()).await.unwrap();
        stream.read_exact(&mut [0; 1000]).await.unwrap();
        stream
    };
    // A client that disconnects …
    drop(begin().await);
    eventually("the guest to stop", || sending() == 0).await;
    // … and a client that stays connected and reads nothing.
    let mut lazy = begin().await;
    eventually("the guest to stop", || sending() == 0).await;
    let mut rest = Vec::new();
    let _ = lazy.read_to_end(&mut rest).await;
    assert!(rest.len() < 16 << 20, "{} bytes were on their way", rest.len());
    // A body that breaks off in the guest, or whose sandbox is paused, is reported as an error.
    let mut broken = daemon.connect().await;
    let line = format!("GET {} HTTP/1.1\r\nHost: localhost\r\n\r\n", files("/breaks"));
    broken.write_all(line.as_bytes()).await.unwrap();
    let mut seen = String::new();
    while !seen.contains("half") {
        let mut piece = [0; 100];
        let count = broken.read(&mut piece).await.unwrap();
        assert!(count > 0, "{seen}");
        seen.push_str(std::str::from_utf8(&piece[..count]).unwrap());
    }
    assert!(seen.starts_with("HTTP/1.1 200 "), "{seen}");
    daemon.guest.break_now.notify_one();
    let mut rest = Vec::new();
    let _ = broken.read_to_end(&mut rest).await;
    assert!(!rest.ends_with(b"0\r\n\r\n"), "{rest:?}");
    let mut paused = begin().await;
    daemon.sandbox.phase.send_replace(Phase::Paused);
    let mut rest = Vec::new();
    let _ = paused.read_to_end(&mut rest).await;
    assert!(!rest.ends_with(b"0\r\n\r\n"));
    eventually("the guest to stop", || sending() == 0).await;
}

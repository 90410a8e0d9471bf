//! Hostile requests: the daemon rejects them at once, with a sentence, and nothing changes.

use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::TcpStream;

use super::{Daemon, refused};

/// Names that mean another place to careless code.
const PLACES: [&str; 8] = [
    "%2e%2e",
    "..%2f..%2f..%2fetc%2fpasswd",
    "%2e%2e%2f%2e%2e%2fcanary",
    "%2fetc%2fpasswd",
    "a%00b",
    "..%5c..%5ccanary",
    "%ff%fe",
    "%252e%252e%252f",
];

/// Requests with `{}` in place of a name, and their bodies.
const NAMED: [(&str, &str); 14] = [
    ("GET /v1/sandboxes/{}", ""),
    ("DELETE /v1/sandboxes/{}", ""),
    ("GET /v1/sandboxes/{}/console", ""),
    ("GET /v1/sandboxes/{}/stats", ""),
    ("POST /v1/sandboxes/{}/exec", r#"{"args":["true"]}"#),
    ("POST /v1/sandboxes/{}/branch", "{}"),
    ("GET /v1/snapshots/{}", ""),
    ("GET /v1/snapshots/{}/info", ""),
    ("DELETE /v1/snapshots/{}", ""),
    ("DELETE /v1/snapshots/{}?force=true", ""),
    ("POST /v1/snapshots/{}/compact", r#"{"to":"x"}"#),
    ("GET /v1/workspaces/{}", ""),
    ("DELETE /v1/workspaces/{}", ""),
    ("POST /v1/workspaces/{}/resume", "{}"),
];

#[tokio::test]
async fn a_name_that_is_a_path_leads_nowhere() {
    let outer = tempfile::tempdir().unwrap();
    let canary = outer.path().join("canary");
    std::fs::create_dir(&canary).unwrap();
    std::fs::write(canary.join("manifest.json"), "{}").unwrap();
    let daemon = Daemon::start_in(tempfile::tempdir_in(outer.path()).unwrap()).await;
    for (route, body) in NAMED {
        for place in PLACES {
            let route = route.replace("{}", place);
            let (status, answer) = daemon.json(&route, body).await;
            assert!([400, 404].contains(&status), "{route}: {status} {answer}");
            refused(status, &answer);
        }
        let long = route.replace("{}", &"x".repeat(4000));
        let (status, answer) = daemon.json(&long, body).await;
        assert!([400, 404].contains(&status), "{status} {answer}");
        assert!(refused(status, &answer).error.len() < 5000);
    }
    for bad in ["..", "../canary", "/etc", "a/b", "", ".layers", "-x", "a\\u0000b", "ä"] {
        for (route, body) in [
            ("POST /v1/snapshots", format!(r#"{{"tag":"{bad}","image":"x"}}"#)),
            ("POST /v1/sandboxes", format!(r#"{{"snapshot_tag":"{bad}"}}"#)),
            ("POST /v1/sandboxes", format!(r#"{{"image":"{bad}"}}"#)),
            ("POST /v1/workspaces", format!(r#"{{"name":"{bad}","snapshot_tag":"x"}}"#)),
        ] {
            let (status, answer) = daemon.json(route, &body).await;
            assert!([400, 404].contains(&status), "{route} {body}: {status} {answer}");
            refused(status, &answer);
        }
    }
    assert_eq!(std::fs::read(canary.join("manifest.json")).unwrap(), b"{}");
    assert_eq!(std::fs::read_dir(outer.path()).unwrap().count(), 2);
    daemon.stop().await;
}

#[tokio::test]
async fn json_with_doubled_surplus_or_wrong_fields_is_refused() {
    let daemon = Daemon::start().await;
    let deep = "[".repeat(100_000);
    let wide = format!(r#"{{"snapshot_tag":"x","n":{}}}"#, "9".repeat(400));
    for (route, body) in [
        ("POST /v1/sandboxes", r#"{"image":"a","image":"b"}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"a","n":1,"n":2}"#),
        ("POST /v1/snapshots", r#"{"tag":"a","tag":"b","image":"x"}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":-1}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":0}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":1.5}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":1e400}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":18446744073709551616}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":1001}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","memory_limit_mib":18446744073709551615}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","timeout_secs":18446744073709551615}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":NaN}"#),
        ("POST /v1/sandboxes", r#"{"snapshot_tag":"x","n":"1"}"#),
        ("POST /v1/sandboxes", wide.as_str()),
        ("POST /v1/sandboxes", deep.as_str()),
        ("POST /v1/sandboxes", "{\"snapshot_tag\":\"\\ud800\"}"),
        ("POST /v1/snapshots", r#"{"tag":"x","image":"x","boot_wait_secs":1e9}"#),
        ("POST /v1/sandboxes/sb1/exec", r#"{"args":"ls"}"#),
        ("POST /v1/sandboxes/sb1/exec", r#"{"args":[7]}"#),
        ("POST /v1/sandboxes/sb1/exec", r#"{"args":["x"],"timeout_secs":1e99}"#),
    ] {
        let (status, answer) = daemon.json(route, body).await;
        assert!([400, 404].contains(&status), "{route} {:.80}: {status} {answer}", body);
        assert!(refused(status, &answer).error.len() < 1000, "it does not repeat all of it: {answer}");
    }
    for route in [
        "POST /v1/sandboxes",
        "POST /v1/snapshots",
        "POST /v1/workspaces",
        "POST /v1/sandboxes/sb1/exec",
        "POST /v1/sandboxes/sb1/eval",
        "POST /v1/snapshots/x/compact",
    ] {
        for body in ["null", "[]", "\"x\"", "7", "true", "", "{", "{}x", "\u{feff}{}"] {
            let (status, answer) = daemon.json(route, body).await;
            assert_eq!(status, 400, "{route} {body:?}: {answer}");
            refused(status, &answer);
        }
    }
    daemon.stop().await;
}

#[tokio::test]
async fn requests_that_two_readers_would_read_differently_are_refused() {
    let daemon = Daemon::start().await;
    let token = &daemon.token;
    let start = format!("GET /version HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n");
    let post = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n\
         Content-Type: application/json\r\n"
    );
    let end = "Connection: close\r\n\r\n";
    let many: String = (0..2000).map(|index| format!("X-{index}: y\r\n")).collect();
    for bad in [
        format!("{post}Content-Length: 2\r\nContent-Length: 30\r\n{end}{{}}"),
        format!("{post}Content-Length: +2\r\n{end}{{}}"),
        format!("{post}Content-Length: 99999999999999999999\r\n{end}{{}}"),
        format!("{post}Transfer-Encoding: gzip\r\n{end}"),
        format!("{post}Transfer-Encoding: chunked\r\n{end}ffffffffffffffffff\r\n{{}}"),
        format!("{start}Host: localhost\r\n{end}"),
        format!("{start}Authorization : x\r\n{end}"),
        format!("{start}X: {}\r\n{end}", "y".repeat(1 << 20)),
        format!("{start}{many}{end}"),
        format!("{start}X: a\0b\r\n{end}"),
        format!("GET http://elsewhere/version HTTP/1.1\r\nHost: localhost\r\n{end}"),
        format!("GET /{} HTTP/1.1\r\nHost: localhost\r\n{end}", "x".repeat(1 << 20)),
        "GET /version\r\n\r\n".to_owned(),
        "PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n".to_owned(),
    ] {
        let mut stream = TcpStream::connect(daemon.ready.address).await.unwrap();
        // The daemon may reject the request before all of it is sent.
        let _ = stream.write_all(bad.as_bytes()).await;
        let mut answer = Vec::new();
        let _ = stream.read_to_end(&mut answer).await;
        let answer = String::from_utf8_lossy(&answer).into_owned();
        let fine = answer.is_empty() || answer.starts_with("HTTP/1.1 4") || answer.starts_with("HTTP/1.0 4");
        assert!(fine, "{:.200}\n{answer}", bad);
        if let Some((_, body)) = answer.split_once("\r\n\r\n") {
            refused(answer.split(' ').nth(1).unwrap().parse().unwrap(), body);
        }
    }
    // Only the method in the first line counts.
    let headers = "X-HTTP-Method-Override: DELETE\r\nX-Original-URL: /v1/sandboxes\r\n";
    let (status, _) = daemon.authorized("GET /version", headers, "").await;
    assert_eq!(status, 200);
    daemon.stop().await;
}

#[tokio::test]
async fn a_client_that_never_finishes_its_request_is_let_go() {
    let daemon = Daemon::start().await;
    let post = format!(
        "POST /v1/sandboxes HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {}\r\n\
         Content-Type: application/json\r\nContent-Length: 1000\r\n\r\n{{",
        daemon.token
    );
    let let_go = async |begun: &str| {
        let mut stream = TcpStream::connect(daemon.ready.address).await.unwrap();
        stream.write_all(begun.as_bytes()).await.unwrap();
        let mut answer = Vec::new();
        let read = tokio::time::timeout(std::time::Duration::from_secs(120), stream.read_to_end(&mut answer));
        read.await.expect("it is let go").unwrap();
        let answer = String::from_utf8_lossy(&answer).into_owned();
        assert!(answer.is_empty() || answer.starts_with("HTTP/1.1 408"), "{answer}");
    };
    tokio::join!(let_go("GET /version HTTP/1.1\r\nHost: loc"), let_go(&post));
    daemon.stop().await;
}

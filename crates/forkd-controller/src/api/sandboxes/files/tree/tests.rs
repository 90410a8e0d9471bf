//! Trees over HTTP, with a fake guest behind a real socket.

use serde_json::{Value, json};
use tokio::io::AsyncWriteExt;

use crate::agent::ResponseBudget;
use crate::testing::fake_guest::{FakeDaemon, ID, eventually};

fn route(path: &str) -> String {
    format!("GET /v1/sandboxes/{ID}/files/tree?path={path}")
}

#[tokio::test]
async fn a_folder_is_listed_with_all_below_it() {
    let daemon = FakeDaemon::start().await;
    let (status, tree) = daemon.json(&format!("{}&hash=true", route("/d%20e")), None).await;
    assert_eq!((status, &tree["path"]), (200, &json!("/d e")), "{tree}");
    let hash = "0123456789abcdef".repeat(4);
    let expected = json!([
        {"path": "a", "kind": "directory", "size": 0, "modified_unix_ms": 1, "mode": 493, "sha256": null,
         "target": null, "incomplete": "unreadable"},
        {"path": "b/c", "kind": "file", "size": 5, "modified_unix_ms": -1500, "mode": 420, "sha256": hash,
         "target": null},
        {"path": "\u{fffd}", "path_base64": "/w==", "kind": "symlink", "size": 1, "modified_unix_ms": 0, "mode": 511,
         "sha256": null, "target": "\u{fffd}", "target_base64": "/g=="},
    ]);
    assert_eq!(tree["entries"], expected);
    assert_eq!(daemon.guest.calls_of("Tree"), [json!({"path": "/d e", "hash": true})]);
    let (status, tree) = daemon.json(&route("/empty"), None).await;
    assert_eq!((status, tree), (200, json!({"path": "/empty", "entries": []})));
}

#[tokio::test]
async fn each_refusal_has_a_code_also_one_that_comes_late() {
    let daemon = FakeDaemon::start().await;
    for (path, status, code) in [
        ("relative", 400, "invalid_request"),
        ("/x&hash=perhaps", 400, "invalid_request"),
        ("/x&surprise=1", 400, "invalid_request"),
        ("/old", 409, "sandbox_unfit"),
        ("/crowded", 400, "folder_too_large"),
        ("/long", 400, "folder_too_large"),
        ("/late", 504, "guest_timeout"),
        ("/many", 503, "guest_busy"),
        ("/breaks", 502, "guest_failed"),
        ("/above", 502, "guest_failed"),
        ("/unsorted", 502, "guest_failed"),
        ("/unlike", 502, "guest_failed"),
        ("/nohash", 502, "guest_failed"),
    ] {
        let (got, answer) = daemon.json(&route(path), None).await;
        assert_eq!((got, answer["code"].as_str()), (status, Some(code)), "{path}: {answer}");
    }
    let (_, answer) = daemon.json(&route("/old"), None).await;
    assert!(answer["error"].as_str().unwrap().contains("make the snapshot again"), "{answer}");
    let daemon = FakeDaemon::impatient_with_guests().await;
    let (status, answer) = daemon.json(&route("/silent"), None).await;
    assert_eq!((status, answer["code"].as_str()), (504, Some("guest_timeout")), "{answer}");
}

#[tokio::test]
async fn a_client_that_leaves_ends_the_walk() {
    let daemon = FakeDaemon::start().await;
    let sending = || *daemon.guest.sending.lock().unwrap();
    let mut stream = daemon.connect().await;
    let head = format!("{} HTTP/1.1\r\nHost: localhost\r\n\r\n", route("/waits"));
    stream.write_all(head.as_bytes()).await.unwrap();
    eventually("the guest to begin", || sending() == 1).await;
    drop(stream);
    eventually("the guest to stop", || sending() == 0).await;
}

/// Other tests may use a part of the budget for a moment.
#[tokio::test]
async fn a_reply_gives_its_budget_back() {
    let daemon = FakeDaemon::start().await;
    let (status, tree) = daemon.json(&route("/much"), None).await;
    assert_eq!((status, tree["entries"].as_array().map(Vec::len)), (200, Some(10_000)));
    assert_ne!(tree["entries"][9_999]["path"], Value::Null);
    eventually("the budget to be free again", || ResponseBudget::default().left() > ResponseBudget::ALL / 2)
        .await;
}

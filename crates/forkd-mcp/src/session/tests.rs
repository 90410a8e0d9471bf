use std::time::Duration;

use serde_json::json;

use crate::api::ApiRequest;
use crate::session::{Ended, Makes, Session};
use crate::testing::FakeApi;

fn spawn(n: u32) -> ApiRequest {
    ApiRequest::post("/v1/sandboxes?results=each", json!({ "snapshot_tag": "t", "n": n }))
}

fn create(tag: &str, image: &str) -> ApiRequest {
    ApiRequest::post("/v1/snapshots", json!({ "tag": tag, "image": image }))
}

fn branch(tag: &str) -> ApiRequest {
    ApiRequest::post("/v1/sandboxes/sb1/branch", json!({ "tag": tag }))
}

#[tokio::test]
async fn the_end_of_a_session_ends_what_it_made_and_nothing_else() {
    let api = FakeApi::new();
    let other = Session::new(api.clone());
    other.make(api.clone(), spawn(1), Makes::Sandboxes, false).await.unwrap();
    let session = Session::new(api.clone());
    session.make(api.clone(), spawn(3), Makes::Sandboxes, false).await.unwrap();
    session.make(api.clone(), spawn(1), Makes::Sandboxes, true).await.unwrap();
    session.make(api.clone(), branch("a"), Makes::Snapshot, false).await.unwrap();
    session.make(api.clone(), branch("b"), Makes::Snapshot, false).await.unwrap();
    session.make(api.clone(), branch("kept"), Makes::Snapshot, true).await.unwrap();
    assert!(session.keep_sandbox(&*api, "sb3").await.unwrap() && session.keep_snapshot("b"));
    assert!(!session.keep_sandbox(&*api, "sb1").await.unwrap() && !session.keep_snapshot("other"));
    assert_eq!(session.end().await, Ended { sandboxes: 2, snapshots: 1, failed: 0 });
    assert_eq!(
        (api.sandboxes(), api.snapshots()),
        (vec!["sb1".into(), "sb3".into(), "sb5".into()], vec!["b".into(), "kept".into()],)
    );
    // Again: there is nothing left to end.
    assert_eq!(session.end().await, Ended::default());
    assert!(
        session
            .make(api.clone(), spawn(1), Makes::Sandboxes, false)
            .await
            .unwrap_err()
            .text()
            .contains("session_ended")
    );
}

#[tokio::test]
async fn only_what_is_not_kept_has_an_idle_timeout() {
    let api = FakeApi::new();
    let session = Session::new(api.clone());
    session.make(api.clone(), spawn(1), Makes::Sandboxes, false).await.unwrap();
    session.make(api.clone(), spawn(1), Makes::Sandboxes, true).await.unwrap();
    session.keep_sandbox(&*api, "sb1").await.unwrap();
    let sent = api.bodies("POST /v1/sandboxes?results=each");
    assert!(sent[0]["idle_timeout_secs"].as_u64().is_some() && sent[1].get("idle_timeout_secs").is_none());
    assert_eq!(api.bodies("PATCH /v1/sandboxes/sb1"), [json!({ "idle_timeout_secs": null })]);
}

#[tokio::test]
async fn a_reply_that_got_lost_is_asked_for_again_and_nothing_is_made_twice() {
    let api = FakeApi::new();
    let session = Session::new(api.clone());
    api.lose_replies(1);
    session.make(api.clone(), spawn(2), Makes::Sandboxes, false).await.unwrap();
    assert_eq!(api.sandboxes().len(), 2);
    api.lose_replies(9);
    let error = session.make(api.clone(), spawn(1), Makes::Sandboxes, false).await.unwrap_err();
    assert!(
        error.text().contains("daemon_unreachable") && error.text().contains("forkd serve"),
        "{}",
        error.text()
    );
}

#[tokio::test]
async fn a_request_that_the_daemon_still_works_on_is_asked_for_until_its_outcome_is_known() {
    let api = FakeApi::new();
    let session = Session::new(api.clone());
    api.lose_replies(1);
    api.stay_in_progress(4);
    session.make(api.clone(), spawn(2), Makes::Sandboxes, false).await.unwrap();
    assert_eq!(api.sandboxes().len(), 2);
    // The removals get lost, too.
    api.lose_replies(3);
    assert_eq!(session.end().await, Ended { sandboxes: 2, snapshots: 0, failed: 0 });
    assert!(api.sandboxes().is_empty());
}

#[tokio::test]
async fn what_a_client_gave_up_on_still_ends_with_its_session() {
    let api = FakeApi::new();
    let session = Session::new(api.clone());
    api.delay(Duration::from_millis(300));
    let made = tokio::time::timeout(
        Duration::from_millis(20),
        session.make(api.clone(), spawn(2), Makes::Sandboxes, false),
    )
    .await;
    assert!(made.is_err() && api.sandboxes().is_empty());
    session.end().await;
    assert!(api.lines().iter().any(|line| line.starts_with("POST /v1/sandboxes")), "{:?}", api.lines());
    assert!(api.sandboxes().is_empty(), "{:?}", api.sandboxes());
}

#[tokio::test]
async fn what_the_client_killed_itself_is_not_ended_again() {
    let api = FakeApi::new();
    let session = Session::new(api.clone());
    session.make(api.clone(), spawn(1), Makes::Sandboxes, false).await.unwrap();
    session.forget("sb1");
    session.end().await;
    assert!(!api.lines().iter().any(|line| line.starts_with("DELETE")), "{:?}", api.lines());
}

#[tokio::test]
async fn a_request_has_the_rights_of_its_own_caller_and_the_end_those_of_the_first() {
    let (first, later) = (FakeApi::new(), FakeApi::new());
    let session = Session::new(first.clone());
    session.make(later.clone(), spawn(2), Makes::Sandboxes, false).await.unwrap();
    session.keep_sandbox(&*later, "sb1").await.unwrap();
    assert!(first.lines().is_empty(), "{:?}", first.lines());
    assert_eq!(later.lines(), ["POST /v1/sandboxes?results=each", "PATCH /v1/sandboxes/sb1"]);
    session.end().await;
    assert_eq!(first.lines(), ["DELETE /v1/sandboxes/sb2"]);
}

#[tokio::test]
async fn a_snapshot_that_could_not_be_created_ends_with_the_session_unless_it_is_kept() {
    let api = FakeApi::new();
    let session = Session::new(api.clone());
    for (tag, keep) in [("temporary", false), ("to-keep", true), ("kept-later", false)] {
        let error = session.make(api.clone(), create(tag, "no-such"), Makes::Snapshot, keep).await;
        assert_eq!(error.unwrap_err().code, "image_not_found");
    }
    assert!(session.keep_snapshot("kept-later"));
    assert_eq!(session.end().await, Ended { snapshots: 1, ..Ended::default() });
    assert_eq!(api.failed(), ["kept-later", "to-keep"]);
}

#[tokio::test]
async fn a_tag_of_a_failed_request_that_names_another_snapshot_is_left_alone() {
    let api = FakeApi::new();
    let (user, session) = (Session::new(api.clone()), Session::new(api.clone()));
    user.make(api.clone(), create("old", "python"), Makes::Snapshot, true).await.unwrap();
    let error = session.make(api.clone(), create("old", "no-such"), Makes::Snapshot, false).await;
    assert_eq!(error.unwrap_err().code, "tag_taken");
    // One that failed for the session, and that the user makes after that.
    session.make(api.clone(), create("new", "no-such"), Makes::Snapshot, false).await.unwrap_err();
    user.make(api.clone(), create("new", "python"), Makes::Snapshot, true).await.unwrap();
    // One that failed for the session, and then again for the user.
    session.make(api.clone(), create("again", "no-such"), Makes::Snapshot, false).await.unwrap_err();
    user.make(api.clone(), create("again", "no-such"), Makes::Snapshot, true).await.unwrap_err();
    assert_eq!(session.end().await, Ended::default());
    assert_eq!((api.snapshots(), api.failed()), (vec!["new".into(), "old".into()], vec!["again".into()]));
}

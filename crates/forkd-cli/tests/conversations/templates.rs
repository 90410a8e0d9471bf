//! Conversations about templates.

use std::sync::atomic::{AtomicUsize, Ordering};

use serde_json::{Value, json};

use crate::fake_daemon::FakeDaemon;
use crate::{ASK, snapshot};

const GET: &str = "GET /v1/snapshots/base";
const DELETE: &str = "DELETE /v1/snapshots/base";

/// A daemon that gives these answers for the snapshot, one after the other, and makes another one.
fn daemon(answers: Vec<(u16, Value)>) -> FakeDaemon {
    let next = AtomicUsize::new(0);
    FakeDaemon::start(move |line| match line {
        GET => answers[next.fetch_add(1, Ordering::Relaxed).min(answers.len() - 1)].clone(),
        DELETE => (204, Value::Null),
        ASK => (202, snapshot("ready", None)),
        _ => (404, json!({ "error": "no" })),
    })
}

fn missing() -> (u16, Value) {
    (404, json!({ "error": "there is no snapshot base", "code": "snapshot_not_found" }))
}

#[test]
fn a_template_that_is_missing_is_made_and_one_that_is_ready_is_kept() {
    let empty = daemon(vec![missing()]);
    let said = empty.run(&["template", "prepare", "base", "--json"]);
    assert_eq!((said.status, &said.json()[0]["created"]), (Some(0), &json!(true)), "{said:?}");
    assert_eq!(empty.lines(), [GET, ASK]);
    let body = &empty.asked()[1].1;
    assert_eq!(
        (&body["tag"], &body["image"], &body["mem_size_mib"]),
        (&json!("base"), &json!("base"), &json!(512))
    );

    let ready = daemon(vec![(200, snapshot("writing", None)), (200, snapshot("ready", None))]);
    let said = ready.run(&["template", "prepare", "base", "--json"]);
    assert_eq!((said.status, &said.json()[0]["created"]), (Some(0), &json!(false)), "{said:?}");
    assert_eq!(ready.lines(), [GET, GET]);
    assert_eq!(ready.run(&["template", "prepare", "base"]).stdout, "base\n");
}

#[test]
fn a_template_that_cannot_be_used_or_is_forced_is_made_again() {
    let mut replaced = snapshot("ready", None);
    replaced["warning"] = json!("the image was replaced");
    for (args, answer) in [
        (&["template", "prepare", "base", "--force"][..], snapshot("ready", None)),
        (&["template", "prepare", "base"], snapshot("failed", None)),
        (&["template", "prepare", "base"], replaced),
    ] {
        let daemon = daemon(vec![(200, answer)]);
        let said = daemon.run(args);
        assert_eq!(said.status, Some(0), "{said:?}");
        assert_eq!(daemon.lines(), [GET, DELETE, ASK]);
    }
}

#[test]
fn a_template_in_an_unknown_state_is_left_alone() {
    let daemon = daemon(vec![(200, snapshot("unknown", None))]);
    let said = daemon.run(&["template", "prepare", "base"]);
    assert_eq!(said.status, Some(1));
    assert!(said.stderr.contains("forkd rmi base"), "{said:?}");
    assert_eq!(daemon.lines(), [GET]);
}

//! JSON-lines conversations without a sandbox, and conversions of an agent's replies.

use forkd_api::{EvalReply, ExecReply};
use serde_json::{Value, json};
use tokio::io::duplex;

use super::*;

/// The reply to `bytes`, and the requests that were accepted.
async fn say(bytes: &[u8], half_close: bool) -> (String, Vec<Request>) {
    let (mut client, server) = duplex(64 << 10);
    let mut asked = Vec::new();
    let conversation = converse(server, async |request| {
        asked.push(request);
        (Reply::Exec(Ran::default()), ResponseBudget::default())
    });
    let talking = async {
        // The server may reject the request before all of it is read.
        let _ = client.write_all(bytes).await;
        if half_close {
            client.shutdown().await.unwrap();
        }
        let mut answer = String::new();
        client.read_to_string(&mut answer).await.unwrap();
        answer
    };
    let (answer, served) = tokio::join!(talking, async {
        let _ = conversation.await;
    });
    let () = served;
    (answer, asked)
}

#[tokio::test]
async fn a_line_is_answered_whether_or_not_the_client_closes_its_half() {
    for (line, half_close) in [
        ("{\"action\": \"ping\"}\n", false),
        ("{\"action\": \"ping\"}\n", true),
        ("{\"action\": \"ping\"}", true),
    ] {
        let (answer, asked) = say(line.as_bytes(), half_close).await;
        assert_eq!(answer, "{\"stdout\":\"\",\"stderr\":\"\",\"exit_code\":0}\n");
        assert_eq!(asked, [Request::Ping]);
    }
}

#[tokio::test]
async fn output_of_a_guest_counts_until_the_client_has_read_it() {
    let (mut client, server) = duplex(64 << 10);
    let watched = ResponseBudget::of(7);
    let mut theirs = watched.beside();
    assert!(theirs.take(7));
    let serving = tokio::spawn(converse(server, async move |_| {
        (Reply::Exec(Ran { stdout: "x".repeat(1 << 20), ..Ran::default() }), theirs)
    }));
    client.write_all(b"{\"action\": \"ping\"}\n").await.unwrap();
    client.read_exact(&mut [0; 1000]).await.unwrap();
    assert_eq!(watched.left(), 0);
    client.read_to_end(&mut Vec::new()).await.unwrap();
    drop(client);
    assert!(serving.await.unwrap().unwrap());
    assert_eq!(watched.left(), 7);
}

#[tokio::test]
async fn a_line_in_an_http_request_is_not_executed() {
    let line = "{\"action\": \"exec\", \"args\": [\"rm\", \"-rf\", \"/\"]}\n";
    let post = format!("POST / HTTP/1.1\r\nHost: localhost\r\nContent-Length: {}\r\n\r\n{line}", line.len());
    let endless = format!("{{\"action\": \"exec\", \"args\": [\"{}\"", "x".repeat(2 << 20));
    for bytes in
        [post.clone(), format!("\n{post}"), format!("\r\n\r\n{line}"), format!("[]\n{line}"), endless]
    {
        let (answer, asked) = say(bytes.as_bytes(), false).await;
        let answer: Value = serde_json::from_str(&answer).unwrap();
        assert!(answer["error"].is_string() && answer["exit_code"] == 1, "{answer}");
        assert_eq!(asked, []);
    }
}

fn object(reply: &Reply) -> Value {
    serde_json::from_slice(&reply.to_line()).unwrap()
}

#[test]
fn a_command_whose_time_ran_out_keeps_its_output_and_one_that_never_ran_has_none() {
    let late = ExecReply {
        stdout: "so far".into(),
        exit_code: 124,
        error: Some("its time ran out".into()),
        timed_out: true,
        ..ExecReply::default()
    };
    let expected = json!({ "stdout": "so far", "stderr": "", "exit_code": 1, "error": "its time ran out" });
    assert_eq!(object(&ran(late)), expected);
    let missing = ExecReply { exit_code: 127, error: Some("no such program".into()), ..ExecReply::default() };
    assert_eq!(object(&ran(missing)), json!({ "error": "no such program", "exit_code": 127 }));
    let signalled = ExecReply { exit_code: 137, signal: Some(9), ..ExecReply::default() };
    assert_eq!(object(&ran(signalled)), json!({ "stdout": "", "stderr": "", "exit_code": 137 }));
}

#[test]
fn an_evaluation_gives_its_repr_and_never_json_which_clients_would_take_for_another_language() {
    let result_json = serde_json::value::to_raw_value(&[1]).ok();
    let value = EvalReply { result: Some("[1]".into()), result_json, ..EvalReply::default() };
    assert_eq!(object(&evaluated(value)), json!({ "result": "[1]", "exit_code": 0 }));
    let raised = EvalReply {
        error: Some("E".into()),
        traceback: Some("T".into()),
        stdout: "said".into(),
        exit_code: 1,
        ..EvalReply::default()
    };
    let expected = json!({ "error": "E", "exit_code": 1, "traceback": "T", "stdout": "said" });
    assert_eq!(object(&evaluated(raised)), expected);
}

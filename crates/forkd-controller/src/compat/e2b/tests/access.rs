//! Who gets into a sandbox, and what the others are told.

use http_body_util::BodyExt;

use super::*;
use crate::sandbox::forwards::MAX_FORWARDS;

const HELLO: &str = "HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\nhi";

fn to_port(port: u16) -> String {
    format!("E2b-Sandbox-Id: {ID}\r\nE2b-Sandbox-Port: {port}\r\n")
}

#[tokio::test]
async fn clients_of_a_public_port_leave_places_for_the_code_interpreter_and_the_agent() {
    let daemon = daemon().await;
    *daemon.guest.server.lock().unwrap() = HELLO.into();
    let held: Vec<_> = (0..MAX_FORWARDS).map(|_| daemon.sandbox.forwards.enter(false).unwrap()).collect();
    let (status, _, body) = daemon.ask("GET /", &to_port(8000), b"").await;
    assert_eq!((status, &parsed(&body)["code"], &parsed(&body)["sandboxId"]), (503, &json!(503), &json!(ID)));
    let code = format!("{}X-Access-Token: access\r\n", to_port(49999));
    assert_eq!(daemon.ask("POST /execute", &code, b"").await.0, 200);
    assert_eq!(daemon.ask("GET /files?path=/missing", &headers("access"), b"").await.0, 404);
    drop(held);
    assert_eq!(daemon.ask("GET /", &to_port(8000), b"").await.0, 200);
    // The request's place is free once its response has been read.
    let all = || (0..MAX_FORWARDS).map(|_| daemon.sandbox.forwards.enter(false)).all(|it| it.is_some());
    eventually("the place of the request", all).await;
}

//! Responses with data from a guest: their bytes count against a budget until the client has taken them.

use std::convert::Infallible;
use std::sync::Arc;

use axum::body::Body;
use axum::http::{HeaderValue, header};
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use futures_util::stream;
use serde::Serialize;

use crate::agent::ResponseBudget;
use crate::error::{Error, Result};

/// Bytes per piece of a body.
const PIECE: usize = 64 << 10;

/// `answer` as a JSON response.
pub(crate) fn json(answer: &impl Serialize, room: ResponseBudget) -> Result<Response> {
    let body = serde_json::to_vec(answer).map_err(|error| Error::host("writing an answer", error))?;
    Ok(response(body, room))
}

/// A response whose body is JSON already.
pub(crate) fn response(body: Vec<u8>, room: ResponseBudget) -> Response {
    let headers = [
        (header::CONTENT_TYPE, HeaderValue::from_static("application/json")),
        (header::CONTENT_LENGTH, HeaderValue::from(body.len())),
    ];
    let room = Arc::new(room);
    let mut response = (headers, in_pieces(body.into(), room.clone())).into_response();
    // For code that reads this body and sends it again.
    response.extensions_mut().insert(room);
    response
}

/// A body that produces a piece whenever the client takes one. `room` is held until the last piece.
pub(crate) fn in_pieces(body: Bytes, room: Arc<ResponseBudget>) -> Body {
    Body::from_stream(stream::unfold((body, room), |(mut body, room)| async move {
        let piece = body.split_to(body.len().min(PIECE));
        (!piece.is_empty()).then_some((Ok::<_, Infallible>(piece), (body, room)))
    }))
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};
    use tokio::io::{AsyncReadExt, AsyncWriteExt};

    use super::*;
    use crate::testing::fake_guest::{FakeDaemon, ID, MUCH, eventually};

    #[tokio::test]
    async fn an_answer_counts_until_its_last_piece_is_taken() {
        let mut room = ResponseBudget::of(1000);
        assert!(room.take(1000) && !room.take(1));
        let mut response = response(vec![b'x'; 100 << 10], room);
        let room = response.extensions_mut().remove::<Arc<ResponseBudget>>().unwrap();
        // Like middleware that reads a body to store it.
        let body = axum::body::to_bytes(response.into_body(), usize::MAX).await.unwrap();
        let left = room.clone();
        let again = in_pieces(body, room);
        assert_eq!((left.left(), Arc::strong_count(&left)), (0, 2));
        let body = axum::body::to_bytes(again, usize::MAX).await.unwrap();
        assert_eq!((body.len(), Arc::strong_count(&left)), (100 << 10, 1));
    }

    /// Other tests may use a part of the budget for a moment.
    #[tokio::test]
    async fn what_guests_say_counts_until_clients_have_read_it_whatever_it_was_asked_with() {
        let daemon = FakeDaemon::start().await;
        let (eval, line) =
            (json!({"code": "1"}).to_string(), json!({"action": "eval", "code": "1"}).to_string());
        for (request, more, body) in [
            (format!("POST /v1/sandboxes/{ID}/eval"), "", &eval),
            (format!("POST /v1/sandboxes/{ID}/eval"), "Idempotency-Key: k\r\n", &eval),
            (format!("POST /v1/sandboxes/{ID}/json-lines"), "", &line),
            (format!("GET /v1/sandboxes/{ID}/files/list?path=/much"), "", &String::new()),
        ] {
            let mut stream = daemon.connect().await;
            let head = format!(
                "{request} HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\nContent-Type: application/json\r\n\
                 Content-Length: {}\r\n{more}\r\n{body}",
                body.len()
            );
            stream.write_all(head.as_bytes()).await.unwrap();
            let mut answer = vec![0; 1000];
            stream.read_exact(&mut answer).await.unwrap();
            assert!(answer.starts_with(b"HTTP/1.1 200 "), "{request}: {}", String::from_utf8_lossy(&answer));
            assert!(ResponseBudget::default().left() + MUCH <= ResponseBudget::ALL, "{request}");
            stream.read_to_end(&mut answer).await.unwrap();
            assert!(answer.len() > MUCH, "{request}");
            eventually("the room to be free again", || {
                ResponseBudget::default().left() + MUCH > ResponseBudget::ALL
            })
            .await;
        }
        let (_, reply) =
            daemon.json(&format!("POST /v1/sandboxes/{ID}/eval"), Some(json!({"code": "1"}))).await;
        assert_eq!(reply["result_json"], json!({"a": [1e2], "b": 1}));
        assert_eq!((&reply["error"], &reply["exit_code"]), (&Value::Null, &json!(0)));
    }
}

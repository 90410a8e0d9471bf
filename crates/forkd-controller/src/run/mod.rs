//! `GET /v1/run`: one command in a sandbox of its own, over a WebSocket ([`frames`](crate::frames)).
//!
//! Three things go on at once for one connection: a reader, a writer and the work. Whichever ends
//! first ends the session, and with the session goes the sandbox ([`Bound`]): it does not matter
//! whether the command ended, the client hung up, its machine died, or the daemon stops.

mod wire;
mod work;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::State;
use axum::extract::ws::rejection::WebSocketUpgradeRejection;
use axum::extract::ws::{Message, WebSocket, WebSocketUpgrade};
use axum::response::Response;
use futures_util::stream::SplitStream;
use futures_util::{SinkExt, StreamExt};
use tokio::sync::{mpsc, oneshot};

use crate::api::App;
use crate::companion::Companion;
use crate::error::{Error, ErrorBody, Kind, Result};
use crate::frames::{MAX_TEXT, RunRequest, ServerEvent};
use wire::{Client, Outgoing, read, text, write};
use work::work;

/// What clients hear when the daemon stops under them.
const STOPPING: &str = "the daemon is stopping";
/// The request must have come by then.
const REQUEST_WAIT: Duration = Duration::from_secs(30);
/// How long a client we are done with has to take the last word.
const FAREWELL: Duration = Duration::from_secs(2);
/// Messages on their way to the client: few, because what is here was taken from the guest.
const OUTGOING: usize = 4;
/// Signals and the like on their way to the command; a client that sends more at once loses them.
const CONTROLS: usize = 16;

/// Runs a command in a sandbox of its own, over a WebSocket. The sandbox lives as long as the
/// connection.
///
/// The first message is text, a `RunRequest`. Then the server sends `ServerEvent`s as text and
/// output as binary frames, whose first byte is 1 for standard output and 2 for standard error; the
/// client sends `ClientMessage`s as text and input as binary frames, whose first byte is 0. At most
/// 262144 bytes of input may be under way; a `stdin_ack` gives room back.
#[utoipa::path(
    get, path = "/v1/run",
    responses(
        (status = 101, description = "Speak WebSocket"),
        (status = 400, body = ErrorBody, description = "Not the beginning of a WebSocket"),
    ),
)]
pub(crate) async fn run(
    State(app): State<App>,
    upgrade: std::result::Result<WebSocketUpgrade, WebSocketUpgradeRejection>,
) -> Result<Response> {
    let upgrade =
        upgrade.map_err(|rejection| Error::new(Kind::Http(rejection.status()), rejection.body_text()))?;
    let upgrade = upgrade.max_message_size(MAX_TEXT).max_frame_size(MAX_TEXT);
    Ok(upgrade.on_upgrade(move |socket| session(socket, app)))
}

async fn session(socket: WebSocket, app: App) {
    let _counted = app.sessions.enter();
    let mut stopping = app.stopping.clone();
    let (mut sink, mut stream) = socket.split();
    let first = tokio::select! {
        first = first_message(&mut stream) => first,
        () = stopping.asked() => Err(Error::new(Kind::Busy, STOPPING)),
    };
    let request = match first {
        Ok(Some(request)) => request,
        Ok(None) => return,
        Err(error) => {
            let told = async {
                let _ = sink.send(text(&failed(error))).await;
                let _ = sink.close().await;
                while let Some(Ok(_)) = stream.next().await {}
            };
            let _ = tokio::time::timeout(FAREWELL, told).await;
            return;
        }
    };
    let (queue, queued) = mpsc::channel(OUTGOING);
    let (controls, control) = mpsc::channel(CONTROLS);
    let (complain, complaint) = oneshot::channel();
    let client = Arc::new(Client::new());
    let outgoing = Outgoing(queue);
    let mut writer = Companion::spawn(write(sink, queued, client.clone()));
    let mut reader = Companion::spawn(read(stream, client.clone(), controls, complain));

    let (last, hurry) = tokio::select! {
        last = work(&app, request, &client, control, &outgoing) => (last, false),
        Ok(why) = complaint => (failed(Error::invalid(why)), true),
        _ = reader.ended() => return,
        _ = writer.ended() => return,
        () = stopping.asked() => (failed(Error::new(Kind::Busy, STOPPING)), true),
    };
    // The work was dropped, and the sandbox with it. What is left is to tell the client, however
    // slowly it reads, unless we are in a hurry.
    let told = async {
        outgoing.event(&last).await;
        // With the queue's last sender gone, the writer says goodbye and ends.
        drop(outgoing);
        writer.ended().await;
    };
    let in_a_hurry = async {
        if !hurry {
            stopping.asked().await;
        }
        tokio::time::sleep(FAREWELL).await;
    };
    tokio::select! {
        // Closing while the client still talks would make the kernel throw away what it has not
        // read yet: let it hang up first.
        () = told => drop(tokio::time::timeout(FAREWELL, reader.ended()).await),
        _ = reader.ended() => {}
        () = in_a_hurry => {}
    }
}

fn failed(error: Error) -> ServerEvent {
    ServerEvent::Error { status: error.status().as_u16(), message: error.message }
}

/// The request; `None` if the client went away instead.
async fn first_message(stream: &mut SplitStream<WebSocket>) -> Result<Option<RunRequest>> {
    let first = async {
        loop {
            match stream.next().await {
                Some(Ok(Message::Ping(_) | Message::Pong(_))) => {}
                other => return other,
            }
        }
    };
    match tokio::time::timeout(REQUEST_WAIT, first).await {
        Ok(Some(Ok(Message::Text(text)))) => match serde_json::from_str(&text) {
            Ok(request) => Ok(Some(request)),
            Err(error) => Err(Error::invalid(format!("the first message is not a run request: {error}"))),
        },
        Ok(Some(Ok(Message::Binary(_)))) => {
            Err(Error::invalid("the first message must be text: a run request"))
        }
        Ok(Some(Ok(_)) | Some(Err(_)) | None) => Ok(None),
        Err(_) => Err(Error::invalid(format!("no run request came within {REQUEST_WAIT:?}"))),
    }
}

//! Commands over a WebSocket (messages: [`forkd_api::stream`]): the session, for commands in new and in existing sandboxes.
//!
//! Each connection has a reader, a writer and the work, which run at the same time. The first to end ends the
//! session. The session's own objects end with it ([`run`]: its sandbox; [`exec`]: its process): after the command's
//! end, a disconnect, a crash of the client's machine, or a stop of the daemon.

pub(crate) mod client;
pub(crate) mod exec;
pub(crate) mod pump;
pub(crate) mod run;

use std::sync::Arc;
use std::time::Duration;

use axum::extract::ws::{Message, WebSocket};
use forkd_api::ErrorBody;
use forkd_api::stream::{ClientMessage, ServerEvent};
use futures_util::stream::SplitStream;
use futures_util::{SinkExt, StreamExt};
use serde::de::DeserializeOwned;
use tokio::sync::{mpsc, oneshot};
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;

use crate::auth::principal::Principal;
use crate::auth::tokens::Tokens;
use crate::config::Config;
use crate::error::{Code, Error, Reader, Result};
use crate::exec::stream::client::{Client, Outgoing, read, text, write};
use crate::sandbox::registry::Registry;
use crate::util::task;

/// The error for clients when the daemon stops.
const STOPPING: &str = "the daemon is stopping";
/// Timeout for the request to arrive.
const REQUEST_WAIT: Duration = Duration::from_secs(30);
/// Timeout for the client to take the last event.
const CLOSE_TIMEOUT: Duration = Duration::from_secs(2);
/// Queued messages for the client: few, because they hold data taken from the guest.
const OUTGOING: usize = 4;
/// Queued control messages for the command. If a client sends more at once, the daemon drops them.
const CONTROLS: usize = 16;

/// The work of a session.
pub(crate) trait Conversation: Send + 'static {
    /// The client's first message.
    type Request: DeserializeOwned + Send;
    /// The name of that message, for error texts.
    const REQUEST: &'static str;

    /// Does the work and returns the last event. The future is dropped when the client disconnects.
    fn work(
        self,
        context: &StreamContext,
        request: Self::Request,
        wires: Wires<'_>,
    ) -> impl Future<Output = Result<ServerEvent>> + Send;
}

/// The connection to the client, for the work.
pub(crate) struct Wires<'w> {
    /// The client's input for the command.
    client: &'w Arc<Client>,
    /// Signals and terminal sizes.
    controls: mpsc::Receiver<ClientMessage>,
    /// The queue to the client.
    outgoing: &'w Outgoing,
}

/// The parts of the daemon that a session needs.
#[derive(Debug, Clone)]
pub(crate) struct StreamContext {
    pub(crate) registry: Arc<Registry>,
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) config: Arc<Config>,
    /// Cancelled when the daemon is asked to stop.
    pub(crate) stopping: CancellationToken,
    /// Conversations under way: a daemon that stops waits for them.
    pub(crate) sessions: TaskTracker,
}

/// Runs a session, from the client's first message to the last event.
pub(crate) async fn session<W: Conversation>(
    socket: WebSocket,
    context: StreamContext,
    who: Principal,
    reader: &Reader,
    work: W,
) {
    let failed = |error| failed(reader, &error);
    let _counted = context.sessions.token();
    let stopping = &context.stopping;
    let (mut sink, mut stream) = socket.split();
    let first = tokio::select! {
        first = first_message(&mut stream, W::REQUEST) => first,
        () = stopping.cancelled() => Err(Error::new(Code::ShuttingDown, STOPPING)),
    };
    let request = match first {
        Ok(Some(request)) => request,
        Ok(None) => return,
        Err(error) => {
            let sent = async {
                let _ = sink.send(text(&failed(error))).await;
                let _ = sink.close().await;
                while let Some(Ok(_)) = stream.next().await {}
            };
            let _ = tokio::time::timeout(CLOSE_TIMEOUT, sent).await;
            return;
        }
    };
    let (queue, queued) = mpsc::channel(OUTGOING);
    let (controls, control) = mpsc::channel(CONTROLS);
    let (complain, complaint) = oneshot::channel();
    let client = Arc::new(Client::new());
    let outgoing = Outgoing(queue);
    let mut writer = task::companion(write(sink, queued, client.clone()));
    let mut reader = task::companion(read(stream, client.clone(), controls, complain));

    let wires = Wires { client: &client, controls: control, outgoing: &outgoing };
    let (last, hurry) = tokio::select! {
        last = work.work(&context, request, wires) => (last.unwrap_or_else(failed), false),
        Ok(why) = complaint => (failed(Error::invalid(why)), true),
        _ = &mut reader => return,
        _ = &mut writer => return,
        () = stopping.cancelled() => (failed(Error::new(Code::ShuttingDown, STOPPING)), true),
        () = context.tokens.revoked(&who) => {
            let text = "the session's token was removed, rotated, or has expired; connect again with a good one";
            (failed(Error::new(Code::Unauthorized, text)), true)
        }
    };
    // The work is dropped, and its sandbox or process ends. The client still gets the last event, even if it reads
    // slowly, unless the session must end soon.
    let sent = async {
        outgoing.event(&last).await;
        // Without senders, the queue ends; the writer then closes the WebSocket and ends.
        drop(outgoing);
        let _ = (&mut writer).await;
    };
    let in_a_hurry = async {
        if !hurry {
            stopping.cancelled().await;
        }
        tokio::time::sleep(CLOSE_TIMEOUT).await;
    };
    tokio::select! {
        // The client closes the connection first. If the daemon closed while the client still sends, the kernel would
        // discard data that the client has not read.
        () = sent => drop(tokio::time::timeout(CLOSE_TIMEOUT, &mut reader).await),
        _ = &mut reader => {}
        () = in_a_hurry => {}
    }
}

fn failed(reader: &Reader, error: &Error) -> ServerEvent {
    let ErrorBody { error: message, code, request_id } = reader.logged(error);
    ServerEvent::Error { status: error.code().status(), message, code, request_id }
}

/// Reads the request; `None` if the client disconnected instead.
async fn first_message<Q: DeserializeOwned>(
    stream: &mut SplitStream<WebSocket>,
    what: &str,
) -> Result<Option<Q>> {
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
            Err(error) => Err(Error::invalid(format!("the first message is not {what}: {error}"))),
        },
        Ok(Some(Ok(Message::Binary(_)))) => {
            Err(Error::invalid(format!("the first message must be text: {what}")))
        }
        Ok(Some(Ok(_)) | Some(Err(_)) | None) => Ok(None),
        Err(_) => Err(Error::invalid(format!(
            "{what} did not arrive within {REQUEST_WAIT:?}; send it as the first message"
        ))),
    }
}

#[cfg(test)]
mod tests;

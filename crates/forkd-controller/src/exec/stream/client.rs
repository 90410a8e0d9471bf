//! The client's side of a session: messages from it and messages to it.

use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::ws::{Message, WebSocket};
use bytes::{Bytes, BytesMut};
use forkd_api::stream::{Channel, ClientMessage, MAX_CHUNK, STDIN_WINDOW, ServerEvent, pack, unpack};
use forkd_protocol::agent::Output;
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use parking_lot::Mutex;
use tokio::sync::{Notify, mpsc, oneshot};

/// Interval between two pings to the client.
const PING_EVERY: Duration = Duration::from_secs(20);
/// A client that takes messages but has sent nothing for this long counts as disconnected.
const SILENCE: Duration = Duration::from_secs(90);

/// Serializes an event as a message.
pub(crate) fn text(event: &ServerEvent) -> Message {
    // Plain data: it always serialises.
    Message::Text(serde_json::to_string(event).unwrap_or_default().into())
}

/// The client's state, shared by reader, writer and work.
pub(crate) struct Client {
    state: Mutex<ClientState>,
    /// Notified when input arrives.
    arrived: Notify,
}

struct ClientState {
    /// Input that the command has not taken yet.
    input: BytesMut,
    /// Whether the input has ended.
    eof: bool,
    /// Bytes received and not acknowledged: in `input`, or on their way to the command.
    unacknowledged: usize,
    heard: Instant,
}

/// A piece of input.
pub(crate) enum Input {
    Bytes(Bytes),
    Eof,
}

impl Client {
    pub(crate) fn new() -> Self {
        let state =
            ClientState { input: BytesMut::new(), eof: false, unacknowledged: 0, heard: Instant::now() };
        Client { state: Mutex::new(state), arrived: Notify::new() }
    }

    /// Takes input from the client. Returns `false` if it exceeds the window.
    fn push(&self, data: &[u8]) -> bool {
        let mut state = self.state.lock();
        if state.unacknowledged + data.len() > STDIN_WINDOW {
            return false;
        }
        state.unacknowledged += data.len();
        if !state.eof {
            state.input.extend_from_slice(data);
        }
        self.arrived.notify_one();
        true
    }

    fn end_input(&self) {
        self.state.lock().eof = true;
        self.arrived.notify_one();
    }

    /// Waits for the next piece of input for the command. Only one caller may wait.
    pub(crate) async fn input(&self) -> Input {
        loop {
            {
                let mut state = self.state.lock();
                if !state.input.is_empty() {
                    let length = state.input.len().min(MAX_CHUNK);
                    return Input::Bytes(state.input.split_to(length).freeze());
                }
                if state.eof {
                    return Input::Eof;
                }
            }
            self.arrived.notified().await;
        }
    }

    pub(crate) fn acknowledge(&self, bytes: usize) {
        let mut state = self.state.lock();
        state.unacknowledged = state.unacknowledged.saturating_sub(bytes);
    }
}

/// Reads the client's messages at once, so that a close is never queued behind input. Returns when the client has
/// disconnected. After a protocol violation it reports the error and ignores further messages.
pub(crate) async fn read(
    mut stream: SplitStream<WebSocket>,
    client: Arc<Client>,
    controls: mpsc::Sender<ClientMessage>,
    complain: oneshot::Sender<String>,
) {
    let mut complain = Some(complain);
    while let Some(Ok(message)) = stream.next().await {
        client.state.lock().heard = Instant::now();
        if complain.is_none() {
            continue;
        }
        if let Err(why) = take(message, &client, &controls)
            && let Some(complain) = complain.take()
        {
            let _ = complain.send(why);
        }
    }
}

/// Handles one message; the error is the text for the client.
fn take(
    message: Message,
    client: &Client,
    controls: &mpsc::Sender<ClientMessage>,
) -> std::result::Result<(), String> {
    match message {
        Message::Binary(frame) => match unpack(frame) {
            Some((Channel::Stdin, data)) if client.push(&data) => {}
            Some((Channel::Stdin, _)) => {
                return Err(format!(
                    "more than {STDIN_WINDOW} bytes of input are under way; wait for stdin_ack"
                ));
            }
            _ => return Err("a client's binary message must start with the byte 0, for input".into()),
        },
        Message::Text(text) => match serde_json::from_str(&text) {
            Ok(ClientMessage::StdinEof) => client.end_input(),
            Ok(control) => {
                if controls.try_send(control).is_err() {
                    tracing::debug!("control message dropped: the queue is full");
                }
            }
            Err(error) => return Err(format!("a text message is not valid: {error}; send a ClientMessage")),
        },
        // After a close message the stream ends by itself.
        Message::Close(_) | Message::Ping(_) | Message::Pong(_) => {}
    }
    Ok(())
}

/// Sends queued messages, and pings. Ends with the queue, or when the client does not answer.
///
/// The daemon does not ping a client that takes no messages: it may only be slow, for example because its output goes to
/// a pager. TCP detects a client whose machine has crashed.
pub(crate) async fn write(
    mut sink: SplitSink<WebSocket, Message>,
    mut queued: mpsc::Receiver<Message>,
    client: Arc<Client>,
) {
    let first = tokio::time::Instant::now() + PING_EVERY;
    let mut pings = tokio::time::interval_at(first, PING_EVERY);
    pings.set_missed_tick_behavior(tokio::time::MissedTickBehavior::Delay);
    loop {
        let message = tokio::select! {
            message = queued.recv() => match message {
                Some(message) => message,
                None => break,
            },
            _ = pings.tick() => {
                if client.state.lock().heard.elapsed() > SILENCE {
                    tracing::info!("client silent; connection closed");
                    return;
                }
                Message::Ping(Bytes::new())
            }
        };
        let slow = Instant::now();
        if sink.send(message).await.is_err() {
            return;
        }
        if slow.elapsed() > PING_EVERY {
            // The daemon sent no ping meanwhile, so the silence proves nothing.
            client.state.lock().heard = Instant::now();
        }
    }
    let _ = sink.close().await;
}

/// The queue to the client. Waiting here slows a command down to the speed of its reader.
#[derive(Clone)]
pub(crate) struct Outgoing(pub(crate) mpsc::Sender<Message>);

impl Outgoing {
    /// A failure means that the writer has ended, which ends the session.
    pub(crate) async fn event(&self, event: &ServerEvent) {
        let _ = self.0.send(text(event)).await;
    }

    pub(crate) async fn data(&self, channel: Channel, data: &[u8]) {
        for piece in data.chunks(MAX_CHUNK) {
            let _ = self.0.send(Message::Binary(pack(channel, piece))).await;
        }
    }

    pub(crate) async fn output(&self, output: Output) {
        // A command on a terminal writes only to the terminal.
        for data in [output.stdout, output.pty].into_iter().flatten() {
            self.data(Channel::Stdout, &data).await;
        }
        if let Some(data) = output.stderr {
            self.data(Channel::Stderr, &data).await;
        }
    }
}

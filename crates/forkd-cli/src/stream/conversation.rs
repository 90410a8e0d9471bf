//! A command in a guest that uses this process's standard streams: the common part of `forkd run`,
//! `forkd shell` and `forkd exec -it`.
//!
//! The stream is a WebSocket. The daemon ends the sandbox, or the command, with it, so this process has
//! nothing to clean up, however it ends.

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use forkd_api::ErrorBody;
use forkd_api::stream::{
    Channel, ClientMessage, MAX_CHUNK, STDIN_WINDOW, ServerEvent, TtySize, pack, unpack,
};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio_tungstenite::tungstenite::Message;

use crate::client::{Refused, Socket};
use crate::stream::signals::Forwarded;
use crate::stream::stdio::{self, OutputStream, OutputWriter, RemoteExit};
use crate::stream::terminal::RawTerminal;
use crate::ui::{Progress, Ui};

/// The error if the WebSocket ends before the command.
const BROKE_OFF: &str = "the connection to the daemon broke; `forkd doctor` shows whether it still runs";

/// The streams of this process that the command uses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streams {
    /// Forward standard input; otherwise the command's is empty.
    pub(crate) stdin: bool,
    /// Connect the command's terminal to this one, if there is one.
    pub(crate) tty: bool,
}

/// The size of the command's terminal.
pub(crate) fn terminal_size() -> TtySize {
    let (cols, rows) = RawTerminal::size();
    TtySize { cols, rows }
}

/// One command, from the request to the exit status.
pub(crate) struct Conversation {
    incoming: SplitStream<Socket>,
    outgoing: SplitSink<Socket, Message>,
    ui: Ui,
    streams: Streams,
    progress: Option<Progress>,
    /// This process's terminal in raw mode, while the command uses it.
    raw: Option<RawTerminal>,
    /// Whether the command has started.
    started: bool,
    /// The number of input bytes that the daemon accepts now.
    window: usize,
    /// Input that was read and not sent yet.
    pending: Bytes,
}

impl Conversation {
    pub(crate) fn new(socket: Socket, ui: Ui, streams: Streams) -> Self {
        let (outgoing, incoming) = socket.split();
        Conversation {
            incoming,
            outgoing,
            ui,
            streams,
            progress: None,
            raw: None,
            started: false,
            window: STDIN_WINDOW,
            pending: Bytes::new(),
        }
    }

    /// Starts a command and forwards its streams; returns the exit status.
    pub(crate) async fn hold(mut self, request: &impl Serialize) -> Result<u8> {
        let text = serde_json::to_string(request)?;
        self.outgoing.send(Message::text(text)).await.context(BROKE_OFF)?;
        let output = OutputWriter::start();
        let mut signals = Forwarded::pass_on()?;
        let outcome = self.talk(&output, &mut signals).await;
        self.progress = None;
        let status = output.conclude(outcome, &mut signals).await;
        // Before any further message.
        self.raw = None;
        status
    }

    /// Forwards until the command or the WebSocket ends.
    async fn talk(&mut self, output: &OutputWriter, signals: &mut Forwarded) -> Result<RemoteExit> {
        let mut stdin = self.streams.stdin.then(stdio::read_stdin);
        let mut resized = signal(SignalKind::window_change())?;
        // A terminal has no end of input: its character would count as a key of the user.
        if stdin.is_none() && !self.streams.tty {
            self.say(&ClientMessage::StdinEof).await?;
        }
        loop {
            let may_read = self.pending.is_empty() && self.window > 0;
            tokio::select! {
                message = async { output.room().await; self.incoming.next().await } => {
                    let message = message.context(BROKE_OFF)?.context(BROKE_OFF)?;
                    if let Some(status) = self.receive(message, output).await? {
                        return Ok(RemoteExit::Exit(status));
                    }
                }
                input = next_input(&mut stdin), if may_read => match input {
                    Some(bytes) => self.pending = bytes,
                    None => {
                        stdin = None;
                        self.say(&ClientMessage::StdinEof).await?;
                    }
                },
                caught = signals.next() => {
                    // Before the command runs there is no receiver for a signal. On a terminal, keys are not
                    // signals: a signal means that this process must end.
                    if caught.insists || !self.started || self.raw.is_some() {
                        return Ok(RemoteExit::Leave(caught.status()));
                    }
                    self.say(&ClientMessage::Signal { signal: caught.name.to_owned() }).await?;
                }
                _ = resized.recv(), if self.started && self.streams.tty => self.say_size().await?,
                // The reader of the output has left: the command gets the signal that it would get here.
                () = output.broken() => return Ok(RemoteExit::Exit(128 + libc::SIGPIPE as u8)),
            }
            self.send_pending().await;
        }
    }

    /// Handles a message; returns the exit status if it is the last.
    async fn receive(&mut self, message: Message, output: &OutputWriter) -> Result<Option<u8>> {
        match message {
            Message::Binary(frame) => {
                let (target, bytes) = match unpack(frame) {
                    Some((Channel::Stdout, bytes)) => (OutputStream::Stdout, bytes),
                    Some((Channel::Stderr, bytes)) => (OutputStream::Stderr, bytes),
                    _ => bail!("the daemon sent a message that this version of forkd cannot parse"),
                };
                output.write(target, bytes).await;
                Ok(None)
            }
            Message::Text(text) => {
                let event = serde_json::from_str(&text).context("the daemon's message")?;
                let began = matches!(event, ServerEvent::Started { .. });
                let last = self.event(event)?;
                // It may have been resized since the request.
                if began && self.raw.is_some() {
                    self.say_size().await?;
                }
                Ok(last)
            }
            Message::Close(_) => bail!(BROKE_OFF),
            _ => Ok(None),
        }
    }

    fn event(&mut self, event: ServerEvent) -> Result<Option<u8>> {
        match event {
            ServerEvent::Progress { message } => match &self.progress {
                Some(progress) => progress.update(&message),
                None => self.progress = self.ui.spinner(message),
            },
            ServerEvent::Started { .. } => {
                self.progress = None;
                self.started = true;
                // Not before: until then ^C ends this process.
                if self.streams.tty && RawTerminal::is_there() {
                    self.raw = Some(RawTerminal::enter()?);
                }
            }
            ServerEvent::StdinAck { bytes } => {
                self.window = self.window.saturating_add(bytes).min(STDIN_WINDOW);
            }
            ServerEvent::Exit { exit_code, timed_out, .. } => {
                self.progress = None;
                if timed_out {
                    self.ui.warn("the command reached its time limit");
                }
                return Ok(Some(u8::try_from(exit_code).unwrap_or(u8::MAX)));
            }
            ServerEvent::Error { message, status, code, request_id } => {
                let body = ErrorBody { error: message, code, request_id };
                return Err(Refused::in_conversation(status, body).into());
            }
        }
        Ok(None)
    }

    /// Sends as much input as the daemon accepts now.
    async fn send_pending(&mut self) {
        while !self.pending.is_empty() && self.window > 0 {
            let count = self.pending.len().min(self.window).min(MAX_CHUNK);
            let chunk = self.pending.split_to(count);
            self.window -= count;
            self.send(Message::binary(pack(Channel::Stdin, &chunk))).await;
        }
    }

    async fn say_size(&mut self) -> Result<()> {
        let TtySize { cols, rows } = terminal_size();
        self.say(&ClientMessage::Resize { cols, rows }).await
    }

    async fn say(&mut self, message: &ClientMessage) -> Result<()> {
        self.send(Message::text(serde_json::to_string(message)?)).await;
        Ok(())
    }

    /// Sends a message. Errors are ignored: a lost daemon shows when reading, after all it sent before.
    async fn send(&mut self, message: Message) {
        let _ = self.outgoing.send(message).await;
    }
}

/// The next piece of standard input, `None` at its end; after that it never resolves.
async fn next_input(stdin: &mut Option<tokio::sync::mpsc::Receiver<Bytes>>) -> Option<Bytes> {
    match stdin {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

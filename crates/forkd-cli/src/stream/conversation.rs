//! A command that runs in a guest, with this process's standard streams as its own: what `forkd run`,
//! `forkd shell` and `forkd exec -it` have in common.
//!
//! The conversation is a WebSocket; the daemon binds the sandbox, or the command, to it, so there is
//! nothing to clean up here, however this process ends.

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use forkd_controller::ErrorBody;
use forkd_controller::frames::{self, Channel, ClientMessage, MAX_CHUNK, STDIN_WINDOW, ServerEvent, TtySize};
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

/// What there is to say when the conversation ends before the command.
const BROKE_OFF: &str = "the daemon broke off; `forkd doctor` tells whether it still runs";

/// What of this process the command has.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Streams {
    /// Standard input; without it the command's is empty.
    pub(crate) stdin: bool,
    /// The terminal, if there is one; without it the command's is nobody's.
    pub(crate) tty: bool,
}

/// The size of the terminal a command is given.
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
    /// This computer's terminal, while it is the command's.
    raw: Option<RawTerminal>,
    /// Whether the command runs.
    started: bool,
    /// How many bytes of input the daemon is ready to take.
    window: usize,
    /// Input that was read but not sent yet.
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

    /// Asks for a command and stays with it; the status to exit with.
    pub(crate) async fn hold(mut self, request: &impl Serialize) -> Result<u8> {
        let text = serde_json::to_string(request)?;
        self.outgoing.send(Message::text(text)).await.context(BROKE_OFF)?;
        let output = OutputWriter::start();
        let mut signals = Forwarded::pass_on()?;
        let outcome = self.talk(&output, &mut signals).await;
        self.progress = None;
        let status = output.conclude(outcome, &mut signals).await;
        // Before anybody says anything more.
        self.raw = None;
        status
    }

    /// Until the command, or the conversation, is over.
    async fn talk(&mut self, output: &OutputWriter, signals: &mut Forwarded) -> Result<RemoteExit> {
        let mut stdin = self.streams.stdin.then(stdio::read_stdin);
        let mut resized = signal(SignalKind::window_change())?;
        // A terminal has no end of input: the character for it would be a key somebody pressed.
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
                    // Before the command runs there is nobody to pass a signal on to; and on a terminal
                    // keys are no signals: somebody wants this process to end.
                    if caught.insists || !self.started || self.raw.is_some() {
                        return Ok(RemoteExit::Leave(caught.status()));
                    }
                    self.say(&ClientMessage::Signal { signal: caught.name.to_owned() }).await?;
                }
                _ = resized.recv(), if self.started && self.streams.tty => self.say_size().await?,
                // Nobody reads the output: the command gets what it would get here.
                () = output.broken() => return Ok(RemoteExit::Exit(128 + libc::SIGPIPE as u8)),
            }
            self.send_pending().await;
        }
    }

    /// Takes a message; the status to exit with if it is the last.
    async fn receive(&mut self, message: Message, output: &OutputWriter) -> Result<Option<u8>> {
        match message {
            Message::Binary(frame) => {
                let (target, bytes) = match frames::unpack(frame) {
                    Some((Channel::Stdout, bytes)) => (OutputStream::Stdout, bytes),
                    Some((Channel::Stderr, bytes)) => (OutputStream::Stderr, bytes),
                    _ => bail!("the daemon sent something this version of forkd does not understand"),
                };
                output.write(target, bytes).await;
                Ok(None)
            }
            Message::Text(text) => {
                let event = serde_json::from_str(&text).context("the daemon's message")?;
                let began = matches!(event, ServerEvent::Started { .. });
                let last = self.event(event)?;
                // It may have been resized since it was asked for.
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
                    self.ui.warn("the command's time was over");
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

    /// Sends as much of the input as the daemon takes now.
    async fn send_pending(&mut self) {
        while !self.pending.is_empty() && self.window > 0 {
            let count = self.pending.len().min(self.window).min(MAX_CHUNK);
            let chunk = self.pending.split_to(count);
            self.window -= count;
            self.send(Message::binary(frames::pack(Channel::Stdin, &chunk))).await;
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

    /// A daemon that is gone shows when reading, after everything it said before.
    async fn send(&mut self, message: Message) {
        let _ = self.outgoing.send(message).await;
    }
}

/// The next piece of standard input, `None` at its end; after that, nothing ever.
async fn next_input(stdin: &mut Option<tokio::sync::mpsc::Receiver<Bytes>>) -> Option<Bytes> {
    match stdin {
        Some(receiver) => receiver.recv().await,
        None => std::future::pending().await,
    }
}

//! `forkd run`: one command in a fresh sandbox, as if it ran here.
//!
//! The conversation is a WebSocket; the daemon binds the sandbox to it, so there is nothing to
//! clean up here, however this process ends.

use std::collections::BTreeMap;

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use forkd_controller::frames::{
    self, Channel, ClientMessage, MAX_CHUNK, RunRequest, STDIN_WINDOW, ServerEvent,
};
use futures_util::stream::{SplitSink, SplitStream};
use futures_util::{SinkExt, StreamExt};
use tokio_tungstenite::tungstenite::Message;

use super::{Context, prepare_image, runtime};
use crate::args::RunArgs;
use crate::client::Socket;
use crate::daemon;
use crate::signals::Forwarded;
use crate::stdio::{self, Outcome, Output, Target};
use crate::ui::{Progress, Ui};

/// What there is to say when the conversation ends before the command.
const BROKE_OFF: &str = "the daemon broke off; `forkd doctor` tells whether it still runs";

/// Runs the command and returns the status to exit with.
pub(crate) fn run(context: &Context, args: RunArgs) -> Result<u8> {
    let Context { data, ui } = context;
    prepare_image(context, &args.daemon, &args.image)?;
    let runtime = runtime()?;
    let result = runtime.block_on(async {
        let daemon = daemon::ensure(data, &args.daemon, *ui).await?;
        let socket = daemon.websocket("/v1/run").await?;
        Conversation::new(socket, *ui).hold(request(args)).await
    });
    // A thread may still wait for standard input; it ends with the process.
    runtime.shutdown_background();
    result
}

fn request(args: RunArgs) -> RunRequest {
    RunRequest {
        image: args.image,
        args: args.command,
        env: args.process.env.into_iter().collect::<BTreeMap<_, _>>(),
        cwd: args.process.cwd,
        user: args.process.user,
        vcpus: Some(args.guest.vcpus),
        mem_size_mib: Some(args.guest.mem_size_mib),
        timeout_secs: args.timeout,
        tty: None,
        network: args.guest.no_network.then_some(false),
    }
}

/// One `run`, from the request to the exit status.
struct Conversation {
    incoming: SplitStream<Socket>,
    outgoing: SplitSink<Socket, Message>,
    ui: Ui,
    progress: Option<Progress>,
    /// Whether the command runs.
    started: bool,
    /// How many bytes of input the daemon is ready to take.
    window: usize,
    /// Input that was read but not sent yet.
    pending: Bytes,
}

impl Conversation {
    fn new(socket: Socket, ui: Ui) -> Self {
        let (outgoing, incoming) = socket.split();
        Conversation {
            incoming,
            outgoing,
            ui,
            progress: None,
            started: false,
            window: STDIN_WINDOW,
            pending: Bytes::new(),
        }
    }

    async fn hold(mut self, request: RunRequest) -> Result<u8> {
        let text = serde_json::to_string(&request)?;
        self.outgoing.send(Message::text(text)).await.context(BROKE_OFF)?;
        let output = Output::start();
        let mut signals = Forwarded::listen()?;
        let outcome = self.talk(&output, &mut signals).await;
        self.progress = None;
        output.conclude(outcome, &mut signals).await
    }

    /// Until the command, or the conversation, is over.
    async fn talk(&mut self, output: &Output, signals: &mut Forwarded) -> Result<Outcome> {
        let mut stdin = Some(stdio::read_stdin());
        loop {
            let may_read = self.pending.is_empty() && self.window > 0;
            tokio::select! {
                message = async { output.room().await; self.incoming.next().await } => {
                    let message = message.context(BROKE_OFF)?.context(BROKE_OFF)?;
                    if let Some(status) = self.receive(message, output).await? {
                        return Ok(Outcome::Exit(status));
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
                    // Before the command runs there is nobody to pass a signal on to.
                    if caught.insists || !self.started {
                        return Ok(Outcome::Leave(caught.status()));
                    }
                    self.say(&ClientMessage::Signal { signal: caught.name.to_owned() }).await?;
                }
                // Nobody reads the output: the command gets what it would get here.
                () = output.broken() => return Ok(Outcome::Exit(128 + libc::SIGPIPE as u8)),
            }
            self.send_pending().await;
        }
    }

    /// Takes a message; the status to exit with if it is the last.
    async fn receive(&mut self, message: Message, output: &Output) -> Result<Option<u8>> {
        match message {
            Message::Binary(frame) => {
                let (target, bytes) = match frames::unpack(frame) {
                    Some((Channel::Stdout, bytes)) => (Target::Stdout, bytes),
                    Some((Channel::Stderr, bytes)) => (Target::Stderr, bytes),
                    _ => bail!("the daemon sent something this version of forkd does not understand"),
                };
                output.write(target, bytes).await;
                Ok(None)
            }
            Message::Text(text) => self.event(serde_json::from_str(&text).context("the daemon's message")?),
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
            }
            ServerEvent::StdinAck { bytes } => {
                self.window = self.window.saturating_add(bytes).min(STDIN_WINDOW);
            }
            ServerEvent::Exit { exit_code, timed_out, .. } => {
                self.progress = None;
                if timed_out {
                    self.ui.warn("the command's time was over");
                }
                return Ok(Some(exit_code as u8));
            }
            ServerEvent::Error { message, .. } => bail!(message),
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

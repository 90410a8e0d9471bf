//! Standard input and output for commands that run in a guest. Reading and writing blocks, so each has its
//! own thread; bounded queues between them keep memory bounded.

use std::io::{self, Read, Write};

use anyhow::{Context, Result};
use bytes::Bytes;
use tokio::sync::{mpsc, oneshot};

use crate::stream::signals::Forwarded;

/// The size of one read.
const CHUNK: usize = 32 << 10;
/// The number of chunks that may wait.
const QUEUE: usize = 8;
/// The largest number of chunks per message: one for each stream.
const MESSAGE: usize = 2;

/// A stream for output.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum OutputStream {
    Stdout,
    Stderr,
}

/// How this process ends after a command, with the exit status.
#[derive(Debug)]
pub(crate) enum RemoteExit {
    /// The command has ended.
    Exit(u8),
    /// The user wants to leave now.
    Leave(u8),
}

/// The chunks of standard input, in order; closed at its end.
pub(crate) fn read_stdin() -> mpsc::Receiver<Bytes> {
    let (sender, receiver) = mpsc::channel(QUEUE);
    std::thread::spawn(move || {
        let mut buffer = vec![0u8; CHUNK];
        // Unbuffered, so that a typed line is sent at once.
        let mut stdin = io::stdin().lock();
        loop {
            match stdin.read(&mut buffer) {
                Ok(0) => return,
                Ok(count) => {
                    if sender.blocking_send(Bytes::copy_from_slice(&buffer[..count])).is_err() {
                        return;
                    }
                }
                Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
                // A lost terminal, or closed input, counts as the end of input.
                Err(_) => return,
            }
        }
    });
    receiver
}

/// A writer of standard output and error.
#[derive(Debug)]
pub(crate) struct OutputWriter {
    sender: mpsc::Sender<(OutputStream, Bytes)>,
    written: oneshot::Receiver<io::Result<()>>,
}

impl OutputWriter {
    pub(crate) fn start() -> Self {
        Self::to(|target, bytes| match target {
            OutputStream::Stdout => write_out(&mut io::stdout().lock(), bytes),
            OutputStream::Stderr => write_out(&mut io::stderr().lock(), bytes),
        })
    }

    fn to(write: impl Fn(OutputStream, &[u8]) -> io::Result<()> + Send + 'static) -> Self {
        let (sender, mut receiver) = mpsc::channel::<(OutputStream, Bytes)>(QUEUE);
        let (done, written) = oneshot::channel();
        std::thread::spawn(move || {
            let mut write_all = || {
                while let Some((target, bytes)) = receiver.blocking_recv() {
                    write(target, &bytes)?;
                }
                Ok(())
            };
            // Before the queue is closed, so that the reason is there when the other side sees the close.
            let _ = done.send(write_all());
        });
        OutputWriter { sender, written }
    }

    /// Waits until a message's chunks can be queued without waiting. A caller that also listens for signals
    /// waits here and not in [`OutputWriter::write`]. Safe to cancel.
    pub(crate) async fn room(&self) {
        // An error means that the reader has left; `broken` reports it.
        let _ = self.sender.reserve_many(MESSAGE).await;
    }

    /// Queues bytes for writing; they are lost if the reader has left.
    pub(crate) async fn write(&self, target: OutputStream, bytes: Bytes) {
        let _ = self.sender.send((target, bytes)).await;
    }

    /// Resolves when writing has failed.
    pub(crate) async fn broken(&self) {
        self.sender.closed().await;
    }

    /// The exit status. The command's output is written first, also after a failure; but a user who wants to
    /// leave does not wait for a slow reader.
    pub(crate) async fn conclude(self, outcome: Result<RemoteExit>, signals: &mut Forwarded) -> Result<u8> {
        if let Ok(RemoteExit::Leave(status)) = outcome {
            return Ok(status);
        }
        tokio::select! {
            written = self.finish() => written?,
            caught = signals.next() => return Ok(caught.status()),
        }
        match outcome? {
            RemoteExit::Exit(status) | RemoteExit::Leave(status) => Ok(status),
        }
    }

    /// Waits until everything is written. A reader that has left is not a failure.
    pub(crate) async fn finish(self) -> Result<()> {
        drop(self.sender);
        match self.written.await {
            Ok(Err(error)) if error.kind() != io::ErrorKind::BrokenPipe => {
                Err(error).context("the command's output cannot be written")
            }
            _ => Ok(()),
        }
    }
}

fn write_out(target: &mut impl Write, bytes: &[u8]) -> io::Result<()> {
    target.write_all(bytes)?;
    target.flush()
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::{Arc, Mutex};
    use std::time::Duration;

    #[tokio::test]
    async fn finishing_waits_for_everything_that_was_handed_over() {
        let kept = Arc::new(Mutex::new(Vec::new()));
        let sink = kept.clone();
        let output = OutputWriter::to(move |_, bytes| {
            std::thread::sleep(Duration::from_millis(5));
            sink.lock().unwrap().extend_from_slice(bytes);
            Ok(())
        });
        for _ in 0..20 {
            output.room().await;
            output.write(OutputStream::Stdout, Bytes::from_static(b"x")).await;
        }
        output.finish().await.unwrap();
        assert_eq!(kept.lock().unwrap().len(), 20);
    }

    #[tokio::test]
    async fn what_was_written_before_a_failure_comes_out_and_only_leaving_does_not_wait() {
        let mut signals = Forwarded::listen().unwrap();
        let (gate, opened) = std::sync::mpsc::channel::<()>();
        let kept = Arc::new(Mutex::new(Vec::new()));
        let sink = kept.clone();
        let output = OutputWriter::to(move |_, bytes| {
            std::thread::sleep(Duration::from_millis(20));
            sink.lock().unwrap().extend_from_slice(bytes);
            Ok(())
        });
        output.write(OutputStream::Stdout, Bytes::from_static(b"last words")).await;
        let failed = output.conclude(Err(anyhow::anyhow!("the guest died")), &mut signals).await;
        assert_eq!(failed.unwrap_err().to_string(), "the guest died");
        assert_eq!(*kept.lock().unwrap(), b"last words");

        let stuck = OutputWriter::to(move |_, _| opened.recv().map_err(io::Error::other));
        stuck.write(OutputStream::Stdout, Bytes::from_static(b"x")).await;
        assert_eq!(stuck.conclude(Ok(RemoteExit::Leave(130)), &mut signals).await.unwrap(), 130);
        drop(gate);
    }

    #[tokio::test]
    async fn a_full_disk_is_an_error_and_a_reader_that_left_is_not() {
        let failing = |kind: io::ErrorKind| OutputWriter::to(move |_, _| Err(kind.into()));
        for (kind, fails) in [(io::ErrorKind::StorageFull, true), (io::ErrorKind::BrokenPipe, false)] {
            let output = failing(kind);
            output.write(OutputStream::Stdout, Bytes::from_static(b"x")).await;
            output.broken().await;
            assert_eq!(output.finish().await.is_err(), fails, "{kind:?}");
        }
    }
}

//! The stream of a client's connection. It counts as a connection until it closes, also as a WebSocket. It fails when
//! its client stops reading the reply.

use std::io;
use std::pin::Pin;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::task::{Context, Poll, ready};
use std::time::Duration;

use tokio::io::{AsyncRead, AsyncWrite, ReadBuf};
use tokio::sync::OwnedSemaphorePermit;
use tokio::time::{Sleep, sleep};

/// A client's stream with its place among the connections and its stall timeout.
pub(crate) struct ClientStream<S> {
    stream: S,
    stall_timeout: StallTimeout,
    /// How long a client may take nothing.
    stall: Duration,
    /// The timer, while the client takes nothing.
    waiting: Option<Pin<Box<Sleep>>>,
    _room: Option<OwnedSemaphorePermit>,
}

/// The switch of a stream's stall timeout. A WebSocket client may read slowly, for example through a pager.
#[derive(Debug, Clone, Default)]
pub(crate) struct StallTimeout(Arc<AtomicBool>);

impl StallTimeout {
    pub(crate) fn disable(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

impl<S> ClientStream<S> {
    pub(crate) fn new(stream: S, stall: Duration, room: Option<OwnedSemaphorePermit>) -> Self {
        ClientStream { stream, stall_timeout: StallTimeout::default(), stall, waiting: None, _room: room }
    }

    pub(crate) fn stall_timeout(&self) -> StallTimeout {
        self.stall_timeout.clone()
    }

    /// Passes a write's result on; an error if no write succeeded for the stall timeout.
    fn limit<T>(&mut self, context: &mut Context<'_>, written: Poll<io::Result<T>>) -> Poll<io::Result<T>> {
        if written.is_ready() || self.stall_timeout.0.load(Ordering::Relaxed) {
            self.waiting = None;
            return written;
        }
        let stall = self.stall;
        let waiting = self.waiting.get_or_insert_with(|| Box::pin(sleep(stall)));
        ready!(waiting.as_mut().poll(context));
        let text = "the client does not read the reply";
        Poll::Ready(Err(io::Error::new(io::ErrorKind::TimedOut, text)))
    }
}

impl<S: AsyncRead + Unpin> AsyncRead for ClientStream<S> {
    fn poll_read(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        buffer: &mut ReadBuf<'_>,
    ) -> Poll<io::Result<()>> {
        Pin::new(&mut self.stream).poll_read(context, buffer)
    }
}

impl<S: AsyncWrite + Unpin> AsyncWrite for ClientStream<S> {
    fn poll_write(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        bytes: &[u8],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write(context, bytes);
        self.limit(context, written)
    }

    fn poll_write_vectored(
        mut self: Pin<&mut Self>,
        context: &mut Context<'_>,
        slices: &[io::IoSlice<'_>],
    ) -> Poll<io::Result<usize>> {
        let written = Pin::new(&mut self.stream).poll_write_vectored(context, slices);
        self.limit(context, written)
    }

    fn is_write_vectored(&self) -> bool {
        self.stream.is_write_vectored()
    }

    fn poll_flush(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let flushed = Pin::new(&mut self.stream).poll_flush(context);
        self.limit(context, flushed)
    }

    fn poll_shutdown(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<io::Result<()>> {
        let shut = Pin::new(&mut self.stream).poll_shutdown(context);
        self.limit(context, shut)
    }
}

#[cfg(test)]
mod tests {
    use tokio::io::{AsyncReadExt, AsyncWriteExt, duplex};
    use tokio::sync::Semaphore;

    use super::*;

    const STALL: Duration = Duration::from_secs(2);

    #[tokio::test]
    async fn a_client_that_reads_nothing_is_disconnected_and_a_slow_one_is_not() {
        let (ours, mut theirs) = duplex(10);
        let mut stream = ClientStream::new(ours, STALL, None);
        // Ten bytes at a time, for longer in total than the stall timeout.
        let writing = tokio::spawn(async move { (stream.write_all(&[7; 100]).await, stream) });
        for _ in 0..10 {
            tokio::time::sleep(STALL / 8).await;
            theirs.read_exact(&mut [0; 10]).await.unwrap();
        }
        let (written, mut stream) = writing.await.unwrap();
        written.unwrap();
        let error = stream.write_all(&[7; 100]).await.unwrap_err();
        assert_eq!(error.kind(), io::ErrorKind::TimedOut);
    }

    #[tokio::test]
    async fn a_client_in_a_conversation_has_no_stall_timeout() {
        let (ours, mut theirs) = duplex(10);
        let mut stream = ClientStream::new(ours, STALL, None);
        stream.stall_timeout().disable();
        let writing = tokio::spawn(async move { stream.write_all(&[7; 100]).await });
        tokio::time::sleep(STALL * 2).await;
        theirs.read_exact(&mut [0; 100]).await.unwrap();
        writing.await.unwrap().unwrap();
    }

    #[tokio::test]
    async fn its_place_is_free_when_it_is_closed() {
        let all = Arc::new(Semaphore::new(1));
        let room = all.clone().acquire_owned().await.unwrap();
        let stream = ClientStream::new(duplex(10).0, STALL, Some(room));
        assert_eq!(all.available_permits(), 0);
        drop(stream);
        assert_eq!(all.available_permits(), 1);
    }
}

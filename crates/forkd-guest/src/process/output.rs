//! The output of a process, on its way to listeners.
//!
//! Listeners have bounded queues. While one of them is full nothing more is read from the process, which then
//! blocks on its own pipe: a slow reader slows the process down and costs no memory. Without a listener the
//! process runs on, and only the end of its output is kept for the next listener.

use std::{
    collections::VecDeque,
    io,
    os::fd::{AsFd, BorrowedFd, OwnedFd},
    sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError},
    time::{Duration, Instant},
};

use rustix::event::EventfdFlags;

use super::reaper::ExitStatus;

/// The longest piece: one message of a stream.
pub(crate) const PIECE: usize = 32 << 10;
/// How much may wait for one listener.
const QUEUE_LIMIT: usize = 256 << 10;
/// The overhead of a piece besides its bytes: a process may write them one by one.
const PIECE_COST: usize = 64;
/// How much of each stream is kept without a listener.
const KEPT_LIMIT: usize = 64 << 10;

/// Where output comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Source {
    Stdout,
    Stderr,
    Terminal,
}

/// A piece of output, shared by all listeners.
pub(crate) type Piece = (Source, Arc<[u8]>);

/// How a process ended, for listeners.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Outcome {
    Ended(ExitStatus),
    /// Its time was over and it was killed.
    DeadlineExceeded,
}

/// An item for a listener.
#[derive(Debug)]
pub(crate) enum Next {
    Piece(Piece),
    End(Outcome),
    /// Nothing came in the time given.
    Idle,
}

#[derive(Debug, Default)]
struct OutputState {
    listeners: Vec<Queue>,
    next_id: u64,
    kept: OutputTail,
    end: Option<Outcome>,
}

#[derive(Debug, Default)]
struct Queue {
    id: u64,
    pieces: VecDeque<Piece>,
    /// Their size, with [`PIECE_COST`].
    size: usize,
}

impl Queue {
    fn push(&mut self, piece: Piece) {
        self.size += piece.1.len() + PIECE_COST;
        self.pieces.push_back(piece);
    }

    fn pop(&mut self) -> Option<Piece> {
        let piece = self.pieces.pop_front()?;
        self.size = self.size.saturating_sub(piece.1.len() + PIECE_COST);
        Some(piece)
    }

    fn is_full(&self) -> bool {
        self.size >= QUEUE_LIMIT
    }
}

/// The end of each stream's output while there is no listener.
#[derive(Debug, Default)]
struct OutputTail(Vec<(Source, VecDeque<u8>)>);

impl OutputTail {
    fn add(&mut self, (source, bytes): &Piece) {
        let at = self.0.iter().position(|(known, _)| known == source).unwrap_or_else(|| {
            self.0.push((*source, VecDeque::new()));
            self.0.len() - 1
        });
        let tail = &mut self.0[at].1;
        tail.extend(bytes.iter());
        tail.drain(..tail.len().saturating_sub(KEPT_LIMIT));
    }

    /// All of it, as pieces like any other.
    fn take(&mut self) -> Vec<Piece> {
        let mut pieces = Vec::new();
        for (source, mut tail) in std::mem::take(&mut self.0) {
            pieces.extend(tail.make_contiguous().chunks(PIECE).map(|bytes| (source, Arc::from(bytes))));
        }
        pieces
    }
}

/// The hub between one process and its listeners.
#[derive(Debug)]
pub(crate) struct Output {
    state: Mutex<OutputState>,
    /// Listeners wait here.
    arrived: Condvar,
    /// Readable when there may be room again: the reading side polls it.
    room: OwnedFd,
}

impl Output {
    pub(crate) fn new() -> io::Result<Arc<Self>> {
        let room = rustix::event::eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Arc::new(Output { state: Mutex::default(), arrived: Condvar::new(), room }))
    }

    fn lock(&self) -> MutexGuard<'_, OutputState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether more can be published now.
    pub(crate) fn has_room(&self) -> bool {
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.room, &mut counter);
        self.lock().listeners.iter().all(|queue| !queue.is_full())
    }

    /// Becomes readable when [`has_room`](Self::has_room) should be asked again.
    pub(crate) fn room(&self) -> BorrowedFd<'_> {
        self.room.as_fd()
    }

    fn wake_reader(&self) {
        let _ = rustix::io::write(&self.room, &1u64.to_ne_bytes());
    }

    /// Hands a piece to all listeners, or keeps it.
    pub(crate) fn publish(&self, source: Source, bytes: &[u8]) {
        let piece: Piece = (source, bytes.into());
        let mut state = self.lock();
        if state.listeners.is_empty() {
            state.kept.add(&piece);
            return;
        }
        for queue in &mut state.listeners {
            queue.push(piece.clone());
        }
        drop(state);
        self.arrived.notify_all();
    }

    /// Publishes how it ended. Nothing is published afterwards.
    pub(crate) fn finish(&self, outcome: Outcome) {
        self.lock().end = Some(outcome);
        self.arrived.notify_all();
    }

    /// Whether it has ended.
    pub(crate) fn is_finished(&self) -> bool {
        self.lock().end.is_some()
    }

    /// Starts to listen: first what was kept, then what comes.
    pub(crate) fn listen(self: &Arc<Self>) -> Listener {
        let mut state = self.lock();
        let id = state.next_id;
        state.next_id += 1;
        let mut queue = Queue { id, ..Queue::default() };
        state.kept.take().into_iter().for_each(|piece| queue.push(piece));
        state.listeners.push(queue);
        Listener { output: self.clone(), id }
    }
}

/// One listener. Dropping it unsubscribes.
#[derive(Debug)]
pub(crate) struct Listener {
    output: Arc<Output>,
    id: u64,
}

impl Listener {
    /// The next thing that happens, or [`Next::Idle`] after `wait`.
    pub(crate) fn next(&self, wait: Duration) -> Next {
        let until = Instant::now() + wait;
        let mut state = self.output.lock();
        loop {
            if let Some(queue) = state.listeners.iter_mut().find(|queue| queue.id == self.id) {
                let was_full = queue.is_full();
                if let Some(piece) = queue.pop() {
                    if was_full {
                        self.output.wake_reader();
                    }
                    return Next::Piece(piece);
                }
            }
            if let Some(end) = state.end {
                return Next::End(end);
            }
            let left = until.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Next::Idle;
            }
            let waited = self.output.arrived.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl Drop for Listener {
    fn drop(&mut self) {
        let mut state = self.output.lock();
        if let Some(at) = state.listeners.iter().position(|queue| queue.id == self.id) {
            let queue = state.listeners.swap_remove(at);
            // Output that no listener has seen is for the next one, like all output without a listener.
            if state.listeners.is_empty() {
                queue.pieces.iter().for_each(|piece| state.kept.add(piece));
            }
        }
        drop(state);
        self.output.wake_reader();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const NOW: Duration = Duration::ZERO;

    fn collect(listener: &Listener) -> Vec<u8> {
        let mut all = Vec::new();
        while let Next::Piece((_, bytes)) = listener.next(NOW) {
            all.extend_from_slice(&bytes);
        }
        all
    }

    #[test]
    fn a_full_listener_holds_the_process_back_until_it_reads_or_leaves() {
        let output = Output::new().unwrap();
        let slow = output.listen();
        let fast = output.listen();
        while output.has_room() {
            output.publish(Source::Stdout, &[7; 32 << 10]);
            collect(&fast);
        }
        assert!(matches!(slow.next(NOW), Next::Piece(_)));
        assert!(output.has_room());
        output.publish(Source::Stdout, &[7; 32 << 10]);
        assert!(!output.has_room());
        drop(slow);
        assert!(output.has_room());
    }

    #[test]
    fn while_nobody_listens_the_end_of_each_stream_is_kept() {
        let output = Output::new().unwrap();
        output.publish(Source::Stderr, b"warning");
        for n in 0..100u8 {
            output.publish(Source::Stdout, &[n; 10_000]);
        }
        let all = collect(&output.listen());
        assert!(all.starts_with(b"warning"));
        assert_eq!(all.len(), KEPT_LIMIT + 7);
        assert_eq!(all.last(), Some(&99));
        assert_eq!(collect(&output.listen()), b"", "once");
    }

    #[test]
    fn bytes_written_one_by_one_do_not_cost_more_than_they_may() {
        let output = Output::new().unwrap();
        let listener = output.listen();
        let mut pieces = 0;
        while output.has_room() {
            output.publish(Source::Stdout, b"x");
            pieces += 1;
        }
        assert!(pieces * PIECE_COST <= QUEUE_LIMIT);
        drop(listener);
        assert_eq!(collect(&output.listen()).len(), pieces, "what was not read is for the next");
    }

    #[test]
    fn the_end_comes_after_all_output() {
        let output = Output::new().unwrap();
        let listener = output.listen();
        output.publish(Source::Stdout, b"x");
        output.finish(Outcome::DeadlineExceeded);
        assert!(matches!(listener.next(NOW), Next::Piece(_)));
        assert!(matches!(listener.next(NOW), Next::End(Outcome::DeadlineExceeded)));
    }
}

//! A live stream of events of sandboxes, snapshots and workspaces.
//!
//! An event's id is the id of the daemon's run and a number, one higher than the last. The daemon keeps the last
//! events, so a subscriber that was away for a moment misses none. A slower subscriber gets the number of events it
//! missed. The daemon never waits for a subscriber.

use std::collections::VecDeque;
use std::sync::Arc;

use forkd_api::{Event, EventKind, EventSubject};
use parking_lot::{Mutex, MutexGuard};
use tokio::sync::broadcast::{self, error::RecvError};

use crate::error::{Error, Result};
use crate::telemetry::metrics::Metrics;
use crate::util::random::new_id;
use crate::util::time;

/// How many events are kept for late and slow subscribers.
const KEPT: usize = 1000;
/// The longest detail text of an event.
const MAX_TEXT: usize = 1000;

/// The event log of this run.
#[derive(Debug)]
pub(crate) struct Events {
    /// The id of this run of the daemon.
    run: String,
    ring: Mutex<Ring>,
    live: broadcast::Sender<Arc<Event>>,
    metrics: Arc<Metrics>,
}

#[derive(Debug, Default)]
struct Ring {
    /// The number of the last event.
    last: u64,
    kept: VecDeque<Arc<Event>>,
}

/// The event after which a subscription begins.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Since {
    /// The last event so far.
    Now,
    /// The event of this run with this number.
    Number(u64),
    /// An event of another run: all kept events are new.
    AnotherRun,
}

/// An item of a subscription.
#[derive(Debug, Clone)]
pub(crate) enum News {
    Event(Arc<Event>),
    /// The subscriber missed events: how many, if that is known.
    Lagged(Option<u64>),
}

impl Events {
    pub(crate) fn new(metrics: Arc<Metrics>) -> Result<Self> {
        // Short, as every event contains it.
        let run = new_id("")?.chars().take(8).collect();
        Ok(Events { run, ring: Mutex::default(), live: broadcast::Sender::new(KEPT), metrics })
    }

    fn ring(&self) -> MutexGuard<'_, Ring> {
        self.ring.lock()
    }

    /// Appends an event and sends it to all subscribers.
    pub(crate) fn emit(&self, kind: EventKind, mut about: EventSubject) {
        if let Some(detail) = &mut about.detail
            && let Some((end, _)) = detail.char_indices().nth(MAX_TEXT)
        {
            detail.truncate(end);
        }
        let ts = time::timestamp_ms(time::now_ms());
        let mut ring = self.ring();
        ring.last += 1;
        let id = format!("{}-{}", self.run, ring.last);
        let event = Arc::new(Event { id, number: ring.last, ts, kind, about });
        if ring.kept.len() == KEPT {
            ring.kept.pop_front();
        }
        ring.kept.push_back(event.clone());
        // Within the lock: a new subscriber gets each event from the ring or from here, never from both.
        let _ = self.live.send(event);
    }

    /// Parses the id of an event after which to continue: of this run, or of another one. A number alone belongs
    /// to this run.
    pub(crate) fn since(&self, id: &str) -> Result<Since> {
        let bad = || Error::invalid("since must be the id of an event, such as `k3v0q1-17`, or a number");
        let (run, number) = match id.rsplit_once('-') {
            Some((run, number)) => (Some(run), number),
            None => (None, id),
        };
        let number = number.parse().map_err(|_| bad())?;
        Ok(match run {
            Some(run) if run != self.run => Since::AnotherRun,
            _ => Since::Number(number),
        })
    }

    /// All kept events after `since`, and all future ones.
    pub(crate) fn subscribe(&self, since: Since) -> Subscription {
        let ring = self.ring();
        let after = match since {
            Since::Now => ring.last,
            // A number beyond the last event counts as the last one.
            Since::Number(number) => number.min(ring.last),
            Since::AnotherRun => 0,
        };
        let news: Vec<_> = ring.kept.iter().filter(|event| event.number > after).cloned().collect();
        let first = news.first().map_or(ring.last + 1, |event| event.number);
        let missed = match since {
            Since::AnotherRun => Some(None),
            _ => Some(first - after - 1).filter(|missed| *missed > 0).map(Some),
        };
        if let Some(Some(missed)) = missed {
            self.metrics.events_dropped.inc_by(missed);
        }
        let mut backlog: VecDeque<News> = missed.into_iter().map(News::Lagged).collect();
        backlog.extend(news.into_iter().map(News::Event));
        Subscription { backlog, live: self.live.subscribe(), metrics: self.metrics.clone() }
    }
}

/// The position of one subscriber.
#[derive(Debug)]
pub(crate) struct Subscription {
    backlog: VecDeque<News>,
    live: broadcast::Receiver<Arc<Event>>,
    metrics: Arc<Metrics>,
}

impl Subscription {
    /// The next event from before the subscription, without waiting.
    pub(crate) fn past(&mut self) -> Option<News> {
        self.backlog.pop_front()
    }

    /// The next item; `None` at the end of the stream. Cancel-safe.
    pub(crate) async fn next(&mut self) -> Option<News> {
        if let Some(past) = self.past() {
            return Some(past);
        }
        match self.live.recv().await {
            Ok(event) => Some(News::Event(event)),
            Err(RecvError::Lagged(missed)) => {
                self.metrics.events_dropped.inc_by(missed);
                Some(News::Lagged(Some(missed)))
            }
            Err(RecvError::Closed) => None,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn events() -> Events {
        Events::new(Arc::new(Metrics::new())).unwrap()
    }

    fn happen(events: &Events, count: usize) {
        for _ in 0..count {
            events.emit(EventKind::SandboxCreated, EventSubject::default());
        }
    }

    async fn number(subscription: &mut Subscription) -> u64 {
        match subscription.next().await {
            Some(News::Event(event)) => event.number,
            other => panic!("{other:?}"),
        }
    }

    #[tokio::test]
    async fn a_client_that_reconnects_gets_every_missed_event_once() {
        let events = events();
        happen(&events, 3);
        let mut from_one = events.subscribe(events.since("1").unwrap());
        let mut from_now = events.subscribe(Since::Now);
        happen(&events, 1);
        for expected in 2..=4 {
            assert_eq!(number(&mut from_one).await, expected);
        }
        assert_eq!(number(&mut from_now).await, 4);
        assert!(from_now.past().is_none());
        let id = format!("{}-4", events.run);
        assert_eq!(events.since(&id).unwrap(), Since::Number(4));
        assert!(events.subscribe(Since::Number(99)).past().is_none());
    }

    #[tokio::test]
    async fn a_client_that_is_too_slow_gets_the_number_of_missed_events() {
        let events = events();
        let mut slow = events.subscribe(Since::Now);
        happen(&events, KEPT * 3);
        let Some(News::Lagged(Some(missed))) = slow.next().await else { panic!() };
        assert_eq!(number(&mut slow).await, missed + 1);
        let mut late = events.subscribe(Since::Number(5));
        let Some(News::Lagged(Some(missed))) = late.past() else { panic!() };
        assert_eq!(missed, (KEPT * 2 - 5) as u64);
        assert_eq!(number(&mut late).await, (KEPT * 2 + 1) as u64);
    }

    #[tokio::test]
    async fn an_id_of_another_run_means_that_everything_is_news() {
        let events = events();
        happen(&events, 1);
        assert_eq!(events.since("elsewhere-7").unwrap(), Since::AnotherRun);
        let mut subscription = events.subscribe(Since::AnotherRun);
        assert!(matches!(subscription.past(), Some(News::Lagged(None))));
        assert_eq!(number(&mut subscription).await, 1);
        for bad in ["", "x", "-", "x-", "1-x", "x-99999999999999999999999"] {
            assert!(events.since(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn every_kind_is_called_what_it_is_serialised_as() {
        for kind in EventKind::ALL {
            assert_eq!(serde_json::to_value(kind).unwrap(), kind.name());
        }
    }
}

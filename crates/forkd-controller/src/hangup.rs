//! Ending a client's connection from inside a request: the only way to be rid of one that neither sends
//! nor takes what was agreed, because an answer that waits to be taken cannot be taken back.

use std::sync::Arc;

use tokio::sync::Notify;

/// The way to end the connection a request came over; in every request's extensions.
#[derive(Debug, Clone, Default)]
pub(crate) struct Hangup(Arc<Notify>);

impl Hangup {
    /// Ends the connection, whatever is under way on it.
    pub(crate) fn now(&self) {
        self.0.notify_one();
    }

    /// Returns when somebody wants that.
    pub(crate) async fn wanted(&self) {
        self.0.notified().await;
    }
}

//! The daemon's wish to stop, and everybody's way to hear of it.

use tokio::sync::watch;

/// Says that the daemon stops.
#[derive(Debug)]
pub(crate) struct Stop(watch::Sender<bool>);

/// Hears that the daemon stops.
#[derive(Debug, Clone)]
pub(crate) struct Stopping(watch::Receiver<bool>);

impl Stop {
    pub(crate) fn new() -> (Self, Stopping) {
        let (stop, stopping) = watch::channel(false);
        (Stop(stop), Stopping(stopping))
    }

    pub(crate) fn ask(&self) {
        self.0.send_replace(true);
    }
}

impl Stopping {
    /// Returns when the daemon was asked to stop. Cancel-safe.
    pub(crate) async fn asked(&mut self) {
        // With the sender gone, the daemon is past stopping.
        let _ = self.0.wait_for(|stop| *stop).await;
    }
}

//! Counting what is under way, to be able to wait until nothing is.

use std::sync::Arc;

use tokio::sync::watch;

/// A number of things under way.
#[derive(Debug, Clone)]
pub(crate) struct Count(Arc<watch::Sender<usize>>);

/// One of them. Dropping it takes it off the count.
#[derive(Debug)]
pub(crate) struct Counted(Arc<watch::Sender<usize>>);

impl Count {
    pub(crate) fn new() -> Self {
        Count(Arc::new(watch::Sender::new(0)))
    }

    pub(crate) fn enter(&self) -> Counted {
        self.0.send_modify(|count| *count += 1);
        Counted(self.0.clone())
    }

    /// Returns when there are none.
    pub(crate) async fn none(&self) {
        // An error would mean that `self` is gone.
        let _ = self.0.subscribe().wait_for(|count| *count == 0).await;
    }
}

impl Drop for Counted {
    fn drop(&mut self) {
        self.0.send_modify(|count| *count -= 1);
    }
}

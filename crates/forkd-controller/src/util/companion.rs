//! A task that does not outlive whoever started it.

use tokio::task::JoinHandle;

use crate::util::task::{self, Task};

/// A task that is ended when this is dropped.
#[derive(Debug)]
pub(crate) struct Companion<T = ()>(JoinHandle<T>);

impl<T: Send + 'static> Companion<T> {
    pub(crate) fn spawn(work: impl Future<Output = T> + Send + 'static) -> Self {
        Companion(task::spawn(Task::Companion, work))
    }

    /// What it returned, when it does; `None` if it failed. Cancel-safe; not to be called again
    /// after it has returned.
    pub(crate) async fn ended(&mut self) -> Option<T> {
        (&mut self.0).await.ok()
    }
}

impl<T> Drop for Companion<T> {
    fn drop(&mut self) {
        self.0.abort();
    }
}

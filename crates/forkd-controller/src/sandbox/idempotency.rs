//! The mark of a request with an idempotency key, in the sandboxes that it made.

use std::sync::Arc;

use crate::sandbox::Sandbox;
use crate::sandbox::registry::Registry;

/// For handlers that create sandboxes: the mark to store with them.
#[derive(Debug, Clone)]
pub(crate) struct IdempotencyMark {
    /// The owner and the key, which together are unique.
    pub(crate) mark: String,
    /// Whether an earlier daemon began the request, with an unknown outcome.
    pub(crate) before: bool,
}

impl IdempotencyMark {
    /// Sandboxes of the request, if an earlier daemon began it and did not reply.
    pub(crate) fn earlier(&self, registry: &Registry) -> Vec<Arc<Sandbox>> {
        if !self.before {
            return Vec::new();
        }
        let mut there = registry.list();
        there.retain(|sandbox| {
            sandbox.read_runtime(|runtime| runtime.saved.lifetime.request.as_ref() == Some(&self.mark))
        });
        there
    }
}

//! After a merge of a branch's layers, the sandbox it was taken of uses the merged layers, too.

use std::sync::Arc;

use crate::error::Result;
use crate::monitor::Replacement;
use crate::sandbox::Sandbox;
use crate::sandbox::command::MonitorCommand;
use crate::snapshot::merge::LayerSource;

/// A sandbox a branch was taken of.
#[derive(Debug)]
pub(crate) struct BranchSource {
    pub(crate) sandbox: Arc<Sandbox>,
    /// The generation of the sandbox's disk layers that the branch has.
    pub(crate) generation: u64,
    /// The count of the sandbox's frozen layers right after the branch.
    pub(crate) frozen: usize,
}

impl LayerSource for BranchSource {
    async fn count_layers(&self, most: usize) {
        let disks = &self.sandbox.disks;
        if *disks.generation.lock().await == self.generation {
            // The template's layers, and one for each branch since. The old count may be wrong after a merge
            // whose answer did not arrive.
            disks.frozen.send_modify(|frozen| *frozen = most + frozen.saturating_sub(self.frozen));
        }
    }

    async fn replace_layers(self, layers: Vec<Option<Replacement>>, most: usize) -> Result<()> {
        let (sandbox, disks) = (&self.sandbox, &self.sandbox.disks);
        let mut now = disks.generation.lock().await;
        // The merge of another branch replaced some of these layers first: the next branch merges the rest.
        if *now != self.generation {
            return Ok(());
        }
        // Before the request to the monitor: the monitor may replace the layers although its answer does not
        // arrive, and then the layer counts of other branches are wrong. If it does not, they only merge later.
        *now += 1;
        sandbox.ask(|reply| MonitorCommand::ReplaceLayers(layers, reply)).await?;
        disks.frozen.send_modify(|frozen| *frozen = frozen.saturating_sub(most.saturating_sub(1)));
        tracing::debug!(sandbox = sandbox.id, layers = most, "disk layers merged");
        Ok(())
    }
}

//! The sandbox a branch was taken of uses the merged layers, too.

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
    /// Which generation of its disks' layers the branch has.
    pub(crate) generation: u64,
    /// How many frozen layers it was believed to have right after.
    pub(crate) frozen: usize,
}

impl LayerSource for BranchSource {
    async fn count_layers(&self, most: usize) {
        let disks = &self.sandbox.disks;
        if *disks.generation.lock().await == self.generation {
            // As many as there were, and one for each branch since. The count may be wrong after a merge whose
            // answer did not arrive.
            disks.frozen.send_modify(|frozen| *frozen = most + frozen.saturating_sub(self.frozen));
        }
    }

    async fn replace_layers(self, layers: Vec<Option<Replacement>>, most: usize) -> Result<()> {
        let (sandbox, disks) = (&self.sandbox, &self.sandbox.disks);
        let mut now = disks.generation.lock().await;
        // Another branch merged some of them first: the next branch has what both left.
        if *now != self.generation {
            return Ok(());
        }
        // Before the monitor is asked: it may replace them although its answer does not arrive, and counts that
        // other branches have are wrong then. If it does not replace them, they only merge later.
        *now += 1;
        sandbox.ask(|tell| MonitorCommand::ReplaceLayers(layers, tell)).await?;
        disks.frozen.send_modify(|frozen| *frozen = frozen.saturating_sub(most.saturating_sub(1)));
        tracing::debug!(sandbox = sandbox.id, layers = most, "disk layers were merged");
        Ok(())
    }
}

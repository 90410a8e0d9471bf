//! The host resources of a sandbox (lineage, template, network slot, cgroup), and their release.

use std::sync::Arc;

use forkd_net::Slot;

use crate::error::{Error, Result, chain};
use crate::host::Host;
use crate::host::cgroup::{CgroupLimits, Leaf};
use crate::host::lineage::Lineage;
use crate::network::Hold;
use crate::snapshot::template::Template;

/// The host resources that a sandbox uses.
#[derive(Debug, Default)]
pub(crate) struct Resources {
    pub(crate) lineage: Option<Arc<Lineage>>,
    /// The template that forked it.
    pub(crate) template: Option<Arc<Template>>,
    pub(crate) slot: Option<Slot>,
    /// Keeps all slots of an earlier daemon, for an unknown sandbox: one of them is its slot.
    pub(crate) any_slot: Option<Hold>,
    pub(crate) leaf: Option<Leaf>,
}

impl Resources {
    /// Allocates the resources of the sandbox `id` of `lineage`: a network slot if `network` asks for one, and a cgroup.
    /// On a host without slots or cgroups it gets none. Blocks.
    pub(crate) fn allocate(
        host: &Host,
        lineage: Arc<Lineage>,
        template: Option<Arc<Template>>,
        id: &str,
        network: bool,
        limits: &CgroupLimits,
    ) -> Result<Self> {
        let mut resources = Resources { slot: host.slot(network)?, ..Resources::default() };
        if let Some(cgroup) = &lineage.cgroup {
            match cgroup.leaf(id, limits) {
                Ok(leaf) => resources.leaf = Some(leaf),
                Err(error) => {
                    resources.release(id);
                    return Err(Error::host("cannot make a cgroup", error));
                }
            }
        }
        resources.lineage = Some(lineage);
        resources.template = template;
        Ok(resources)
    }

    /// Releases the network slot and the cgroup, which the sandbox does not share. Its process must be gone. Blocks.
    pub(crate) fn release(&mut self, id: &str) {
        if let Some(Err(error)) = self.slot.take().map(|mut slot| slot.destroy()) {
            tracing::error!(sandbox = id, error = chain(&error), "sandbox network slot not removed");
        }
        self.any_slot.take().into_iter().for_each(Hold::release);
        let removed = self.leaf.take().map(|leaf| {
            // Kills unknown processes in the cgroup, but only once every branch has left it.
            if leaf.is_left() {
                let _ = leaf.kill();
            }
            leaf.remove()
        });
        if let Some(Err(error)) = removed {
            tracing::error!(sandbox = id, %error, "sandbox cgroup not removed");
        }
    }
}

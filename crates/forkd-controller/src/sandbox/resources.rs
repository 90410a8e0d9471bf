//! What a sandbox has of the host, and gives back when its process is gone.

use std::sync::Arc;

use forkd_net::Slot;

use crate::error::{Error, Result, chain};
use crate::host::Host;
use crate::host::cgroup::{CgroupLimits, Leaf};
use crate::host::lineage::Lineage;
use crate::network::Hold;
use crate::snapshot::template::Template;

/// What a sandbox has that others could have after it.
#[derive(Debug, Default)]
pub(crate) struct Resources {
    pub(crate) lineage: Option<Arc<Lineage>>,
    /// Who forked it.
    pub(crate) template: Option<Arc<Template>>,
    pub(crate) slot: Option<Slot>,
    /// Of one that may have a slot, and it is not known which.
    pub(crate) any_slot: Option<Hold>,
    pub(crate) leaf: Option<Leaf>,
}

impl Resources {
    /// Takes what the sandbox `id` of `lineage` needs: a network slot if `network` asks for one, and a cgroup. It
    /// gets neither where the host has none. Blocks.
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

    /// Gives the host back what is the sandbox's alone. Its process must be gone. Blocks.
    pub(crate) fn release(&mut self, id: &str) {
        if let Some(Err(error)) = self.slot.take().map(|mut slot| slot.destroy()) {
            tracing::error!(sandbox = id, error = chain(&error), "its network slot is left behind");
        }
        self.any_slot.take().into_iter().for_each(Hold::release);
        let removed = self.leaf.take().map(|leaf| {
            // A process nobody knew of may be in there; a branch must not be.
            if leaf.is_left() {
                let _ = leaf.kill();
            }
            leaf.remove()
        });
        if let Some(Err(error)) = removed {
            tracing::error!(sandbox = id, %error, "its cgroup is left behind");
        }
    }
}

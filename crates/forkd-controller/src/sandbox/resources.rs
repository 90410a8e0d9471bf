//! What a sandbox has of the host, and gives back when its process is gone.

use std::sync::Arc;

use forkd_net::Slot;

use crate::error::{Error, Result, chain};
use crate::host::Host;
use crate::host::cgroup::{Leaf, Limits};
use crate::host::lineage::Lineage;
use crate::network::Hold;
use crate::snapshot::template::Template;

/// What a sandbox has that others could have after it.
#[derive(Debug, Default)]
pub(crate) struct Belongings {
    pub(crate) lineage: Option<Arc<Lineage>>,
    /// Who forked it.
    pub(crate) template: Option<Arc<Template>>,
    pub(crate) slot: Option<Slot>,
    /// Of one that may have a slot, and it is not known which.
    pub(crate) any_slot: Option<Hold>,
    pub(crate) leaf: Option<Leaf>,
}

impl Belongings {
    /// Takes what the sandbox `id` of `lineage` needs: a network slot if `network` asks for one, and a cgroup. It
    /// gets neither where the host has none. Blocks.
    pub(crate) fn equip(
        host: &Host,
        lineage: Arc<Lineage>,
        template: Option<Arc<Template>>,
        id: &str,
        network: bool,
        limits: &Limits,
    ) -> Result<Self> {
        let mut belongings = Belongings { slot: host.slot(network)?, ..Belongings::default() };
        if let Some(cgroup) = &lineage.cgroup {
            match cgroup.leaf(id, limits) {
                Ok(leaf) => belongings.leaf = Some(leaf),
                Err(error) => {
                    belongings.discard(id);
                    return Err(Error::host("cannot make a cgroup", error));
                }
            }
        }
        belongings.lineage = Some(lineage);
        belongings.template = template;
        Ok(belongings)
    }

    /// Gives the host back what is the sandbox's alone. Its process must be gone. Blocks.
    pub(crate) fn discard(&mut self, id: &str) {
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

//! The parts of the host that sandboxes and snapshots share: images, user ids, cgroups, network, and a queue of
//! clean-up jobs.

pub(crate) mod allowed_paths;
pub(crate) mod cgroup;
pub(crate) mod cleanup;
pub(crate) mod disk_layer;
pub(crate) mod disk_space;
pub(crate) mod fd_limit;
pub(crate) mod groups;
pub(crate) mod handed_layers;
pub(crate) mod images;
pub(crate) mod lineage;
pub(crate) mod memory_usage;
pub(crate) mod oom;
pub(crate) mod process;
pub(crate) mod process_stats;
pub(crate) mod run_dir;
pub(crate) mod unix_socket;

use std::sync::Arc;

use forkd_net::Slot;
use forkd_store::Database;

use crate::config::Config;
use crate::error::{Error, Result, chain};
use crate::host::cleanup::CleanupQueue;
use crate::host::images::ImageLibrary;
use crate::host::lineage::Lineages;
use crate::host::memory_usage::MemoryUsage;
use crate::network::Slots;
use crate::telemetry::Telemetry;

/// Shared access to the host's resources.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) config: Arc<Config>,
    pub(crate) database: Arc<Database>,
    pub(crate) finder: ImageLibrary,
    pub(crate) lineages: Arc<Lineages>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) cleanup_queue: CleanupQueue,
    pub(crate) telemetry: Arc<Telemetry>,
    /// Memory of all sandboxes.
    pub(crate) usage: MemoryUsage,
}

impl Host {
    /// Must be called in a runtime.
    pub(crate) fn new(config: Arc<Config>, database: Arc<Database>, telemetry: Arc<Telemetry>) -> Arc<Self> {
        let cleanup_queue = CleanupQueue::new();
        // Each booted sandbox begins a lineage, and each template.
        let max = u32::try_from(config.limits.max_sandboxes).unwrap_or(u32::MAX);
        Arc::new(Host {
            finder: ImageLibrary::new(&config),
            lineages: Lineages::new(max, config.jail_uid_base, cleanup_queue.clone()),
            slots: Arc::new(Slots::of(&config)),
            cleanup_queue,
            telemetry,
            usage: MemoryUsage::default(),
            database,
            config,
        })
    }

    /// A network slot, if it is wanted and the host can have one. Blocks.
    pub(crate) fn slot(&self, wanted: bool) -> Result<Option<Slot>> {
        if !wanted {
            return Ok(None);
        }
        self.slots.get().map_err(|error| Error::host("cannot make a network slot", chain(&error)))
    }
}

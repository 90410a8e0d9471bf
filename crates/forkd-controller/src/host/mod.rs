//! What sandboxes and snapshots share of the host: images, user ids, cgroups, network, and somebody
//! who takes things away.

pub(crate) mod allowed_paths;
pub(crate) mod cgroup;
pub(crate) mod cleanup;
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

use std::io;
use std::path::Path;
use std::sync::Arc;

use forkd_net::Slot;
use forkd_store::Database;

use crate::config::Config;
use crate::error::{Error, Result};
use crate::host::cgroup::Limits;
use crate::host::cleanup::Janitor;
use crate::host::images::Finder;
use crate::host::lineage::{Lineage, Lineages};
use crate::network::{Slots, chain};
use crate::sandbox::Belongings;
use crate::snapshot::template::Template;
use crate::telemetry::Telling;
use crate::util::task::{self, Task};

/// The host.
#[derive(Debug)]
pub(crate) struct Host {
    pub(crate) config: Arc<Config>,
    pub(crate) database: Arc<Database>,
    pub(crate) finder: Finder,
    pub(crate) lineages: Arc<Lineages>,
    pub(crate) slots: Arc<Slots>,
    pub(crate) janitor: Janitor,
    pub(crate) telling: Arc<Telling>,
}

impl Host {
    /// Must be called in a runtime.
    pub(crate) fn new(config: Arc<Config>, database: Arc<Database>, telling: Arc<Telling>) -> Arc<Self> {
        let janitor = Janitor::new();
        // Each booted sandbox is a lineage, and each template.
        let max = u32::try_from(config.limits.max_sandboxes).unwrap_or(u32::MAX);
        Arc::new(Host {
            finder: Finder::new(&config),
            lineages: Lineages::new(max, config.jail_uid_base, janitor.clone()),
            slots: Arc::new(Slots::of(&config)),
            janitor,
            telling,
            database,
            config,
        })
    }

    /// What the sandbox `id` of `lineage` needs of the host: a network slot, if it is to have one and
    /// the host can have any, and a cgroup, likewise. Blocks.
    pub(crate) fn equip(
        &self,
        lineage: Arc<Lineage>,
        template: Option<Arc<Template>>,
        id: &str,
        network: bool,
        limits: &Limits,
    ) -> Result<Belongings> {
        let mut belongings = Belongings { slot: self.slot(network)?, ..Belongings::default() };
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

    /// A network slot, if one is wanted and the host can have any. Blocks.
    pub(crate) fn slot(&self, wanted: bool) -> Result<Option<Slot>> {
        if !wanted {
            return Ok(None);
        }
        self.slots.get().map_err(|error| Error::host("cannot make a network slot", chain(&error)))
    }
}

/// Does blocking work on a thread of its own.
pub(crate) async fn blocking<T: Send + 'static>(
    doing: &'static str,
    work: impl FnOnce() -> Result<T> + Send + 'static,
) -> Result<T> {
    // What it logs belongs to whoever asked for it.
    let span = tracing::Span::current();
    let work = move || span.in_scope(work);
    task::spawn_blocking(Task::Blocking, work).await.unwrap_or_else(|error| Err(Error::host(doing, error)))
}

/// `prefix` and 16 random letters and digits.
pub(crate) fn new_id(prefix: &str) -> Result<String> {
    let mut random = [0u8; 16];
    crate::api::middleware::authenticate::fill_random(&mut random)?;
    let digit = |byte: &u8| char::from_digit(u32::from(*byte) % 36, 36).unwrap_or('0');
    Ok(prefix.chars().chain(random.iter().map(digit)).collect())
}

/// Makes a folder for us alone, and those above it.
pub(crate) fn make_private_dir(path: &Path) -> io::Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new().recursive(true).mode(0o700).create(path)
}

#[cfg(test)]
mod tests {
    use super::*;
    use forkd_protocol::names::is_valid_sandbox_id;
    use std::collections::BTreeSet;

    #[test]
    fn ids_follow_the_rule_and_differ() {
        let ids: BTreeSet<String> = (0..100).map(|_| new_id("sb").unwrap()).collect();
        assert_eq!(ids.len(), 100);
        assert!(ids.iter().all(|id| is_valid_sandbox_id(id)));
    }
}

//! Sandboxes and templates whose records the daemon cannot read (`records`). It keeps them: it lists them in state
//! `unknown` with the reason, and counts their host resources and their share of a quota. It changes none of their files,
//! so that a daemon that can read the record takes them over. Only a client ends them.
//!
//! The data for that comes from sources that are still readable: the usual fields of the record, the archive, the
//! template that forked the sandbox, and the kernel's data about the process.

use std::sync::Arc;
use std::time::Duration;

use serde_json::Value;

use crate::auth::principal::local_owner;
use crate::error::Result;
use crate::sandbox::lifetime::Lifetime;
use crate::sandbox::registry::{Registry, time};
use crate::sandbox::resources::Resources;
use crate::sandbox::{DesiredState, Phase, Sandbox, SandboxRecord, Spec, child_name};
use crate::snapshot::adopt::Leftovers;
use crate::snapshot::template::{Adopted, Template};
use crate::snapshot::unknown::{Glimpse, Remains, Unread, refused};

/// Lists a sandbox with an unreadable record in state `unknown`.
pub(crate) async fn keep(registry: &Arc<Registry>, leftovers: &mut Leftovers, unread: Unread) {
    let (host, id, seen) = (&registry.host, &unread.id, Glimpse::of::<SandboxRecord>(&unread.folder));
    tracing::error!(
        sandbox = id,
        why = unread.why,
        "sandbox record not readable; sandbox kept in state unknown"
    );
    let archive = registry.archive.find(id).await.ok().flatten().map(|it| it.made);
    let (template, name, child) = forked_by(leftovers, id, &seen);
    let remains = Remains::new(&unread, template.as_ref().map(|it| it.pid).zip(child));
    let lineage = seen.lineage(&host.lineages, "").or_else(|| Some(template.as_ref()?.lineage.clone()));
    let lineage = lineage.or_else(|| host.lineages.of_process(remains.pid()?, Some(id)));
    let leaf = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref()?.existing(&name).ok());
    let slot = seen.text("/netns").and_then(|name| host.slots.adopt(&name));
    // The sandbox's slot is unknown, unless the record says that it has none.
    let is_certain = slot.is_some() || seen.0.get("netns").is_some_and(Value::is_null);
    let any_slot = (!is_certain).then(|| host.slots.hold());
    let guest = template.as_ref().map(|template| &template.about.guest);
    let mem_mib = seen.number("/spec/mem_mib").or(guest.map(|guest| guest.mem_size_mib));
    let mem_mib = mem_mib.unwrap_or(host.config.limits.default_mem_mib);
    let image = || Some(guest?.image.as_ref()?.name.clone());
    let spec = Spec {
        owner: seen
            .text("/spec/owner")
            .or_else(|| archive.as_ref().map(|it| it.owner.clone()))
            .unwrap_or_else(local_owner),
        image: seen.text("/spec/image").or_else(image),
        snapshot_tag: seen
            .text("/spec/snapshot_tag")
            .or_else(|| archive.as_ref()?.snapshot_tag.clone())
            .or_else(|| template.as_ref()?.about.snapshot_tag().map(str::to_owned)),
        forked_from: seen
            .text("/spec/forked_from")
            .or_else(|| Some(template.as_ref()?.about.fork.as_ref()?.sandbox.clone())),
        vcpus: seen.number("/spec/vcpus").or(guest.map(|guest| guest.vcpus)).unwrap_or(1),
        mem_mib,
        network: slot.is_some(),
        memory_limit_mib: seen
            .number("/spec/memory_limit_mib")
            .unwrap_or_else(|| crate::host::cgroup::memory_mib(mem_mib)),
        guest: None,
    };
    let resources = Resources { lineage, template, slot, any_slot, leaf };
    let mut sandbox = Sandbox::new(id.clone(), spec, unread.folder.clone(), resources, host);
    let created = seen.number("/created_at_unix").or(archive.as_ref().map(|it| it.created_at_unix));
    let nanos = Duration::from_nanos(seen.number("/created_nanos").unwrap_or(0));
    sandbox.created = time(created.unwrap_or(0)) + nanos.min(Duration::from_secs(1));
    sandbox.child = name;
    sandbox.update_runtime(|runtime| {
        runtime.pid = remains.pid().and_then(|pid| u32::try_from(pid).ok());
        runtime.saved.lifetime =
            Lifetime { labels: archive.map(|it| it.labels).unwrap_or_default(), ..Lifetime::default() };
    });
    sandbox.set_phase(Phase::Unknown(unread.why.into()));
    let reservation = registry.reserve_existing(&sandbox.spec);
    registry.add_unknown(reservation, sandbox, remains);
}

/// The template that forked the sandbox `id`, the child's name there, and the child's state if the template lists it.
fn forked_by(
    leftovers: &mut Leftovers,
    id: &str,
    seen: &Glimpse,
) -> (Option<Arc<Template>>, String, Option<Adopted>) {
    let name = child_name(id, seen.number("/generation").unwrap_or(0));
    let again = format!("{id}-");
    let is_it = |child: &str| child == name || child == id || child.starts_with(&again);
    for (template, children) in leftovers.templates.values_mut() {
        let known = children.keys().find(|child| is_it(child)).cloned();
        if let Some((name, adopted)) = known.and_then(|child| children.remove_entry(&child)) {
            return (Some(template.clone()), name, Some(adopted));
        }
    }
    let template = seen.text("/template").and_then(|it| leftovers.templates.get(&it));
    (template.map(|(template, _)| template.clone()), name, None)
}

impl Sandbox {
    /// Fails if the record cannot be read: such a sandbox can only be listed and deleted.
    pub(crate) fn known(&self) -> Result<()> {
        match self.phase() {
            Phase::Unknown(why) => Err(refused(&format!("sandbox {}", self.id), &why, &self.kill_command())),
            _ => Ok(()),
        }
    }

    /// The command that deletes it, for error texts.
    pub(crate) fn kill_command(&self) -> String {
        format!("forkd kill {}", self.id)
    }

    /// Stands in for the supervisor of an unknown sandbox, until it is deleted or left to the next daemon.
    pub(crate) async fn keep_unknown(self: Arc<Self>, remains: Remains) {
        // Dropped, so that every command fails: there is no monitor connection.
        drop(self.take_commands());
        let desired = tokio::select! {
            biased;
            desired = self.desired_changed() => desired,
            () = remains.ended() => {
                tracing::warn!(sandbox = self.id, "process of an unknown sandbox ended");
                self.update_runtime(|runtime| runtime.pid = None);
                self.desired_changed().await
            }
        };
        if desired == DesiredState::Leave {
            return;
        }
        let kill = || drop(self.resources().leaf.as_ref().map(|leaf| leaf.kill()));
        remains.end(kill).await;
        self.update_runtime(|runtime| runtime.pid = None);
        self.set_phase(Phase::Ended(Arc::new(self.end_reason())));
    }
}

//! Adoption: a starting daemon takes over the sandboxes of an earlier daemon.
//!
//! A complete sandbox keeps running, or is listed with its end if its process is gone. A half-made one, or one bound to
//! a request, is ended and removed. A sandbox whose record cannot be read is kept (`unknown`).

use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use forkd_protocol::control::WaitStatus;
use forkd_protocol::names::is_valid_sandbox_id;

use crate::error::{Error, Result};
use crate::host::cgroup::CgroupLimits;
use crate::host::process::{self, Pidfd, ProcessId};
use crate::monitor::{self, Monitor};
use crate::sandbox::quiesce::Owed;
use crate::sandbox::registry::{Registry, time};
use crate::sandbox::resources::Resources;
use crate::sandbox::supervisor::SandboxOrigin;
use crate::sandbox::{END, End, Phase, Sandbox, SandboxRecord, rollback, unknown};
use crate::snapshot::adopt::{self, Leftovers, STOP_WAIT};
use crate::snapshot::template::Adopted;
use crate::snapshot::unknown::Unread;
use crate::util::records::Found;

/// Takes over the sandboxes in the registry's folder.
pub(crate) async fn adopt(registry: &Arc<Registry>, mut leftovers: Leftovers) -> Result<()> {
    let (folder, mut adopted) = (&registry.folder, Vec::new());
    let (mut unread, mut half_made) = (Vec::new(), Vec::new());
    let read = |error| Error::host(format!("cannot read {}", folder.display()), error);
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !is_valid_sandbox_id(&id) {
            tracing::warn!(path = %path.display(), "unknown entry in the sandbox folder ignored");
            continue;
        }
        let (record, identity) = (SandboxRecord::read(&path), ProcessId::read(&path));
        if let Some(why) = unreadable(&path, &record, &identity) {
            unread.push(Unread { id, folder: path, why, identity: identity.read() });
            continue;
        }
        // A prepared rollback that never began: the old process still has its own files.
        let _ = rollback::clear(&path.join(rollback::NEXT));
        let (record, identity) = (record.read(), identity.read());
        match record {
            Some(record) if identity.is_some() => {
                adopted.extend(take_over(registry, &mut leftovers, id, &path, record, identity).await);
            }
            record => half_made.push((id, path, record, identity)),
        }
    }
    // After the readable records: what these say about a lineage is certain.
    leftovers.unknown.iter().for_each(|template| template.claim(&registry.host.lineages));
    for unread in unread {
        unknown::keep(registry, &mut leftovers, unread).await;
    }
    // Last: when the last sandbox of a lineage goes, its cgroup goes with every process in it.
    for (id, path, record, identity) in half_made {
        let template = record.as_ref().and_then(|record| {
            let (template, children) = leftovers.templates.get_mut(&record.template)?;
            Some((template.pid, children.remove(&record.child(&id))?))
        });
        end(&id, &path, identity, template).await;
        // After the end: a template forgets no child that runs.
        if let Some(record) = &record
            && let Some((template, _)) = leftovers.templates.get(&record.template)
        {
            template.acknowledge(&record.child(&id));
        }
        match record {
            // A rollback was under way: the old process is gone, the new one was half-made.
            Some(record) if path.join(END).exists() => {
                adopted.extend(take_over(registry, &mut leftovers, id, &path, record, None).await);
                continue;
            }
            Some(record) => {
                let lineage = registry.host.lineages.resume(record.lineage, &record.cgroup);
                let cgroup = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref());
                if let Some(leaf) = cgroup.and_then(|cgroup| cgroup.existing(&record.child(&id)).ok()) {
                    let _ = leaf.kill().and_then(|()| leaf.remove());
                }
            }
            None => registry.host.lineages.forget(&id),
        }
        registry.host.cleanup_queue.remove_folder(path).await;
    }
    // Children that templates still list were deleted, or their folders are gone.
    for (template, children) in leftovers.templates.values_mut() {
        for (child, adopted) in children.drain() {
            if let Adopted::Alive(pid, _end) = adopted {
                tracing::warn!(child, "template child has no sandbox folder; killed");
                kill(pid, template.pid);
            }
            template.acknowledge(&child);
        }
    }
    let slots = registry.clone();
    crate::util::task::blocking("sweeping the network", move || {
        slots.host.slots.sweep();
        Ok(())
    })
    .await?;
    // Each supervisor asks its monitor whether the sandbox is paused, all at the same time.
    let heard = async {
        for sandbox in &adopted {
            let _ = sandbox.started().await;
        }
    };
    let _ = tokio::time::timeout(registry.host.config.timing.call, heard).await;
    let there = registry.list().iter().map(|sandbox| sandbox.id.clone()).collect();
    // The archive only answers later questions: the daemon starts without it.
    if let Err(error) = registry.archive.compare(there).await {
        tracing::error!(%error, "sandbox archive not updated");
    }
    Ok(())
}

/// Why some record of the sandbox cannot be read; `None` if all can. A sandbox without a record is half-made.
fn unreadable(folder: &Path, record: &Found<SandboxRecord>, identity: &Found<ProcessId>) -> Option<String> {
    match (record, identity) {
        (Found::Missing, _) => None,
        (Found::Unreadable(why), _) | (_, Found::Unreadable(why)) => Some(why.clone()),
        (Found::Read(_), Found::Read(identity)) if identity.open().is_some() => None,
        // It has no process: only its end matters.
        (Found::Read(_), _) => match End::read(folder) {
            Found::Unreadable(why) => Some(why),
            Found::Missing | Found::Read(_) => None,
        },
    }
}

/// Takes over a complete sandbox, or lists its end if the process is gone. Returns the sandbox if it runs.
async fn take_over(
    registry: &Arc<Registry>,
    leftovers: &mut Leftovers,
    id: String,
    folder: &Path,
    record: SandboxRecord,
    identity: Option<ProcessId>,
) -> Option<Arc<Sandbox>> {
    let (host, name) = (&registry.host, record.child(&id));
    let (template, child) = match leftovers.templates.get_mut(&record.template) {
        Some((template, children)) => (Some(template.clone()), children.remove(&name)),
        None => (None, None),
    };
    let lineage = host.lineages.resume(record.lineage, &record.cgroup);
    leftovers.lineages.extend(lineage.clone());
    let leaf = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref()?.existing(&name).ok());
    if let (Some(leaf), Some(max)) = (&leaf, CgroupLimits::of_sandbox(record.spec.vcpus, 0).pids_max)
        && let Err(error) = leaf.limit_tasks(max)
    {
        tracing::warn!(sandbox = id, %error, "sandbox task limit not set");
    }
    let slot = record.netns.as_deref().and_then(|name| host.slots.adopt(name));
    let resources = Resources { lineage, template: template.clone(), slot, leaf, any_slot: None };
    let mut sandbox = Sandbox::new(id.clone(), record.spec.clone(), folder.to_owned(), resources, host);
    sandbox.created = time(record.created_at_unix) + Duration::from_nanos(record.created_nanos.into());
    sandbox.child = name.clone();
    sandbox.recorded(record);

    let (mut status, mut end) = match child {
        Some(Adopted::Alive(_, end)) => (None, Some(end)),
        Some(Adopted::Ended(status)) => (Some(status), None),
        None => (None, None),
    };
    let process = identity.as_ref().filter(|_| status.is_none());
    let process = process.and_then(|identity| Some((identity, identity.open()?)));
    let monitor = process.map(|(identity, pidfd)| {
        let adopted = Monitor::adopted(id.clone(), folder.to_owned(), identity.pid, pidfd, &mut end);
        // The monitor's control socket is lost: the process is ending, or must be killed.
        adopted.inspect_err(|_| drop(identity.open().map(|process| process.kill())))
    });
    if !matches!(monitor, Some(Ok(_)))
        && let Some(end) = end
    {
        // The process ends just now: its template will report the status.
        status = tokio::time::timeout(STOP_WAIT, end).await.ok().and_then(|status| status.ok());
    }
    let reservation = registry.reserve_existing(&sandbox.spec);
    match monitor {
        Some(Ok(monitor)) => {
            tracing::info!(sandbox = id, "sandbox adopted");
            sandbox.update_runtime(|runtime| runtime.pid = u32::try_from(monitor.pid()).ok());
            let sandbox = registry.add(reservation, sandbox, SandboxOrigin::Adopted(monitor)).release();
            if !sandbox.spec.is_bare() {
                // The last daemon may have been killed in the middle of a branch or a pause.
                drop(Owed::to(&sandbox));
            }
            Some(sandbox)
        }
        failed => {
            if let Some(Err(error)) = failed {
                tracing::warn!(sandbox = id, %error, "sandbox not adopted: monitor not reachable; process killed");
            }
            let end = End::read(folder).read().unwrap_or_else(|| lost(folder, status));
            if end.write(folder).is_ok()
                && let Some(template) = &template
            {
                template.acknowledge(&name);
            }
            sandbox.set_phase(Phase::Ended(Arc::new(end)));
            registry.add_ended(reservation, sandbox);
            None
        }
    }
}

/// The end to record for a sandbox that ended while no daemon ran.
fn lost(folder: &Path, status: Option<WaitStatus>) -> End {
    let tail = crate::monitor::console::tail(
        &folder.join(crate::monitor::boot_files::CONSOLE),
        forkd_protocol::control::CONSOLE_TAIL as u64,
    );
    let detail = match status {
        Some(status) => format!("{}, while no daemon watched", monitor::describe(Some(status))),
        None => "it ended while no daemon watched; how is not known".into(),
    };
    End::new(if status.is_some() { "monitor_died" } else { "unknown" }, detail, tail)
}

/// Ends the process of a sandbox that is not adopted.
async fn end(id: &str, folder: &Path, identity: Option<ProcessId>, child: Option<(i32, Adopted)>) {
    if let Some(process) = identity.and_then(|identity| identity.open()) {
        tracing::warn!(sandbox = id, "incomplete sandbox of an earlier daemon ended");
        process.end(id).await;
        return;
    }
    tracing::info!(sandbox = id, "incomplete sandbox of an earlier daemon removed");
    // The fork may have happened without a record: the control socket leads to the process.
    let stopped = adopt::stop(folder).await;
    if let (Err(_), Some((template, Adopted::Alive(pid, _end)))) = (stopped, child) {
        kill(pid, template);
    }
}

/// Kills the process `pid` if it is a child of the process `template`.
fn kill(pid: i32, template: i32) {
    let Some(raw) = rustix::process::Pid::from_raw(pid) else { return };
    let Ok(pidfd) = Pidfd::open(raw) else { return };
    // The pidfd is opened first, so the checked process is the one that is killed.
    if process::parent(pid) == Some(template) {
        let _ = pidfd.kill();
    }
}

#[cfg(test)]
mod tests;

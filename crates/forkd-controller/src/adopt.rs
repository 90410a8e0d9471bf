//! Taking over what an earlier daemon left: forked sandboxes that were complete go on, or are listed
//! with how they ended; what was half-made, or bound to a request, is ended and removed.

use std::path::Path;
use std::sync::Arc;
use std::time::{Duration, SystemTime};

use forkd_protocol::control::{Request, WaitStatus};
use forkd_protocol::names::is_valid_sandbox_id;

use crate::error::{Error, Result};
use crate::keeper::Origin;
use crate::link::{self, Link};
use crate::monitor::{self, Monitor};
use crate::process::{self, Identity, Pidfd};
use crate::registry::{Registry, time};
use crate::sandbox::{Belongings, END, End, Phase, RECORD, Record, Sandbox};
use crate::snapshots::Leftovers;
use crate::template::Adopted;

/// How long a half-made child has to obey.
const STOP_WAIT: Duration = Duration::from_secs(5);

/// Takes over the sandboxes in the registry's folder.
pub(crate) async fn adopt(registry: &Arc<Registry>, mut leftovers: Leftovers) -> Result<()> {
    let folder = &registry.folder;
    let read = |error| Error::host(format!("cannot read {}", folder.display()), error);
    for entry in std::fs::read_dir(folder).map_err(read)? {
        let path = entry.map_err(read)?.path();
        let id = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        if !is_valid_sandbox_id(&id) {
            tracing::warn!(path = %path.display(), "not a sandbox's folder; left alone");
            continue;
        }
        let record: Option<Record> = read_json(&path.join(RECORD));
        let identity = Identity::read(&path);
        match (record, identity) {
            (Some(record), Some(identity)) => {
                take_over(registry, &mut leftovers, id, &path, record, identity).await;
            }
            (record, identity) => {
                let template =
                    record.as_ref().and_then(|record| leftovers.templates.get_mut(&record.template));
                let child = template.and_then(|(template, children)| {
                    template.acknowledge(&id);
                    Some((template.pid, children.remove(&id)?))
                });
                end(&id, &path, identity, child).await;
                match &record {
                    Some(record) => {
                        let lineage = leftovers.lineages.get(&record.template);
                        let cgroup = lineage.and_then(|lineage| lineage.cgroup.as_ref());
                        if let Some(leaf) = cgroup.and_then(|cgroup| cgroup.existing(&id).ok()) {
                            let _ = leaf.kill().and_then(|()| leaf.remove());
                        }
                    }
                    None => registry.host.lineages.forget(&id),
                }
                registry.host.janitor.remove_folder(path).await;
            }
        }
    }
    // What templates still list was deleted, or its folder is gone.
    for (template, children) in leftovers.templates.values_mut() {
        for (child, adopted) in children.drain() {
            if let Adopted::Alive(pid, _told) = adopted {
                tracing::warn!(child, "a child without a folder; ending it");
                kill(pid, template.pid);
            }
            template.acknowledge(&child);
        }
    }
    let slots = registry.clone();
    crate::host::blocking("sweeping the network", move || {
        slots.host.slots.sweep();
        Ok(())
    })
    .await
}

fn read_json<T: serde::de::DeserializeOwned>(path: &Path) -> Option<T> {
    serde_json::from_slice(&std::fs::read(path).ok()?).ok()
}

/// Takes over one that was complete.
async fn take_over(
    registry: &Arc<Registry>,
    leftovers: &mut Leftovers,
    id: String,
    folder: &Path,
    record: Record,
    identity: Identity,
) {
    let host = &registry.host;
    let (template, child) = match leftovers.templates.get_mut(&record.template) {
        Some((template, children)) => (Some(template.clone()), children.remove(&id)),
        None => (None, None),
    };
    // Shared by all that are left of a template that is gone.
    let lineage = leftovers.lineages.get(&record.template).cloned().or_else(|| {
        let lineage = host.lineages.resume(record.lineage, &record.template)?;
        leftovers.lineages.insert(record.template.clone(), lineage.clone());
        Some(lineage)
    });
    let leaf = lineage.as_ref().and_then(|lineage| lineage.cgroup.as_ref()?.existing(&id).ok());
    let slot = record.netns.as_deref().and_then(|name| host.slots.adopt(name));
    let belongings = Belongings { lineage, template: template.clone(), slot, leaf };
    let mut sandbox =
        Sandbox::new(id.clone(), record.spec, folder.to_owned(), belongings, &host.config.timing);
    sandbox.created = time(record.created_at_unix);
    sandbox.learn(|facts| facts.python = record.python);

    let (mut status, mut told) = match child {
        Some(Adopted::Alive(_, told)) => (None, Some(told)),
        Some(Adopted::Ended(status)) => (Some(status), None),
        None => (None, None),
    };
    let process = identity.open().filter(|_| status.is_none());
    let monitor = process.map(|pidfd| {
        let adopted = Monitor::adopted(id.clone(), folder.to_owned(), identity.pid, pidfd, &mut told);
        // Nobody can talk to it any more: it is about to end, or has to.
        adopted.inspect_err(|_| drop(identity.open().map(|process| process.kill())))
    });
    if !matches!(monitor, Some(Ok(_)))
        && let Some(told) = told
    {
        // It ends just now: its template is about to say how.
        status = tokio::time::timeout(STOP_WAIT, told).await.ok().and_then(|status| status.ok());
    }
    let seat = registry.seat();
    match monitor {
        Some(Ok(monitor)) => {
            tracing::info!(sandbox = id, "sandbox goes on");
            sandbox.learn(|facts| facts.pid = u32::try_from(identity.pid).ok());
            sandbox.phase.send_replace(Phase::Running);
            let sandbox = registry.add(seat, sandbox, Origin::Adopted(monitor)).release();
            if let Some(deadline) = record.deadline_unix {
                let left = time(deadline).duration_since(SystemTime::now()).unwrap_or_default();
                registry.expire(sandbox, left);
            }
        }
        failed => {
            if let Some(Err(error)) = failed {
                tracing::warn!(sandbox = id, %error, "a sandbox could not be reached; it was ended");
            }
            let end = read_json(&folder.join(END)).unwrap_or_else(|| lost(folder, status));
            if let Ok(bytes) = serde_json::to_vec(&end)
                && std::fs::write(folder.join(END), bytes).is_ok()
                && let Some(template) = &template
            {
                template.acknowledge(&id);
            }
            sandbox.phase.send_replace(Phase::Ended(Arc::new(end)));
            registry.add_ended(seat, sandbox);
        }
    }
}

/// The end of one that ended while no daemon watched.
fn lost(folder: &Path, status: Option<WaitStatus>) -> End {
    let tail = crate::console::tail(
        &folder.join(crate::boot::CONSOLE),
        forkd_protocol::control::CONSOLE_TAIL as u64,
    );
    let detail = match status {
        Some(status) => format!("{}, while no daemon watched", monitor::describe(Some(status))),
        None => "it ended while no daemon watched; how is not known".into(),
    };
    End::new(if status.is_some() { "monitor_died" } else { "unknown" }, detail, tail)
}

/// Ends one that is not taken over.
async fn end(id: &str, folder: &Path, identity: Option<Identity>, child: Option<(i32, Adopted)>) {
    if let Some(process) = identity.and_then(|identity| identity.open()) {
        tracing::warn!(sandbox = id, "left running by a daemon that was killed; ending it");
        process.end(id).await;
        return;
    }
    tracing::info!(sandbox = id, "left behind by a daemon that was killed; removing it");
    // It may have been forked and not recorded: its socket leads to it.
    let stopped = async {
        let link = Link::new(link::open(&folder.join(link::CONTROL)).ok()?).ok()?;
        link.send(&Request::Stop, &[]).await.ok()?;
        while let Ok(Some(_)) = link.recv().await {}
        Some(())
    };
    let stopped = tokio::time::timeout(STOP_WAIT, stopped).await;
    if let (Err(_), Some((template, Adopted::Alive(pid, _told)))) = (stopped, child) {
        kill(pid, template);
    }
}

/// Kills a child its template says is alive, if it is the template's.
fn kill(pid: i32, template: i32) {
    let Some(raw) = rustix::process::Pid::from_raw(pid) else { return };
    let Ok(pidfd) = Pidfd::open(raw) else { return };
    // Looked up after the pidfd was opened: what is killed is what was looked at.
    if process::parent(pid) == Some(template) {
        let _ = pidfd.kill();
    }
}

//! Rollback: a sandbox continues from a snapshot in another process. Id, folder, network slot and limits stay.
//!
//! Most steps that can fail come first, while the old process runs. The daemon finds the template, and makes the new
//! process's files, cgroup and record, in a folder `next` within the sandbox's folder. Then the registry replaces the
//! old [`Sandbox`] by the new one, whose supervisor does the rest. It ends the old process (only one process can have
//! the tap open), takes over its network slot, moves the files out of `next`, and forks. A failure from there on ends
//! the sandbox with the reason; a client can roll it back again.
//!
//! A daemon that is killed during a rollback leaves one of three states to the next one:
//! the old process, and a `next` to remove; the new process; or no process, and the end in a file. That file is written
//! before the old process ends, and removed when the new one is recorded.

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Instant;

use tokio::sync::OwnedMutexGuard;
use tokio::task::JoinHandle;

use crate::auth::principal::Principal;
use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::host::cgroup::CgroupLimits;
use crate::host::{Host, process};
use crate::monitor::{Monitor, boot_files, control_socket};
use crate::sandbox::registry::Registry;
use crate::sandbox::spawn::{Attached, attach};
use crate::sandbox::supervisor::{Outcome, PendingFork};
use crate::sandbox::{
    DesiredState, END, End, Phase, RECORD, Resources, Sandbox, SandboxRecord, Spec, child_name,
};
use crate::snapshot::registry::{Entry, SnapshotRegistry, SnapshotState};
use crate::snapshot::template::Template;
use crate::util::fs::make_private_dir;
use crate::util::task::blocking;

/// The folder, within the sandbox's folder, that holds the files of the next process.
pub(crate) const NEXT: &str = "next";
/// The end reason of a sandbox whose rollback failed.
const FAILED: &str = "rollback_failed";

/// What the supervisor of the new sandbox needs to replace the old one.
pub(crate) struct RollbackPlan {
    old: Arc<Sandbox>,
    supervisor: JoinHandle<()>,
    attached: Attached,
    template: Arc<Template>,
    host: Arc<Host>,
    envs: BTreeMap<String, String>,
    /// When the request arrived.
    arrived: Instant,
    /// The `exclusive` lock: no other rollback uses `next` until its files are moved.
    turn: OwnedMutexGuard<()>,
}

impl std::fmt::Debug for RollbackPlan {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("RollbackPlan").field("template", &self.template.id).finish_non_exhaustive()
    }
}

/// Rolls the sandbox `id` back to the snapshot `to`. Without `to` it uses the latest branch, or, if that is not usable,
/// the snapshot the sandbox was forked from. Returns when the sandbox runs.
pub(crate) async fn roll_back(
    registry: &Arc<Registry>,
    snapshots: &Arc<SnapshotRegistry>,
    id: &str,
    to: Option<&str>,
    who: &Principal,
) -> Result<Arc<Sandbox>> {
    let arrived = Instant::now();
    let (old, turn) = registry.exclusive_lock_of(id).await?;
    old.check_not_suspending()?;
    if matches!(old.phase(), Phase::Starting) {
        let text = format!("sandbox {id} is still starting; wait for its state to be `running`");
        return Err(Error::new(Code::SandboxStarting, text));
    }
    let template = target(snapshots, &old, to, who).await?;
    let (host, source, from) = (registry.host.clone(), old.clone(), template.clone());
    let prepared = blocking("preparing a rollback", move || prepare(&host, &source, &from));
    let (sandbox, attached) = prepared.await?;
    let (host, envs) = (registry.host.clone(), sandbox.record().map(|it| it.envs).unwrap_or_default());
    let tag = template.about.tag.clone();
    let new = registry.replace(&old, sandbox, &who.quota, |old, supervisor| RollbackPlan {
        old,
        supervisor,
        attached,
        template,
        host,
        envs,
        arrived,
        turn,
    })?;
    new.started().await?;
    tracing::info!(sandbox = id, tag, "sandbox rolled back");
    Ok(new)
}

/// The template to fork the new process from.
async fn target(
    snapshots: &Arc<SnapshotRegistry>,
    old: &Sandbox,
    to: Option<&str>,
    who: &Principal,
) -> Result<Arc<Template>> {
    if let Some(tag) = to {
        return snapshots.template_for(tag, who).await;
    }
    if let Some(tag) = old.runtime().saved.history.last_branch_tag
        && snapshots.get(&tag).is_ok_and(|entry| source(&entry).as_deref() == Some(&old.id))
    {
        match snapshots.template_for(&tag, who).await {
            Err(error) if error.code().is_not_found() || error.code().is_conflict() => {
                tracing::info!(sandbox = old.id, %error, "latest branch not usable for a rollback");
            }
            other => return other,
        }
    }
    let Some(tag) = &old.spec.snapshot_tag else {
        let how = match &old.spec.forked_from {
            Some(source) => format!("was forked from sandbox {source}"),
            None => "was booted".into(),
        };
        let text = format!(
            "sandbox {id} {how} and has no branch to roll back to: give a snapshot, or take a \
             branch of it first (`forkd branch {id}`)",
            id = old.id
        );
        return Err(Error::new(Code::NoRollbackTarget, text));
    };
    let entry = snapshots.usable(tag, who)?;
    if is_another(&entry, old) {
        let text = format!(
            "the snapshot {tag} that sandbox {} was forked from is gone, and {tag} is another snapshot now; \
             name {tag} in the request to roll back to that one",
            old.id
        );
        return Err(Error::new(Code::NoRollbackTarget, text));
    }
    snapshots.template_for(tag, who).await
}

/// Whether `entry` is another snapshot than the one `sandbox` was forked from, which had the same tag.
fn is_another(entry: &Entry, sandbox: &Sandbox) -> bool {
    let (template, created) = (sandbox.resources().template.clone(), sandbox.created_at_unix());
    // The template is the best evidence, unless an earlier rollback took it from a snapshot with another tag.
    let template = template.filter(|template| template.about.tag == entry.tag);
    match (entry.state(), template) {
        (SnapshotState::Ready(snapshot), Some(template)) => {
            template.snapshot().as_deref() != Some(snapshot.id())
        }
        (SnapshotState::Ready(snapshot), None) => snapshot.manifest().created_at_unix > created,
        (_, template) => entry.branch().is_some_and(|branch| match template {
            Some(template) => branch.template != template.id,
            None => branch.begun_at_unix > created,
        }),
    }
}

/// The sandbox that a branch was taken of. The tag alone does not tell: another snapshot may use it by now.
fn source(entry: &Entry) -> Option<String> {
    match entry.state() {
        SnapshotState::Ready(snapshot) => snapshot.manifest().branched_from.clone(),
        _ => entry.branch().map(|branch| branch.source.clone()),
    }
}

/// Prepares everything for the new process but its tap, without an effect on the old one. Blocks.
fn prepare(host: &Host, old: &Sandbox, template: &Arc<Template>) -> Result<(Sandbox, Attached)> {
    let next = old.folder.join(NEXT);
    clear(&next)
        .and_then(|()| make_private_dir(&next))
        .map_err(|error| Error::host(format!("cannot make {}", next.display()), error))?;
    let prepared = prepare_child(host, old, template, &next);
    if prepared.is_err() {
        let _ = clear(&next);
    }
    prepared
}

fn prepare_child(
    host: &Host,
    old: &Sandbox,
    template: &Arc<Template>,
    next: &Path,
) -> Result<(Sandbox, Attached)> {
    let (about, before, runtime) = (&template.about, old.record(), old.runtime());
    let generation = before.as_ref().map_or(0, |record| record.generation).saturating_add(1);
    let child = child_name(&old.id, generation);
    let limit = old.spec.memory_limit_mib;
    let limits = CgroupLimits::of_sandbox(about.guest.vcpus, limit);
    // The network slot stays with the old process as long as there is one.
    let equipped =
        Resources::allocate(host, template.lineage.clone(), Some(template.clone()), &child, false, &limits);
    let mut resources = equipped?;
    let attached = attach(&resources, &child, next, about.guest.image.is_none(), &host.config);
    let attached = attached.inspect_err(|_| resources.release(&child))?;
    let spec = Spec {
        owner: old.spec.owner.clone(),
        image: about.guest.image.as_ref().map(|image| image.name.clone()),
        snapshot_tag: match &old.spec.forked_from {
            Some(_) => None,
            None => old.spec.snapshot_tag.clone().or_else(|| Some(about.tag.clone())),
        },
        forked_from: old.spec.forked_from.clone(),
        vcpus: about.guest.vcpus,
        mem_mib: about.guest.mem_size_mib,
        network: about.guest.network && runtime.netns.is_some(),
        memory_limit_mib: limit,
        guest: Some(about.guest.clone()),
    };
    let mut saved = runtime.saved;
    saved.python = about.guest.python;
    saved.history.rolled_back_to = Some(about.tag.clone());
    saved.lifetime.auto_paused = false;
    saved.lifetime.frozen = false;
    saved.lifetime.suspending = None;
    let mut sandbox = Sandbox::new(old.id.clone(), spec, old.folder.clone(), resources, host);
    sandbox.created = old.created;
    sandbox.child = child;
    sandbox.update_runtime(|known| known.netns = runtime.netns);
    let record = SandboxRecord {
        template: template.id.clone(),
        generation,
        envs: before.map(|record| record.envs).unwrap_or_default(),
        ..SandboxRecord::new(&sandbox, about.lineage, &about.cgroup, saved)
    };
    record.write(next).map_err(|error| {
        sandbox.resources().release(&sandbox.id);
        Error::host("cannot write the record of a sandbox", error)
    })?;
    sandbox.recorded(record);
    Ok((sandbox, attached))
}

/// Removes a `next` folder that is not used.
pub(crate) fn clear(next: &Path) -> io::Result<()> {
    match std::fs::remove_dir_all(next) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

impl Sandbox {
    /// Ends the old process, takes over its network slot, and forks the new process.
    pub(crate) async fn complete_rollback(
        self: &Arc<Self>,
        plan: RollbackPlan,
        config: &Config,
    ) -> std::result::Result<Monitor, Outcome> {
        let tag = plan.template.about.tag.clone();
        // Before the old process ends: a daemon that starts after a crash finds the reason.
        let why = format!("the daemon was stopped while the sandbox was rolled back to {tag}");
        let end = End::new(FAILED, again(&why), String::new());
        if let Err(error) = self.write_if_not_deleted(|folder| end.write(folder)) {
            tracing::error!(sandbox = self.id, %error, "sandbox end not written before a rollback");
        }
        let started = match self.request_replacement(plan).await {
            Ok(pending) => self.finish_fork(pending, &config.timing).await,
            Err(error) => Err(Outcome::Ended(End::failed(FAILED, &error, String::new()))),
        };
        match started {
            Ok(monitor) => {
                // The new process is recorded, so the prepared end is void.
                let _ = std::fs::remove_file(self.folder.join(END));
                Ok(monitor)
            }
            Err(Outcome::Ended(end)) if !end.is_requested() => {
                let text = format!("it could not be rolled back to {tag}: {}", end.detail);
                Err(Outcome::Ended(End { reason: FAILED.into(), detail: again(&text), ..end }))
            }
            // The half-made process cannot be left to the next daemon; its folder with the end can.
            Err(_) if self.desired() == DesiredState::Leave => {
                Err(Outcome::Ended(End::new(FAILED, again(&why), String::new())))
            }
            Err(outcome) => Err(outcome),
        }
    }

    /// Ends the old process, takes over its network slot, moves the new files into place, and asks for the fork.
    async fn request_replacement(self: &Arc<Self>, plan: RollbackPlan) -> Result<PendingFork> {
        let RollbackPlan { old, supervisor, mut attached, template, host, envs, arrived, turn } = plan;
        old.set_desired(DesiredState::Replace);
        if let Err(error) = supervisor.await {
            tracing::error!(sandbox = old.id, %error, "sandbox supervisor failed");
        }
        let mut left = std::mem::take(&mut *old.resources());
        self.resources().slot = left.slot.take();
        let whose = old.id.clone();
        // The lineage is dropped last: from then on another lineage may get its user id.
        host.cleanup_queue.later(move || {
            left.release(&whose);
            drop(left);
        });
        let sandbox = self.clone();
        let pending = blocking("rolling back", move || {
            if sandbox.spec.network {
                attached.attach_tap(&mut sandbox.resources())?;
            }
            switch(&sandbox.folder)
                .map_err(|error| Error::host("cannot use the files of the new process", error))?;
            drop(turn);
            Ok((template.fork(attached.config, attached.fds), attached.control))
        });
        let (pending, control) = pending.await?;
        Ok(PendingFork { pending, control, arrived, envs })
    }
}

/// Moves the files of the next process over those of the old one. The record is moved last: until then the folder
/// describes the old sandbox without a process.
fn switch(folder: &Path) -> io::Result<()> {
    let next = folder.join(NEXT);
    let absent = |moved: io::Result<()>| match moved {
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(()),
        other => other,
    };
    absent(std::fs::remove_file(folder.join(process::RECORD)))?;
    let into = |name: &str| -> (PathBuf, PathBuf) { (next.join(name), folder.join(name)) };
    // A bare guest has no vsock socket.
    let (from, to) = into(boot_files::VSOCK);
    absent(std::fs::rename(from, to))?;
    for name in [control_socket::CONTROL, boot_files::CONSOLE, RECORD] {
        let (from, to) = into(name);
        std::fs::rename(from, to)?;
    }
    clear(&next)
}

fn again(text: &str) -> String {
    format!("{text}; roll it back again, or delete it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_files_of_the_next_process_take_the_place_of_the_last_ones() {
        let place = tempfile::tempdir().unwrap();
        let (folder, next) = (place.path(), place.path().join(NEXT));
        std::fs::create_dir(&next).unwrap();
        for name in [process::RECORD, control_socket::CONTROL, boot_files::CONSOLE, boot_files::VSOCK, RECORD]
        {
            std::fs::write(folder.join(name), "old").unwrap();
        }
        for name in [control_socket::CONTROL, boot_files::CONSOLE, RECORD] {
            std::fs::write(next.join(name), "new").unwrap();
        }
        switch(folder).unwrap();
        for name in [control_socket::CONTROL, boot_files::CONSOLE, RECORD] {
            assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), "new", "{name}");
        }
        assert!(!folder.join(process::RECORD).exists() && !next.exists());
        // Nothing to move: an error, and the record stays.
        assert!(switch(folder).is_err());
        assert!(folder.join(RECORD).exists());
        clear(&next).unwrap();
    }
}

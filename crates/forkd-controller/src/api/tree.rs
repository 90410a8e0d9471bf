//! The route of the fork tree.

use std::collections::{HashMap, HashSet};

use axum::extract::State;
use axum::{Extension, Json};
use forkd_api::Tree;

use super::ApiContext;
use crate::auth::principal::Principal;
use crate::sandbox::{Phase, Sandbox};
use crate::snapshot::branch_job::{BranchJob, Mode};
use crate::snapshot::registry::{Entry, SnapshotJob, SnapshotState};
use crate::snapshot::tree::{Named, SandboxFact, SnapshotFact, grow};

/// Shows the ancestry of the caller's snapshots and sandboxes. Removed objects that have descendants are included.
#[utoipa::path(get, path = "/v1/tree", responses((status = 200, body = Tree)))]
pub(super) async fn tree(State(app): State<ApiContext>, Extension(who): Extension<Principal>) -> Json<Tree> {
    let snapshots = app.snapshots.list();
    let snapshots = snapshots.iter().filter(|entry| who.may_use(&entry.owner()));
    let mut snapshots: Vec<SnapshotFact> = snapshots.map(|entry| snapshot(entry)).collect();
    let made = snapshots.iter().filter_map(|fact| Some((fact.name.tag.clone(), fact.created_at_unix?)));
    let made: HashMap<String, u64> = made.collect();
    let sandboxes = app.registry.list();
    let sandboxes = sandboxes.iter().filter(|it| who.owns(&it.spec.owner));
    let sandboxes: Vec<SandboxFact> = sandboxes.map(|it| sandbox(it, &made)).collect();
    // The caller knows the tags of the snapshots that it forked sandboxes from.
    let used = sandboxes.iter().flat_map(|it| it.spawned_from.iter().chain(&it.rolled_back_to));
    let used: HashSet<&str> = used.map(|named| named.tag.as_str()).collect();
    for fact in &mut snapshots {
        fact.hide(|tag| used.contains(tag) || app.snapshots.may_name(tag, &who));
    }
    Json(grow(snapshots, sandboxes))
}

fn snapshot(entry: &Entry) -> SnapshotFact {
    let fact = SnapshotFact {
        name: Named { tag: entry.tag.clone(), id: None },
        state: String::new(),
        created_at_unix: None,
        branched_from: None,
        diff: false,
        ancestors: Vec::new(),
    };
    let now = entry.state();
    let job = now.job();
    let state = match now {
        SnapshotState::Ready(snapshot) => {
            let manifest = snapshot.manifest();
            let named = |tag: &str, id: &str| Named { tag: tag.into(), id: Some(id.into()) };
            return SnapshotFact {
                name: named(&entry.tag, snapshot.id()),
                state: "ready".into(),
                created_at_unix: Some(manifest.created_at_unix),
                branched_from: manifest.branched_from.clone(),
                diff: manifest.measured.mode.as_deref() == Some(Mode::Diff.name()),
                ancestors: manifest.ancestors.iter().map(|it| named(&it.tag, &it.id)).collect(),
            };
        }
        SnapshotState::Creating(_)
        | SnapshotState::Branching(_)
        | SnapshotState::Saving(_)
        | SnapshotState::Left(_) => "writing",
        SnapshotState::Failed { .. } => "failed",
        SnapshotState::Unknown(_) => "unknown",
    };
    let fact = SnapshotFact { state: state.into(), ..fact };
    match job {
        Some(SnapshotJob::Branch(branch)) => branched(fact, &branch),
        Some(SnapshotJob::Create(job)) => SnapshotFact { created_at_unix: Some(job.begun_at_unix), ..fact },
        None => fact,
    }
}

/// A branch that is not on disk.
fn branched(fact: SnapshotFact, branch: &BranchJob) -> SnapshotFact {
    let origin = branch.origin.as_ref();
    SnapshotFact {
        created_at_unix: Some(branch.begun_at_unix),
        branched_from: Some(branch.source.clone()),
        diff: branch.mode == Mode::Diff,
        ancestors: origin
            .map(|it| Named { tag: it.tag.clone(), id: it.snapshot.clone() })
            .into_iter()
            .collect(),
        ..fact
    }
}

/// `made` maps each tag to the creation time of the snapshot or branch that has the tag now.
fn sandbox(sandbox: &Sandbox, made: &HashMap<String, u64>) -> SandboxFact {
    let state = match sandbox.phase() {
        Phase::Starting => "starting",
        Phase::Running => "running",
        Phase::Unresponsive => "unresponsive",
        Phase::Paused => "paused",
        Phase::Ended(_) => "ended",
        Phase::Unknown(_) => "unknown",
    };
    let created_at_unix = sandbox.created_at_unix();
    let template = sandbox.resources().template.clone();
    let named = |tag: String| {
        // The current template knows the snapshot; the template from before a rollback is gone.
        let known = template.as_ref().filter(|template| template.about.tag == tag);
        let id = known.and_then(|template| template.snapshot());
        Named { tag, id }
    };
    let spawned_from = |tag: String| {
        // A later snapshot may have the tag now. For a snapshot of a later rollback the time proves nothing.
        let later = made.get(&tag).is_some_and(|made| *made > created_at_unix);
        let named = named(tag);
        Named { id: named.id.or(later.then(|| "earlier".into())), ..named }
    };
    SandboxFact {
        id: sandbox.id.clone(),
        state: state.into(),
        created_at_unix,
        spawned_from: sandbox.spec.snapshot_tag.clone().map(spawned_from),
        forked_from: sandbox.spec.forked_from.clone(),
        rolled_back_to: sandbox.runtime().saved.history.rolled_back_to.map(named),
    }
}

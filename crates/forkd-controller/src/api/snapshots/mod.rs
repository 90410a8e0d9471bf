//! Routes of snapshots: create, show, list, delete, compact and unload.

pub(crate) mod view;

use std::path::PathBuf;

use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use axum::{Extension, Json};
use forkd_api::{
    CompactRequest, ErrorBody, LayerInfo, OwnerRequest, SnapshotInfo, SnapshotInfoDetail, SnapshotKind,
    SnapshotRequest,
};
use forkd_protocol::names::{NAME_RULE, is_valid_name};
use serde::Deserialize;

use crate::api::ApiContext;
use crate::api::extract::{Body, Id, Params};
use crate::api::pagination::Page;
use crate::api::snapshots::view::{Look, info};
use crate::auth::principal::{Principal, SHARED};
use crate::auth::quota::Claim;
use crate::error::{Error, Result};
use crate::host::allowed_paths;
use crate::sandbox::registry::{check, check_image};
use crate::snapshot::create::{From, SnapshotSpec};
use crate::snapshot::registry::Removal;
use crate::telemetry::audit::AuditTarget;
use crate::util::task::blocking;

/// Query parameters: whether to wait.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Wait {
    wait: Option<bool>,
}

/// Creates a snapshot and replies when it is ready. The work continues when the client disconnects.
#[utoipa::path(
    post, path = "/v1/snapshots", request_body = SnapshotRequest,
    params(("wait" = Option<bool>, Query, description = "`false`: reply at once")),
    responses(
        (status = 201, body = SnapshotInfo), (status = 202, body = SnapshotInfo, description = "It is being created"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody, description = "No such image"),
        (status = 409, body = ErrorBody, description = "The tag is taken"),
        (status = 429, body = ErrorBody, description = "The owner's quota of snapshots, sandboxes or memory is used up"),
        (status = 502, body = ErrorBody, description = "The guest failed; the error has the end of its console"),
    ),
)]
pub(crate) async fn create(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Params(params): Params<Wait>,
    Body(request): Body<SnapshotRequest>,
) -> Result<Response> {
    let order = order(&app, request)?;
    let (kernel, rootfs) = match &order.from {
        From::Image(_) => (None, None),
        From::Kernel(kernel) => (Some(kernel.clone()), None),
        From::Disk { kernel, rootfs } => (kernel.clone(), Some(rootfs.clone())),
    };
    let config = app.config.clone();
    blocking("looking for what to boot", move || {
        kernel.map(|kernel| allowed_paths::kernel(&config, &kernel)).transpose()?;
        rootfs.map(|rootfs| allowed_paths::disk(&config, &rootfs)).transpose()
    })
    .await?;
    // The guest of the new snapshot counts as a sandbox while it runs.
    let claim = Claim { owner: who.owner.clone(), mem_mib: order.mem_mib };
    let (reservations, _) = app.registry.reserve(1, &claim, &who.quota)?;
    let entry = app.snapshots.create(order, &who, reservations)?;
    let target = Extension(AuditTarget(entry.tag.clone()));
    if params.wait == Some(false) {
        return Ok((StatusCode::ACCEPTED, target, info(&app, &who, entry).await?).into_response());
    }
    entry.wait_done().await?;
    Ok((StatusCode::CREATED, target, info(&app, &who, entry).await?).into_response())
}

fn order(app: &ApiContext, request: SnapshotRequest) -> Result<SnapshotSpec> {
    let mem_mib = request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib);
    let vcpus = request.vcpus.unwrap_or(1);
    check(&app.config.limits, vcpus, mem_mib)?;
    if request.boot_wait_secs.is_some_and(|secs| secs > MAX_BOOT_WAIT_SECS) {
        return Err(Error::invalid(format!("boot_wait_secs can be at most {MAX_BOOT_WAIT_SECS}")));
    }
    let from = match (request.image, request.kernel, request.rootfs) {
        (Some(image), None, None) => {
            check_image(&image)?;
            From::Image(image)
        }
        (None, kernel, Some(rootfs)) => From::Disk {
            kernel: kernel.map(|kernel| absolute("kernel", kernel)).transpose()?,
            rootfs: absolute("rootfs", rootfs)?,
        },
        (None, Some(kernel), None) => {
            if !request.warm_command.is_empty() || request.warm_python.is_some() {
                return Err(Error::invalid(
                    "a bare kernel has no agent that could warm it up; leave out warm_command and warm_python",
                ));
            }
            From::Kernel(absolute("kernel", kernel)?)
        }
        _ => {
            return Err(Error::invalid(
                "give either `image`, or `rootfs` with an optional `kernel`, or `kernel` alone",
            ));
        }
    };
    Ok(SnapshotSpec {
        tag: request.tag,
        from,
        vcpus,
        mem_mib,
        network: request.network.unwrap_or(true),
        warm_command: request.warm_command,
        warm_python: request.warm_python,
    })
}

/// The longest boot wait that a client of the reference may ask for.
const MAX_BOOT_WAIT_SECS: u64 = 60;

/// Checks a path of a request: it must be absolute, since a relative path would have no base folder.
fn absolute(what: &str, path: String) -> Result<PathBuf> {
    let is_plain = !path.contains(|c: char| c.is_control()) && path.split('/').all(|part| part != "..");
    let path = PathBuf::from(path);
    match path.is_absolute() && is_plain {
        true => Ok(path),
        false => Err(Error::invalid(format!("the {what}\'s path must be absolute, without `..`"))),
    }
}

/// Lists the snapshots that the caller may use, by tag.
#[utoipa::path(
    get, path = "/v1/snapshots",
    params(
        ("limit" = Option<u64>, Query, description = "The most entries, 1 to 1000; all when absent"),
        ("cursor" = Option<String>, Query, description = "`X-Next-Cursor` of the previous page"),
    ),
    responses((status = 200, body = Vec<SnapshotInfo>), (status = 400, body = ErrorBody)),
)]
pub(crate) async fn list(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    page: Page,
) -> Result<Response> {
    let mut all = app.snapshots.list();
    all.retain(|entry| who.may_use(&entry.owner()));
    blocking("looking at snapshots", move || {
        let look = Look::new(&app, &who);
        Ok(page.answer(all, |entry| entry.tag.clone(), |entry| look.at(entry)))
    })
    .await
}

/// Shows one snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{tag}", params(("tag" = String, Path)),
    responses((status = 200, body = SnapshotInfo), (status = 404, body = ErrorBody)),
)]
pub(crate) async fn get(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(tag): Id,
) -> Result<Json<SnapshotInfo>> {
    let entry = app.snapshots.get(&tag)?;
    info(&app, &who, entry).await
}

/// Query parameters: what else to remove, or to keep.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct With {
    #[serde(default)]
    cascade: bool,
    #[serde(default)]
    force: bool,
}

/// Deletes a snapshot, or cancels its creation. Sandboxes that were forked from it keep running.
#[utoipa::path(
    delete, path = "/v1/snapshots/{tag}",
    params(
        ("tag" = String, Path),
        ("cascade" = Option<bool>, Query, description = "Also delete the snapshots built on it"),
        ("force" = Option<bool>, Query, description = "Delete only the tag; layers that other snapshots need stay"),
    ),
    responses(
        (status = 204), (status = 400, body = ErrorBody), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "Other snapshots are built on it, or a workspace needs it; the error has their names"),
    ),
)]
pub(crate) async fn delete(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(tag): Id,
    Params(with): Params<With>,
) -> Result<StatusCode> {
    let how = match (with.cascade, with.force) {
        (false, false) => Removal::Plain,
        (true, false) => Removal::Cascade,
        (false, true) => Removal::Force,
        (true, true) => return Err(Error::invalid("give either `cascade` or `force`")),
    };
    app.workspaces.remove_snapshot_for(&tag, how, &who).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Shows a snapshot on disk in detail: its ancestors, its dependents and its layers.
#[utoipa::path(
    get, path = "/v1/snapshots/{tag}/info", params(("tag" = String, Path)),
    responses(
        (status = 200, body = SnapshotInfoDetail), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It is not on disk, or is damaged"),
    ),
)]
pub(crate) async fn detail(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(tag): Id,
) -> Result<Json<SnapshotInfoDetail>> {
    let snapshot = app.snapshots.usable(&tag, &who)?.snapshot()?;
    let mut dependents = app.snapshots.dependents(&tag).await?;
    dependents.retain(|tag| app.snapshots.may_name(tag, &who));
    let store = app.snapshots.store.clone();
    let users = blocking("counting layers", move || Ok(store.layer_users()?)).await?;
    let (manifest, sizes) = (snapshot.manifest(), snapshot.sizes());
    let layers = snapshot.layers().iter().map(|layer| LayerInfo {
        kind: match layer.kind {
            forkd_store::Kind::Memory => "memory".into(),
            forkd_store::Kind::Disk => "disk".into(),
        },
        digest: layer.digest.clone(),
        logical_bytes: layer.size.logical,
        physical_bytes: layer.size.physical,
        shared_by: users.get(&layer.digest).copied().unwrap_or(0),
    });
    // Only ancestors whose layers it uses. A full snapshot also has ancestors, but needs none of them.
    let before = manifest.ancestors.len().saturating_sub(snapshot.depth());
    let chain = manifest.ancestors.get(before..).unwrap_or_default();
    let mut ancestors: Vec<String> = chain.iter().map(|ancestor| ancestor.tag.clone()).collect();
    ancestors.retain(|tag| app.snapshots.may_name(tag, &who));
    let parent_tag = manifest.parent.as_ref().map(|parent| parent.tag.clone());
    Ok(Json(SnapshotInfoDetail {
        tag,
        dir: snapshot.folder().display().to_string(),
        created_at_unix: manifest.created_at_unix,
        made_by_version: manifest.made_by_version.clone(),
        kind: if snapshot.is_disk_only() { SnapshotKind::Disk } else { SnapshotKind::Full },
        memory_logical_bytes: if snapshot.is_disk_only() { 0 } else { manifest.guest.mem_size_mib << 20 },
        memory_physical_bytes: sizes.memory.physical,
        vmstate_bytes: sizes.state.logical,
        disk_logical_bytes: sizes.disks.logical,
        disk_physical_bytes: sizes.disks.physical,
        own_memory_bytes: sizes.own_memory.physical,
        own_disk_bytes: sizes.own_disks.physical,
        parent_tag: parent_tag.filter(|tag| app.snapshots.may_name(tag, &who)),
        parent_content_hash: manifest.parent.as_ref().map(|parent| parent.id.clone()),
        chain_depth: snapshot.depth(),
        dependents,
        ancestors,
        layers: layers.collect(),
    }))
}

/// Compacts a snapshot into a new one without ancestors: one memory layer, one layer per disk.
#[utoipa::path(
    post, path = "/v1/snapshots/{tag}/compact", params(("tag" = String, Path)),
    request_body = CompactRequest,
    responses(
        (status = 200, body = SnapshotInfo), (status = 400, body = ErrorBody),
        (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "The new tag is taken, or the old snapshot is not ready"),
        (status = 429, body = ErrorBody, description = "The owner's quota of snapshots is used up"),
    ),
)]
pub(crate) async fn compact(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(tag): Id,
    Body(request): Body<CompactRequest>,
) -> Result<Json<SnapshotInfo>> {
    let entry = app.snapshots.compact(&tag, &request.to, &who).await?;
    info(&app, &who, entry).await
}

/// Changes a snapshot's owner. With `*`, all owners may use it, and only admins may change it.
#[utoipa::path(
    post, path = "/v1/snapshots/{tag}/owner", params(("tag" = String, Path)), request_body = OwnerRequest,
    responses(
        (status = 200, body = SnapshotInfo), (status = 400, body = ErrorBody),
        (status = 403, body = ErrorBody, description = "Needs an admin"), (status = 404, body = ErrorBody),
    ),
)]
pub(crate) async fn give(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(tag): Id,
    Body(request): Body<OwnerRequest>,
) -> Result<Json<SnapshotInfo>> {
    if request.owner != SHARED && !is_valid_name(&request.owner) {
        return Err(Error::invalid(format!("an owner must be `*`, for all owners, or {NAME_RULE}")));
    }
    let entry = app.snapshots.give(&tag, &request.owner).await?;
    info(&app, &who, entry).await
}

/// Ends a snapshot's template, once its children have ended. The next children get a new template, loaded from disk.
#[utoipa::path(
    post, path = "/v1/snapshots/{tag}/unload", params(("tag" = String, Path)),
    responses(
        (status = 204), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It is not ready"),
    ),
)]
pub(crate) async fn unload(State(app): State<ApiContext>, Id(tag): Id) -> Result<StatusCode> {
    app.snapshots.unload(&tag)?;
    Ok(StatusCode::NO_CONTENT)
}

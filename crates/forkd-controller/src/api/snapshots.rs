//! Making, showing and deleting snapshots.

use std::path::PathBuf;

use axum::Json;
use axum::extract::State;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::Deserialize;

use super::App;
use super::extract::{Body, Id, Params};
use super::types::{SnapshotInfo, SnapshotPhase, SnapshotRequest, SnapshotStatus, TemplateInfo};
use crate::error::{Error, ErrorBody, Result};
use crate::making::{From, Order, Phase};
use crate::registry::{check, check_image};
use crate::snapshots::{Entry, Making, State as Standing};
use crate::template::Source;

/// Whether to wait.
#[derive(Debug, Default, Deserialize)]
pub(super) struct Wait {
    wait: Option<bool>,
}

/// Makes a snapshot and answers when it is ready. The work goes on when the client goes away.
#[utoipa::path(
    post, path = "/v1/snapshots", request_body = SnapshotRequest,
    params(("wait" = Option<bool>, Query, description = "`false`: answer at once")),
    responses(
        (status = 201, body = SnapshotInfo), (status = 202, body = SnapshotInfo, description = "It is being made"),
        (status = 400, body = ErrorBody), (status = 404, body = ErrorBody, description = "No such image"),
        (status = 409, body = ErrorBody, description = "The tag exists, or is being made"),
        (status = 502, body = ErrorBody, description = "The guest failed; the end of its console is told"),
    ),
)]
pub(super) async fn create(
    State(app): State<App>,
    Params(params): Params<Wait>,
    Body(request): Body<SnapshotRequest>,
) -> Result<Response> {
    let order = order(&app, request)?;
    let (entry, making) = app.snapshots.make(order)?;
    if params.wait == Some(false) {
        return Ok((StatusCode::ACCEPTED, Json(info(&app, &entry))).into_response());
    }
    app.snapshots.made(&entry, &making).await?;
    Ok((StatusCode::CREATED, Json(info(&app, &entry))).into_response())
}

fn order(app: &App, request: SnapshotRequest) -> Result<Order> {
    let mem_mib = request.mem_size_mib.unwrap_or(app.config.limits.default_mem_mib);
    let vcpus = request.vcpus.unwrap_or(1);
    check(&app.config.limits, vcpus, mem_mib)?;
    let from = match (request.image, request.kernel) {
        (Some(image), None) => {
            check_image(&image)?;
            From::Image(image)
        }
        (None, Some(kernel)) => {
            if !request.warm_command.is_empty() || request.warm_python.is_some() {
                return Err(Error::invalid("a bare kernel has no agent that could warm it up"));
            }
            let kernel = PathBuf::from(kernel);
            if !kernel.is_absolute() {
                return Err(Error::invalid("the kernel\'s path must be absolute"));
            }
            From::Kernel(kernel)
        }
        _ => return Err(Error::invalid("give either `image` or `kernel`")),
    };
    Ok(Order {
        tag: request.tag,
        from,
        vcpus,
        mem_mib,
        network: request.network.unwrap_or(true),
        warm_command: request.warm_command,
        warm_python: request.warm_python,
    })
}

/// All snapshots, by tag.
#[utoipa::path(get, path = "/v1/snapshots", responses((status = 200, body = Vec<SnapshotInfo>)))]
pub(super) async fn list(State(app): State<App>) -> Json<Vec<SnapshotInfo>> {
    Json(app.snapshots.list().iter().map(|entry| info(&app, entry)).collect())
}

/// One snapshot.
#[utoipa::path(
    get, path = "/v1/snapshots/{tag}", params(("tag" = String, Path)),
    responses((status = 200, body = SnapshotInfo), (status = 404, body = ErrorBody)),
)]
pub(super) async fn get(State(app): State<App>, Id(tag): Id) -> Result<Json<SnapshotInfo>> {
    let entry = app.snapshots.get(&tag)?;
    Ok(Json(info(&app, &entry)))
}

/// Deletes a snapshot, or stops making it. Sandboxes that were forked from it go on.
#[utoipa::path(
    delete, path = "/v1/snapshots/{tag}", params(("tag" = String, Path)),
    responses((status = 204), (status = 404, body = ErrorBody)),
)]
pub(super) async fn delete(State(app): State<App>, Id(tag): Id) -> Result<StatusCode> {
    app.snapshots.remove(&tag).await?;
    Ok(StatusCode::NO_CONTENT)
}

/// Ends the process children are forked from, once its children are gone; the next ones get a new
/// process, started from disk.
#[utoipa::path(
    post, path = "/v1/snapshots/{tag}/unload", params(("tag" = String, Path)),
    responses(
        (status = 204), (status = 404, body = ErrorBody),
        (status = 409, body = ErrorBody, description = "It is not ready"),
    ),
)]
pub(super) async fn unload(State(app): State<App>, Id(tag): Id) -> Result<StatusCode> {
    app.snapshots.unload(&tag)?;
    Ok(StatusCode::NO_CONTENT)
}

fn info(app: &App, entry: &Entry) -> SnapshotInfo {
    let mut info = match entry.state() {
        Standing::Ready(snapshot) => {
            let (manifest, sizes) = (snapshot.manifest(), snapshot.sizes());
            let facts = &manifest.facts;
            SnapshotInfo {
                created_at_unix: manifest.created_at_unix,
                image: facts.image.as_ref().map(|image| image.name.clone()),
                kernel: facts.kernel.clone(),
                vcpus: facts.vcpus,
                mem_size_mib: facts.mem_size_mib,
                network: facts.network,
                python: facts.python,
                memory_bytes: sizes.memory,
                disk_bytes: sizes.disks,
                state_bytes: sizes.state,
                bootable: true,
                ..blank(&entry.tag, SnapshotStatus::Ready)
            }
        }
        Standing::Writing(making) => {
            let phase = match *making.phase.borrow() {
                Phase::Booting => SnapshotPhase::Booting,
                Phase::Warming => SnapshotPhase::Warming,
                Phase::Freezing => SnapshotPhase::Freezing,
                Phase::Saving => SnapshotPhase::Saving,
            };
            SnapshotInfo { phase: Some(phase), ..planned(&making, SnapshotStatus::Writing) }
        }
        Standing::Failed { error, making } => {
            let status = SnapshotStatus::Failed;
            let known = match making {
                Some(making) => planned(&making, status),
                None => blank(&entry.tag, status),
            };
            SnapshotInfo { error: Some(error.message), ..known }
        }
    };
    info.dir = app.snapshots.store.folder().join(&entry.tag).display().to_string();
    info.template = entry.current().map(|template| TemplateInfo {
        pid: template.pid,
        source: match template.about.source {
            Source::Disk => "disk".into(),
            Source::Memory => "memory".into(),
        },
        children: app.registry.children_of(&template.id),
    });
    info
}

/// What was asked for.
fn planned(making: &Making, status: SnapshotStatus) -> SnapshotInfo {
    let order = &making.order;
    let (image, kernel) = match &order.from {
        From::Image(image) => (Some(image.clone()), None),
        From::Kernel(kernel) => (None, Some(kernel.display().to_string())),
    };
    SnapshotInfo {
        created_at_unix: making.begun_at_unix,
        image,
        kernel,
        vcpus: order.vcpus,
        mem_size_mib: order.mem_mib,
        network: order.network,
        ..blank(&order.tag, status)
    }
}

fn blank(tag: &str, status: SnapshotStatus) -> SnapshotInfo {
    SnapshotInfo {
        tag: tag.to_owned(),
        status,
        phase: None,
        error: None,
        created_at_unix: 0,
        image: None,
        kernel: None,
        vcpus: 0,
        mem_size_mib: 0,
        network: false,
        python: None,
        memory_bytes: 0,
        disk_bytes: 0,
        state_bytes: 0,
        bootable: false,
        warning: None,
        dir: String::new(),
        template: None,
    }
}

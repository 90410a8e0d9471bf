//! `forkd template`: snapshots that programs create sandboxes from by name, over the E2B API.

use anyhow::{Result, bail};
use hyper::Method;
use serde::Serialize;
use serde_json::{Value, json};

use super::snapshot::{self, CreateResult};
use super::{Context, runtime};
use forkd_api::{Code, SnapshotStatus};

use crate::args::TemplatePrepareArgs;
use crate::client::types::{self, Snapshot};
use crate::client::{Daemon, Refused, discover};
use crate::images::{self, Freshness};
use crate::ui;

/// Memory of a guest, and of one that has the code interpreter with its libraries.
const MEMORY_MIB: u64 = 512;
const INTERPRETER_MEMORY_MIB: u64 = 1024;
/// The interval of requests for the state of a snapshot that another client makes.
const POLL_INTERVAL: std::time::Duration = std::time::Duration::from_millis(200);

/// What was done for one template.
#[derive(Debug, Serialize)]
struct Prepared {
    name: String,
    /// Whether the image was built; absent with a daemon that has its own images.
    #[serde(skip_serializing_if = "Option::is_none")]
    image_built: Option<bool>,
    /// Whether the snapshot was created; false if there was one.
    created: bool,
    /// The daemon's description.
    snapshot: Value,
}

/// Builds the images and makes the snapshots that are missing.
pub(crate) fn prepare(context: &Context, args: &TemplatePrepareArgs) -> Result<u8> {
    let daemon_args = &args.answer.daemon;
    let mut built = Vec::new();
    for name in &args.names {
        built.push(match daemon_args.daemon_url {
            Some(_) => None,
            None => Some(ensure_image(context, name, args.force)?),
        });
    }
    let runtime = runtime()?;
    let result = runtime.block_on(async {
        let daemon = discover::ensure(&context.data, daemon_args, context.ui).await?;
        let mut prepared = Vec::new();
        for (name, image_built) in args.names.iter().zip(built) {
            // A snapshot of an image that was replaced cannot be forked.
            let renew = args.force || image_built == Some(true);
            match ensure_snapshot(context, &daemon, name, renew).await? {
                Outcome::Kept(snapshot) => {
                    context.ui.note(format!("template {name} is ready"));
                    prepared.push(Prepared { name: name.clone(), image_built, created: false, snapshot });
                }
                Outcome::Created(snapshot) => {
                    prepared.push(Prepared { name: name.clone(), image_built, created: true, snapshot });
                }
                Outcome::Cancelled(status) => return Ok(status),
            }
        }
        if args.answer.json {
            ui::print_json(&prepared)?;
        } else {
            ui::print(&args.names.join("\n"))?;
        }
        Ok(0)
    });
    // A thread may still look up an address or read a file; it ends with the process.
    runtime.shutdown_background();
    result
}

/// Builds the image if it is missing, or with `force` if forkd now builds another one. Returns whether it did.
fn ensure_image(context: &Context, name: &str, force: bool) -> Result<bool> {
    let built = match images::freshness(&context.data, name) {
        Freshness::Current => false,
        Freshness::Other if force => {
            images::rebuild(&context.data, name, context.ui)?;
            true
        }
        Freshness::Other => {
            context.ui.warn(format!(
                "the image {name} is not the one that this version of forkd builds; `forkd template prepare {name} \
                 --force` replaces it"
            ));
            false
        }
        Freshness::Missing => {
            images::ensure_image(&context.data, name, context.ui)?;
            true
        }
    };
    images::ensure_guest_kernel(&context.data, context.ui)?;
    Ok(built)
}

/// The result for one snapshot.
enum Outcome {
    Kept(Value),
    Created(Value),
    /// By a signal; the exit status.
    Cancelled(u8),
}

/// The snapshot of that name, or a new one.
async fn ensure_snapshot(context: &Context, daemon: &Daemon, name: &str, renew: bool) -> Result<Outcome> {
    let path = types::snapshot_path(name);
    loop {
        let answer = match daemon.ask(Method::GET, &path, None).await {
            Ok(answer) => answer,
            Err(error) if Refused::is(&error, Code::SnapshotNotFound) => break,
            Err(error) => return Err(error),
        };
        let snapshot: Snapshot = types::read(&answer)?;
        match snapshot.status {
            SnapshotStatus::Ready if !renew && (snapshot.bootable || snapshot.warning.is_none()) => {
                return Ok(Outcome::Kept(answer));
            }
            SnapshotStatus::Ready | SnapshotStatus::Failed => {
                daemon.ask(Method::DELETE, &path, None).await?;
                break;
            }
            SnapshotStatus::Writing => tokio::time::sleep(POLL_INTERVAL).await,
            SnapshotStatus::Unknown => {
                let why = snapshot.error.unwrap_or_default();
                bail!("snapshot {name} is in state unknown: {why}; remove it with `forkd rmi {name}`");
            }
        }
    }
    match snapshot::make(daemon, name, &request(name), context.ui).await? {
        CreateResult::Ready(answer) => Ok(Outcome::Created(answer)),
        CreateResult::Cancelled(caught) => Ok(Outcome::Cancelled(caught.status())),
    }
}

/// The request for the snapshot. The image itself has its warm-up.
fn request(name: &str) -> Value {
    let memory = if name.starts_with("code-interpreter") { INTERPRETER_MEMORY_MIB } else { MEMORY_MIB };
    json!({ "tag": name, "image": name, "mem_size_mib": memory })
}

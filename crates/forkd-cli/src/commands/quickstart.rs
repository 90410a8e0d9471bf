//! `forkd quickstart`: from an empty host to the first children, with a message for each step.

use std::io::{BufRead, IsTerminal, Write};

use anyhow::{Result, bail};
use hyper::Method;
use serde_json::{Value, json};

use super::fork::{self, Times};
use super::snapshot::{self, CreateResult};
use super::{Context, prepare_image, runtime, with_daemon};
use forkd_api::{Code, SnapshotStatus};

use crate::args::QuickstartArgs;
use crate::client::types::{self, Snapshot, Spawned};
use crate::client::{Daemon, Refused};
use crate::doctor;
use crate::host::clock;
use crate::images;
use crate::ui;

/// Runs all steps.
pub(crate) fn quickstart(context: &Context, args: &QuickstartArgs) -> Result<u8> {
    let daemon_args = &args.answer.daemon;
    // A daemon on another host does not depend on this one.
    if daemon_args.daemon_url.is_none() && !passes(context, args)? {
        return Ok(1);
    }
    if !args.yes && !agreed(context, args)? {
        bail!("nothing was done");
    }
    prepare_image(context, daemon_args, &args.image)?;
    with_daemon(context, daemon_args, async |daemon| {
        let tag = tag(&args.image);
        let Some(snapshot) = ensure_snapshot(context, &daemon, &tag, &args.image).await? else {
            return Ok(130);
        };
        let asked = clock::now_ms();
        let body = json!({ "snapshot_tag": tag, "n": args.count });
        let answer = fork::spawn_children(&daemon, &body, context.ui).await?;
        let spawned: Spawned = types::read(&answer)?;
        let times = Times::of(asked, &spawned.children);
        if args.answer.json {
            let mut told = fork::with_times(answer, &times);
            told["snapshot"] = snapshot;
            ui::print_json(&told)?;
        } else {
            ui::print(&fork::render(&spawned, args.count, &times))?;
            fork::warn_failed_children(&spawned.errors, context.ui);
            next_steps(context, &tag, &spawned);
        }
        Ok(u8::from(!spawned.errors.is_empty()))
    })
}

/// Whether this host has everything essential; prints what is missing.
fn passes(context: &Context, args: &QuickstartArgs) -> Result<bool> {
    let report = runtime()?.block_on(doctor::examine(&context.data, &args.answer.daemon, context.ui));
    for check in report.gates() {
        let fix = check.fix.as_deref().unwrap_or("see `forkd doctor`");
        context.ui.warn(format!("{}: {}; fix: {fix}", check.name, check.detail));
    }
    if report.usable() && report.will_use == doctor::Runs::Machine {
        context
            .ui
            .note("KVM does not run Linux here: sandboxes run in the emulated machine, many times slower");
    }
    Ok(report.usable())
}

/// Prints the plan and asks for confirmation.
fn agreed(context: &Context, args: &QuickstartArgs) -> Result<bool> {
    let images = images::list(&context.data).unwrap_or_default();
    let built = images.iter().any(|image| image.name == args.image && image.problem.is_none());
    let image = if built { "use" } else { "build (some minutes, downloads packages)" };
    let plan = format!(
        "forkd will\n  - {image} the image {}\n  - warm it and save it as the snapshot {}, unless that exists\n  - fork {} \
         from it, which run until you kill them",
        args.image,
        tag(&args.image),
        ui::count(args.count.into(), "child", "children"),
    );
    if !std::io::stdin().is_terminal() {
        bail!("{plan}\nstandard input is not a terminal, so forkd cannot ask: give --yes to continue");
    }
    let mut errors = std::io::stderr().lock();
    write!(errors, "{plan}\nContinue? [y/N] ")?;
    errors.flush()?;
    let mut answer = String::new();
    std::io::stdin().lock().read_line(&mut answer)?;
    Ok(matches!(answer.trim().to_ascii_lowercase().as_str(), "y" | "yes"))
}

fn tag(image: &str) -> String {
    if image == "python" { "quickstart".to_owned() } else { format!("quickstart-{image}") }
}

/// The existing snapshot, or a new one; `None` if ^C cancelled it.
async fn ensure_snapshot(
    context: &Context,
    daemon: &Daemon,
    tag: &str,
    image: &str,
) -> Result<Option<Value>> {
    match daemon.ask(Method::GET, &types::snapshot_path(tag), None).await {
        Ok(answer) => {
            let snapshot: Snapshot = types::read(&answer)?;
            match snapshot.status {
                SnapshotStatus::Ready => {
                    context.ui.note(format!("using the existing snapshot {tag}"));
                    return Ok(Some(answer));
                }
                SnapshotStatus::Writing => {
                    bail!("snapshot {tag} is being created; try again when it is ready")
                }
                SnapshotStatus::Unknown => {
                    let why = snapshot.error.unwrap_or_default();
                    bail!("snapshot {tag} is in state unknown: {why}");
                }
                SnapshotStatus::Failed => {
                    daemon.ask(Method::DELETE, &types::snapshot_path(tag), None).await?;
                }
            }
        }
        Err(error) if Refused::is(&error, Code::SnapshotNotFound) => {}
        Err(error) => return Err(error),
    }
    match snapshot::make(daemon, tag, &json!({ "tag": tag, "image": image }), context.ui).await? {
        CreateResult::Ready(answer) => Ok(Some(answer)),
        CreateResult::Cancelled(_) => Ok(None),
    }
}

fn next_steps(context: &Context, tag: &str, spawned: &Spawned) {
    let id = spawned.children.first().map_or("ID", |child| child.id.as_str());
    context.ui.note(format!(
        "the children run. Next:\n  forkd exec {id} -- uname -a\n  forkd eval {id} -- 'import os; os.getpid()'\n  forkd branch \
         {id} --tag mine\n  forkd tree\n  forkd kill --tag {tag}"
    ));
}

//! `forkd bench` without a subcommand: the time of each usual operation of the running daemon. Leaves nothing
//! behind, however it ends.

use std::time::Instant;

use anyhow::{Context as _, Result};
use forkd_api::{Code, SnapshotStatus};
use hyper::Method;
use serde::Serialize;
use serde_json::{Value, json};

use crate::args::QuickBenchArgs;
use crate::client::Daemon;
use crate::client::types::{self, Sandbox, Snapshot, Spawned};
use crate::commands::{Context, sandboxes, with_daemon};
use crate::host::files;
use crate::stream::signals::Forwarded;
use crate::ui;

/// If this process is killed, the daemon ends its children after this many seconds.
const LIFE_SECS: u64 = 600;

/// One step.
#[derive(Debug, Serialize)]
struct Step {
    name: &'static str,
    /// Its time, measured by this process; absent if it failed.
    ms: Option<f64>,
    /// Further results as text.
    detail: String,
}

/// Objects to remove at the end.
#[derive(Debug, Default)]
struct CreatedObjects {
    children: Vec<String>,
    branch: Option<String>,
}

pub(super) fn quick(context: &Context, args: &QuickBenchArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let tag = snapshot(&daemon, args.tag.as_deref()).await?;
        let (mut steps, mut made) = (Vec::new(), CreatedObjects::default());
        let begun = Instant::now();
        let mut signals = Forwarded::listen()?;
        let (measured, caught) = tokio::select! {
            measured = measure(&daemon, &tag, args.count, &mut steps, &mut made) => (measured, None),
            caught = signals.next() => (Ok(()), Some(caught)),
        };
        let cleaned = Instant::now();
        let left = clean(&daemon, &made).await;
        steps.push(Step { name: "cleanup", ms: Some(ms(cleaned)), detail: String::new() });
        for problem in left {
            context.ui.warn(problem);
        }
        if let Some(caught) = caught {
            return Ok(caught.status());
        }
        measured?;
        let total = ms(begun);
        if args.json {
            ui::print_json(&json!({ "tag": tag, "n": args.count, "steps": steps, "total_ms": total }))?;
        } else {
            ui::print(&render(&steps, total))?;
        }
        Ok(0)
    })
}

/// The named snapshot, or the first that is ready.
async fn snapshot(daemon: &Daemon, wanted: Option<&str>) -> Result<String> {
    if let Some(tag) = wanted {
        return Ok(tag.to_owned());
    }
    let snapshots: Vec<Snapshot> = types::get(daemon, "/v1/snapshots").await?;
    let ready = snapshots.into_iter().find(|one| one.status == SnapshotStatus::Ready);
    Ok(ready.context("there is no snapshot to fork: create one with `forkd quickstart`")?.tag)
}

async fn measure(
    daemon: &Daemon,
    tag: &str,
    count: u16,
    steps: &mut Vec<Step>,
    made: &mut CreatedObjects,
) -> Result<()> {
    let (first, took) = spawn(daemon, tag, 1, made).await?;
    let id = first.first().context("the daemon's reply has no child")?.id.clone();
    steps.push(Step { name: "spawn", ms: Some(took), detail: "1 child, until it answers".into() });

    let begun = Instant::now();
    let path = format!("{}/exec", types::sandbox_path(&id));
    let ran = daemon.ask(Method::POST, &path, Some(&json!({ "args": ["true"] }))).await;
    let (took, detail) = match ran {
        Ok(_) => (Some(ms(begun)), "a command and its answer".to_owned()),
        // A bare guest has no agent to run a command.
        Err(error) => (None, format!("not possible: {error:#}")),
    };
    steps.push(Step { name: "exec", ms: took, detail });

    let begun = Instant::now();
    let branch = format!("bench-{}", files::random_hex(4)?);
    let body = json!({ "tag": branch, "mode": "diff" });
    made.branch = Some(branch.clone());
    let path = format!("{}/branch", types::sandbox_path(&id));
    let answer: Snapshot = types::read(&daemon.ask(Method::POST, &path, Some(&body)).await?)?;
    let pause = answer.pause_ms.map_or_else(|| "-".to_owned(), ui::milliseconds);
    let written = ui::bytes(answer.bytes_written.unwrap_or(0));
    let detail = format!("paused for {pause}; {written} written");
    steps.push(Step { name: "branch", ms: Some(ms(begun)), detail });

    let (_, took) = spawn(daemon, &branch, count, made).await?;
    let each = ui::milliseconds(took / f64::from(count));
    let detail = format!("{} of the branch, {each} each", ui::count(count.into(), "child", "children"));
    steps.push(Step { name: "fanout", ms: Some(took), detail });
    Ok(())
}

async fn spawn(
    daemon: &Daemon,
    tag: &str,
    count: u16,
    made: &mut CreatedObjects,
) -> Result<(Vec<Sandbox>, f64)> {
    let body = json!({ "snapshot_tag": tag, "n": count, "timeout_secs": LIFE_SECS });
    let begun = Instant::now();
    let answer: Value = daemon.ask(Method::POST, "/v1/sandboxes?results=each", Some(&body)).await?;
    let took = ms(begun);
    let spawned: Spawned = types::read(&answer)?;
    made.children.extend(spawned.children.iter().map(|child| child.id.clone()));
    if let Some(first) = spawned.errors.first() {
        anyhow::bail!("child {} of {tag} did not start: {}", first.index, first.error);
    }
    Ok((spawned.children, took))
}

/// Removes everything; returns the errors.
async fn clean(daemon: &Daemon, made: &CreatedObjects) -> Vec<String> {
    let mut left = sandboxes::kill_all(daemon, &made.children).await;
    if let Some(tag) = &made.branch {
        let removed = daemon.ask(Method::DELETE, &types::snapshot_path(tag), None).await;
        match removed {
            Err(error) if !crate::client::Refused::is(&error, Code::SnapshotNotFound) => {
                left.push(format!("{tag}: {error:#}"))
            }
            _ => {}
        }
    }
    left
}

fn ms(begun: Instant) -> f64 {
    begun.elapsed().as_secs_f64() * 1e3
}

fn render(steps: &[Step], total: f64) -> String {
    let row = |step: &Step| {
        let took = step.ms.map_or_else(|| "-".to_owned(), ui::milliseconds);
        vec![step.name.to_owned(), took, step.detail.clone()]
    };
    let mut rows: Vec<_> = steps.iter().map(row).collect();
    rows.push(vec!["total".to_owned(), ui::milliseconds(total), String::new()]);
    ui::table(&["STEP", "TOOK", "WHAT"], &rows)
}

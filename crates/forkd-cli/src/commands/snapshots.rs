//! `forkd images`, `forkd rmi` and `forkd unload`.

use anyhow::Result;
use forkd_api::{Code, SnapshotKind, SnapshotStatus};
use hyper::Method;

use super::{Context, report, with_daemon};
use crate::args::{ImagesArgs, RmiArgs, TagsArgs};
use crate::client::types::{self, Snapshot};
use crate::client::{Daemon, Refused};
use crate::host::clock;
use crate::ui;

/// Lists snapshots.
pub(crate) fn list(context: &Context, args: &ImagesArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let answer = daemon.ask(Method::GET, "/v1/snapshots", None).await?;
        if args.answer.json {
            ui::print_json(&answer)?;
            return Ok(0);
        }
        let snapshots: Vec<Snapshot> = types::read(&answer)?;
        ui::print(&render(&snapshots, clock::now()))?;
        for snapshot in &snapshots {
            if let Some(why) = snapshot.error.as_ref().or(snapshot.warning.as_ref()) {
                context.ui.warn(format!("snapshot {}: {why}", snapshot.tag));
            }
        }
        Ok(0)
    })
}

/// Removes snapshots; a failure does not stop the others.
pub(crate) fn remove(context: &Context, args: &RmiArgs) -> Result<u8> {
    with_daemon(context, &args.snapshots.daemon, async |daemon| {
        let (tags, json, ui) = (&args.snapshots.tags, args.snapshots.json, context.ui);
        if args.cascade {
            return report(ui, json, remove_with_dependents(&daemon, tags).await?, "removed");
        }
        let query = if args.force { "?force=true" } else { "" };
        report(ui, json, remove_all(&daemon, tags, query).await, "removed")
    })
}

/// Removes snapshots one after the other. A snapshot that another needs is tried again after the others:
/// the other may be among them.
async fn remove_all<'a>(daemon: &Daemon, tags: &'a [String], query: &str) -> Vec<(&'a str, Result<()>)> {
    let mut results = Vec::new();
    let mut waiting: Vec<&str> = tags.iter().map(String::as_str).collect();
    loop {
        let (mut needed, mut removed) = (Vec::new(), false);
        for tag in waiting {
            match remove_one(daemon, tag, query).await {
                Err(error) if Refused::is(&error, Code::SnapshotInUse) => needed.push((tag, Err(error))),
                other => {
                    removed |= other.is_ok();
                    results.push((tag, other));
                }
            }
        }
        if !removed || needed.is_empty() {
            results.extend(needed);
            return results;
        }
        waiting = needed.into_iter().map(|(tag, _)| tag).collect();
    }
}

/// Removes snapshots and the snapshots built on them. A snapshot that went with another is a success; one
/// that never existed is a failure.
async fn remove_with_dependents<'a>(
    daemon: &Daemon,
    tags: &'a [String],
) -> Result<Vec<(&'a str, Result<()>)>> {
    let known: Vec<Snapshot> = types::get(daemon, "/v1/snapshots").await?;
    let mut results = Vec::new();
    for tag in tags {
        let removed = match remove_one(daemon, tag, "?cascade=true").await {
            Err(error)
                if Refused::is(&error, Code::SnapshotNotFound) && known.iter().any(|one| one.tag == *tag) =>
            {
                Ok(())
            }
            other => other,
        };
        results.push((tag.as_str(), removed));
    }
    Ok(results)
}

async fn remove_one(daemon: &Daemon, tag: &str, query: &str) -> Result<()> {
    daemon.ask(Method::DELETE, &format!("{}{query}", types::snapshot_path(tag)), None).await.map(drop)
}

/// Ends the template processes of snapshots.
pub(crate) fn unload(context: &Context, args: &TagsArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let unload = async |tag: &str| {
            let path = format!("{}/unload", types::snapshot_path(tag));
            daemon.ask(Method::POST, &path, None).await
        };
        report(context.ui, args.json, types::for_each(&args.tags, unload).await, "unloaded")
    })
}

/// A table, and its totals.
fn render(snapshots: &[Snapshot], now: u64) -> String {
    let row = |snapshot: &Snapshot| {
        let template = snapshot.template.as_ref();
        vec![
            snapshot.tag.clone(),
            status(snapshot),
            ui::bytes(snapshot.size()),
            format!("{} MiB", snapshot.mem_size_mib),
            snapshot.image.as_ref().or(snapshot.kernel.as_ref()).cloned().unwrap_or_default(),
            snapshot.parent_tag.clone().unwrap_or_else(|| "-".to_owned()),
            format!("{} ago", ui::age(now.saturating_sub(snapshot.created_at_unix))),
            template.map_or_else(
                || "-".to_owned(),
                |template| format!("pid {}, {}", template.pid, children(template.children)),
            ),
        ]
    };
    let header = ["TAG", "STATUS", "SIZE", "MEMORY", "IMAGE", "OVER", "CREATED", "TEMPLATE"];
    let table = ui::table(&header, &snapshots.iter().map(row).collect::<Vec<_>>());
    let size = snapshots.iter().fold(0u64, |sum, snapshot| sum.saturating_add(snapshot.size()));
    // Each size counts its whole chain, and chains share layers.
    let at_most =
        if snapshots.iter().any(|snapshot| snapshot.parent_tag.is_some()) { "at most " } else { "" };
    let templates = || snapshots.iter().filter_map(|snapshot| snapshot.template.as_ref());
    format!(
        "{table}\n{}, {at_most}{} on disk; {} with {}",
        ui::count(snapshots.len(), "snapshot", "snapshots"),
        ui::bytes(size),
        ui::count(templates().count(), "template", "templates"),
        children(templates().fold(0, |sum, template| sum.saturating_add(template.children))),
    )
}

fn status(snapshot: &Snapshot) -> String {
    match (snapshot.status, &snapshot.phase) {
        (SnapshotStatus::Writing, Some(phase)) => phase.clone(),
        (SnapshotStatus::Writing, None) => match &snapshot.progress {
            Some(saving) => format!("writing {} %", saving.percent()),
            None => "writing".to_owned(),
        },
        (SnapshotStatus::Ready, _) if snapshot.kind == SnapshotKind::Disk => "ready, disk only".to_owned(),
        (SnapshotStatus::Ready, _) => "ready".to_owned(),
        (SnapshotStatus::Failed, _) => "failed".to_owned(),
        (SnapshotStatus::Unknown, _) => "unknown".to_owned(),
    }
}

fn children(count: usize) -> String {
    ui::count(count, "child", "children")
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn snapshots_are_listed_with_what_they_take_and_what_they_come_to() {
        let snapshots: Vec<Snapshot> = types::read(&json!([
            { "tag": "numpy", "status": "ready", "created_at_unix": 1000, "image": "python", "vcpus": 1,
              "mem_size_mib": 512, "network": true, "memory_bytes": 3 << 20, "disk_bytes": 1 << 20,
              "state_bytes": 0, "bootable": true, "dir": "/d",
              "template": { "pid": 77, "source": "disk", "children": 1 } },
            { "tag": "b", "status": "writing", "phase": "warming", "created_at_unix": 4000,
              "kernel": "/k", "vcpus": 1, "mem_size_mib": 64 },
            { "tag": "c", "status": "writing", "created_at_unix": 4000, "image": "python", "vcpus": 1,
              "mem_size_mib": 512, "parent_tag": "numpy", "chain_depth": 1,
              "progress": { "scanned_bytes": 128, "total": 512, "written": 4096 } },
            { "tag": "d", "status": "ready", "kind": "disk", "created_at_unix": 4000, "image": "python",
              "mem_size_mib": 512 },
        ]))
        .unwrap();
        let expected = "\
TAG    STATUS            SIZE     MEMORY   IMAGE   OVER   CREATED     TEMPLATE
numpy  ready             4.0 MiB  512 MiB  python  -      50 min ago  pid 77, 1 child
b      warming           0 B      64 MiB   /k      -      0 s ago     -
c      writing 25 %      0 B      512 MiB  python  numpy  0 s ago     -
d      ready, disk only  0 B      512 MiB  python  -      0 s ago     -
4 snapshots, at most 4.0 MiB on disk; 1 template with 1 child";
        assert_eq!(render(&snapshots, 4000), expected);
        assert!(render(&[], 0).ends_with("\n0 snapshots, 0 B on disk; 0 templates with 0 children"));
    }
}

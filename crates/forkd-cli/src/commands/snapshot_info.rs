//! `forkd snapshot-info` and `forkd snapshot-compact`: shows the chain of a snapshot, and copies it into a
//! snapshot that depends on no other.

use anyhow::{Context as _, Result};
use forkd_api::{LayerInfo, SnapshotInfoDetail, SnapshotKind};
use hyper::Method;
use serde_json::json;

use super::{Context, with_daemon};
use crate::args::{SnapshotCompactArgs, SnapshotInfoArgs};
use crate::client::types::{self, Snapshot};
use crate::host::clock;
use crate::ui;

/// Prints a snapshot in detail.
pub(crate) fn info(context: &Context, args: &SnapshotInfoArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let path = format!("{}/info", types::snapshot_path(&args.tag));
        let answer = daemon.ask(Method::GET, &path, None).await?;
        if args.answer.json {
            ui::print_json(&answer)?;
        } else {
            ui::print(&render(&types::read(&answer)?))?;
        }
        Ok(0)
    })
}

/// Copies a chain into a snapshot of one layer.
pub(crate) fn compact(context: &Context, args: &SnapshotCompactArgs) -> Result<u8> {
    let tag = args.tag.as_ref().or(args.from.as_ref()).context("give the tag of a snapshot")?;
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let progress = context.ui.spinner(format!("copying {tag} to {}", args.to));
        let path = format!("{}/compact", types::snapshot_path(tag));
        let answer = daemon.ask(Method::POST, &path, Some(&json!({ "to": args.to }))).await?;
        drop(progress);
        if args.answer.json {
            ui::print_json(&answer)?;
        } else {
            let made: Snapshot = types::read(&answer)?;
            let size = ui::bytes(made.size());
            ui::print(&ui::without_control_chars(&format!(
                "{}: ready, {size} on disk, depends on no other",
                made.tag
            )))?;
        }
        Ok(0)
    })
}

fn render(snapshot: &SnapshotInfoDetail) -> String {
    let sizes = |logical, physical, own| {
        format!("{}, {} on disk, {} of it its own", ui::bytes(logical), ui::bytes(physical), ui::bytes(own))
    };
    let or_nothing = |names: &[String], nothing: &str| {
        if names.is_empty() { nothing.to_owned() } else { names.join(", ") }
    };
    let made = match snapshot.created_at_unix {
        // An older daemon does not reply with it.
        0 => "-".to_owned(),
        at => clock::timestamp(at),
    };
    let made_by = match snapshot.made_by_version.as_str() {
        "" => "-".to_owned(),
        version => format!("forkd {version}"),
    };
    let kind = match snapshot.kind {
        SnapshotKind::Full => "memory, disk and devices",
        SnapshotKind::Disk => "the disk alone",
        SnapshotKind::Unknown => "unknown to this forkd",
    };
    let about = ui::pairs(&[
        ("tag", snapshot.tag.clone()),
        ("kind", kind.to_owned()),
        ("made", made),
        ("made by", made_by),
        ("folder", snapshot.dir.clone()),
        ("depth", snapshot.chain_depth.to_string()),
        ("built on", or_nothing(&snapshot.ancestors, "nothing")),
        ("needed by", or_nothing(&snapshot.dependents, "no other")),
        (
            "memory",
            sizes(snapshot.memory_logical_bytes, snapshot.memory_physical_bytes, snapshot.own_memory_bytes),
        ),
        ("disks", sizes(snapshot.disk_logical_bytes, snapshot.disk_physical_bytes, snapshot.own_disk_bytes)),
        ("state", ui::bytes(snapshot.vmstate_bytes)),
    ]);
    let row = |layer: &LayerInfo| {
        vec![
            layer.kind.clone(),
            layer.digest.chars().take(12).collect(),
            ui::bytes(layer.logical_bytes),
            ui::bytes(layer.physical_bytes),
            layer.shared_by.to_string(),
        ]
    };
    let header = ["LAYER", "DIGEST", "SIZE", "ON DISK", "SHARED BY"];
    let layers = ui::table(&header, &snapshot.layers.iter().map(row).collect::<Vec<_>>());
    if snapshot.layers.is_empty() { about } else { format!("{about}\n\n{layers}") }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_page_of_a_snapshot_has_its_chain_its_dependents_and_its_layers() {
        let detail: SnapshotInfoDetail = types::read(&json!({
            "tag": "pandas", "dir": "/d/pandas", "created_at_unix": 45_296, "chain_depth": 1,
            "made_by_version": "0.2.0",
            "memory_logical_bytes": 512 << 20, "memory_physical_bytes": 90 << 20, "vmstate_bytes": 2048,
            "parent_tag": "numpy", "parent_content_hash": "ab", "dependents": ["x", "y"], "ancestors": ["numpy"],
            "disk_logical_bytes": 3 << 20, "disk_physical_bytes": 2 << 20, "own_memory_bytes": 10 << 20,
            "own_disk_bytes": 1 << 20,
            "layers": [{ "kind": "memory", "digest": "0123456789abcdef", "logical_bytes": 512 << 20,
                         "physical_bytes": 80 << 20, "shared_by": 3 }],
        }))
        .unwrap();
        let expected = "\
tag        pandas
kind       memory, disk and devices
made       1970-01-01T12:34:56Z
made by    forkd 0.2.0
folder     /d/pandas
depth      1
built on   numpy
needed by  x, y
memory     512.0 MiB, 90.0 MiB on disk, 10.0 MiB of it its own
disks      3.0 MiB, 2.0 MiB on disk, 1.0 MiB of it its own
state      2.0 KiB

LAYER   DIGEST        SIZE       ON DISK   SHARED BY
memory  0123456789ab  512.0 MiB  80.0 MiB  3";
        assert_eq!(render(&detail), expected);
    }
}

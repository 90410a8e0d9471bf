//! `forkd diff`: the files that differ between two sandboxes.

use std::cmp::Ordering;
use std::iter::Peekable;

use anyhow::Result;
use forkd_api::{FileTreeEntry, Incomplete};
use serde::Serialize;

use super::cp::remote::Remote;
use super::{Context, with_daemon};
use crate::args::DiffArgs;
use crate::ui;

/// How an entry differs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "snake_case")]
enum ChangeKind {
    Added,
    Removed,
    /// Another content, size or link target.
    Modified,
    /// Such as a folder in the place of a file.
    Type,
    /// Other permission bits and nothing else.
    Mode,
}

impl ChangeKind {
    fn name(self) -> &'static str {
        match self {
            ChangeKind::Added => "added",
            ChangeKind::Removed => "removed",
            ChangeKind::Modified => "modified",
            ChangeKind::Type => "type",
            ChangeKind::Mode => "mode",
        }
    }
}

/// A difference between two sandboxes.
#[derive(Debug, PartialEq, Eq, Serialize)]
struct Change {
    path: String,
    kind: ChangeKind,
    /// The entry in the first sandbox.
    before: Option<FileTreeEntry>,
    /// The entry in the other sandbox.
    after: Option<FileTreeEntry>,
}

/// Prints the differences.
pub(crate) fn diff(context: &Context, args: &DiffArgs) -> Result<u8> {
    let ui = context.ui;
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let tree = async |id: &str| {
            Remote::new(&daemon, id, args.user.clone()).tree(&args.path).await.map(|tree| tree.entries)
        };
        let reading = ui.spinner(format!("reading {} in both sandboxes", args.path));
        let (before, after) = tokio::try_join!(tree(&args.sandbox.id), tree(&args.other))?;
        drop(reading);
        for (id, entries) in [(&args.sandbox.id, &before), (&args.other, &after)] {
            let left_out = entries.iter().filter(|entry| is_unknown(entry)).count();
            if left_out > 0 {
                ui.warn(format!(
                    "{left_out} entries of {id} could not be read, or changed meanwhile; `--json` shows which"
                ));
            }
        }
        let changes = changes(before, after);
        if args.answer.json {
            ui::print_json(&changes)?;
        } else if !changes.is_empty() {
            let row = |change: &Change| vec![change.kind.name().to_owned(), change.path.clone()];
            ui::print(&ui::table(&["CHANGE", "PATH"], &changes.iter().map(row).collect::<Vec<_>>()))?;
        }
        Ok(0)
    })
}

/// Whether an entry may have changed without a sign. A pseudo file system is the same in all sandboxes.
fn is_unknown(entry: &FileTreeEntry) -> bool {
    matches!(entry.incomplete, Some(Incomplete::Unreadable | Incomplete::Changing))
}

/// Compares two lists that are in the order of their paths.
fn changes(before: Vec<FileTreeEntry>, after: Vec<FileTreeEntry>) -> Vec<Change> {
    let (mut before, mut after) = (sorted(before), sorted(after));
    let mut changes = Vec::new();
    loop {
        let order = match (before.peek(), after.peek()) {
            (None, None) => return changes,
            (Some(_), None) => Ordering::Less,
            (None, Some(_)) => Ordering::Greater,
            (Some(before), Some(after)) => key(before).cmp(&key(after)),
        };
        let (before, after) = match order {
            Ordering::Less => (before.next(), None),
            Ordering::Greater => (None, after.next()),
            Ordering::Equal => (before.next(), after.next()),
        };
        let kind = match (&before, &after) {
            (Some(before), Some(after)) => compare(before, after),
            (Some(_), None) => Some(ChangeKind::Removed),
            (None, _) => Some(ChangeKind::Added),
        };
        let path = before.as_ref().or(after.as_ref()).map(|entry| entry.path.clone());
        if let (Some(kind), Some(path)) = (kind, path) {
            changes.push(Change { path, kind, before, after });
        }
    }
}

/// Paths that are not UTF-8 can look the same, and are not in the order of their text.
fn sorted(mut entries: Vec<FileTreeEntry>) -> Peekable<std::vec::IntoIter<FileTreeEntry>> {
    entries.sort_by(|a, b| key(a).cmp(&key(b)));
    entries.into_iter().peekable()
}

fn key(entry: &FileTreeEntry) -> (&str, Option<&str>) {
    (&entry.path, entry.path_base64.as_deref())
}

fn compare(before: &FileTreeEntry, after: &FileTreeEntry) -> Option<ChangeKind> {
    let content = |entry: &FileTreeEntry| {
        (entry.size, entry.sha256.clone(), entry.target.clone(), entry.target_base64.clone())
    };
    if before.kind != after.kind {
        Some(ChangeKind::Type)
    } else if content(before) != content(after) {
        Some(ChangeKind::Modified)
    } else {
        (before.mode != after.mode).then_some(ChangeKind::Mode)
    }
}

#[cfg(test)]
mod tests {
    use forkd_api::FileKind;

    use super::*;

    fn file(path: &str, content: &str) -> FileTreeEntry {
        FileTreeEntry {
            path: path.into(),
            path_base64: None,
            kind: FileKind::File,
            size: content.len() as u64,
            modified_unix_ms: 0,
            mode: 0o644,
            sha256: Some(content.into()),
            target: None,
            target_base64: None,
            incomplete: None,
        }
    }

    #[test]
    fn every_kind_of_change_is_found_and_a_new_time_is_none() {
        let link = |target: &str| FileTreeEntry {
            kind: FileKind::Symlink,
            sha256: None,
            target: Some(target.into()),
            ..file("link", "")
        };
        let bytes =
            |base64: &str| FileTreeEntry { path_base64: Some(base64.into()), ..file("z\u{fffd}", "") };
        let before = vec![
            file("a", "1"),
            file("b", "1"),
            file("c", "1"),
            file("d", "1"),
            file("e", "1"),
            link("x"),
            bytes("ev8="),
        ];
        let after = vec![
            file("a", "2"),
            FileTreeEntry { modified_unix_ms: 9, ..file("b", "1") },
            FileTreeEntry { mode: 0o600, ..file("c", "1") },
            FileTreeEntry { kind: FileKind::Directory, ..file("d", "") },
            file("f", "1"),
            link("y"),
            bytes("ev4="),
        ];
        let found: Vec<_> = changes(before.clone(), after)
            .into_iter()
            .map(|change| (change.path, change.kind.name()))
            .collect();
        let expected = [
            ("a", "modified"),
            ("c", "mode"),
            ("d", "type"),
            ("e", "removed"),
            ("f", "added"),
            ("link", "modified"),
            ("z\u{fffd}", "added"),
            ("z\u{fffd}", "removed"),
        ];
        assert_eq!(found, expected.map(|(path, kind)| (path.to_owned(), kind)));
        assert_eq!(changes(before.clone(), before), []);
    }
}

//! `forkd branch`: branches a sandbox and shows the progress of its save.

use std::time::Duration;

use anyhow::{Context as _, Result, bail};
use forkd_api::{BranchRequest, Code, Progress as SaveProgress, SnapshotKind, SnapshotStatus};
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, WrongUsage, with_daemon};
use crate::args::{AnswerArgs, BranchArgs, BranchMode};
use crate::client::types::{self, Snapshot};
use crate::client::{Daemon, Refused};
use crate::stream::signals::Forwarded;
use crate::ui::{self, Progress, Ui};

/// The interval of requests for the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Takes a branch and returns the exit status.
pub(crate) fn branch(context: &Context, args: &BranchArgs) -> Result<u8> {
    if args.no_wait && args.mode != BranchMode::Live {
        return Err(WrongUsage::new(
            "--no-wait needs --mode live: other modes end when the branch is on disk",
        )
        .into());
    }
    let wanted =
        WantedBranch { id: &args.sandbox.id, tag: args.tag.as_deref(), mode: args.mode, wait: !args.no_wait };
    keep(context, &wanted, &args.answer)
}

/// Takes a branch and prints it.
pub(super) fn keep(context: &Context, wanted: &WantedBranch<'_>, output: &AnswerArgs) -> Result<u8> {
    with_daemon(context, &output.daemon, async |daemon| {
        let mut signals = Forwarded::listen()?;
        let answer = tokio::select! {
            answer = take(&daemon, wanted, context.ui) => answer?,
            caught = signals.next() => {
                context.ui.warn("interrupted; the daemon continues a started branch: see `forkd images`");
                return Ok(caught.status());
            }
        };
        if output.json {
            ui::print_json(&answer)?;
        } else {
            ui::print(&describe(&types::read(&answer)?))?;
        }
        Ok(0)
    })
}

/// A branch to take.
#[derive(Debug)]
pub(super) struct WantedBranch<'a> {
    /// The sandbox.
    pub(super) id: &'a str,
    /// The branch's tag; the daemon generates one if it is absent.
    pub(super) tag: Option<&'a str>,
    pub(super) mode: BranchMode,
    /// Whether to wait until it is on disk.
    pub(super) wait: bool,
}

impl WantedBranch<'_> {
    fn request(&self) -> Value {
        json!(BranchRequest {
            tag: self.tag.map(str::to_owned),
            mode: Some(self.mode.name().into()),
            // The daemon replies when the sandbox runs again; the progress of the save is polled.
            wait: (self.mode == BranchMode::Live).then_some(false),
            ..BranchRequest::default()
        })
    }
}

/// Takes a branch, and waits until it is on disk if wanted. Returns the daemon's reply.
pub(super) async fn take(daemon: &Daemon, wanted: &WantedBranch<'_>, ui: Ui) -> Result<Value> {
    let progress = ui.spinner(format!("branching {}", wanted.id));
    let path = format!("{}/branch", types::sandbox_path(wanted.id));
    let body = wanted.request();
    let asked = daemon.ask(Method::POST, &path, Some(&body));
    let answer = match wanted.tag {
        // If the daemon replies only at the end, the tag gives the progress.
        Some(tag) if progress.is_some() => tokio::select! {
            answer = asked => answer?,
            never = watch(daemon, tag, progress.as_ref()) => match never {},
        },
        _ => asked.await?,
    };
    if wanted.wait { saved(daemon, answer, progress.as_ref()).await } else { Ok(answer) }
}

/// Shows the progress of a snapshot's save; never returns.
async fn watch(daemon: &Daemon, tag: &str, progress: Option<&Progress>) -> std::convert::Infallible {
    loop {
        tokio::time::sleep(POLL_INTERVAL).await;
        // Errors are ignored: the branch exists only when the sandbox runs again, and its request
        // reports any failure.
        if let Ok(snapshot) = types::get::<Snapshot>(daemon, &types::snapshot_path(tag)).await {
            show(progress, &snapshot);
        }
    }
}

/// Waits until a snapshot is on disk.
async fn saved(daemon: &Daemon, mut answer: Value, progress: Option<&Progress>) -> Result<Value> {
    loop {
        let snapshot: Snapshot = types::read(&answer)?;
        let tag = &snapshot.tag;
        match snapshot.status {
            SnapshotStatus::Ready => return Ok(answer),
            SnapshotStatus::Failed | SnapshotStatus::Unknown => {
                let why = snapshot.error.as_deref().unwrap_or("the daemon gives no reason; see its log");
                bail!("branch {tag} could not be saved: {why}. Remove it with `forkd rmi {tag}`");
            }
            SnapshotStatus::Writing => show(progress, &snapshot),
        }
        tokio::time::sleep(POLL_INTERVAL).await;
        answer = match daemon.ask(Method::GET, &types::snapshot_path(tag), None).await {
            Err(error) if Refused::is(&error, Code::SnapshotNotFound) => {
                bail!("branch {tag} was removed while it was saved, perhaps by `forkd rmi`")
            }
            other => other.with_context(|| format!("branch {tag}: `forkd images` shows its state"))?,
        };
    }
}

fn show(progress: Option<&Progress>, snapshot: &Snapshot) {
    if let (Some(progress), Some(saving)) = (progress, &snapshot.progress) {
        progress.tick(&how_far(saving));
    }
}

fn how_far(saving: &SaveProgress) -> String {
    format!("saving, {} %, {} written", saving.percent(), ui::bytes(saving.written))
}

/// A branch in lines: its tag, the pause of the sandbox, its size on disk.
pub(super) fn describe(branch: &Snapshot) -> String {
    let ms = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), ui::milliseconds);
    let frozen = match branch.quiesced {
        Some(false) => "no: its agent did not answer in time".to_owned(),
        _ => ms(branch.frozen_ms),
    };
    let stored = match (&branch.parent_tag, branch.chain_depth) {
        _ if branch.kind == SnapshotKind::Disk => "the disk alone; sandboxes boot on it".to_owned(),
        (Some(parent), depth) => format!("over {parent}, depth {depth}"),
        (None, _) => "in full".to_owned(),
    };
    let written = match (branch.status, branch.bytes_written) {
        (SnapshotStatus::Writing, _) => "not yet; `forkd images` shows the progress".to_owned(),
        (_, None) => "-".to_owned(),
        (_, Some(count)) => {
            let took = branch.diff_ms.map_or_else(String::new, |ms| format!(" in {}", ui::milliseconds(ms)));
            format!("{}{took}", ui::bytes(count))
        }
    };
    ui::pairs(&[
        ("tag", branch.tag.clone()),
        ("stored", stored),
        ("pause", ms(branch.pause_ms)),
        ("frozen", frozen),
        ("written", written),
    ])
}

#[cfg(test)]
mod tests {
    use super::*;

    fn snapshot(more: Value) -> Snapshot {
        let mut answer = json!({ "tag": "t", "status": "ready", "created_at_unix": 1, "mem_size_mib": 512 });
        answer.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
        types::read(&answer).unwrap()
    }

    #[test]
    fn a_branch_is_told_with_its_pause_and_what_was_written() {
        let layer =
            snapshot(json!({ "parent_tag": "numpy", "chain_depth": 1, "pause_ms": 3.25, "frozen_ms": 8.0,
                                     "quiesced": true, "bytes_written": 3 << 20, "diff_ms": 1200.0 }));
        let expected = "\
tag      t
stored   over numpy, depth 1
pause    3.2 ms
frozen   8.0 ms
written  3.0 MiB in 1.20 s";
        assert_eq!(describe(&layer), expected);
    }

    #[test]
    fn what_is_not_known_yet_or_was_not_frozen_says_so() {
        let early = describe(&snapshot(json!({ "status": "writing", "pause_ms": 2, "quiesced": false })));
        assert!(early.contains("stored   in full\npause    2.0 ms\nfrozen   no: its agent"), "{early}");
        assert!(early.contains("written  not yet"), "{early}");
    }

    #[test]
    fn only_a_live_branch_is_not_waited_for_by_the_daemon() {
        let wanted = |mode, tag| WantedBranch { id: "sb1", tag, mode, wait: true }.request();
        assert_eq!(wanted(BranchMode::Live, None), json!({ "mode": "live", "wait": false }));
        assert_eq!(wanted(BranchMode::Full, Some("t")), json!({ "mode": "full", "tag": "t" }));
    }

    #[test]
    fn how_far_it_is_makes_sense_whatever_the_numbers() {
        let saving = |scanned, total| how_far(&SaveProgress::new(scanned, total, 1 << 20));
        assert_eq!(saving(1 << 29, 1 << 30), "saving, 50 %, 1.0 MiB written");
        assert_eq!(saving(u64::MAX, 1), "saving, 100 %, 1.0 MiB written");
        assert_eq!(saving(7, 0), "saving, 0 %, 1.0 MiB written");
    }
}

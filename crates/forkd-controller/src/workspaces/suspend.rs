//! Putting a workspace away.

use std::sync::Arc;

use forkd_store::Quota;

use super::{Record, Status, Workspaces, conflict, now_unix};
use crate::branch::{self, Mode, Stage};
use crate::error::{Error, Kind, Result};
use crate::identity::Identity;
use crate::life::{PutAway, SUSPENDED};
use crate::sandbox::{End, Phase, Sandbox};
use crate::telling::events::EventKind;

impl Workspaces {
    /// Puts a workspace away: its sandbox is branched, on disk, and ended. With `diff` what is stored is
    /// what differs from the snapshot the sandbox was forked from.
    ///
    /// Does nothing if its sandbox was used since `unused_since`, if that is given.
    pub(crate) async fn suspend(
        &self,
        name: &str,
        diff: bool,
        who: &Identity,
        unused_since: Option<(u64, usize)>,
    ) -> Result<(Record, Status)> {
        let (workspace, _turn) = self.take_turn(name).await?;
        // Only now it is known which one it is.
        self.check_owner(name, who)?;
        let record = self.usable(name, &workspace)?;
        let Some(sandbox) = self.live(&record) else {
            let text = match self.status(&record) {
                Status::Suspended => format!("workspace {name} is suspended already"),
                _ => format!(
                    "workspace {name} is not running: its sandbox is gone; `forkd workspace resume {name}` \
                     starts it from its last state"
                ),
            };
            return Err(Error::invalid(text));
        };
        // Nobody uses it from here on: what they did would be lost.
        let _put_away = PutAway::begin(&sandbox);
        if unused_since.is_some_and(|stamp| sandbox.activity.stamp() != stamp) {
            return self.show(name);
        }
        let (number, tag) = self.next_tag(&record)?;
        let mut begun = Record { states: number, ..record.clone() };
        begun.retired.push(tag.clone());
        self.keep(&workspace, begun.clone()).await?;
        let mode = if diff { Mode::Diff } else { Mode::Full };
        let mut quota = who.quota;
        // The state it has goes when it has another.
        let replaced = u64::from(record.current_state_tag.is_some());
        quota.max_snapshots = quota.max_snapshots.map(|max| max.saturating_add(replaced));
        if let Err(error) = self.save(&sandbox, &tag, mode, quota).await {
            self.sweep_retired(name, &workspace).await;
            return Err(error);
        }
        let mut suspended = Record {
            current_state_tag: Some(tag.clone()),
            live_sandbox_id: None,
            last_active_unix: now_unix(),
            ..begun
        };
        suspended.retired.retain(|retired| *retired != tag);
        suspended.retired.extend(record.current_state_tag);
        self.keep(&workspace, suspended.clone()).await?;
        self.tell(EventKind::WorkspaceSuspended, &suspended);
        // It is on disk: nothing of it needs to stay in memory.
        let _ = self.snapshots.unload(&tag);
        let why = format!("workspace {name} was suspended; `forkd workspace resume {name}` goes on");
        self.registry.end(&sandbox, End::new(SUSPENDED, why, String::new()));
        self.sweep_retired(name, &workspace).await;
        self.show(name)
    }

    /// A number and a tag for its next state that nobody has.
    fn next_tag(&self, record: &Record) -> Result<(u64, String)> {
        let mut number = record.states;
        loop {
            number += 1;
            let Some(tag) = record.state_tag(number) else {
                return Err(conflict(format!("workspace {} had too many states", record.name)));
            };
            match self.snapshots.get(&tag) {
                Err(error) if error.kind == Kind::NotFound => return Ok((number, tag)),
                other => drop(other?),
            }
        }
    }

    /// Branches `sandbox` and returns when the branch is on disk.
    async fn save(&self, sandbox: &Arc<Sandbox>, tag: &str, mode: Mode, quota: Quota) -> Result<()> {
        let order = branch::Order { tag: Some(tag.to_owned()), mode, wait: true, parent_tag: None, quota };
        let (_, branch) = self.snapshots.branch(sandbox, order)?;
        branch.reached(Stage::Saving).await?;
        let stood_still = matches!(sandbox.phase(), Phase::Paused);
        if !stood_still {
            let _turn = sandbox.take_turn().await?;
            // Whoever uses it has it go on, should this daemon be killed now.
            let written = sandbox.amend(|life, _| life.dozing = true);
            written.map_err(|error| Error::host("cannot write down that a sandbox stands still", error))?;
            if let Err(error) = sandbox.pause().await {
                tracing::warn!(sandbox = sandbox.id, error = error.message, "it runs while it is stored");
            }
        }
        let saved = branch.reached(Stage::Done).await;
        if saved.is_err() && !stood_still && matches!(sandbox.phase(), Phase::Paused) {
            let _turn = sandbox.take_turn().await?;
            sandbox.go_on().await?;
        }
        saved
    }
}

//! `forkd cleanup`: leftovers of dead daemons.

use anyhow::Result;
use serde_json::json;

use super::Context;
use crate::args::CleanupArgs;
use crate::cleanup::{self, Action, Leftover};
use crate::host::paths;
use crate::ui;

/// Lists leftovers, and removes them with `--yes`.
pub(crate) fn cleanup(context: &Context, args: &CleanupArgs) -> Result<u8> {
    let found = cleanup::find(&context.data);
    if !paths::is_root() {
        context.ui.note("only root sees everything: namespaces and processes of other users are not listed");
    }
    let wanted = found.iter().filter(|one| one.action == Action::Delete);
    let mut failed = Vec::new();
    if args.yes {
        for one in wanted.clone() {
            if let Err(error) = one.remove() {
                context.ui.warn(format!("{}: {error:#}", one.path));
                failed.push(one.path.clone());
            }
        }
    }
    let count = wanted.count();
    if args.output.json {
        ui::print_json(&json!({ "removed": args.yes, "leftovers": found, "failed": failed }))?;
    } else {
        ui::print(&render(&found))?;
        let things = ui::count(count, "thing", "things");
        context.ui.note(match (count, args.yes) {
            (0, _) => "nothing is left over".to_owned(),
            (_, false) => format!("{things} to remove; `forkd cleanup --yes` does"),
            (_, true) => format!("removed {} of {things}", count - failed.len()),
        });
    }
    Ok(u8::from(!failed.is_empty()))
}

fn render(found: &[Leftover]) -> String {
    let row = |one: &Leftover| {
        let action = match one.action {
            Action::Skip => "SKIP",
            Action::Delete => "DEL",
        };
        let kind = serde_json::to_value(one.kind).ok();
        let kind = kind.as_ref().and_then(|kind| kind.as_str()).unwrap_or_default().to_owned();
        vec![action.to_owned(), kind, one.path.clone(), one.why.clone()]
    };
    ui::table(&["ACTION", "KIND", "WHAT", "WHY"], &found.iter().map(row).collect::<Vec<_>>())
}

//! `forkd tree`: shows which snapshot or sandbox each one came from.

use std::fs;
use std::path::Path;

use anyhow::{Context as _, Result};
use forkd_tree::{Forest, Letters};
use hyper::Method;

use super::{Context, with_daemon};
use crate::args::TreeArgs;
use crate::client::types::{self, Tree};
use crate::ui;

/// Shows the tree.
pub(crate) fn tree(context: &Context, args: &TreeArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let answer = daemon.ask(Method::GET, "/v1/tree", None).await?;
        if args.json {
            ui::print_json(&answer)?;
            return Ok(0);
        }
        let forest = Forest::new(types::read::<Tree>(&answer)?.nodes);
        if forest.left_out > 0 {
            let more = forest.left_out;
            context.ui.warn(format!("{more} more are not shown; `forkd tree --json` has them all"));
        }
        match &args.svg {
            Some(file) => write_svg(context, &forkd_tree::svg(&forest), file)?,
            None if args.dot => ui::print(&forkd_tree::dot(&forest))?,
            None => show(
                context,
                &forkd_tree::text(&forest, Letters::of_locale(|name| std::env::var(name).ok())),
            )?,
        }
        Ok(0)
    })
}

fn show(context: &Context, text: &str) -> Result<()> {
    if text.is_empty() {
        context.ui.note("there are no snapshots yet: `forkd snapshot` creates the first one");
        return Ok(());
    }
    ui::print(text)
}

fn write_svg(context: &Context, picture: &str, file: &Path) -> Result<()> {
    if file.as_os_str() == "-" {
        return ui::print(picture);
    }
    fs::write(file, format!("{picture}\n")).with_context(|| format!("cannot write {}", file.display()))?;
    context.ui.note(format!("drawn: {}", file.display()));
    Ok(())
}

//! `forkd config` and `forkd paths`.

use anyhow::Result;
use serde_json::json;

use super::Context;
use crate::args::{Cli, Command, ConfigCheckArgs, PathsArgs, grammar};
use crate::host::paths::DataDir;
use crate::settings::{self, File};
use crate::ui::{self, Ui};

/// Shows every setting and its source.
pub(super) fn show(cli: &Cli, file: &File, typed: &[(String, String)]) -> Result<u8> {
    let Command::Config(args) = &cli.command else { return Ok(0) };
    if let Some(path) = &file.unreadable {
        Ui::new(cli.quiet).warn(format!("{} is not used: this user may not read it", path.display()));
    }
    let shown = settings::show(&grammar(), file, typed);
    if args.answer.json {
        ui::print_json(&shown)?;
    } else {
        ui::print(&shown.to_text())?;
    }
    Ok(0)
}

/// Checks a configuration file.
pub(super) fn check(context: &Context, args: &ConfigCheckArgs) -> Result<u8> {
    let file = File::read(&args.file, &grammar())?;
    let found = ui::count(file.entries.len(), "setting", "settings");
    context.ui.note(format!("{} is valid: {found}", args.file.display()));
    Ok(0)
}

/// Prints the paths of forkd.
pub(super) fn paths(context: &Context, args: &PathsArgs) -> Result<u8> {
    let data: &DataDir = &context.data;
    if !args.output.json {
        ui::print(&data.root().display().to_string())?;
        return Ok(0);
    }
    let root = data.root();
    ui::print_json(&json!({
        "data_dir": root,
        "socket": data.socket(),
        "token_file": data.token_file(),
        "snapshots": root.join("snapshots"),
        "images": root.join("images"),
        "kernels": root.join("kernels"),
        "machine": data.machine(),
        "daemon_log": data.daemon_log(),
        "config": settings::path(),
    }))?;
    Ok(0)
}

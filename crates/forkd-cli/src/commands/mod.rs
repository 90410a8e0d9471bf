//! What each command does: from what was typed to what is done.

pub(crate) mod bench;
mod branch;
mod chains;
mod doctor;
mod exec;
mod fork;
mod image;
mod layer;
mod machine;
mod run;
mod sandboxes;
mod serve;
mod snapshot;
mod snapshots;
mod token;
mod tree;
mod workspaces;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::{Cli, Command, DaemonArgs, ImageCommand, MachineCommand, TokenCommand};
use crate::client::Daemon;
use crate::paths::DataDir;
use crate::ui::{self, Ui};
use crate::{daemon, library};

/// What every command needs.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) data: DataDir,
    pub(crate) ui: Ui,
}

/// The status with which commands that have a status of their own to pass on exit when forkd itself
/// failed.
const FORKD_FAILED: u8 = 125;

/// Does what was asked and returns the status to exit with.
pub(crate) fn execute(cli: Cli) -> ExitCode {
    let failure = match &cli.command {
        Command::Run(_)
        | Command::Exec(_)
        | Command::Eval(_)
        | Command::Machine(MachineCommand::Shell(_)) => FORKD_FAILED,
        _ => 1,
    };
    match dispatch(cli) {
        Ok(status) => ExitCode::from(status),
        Err(error) if error.is::<WrongUsage>() => ui::fail(&error, 2),
        Err(error) => ui::fail(&error, failure),
    }
}

/// Options that make no sense together, in a way the parser does not know.
#[derive(Debug)]
struct WrongUsage(&'static str);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.0)
    }
}

impl std::error::Error for WrongUsage {}

fn dispatch(cli: Cli) -> Result<u8> {
    let context = Context { data: DataDir::resolve(cli.data_dir)?, ui: Ui::new(cli.quiet) };
    let context = &context;
    match cli.command {
        Command::Run(args) => run::run(context, args),
        Command::Snapshot(args) => snapshot::snapshot(context, &args),
        Command::SnapshotDiff(args) => layer::snapshot_diff(context, &args),
        Command::SnapshotInfo(args) => chains::info(context, &args),
        Command::SnapshotCompact(args) => chains::compact(context, &args),
        Command::Images(args) => snapshots::list(context, &args),
        Command::Rmi(args) => snapshots::remove(context, &args),
        Command::Unload(args) => snapshots::unload(context, &args),
        Command::Fork(args) => fork::fork(context, &args),
        Command::Spawn(args) => fork::spawn(context, &args),
        Command::Branch(args) => branch::branch(context, &args),
        Command::Rollback(args) => sandboxes::rollback(context, &args),
        Command::Pause(args) => sandboxes::pause(context, &args),
        Command::Resume(args) => sandboxes::resume(context, &args),
        Command::Tree(args) => tree::tree(context, &args),
        Command::Workspace(command) => workspaces::workspace(context, &command),
        Command::Ls(args) => sandboxes::list(context, &args),
        Command::Exec(args) => exec::exec(context, args),
        Command::Eval(args) => exec::eval(context, &args),
        Command::Ping(args) => sandboxes::ping(context, &args),
        Command::Kill(args) => sandboxes::kill(context, &args),
        Command::Serve(args) => serve::serve(context, args).map(|()| 0),
        Command::Doctor(args) => doctor::doctor(context, &args),
        Command::Token(TokenCommand::Print(args)) => token::print(context, &args).map(|()| 0),
        Command::Image(ImageCommand::Build(args)) => image::build(context, args).map(|()| 0),
        Command::Image(ImageCommand::Ls(args)) => image::list(context, &args).map(|()| 0),
        Command::Image(ImageCommand::Rm(args)) => image::remove(context, &args),
        Command::Machine(command) => machine::machine(context, command),
        Command::Bench(command) => bench::bench(context, command),
    }
}

/// A runtime for commands that talk to a daemon. One thread does: they mostly wait.
fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Does something with the daemon: the one there is, or one started for the purpose.
fn with_daemon(
    context: &Context,
    args: &DaemonArgs,
    work: impl AsyncFnOnce(Daemon) -> Result<u8>,
) -> Result<u8> {
    runtime()?.block_on(async { work(daemon::ensure(&context.data, args, context.ui).await?).await })
}

/// Makes sure that there is an image to boot, and a kernel. A daemon somewhere else has images of its
/// own.
fn prepare_image(context: &Context, args: &DaemonArgs, image: &str) -> Result<()> {
    if args.daemon_url.is_none() {
        library::ensure_image(&context.data, image, context.ui)?;
        library::ensure_guest_kernel(&context.data, context.ui)?;
    }
    Ok(())
}

/// Says for each name what was done or why not; the status to exit with.
fn report<T>(ui: Ui, results: Vec<(&str, Result<T>)>, done: &str) -> u8 {
    let mut status = 0;
    for (name, result) in results {
        match result {
            Ok(_) => ui.note(format!("{done} {name}")),
            Err(error) => {
                ui.warn(format!("{name}: {error:#}"));
                status = 1;
            }
        }
    }
    status
}

//! The implementation of each command.

mod agent_port;
pub(crate) mod bench;
mod branch;
mod cleanup;
mod config;
mod cp;
mod diff;
mod doctor;
mod events;
mod exec;
mod fork;
mod from_image;
mod image;
mod inspect;
mod machine;
mod mcp;
mod quickstart;
mod run;
mod sandboxes;
mod serve;
mod snapshot;
mod snapshot_diff;
mod snapshot_info;
mod snapshots;
mod template;
mod token;
mod top;
mod tree;
mod update;
mod workspaces;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::compat_flags::Fate;
use crate::args::{
    Cli, Command, ConfigCommand, DaemonArgs, DocsCommand, ImageCommand, MachineCommand, ParentCommand,
    TemplateCommand,
};
use crate::client::discover;
use crate::client::{Daemon, Refused};
use crate::command_line::Line;
use crate::docs;
use crate::host::paths::DataDir;
use crate::images;
use crate::settings;
use crate::ui::{self, Ui};

/// The context of every command.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) data: DataDir,
    pub(crate) ui: Ui,
}

/// The exit status for a failure of forkd itself, of commands that pass on the status of another command.
const FORKD_FAILED: u8 = 125;

/// Runs a command and returns the exit status.
pub(crate) fn execute(line: Line) -> ExitCode {
    let failure = match &line.cli.command {
        Command::Run(_)
        | Command::Exec(_)
        | Command::Shell(_)
        | Command::Eval(_)
        | Command::Machine(MachineCommand::Shell(_)) => FORKD_FAILED,
        _ => 1,
    };
    let json = line.json;
    match understood(line) {
        Ok(status) => ExitCode::from(status),
        Err(error) => {
            let status = if error.is::<WrongUsage>() { 2 } else { failure };
            match error.downcast_ref::<Refused>().filter(|_| json) {
                Some(refused) => ui::fail_json(&refused.body(), status),
                None => ui::fail(&error, status),
            }
        }
    }
}

/// A combination of options that the parser accepts and the command refuses.
#[derive(Debug)]
struct WrongUsage(String);

impl std::fmt::Display for WrongUsage {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(&self.0)
    }
}

impl std::error::Error for WrongUsage {}

impl WrongUsage {
    fn new(text: impl Into<String>) -> Self {
        WrongUsage(text.into())
    }
}

/// Reports flags without effect and problems of the settings, then runs the command.
fn understood(line: Line) -> Result<u8> {
    let ui = Ui::new(line.cli.quiet);
    for flag in line.obsolete {
        let text = format!("--{}: {}", flag.flag, flag.instead);
        match flag.fate {
            Fate::Ignored => ui.note(format!("{text}; ignored")),
            Fate::Refused => return Err(WrongUsage::new(text).into()),
        }
    }
    match &line.cli.command {
        // These have to work with a wrong configuration file as well.
        Command::Config(args) if args.command.is_some() => {}
        Command::Completions(_) | Command::Man(_) | Command::Docs(_) => {}
        Command::Config(_) => return config::show(&line.cli, &line.settings?, &line.typed),
        _ => drop(line.settings?),
    }
    dispatch(line.cli)
}

fn dispatch(cli: Cli) -> Result<u8> {
    // Settings of the daemon that its clients need as well.
    let place = |key, variable| settings::value(key, variable).map(Into::into);
    let (socket, token) = (place("socket", "FORKD_SOCKET"), place("token_file", "FORKD_TOKEN_FILE"));
    let data = DataDir::resolve(cli.data_dir)?.with_places(socket, token);
    let context = Context { data, ui: Ui::new(cli.quiet) };
    let context = &context;
    match cli.command {
        Command::Run(args) => run::run(context, args),
        Command::Snapshot(args) => snapshot::snapshot(context, &args),
        Command::SnapshotDiff(args) => snapshot_diff::snapshot_diff(context, &args),
        Command::SnapshotInfo(args) => snapshot_info::info(context, &args),
        Command::SnapshotCompact(args) => snapshot_info::compact(context, &args),
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
        Command::Inspect(args) => inspect::inspect(context, &args),
        Command::Exec(args) => exec::exec(context, args),
        Command::Shell(args) => exec::shell(context, args),
        Command::Cp(args) => cp::cp(context, &args),
        Command::Diff(args) => diff::diff(context, &args),
        Command::Eval(args) => exec::eval(context, &args),
        Command::Ping(args) => sandboxes::ping(context, &args),
        Command::AgentPort(args) => agent_port::serve(context, &args),
        Command::Update(args) => update::update(context, &args),
        Command::Kill(args) => sandboxes::kill(context, &args),
        Command::Events(args) => events::events(context, &args),
        Command::Top(args) => top::top(context, &args),
        Command::Logs(args) => top::logs(context, &args),
        Command::Mcp(args) => mcp::mcp(context, &args),
        Command::Serve(args) => serve::serve(context, args).map(|()| 0),
        Command::Doctor(args) => doctor::doctor(context, &args),
        Command::Token(command) => token::token(context, &command),
        Command::Image(ImageCommand::Build(args)) => image::build(context, args).map(|()| 0),
        Command::Image(ImageCommand::Ls(args)) => image::list(context, &args).map(|()| 0),
        Command::Image(ImageCommand::Rm(args)) => image::remove(context, &args),
        Command::Template(TemplateCommand::Prepare(args)) => template::prepare(context, &args),
        Command::Machine(command) => machine::machine(context, command),
        Command::Bench(args) => bench::bench(context, args),
        Command::Quickstart(args) => quickstart::quickstart(context, &args),
        Command::FromImage(args) => from_image::from_image(context, &args),
        Command::Parent(ParentCommand::Build(args)) => from_image::parent(context, &args),
        Command::Cleanup(args) => cleanup::cleanup(context, &args),
        Command::Paths(args) => config::paths(context, &args),
        Command::Config(args) => match args.command {
            Some(ConfigCommand::Check(args)) => config::check(context, &args),
            None => unreachable!("shown before"),
        },
        Command::Completions(args) => docs::completions(args.shell),
        Command::Man(args) => docs::man(args.dir.as_deref(), context.ui),
        Command::Docs(DocsCommand::Cli) => ui::print(docs::markdown().trim_end()).map(|()| 0),
    }
}

/// A runtime for commands that use a daemon. One thread is enough: they mostly wait.
fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

/// Does `work` with the running daemon, or with a new one.
fn with_daemon(
    context: &Context,
    args: &DaemonArgs,
    work: impl AsyncFnOnce(Daemon) -> Result<u8>,
) -> Result<u8> {
    let runtime = runtime()?;
    let result =
        runtime.block_on(async { work(discover::ensure(&context.data, args, context.ui).await?).await });
    // A thread may still look up an address or read a file; it ends with the process.
    runtime.shutdown_background();
    result
}

/// Builds the image and fetches the kernel if they are missing, unless the daemon is another host's: that
/// one has its own images.
fn prepare_image(context: &Context, args: &DaemonArgs, image: &str) -> Result<()> {
    if args.daemon_url.is_none() {
        images::ensure_image(&context.data, image, context.ui)?;
        images::ensure_guest_kernel(&context.data, context.ui)?;
    }
    Ok(())
}

/// Prints the result for each name, as text or as JSON; returns the exit status.
fn report<T>(ui: Ui, json: bool, results: Vec<(&str, Result<T>)>, done: &str) -> Result<u8> {
    if json {
        let failed = results.iter().any(|(_, result)| result.is_err());
        let told = results.into_iter().map(|(name, result)| match result {
            Ok(_) => serde_json::json!({ "name": name, "ok": true }),
            Err(error) => serde_json::json!({ "name": name, "ok": false, "error": format!("{error:#}") }),
        });
        ui::print_json(&told.collect::<Vec<_>>())?;
        return Ok(u8::from(failed));
    }
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
    Ok(status)
}

//! What each command does: from what was typed to what is done.

mod doctor;
mod image;
mod machine;
mod run;
mod serve;
mod token;

use std::process::ExitCode;

use anyhow::Result;

use crate::args::{Cli, Command, ImageCommand, MachineCommand, TokenCommand};
use crate::paths::DataDir;
use crate::ui::{self, Ui};

/// What every command needs.
#[derive(Debug)]
pub(crate) struct Context {
    pub(crate) data: DataDir,
    pub(crate) ui: Ui,
}

/// The status `forkd run` and `forkd machine shell` exit with when forkd itself failed.
const FORKD_FAILED: u8 = 125;

/// Does what was asked and returns the status to exit with.
pub(crate) fn execute(cli: Cli) -> ExitCode {
    let failure = match &cli.command {
        Command::Run(_) | Command::Machine(MachineCommand::Shell(_)) => FORKD_FAILED,
        _ => 1,
    };
    match dispatch(cli) {
        Ok(status) => ExitCode::from(status),
        Err(error) => ui::fail(&error, failure),
    }
}

fn dispatch(cli: Cli) -> Result<u8> {
    let context = Context { data: DataDir::resolve(cli.data_dir)?, ui: Ui::new(cli.quiet) };
    let context = &context;
    match cli.command {
        Command::Run(args) => run::run(context, args),
        Command::Serve(args) => serve::serve(context, args).map(|()| 0),
        Command::Doctor(args) => doctor::doctor(context, &args),
        Command::Token(TokenCommand::Print(args)) => token::print(context, &args).map(|()| 0),
        Command::Image(ImageCommand::Build(args)) => image::build(context, args).map(|()| 0),
        Command::Image(ImageCommand::Ls(args)) => image::list(context, &args).map(|()| 0),
        Command::Image(ImageCommand::Rm(args)) => image::remove(context, &args),
        Command::Machine(command) => machine::machine(context, command),
    }
}

/// A runtime for commands that talk to a daemon. One thread does: they mostly wait.
fn runtime() -> Result<tokio::runtime::Runtime> {
    Ok(tokio::runtime::Builder::new_current_thread().enable_all().build()?)
}

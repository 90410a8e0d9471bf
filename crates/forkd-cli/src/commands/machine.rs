//! `forkd machine`.

use anyhow::Result;

use super::{Context, runtime};
use crate::args::MachineCommand;
use crate::machine::{Machine, shell, status, supervisor};
use crate::ui;

pub(crate) fn machine(context: &Context, command: MachineCommand) -> Result<u8> {
    let machine = Machine::new(&context.data, context.ui);
    match command {
        MachineCommand::Start => {
            let running = machine.ensure("no machine runs")?;
            context.ui.note(format!("its daemon is at {}", machine.daemon(&running.state)?.url()));
            Ok(0)
        }
        MachineCommand::Stop => {
            machine.say_notices();
            match machine.stop()? {
                Some(how) => context.ui.note(format!("the machine is stopped: {how}")),
                None => context.ui.note("no machine runs"),
            }
            Ok(0)
        }
        MachineCommand::Status(args) => {
            machine.say_notices();
            let status = runtime()?.block_on(status::look(&machine))?;
            if args.json {
                ui::print_json(&status)?
            } else {
                ui::print(&status.to_text())?
            }
            Ok(0)
        }
        MachineCommand::Shell(args) => {
            let running = machine.ensure("no machine runs")?;
            let runtime = runtime()?;
            let result = runtime.block_on(shell::run(&running, &args.command));
            // A thread may still wait for standard input; it ends with the process.
            runtime.shutdown_background();
            result
        }
        MachineCommand::Supervise => supervisor::supervise(&context.data).map(|()| 0),
    }
}

//! `forkd token`.

use anyhow::{Context as _, Result};

use super::{Context, runtime};
use crate::args::TokenPrintArgs;
use crate::machine::Machine;
use crate::{daemon, ui};

/// Prints the token of the daemon the other commands would talk to.
pub(crate) fn print(context: &Context, args: &TokenPrintArgs) -> Result<()> {
    let Context { data, ui } = context;
    let runtime = runtime()?;
    let found = match runtime.block_on(daemon::find(data, &args.answer.daemon, *ui))? {
        Some(daemon) => daemon,
        None => {
            let machine = Machine::new(data, *ui);
            let running = machine.running()?.context(
                "no daemon runs: start one with `sudo forkd serve`, or the emulated machine with `forkd machine start`",
            )?;
            machine.daemon(&running.state)?
        }
    };
    let token = daemon::token(data, &found)?;
    if args.answer.json {
        let url = runtime.block_on(found.http_url())?;
        return ui::print_json(&serde_json::json!({ "token": token, "url": url }));
    }
    ui::print(&token)
}

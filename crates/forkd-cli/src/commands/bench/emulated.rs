//! The Linux cases where this computer's KVM cannot run Linux: the same command, in the emulated
//! machine, against the daemon there.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use forkd_bench::report::{self, Line};

use super::{Case, SpawnArgs};
use crate::commands::Context;
use crate::machine::Machine;
use crate::machine::qemu::{MACHINE_DATA, SHARE};
use crate::paths::Binaries;

/// Measures `cases` in the machine, and says whether all of them could be. Its notes go to standard
/// error as ours do.
pub(super) fn measure(
    context: &Context,
    args: &SpawnArgs,
    cases: &[Case],
    why: &str,
) -> Result<(Vec<Line>, bool)> {
    let why =
        format!("{why}, so Linux guests are measured in the emulated machine: only ratios and memory count");
    let running = Machine::new(&context.data, context.ui).ensure(&why)?;
    let data = format!("{MACHINE_DATA}/forkd");
    let mut inside = vec![format!("{SHARE}/machine/bin/{}/forkd", running.plan.build.id)];
    inside.extend(["--data-dir".into(), data.clone()]);
    inside.extend(["bench", "spawn", "--json", "--socket"].map(str::to_owned));
    inside.push(format!("{data}/forkd.sock"));
    let names = cases.iter().map(|case| format!("{case:?}").to_lowercase());
    inside.extend(["--case".into(), names.collect::<Vec<_>>().join(",")]);
    let numbers = args.linux_n.iter().map(usize::to_string);
    inside.extend(["--linux-n".into(), numbers.collect::<Vec<_>>().join(",")]);
    inside.extend(["--mem-size-mib".into(), args.mem_size_mib.to_string()]);
    inside.extend(args.quick.then(|| "--quick".into()));
    inside.extend(args.no_network.then(|| "--no-network".into()));

    // By way of the command people use: it passes signals on and ends what it started in there.
    let mut command = Command::new(Binaries::find()?.forkd);
    command.arg("--data-dir").arg(context.data.root()).args(["machine", "shell", "--"]).args(&inside);
    let output = command.stdin(Stdio::null()).stderr(Stdio::inherit()).output();
    let output = output.context("cannot run `forkd machine shell`")?;
    let lines = report::parse(&String::from_utf8_lossy(&output.stdout))
        .context("what `forkd bench` in the emulated machine printed")?;
    if lines.is_empty() {
        bail!("`forkd bench` in the emulated machine measured nothing ({})", output.status);
    }
    Ok((lines, output.status.success()))
}

//! The Linux cases where the host's KVM cannot run Linux: the same command in the emulated machine, with the
//! daemon there.

use std::process::{Command, Stdio};

use anyhow::{Context as _, Result, bail};
use rustix::process::{Pid, Signal};

use crate::commands::Context;
use crate::host::paths::Binaries;
use crate::machine::Machine;
use crate::machine::qemu::{MACHINE_DATA, SHARE};
use crate::stream::signals::ExitAction;

/// Runs `forkd bench` in the machine with these arguments; returns its output and whether it measured
/// everything. Its notes go to standard error.
pub(super) fn measure(context: &Context, args: &[String], why: &str) -> Result<(String, bool)> {
    let why = format!(
        "{why}, so Linux guests are measured in the emulated machine: only ratios and memory are meaningful"
    );
    let running = Machine::new(&context.data, context.ui).ensure(&why)?;
    let data = format!("{MACHINE_DATA}/forkd");
    let mut inside = vec![format!("{SHARE}/machine/bin/{}/forkd", running.plan.build.id)];
    inside.extend(["--data-dir".into(), data.clone(), "bench".into()]);
    inside.extend_from_slice(args);
    inside.extend(["--json".into(), "--socket".into(), format!("{data}/forkd.sock")]);

    // Use the users' command: it forwards signals and ends its process in the machine.
    let mut command = Command::new(Binaries::find()?.forkd);
    command.arg("--data-dir").arg(context.data.root()).args(["machine", "shell", "--"]).args(&inside);
    command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::inherit());
    let shell = command.spawn().context("cannot run `forkd machine shell`")?;
    // It forwards the signal to the benchmark in the machine, and ends with it.
    let pid = Pid::from_child(&shell);
    let _at_end = ExitAction::new(move || {
        // It may have ended by itself.
        let _ = rustix::process::kill_process(pid, Signal::TERM);
    })?;
    let output = shell.wait_with_output().context("cannot read what `forkd machine shell` prints")?;
    let printed = String::from_utf8_lossy(&output.stdout).into_owned();
    if printed.trim().is_empty() {
        bail!("`forkd bench` in the emulated machine measured nothing ({})", output.status);
    }
    Ok((printed, output.status.success()))
}

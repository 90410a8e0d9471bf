//! One run of QEMU: a child process that ends with the supervisor. Its console and its errors are kept in a
//! bounded log.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::thread::JoinHandle;

use anyhow::{Context, Result};

use super::log::{Log, tail};
use super::qemu::{self, Ports};
use super::state::{Folder, Plan};
use crate::host::process::{self, ProcessId};

/// The limit of the console's log.
const LOG_LIMIT: u64 = 4 << 20;

/// The line between the consoles of two runs.
const BEGIN: &str = "--- the machine starts";

/// A running QEMU.
#[derive(Debug)]
pub(super) struct Vm {
    child: Child,
    pub(super) id: Option<ProcessId>,
    pub(super) ports: Ports,
    console: PathBuf,
    readers: Vec<JoinHandle<()>>,
}

impl Vm {
    /// Starts QEMU. The calling thread must outlive the machine: QEMU ends with it.
    pub(super) fn start(plan: &Plan, folder: &Folder, share: &Path) -> Result<Self> {
        let ports = Ports::choose()?;
        let mut command = Command::new(&plan.qemu);
        command.args(qemu::arguments(plan, folder, share, ports));
        command.stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        process::die_with_parent(&mut command);
        let console = folder.console_log();
        // QEMU's errors go into the console's log: users look there for the reason of its end.
        let log = Log::open(&console, LOG_LIMIT)?;
        log.line(BEGIN);
        let mut child = command.spawn().with_context(|| format!("cannot run {}", plan.qemu.display()))?;
        // `None` if it has ended already, which is noticed and reported like any other end.
        let id = ProcessId::of(child.id() as i32);
        let mut readers = Vec::new();
        if let Some(output) = child.stdout.take() {
            let log = log.clone();
            readers.push(std::thread::spawn(move || copy(output, log)));
        }
        if let Some(errors) = child.stderr.take() {
            readers.push(std::thread::spawn(move || copy(errors, log)));
        }
        Ok(Vm { child, id, ports, console, readers })
    }

    /// How it ended, if it has.
    pub(super) fn try_wait(&mut self) -> Result<Option<ExitStatus>> {
        self.child.try_wait().context("cannot look at QEMU")
    }

    /// Kills QEMU if it still runs, and returns the end of the console.
    pub(super) fn end(&mut self) -> String {
        let _ = self.child.kill();
        let _ = self.child.wait();
        // Its earlier output has to arrive first.
        for reader in self.readers.drain(..) {
            let _ = reader.join();
        }
        let tail = tail(&self.console, 2000);
        tail.rsplit(BEGIN).next().unwrap_or_default().trim().to_owned()
    }
}

impl Drop for Vm {
    fn drop(&mut self) {
        self.end();
    }
}

fn copy(mut from: impl Read, mut to: impl Write) {
    let mut buffer = [0u8; 4096];
    // Keep reading when writing fails: QEMU must never wait for a full disk.
    while let Ok(count @ 1..) = from.read(&mut buffer) {
        let _ = to.write_all(&buffer[..count]);
    }
}

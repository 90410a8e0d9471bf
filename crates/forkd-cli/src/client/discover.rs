//! Finds the daemon that a command uses, or starts one.

use std::path::PathBuf;
use std::process::Command;
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};

use crate::args::DaemonArgs;
use crate::client::tls::Trust;
use crate::client::{Address, Daemon};
use crate::host::files::{self, Lock};
use crate::host::kvm;
use crate::host::paths::{self, Binaries, DataDir};
use crate::host::process;
use crate::machine::Machine;
use crate::settings;
use crate::ui::Ui;

/// The time in which a running daemon must answer.
const HEALTH_TIMEOUT: Duration = Duration::from_secs(5);
/// The daemon's log is rotated at its start if it is longer than this.
const MAX_LOG: u64 = 16 << 20;
/// The time in which a daemon must start.
const START_TIMEOUT: Duration = Duration::from_secs(60);

/// The daemon named by the arguments, or the one that serves this data directory; `None` if none runs.
/// Starts nothing.
pub(crate) async fn find(data: &DataDir, args: &DaemonArgs, ui: Ui) -> Result<Option<Daemon>> {
    if let Some(url) = &args.daemon_url {
        let trust = Trust { file: args.cacert.clone() };
        let mut daemon = Daemon::from_url(url, args.daemon_token.clone(), trust)?;
        if daemon.token.is_none() && daemon.is_local() {
            daemon.token = local_token(data, ui);
        }
        return Ok(Some(daemon));
    }
    for socket in data.sockets() {
        let daemon = Daemon::unix(socket);
        if daemon.is_healthy(HEALTH_TIMEOUT).await {
            return Ok(Some(daemon));
        }
    }
    Ok(None)
}

/// A daemon that answers: the running one, or a new one. The new one runs on KVM where KVM works, and in
/// the emulated machine elsewhere.
pub(crate) async fn ensure(data: &DataDir, args: &DaemonArgs, ui: Ui) -> Result<Daemon> {
    if let Some(daemon) = find(data, args, ui).await? {
        return Ok(daemon);
    }
    data.create()?;
    let machine = Machine::new(data, ui);
    // A running machine needs neither KVM nor a start.
    if machine.running()?.is_some() {
        return machine.daemon(&machine.ensure("no machine runs")?.state);
    }
    let binaries = Binaries::find()?;
    let kvm = kvm::probe_cached(&binaries.vmm, &data.kvm_cache())?;
    if !kvm.runs_linux {
        let why = format!("{}, so sandboxes run in the emulated machine", kvm.describe());
        return machine.daemon(&machine.ensure(&why)?.state);
    }
    if !paths::is_root() {
        let closed = |socket: &PathBuf| socket.exists() && !paths::may_write(socket);
        if let Some(socket) = data.sockets().into_iter().find(closed) {
            bail!(
                "a daemon listens on {}, but this user may not open it: join the group forkd (sudo usermod -aG \
                 forkd USER) and log in again",
                socket.display()
            );
        }
        bail!(
            "no daemon runs, and only root can start one: run `sudo forkd serve`, or give the address of \
            another one in FORKD_URL"
        );
    }
    start(data, &binaries, ui).await
}

/// Starts a daemon that outlives this command.
async fn start(data: &DataDir, binaries: &Binaries, ui: Ui) -> Result<Daemon> {
    let _lock = Lock::take(&data.root().join("start.lock"), || {
        ui.note("another forkd command starts the daemon; waiting for it");
    })?;
    let daemon = Daemon::unix(data.socket());
    if daemon.is_healthy(HEALTH_TIMEOUT).await {
        return Ok(daemon);
    }
    let log = data.daemon_log();
    if std::fs::metadata(&log).is_ok_and(|data| data.len() > MAX_LOG) {
        std::fs::rename(&log, log.with_extension("log.old"))
            .context("cannot put the daemon's old log aside")?;
    }
    ui.note(format!("no daemon runs; starting one that stays (log: {})", log.display()));
    let mut command = Command::new(&binaries.forkd);
    command.arg("--data-dir").arg(data.root());
    if let Some(file) = settings::path() {
        command.arg("--config").arg(file);
    }
    command.arg("serve");
    let started = process::spawn_detached(&mut command, &log)?;
    let begin = Instant::now();
    while !daemon.is_healthy(HEALTH_TIMEOUT).await {
        if !started.is_alive() {
            bail!("the daemon ended during its start:\n{}", crate::machine::log_tail(&log, 2000));
        }
        if begin.elapsed() > START_TIMEOUT {
            bail!("the daemon does not answer after {} s; see {}", START_TIMEOUT.as_secs(), log.display());
        }
        tokio::time::sleep(Duration::from_millis(100)).await;
    }
    Ok(daemon)
}

/// The token for TCP clients of `daemon`.
pub(crate) fn token(data: &DataDir, daemon: &Daemon) -> Result<String> {
    if let Some(token) = &daemon.token {
        return Ok(token.clone());
    }
    if !daemon.is_local() {
        bail!("the token of {} is not on this host; give it with FORKD_TOKEN", daemon.url());
    }
    let file = match &daemon.address {
        Address::Unix(socket) => data.token_file_of(socket),
        Address::Tcp(_) | Address::Tls(..) => data.token_file(),
    };
    let bytes = files::read_small(&file)?.with_context(|| {
        format!("{} is missing: the daemon creates it at its first start", file.display())
    })?;
    Ok(String::from_utf8(bytes).context("the token file is not text")?.trim().to_owned())
}

/// The token of this data directory's daemon, or of its machine's daemon, for a URL without a token.
fn local_token(data: &DataDir, ui: Ui) -> Option<String> {
    let machine = Machine::new(data, ui);
    if let Ok(Some(running)) = machine.running() {
        return machine.daemon(&running.state).ok()?.token;
    }
    let bytes = files::read_small(&data.token_file()).ok()??;
    Some(String::from_utf8(bytes).ok()?.trim().to_owned())
}

//! The guest's side of a fork: `Freeze` and `Thaw` in the guest that is copied, `Become` in each copy.
//!
//! Two copies of a guest are identical until they are made different, and only the guest itself can reach the
//! memory of its processes. This module owns the order of the steps. No user process runs in a child before
//! its random numbers, its clock and its name are its own: user processes sit in a frozen cgroup from
//! `Freeze` on and are thawed in `wake`.
//!
//! Every child pays for each step, in time and in pages that are no longer shared. So this module starts no
//! program and waits for no process (but hooks and `on_fork` functions, where there are any), and overwrites
//! files that exist instead of making new ones.
//!
//! It knows nothing of the host: neither how a guest is copied nor how many copies there are.

mod boot_id;
mod connections;
mod file_systems;
mod hooks;
mod identity;
mod ssh;
mod sync;
mod system;
mod wake;

use std::{
    collections::BTreeMap,
    io,
    path::{Path, PathBuf},
    sync::{Arc, Mutex, PoisonError},
    time::{Duration, Instant},
};

use forkd_protocol::{
    agent::{BecomeRequest, BecomeResponse, FreezeRequest, FreezeResponse, FreezeSync, NameRequest},
    connect::{Code, Error},
};

pub use boot_id::BootId;
pub(crate) use identity::{IdentityFiles, write_resolv_conf};
pub use system::{FileSystemCalls, System};

use self::{file_systems::FileSystems, ssh::HostKeys, sync::Syncing};
use crate::{
    log,
    process::{self, Processes},
    python::Python,
};

/// The variable with the id of a process's sandbox.
pub(crate) const SANDBOX_ID: &str = "FORKD_SANDBOX_ID";
/// Default time limit of `Freeze`.
const FREEZE_TIME: Duration = Duration::from_secs(5);
/// Upper bound of the time limit of `Freeze`.
const MAX_FREEZE_TIME: Duration = Duration::from_secs(600);
/// So few dirty bytes are on the disk in a moment, while user processes stand still.
const QUICK_SYNC_BYTES: u64 = 4 << 20;
/// That moment.
const QUICK_SYNC_TIME: Duration = Duration::from_millis(100);
/// How long `Become` waits for processes that should be frozen already.
const REFREEZE_TIME: Duration = Duration::from_secs(1);
/// Less entropy than this does not make two children different for sure; more is of no use.
const ENTROPY: std::ops::RangeInclusive<usize> = 32..=4096;
/// The most that names and values of variables may take together.
const MAX_VARIABLES: usize = 64 << 10;

/// The parts of a guest that a fork touches.
pub(crate) struct ForkService {
    system: System,
    run_dir: PathBuf,
    processes: Arc<Processes>,
    python: Arc<Python>,
    syncing: Syncing,
    file_systems: FileSystems,
    /// One freeze, thaw or change of identity at a time.
    turn: Mutex<()>,
    /// The last `Become` that was done.
    done: Mutex<Option<LastBecome>>,
}

/// The last request that was done. Its entropy distinguishes it from any other, in a copy of this guest too.
struct LastBecome {
    /// Without the time, which is another one whenever it is sent.
    request: BecomeRequest,
    warnings: Vec<String>,
}

impl ForkService {
    pub(crate) fn new(
        system: System,
        run_dir: PathBuf,
        processes: Arc<Processes>,
        python: Arc<Python>,
    ) -> Self {
        let syncing = Syncing::new(system.sync);
        let file_systems = FileSystems::new(system.file_systems);
        ForkService {
            system,
            run_dir,
            processes,
            python,
            syncing,
            file_systems,
            turn: Mutex::new(()),
            done: Mutex::default(),
        }
    }

    /// Stops all user processes in the time that `request` gives from when its first byte was read, at
    /// `received`. A request whose time is over when its turn comes is an error and changes nothing. One
    /// that is not `wanted` any more is undone: in a guest that got no CPU for long, the agent may read it
    /// after its caller left and had everything thawed, and no thaw would follow.
    ///
    /// The freeze alone decides. A sync only saves the children writes, because their memory and their disk are of
    /// one instant: it gets a part of the time, and what it does not manage is left to each child.
    pub(crate) fn freeze(
        &self,
        request: &FreezeRequest,
        received: Instant,
        wanted: impl Fn() -> bool,
    ) -> Result<FreezeResponse, Error> {
        let limit = match request.timeout_ms {
            0 => FREEZE_TIME,
            ms => Duration::from_millis(ms).min(MAX_FREEZE_TIME),
        };
        // Of everything, the wait for its turn included.
        let deadline = received + limit;
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        // Both before anything is touched: a later caller may need what stands still now.
        if !wanted() {
            return Err(Error::new(Code::Canceled, "the caller does not wait for the freeze any more"));
        }
        if Instant::now() >= deadline {
            let message = format!("the guest got to the freeze only after the {limit:?} it may take");
            return Err(Error::new(Code::DeadlineExceeded, message));
        }
        // A freeze that was not thawed: what is done below would wait for ever.
        self.file_systems.thaw();
        // Most of the writing while processes still run, so that they stand still for less long.
        let full = request.sync == FreezeSync::Full;
        match request.sync {
            FreezeSync::Skip => {}
            FreezeSync::Quick => self.sync(sooner(deadline, limit / 3), full),
            FreezeSync::Full => self.sync(sooner(deadline, limit / 3 * 2), full),
        }
        let left = deadline.saturating_duration_since(Instant::now());
        let frozen = match self.processes.cgroups.freeze(left) {
            Ok(frozen) => frozen,
            Err(error) => {
                log::error!("cannot freeze the user processes: {error}");
                false
            }
        };
        let mut clean = false;
        if frozen {
            // The files that every child writes first: written once here, they are in memory and
            // have their place on the disk, and a child changes one page of each.
            self.names().rehearse();
            // Data that the processes, and the line above, wrote since the first sync.
            let little = || (self.system.unsynced)().is_some_and(|bytes| bytes <= QUICK_SYNC_BYTES);
            match request.sync {
                FreezeSync::Full => self.sync(deadline, full),
                FreezeSync::Quick if little() => self.sync(sooner(deadline, QUICK_SYNC_TIME), full),
                FreezeSync::Quick | FreezeSync::Skip => {}
            }
            if request.file_systems {
                clean = self.file_systems.freeze_by(deadline).unwrap_or_else(|error| {
                    log::error!("cannot start to freeze the file systems: {error}");
                    false
                });
            }
            if !wanted() {
                self.file_systems.thaw();
                self.processes.cgroups.thaw().map_err(cannot("let the user processes run"))?;
                return Err(Error::new(
                    Code::Canceled,
                    "the caller left during the freeze, which was undone",
                ));
            }
        }
        Ok(FreezeResponse { frozen, file_systems: clean })
    }

    /// Makes the file systems clean, as far as that is done by `deadline`.
    fn sync(&self, deadline: Instant, join: bool) {
        if let Err(error) = self.syncing.finish_by(deadline, join) {
            log::error!("cannot start to sync the file systems: {error}");
        }
    }

    /// Lets user processes run on, and write.
    pub(crate) fn thaw(&self) -> Result<(), Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        self.file_systems.thaw();
        self.processes.cgroups.thaw().map_err(cannot("let the user processes run"))
    }

    /// Makes this guest the one that `request`, of which the first byte was read at `received`,
    /// describes. The same request again changes nothing and gets the same answer.
    pub(crate) fn become_child(
        &self,
        request: BecomeRequest,
        received: Instant,
    ) -> Result<BecomeResponse, Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        let asked = BecomeRequest { unix_nanos: 0, ..request.clone() };
        let request = CheckedBecome::new(request)?;
        // A caller that lost patience asks again: hooks and functions run once all the same.
        let mut done = self.done.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(done) = done.as_ref().filter(|done| done.request == asked) {
            return Ok(became(done.warnings.clone()));
        }
        let mut warnings = Vec::new();
        self.file_systems.thaw();

        // Nothing to do in a child of a frozen guest. A guest that runs is asked again, or was copied
        // without having been frozen.
        let frozen = self.processes.cgroups.freeze(REFREEZE_TIME).unwrap_or(false);
        if !frozen {
            warnings
                .push("user processes could not be frozen: some ran before this child was its own".into());
        }

        // First: whatever comes after it may need random numbers.
        (self.system.reseed)(&request.entropy).map_err(cannot("reseed the kernel's random numbers"))?;
        (self.system.set_clock)(request.sent_at + received.elapsed()).map_err(cannot("set the clock"))?;
        if let Err(error) = (self.system.set_hostname)(&request.hostname) {
            warnings.push(format!("the host name could not be set: {error}"));
        }
        let names = self.names();
        names.write(&request.hostname, &request.machine_id, &mut warnings);
        names.write_sandbox_id(&request.sandbox_id, &mut warnings);
        self.write_boot_id(&request.sandbox_id, &mut warnings);
        self.processes.variables.set(request.variables.clone());
        connections::reset(&self.processes.cgroups.pids(), frozen, &mut warnings);

        self.wake(&request, frozen, &mut warnings)?;
        *done = Some(LastBecome { request: asked, warnings: warnings.clone() });
        Ok(became(warnings))
    }

    /// Sets the sandbox id of a guest that was booted. No user process runs yet.
    pub(crate) fn name(&self, request: &NameRequest) -> Result<(), Error> {
        let _turn = self.turn.lock().unwrap_or_else(PoisonError::into_inner);
        check_sandbox_id(&request.sandbox_id)?;
        let variables = checked_variables(request.envs.clone(), &request.sandbox_id)?;
        let mut warnings = Vec::new();
        self.names().write_sandbox_id(&request.sandbox_id, &mut warnings);
        self.write_boot_id(&request.sandbox_id, &mut warnings);
        // A rollback to a branch of this boot keeps the keys.
        self.host_keys().belong_to(&request.sandbox_id, &mut warnings);
        for warning in warnings {
            log::error!("{warning}");
        }
        self.processes.variables.set(variables);
        Ok(())
    }

    fn write_boot_id(&self, sandbox_id: &str, warnings: &mut Vec<String>) {
        if let Some(Err(error)) = self.system.boot_id.as_ref().map(|id| id.become_that_of(sandbox_id)) {
            warnings.push(format!("the boot id could not be written: {error}"));
        }
    }

    fn names(&self) -> IdentityFiles<'_> {
        IdentityFiles { root: &self.system.root, run_dir: &self.run_dir }
    }

    fn host_keys(&self) -> HostKeys<'_> {
        HostKeys { root: &self.system.root, run_dir: &self.run_dir }
    }

    fn under_root(&self, path: &str) -> PathBuf {
        self.system.root.join(path.trim_start_matches('/'))
    }
}

/// A request whose every field can be used as it is.
#[derive(Debug)]
struct CheckedBecome {
    sandbox_id: String,
    hostname: String,
    machine_id: String,
    /// Since 1970.
    sent_at: Duration,
    entropy: Vec<u8>,
    /// The request's and [`SANDBOX_ID`].
    variables: BTreeMap<String, String>,
}

impl CheckedBecome {
    fn new(request: BecomeRequest) -> Result<Self, Error> {
        let BecomeRequest { sandbox_id, hostname, machine_id, unix_nanos, entropy, envs } = request;
        let wrong = |message: String| Err(Error::new(Code::InvalidArgument, message));
        check_sandbox_id(&sandbox_id)?;
        if !is_hostname(&hostname) {
            let rule = "1 to 63 letters, digits and hyphens, with no hyphen at either end";
            return wrong(format!("{hostname:?} is not a host name: {rule}"));
        }
        let is_digit = |b: u8| b.is_ascii_digit() || (b'a'..=b'f').contains(&b);
        if machine_id.len() != 32 || !machine_id.bytes().all(is_digit) {
            return wrong(format!("{machine_id:?} is not a machine id: 32 lower-case hexadecimal digits"));
        }
        if unix_nanos == 0 {
            return wrong("the host's time is missing: unixNanos".into());
        }
        let entropy = entropy.unwrap_or_default();
        if !ENTROPY.contains(&entropy.len()) {
            let (least, most) = (ENTROPY.start(), ENTROPY.end());
            return wrong(format!("entropy has {} bytes; it must have {least} to {most}", entropy.len()));
        }
        let variables = checked_variables(envs, &sandbox_id)?;
        let sent_at = Duration::from_nanos(unix_nanos);
        Ok(CheckedBecome { sandbox_id, hostname, machine_id, sent_at, entropy, variables })
    }
}

/// `variables` and [`SANDBOX_ID`].
fn checked_variables(
    mut variables: BTreeMap<String, String>,
    sandbox_id: &str,
) -> Result<BTreeMap<String, String>, Error> {
    process::check_variables(&variables)?;
    variables.insert(SANDBOX_ID.into(), sandbox_id.to_owned());
    if variables.iter().map(|(name, value)| name.len() + value.len() + 2).sum::<usize>() > MAX_VARIABLES {
        let message = format!("envs take more than {MAX_VARIABLES} bytes");
        return Err(Error::new(Code::InvalidArgument, message));
    }
    Ok(variables)
}

fn check_sandbox_id(id: &str) -> Result<(), Error> {
    if forkd_protocol::names::is_valid_sandbox_id(id) {
        return Ok(());
    }
    let message = format!("{id:?} is not a sandbox id: \"sb\", then letters and digits");
    Err(Error::new(Code::InvalidArgument, message))
}

/// A single label: such a name is safe in every file it is written to.
fn is_hostname(name: &str) -> bool {
    (1..=63).contains(&name.len())
        && name.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-')
        && !name.starts_with('-')
        && !name.ends_with('-')
}

/// The time in `part` from now, or `deadline` if that comes first.
fn sooner(deadline: Instant, part: Duration) -> Instant {
    deadline.min(Instant::now() + part)
}

fn became(warnings: Vec<String>) -> BecomeResponse {
    BecomeResponse { unix_nanos: unix_nanos(), python: Python::find().is_some(), warnings }
}

fn cannot(what: &str) -> impl FnOnce(io::Error) -> Error {
    move |cause| Error::new(Code::Internal, format!("the guest cannot {what}: {cause}"))
}

fn unix_nanos() -> u64 {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::Realtime);
    (now.tv_sec.max(0) as u64).saturating_mul(1_000_000_000).saturating_add(now.tv_nsec.max(0) as u64)
}

/// A warning with the file that could not be written.
fn complain(warnings: &mut Vec<String>, path: &Path, error: &io::Error) {
    warnings.push(format!("{} could not be written: {error}", path.display()));
}

#[cfg(test)]
pub(crate) mod tests;

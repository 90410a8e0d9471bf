//! The warm-up of an image: work that a parent does once, so that its children need not.

use std::{
    path::{Path, PathBuf},
    sync::{Arc, Mutex, OnceLock, PoisonError},
    thread,
    time::Duration,
};

use forkd_protocol::{
    agent::{ProcessConfig, StartRequest, WarmRequest, WarmState, WarmStatus},
    connect::Error,
};

use crate::{
    log,
    process::{self, ExitStatus, Listener, Next, Outcome, Processes},
    python::Python,
    users::User,
};

/// How much of the end of a failed command's output goes into the error.
const TAIL: usize = 4 << 10;
/// How often the ready file is looked for.
const TICK: Duration = Duration::from_millis(25);

/// Prints the version of a loaded numpy, without loading one.
const NUMPY_VERSION: &str = "getattr(__import__('sys').modules.get('numpy'), '__version__', None)";
/// How long that may take.
const VERSION_TIME: Duration = Duration::from_secs(5);
/// No version is longer.
const MAX_VERSION: usize = 64;

/// How far the warm-up is. Shared with the thread that does it.
#[derive(Clone, Default)]
pub(crate) struct Warm {
    status: Arc<Mutex<WarmStatus>>,
    /// The version of the numpy it imported: asked once here, so that no child has to.
    numpy: Arc<OnceLock<String>>,
}

/// The resources of a warm-up.
pub(crate) struct WarmContext {
    pub(crate) processes: Arc<Processes>,
    pub(crate) python: Arc<Python>,
    pub(crate) user: User,
    /// A folder of the agent's own.
    pub(crate) run_dir: PathBuf,
}

impl Warm {
    pub(crate) fn status(&self) -> WarmStatus {
        self.status.lock().unwrap_or_else(PoisonError::into_inner).clone()
    }

    pub(crate) fn numpy_version(&self) -> Option<String> {
        self.numpy.get().cloned()
    }

    fn set(&self, state: WarmState, error: Option<String>) {
        if let Some(error) = &error {
            log::error!("the warm-up failed: {error}");
        }
        *self.status.lock().unwrap_or_else(PoisonError::into_inner) = WarmStatus { state, error };
    }

    /// Starts the warm-up, unless it was started before, and returns its progress.
    pub(crate) fn start(&self, request: WarmRequest, workplace: WarmContext) -> WarmStatus {
        {
            let mut status = self.status.lock().unwrap_or_else(PoisonError::into_inner);
            if status.state != WarmState::Cold {
                return status.clone();
            }
            status.state = WarmState::Warming;
        }
        let warm = self.clone();
        let spawned = thread::Builder::new().name("warm-up".into()).spawn(move || {
            let done = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| workplace.warm(&request)));
            match done {
                Ok(Ok(numpy)) => {
                    if let Some(version) = numpy {
                        let _ = warm.numpy.set(version);
                    }
                    warm.set(WarmState::Ready, None);
                }
                Ok(Err(error)) => warm.set(WarmState::Failed, Some(error)),
                Err(_) => {
                    warm.set(WarmState::Failed, Some("the agent failed; its console has the reason".into()))
                }
            }
        });
        if let Err(error) = spawned {
            self.set(WarmState::Failed, Some(format!("the guest has no thread for it: {error}")));
        }
        self.status()
    }
}

impl WarmContext {
    /// The command first, the interpreter after it: the command may install what is imported.
    /// Gives the version of numpy, if that was imported.
    fn warm(&self, request: &WarmRequest) -> Result<Option<String>, String> {
        if let Some((cmd, args)) = request.command.split_first() {
            self.run_command(cmd, args, request.until_usable)?;
        }
        if request.until_usable {
            return Ok(None);
        }
        // An image with Python gets its interpreter started even with nothing to import: its start
        // is the first thing a child would otherwise wait for.
        if request.python.is_none() && Python::find().is_none() {
            return Ok(None);
        }
        self.python.start(&self.user).map_err(|error| error.message)?;
        let Some(code) = &request.python else { return Ok(None) };
        let response = self.python.eval(code, &self.user, None).map_err(|error| error.message)?;
        match response.error {
            None => Ok(self.numpy_version()),
            Some(error) => Err(response.traceback.unwrap_or(error)),
        }
    }

    fn numpy_version(&self) -> Option<String> {
        let version = self.python.eval(NUMPY_VERSION, &self.user, Some(VERSION_TIME)).ok()?;
        version.result_json?.as_str().filter(|version| version.len() <= MAX_VERSION).map(String::from)
    }

    fn run_command(&self, cmd: &str, args: &[String], until_usable: bool) -> Result<(), String> {
        let ready = self.ready_file().map_err(|error| format!("{}: {error}", self.run_dir.display()))?;
        let file = ("FORKD_READY_FILE".to_string(), ready.to_string_lossy().into_owned());
        let when = until_usable.then(|| ("FORKD_READY_WHEN".to_string(), "usable".to_string()));
        let envs = [file].into_iter().chain(when).collect();
        let process = ProcessConfig { cmd: cmd.into(), args: args.to_vec(), envs, cwd: None };
        let request = StartRequest { process, stdin: Some(false), ..StartRequest::default() };
        let started = self.processes.start(&request, &self.user, None);
        let (_, listener) = started.map_err(|Error { message, .. }| message)?;
        wait_until_ready(&listener, &ready).map_err(|error| format!("{cmd}: {error}"))
    }

    /// A path that the user can create, in a folder where no other user can.
    fn ready_file(&self) -> std::io::Result<PathBuf> {
        let folder = self.run_dir.join("warm");
        std::fs::create_dir_all(&folder)?;
        std::os::unix::fs::chown(&folder, Some(self.user.uid), Some(self.user.gid))?;
        let ready = folder.join("ready");
        match std::fs::remove_file(&ready) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => Ok(ready),
        }
    }
}

/// Waits for the command to exit with 0, or for its ready file while it goes on.
fn wait_until_ready(listener: &Listener, ready: &Path) -> Result<(), String> {
    let mut tail: Vec<u8> = Vec::new();
    loop {
        match listener.next(TICK) {
            Next::Piece((_, bytes)) => {
                tail.extend_from_slice(&bytes);
                tail.drain(..tail.len().saturating_sub(TAIL));
            }
            Next::End(Outcome::Ended(ExitStatus::Code(0))) => return Ok(()),
            Next::End(Outcome::Ended(status)) => {
                let tail = String::from_utf8_lossy(&tail);
                return Err(format!(
                    "{} before it was ready: {}",
                    process::describe(status),
                    tail.trim_end()
                ));
            }
            Next::End(Outcome::DeadlineExceeded) => return Err("took too long".into()),
            Next::Idle => {}
        }
        // As the agent, which may look anywhere: the folder is the user's own.
        if std::fs::symlink_metadata(ready).is_ok() {
            return Ok(());
        }
    }
}

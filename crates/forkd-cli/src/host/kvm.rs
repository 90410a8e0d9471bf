//! Whether `/dev/kvm` runs Linux. Opening it proves nothing: the monitor's `probe` runs a guest.

use std::fs::{self, OpenOptions};
use std::io::Read;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Command, Stdio};
use std::time::{Duration, Instant};

use anyhow::{Context, Result, bail};
use serde::{Deserialize, Serialize};

use crate::host::files;
use crate::host::process::boot_id;

/// The descriptor under which the probe finds `/dev/kvm`.
const KVM_FD: i32 = 3;
/// Who looks at a state: the user and the group that own nothing.
const NOBODY: u32 = 65534;
/// How long the probe may take.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// What is known of KVM on this computer.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Kvm {
    /// Whether `/dev/kvm` can be opened.
    pub(crate) opens: bool,
    /// Whether a guest of a few instructions ran.
    pub(crate) tiny_guest: bool,
    /// Whether Linux would run.
    pub(crate) runs_linux: bool,
    /// Why not, or how it was found out.
    pub(crate) reason: String,
}

impl Kvm {
    /// One sentence about it.
    pub(crate) fn describe(&self) -> String {
        match (self.runs_linux, self.opens) {
            (true, _) => "/dev/kvm runs guests".to_owned(),
            (false, true) => format!("/dev/kvm opens but does not run Linux: {}", self.reason),
            (false, false) => self.reason.clone(),
        }
    }
}

/// A result that holds until the next boot, or until the monitor changes.
#[derive(Debug, Serialize, Deserialize)]
struct Cached {
    boot_id: String,
    monitor: String,
    kvm: Kvm,
}

impl files::Record for Cached {}

/// Looks at KVM, or at what an earlier look gave in this boot. `cache` may be impossible to write.
pub(crate) fn probe_cached(vmm: &Path, cache: &Path) -> Result<Kvm> {
    let monitor = identity(vmm)?;
    if let Ok(Some(cached)) = files::read_record::<Cached>(cache)
        && cached.boot_id == boot_id()
        && cached.monitor == monitor
        // Whoever was not allowed to open it may be allowed by now.
        && cached.kvm.opens
    {
        return Ok(cached.kvm);
    }
    let kvm = look_now(vmm)?;
    let _ = files::write_record(cache, &Cached { boot_id: boot_id(), monitor, kvm: kvm.clone() });
    Ok(kvm)
}

/// Looks at KVM by running a guest.
pub(crate) fn look_now(vmm: &Path) -> Result<Kvm> {
    let device = match OpenOptions::new().read(true).write(true).open("/dev/kvm") {
        Ok(device) => device,
        Err(error) => return Ok(Kvm { reason: why_not_open(&error), ..Kvm::default() }),
    };
    probe(vmm, device.into()).with_context(|| format!("cannot check KVM with {}", vmm.display()))
}

fn why_not_open(error: &std::io::Error) -> String {
    match error.kind() {
        std::io::ErrorKind::NotFound => "there is no /dev/kvm".to_owned(),
        std::io::ErrorKind::PermissionDenied => {
            "this user may not open /dev/kvm (adding it to the group `kvm` helps)".to_owned()
        }
        _ => format!("/dev/kvm does not open: {error}"),
    }
}

/// Whether this computer could go on where a snapshot's guest stopped: by its CPU and by the version of
/// the state. `Ok(Err)` is why not.
pub(crate) fn check_state(vmm: &Path, state: &Path) -> Result<std::result::Result<(), String>> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
    let state = fs::File::open(state).with_context(|| format!("cannot read {}", state.display()))?;
    // A state may be any bytes. The monitor looks at it behind its walls; only root can have all of them.
    let nobody = NOBODY.to_string();
    let walls: &[&str] = match rustix::process::geteuid().is_root() {
        true => &["check", "--uid", &nobody, "--gid", &nobody],
        false => &["check"],
    };
    let (succeeded, _, errors) = ask_monitor(vmm, walls, device.into(), state.into())?;
    let why = errors.trim().trim_start_matches("forkd-vmm: ").to_owned();
    Ok(if succeeded { Ok(()) } else { Err(why) })
}

fn probe(vmm: &Path, device: OwnedFd) -> Result<Kvm> {
    let (succeeded, text, errors) = ask_monitor(vmm, &["probe"], device, Stdio::null())?;
    if !succeeded && text.trim().is_empty() {
        bail!("it failed: {}", errors.trim());
    }
    serde_json::from_str(&text).context("its answer is not what this version of forkd understands")
}

/// Runs the monitor for one question; whether it succeeded, and what it said.
fn ask_monitor(vmm: &Path, what: &[&str], device: OwnedFd, input: Stdio) -> Result<(bool, String, String)> {
    // Away from the number it is to get: duplicating a descriptor onto itself would leave it
    // marked as closed on exec.
    let device = rustix::io::fcntl_dupfd_cloexec(&device, KVM_FD + 1)?;
    let mut command = Command::new(vmm);
    command.args(what).stdin(input).stdout(Stdio::piped()).stderr(Stdio::piped());
    let raw = device.as_raw_fd();
    // SAFETY: dup2 is async-signal-safe, and `device` is open until after the spawn.
    unsafe {
        command.pre_exec(move || match libc::dup2(raw, KVM_FD) {
            -1 => Err(std::io::Error::last_os_error()),
            _ => Ok(()),
        });
    }
    let mut child = command.spawn()?;
    let started = Instant::now();
    let status = loop {
        if let Some(status) = child.try_wait()? {
            break status;
        }
        if started.elapsed() > PROBE_TIMEOUT {
            child.kill()?;
            child.wait()?;
            bail!("it gave no answer in {} s", PROBE_TIMEOUT.as_secs());
        }
        std::thread::sleep(Duration::from_millis(5));
    };
    // Both are far shorter than a pipe holds, so it could end without being read.
    let mut text = String::new();
    let mut errors = String::new();
    if let (Some(out), Some(err)) = (child.stdout.take(), child.stderr.take()) {
        out.take(64 << 10).read_to_string(&mut text)?;
        err.take(64 << 10).read_to_string(&mut errors)?;
    }
    Ok((status.success(), text, errors))
}

fn identity(file: &Path) -> Result<String> {
    let data = fs::metadata(file).with_context(|| format!("cannot read {}", file.display()))?;
    Ok(format!("{}:{}:{}.{}", data.ino(), data.len(), data.mtime(), data.mtime_nsec()))
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::fs::File;
    use std::os::unix::fs::PermissionsExt;

    fn fake_monitor(folder: &Path, script: &str) -> std::path::PathBuf {
        let path = folder.join("forkd-vmm");
        fs::write(&path, format!("#!/bin/sh\n{script}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
        path
    }

    #[test]
    fn a_cached_look_of_every_version_is_read_and_the_newest_is_written() {
        files::assert_golden::<Cached>("kvm");
    }

    #[test]
    fn the_probe_gets_the_device_and_its_answer_counts() {
        let folder = tempfile::tempdir().unwrap();
        let script = r#"[ -e /proc/self/fd/3 ] && echo '{"opens":true,"api_version":12,"tiny_guest":true,"runs_linux":false,"reason":"slow"}'"#;
        let vmm = fake_monitor(folder.path(), script);
        let kvm = probe(&vmm, File::open("/dev/null").unwrap().into()).unwrap();
        assert!(kvm.opens && kvm.tiny_guest && !kvm.runs_linux);
        assert_eq!(kvm.describe(), "/dev/kvm opens but does not run Linux: slow");
    }

    #[test]
    fn a_probe_that_fails_or_talks_nonsense_is_an_error_with_its_words() {
        let folder = tempfile::tempdir().unwrap();
        let null = || File::open("/dev/null").unwrap().into();
        let vmm = fake_monitor(folder.path(), "echo broken >&2; exit 3");
        assert!(probe(&vmm, null()).unwrap_err().to_string().contains("broken"));
        let vmm = fake_monitor(folder.path(), "echo nonsense");
        assert!(probe(&vmm, null()).is_err());
    }
}

//! Whether `/dev/kvm` can run Linux. Opening it proves nothing: the monitor's `probe` runs a guest.

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
/// The user and group that own nothing: the probe of a state runs as them.
const NOBODY: u32 = 65534;
/// The time limit of the probe.
const PROBE_TIMEOUT: Duration = Duration::from_secs(30);

/// The state of KVM on this host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub(crate) struct Kvm {
    /// Whether `/dev/kvm` can be opened.
    pub(crate) opens: bool,
    /// Whether a guest of a few instructions ran.
    pub(crate) tiny_guest: bool,
    /// Whether Linux would run.
    pub(crate) runs_linux: bool,
    /// The reason, or how the probe found out.
    pub(crate) reason: String,
}

impl Kvm {
    /// The state as one clause.
    pub(crate) fn describe(&self) -> String {
        match (self.runs_linux, self.opens) {
            (true, _) => "/dev/kvm runs guests".to_owned(),
            (false, true) => format!("/dev/kvm opens but does not run Linux: {}", self.reason),
            (false, false) => self.reason.clone(),
        }
    }
}

/// A result that is valid until the next boot, or until the monitor changes.
#[derive(Debug, Serialize, Deserialize)]
struct Cached {
    boot_id: String,
    monitor: String,
    kvm: Kvm,
}

impl files::Record for Cached {}

/// Probes KVM, or reads the result of an earlier probe in this boot. `cache` need not be writable.
pub(crate) fn probe_cached(vmm: &Path, cache: &Path) -> Result<Kvm> {
    let monitor = identity(vmm)?;
    if let Ok(Some(cached)) = files::read_record::<Cached>(cache)
        && cached.boot_id == boot_id()
        && cached.monitor == monitor
        // A user who was not allowed to open it may be allowed by now.
        && cached.kvm.opens
    {
        return Ok(cached.kvm);
    }
    let kvm = look_now(vmm)?;
    let _ = files::write_record(cache, &Cached { boot_id: boot_id(), monitor, kvm: kvm.clone() });
    Ok(kvm)
}

/// Probes KVM by running a guest.
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
            "this user may not open /dev/kvm (add it to the group `kvm`)".to_owned()
        }
        _ => format!("/dev/kvm does not open: {error}"),
    }
}

/// Whether this host can resume a snapshot's guest, according to its CPU and the version of the state.
/// `Ok(Err)` has the reason why it cannot.
pub(crate) fn check_state(vmm: &Path, state: &Path) -> Result<std::result::Result<(), String>> {
    let device = OpenOptions::new().read(true).write(true).open("/dev/kvm")?;
    let state = fs::File::open(state).with_context(|| format!("cannot read {}", state.display()))?;
    // A state may be any bytes, so the monitor reads it in its sandbox; only root can set up all of it.
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
    serde_json::from_str(&text).context("this version of forkd cannot parse its answer")
}

/// Runs the monitor for one probe; returns whether it succeeded, and its output.
fn ask_monitor(vmm: &Path, what: &[&str], device: OwnedFd, input: Stdio) -> Result<(bool, String, String)> {
    // Keep it away from its target number: dup2 of a descriptor onto itself would leave it
    // close-on-exec.
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
    // Both outputs are far shorter than a pipe holds, so the process could end before they were read.
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

//! SSH host keys: children that share them could be taken for each other.
//!
//! Every image with a server and keys of its own gets new ones in each child, of the kinds it had. They
//! belong to a sandbox id: a sandbox that is resumed or rolled back keeps its keys.

use std::{
    fs, io,
    path::{Path, PathBuf},
};

use rustix::process::{Pid, Signal};

use super::{complain, hooks::Runner};
use crate::sys;

/// Kinds of keys, the quickly made ones first.
const KINDS: [&str; 3] = ["ed25519", "ecdsa", "rsa"];
/// No process id and no sandbox id is longer.
const MAX_NAME: u64 = 256;

/// Where a guest keeps what belongs to its SSH server.
pub(super) struct HostKeys<'k> {
    /// The root of the file system with `etc` in it.
    pub(super) root: &'k Path,
    /// The agent's own folder.
    pub(super) run_dir: &'k Path,
}

impl HostKeys<'_> {
    /// The kinds of keys that are to be made new for a sandbox: none where there is no server.
    pub(super) fn due(&self, sandbox_id: &str) -> Vec<&'static str> {
        let is_file = |path: &Path| fs::symlink_metadata(path).is_ok_and(|known| known.is_file());
        if !self.root.join("usr/sbin/sshd").exists() {
            return Vec::new();
        }
        let kinds: Vec<_> = KINDS.into_iter().filter(|kind| is_file(&self.key(kind))).collect();
        match kinds.is_empty() || self.owner() == sandbox_id.as_bytes() {
            true => Vec::new(),
            false => kinds,
        }
    }

    /// Makes keys of these `kinds` and signals the server, which reloads when it is thawed.
    pub(super) fn renew(
        &self,
        kinds: &[&str],
        sandbox_id: &str,
        runner: &mut Runner,
        warnings: &mut Vec<String>,
    ) {
        let mut failed = Vec::new();
        for kind in kinds {
            if let Err(why) = self.make(kind, runner) {
                failed.push(kind);
                warnings.push(format!("no new SSH host key of the kind {kind}: {why}"));
            }
        }
        if failed.len() == kinds.len() {
            warnings.push("the SSH host keys are those of the snapshot, as in every child of it".into());
            return;
        }
        // The server can do without them, but a shared key does not prove its identity.
        for path in failed.iter().map(|kind| self.key(kind)) {
            let _ = fs::remove_file(public(&path));
            if let Err(error) = fs::remove_file(&path) {
                warnings.push(format!("{} could not be removed: {error}", path.display()));
            }
        }
        self.belong_to(sandbox_id, warnings);
        if let Err(error) = self.tell_server() {
            warnings
                .push(format!("the SSH server could not be signalled to load its new host keys: {error}"));
        }
    }

    /// Notes that the keys are those of a sandbox: it keeps them.
    pub(super) fn belong_to(&self, sandbox_id: &str, warnings: &mut Vec<String>) {
        if let Err(error) = fs::write(self.owner_file(), sandbox_id) {
            complain(warnings, &self.owner_file(), &error);
        }
    }

    /// Makes one key beside the old one and puts it in its place.
    fn make(&self, kind: &str, runner: &mut Runner) -> Result<(), String> {
        let (key, new) = (self.key(kind), self.root.join("etc/ssh/.forkd-host-key"));
        // An existing file makes the program ask, or fail.
        let _ = (fs::remove_file(&new), fs::remove_file(public(&new)));
        let place = new.to_str().ok_or("its path is not UTF-8")?;
        let made =
            runner.run(&self.root.join("usr/bin/ssh-keygen"), &["-q", "-t", kind, "-N", "", "-f", place]);
        let renamed = made.and_then(|()| {
            let moved = fs::rename(public(&new), public(&key)).and_then(|()| fs::rename(&new, &key));
            moved.map_err(|error| format!("{}: {error}", key.display()))
        });
        if renamed.is_err() {
            let _ = (fs::remove_file(&new), fs::remove_file(public(&new)));
        }
        renamed
    }

    /// Has the server read its keys again, if it runs and left its process id where servers do.
    fn tell_server(&self) -> io::Result<()> {
        let Ok(pid) = sys::read_small_file(&self.root.join("run/sshd.pid"), MAX_NAME) else { return Ok(()) };
        let pid = String::from_utf8_lossy(&pid).trim().parse().ok().and_then(Pid::from_raw);
        let Some(pid) = pid.filter(|pid| *pid != Pid::INIT) else { return Ok(()) };
        // The file may be older than the server.
        let name = fs::read(format!("/proc/{}/comm", pid.as_raw_nonzero())).unwrap_or_default();
        match name.trim_ascii_end() == b"sshd" {
            true => Ok(rustix::process::kill_process(pid, Signal::HUP)?),
            false => Ok(()),
        }
    }

    fn key(&self, kind: &str) -> PathBuf {
        self.root.join(format!("etc/ssh/ssh_host_{kind}_key"))
    }

    /// Holds the id of the sandbox that the keys were made for.
    fn owner_file(&self) -> PathBuf {
        self.run_dir.join("ssh-host-keys-of")
    }

    fn owner(&self) -> Vec<u8> {
        sys::read_small_file(&self.owner_file(), MAX_NAME).unwrap_or_default()
    }
}

/// The file of the public half of a key.
fn public(key: &Path) -> PathBuf {
    key.with_extension("pub")
}

//! The files with the machine's identity, and the one with its name servers.

use std::{
    fs::{self, File, OpenOptions, Permissions},
    io::{self, Write},
    os::unix::fs::{MetadataExt, OpenOptionsExt, PermissionsExt},
    path::{Path, PathBuf},
};

use super::complain;
use crate::sys;

/// Longer files are not ours to rewrite.
const LIMIT: u64 = 64 << 10;
/// At the end of the line in `/etc/hosts` that is ours.
const MARK: &str = "# forkd";

/// Where the names of a machine are kept.
pub(crate) struct IdentityFiles<'n> {
    /// The root of the file system with `etc` in it.
    pub(crate) root: &'n Path,
    /// The agent's own folder.
    pub(crate) run_dir: &'n Path,
}

impl IdentityFiles<'_> {
    fn etc(&self, name: &str) -> PathBuf {
        self.root.join("etc").join(name)
    }

    /// Writes host name and machine id where programs look for them.
    pub(crate) fn write(&self, hostname: &str, machine_id: &str, warnings: &mut Vec<String>) {
        let hosts = self.etc("hosts");
        // An unreadable file is left as it is.
        let with_us = read(&hosts).map(|known| with_entry(&known, hostname));
        for (path, content) in [
            (self.etc("hostname"), Ok(format!("{hostname}\n").into_bytes())),
            (self.etc("machine-id"), Ok(format!("{machine_id}\n").into_bytes())),
            (hosts, with_us),
        ] {
            if let Err(error) = content.and_then(|content| write_file(&path, &content)) {
                complain(warnings, &path, &error);
            }
        }
    }

    /// Writes the sandbox id where processes that are already running can look.
    pub(crate) fn write_sandbox_id(&self, id: &str, warnings: &mut Vec<String>) {
        let path = self.run_dir.join("sandbox-id");
        let written = fs::create_dir_all(self.run_dir).and_then(|()| write_file(&path, id.as_bytes()));
        if let Err(error) = written {
            complain(warnings, &path, &error);
        }
    }

    /// Rewrites the files with their present contents. So the pages that a child writes are in memory
    /// afterwards, and have their blocks on the disk.
    pub(crate) fn rehearse(&self) {
        for name in ["hostname", "machine-id", "hosts"] {
            let path = self.etc(name);
            // Any failure shows again in the child, which reports warnings to the daemon.
            if let (Ok(content), Some(mut file)) = (read(&path), open_own(&path)) {
                let _ = file.write_all(&content);
            }
        }
    }

    /// Gives a guest that was just booted what its image left open.
    pub(crate) fn complete(&self, hostname: &str) -> io::Result<()> {
        let (name, machine_id) = (self.etc("hostname"), self.etc("machine-id"));
        if !hostname.is_empty() {
            write_file(&name, format!("{hostname}\n").as_bytes())?;
        }
        // Images have none, or an empty one that asks for it to be filled in.
        if read(&machine_id)?.trim_ascii().is_empty() {
            let mut random = [0u8; 16];
            rustix::rand::getrandom(&mut random, rustix::rand::GetRandomFlags::empty())?;
            write_file(&machine_id, format!("{:032x}\n", u128::from_ne_bytes(random)).as_bytes())?;
        }
        Ok(())
    }
}

/// A file's content; nothing for a file that is not there.
fn read(path: &Path) -> io::Result<Vec<u8>> {
    match sys::read_small_file(path, LIMIT) {
        Ok(content) if content.len() as u64 == LIMIT => {
            Err(io::Error::new(io::ErrorKind::InvalidData, "it is too long"))
        }
        // A link that leads nowhere is not found either.
        Err(error) if error.kind() == io::ErrorKind::NotFound => Ok(Vec::new()),
        other => other,
    }
}

/// `/etc/hosts` with a line for `hostname` in place of the last name's.
fn with_entry(hosts: &[u8], hostname: &str) -> Vec<u8> {
    let mut content: Vec<u8> = hosts
        .split_inclusive(|byte| *byte == b'\n')
        .filter(|line| !line.trim_ascii_end().ends_with(MARK.as_bytes()))
        .flatten()
        .copied()
        .collect();
    if content.last().is_some_and(|byte| *byte != b'\n') {
        content.push(b'\n');
    }
    content.extend_from_slice(format!("127.0.1.1\t{hostname}\t{MARK}\n").as_bytes());
    content
}

/// Writes the name servers of a guest, in place of whatever the image has there: often a link into
/// a folder that only some other init would fill.
pub(crate) fn write_resolv_conf(root: &Path, servers: &[String]) -> io::Result<()> {
    let mut content = String::new();
    for server in servers {
        let address: std::net::IpAddr = server.parse().map_err(|_| {
            io::Error::new(io::ErrorKind::InvalidInput, format!("{server:?} is not an address"))
        })?;
        content.push_str(&format!("nameserver {address}\n"));
    }
    write_file(&root.join("etc/resolv.conf"), content.as_bytes())
}

/// Makes `path` a plain file with this content, whatever was there.
fn write_file(path: &Path, content: &[u8]) -> io::Result<()> {
    match open_own(path) {
        // In place: a new file would cost every child an inode, a block and the journal's records of them. No
        // process sees it half written, because user processes are frozen meanwhile.
        Some(mut file) => {
            file.write_all(content)?;
            file.set_len(content.len() as u64)
        }
        None => replace(path, content),
    }
}

/// Opens a plain file that has no other name.
fn open_own(path: &Path) -> Option<File> {
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY;
    let file = OpenOptions::new().write(true).custom_flags(flags).open(path).ok()?;
    file.metadata().ok().filter(|known| known.is_file() && known.nlink() == 1)?;
    Some(file)
}

/// Puts a new file where a link, nothing at all or something else was, in one step.
fn replace(path: &Path, content: &[u8]) -> io::Result<()> {
    let (Some(folder), Some(name)) = (path.parent(), path.file_name()) else {
        return Err(io::ErrorKind::InvalidInput.into());
    };
    let new = folder.join(format!(".{}.forkd", name.to_string_lossy()));
    let _ = fs::remove_file(&new);
    let made = OpenOptions::new().write(true).create_new(true).open(&new).and_then(|mut file| {
        file.set_permissions(Permissions::from_mode(0o644))?;
        file.write_all(content)?;
        fs::rename(&new, path)
    });
    if made.is_err() {
        let _ = fs::remove_file(&new);
    }
    made
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::symlink;

    use super::*;

    fn write(root: &Path) -> Vec<String> {
        let mut warnings = Vec::new();
        IdentityFiles { root, run_dir: root }.write("child-1", &"0a".repeat(16), &mut warnings);
        warnings
    }

    #[test]
    fn names_are_written_whatever_is_in_their_place() {
        for what in ["nothing", "file", "longer", "link", "dangling", "hard link"] {
            let root = tempfile::tempdir().unwrap();
            let etc = root.path().join("etc");
            fs::create_dir(&etc).unwrap();
            let other = root.path().join("other");
            if what != "dangling" {
                fs::write(&other, "the other's").unwrap();
            }
            for path in ["hostname", "machine-id", "hosts"].map(|name| etc.join(name)) {
                match what {
                    "file" => fs::write(path, "x").unwrap(),
                    "longer" => fs::write(path, "x".repeat(1000)).unwrap(),
                    "link" | "dangling" => symlink(&other, path).unwrap(),
                    "hard link" => fs::hard_link(&other, path).unwrap(),
                    _ => {}
                }
            }
            assert_eq!(write(root.path()), Vec::<String>::new(), "{what}");
            assert_eq!(fs::read_to_string(etc.join("hostname")).unwrap(), "child-1\n", "{what}");
            assert_eq!(fs::read_to_string(etc.join("machine-id")).unwrap(), "0a".repeat(16) + "\n", "{what}");
            assert!(fs::read_to_string(etc.join("hosts")).unwrap().contains("\tchild-1\t"), "{what}");
            for name in ["hostname", "machine-id", "hosts"] {
                assert!(fs::symlink_metadata(etc.join(name)).unwrap().is_file(), "{what} {name}");
            }
            assert_eq!(fs::read_dir(&etc).unwrap().count(), 3, "{what}: nothing is left behind");
            if what != "dangling" {
                assert_eq!(fs::read_to_string(other).unwrap(), "the other's", "{what}");
            }
        }
    }

    #[test]
    fn what_cannot_be_written_is_a_warning_that_names_the_file() {
        let root = tempfile::tempdir().unwrap();
        fs::write(root.path().join("etc"), "not a folder").unwrap();
        let warnings = write(root.path());
        assert_eq!(warnings.len(), 3);
        assert!(warnings[1].contains("etc/machine-id could not be written"), "{warnings:?}");
    }

    #[test]
    fn a_new_name_takes_the_place_of_the_last_one_in_hosts() {
        let first = with_entry(b"127.0.0.1 localhost", "one");
        assert_eq!(String::from_utf8_lossy(&first), "127.0.0.1 localhost\n127.0.1.1\tone\t# forkd\n");
        let second = with_entry(&first, "two");
        assert_eq!(String::from_utf8_lossy(&second), "127.0.0.1 localhost\n127.0.1.1\ttwo\t# forkd\n");
    }

    #[test]
    fn name_servers_are_written_even_through_a_dangling_link() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("etc")).unwrap();
        let path = root.path().join("etc/resolv.conf");
        symlink("../run/systemd/resolve/stub-resolv.conf", &path).unwrap();
        write_resolv_conf(root.path(), &["10.42.0.1".into(), "fe80::1".into()]).unwrap();
        assert_eq!(fs::read_to_string(&path).unwrap(), "nameserver 10.42.0.1\nnameserver fe80::1\n");
        assert!(write_resolv_conf(root.path(), &["10.42.0.1\noptions x".into()]).is_err());
    }
}

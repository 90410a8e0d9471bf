//! Paths: the data directory, the files in it, and forkd's programs.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};

/// The data directory of the system's daemon.
const SYSTEM_DATA_DIR: &str = "/var/lib/forkd";
/// The socket of the system's daemon.
const SYSTEM_SOCKET: &str = "/run/forkd/forkd.sock";

/// The data directory. Its path is absolute; it exists after [`DataDir::create`].
#[derive(Debug, Clone)]
pub(crate) struct DataDir {
    root: PathBuf,
    /// Whether it is the default: then the system's daemon may serve this user as well.
    is_default: bool,
    /// The daemon's socket and token file, if the user configured other places.
    socket: Option<PathBuf>,
    token_file: Option<PathBuf>,
}

impl DataDir {
    /// The given directory, or the default for this user.
    pub(crate) fn resolve(given: Option<PathBuf>) -> Result<Self> {
        let is_default = given.is_none();
        let root = match given {
            Some(path) if path.as_os_str().is_empty() => bail!("the data directory's name is empty"),
            Some(path) => path,
            None if is_root() => PathBuf::from(SYSTEM_DATA_DIR),
            None => user_data_dir()?,
        };
        let root =
            std::path::absolute(&root).with_context(|| format!("cannot resolve {}", root.display()))?;
        let is_default = is_default || root == Path::new(SYSTEM_DATA_DIR);
        Ok(DataDir { root, is_default, socket: None, token_file: None })
    }

    /// The same directory, with another socket or token file of the daemon.
    pub(crate) fn with_places(self, socket: Option<PathBuf>, token_file: Option<PathBuf>) -> Self {
        DataDir { socket, token_file, ..self }
    }

    pub(crate) fn root(&self) -> &Path {
        &self.root
    }

    /// Makes the directory if it is missing.
    pub(crate) fn create(&self) -> Result<()> {
        fs::create_dir_all(&self.root).with_context(|| {
            let path = self.root.display();
            format!("cannot make the data directory {path}; choose another with --data-dir or FORKD_DATA_DIR")
        })
    }

    /// The folder of the emulated machine.
    pub(crate) fn machine(&self) -> PathBuf {
        self.root.join("machine")
    }

    /// The socket of a daemon on this data directory.
    pub(crate) fn socket(&self) -> PathBuf {
        if let Some(socket) = &self.socket {
            socket.clone()
        } else if self.root == Path::new(SYSTEM_DATA_DIR) {
            PathBuf::from(SYSTEM_SOCKET)
        } else {
            self.root.join("forkd.sock")
        }
    }

    /// The sockets at which to search a daemon for this user, best first.
    pub(crate) fn sockets(&self) -> Vec<PathBuf> {
        let own = self.socket();
        let system = PathBuf::from(SYSTEM_SOCKET);
        if self.is_default && own != system { vec![own, system] } else { vec![own] }
    }

    /// The token file of a daemon on this data directory.
    pub(crate) fn token_file(&self) -> PathBuf {
        self.token_file.clone().unwrap_or_else(|| self.root.join("token"))
    }

    /// The token file of the daemon that listens on one of [`DataDir::sockets`].
    pub(crate) fn token_file_of(&self, socket: &Path) -> PathBuf {
        if socket == Path::new(SYSTEM_SOCKET) && self.token_file.is_none() {
            Path::new(SYSTEM_DATA_DIR).join("token")
        } else {
            self.token_file()
        }
    }

    /// The log of a daemon that a command started.
    pub(crate) fn daemon_log(&self) -> PathBuf {
        self.root.join("daemon.log")
    }

    /// The result of the last probe of `/dev/kvm`.
    pub(crate) fn kvm_cache(&self) -> PathBuf {
        self.root.join("kvm-probe.json")
    }
}

fn user_data_dir() -> Result<PathBuf> {
    let folder = |name: &str| std::env::var_os(name).map(PathBuf::from).filter(|path| path.is_absolute());
    if let Some(data) = folder("XDG_DATA_HOME") {
        return Ok(data.join("forkd"));
    }
    match folder("HOME") {
        Some(home) => Ok(home.join(".local/share/forkd")),
        None => bail!("HOME is not set, so there is no default data directory: give one with --data-dir"),
    }
}

/// Whether this process runs as root.
pub(crate) fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Whether this process may write to a file, or connect to a socket.
pub(crate) fn may_write(path: &Path) -> bool {
    rustix::fs::access(path, rustix::fs::Access::WRITE_OK).is_ok()
}

/// The programs of forkd, side by side.
#[derive(Debug, Clone)]
pub(crate) struct Binaries {
    /// This program.
    pub(crate) forkd: PathBuf,
    /// The monitor.
    pub(crate) vmm: PathBuf,
    /// The static init and agent.
    pub(crate) guest: PathBuf,
}

impl Binaries {
    /// Finds `forkd-vmm` and `forkd-guest` next to this program, or in `FORKD_BIN_DIR`.
    pub(crate) fn find() -> Result<Self> {
        let forkd = std::env::current_exe().context("cannot find this program's own file")?;
        // A rebuilt or upgraded binary leaves a running one with this suffix on its name.
        let name = forkd.to_string_lossy();
        let forkd = name.strip_suffix(" (deleted)").map(PathBuf::from).unwrap_or_else(|| forkd.clone());
        let folder = match std::env::var_os("FORKD_BIN_DIR") {
            Some(folder) => PathBuf::from(folder),
            None => forkd.parent().map(Path::to_path_buf).unwrap_or_default(),
        };
        let found = |name: &str| -> Result<PathBuf> {
            let path = folder.join(name);
            if !path.is_file() {
                bail!(
                    "{name} is missing in {}: it belongs next to forkd; build it with `make build` or \
                     reinstall forkd",
                    folder.display()
                );
            }
            Ok(path)
        };
        Ok(Binaries { vmm: found("forkd-vmm")?, guest: found("forkd-guest")?, forkd })
    }
}

/// The file of a program, as a shell finds it. Also searches folders of system programs that are not in
/// every user's PATH.
pub(crate) fn find_program(name: &str) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin", "/sbin", "/usr/bin"].map(PathBuf::from));
    folders
        .map(|folder| folder.join(name))
        .find(|file| file.is_file() && rustix::fs::access(file, rustix::fs::Access::EXEC_OK).is_ok())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_chosen_data_directory_has_its_own_socket_and_no_other() {
        let data = DataDir::resolve(Some("/srv/x".into())).unwrap();
        assert_eq!(data.sockets(), [PathBuf::from("/srv/x/forkd.sock")]);
        let system = DataDir::resolve(Some(SYSTEM_DATA_DIR.into())).unwrap();
        assert_eq!(system.sockets(), [PathBuf::from(SYSTEM_SOCKET)]);
    }

    #[test]
    fn a_daemon_that_was_told_to_listen_elsewhere_is_looked_for_there() {
        let data = DataDir::resolve(Some("/srv/x".into())).unwrap();
        let data = data.with_places(Some("/run/x.sock".into()), Some("/etc/token".into()));
        assert_eq!(data.sockets(), [PathBuf::from("/run/x.sock")]);
        assert_eq!(data.token_file_of(Path::new("/run/x.sock")), Path::new("/etc/token"));
    }

    #[test]
    fn a_relative_data_directory_becomes_absolute() {
        assert!(DataDir::resolve(Some("x".into())).unwrap().root().is_absolute());
        assert!(DataDir::resolve(Some("".into())).is_err());
    }

    #[test]
    fn programs_are_found_on_the_path() {
        assert!(find_program("sh").is_some());
        assert!(find_program("no-such-program-anywhere").is_none());
    }
}

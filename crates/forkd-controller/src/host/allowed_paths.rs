//! Files that requests name: only from allowed folders, wherever links lead.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::{Component, Path, PathBuf};

use rustix::fs::{Mode, OFlags};

use crate::config::Config;
use crate::error::{Code, Error, Result};

/// Opens a kernel for reading. Blocks.
pub(crate) fn kernel(config: &Config, path: &Path) -> Result<File> {
    open("kernel", path, &[config.data_dir.clone(), config.library_dir.clone()], config)
}

/// Opens a guest's disk for reading. The guest can read all of it, so the daemon's own files are excluded. Blocks.
pub(crate) fn disk(config: &Config, path: &Path) -> Result<File> {
    open("rootfs", path, &[config.library_dir.join("images")], config)
}

/// Opens a file in `own` or in one of the folders of `--allow-path`.
///
/// The path is resolved without opening the file, as that could have side effects. Then its real location is
/// checked, and the file that was checked is opened.
fn open(what: &str, path: &Path, own: &[PathBuf], config: &Config) -> Result<File> {
    let mut folders: Vec<&Path> = own.iter().chain(&config.allow_paths).map(PathBuf::as_path).collect();
    folders.dedup();
    if !path.is_absolute() {
        return Err(Error::invalid(format!("the {what}'s path must be absolute")));
    }
    let refused = || {
        let folders: Vec<String> = folders.iter().map(|it| it.display().to_string()).collect();
        let text = format!(
            "the daemon does not open {what} {} for clients; start it with --allow-path to add a folder",
            path.display()
        );
        let cause = format!("files can only come from {}", folders.join(", "));
        Err(Error::new(Code::PathNotAllowed, text).because(cause))
    };
    // A client does not learn whether a file outside of these folders exists.
    let elsewhere = !folders.iter().any(|folder| path.starts_with(folder));
    if path.components().any(|it| it == Component::ParentDir) {
        return refused();
    }
    let failed = |error: std::io::Error| {
        let code = match error.kind() {
            std::io::ErrorKind::NotFound => Code::PathNotFound,
            _ => Code::InvalidRequest,
        };
        Error::new(code, format!("cannot open {what} {}", path.display())).because(error)
    };
    let found = match rustix::fs::open(path, OFlags::PATH | OFlags::CLOEXEC, Mode::empty()) {
        Err(_) if elsewhere => return refused(),
        found => found.map_err(|error| failed(error.into()))?,
    };
    let found = File::from(found);
    let magic = PathBuf::from(format!("/proc/self/fd/{}", found.as_raw_fd()));
    let real = std::fs::read_link(&magic).map_err(failed)?;
    let inside = |folder: &Path| std::fs::canonicalize(folder).is_ok_and(|folder| real.starts_with(folder));
    if !folders.iter().any(|folder| inside(folder)) {
        return refused();
    }
    if !found.metadata().map_err(failed)?.is_file() {
        return Err(Error::invalid(format!("the {what} is not a regular file")));
    }
    File::open(magic).map_err(failed)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn no_link_and_no_detour_leads_out_of_the_folders() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for folder in ["data", "more", "else", "data/folder"] {
            std::fs::create_dir(at(folder)).unwrap();
        }
        for file in ["data/kernel", "more/kernel", "else/kernel"] {
            std::fs::write(at(file), file).unwrap();
        }
        let link = |to: &str, from: &str| std::os::unix::fs::symlink(at(to), at(from)).unwrap();
        link("else/kernel", "data/out");
        link("else", "data/way-out");
        link("more/kernel", "data/over");
        link("data", "else/way-in");
        link("nothing", "data/dangling");
        let config = Config { allow_paths: vec![at("more")], ..Config::new(at("data")) };
        let open = |name: &str| kernel(&config, &at(name));
        for (path, contents) in [
            ("data/kernel", "data/kernel"),
            ("more/kernel", "more/kernel"),
            ("data/over", "more/kernel"),
            ("else/way-in/kernel", "data/kernel"),
        ] {
            let mut text = String::new();
            open(path).unwrap().read_to_string(&mut text).unwrap();
            assert_eq!(text, contents);
        }
        for bad in [
            "else/kernel",
            "data/out",
            "data/way-out/kernel",
            "data/../else/kernel",
            "else/nothing",
            "data/../data/kernel",
        ] {
            let error = open(bad).unwrap_err();
            assert_eq!(error.code(), Code::PathNotAllowed, "{bad}: {error}");
        }
        for bad in ["data/none", "data/dangling"] {
            assert_eq!(open(bad).unwrap_err().code(), Code::PathNotFound, "{bad}");
        }
        assert!(open("data/folder").unwrap_err().public().contains("regular file"));
        assert!(kernel(&config, Path::new("kernel")).is_err());
        // A folder whose name begins with that of an allowed one is not allowed.
        std::fs::create_dir(at("data-too")).unwrap();
        std::fs::write(at("data-too/kernel"), "").unwrap();
        assert_eq!(open("data-too/kernel").unwrap_err().code(), Code::PathNotAllowed);
    }

    #[test]
    fn no_guest_gets_what_the_daemon_keeps_for_a_disk() {
        let place = tempfile::tempdir().unwrap();
        let at = |name: &str| place.path().join(name);
        for folder in ["data/images/python", "more"] {
            std::fs::create_dir_all(at(folder)).unwrap();
        }
        for file in ["data/images/python/disk.ext4", "more/disk.ext4", "data/forkd.db", "data/token"] {
            std::fs::write(at(file), file).unwrap();
        }
        std::os::unix::fs::symlink(at("data/forkd.db"), at("more/link")).unwrap();
        let config = Config { allow_paths: vec![at("more")], ..Config::new(at("data")) };
        for good in ["data/images/python/disk.ext4", "more/disk.ext4"] {
            disk(&config, &at(good)).unwrap();
        }
        for bad in ["data/forkd.db", "data/token", "more/link", "data/images/../forkd.db"] {
            let error = disk(&config, &at(bad)).unwrap_err();
            assert_eq!(error.code(), Code::PathNotAllowed, "{bad}: {error}");
        }
    }
}

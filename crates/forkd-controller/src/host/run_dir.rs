//! The run directory, with the folders of sandboxes and templates. It is in memory, because nothing in it outlives
//! the host's boot.
//!
//! Each child has a handful of small files, created and removed by the thousand. On a disk that is slow: file
//! systems take long to find room for a new file where many were just deleted. A guest's disk, which must survive
//! a boot, is in the data directory.

use std::os::unix::fs::{DirBuilderExt, MetadataExt, PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::{fs, io};

use crate::error::{Error, Result};
use crate::util::random::new_id;

/// The link in the data directory that leads to the run directory.
const LINK: &str = "run";
/// The link in the run directory that leads back to its data directory.
const BACK: &str = "data";

/// The folder for the folders of sandboxes.
pub(crate) fn sandboxes(place: &Path) -> PathBuf {
    place.join("sandboxes")
}

/// The folder for the folders of templates.
pub(crate) fn templates(place: &Path) -> PathBuf {
    place.join("templates")
}

/// The run directory of `data_dir`: the one its link leads to, or a new one. Its name is random: a name derived
/// from the data directory could match that of another daemon, after the first data directory is gone.
pub(crate) fn open(data_dir: &Path) -> Result<PathBuf> {
    let failed = |path: &Path, error: io::Error| Error::host(format!("cannot use {}", path.display()), error);
    // After a boot of the host there is none, and nothing to adopt, either.
    if let Ok(place) = fs::read_link(data_dir.join(LINK))
        && check_ours(&place).is_ok()
    {
        lead_back(&place, data_dir);
        return Ok(place);
    }
    let Some(base) = candidates().into_iter().find(|base| is_in_memory(base)) else {
        return Ok(data_dir.to_owned());
    };
    let place = base.join(new_id("forkd-")?);
    fs::DirBuilder::new().mode(0o700).create(&place).map_err(|error| failed(&place, error))?;
    lead_back(&place, data_dir);
    link(data_dir, &place).map_err(|error| failed(&data_dir.join(LINK), error))?;
    Ok(place)
}

/// Removes the run directory, if it is empty.
pub(crate) fn close(data_dir: &Path, run_dir: &Path) {
    if run_dir == data_dir {
        return;
    }
    for part in ["netns", "sandboxes", "templates"] {
        let _ = fs::remove_dir(run_dir.join(part));
    }
    let only_back = |entries: fs::ReadDir| entries.flatten().all(|entry| entry.file_name() == BACK);
    if fs::read_dir(run_dir).is_ok_and(only_back) {
        let _ = fs::remove_file(run_dir.join(BACK));
    }
    if fs::remove_dir(run_dir).is_ok() {
        let _ = fs::remove_file(data_dir.join(LINK));
    }
}

/// Makes the link back to the data directory. A run directory without it works, but clean-up leaves it alone.
fn lead_back(place: &Path, data_dir: &Path) {
    if let Ok(data_dir) = std::path::absolute(data_dir) {
        let _ = symlink(data_dir, place.join(BACK));
    }
}

fn candidates() -> Vec<PathBuf> {
    let own = std::env::var_os("XDG_RUNTIME_DIR").map(PathBuf::from);
    let run = if rustix::process::geteuid().is_root() { Some("/run".into()) } else { own };
    run.into_iter().chain([PathBuf::from("/dev/shm")]).collect()
}

fn is_in_memory(folder: &Path) -> bool {
    const TMPFS: i64 = 0x0102_1994;
    rustix::fs::statfs(folder).is_ok_and(|kind| kind.f_type == TMPFS)
}

/// Fails unless only our user can use the folder: every user may create folders in `/dev/shm`.
fn check_ours(place: &Path) -> io::Result<()> {
    let found = fs::symlink_metadata(place)?;
    let ours = found.uid() == rustix::process::geteuid().as_raw();
    if found.is_dir() && ours && found.permissions().mode() & 0o077 == 0 {
        return Ok(());
    }
    Err(io::Error::other("another user owns it or may use it; remove it and start again"))
}

fn link(data_dir: &Path, place: &Path) -> io::Result<()> {
    let new = data_dir.join(".run.new");
    let _ = fs::remove_file(&new);
    symlink(place, &new)?;
    fs::rename(new, data_dir.join(LINK))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_place_is_the_same_each_time_ours_alone_and_goes_when_empty() {
        let data = tempfile::tempdir().unwrap();
        let place = open(data.path()).unwrap();
        if place == data.path() {
            eprintln!("NOT RUN: no file system in memory here");
            return;
        }
        assert_eq!(open(data.path()).unwrap(), place);
        assert_eq!(fs::read_link(data.path().join(LINK)).unwrap(), place);
        assert_eq!(fs::read_link(place.join(BACK)).unwrap(), data.path());
        fs::create_dir_all(place.join("sandboxes/sb1")).unwrap();
        close(data.path(), &place);
        assert!(place.join("sandboxes/sb1").exists(), "a run directory with a sandbox in it stays");
        fs::remove_dir(place.join("sandboxes/sb1")).unwrap();
        close(data.path(), &place);
        assert!(!place.exists() && fs::symlink_metadata(data.path().join(LINK)).is_err());
    }

    #[test]
    fn no_two_data_directories_share_a_place_and_a_lost_one_is_made_anew() {
        let (one, two) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
        let (first, second) = (open(one.path()).unwrap(), open(two.path()).unwrap());
        assert_ne!(first, second);
        if first == one.path() {
            return;
        }
        fs::remove_dir_all(&first).unwrap();
        let anew = open(one.path()).unwrap();
        assert!(anew != first && anew.is_dir());
        close(one.path(), &anew);
        close(two.path(), &second);
    }

    #[test]
    fn a_place_that_others_may_use_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o755)).unwrap();
        assert!(check_ours(folder.path()).is_err());
        fs::set_permissions(folder.path(), fs::Permissions::from_mode(0o700)).unwrap();
        check_ours(folder.path()).unwrap();
        let link = folder.path().join("link");
        symlink(folder.path(), &link).unwrap();
        assert!(check_ours(&link).is_err());
    }
}

//! Checks of features of the data directory's file system, on an unnamed file.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::path::Path;

use rustix::fs::{AtFlags, CWD, FallocateFlags, Mode, OFlags, SeekFrom};

use super::Check;
use crate::host::paths::DataDir;

const NAME: &str = "file-system";
const ELSEWHERE: &str = "choose a place on ext4, xfs or btrfs with --data-dir or FORKD_DATA_DIR";

pub(super) fn features(data: &DataDir) -> Check {
    // The data directory is created on demand: until then its parent folder is checked.
    let Some(folder) = data.root().ancestors().find(|path| path.is_dir()) else {
        return Check::skip(NAME, "there is no folder to check");
    };
    let flags = OFlags::TMPFILE | OFlags::RDWR | OFlags::CLOEXEC;
    let file = match rustix::fs::open(folder, flags, Mode::RUSR | Mode::WUSR) {
        Ok(file) => File::from(file),
        Err(rustix::io::Errno::ACCESS | rustix::io::Errno::ROFS | rustix::io::Errno::PERM) => {
            return Check::skip(NAME, format!("this user may not write to {}", folder.display()));
        }
        Err(error) => {
            let detail = format!("cannot create unnamed files (O_TMPFILE): {error}; sandboxes need them");
            return Check::fail(NAME, detail, ELSEWHERE).essential();
        }
    };
    let tried = [
        ("holes (SEEK_HOLE)", holes(&file)),
        ("punching holes (fallocate)", punching(&file)),
        ("naming a file later (link)", folder != data.root() || naming(&file, folder)),
    ];
    let missing: Vec<_> = tried.iter().filter(|(_, works)| !works).map(|(name, _)| *name).collect();
    if missing.is_empty() {
        return Check::pass(NAME, "unnamed files, holes, punching holes and naming files later work");
    }
    Check::warn(NAME, format!("lacks: {}; snapshots take more space and time", missing.join(", ")), ELSEWHERE)
}

/// Whether the file system reports holes.
fn holes(file: &File) -> bool {
    const FAR: u64 = 1 << 20;
    let written = std::os::unix::fs::FileExt::write_all_at(file, &[1; 4096], FAR);
    written.is_ok() && rustix::fs::seek(file, SeekFrom::Data(0)).is_ok_and(|at| at == FAR)
}

fn punching(file: &File) -> bool {
    let flags = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
    rustix::fs::fallocate(file, flags, 1 << 20, 4096).is_ok()
}

/// Whether an unnamed file can get a name. The name is removed at once.
fn naming(file: &File, folder: &Path) -> bool {
    let source = format!("/proc/self/fd/{}", file.as_raw_fd());
    let name = folder.join(format!(".forkd-doctor-{}", std::process::id()));
    let linked = rustix::fs::linkat(CWD, source.as_str(), CWD, &name, AtFlags::SYMLINK_FOLLOW).is_ok();
    linked && std::fs::remove_file(name).is_ok()
}

#[cfg(test)]
mod tests {
    use super::super::CheckStatus;
    use super::*;

    #[test]
    fn looking_at_a_file_system_leaves_nothing_behind() {
        let folder = tempfile::tempdir().unwrap();
        let data = DataDir::resolve(Some(folder.path().to_path_buf())).unwrap();
        let check = features(&data);
        assert_ne!(check.status, CheckStatus::Skip, "{check:?}");
        assert_eq!(std::fs::read_dir(folder.path()).unwrap().count(), 0);
    }
}

//! The root of the kernel's files: `/` or, in tests, a fake folder.

use std::path::PathBuf;

/// A file system that contains `proc` and `sys`.
#[derive(Debug)]
pub(super) struct Root(PathBuf);

impl Root {
    /// The root of this host.
    pub(super) fn host() -> Root {
        Root("/".into())
    }

    /// The trimmed text of a file; `None` if it cannot be read. A missing file is not an error: the kernel lacks
    /// the feature.
    pub(super) fn read(&self, path: &str) -> Option<String> {
        let text = std::fs::read_to_string(self.0.join(path.trim_start_matches('/'))).ok()?;
        Some(text.trim().to_owned())
    }

    /// The number in a file; `None` if there is no file, or no number in it.
    pub(super) fn number(&self, path: &str) -> Option<u64> {
        self.read(path)?.parse().ok()
    }

    /// The kernel's version, for comparison.
    pub(super) fn kernel(&self) -> Option<(u32, u32)> {
        super::host::kernel_version(&self.read("/proc/sys/kernel/osrelease")?)
    }

    /// The mounts of a file system type: path and options of each.
    pub(super) fn mounts(&self, kind: &str) -> Vec<(String, String)> {
        let table = self.read("/proc/self/mountinfo").unwrap_or_default();
        let mount = |line: &str| {
            let (before, after) = line.split_once(" - ")?;
            let mut after = after.split(' ');
            let place = before.split(' ').nth(4)?.to_owned();
            (after.next() == Some(kind)).then(|| (place, after.nth(1).unwrap_or_default().to_owned()))
        };
        table.lines().filter_map(mount).collect()
    }
}

/// For tests: a host with these files.
#[cfg(test)]
pub(super) struct FakeHost {
    folder: tempfile::TempDir,
}

#[cfg(test)]
impl FakeHost {
    /// One that has no file at all.
    pub(super) fn new() -> FakeHost {
        FakeHost { folder: tempfile::tempdir().unwrap() }
    }

    /// The same with one more file.
    pub(super) fn with(self, path: &str, text: &str) -> FakeHost {
        let path = self.folder.path().join(path.trim_start_matches('/'));
        std::fs::create_dir_all(path.parent().unwrap()).unwrap();
        // As the kernel writes them.
        std::fs::write(path, format!("{text}\n")).unwrap();
        self
    }

    pub(super) fn root(&self) -> Root {
        Root(self.folder.path().to_path_buf())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mounts_are_found_by_their_kind_with_their_options() {
        let host = FakeHost::new().with(
            "/proc/self/mountinfo",
            "23 1 0:21 / /proc rw shared:5 - proc proc rw\n\
             31 24 0:27 / /sys/fs/cgroup rw,nosuid shared:9 - cgroup2 cgroup2 rw,nsdelegate,favordynmods\n\
             nonsense",
        );
        let found = [("/sys/fs/cgroup".to_owned(), "rw,nsdelegate,favordynmods".to_owned())];
        assert_eq!(host.root().mounts("cgroup2"), found);
        assert!(host.root().mounts("debugfs").is_empty());
        assert!(FakeHost::new().root().mounts("cgroup2").is_empty());
    }
}

//! Free space on a disk, and which errors mean that there is none.

use std::io;
use std::path::Path;

/// Bytes that unprivileged processes can still write to the file system of `folder`.
pub(crate) fn free(folder: &Path) -> io::Result<u64> {
    let stat = rustix::fs::statvfs(folder)?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}

/// Whether an error text means that a disk or a disk quota is full. A saver can only report text.
pub(crate) fn is_shortage(text: &str) -> bool {
    let errors = [rustix::io::Errno::NOSPC, rustix::io::Errno::DQUOT];
    errors.iter().any(|error| text.contains(&format!("(os error {})", error.raw_os_error())))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_a_full_disk_or_quota_is_a_shortage() {
        for (error, shortage) in
            [(libc::ENOSPC, true), (libc::EDQUOT, true), (libc::EIO, false), (libc::EROFS, false)]
        {
            let text = format!("cannot write a layer: {}", io::Error::from_raw_os_error(error));
            assert_eq!(is_shortage(&text), shortage, "{text}");
        }
    }
}

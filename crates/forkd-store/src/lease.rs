//! Whether a process still has a file open for writing.
//!
//! A mode stops a process that opens a file later, not one that has it open. The kernel grants a read lease
//! only on a file that no process has open, or mapped, for writing: asking for one is the question.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::time::{Duration, Instant};

use rustix::io::Errno;

use crate::dir::reopen;

/// How long a writer that is about to close the file may take: a process that ends, or one that has just
/// answered. Anything longer is no accident.
const WRITER_TIMEOUT: Duration = Duration::from_millis(if cfg!(test) { 100 } else { 2000 });
/// How often the kernel is asked meanwhile.
const POLL_INTERVAL: Duration = Duration::from_millis(5);
/// Chooses the signal of a lease. The `libc` crate does not have it.
const F_SETSIG: libc::c_int = 10;

/// Whether a process can write to a file through a descriptor or a mapping.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Writers {
    /// No process.
    None,
    /// At least one process: maybe the caller itself.
    Some,
    /// The file system cannot answer; the reason.
    Unknown(String),
}

/// Whether a process can write to `file`, a regular file. Waits a moment for writers that are about to close
/// it.
pub fn writers(file: &File) -> io::Result<Writers> {
    // The lease, and the signal chosen for it, go with this descriptor.
    let file = reopen(file)?;
    let begun = Instant::now();
    loop {
        match lease(&file) {
            Ok(()) => return Ok(Writers::None),
            Err(Errno::AGAIN) if begun.elapsed() < WRITER_TIMEOUT => std::thread::sleep(POLL_INTERVAL),
            Err(Errno::AGAIN) => return Ok(Writers::Some),
            Err(error) => return Ok(Writers::Unknown(io::Error::from(error).to_string())),
        }
    }
}

/// Takes a read lease on `file` and gives it back.
fn lease(file: &File) -> rustix::io::Result<()> {
    // If a process opens the file for writing right now, the kernel signals the holder of the lease. SIGIO, its
    // choice, would end this process; SIGURG is ignored.
    fcntl(file, F_SETSIG, libc::SIGURG)?;
    fcntl(file, libc::F_SETLEASE, libc::F_RDLCK)?;
    fcntl(file, libc::F_SETLEASE, libc::F_UNLCK)
}

fn fcntl(file: &File, command: libc::c_int, argument: libc::c_int) -> rustix::io::Result<()> {
    // SAFETY: both commands take a number, and touch no memory of this process.
    match unsafe { libc::fcntl(file.as_raw_fd(), command, argument) } {
        -1 => Err(Errno::from_io_error(&io::Error::last_os_error()).unwrap_or(Errno::IO)),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_has_writers_as_long_as_a_descriptor_or_a_mapping_is_left() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let writer = File::create_new(&path).unwrap();
        writer.set_len(4096).unwrap();
        let file = File::open(&path).unwrap();
        if let Writers::Unknown(why) = writers(&file).unwrap() {
            eprintln!("NOT RUN: no leases in {} ({why})", folder.path().display());
            return;
        }
        let kept = writer.try_clone().unwrap();
        drop(writer);
        assert_eq!(writers(&file).unwrap(), Writers::Some);
        drop(kept);
        assert_eq!(writers(&file).unwrap(), Writers::None);
        assert_eq!(writers(&file).unwrap(), Writers::None, "readers do not count");

        let mapped = File::options().read(true).write(true).open(&path).unwrap();
        let (len, prot) = (4096, rustix::mm::ProtFlags::READ | rustix::mm::ProtFlags::WRITE);
        // SAFETY: a new mapping, which is unmapped below and never looked into.
        let map = unsafe {
            rustix::mm::mmap(std::ptr::null_mut(), len, prot, rustix::mm::MapFlags::SHARED, &mapped, 0)
        };
        let map = map.unwrap();
        drop(mapped);
        assert_eq!(writers(&file).unwrap(), Writers::Some);
        // SAFETY: the mapping made above.
        unsafe { rustix::mm::munmap(map, len) }.unwrap();
        assert_eq!(writers(&file).unwrap(), Writers::None);
    }

    #[test]
    fn a_writer_that_closes_a_moment_later_is_waited_for() {
        let folder = tempfile::tempdir().unwrap();
        let writer = File::create_new(folder.path().join("file")).unwrap();
        let file = File::open(folder.path().join("file")).unwrap();
        let closing = std::thread::spawn(move || drop(writer));
        assert_ne!(writers(&file).unwrap(), Writers::Some);
        closing.join().unwrap();
    }
}

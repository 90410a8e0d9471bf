//! The machine-wide state: clock, host name, random numbers, file systems. Behind functions that can be
//! replaced, so that a test of the rest does not change the machine it runs on.

use std::{
    fs::{self, File, OpenOptions},
    io,
    os::fd::{AsFd, AsRawFd},
    path::PathBuf,
    time::Duration,
};

use rustix::time::{ClockId, Timespec};

use super::BootId;

/// Access to the machine itself.
pub struct System {
    /// The root of the file system with `etc` in it.
    pub root: PathBuf,
    /// The boot id that programs read; `None` leaves them the kernel's.
    pub boot_id: Option<BootId>,
    /// Makes the kernel's random numbers depend on these bytes from now on.
    pub reseed: fn(&[u8]) -> io::Result<()>,
    /// Sets the wall clock to a time since 1970.
    pub set_clock: fn(Duration) -> io::Result<()>,
    /// Sets the host name.
    pub set_hostname: fn(&str) -> io::Result<()>,
    /// Writes to the disk what is not there yet. Takes as long as that takes.
    pub sync: fn(),
    /// How many bytes that would be; `None` if unknown.
    pub unsynced: fn() -> Option<u64>,
    /// Freezing of file systems.
    pub file_systems: FileSystemCalls,
}

/// How file systems are found, frozen and thawed.
#[derive(Debug, Clone, Copy)]
pub struct FileSystemCalls {
    /// The mounts, as in `/proc/self/mountinfo`.
    pub mounts: fn() -> io::Result<String>,
    /// Writes everything to the disk that a file system is on, and keeps processes from writing to it. Takes as long
    /// as that takes.
    pub freeze: fn(&File) -> io::Result<()>,
    /// Lets processes write again.
    pub thaw: fn(&File) -> io::Result<()>,
}

impl FileSystemCalls {
    /// Of this machine.
    fn of_machine() -> Self {
        FileSystemCalls {
            mounts: || fs::read_to_string("/proc/self/mountinfo"),
            freeze: |file_system| ioctl(file_system, FREEZE, std::ptr::null_mut()),
            thaw: |file_system| ioctl(file_system, THAW, std::ptr::null_mut()),
        }
    }
}

impl System {
    /// The guest this program is PID 1 of.
    pub fn guest() -> Self {
        System {
            root: "/".into(),
            boot_id: None,
            reseed,
            set_clock,
            set_hostname: |name| Ok(rustix::system::sethostname(name.as_bytes())?),
            sync: rustix::fs::sync,
            unsynced: || unsynced(&fs::read_to_string("/proc/meminfo").ok()?),
            file_systems: FileSystemCalls::of_machine(),
        }
    }
}

/// `RNDADDENTROPY` and `RNDRESEEDCRNG` of `linux/random.h`.
const ADD_ENTROPY: u32 = 0x4008_5203;
const RESEED: u32 = 0x5207;
/// `FIFREEZE` and `FITHAW` of `linux/fs.h`.
const FREEZE: u32 = 0xc004_5877;
const THAW: u32 = 0xc004_5878;

fn reseed(entropy: &[u8]) -> io::Result<()> {
    let device = OpenOptions::new().write(true).open("/dev/urandom")?;
    let words = entropy.len().div_ceil(4);
    // How many bits it is worth, how many bytes it has, the bytes.
    let bytes = i32::try_from(words * 4).map_err(io::Error::other)?;
    let mut message = vec![0u32; 2 + words];
    message[0] = (bytes as u32).saturating_mul(8);
    message[1] = bytes as u32;
    for (word, piece) in message[2..].iter_mut().zip(entropy.chunks(4)) {
        let mut padded = [0; 4];
        padded[..piece.len()].copy_from_slice(piece);
        *word = u32::from_ne_bytes(padded);
    }
    ioctl(&device, ADD_ENTROPY, message.as_mut_ptr().cast())?;
    // Without this a generator that was ready before the fork uses its old key for up to a minute.
    ioctl(&device, RESEED, std::ptr::null_mut())
}

fn ioctl(device: impl AsFd, number: u32, argument: *mut libc::c_void) -> io::Result<()> {
    // SAFETY: one caller passes a structure with its length in the second word, in memory of its own that
    // lives through the call; the other requests take no argument.
    let done = unsafe { libc::ioctl(device.as_fd().as_raw_fd(), number as _, argument) };
    if done < 0 { Err(io::Error::last_os_error()) } else { Ok(()) }
}

fn set_clock(since_1970: Duration) -> io::Result<()> {
    let time = Timespec {
        tv_sec: i64::try_from(since_1970.as_secs()).map_err(io::Error::other)?,
        tv_nsec: since_1970.subsec_nanos().into(),
    };
    Ok(rustix::time::clock_settime(ClockId::Realtime, time)?)
}

/// The dirty bytes of a machine with this `/proc/meminfo`, those on their way to the disk included.
fn unsynced(meminfo: &str) -> Option<u64> {
    let kib = |name: &str| {
        let line = meminfo.lines().find_map(|line| line.strip_prefix(name))?;
        line.strip_prefix(':')?.trim().strip_suffix("kB")?.trim().parse::<u64>().ok()
    };
    kib("Dirty")?.checked_add(kib("Writeback")?)?.checked_mul(1024)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dirty_bytes_are_those_that_wait_and_those_on_their_way() {
        let table = "MemTotal:  1 kB\nDirty:    12 kB\nWriteback:     3 kB\nWritebackTmp:   9 kB\n";
        assert_eq!(unsynced(table), Some(15 << 10));
        assert_eq!(unsynced("Dirty: 12 kB\n"), None);
        assert_eq!(unsynced("Dirty: many kB\nWriteback: 1 kB\n"), None);
        assert!((System::guest().unsynced)().is_some());
    }
}

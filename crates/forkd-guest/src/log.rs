//! Lines on the console: what happened to the guest itself, never what its processes print.

use std::{
    fmt::Arguments,
    fs::{File, OpenOptions},
    io::Write,
    sync::OnceLock,
};

/// How loud a line is, with the kernel's numbers: `quiet` guests show only errors.
#[derive(Clone, Copy)]
pub(crate) enum Level {
    Error = 3,
    Info = 6,
}

static KERNEL_LOG: OnceLock<File> = OnceLock::new();

/// Sends all further lines to the kernel's log, which keeps them in order with the kernel's own and
/// never blocks on a slow console. Before that, and in tests, they go to standard error.
pub(crate) fn use_kernel_log() {
    // The default limit of ten lines in five seconds would swallow the one line that matters.
    let _ = std::fs::write("/proc/sys/kernel/printk_devkmsg", "on\n");
    if let Ok(file) = OpenOptions::new().write(true).open("/dev/kmsg") {
        let _ = KERNEL_LOG.set(file);
    }
}

/// Writes one line.
pub(crate) fn line(level: Level, message: Arguments) {
    // One write per line: the kernel's log makes a record of each.
    let sent = KERNEL_LOG.get().is_some_and(|mut file| {
        let line = format!("<{}>forkd-guest: {message}\n", level as u8);
        file.write_all(line.as_bytes()).is_ok()
    });
    if !sent {
        let _ = writeln!(std::io::stderr(), "forkd-guest: {message}");
    }
}

/// Something is wrong.
macro_rules! error {
    ($($arg:tt)*) => { $crate::log::line($crate::log::Level::Error, format_args!($($arg)*)) };
}

/// Something worth knowing when one looks for a cause.
macro_rules! info {
    ($($arg:tt)*) => { $crate::log::line($crate::log::Level::Info, format_args!($($arg)*)) };
}

pub(crate) use {error, info};

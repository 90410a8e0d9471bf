//! Helpers of the end-to-end tests.
//!
//! The tests drive the release binaries from outside, as users do: [`daemon`] starts a `forkd serve` of its
//! own with its own data directory, [`monitor`] plays the controller towards one `forkd-vmm`, [`http`] talks
//! to daemons and agents without a client library, and [`random`] picks the moments of kills.
//!
//! Failures panic: everything here runs in tests only.
#![allow(clippy::unwrap_used)]

pub mod daemon;
pub mod http;
pub mod monitor;
pub mod random;

use std::path::PathBuf;
use std::time::{Duration, Instant};

/// The name of the test function around it, for the lines that list what did not run.
#[macro_export]
macro_rules! test_name {
    () => {{
        fn here() {}
        $crate::outer_function(here)
    }};
}

/// The name of the function in which `inner` is defined.
pub fn outer_function<F>(_inner: F) -> &'static str {
    std::any::type_name::<F>().rsplit("::").nth(1).unwrap_or("a test")
}

/// One of the binaries under test. They lie in the folder named by `FORKD_TEST_BIN`, or above the
/// test's own executable.
pub fn binary(name: &str) -> PathBuf {
    let folder = std::env::var_os("FORKD_TEST_BIN").map(PathBuf::from).unwrap_or_else(|| {
        let test = std::env::current_exe().unwrap();
        test.ancestors().nth(2).unwrap().to_path_buf()
    });
    let path = folder.join(name);
    assert!(path.is_file(), "{} is missing: run `make build`", path.display());
    path
}

/// The folder with images and kernels: `FORKD_TEST_LIBRARY`, or the default data directory.
pub fn library_path() -> PathBuf {
    std::env::var_os("FORKD_TEST_LIBRARY")
        .or_else(|| std::env::var_os("FORKD_DATA_DIR"))
        .map(PathBuf::from)
        .unwrap_or_else(|| PathBuf::from("/var/lib/forkd"))
}

/// How long anything may take before a test gives up. Guests under emulation are slow; a test that
/// waits this long has failed.
pub const TIMEOUT: Duration = Duration::from_secs(300);

/// A number from the environment, or the usual one.
pub fn number(name: &str, usual: u64) -> u64 {
    match std::env::var(name) {
        Ok(text) if !text.is_empty() => text.parse().unwrap_or_else(|_| panic!("{name} is a number")),
        _ => usual,
    }
}

/// Waits until `check` gives something.
pub fn eventually<T>(what: &str, mut check: impl FnMut() -> Option<T>) -> T {
    let start = Instant::now();
    loop {
        if let Some(value) = check() {
            return value;
        }
        assert!(start.elapsed() < TIMEOUT, "gave up waiting for {what}");
        std::thread::sleep(Duration::from_millis(50));
    }
}

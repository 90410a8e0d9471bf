//! A warmed Python parent that all tests of forking share, and a small one for those that kill the daemon or
//! want it for themselves: booting and warming takes longest.

use std::sync::{Mutex, MutexGuard, OnceLock, PoisonError};

use forkd_tests::daemon::Daemon;
use serde_json::json;

/// The tag of the parent's snapshot.
pub(crate) const TAG: &str = "py";

/// The tag of the small parent's snapshot.
pub(crate) const SMALL: &str = "small";

/// What the parent's Python has done by the time it is frozen: generators are warm, one of them with a
/// seed on purpose, memory holds a pattern, and a file is written but not synced.
const WARM: &str = "
import hashlib, os, random, socket, time, uuid
import numpy
random.seed(1); numpy.random.seed(1)
random.random(), numpy.random.rand(), uuid.uuid1(), uuid.uuid4(), os.urandom(8)
frozen_at = (time.time(), time.monotonic())
pattern = bytearray(hashlib.sha256(b'parent').digest() * (8 << 15))
with open('/root/parent.txt', 'w') as file:
    file.write('of the parent')
";

/// The daemon that has the parent.
pub(crate) fn daemon() -> &'static Daemon {
    static MADE: OnceLock<()> = OnceLock::new();
    MADE.get_or_init(|| {
        shared().snapshot(json!({"tag": TAG, "image": "python", "warm_python": WARM}));
    });
    shared()
}

/// The same one, for tests that can do without the parent.
pub(crate) fn shared() -> &'static Daemon {
    static DAEMON: OnceLock<Daemon> = OnceLock::new();
    DAEMON.get_or_init(|| {
        let daemon = Daemon::start();
        // Statics are not dropped: what the daemon left is cleaned up when the tests are over.
        daemon.end_with_this_process();
        daemon
    })
}

/// A daemon with the snapshot [`SMALL`], for one test at a time, which may kill it, and leaves it with that
/// snapshot and nothing else.
pub(crate) fn alone() -> MutexGuard<'static, Daemon> {
    static DAEMON: OnceLock<Mutex<Daemon>> = OnceLock::new();
    let daemon = DAEMON.get_or_init(|| {
        let daemon = Daemon::start();
        daemon.end_with_this_process();
        daemon.snapshot(json!({"tag": SMALL, "image": "python", "mem_size_mib": 256}));
        Mutex::new(daemon)
    });
    // A test that failed has reported that itself.
    daemon.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Forks `n` children of the parent.
pub(crate) fn fork(n: usize) -> Vec<String> {
    daemon().fork(TAG, n)
}

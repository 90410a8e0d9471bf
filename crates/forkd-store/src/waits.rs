//! Which threads may wait for the disk. A thread that serves many tasks at once must not: a slow disk would stop them
//! all.

use std::cell::Cell;

thread_local! {
    static DENIED: Cell<bool> = const { Cell::new(false) };
}

/// For tests: from here on, a call of this thread that would wait for the disk panics.
#[doc(hidden)]
pub fn deny_waiting_here() {
    DENIED.set(true);
}

/// This thread is about to wait for the disk.
pub(crate) fn waits(what: &str) {
    assert!(!DENIED.get(), "a thread that must not wait for the disk was about to {what}");
}

//! Points at which tests simulate a crash: every change to the disk and every sync is reported here, so that
//! a test can cut the power between any two of them. Outside tests it compiles to nothing.

use std::path::Path;

/// The step that this thread has just done.
#[derive(Debug, Clone, Copy)]
#[cfg_attr(not(test), allow(dead_code))]
pub(crate) enum Step<'p> {
    /// Something was made, written, linked, renamed or removed.
    Changed,
    /// A file's contents are on disk.
    SyncedFile(&'p std::fs::File),
    /// The names in a folder are on disk.
    SyncedFolder(&'p Path),
    /// The contents of a layer were verified.
    Verified,
}

/// Reports a step to the test that listens.
#[cfg(not(test))]
#[inline]
pub(crate) fn did(_step: Step) {}

#[cfg(test)]
pub(crate) use listening::{did, listen};

#[cfg(test)]
mod listening {
    use super::Step;
    use std::cell::RefCell;

    type Listener = Box<dyn FnMut(Step)>;

    thread_local! {
        static LISTENER: RefCell<Option<Listener>> = const { RefCell::new(None) };
    }

    pub(crate) fn did(step: Step) {
        // Taken away meanwhile: a listener's own steps are not reported.
        if let Some(mut listener) = LISTENER.take() {
            listener(step);
            LISTENER.set(Some(listener));
        }
    }

    /// Has `listener` called for every step of this thread, until `None` is given.
    pub(crate) fn listen(listener: Option<Listener>) {
        LISTENER.set(listener);
    }
}

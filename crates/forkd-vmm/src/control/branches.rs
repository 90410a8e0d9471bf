//! The branches of a VM that was booted, as long as they live.
//!
//! Such a VM has huge pages. Beside a branch they would cost memory without need: the kernel makes a huge page
//! out of small ones by copying them, also those that the VM shares with the branch. So the VM asks for small
//! pages from its first branch on, and for huge ones again when the last branch has ended.

use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use crate::{GuestMemory, memory};

/// How many branches are watched at once. A VM that has more at a time keeps small pages for good.
const MAX_WATCHED: usize = 64;

/// The branches of a VM that are watched.
#[derive(Debug, Default)]
pub(super) struct Branches {
    /// Whether the VM has huge pages as long as it has no branches.
    huge_pages: bool,
    pidfds: Vec<OwnedFd>,
}

impl Branches {
    /// The branches of a VM that was booted. A forked one has small pages anyway.
    pub(super) fn of_booted() -> Branches {
        Branches { huge_pages: true, pidfds: Vec::new() }
    }

    /// Records a branch of the VM with that memory.
    pub(super) fn add(&mut self, pidfd: OwnedFd, memory: &GuestMemory) {
        if !self.huge_pages {
            return;
        }
        if self.pidfds.len() == MAX_WATCHED {
            *self = Branches::default();
            return;
        }
        if self.pidfds.is_empty() {
            memory::use_small_pages(memory);
        }
        self.pidfds.push(pidfd);
    }

    /// The descriptors to wait for: readable when a branch has ended.
    pub(super) fn watched(&self) -> impl Iterator<Item = BorrowedFd<'_>> {
        self.pidfds.iter().map(OwnedFd::as_fd)
    }

    /// Removes the branches that have ended. `ended` has a flag for each [watched](Branches::watched) one.
    pub(super) fn remove_ended(&mut self, ended: &[bool], memory: &GuestMemory) {
        let mut ended = ended.iter();
        let before = self.pidfds.len();
        self.pidfds.retain(|_| !ended.next().is_some_and(|ended| *ended));
        if self.pidfds.is_empty() && before > 0 {
            memory::use_huge_pages(memory);
        }
    }
}

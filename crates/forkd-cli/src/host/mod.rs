//! The host that this command runs on: its files, processes, paths, clock and KVM.

pub(crate) mod clock;
pub(crate) mod files;
pub(crate) mod kvm;
pub(crate) mod paths;
pub(crate) mod process;

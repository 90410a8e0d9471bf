//! Images, kernels and initial RAM file systems: everything a VM boots from.
//!
//! - A **library** ([`Library`]) is a folder that holds them: `images/<name>/{image.json,disk.ext4}` and
//!   `kernels/<version>/{kernel.json,vmlinux,vmlinuz,modules/}`. It may be read-only: then its entries can
//!   only be read.
//! - An **image** ([`Image`]) is a root disk and its manifest. It is built from distribution packages, a tar
//!   or a folder ([`ImageSource`]), without mounting anything and without root where the host allows it. It can
//!   have a user with sudo and packages of PyPI and npm on top ([`Additions`]).
//! - A **kernel** ([`Kernel`]) is an ELF vmlinux or a bzImage with the modules that go with it.
//! - An **initramfs** ([`build_initramfs`]) holds the guest's init, the modules it loads, in order,
//!   and its plan.
//!
//! Entries of a library appear by one rename, complete and on disk, or not at all; a lock file per
//! entry makes two processes that want the same one build it once. Names that start with a dot are
//! the library's own (locks, unfinished builds), and no image can have such a name.
//!
//! This crate runs programs of the host (apt, mmdebstrap, pip, npm, mke2fs) and reads hostile files (tars,
//! kernels, modules). It knows nothing of VMs, daemons or the network beyond what apt, pip and npm do for it.

mod accounts;
mod additions;
mod apt;
mod build;
mod bzimage;
mod compress;
mod disk;
mod elf;
mod error;
mod image;
mod initramfs;
mod kernel;
mod kernel_fetch;
mod library;
mod modules;
mod npm;
mod packages;
mod pip;
mod progress;
mod recipes;
mod tools;
mod tree;
mod unpack;

pub use additions::Additions;
pub use build::{DEFAULT_SIZE_MIB, ImageSource, ImageSpec};
pub use error::{Error, Result};
pub use image::{FORMAT as IMAGE_FORMAT, Image, Manifest};
pub use initramfs::build_initramfs;
pub use kernel::{GUEST_MODULES, Kernel, MACHINE_MODULES};
pub use library::Library;
pub use modules::{Module, ModuleSet};
pub use progress::{Progress, Silent};
pub use recipes::PREDEFINED;

#[cfg(test)]
mod tests;

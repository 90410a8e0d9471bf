//! Snapshots on disk: their files, their manifests, their tags.
//!
//! - A **snapshot** ([`Snapshot`]) is one folder under its tag: `manifest.json`, `state` (vCPUs and
//!   devices), `memory` (the guest's), and `disk.0`, `disk.1`, … (what the guest wrote to each disk,
//!   over a base image that is not in here). Nothing in it changes once it exists.
//! - A **draft** ([`Draft`]) is a snapshot that is being made. It becomes a snapshot by one rename,
//!   complete and on disk, or disappears.
//! - The **store** ([`Store`]) is the folder of all snapshots. Names that start with a dot are its
//!   own; no tag can have such a name.
//!
//! What is read back is not trusted: a manifest is parsed with bounds, file names in it are checked
//! against the few that exist, no link is followed, and before a file is handed out its contents are
//! compared with the digest taken when it was written.
//!
//! Owns everything under a daemon's `snapshots` folder; one process at a time (the daemon's lock on
//! its data directory sees to that). Knows nothing of KVM, of processes or of HTTP, nor where base
//! images are: it only remembers which one belongs to a snapshot. Calls block.

mod digest;
mod draft;
mod error;
mod folder;
mod manifest;
mod snapshot;
mod store;

pub use draft::Draft;
pub use error::{Error, Result};
pub use manifest::{BaseImage, Facts, FileEntry, MANIFEST, MEMORY, Manifest, STATE, VERSION, disk_name};
pub use snapshot::{DiskFiles, Files, Sizes, Snapshot};
pub use store::Store;

#[cfg(test)]
mod tests;

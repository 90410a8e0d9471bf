//! Snapshots on disk: their layers, their manifests, their tags.
//!
//! - A **layer** is an immutable file of guest memory or of what a guest wrote to a disk, named by the
//!   digest of its contents. Equal ones are one; any number of snapshots share it.
//! - A **snapshot** ([`Snapshot`]) is one folder under its tag: `manifest.json`, which describes it and names
//!   its layers, and `state` (vCPUs and devices). Its memory is a chain of layers, oldest first: all of it
//!   itself, or its parent's chain and the difference to it. Nothing in it changes once it exists.
//! - A **draft** ([`Draft`]) is a snapshot that is being made. It becomes a snapshot by one rename,
//!   complete and on disk, or disappears.
//! - The **store** ([`Store`]) is the folder of all snapshots. Names that start with a dot are its
//!   own; no tag can have such a name. It removes layers when nothing names them any more.
//!
//! - The **database** ([`Database`]) holds the daemon's other persistent state.
//!
//! Data that is read back is not trusted: a manifest is parsed with bounds, a layer's name in it can only be
//! a digest, no link is followed, and before a file is handed out its contents are compared with the digest
//! taken when it was written.
//!
//! Owns everything under a daemon's `snapshots` folder; one process at a time (the daemon's lock on its data
//! directory sees to that). Knows nothing of KVM, of processes or of HTTP, nor how memory is laid out in a
//! layer, nor where base images are: it only records which one belongs to a snapshot. Calls block.

mod crash_points;
mod database;
mod digest;
mod dir;
mod draft;
mod error;
mod layers;
mod lease;
mod manifest;
mod snapshot;
mod store;
mod waits;

pub use database::{
    Answer, Begun, Change, Database, GoneSandbox, MadeSandbox, Quota, Scope, Token, TokenHash,
};
pub use draft::{Contents, Draft};
pub use error::{Error, Result};
pub use layers::Collected;
pub use lease::{Writers, writers};
pub use manifest::{
    BaseImage, FileEntry, GuestSpec, MANIFEST, MAX_DEPTH, Manifest, Measured, Parent, STATE, SnapshotKind,
    VERSION,
};
// The name that the controller still uses.
#[doc(hidden)]
pub use snapshot::{DiskFiles, Files, Kind, Layer, Size, Sizes, Snapshot};
pub use store::Store;
#[doc(hidden)]
pub use waits::deny_waiting_here;

#[cfg(test)]
mod tests;

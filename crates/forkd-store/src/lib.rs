//! Snapshots on disk: their layers, their manifests, their tags.
//!
//! - A **layer** is an immutable file of guest memory or of blocks that a guest wrote to a disk, named by the digest of
//!   its contents. Equal layers are one file, which any number of snapshots share.
//! - A **snapshot** ([`Snapshot`]) is one folder under its tag: `manifest.json`, which describes it and names
//!   its layers, and `state` (vCPUs and devices). Its memory is one layer, or its parent's chain of layers and one layer
//!   with the difference. No file of a snapshot changes.
//! - A **draft** ([`Draft`]) is a snapshot that is being made. One rename makes it a snapshot, complete and on disk;
//!   otherwise it is removed.
//! - The **store** ([`Store`]) is the folder of all snapshots. Names that start with a dot are its
//!   own; no tag can have such a name. It removes layers when nothing names them any more.
//!
//! - The **database** ([`Database`]) holds the daemon's other persistent state.
//!
//! The crate does not trust files that it reads: it parses a manifest with bounds, accepts only digests as names of layers,
//! and follows no link. Before it returns a file, it compares the contents with the digest in the manifest.
//!
//! The crate owns everything under a daemon's `snapshots` folder. One process uses the folder at a time: the daemon locks
//! its data directory. No code here handles KVM, processes, HTTP, the layout of memory in a layer, or the place of base
//! images: a manifest only names its image. Calls block.

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
    Answer, ArchiveEntry, Begun, Change, Database, MadeSandbox, Quota, Scope, TemplateName, Token, TokenHash,
};
pub use draft::{Contents, Draft};
pub use error::{Error, Result};
pub use layers::Collected;
pub use lease::{Writers, writers};
pub use manifest::{
    BaseImage, FileEntry, GuestSpec, MANIFEST, MAX_DEPTH, Manifest, Measured, Parent, STATE, SnapshotKind,
    VERSION,
};
pub use snapshot::{DiskFiles, Files, Kind, Layer, Size, Sizes, Snapshot};
pub use store::Store;
#[doc(hidden)]
pub use waits::deny_waiting_here;

#[cfg(test)]
mod tests;

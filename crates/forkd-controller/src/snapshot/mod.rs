//! Snapshots: the ones on disk, the ones being written, and the template each has while it is in use.
//!
//! `registry` knows all of them and `entry` is one. `create` boots and freezes a new one, `load` starts a template
//! from disk, `save` writes a template to disk, `compact` merges layers, and `gc` removes what is over its limits.

pub(crate) mod adopt;
pub(crate) mod branch_job;
pub(crate) mod compact;
pub(crate) mod create;
pub(crate) mod entry;
pub(crate) mod gc;
pub(crate) mod held_draft;
pub(crate) mod load;
pub(crate) mod merge;
pub(crate) mod owner_records;
pub(crate) mod ownership;
pub(crate) mod registry;
pub(crate) mod room;
pub(crate) mod save;
pub(crate) mod template;
pub(crate) mod tree;
pub(crate) mod unknown;

//! Snapshots: those on disk, those being written, and the template process that each has while it is in use.
//!
//! `registry` holds all snapshots; `entry` is one of them, and `state` draws its states. `create` boots and freezes a guest,
//! `load` starts a template from disk, `save` writes a template to disk, `compact` merges layers, `free_space` lets
//! saves wait for disk space, and `gc` removes branches that are over the limits. `forks` counts the
//! templates of forks, which are no snapshots.

pub(crate) mod adopt;
pub(crate) mod branch_job;
pub(crate) mod compact;
pub(crate) mod create;
pub(crate) mod entry;
pub(crate) mod forks;
pub(crate) mod free_space;
pub(crate) mod gc;
pub(crate) mod held_draft;
pub(crate) mod load;
pub(crate) mod merge;
pub(crate) mod owner_records;
pub(crate) mod ownership;
pub(crate) mod registry;
pub(crate) mod save;
pub(crate) mod state;
pub(crate) mod template;
mod template_names;
pub(crate) mod tree;
pub(crate) mod unknown;

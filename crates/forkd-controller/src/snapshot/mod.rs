//! TODO front page of snapshot.

pub(crate) mod adopt;
pub(crate) mod compact;
pub(crate) mod create;
pub(crate) mod entry;
pub(crate) mod gc;
pub(crate) mod held_draft;
pub(crate) mod load;
pub(crate) mod owner_records;
pub(crate) mod ownership;
pub(crate) mod registry;
pub(crate) mod save;
pub(crate) mod template;
pub(crate) mod tree;

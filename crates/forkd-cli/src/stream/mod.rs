//! Standard streams, terminal and signals of this process, for commands that run in a guest.

pub(crate) mod conversation;
pub(crate) mod signals;
pub(crate) mod stdio;
pub(crate) mod terminal;

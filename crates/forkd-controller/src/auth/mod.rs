//! Clients: which principal sends a request, what it may do, and how much it may have.

pub(crate) mod peer;
pub(crate) mod policy;
pub(crate) mod principal;
pub(crate) mod quota;
pub(crate) mod rate_limit;
pub(crate) mod tokens;

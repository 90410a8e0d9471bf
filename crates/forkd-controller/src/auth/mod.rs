//! Clients: which principal sends a request (`tokens`, `peer`), what it may do (`policy`), and how much it may have
//! and ask for (`quota`, `rate_limit`).

pub(crate) mod peer;
pub(crate) mod policy;
pub(crate) mod principal;
pub(crate) mod quota;
pub(crate) mod rate_limit;
pub(crate) mod tokens;

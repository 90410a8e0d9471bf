//! TODO front page of auth.

pub(crate) mod peer;
pub(crate) mod policy;
pub(crate) mod principal;
pub(crate) mod quota;
pub(crate) mod rate_limit;
pub(crate) mod tokens;

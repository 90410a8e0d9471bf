//! Middleware of every request: request log, authentication, authorization and idempotency keys.

pub(crate) mod authenticate;
pub(crate) mod authorize;
pub(crate) mod idempotency;
pub(crate) mod request_log;

//! What every request passes through: the request log, authentication and idempotency keys.

pub(crate) mod authenticate;
pub(crate) mod authorize;
pub(crate) mod idempotency;
pub(crate) mod request_log;

//! TODO front page of api::middleware.

pub(crate) mod authenticate;
pub(crate) mod idempotency;
pub(crate) mod request_log;

//! The body of every error reply.

use serde::{Deserialize, Serialize};

/// The body of every error reply.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// What happened and what to do, for people. The wording may change.
    pub error: String,
    /// The reason, for programs. It does not change with the wording.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = crate::Code, required = true))]
    pub code: String,
    /// The request's id, also in the header `X-Request-Id`. The daemon's log has the cause under this id.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub request_id: String,
}

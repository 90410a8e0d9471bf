//! The body of every answer that is an error.

use serde::{Deserialize, Serialize};

/// The body of every answer that is an error.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "openapi", derive(utoipa::ToSchema))]
pub struct ErrorBody {
    /// What happened and what to do, for people. The wording may change.
    pub error: String,
    /// Why, for programs.
    #[serde(default)]
    #[cfg_attr(feature = "openapi", schema(value_type = crate::Code, required = true))]
    pub code: String,
    /// The id of the request: the daemon's log has the cause under it. Also in the header `X-Request-Id`.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    #[cfg_attr(feature = "openapi", schema(required = true))]
    pub request_id: String,
}

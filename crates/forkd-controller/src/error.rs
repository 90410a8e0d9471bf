//! Errors as callers see them.
//!
//! Who reads them: a person in front of `forkd`, or a program that looks at the status. So an
//! error is a kind, which decides the HTTP status, and one sentence that says what happened and
//! what to do. What only the operator should know goes to the log, not in here.

use axum::Json;
use axum::http::StatusCode;
use axum::response::{IntoResponse, Response};
use serde::{Deserialize, Serialize};
use utoipa::ToSchema;

/// Result with the daemon's [`enum@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// What a caller would treat differently.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// The request is wrong; asking again will not help.
    Invalid,
    /// No token, or the wrong one.
    Unauthorized,
    /// Not from there.
    Forbidden,
    /// There is no such thing.
    NotFound,
    /// It is there, but not in a state in which this can be done.
    Conflict,
    /// A limit is reached, or the daemon is stopping; later it may work.
    Busy,
    /// The guest did not do its part: its agent is gone, broken or hostile.
    Guest,
    /// The guest did not answer in time.
    Timeout,
    /// Our fault, or the host's.
    Internal,
    /// What the HTTP framework refuses by itself, with its own status (405, 413, 415, …).
    Http(StatusCode),
}

/// A failure, in words for the caller.
#[derive(Debug, Clone, thiserror::Error)]
#[error("{message}")]
pub struct Error {
    /// What kind.
    pub kind: Kind,
    /// What happened and what to do.
    pub message: String,
}

/// The body of every answer that is an error.
#[derive(Debug, Clone, Serialize, Deserialize, ToSchema)]
pub struct ErrorBody {
    /// What happened and what to do.
    pub error: String,
}

impl Error {
    /// An error of `kind`.
    pub fn new(kind: Kind, message: impl Into<String>) -> Self {
        Error { kind, message: message.into() }
    }

    /// [`Kind::Invalid`].
    pub fn invalid(message: impl Into<String>) -> Self {
        Error::new(Kind::Invalid, message)
    }

    /// [`Kind::Internal`], for a failed operation on the host: what was tried, and why it failed.
    pub fn host(tried: impl std::fmt::Display, cause: impl std::fmt::Display) -> Self {
        Error::new(Kind::Internal, format!("{tried}: {cause}"))
    }

    /// A quota or a rate is used up.
    pub fn too_many(message: impl Into<String>) -> Self {
        Error::new(Kind::Http(StatusCode::TOO_MANY_REQUESTS), message)
    }

    /// The host's disk is full.
    pub fn no_room(message: impl Into<String>) -> Self {
        Error::new(Kind::Http(StatusCode::INSUFFICIENT_STORAGE), message)
    }

    /// Whether it is one of [`Error::no_room`].
    pub fn is_no_room(&self) -> bool {
        self.kind == Kind::Http(StatusCode::INSUFFICIENT_STORAGE)
    }

    /// The HTTP status that goes with it.
    pub fn status(&self) -> StatusCode {
        match self.kind {
            Kind::Invalid => StatusCode::BAD_REQUEST,
            Kind::Unauthorized => StatusCode::UNAUTHORIZED,
            Kind::Forbidden => StatusCode::FORBIDDEN,
            Kind::NotFound => StatusCode::NOT_FOUND,
            Kind::Conflict => StatusCode::CONFLICT,
            Kind::Busy => StatusCode::SERVICE_UNAVAILABLE,
            Kind::Guest => StatusCode::BAD_GATEWAY,
            Kind::Timeout => StatusCode::GATEWAY_TIMEOUT,
            Kind::Internal => StatusCode::INTERNAL_SERVER_ERROR,
            Kind::Http(status) => status,
        }
    }
}

impl IntoResponse for Error {
    fn into_response(self) -> Response {
        let status = self.status();
        if status.is_server_error() {
            tracing::warn!(status = status.as_u16(), error = %self.message, "request failed");
        }
        let mut response = (status, Json(ErrorBody { error: self.message })).into_response();
        if status == StatusCode::UNAUTHORIZED {
            let scheme = axum::http::HeaderValue::from_static("Bearer");
            response.headers_mut().insert(axum::http::header::WWW_AUTHENTICATE, scheme);
        }
        response
    }
}

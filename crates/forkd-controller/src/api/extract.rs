//! Extractors for request parts. Every rejection is an [`Error`], so that all error bodies have the same shape.

use std::time::Duration;

use axum::Json;
use axum::body::Bytes;
use axum::extract::rejection::JsonRejection;
use axum::extract::{FromRequest, FromRequestParts, Path, Query, Request};
use axum::http::request::Parts;
use axum::http::{StatusCode, header};
use serde::de::DeserializeOwned;

use crate::error::{Code, Error};

/// Timeout for a client to send its body: these bodies are small.
const BODY_WAIT: Duration = Duration::from_secs(30);

/// An error for a rejection by the HTTP library.
fn refused(status: StatusCode, text: String) -> Error {
    Error::new(Code::of_status(status.as_u16()), text)
}

/// The result of `read`, or an error after the timeout.
pub(crate) async fn in_time<T>(read: impl Future<Output = T>) -> Result<T, Error> {
    tokio::time::timeout(BODY_WAIT, read).await.map_err(|_| {
        let text =
            format!("the request's body did not arrive within {} s; send it faster", BODY_WAIT.as_secs());
        Error::new(Code::RequestTimeout, text)
    })
}

/// A JSON body.
#[derive(Debug)]
pub(crate) struct Body<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        match in_time(Json::from_request(request, state)).await? {
            Ok(Json(value)) => Ok(Body(value)),
            Err(rejection) => {
                let code = match &rejection {
                    JsonRejection::JsonDataError(_) | JsonRejection::JsonSyntaxError(_) => {
                        Code::InvalidRequest
                    }
                    other => Code::of_status(other.status().as_u16()),
                };
                Err(Error::new(code, rejection.body_text()))
            }
        }
    }
}

/// An optional JSON body: without one, all fields have their defaults.
#[derive(Debug)]
pub(crate) struct OptionalBody<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned + Default> FromRequest<S> for OptionalBody<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        let headers = request.headers();
        let empty = headers.get(header::CONTENT_LENGTH).is_none_or(|length| length == "0");
        if empty && !headers.contains_key(header::TRANSFER_ENCODING) {
            return Ok(OptionalBody(T::default()));
        }
        Ok(OptionalBody(Body::from_request(request, state).await?.0))
    }
}

/// A body that has no meaning. It is read in any case: if a connection closes with unread data, the kernel resets it
/// and the reply is lost.
#[derive(Debug)]
pub(crate) struct Ignored;

impl<S: Send + Sync> FromRequest<S> for Ignored {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        Raw::from_request(request, state).await.map(|_| Ignored)
    }
}

/// A body as raw bytes.
#[derive(Debug)]
pub(crate) struct Raw(pub(crate) Bytes);

impl<S: Send + Sync> FromRequest<S> for Raw {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        match in_time(Bytes::from_request(request, state)).await? {
            Ok(bytes) => Ok(Raw(bytes)),
            Err(rejection) => Err(refused(rejection.status(), rejection.body_text())),
        }
    }
}

/// The `{id}` parameter of a route.
#[derive(Debug)]
pub(crate) struct Id(pub(crate) String);

impl<S: Send + Sync> FromRequestParts<S> for Id {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        match Path::<String>::from_request_parts(parts, state).await {
            Ok(Path(id)) => Ok(Id(id)),
            Err(rejection) => Err(refused(rejection.status(), rejection.body_text())),
        }
    }
}

/// The query parameters.
#[derive(Debug)]
pub(crate) struct Params<T>(pub(crate) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequestParts<S> for Params<T> {
    type Rejection = Error;

    async fn from_request_parts(parts: &mut Parts, state: &S) -> Result<Self, Error> {
        match Query::<T>::from_request_parts(parts, state).await {
            Ok(Query(params)) => Ok(Params(params)),
            Err(rejection) => Err(Error::invalid(rejection.body_text())),
        }
    }
}

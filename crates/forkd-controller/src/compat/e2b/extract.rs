//! Extractors for requests of the E2B API.

use std::time::Duration;

use axum::body::Bytes;
use axum::extract::{FromRequest, Request};
use serde::de::DeserializeOwned;

use crate::error::{Code, Error};

/// Timeout for a client to send its body: these bodies are small.
const BODY_WAIT: Duration = Duration::from_secs(30);

/// A JSON body; without one, all fields have their defaults. Clients do not always declare its type.
#[derive(Debug)]
pub(super) struct Body<T>(pub(super) T);

impl<S: Send + Sync, T: DeserializeOwned> FromRequest<S> for Body<T> {
    type Rejection = Error;

    async fn from_request(request: Request, state: &S) -> Result<Self, Error> {
        let read = tokio::time::timeout(BODY_WAIT, Bytes::from_request(request, state)).await;
        let read = read.map_err(|_| {
            let text = format!("the body did not arrive within {} s; send it faster", BODY_WAIT.as_secs());
            Error::new(Code::RequestTimeout, text)
        })?;
        let bytes =
            read.map_err(|error| Error::new(Code::of_status(error.status().as_u16()), error.body_text()))?;
        let bytes: &[u8] = if bytes.is_empty() { b"{}" } else { &bytes };
        let parsed = serde_json::from_slice(bytes);
        parsed
            .map(Body)
            .map_err(|error| Error::invalid(format!("the body is not what this route takes: {error}")))
    }
}

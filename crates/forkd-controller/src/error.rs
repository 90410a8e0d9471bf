//! The daemon's errors.
//!
//! An error has two readers: programs read the [`Code`], people read one sentence that ends with what to do. Details
//! for the operator (a path of the host, an errno, the output of a monitor) are the *cause*. Logs, clients of the
//! unix socket and admins get the cause; other clients do not. `api::error` builds the bodies.

use std::borrow::Cow;
use std::error::Error as StdError;
use std::fmt;
use std::sync::Arc;

use forkd_api::ErrorBody;

pub(crate) use forkd_api::Code;

/// Result with the daemon's [`struct@Error`].
pub type Result<T> = std::result::Result<T, Error>;

/// A failure, with its code, its sentence and its cause.
///
/// [`Display`](fmt::Display) writes the sentence and all causes in one line: for logs, and for clients that may read
/// causes.
#[derive(Debug, Clone)]
pub struct Error {
    code: Code,
    text: String,
    cause: Option<Arc<dyn StdError + Send + Sync>>,
}

impl Error {
    /// An error with a sentence for all clients: what happened and what to do.
    pub fn new(code: Code, text: impl Into<String>) -> Self {
        Error { code, text: text.into(), cause: None }
    }

    /// [`Code::InvalidRequest`].
    pub fn invalid(text: impl Into<String>) -> Self {
        Error::new(Code::InvalidRequest, text)
    }

    /// [`Code::Internal`], for a failed operation on the host: the operation, and why it failed. Only the operator
    /// reads both.
    pub fn host(tried: impl fmt::Display, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Error::new(Code::Internal, tried.to_string()).because(cause)
    }

    /// [`Code::DiskFull`], for the host's disk.
    pub fn no_room(cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        let text =
            "the disk of the data directory is full; free space there, or remove snapshots with `forkd rmi`";
        Error::new(Code::DiskFull, text).because(cause)
    }

    /// Adds a cause, which not every client may read.
    pub fn because(self, cause: impl Into<Box<dyn StdError + Send + Sync>>) -> Self {
        Error { cause: Some(Arc::from(cause.into())), ..self }
    }

    /// Wraps the error: `text` is the larger operation that failed with `code` because of it.
    pub fn within(self, code: Code, text: impl fmt::Display) -> Self {
        match self.code {
            Code::Internal => Error::new(code, text.to_string()).because(self.to_string()),
            _ => Error { code, text: format!("{text}: {}", self.text), cause: self.cause },
        }
    }

    /// Replaces the code. The text of an internal error becomes the cause.
    pub fn with_code(self, code: Code) -> Self {
        match self.code {
            Code::Internal if code != Code::Internal => {
                Error::new(code, code.meaning()).because(self.to_string())
            }
            _ => Error { code, ..self },
        }
    }

    /// The code, for programs.
    pub fn code(&self) -> Code {
        self.code
    }

    /// The text for clients that may not read causes.
    pub fn public(&self) -> Cow<'_, str> {
        match self.code {
            Code::Internal => "internal error; ask the operator of the daemon".into(),
            _ => Cow::Borrowed(&self.text),
        }
    }

    /// The text with all causes, if it has more than [`Error::public`].
    pub fn private(&self) -> Option<String> {
        (self.code == Code::Internal || self.cause.is_some()).then(|| self.to_string())
    }

    /// The text for a client that may (`with_cause`) or may not read causes.
    pub fn shown(&self, with_cause: bool) -> String {
        if with_cause { self.to_string() } else { self.public().into_owned() }
    }

    /// The cause, without the sentence.
    pub fn cause(&self) -> Option<&(dyn StdError + Send + Sync + 'static)> {
        self.cause.as_deref()
    }

    /// Whether the error comes from [`Error::no_room`].
    pub fn is_no_room(&self) -> bool {
        self.code == Code::DiskFull
    }
}

impl fmt::Display for Error {
    fn fmt(&self, formatter: &mut fmt::Formatter<'_>) -> fmt::Result {
        formatter.write_str(&self.text)?;
        let mut next = self.cause.as_deref().map(|cause| cause as &dyn StdError);
        while let Some(cause) = next {
            write!(formatter, ": {cause}")?;
            next = cause.source();
        }
        Ok(())
    }
}

// `Display` includes the causes already, so `source` returns none: a printed chain would repeat them.
impl StdError for Error {}

/// An error with its causes, in one line.
pub(crate) fn chain(error: &dyn std::error::Error) -> String {
    match error.source() {
        Some(cause) => format!("{error}: {}", chain(cause)),
        None => error.to_string(),
    }
}

/// The reader of an error.
#[derive(Debug, Clone, Default)]
pub(crate) struct Reader {
    /// The id of the reader's request; empty if it is not known yet.
    pub(crate) request_id: String,
    /// Whether the reader may see causes: clients of the unix socket and admins may.
    pub(crate) reads_causes: bool,
}

impl Reader {
    /// The body of `error` for this reader, without the causes that the reader may not see.
    pub(crate) fn body(&self, error: &Error) -> ErrorBody {
        let code = error.code();
        let text = match code {
            Code::Internal if !self.reads_causes && !self.request_id.is_empty() => {
                format!("{}, and give the request id {}", error.public(), self.request_id)
            }
            _ => error.shown(self.reads_causes),
        };
        ErrorBody { error: text, code: code.name().into(), request_id: self.request_id.clone() }
    }

    /// The same body, and a log line if the operator needs one.
    pub(crate) fn logged(&self, error: &Error) -> ErrorBody {
        let (code, status) = (error.code().name(), error.code().status());
        let request_id = &self.request_id;
        if status >= 500 {
            tracing::warn!(request_id, code, status, %error, "request failed");
        } else if error.private().is_some() {
            tracing::info!(request_id, code, status, %error, "request refused");
        }
        self.body(error)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn denied() -> std::io::Error {
        std::io::Error::from_raw_os_error(13)
    }

    #[test]
    fn the_public_text_has_no_path_and_no_errno() {
        let error = Error::host("cannot open /srv/forkd/x", denied());
        assert_eq!(error.code(), Code::Internal);
        assert!(error.to_string().contains("/srv/forkd/x") && error.to_string().contains("os error 13"));
        assert!(!error.public().contains("/srv") && !error.public().contains("os error"));
        assert_eq!(error.shown(true), error.private().unwrap());

        let full = Error::no_room(error.clone());
        assert!(!full.public().contains("/srv") && full.to_string().contains("/srv/forkd/x"), "{full}");
        assert_eq!(full.code(), Code::DiskFull);
        assert!(full.cause().is_some());
    }

    #[test]
    fn an_inner_error_keeps_what_may_be_read_and_hides_the_rest() {
        let inner = Error::new(Code::ImageNotFound, "there is no image x").because(denied());
        let outer = inner.within(Code::SnapshotUnusable, "snapshot a needs its image");
        assert_eq!(outer.code(), Code::SnapshotUnusable);
        assert_eq!(outer.public(), "snapshot a needs its image: there is no image x");
        assert!(outer.to_string().contains("os error 13"));

        let outer = Error::host("cannot open /srv/x", denied()).within(Code::SnapshotFailed, "it failed");
        assert_eq!(outer.public(), "it failed");
        assert!(outer.to_string().starts_with("it failed: cannot open /srv/x: "), "{outer}");

        let outer = Error::host("cannot open /srv/x", denied()).with_code(Code::GuestFailed);
        assert!(!outer.public().contains("/srv"), "{outer:?}");
    }

    #[test]
    fn what_all_may_read_has_nothing_private() {
        let error = Error::invalid("n must be 1 to 1000");
        assert_eq!(error.private(), None);
        assert_eq!(error.shown(false), error.shown(true));
    }
}

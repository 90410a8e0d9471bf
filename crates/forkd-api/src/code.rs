//! Error codes, for programs. The sentence beside a code is for people.
//!
//! A code is the reason of a failure and stays the same when the sentence changes. Each code has one HTTP status, one
//! meaning and one advice about retries; the OpenAPI document and `docs/API.md` list them.

use serde::{Deserialize, Serialize};

/// Whether the same request can succeed later.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Retry {
    /// The same request fails again: change the request.
    No,
    /// The same request may succeed after a moment.
    Later,
    /// The same request may succeed after something else has changed.
    AfterChange,
}

impl Retry {
    /// The name in the documents.
    pub const fn name(self) -> &'static str {
        match self {
            Retry::No => "no",
            Retry::Later => "later",
            Retry::AfterChange => "after a change",
        }
    }
}

macro_rules! codes {
    ($($code:ident $name:literal $status:literal $retry:ident $meaning:literal)*) => {
        /// The reason why a request failed.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Serialize, Deserialize)]
        pub enum Code {
            $(
                #[doc = $meaning]
                #[serde(rename = $name)]
                $code,
            )*
        }

        impl Code {
            /// All codes, in the order of their statuses.
            pub const ALL: &[Code] = &[$(Code::$code),*];

            /// The name in bodies.
            pub const fn name(self) -> &'static str {
                match self { $(Code::$code => $name),* }
            }

            /// The HTTP status of the code.
            pub const fn status(self) -> u16 {
                match self { $(Code::$code => $status),* }
            }

            /// Whether a retry helps.
            pub const fn retry(self) -> Retry {
                match self { $(Code::$code => Retry::$retry),* }
            }

            /// The meaning, in one sentence.
            pub const fn meaning(self) -> &'static str {
                match self { $(Code::$code => $meaning),* }
            }
        }
    };
}

codes! {
    InvalidRequest "invalid_request" 400 No
        "A field, a parameter or the body of the request is wrong."
    FolderTooLarge "folder_too_large" 400 No
        "The folder has more entries than one reply can have; choose a smaller folder."
    PathNotAllowed "path_not_allowed" 400 AfterChange
        "The daemon does not open this file of the host for clients."
    WorkspaceRunning "workspace_running" 400 AfterChange
        "The workspace has a running sandbox already."
    WorkspaceNotRunning "workspace_not_running" 400 AfterChange
        "The workspace has no running sandbox."
    Unauthorized "unauthorized" 401 AfterChange
        "The request has no token, or a wrong one."
    TokenExpired "token_expired" 401 AfterChange
        "The token was good and has expired."
    Forbidden "forbidden" 403 AfterChange
        "The token's scope is too small for this request."
    OriginForbidden "origin_forbidden" 403 No
        "The Host or Origin header names another host."
    GuestForbidden "guest_forbidden" 403 AfterChange
        "The guest's user may not do that in the guest."
    RouteNotFound "route_not_found" 404 No
        "The API has no such route."
    SandboxNotFound "sandbox_not_found" 404 No
        "The client has no sandbox with this id; an ended sandbox does not come back."
    SnapshotNotFound "snapshot_not_found" 404 AfterChange
        "The client has no snapshot of this tag."
    WorkspaceNotFound "workspace_not_found" 404 AfterChange
        "The client has no workspace of this name."
    ImageNotFound "image_not_found" 404 AfterChange
        "The daemon's library has no such image or kernel."
    TokenNotFound "token_not_found" 404 AfterChange
        "The daemon has no token of this name."
    PathNotFound "path_not_found" 404 AfterChange
        "The file of the host that the request names does not exist."
    GuestNotFound "guest_not_found" 404 AfterChange
        "The guest has no such file, folder or process."
    MethodNotAllowed "method_not_allowed" 405 No
        "The route has no such method."
    RequestTimeout "request_timeout" 408 Later
        "The client sent its body too slowly."
    TagTaken "tag_taken" 409 AfterChange
        "Another snapshot has this tag."
    StateUnknown "state_unknown" 409 AfterChange
        "The daemon cannot read the record of this sandbox or snapshot; it can only be listed and ended."
    NameTaken "name_taken" 409 AfterChange
        "Another workspace or token has this name."
    NameReserved "name_reserved" 409 No
        "The daemon keeps this name for its own token."
    TooManyTokens "too_many_tokens" 409 AfterChange
        "The daemon has as many tokens as it can have."
    SandboxStarting "sandbox_starting" 409 Later
        "The sandbox is still starting."
    SandboxPaused "sandbox_paused" 409 AfterChange
        "The sandbox is paused; resume it first."
    SandboxWaitsForDisk "sandbox_waits_for_disk" 409 Later
        "The sandbox is paused until the host's disk has room."
    SandboxSuspending "sandbox_suspending" 409 AfterChange
        "The sandbox is being suspended; continue with its snapshot or workspace."
    SandboxEnded "sandbox_ended" 409 No
        "The sandbox has ended."
    SandboxBusy "sandbox_busy" 409 Later
        "Another request branches, pauses or rolls back the sandbox."
    SandboxReplaced "sandbox_replaced" 409 Later
        "The sandbox was rolled back while the request waited."
    SandboxUnfit "sandbox_unfit" 409 No
        "The sandbox cannot do that: it has no agent, no process, or is of an older version."
    NoRollbackTarget "no_rollback_target" 409 AfterChange
        "The sandbox has no snapshot that it could be rolled back to."
    SnapshotNotReady "snapshot_not_ready" 409 Later
        "The snapshot is still being made."
    SnapshotFailed "snapshot_failed" 409 AfterChange
        "The snapshot could not be made; make it again."
    SnapshotUnusable "snapshot_unusable" 409 AfterChange
        "The snapshot is there and cannot be used: a file, its image or its version does not fit."
    SnapshotDiskOnly "snapshot_disk_only" 409 No
        "The snapshot has disks and no memory: sandboxes boot on it, and nothing can be forked from it."
    SnapshotInUse "snapshot_in_use" 409 AfterChange
        "Other snapshots or a workspace need the snapshot."
    SnapshotReplaced "snapshot_replaced" 409 Later
        "The snapshot was removed or made again while the request waited."
    Cancelled "cancelled" 409 AfterChange
        "A client removed the snapshot before it was finished."
    WorkspaceBusy "workspace_busy" 409 Later
        "Another request makes, suspends, resumes or deletes the workspace."
    WorkspaceUnusable "workspace_unusable" 409 AfterChange
        "The workspace's record cannot be used, or the workspace is half deleted."
    MonitorRefused "monitor_refused" 409 No
        "The monitor of the sandbox refused the operation."
    GuestConflict "guest_conflict" 409 AfterChange
        "Something in the guest is in the way: it exists already, is not empty, or is in use."
    IdempotencyInProgress "idempotency_in_progress" 409 Later
        "A request with this Idempotency-Key is under way."
    IdempotencyOutcomeUnknown "idempotency_outcome_unknown" 409 AfterChange
        "The daemon stopped during the first request with this Idempotency-Key; its outcome is unknown."
    IdempotencyAnswerLost "idempotency_answer_lost" 409 No
        "The first request with this Idempotency-Key was done; its answer was too large to keep."
    AddressInUse "address_in_use" 409 AfterChange
        "Another daemon uses the data directory or the socket."
    BodyTooLarge "body_too_large" 413 No
        "The body is larger than the daemon's limit."
    UriTooLong "uri_too_long" 414 No
        "The URI of the request is too long."
    UnsupportedMediaType "unsupported_media_type" 415 No
        "The body is not declared as `application/json`."
    IdempotencyKeyReused "idempotency_key_reused" 422 No
        "An earlier request with this Idempotency-Key was a different one."
    WebsocketRequired "websocket_required" 426 No
        "The route speaks WebSocket, and the connection cannot change to it."
    QuotaExceeded "quota_exceeded" 429 AfterChange
        "The owner's quota is used up."
    RateLimited "rate_limited" 429 Later
        "The client sends too many requests; `Retry-After` has the seconds to wait."
    HeadersTooLarge "headers_too_large" 431 No
        "The request's headers are too many or too long."
    Internal "internal" 500 Later
        "The host or the daemon failed; the daemon's log has the cause under the request id."
    TemplateEnded "template_ended" 500 Later
        "The template that children are forked from ended; the next request starts another."
    NotImplemented "not_implemented" 501 No
        "The daemon does not have this part of the API."
    GuestFailed "guest_failed" 502 Later
        "The guest did not start, or its agent is gone or broken."
    SandboxLost "sandbox_lost" 502 No
        "The sandbox ended while it worked on the request."
    DaemonBusy "daemon_busy" 503 Later
        "The daemon is at its limit of work at the same time."
    LimitReached "limit_reached" 503 AfterChange
        "The daemon's limit of sandboxes, templates or branches is reached."
    ShuttingDown "shutting_down" 503 Later
        "The daemon is stopping."
    GuestBusy "guest_busy" 503 Later
        "The guest's agent has no room for more."
    GuestTimeout "guest_timeout" 504 Later
        "The guest's agent did not answer in time."
    SandboxUnresponsive "sandbox_unresponsive" 504 Later
        "The sandbox does not answer any more; delete it if that lasts."
    DiskFull "disk_full" 507 AfterChange
        "The disk of the daemon's data directory is full."
    GuestDiskFull "guest_disk_full" 507 AfterChange
        "The guest's disk is full."
}

impl Code {
    /// The code with this name.
    pub fn named(name: &str) -> Option<Code> {
        Code::ALL.iter().copied().find(|code| code.name() == name)
    }

    /// The code for a rejection that has only a status, such as those of the HTTP library.
    pub fn of_status(status: u16) -> Code {
        match status {
            401 => Code::Unauthorized,
            403 => Code::Forbidden,
            404 => Code::RouteNotFound,
            405 => Code::MethodNotAllowed,
            408 => Code::RequestTimeout,
            413 => Code::BodyTooLarge,
            414 => Code::UriTooLong,
            415 => Code::UnsupportedMediaType,
            422 => Code::IdempotencyKeyReused,
            426 => Code::WebsocketRequired,
            429 => Code::RateLimited,
            431 => Code::HeadersTooLarge,
            400..500 => Code::InvalidRequest,
            _ => Code::Internal,
        }
    }

    /// Whether the code means that an object does not exist.
    pub const fn is_not_found(self) -> bool {
        self.status() == 404
    }

    /// Whether the code means a conflict with the current state.
    pub const fn is_conflict(self) -> bool {
        self.status() == 409
    }
}

impl std::fmt::Display for Code {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        formatter.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_unique_and_in_snake_case_and_sorted_by_status() {
        let mut names: Vec<_> = Code::ALL.iter().map(|code| code.name()).collect();
        assert!(Code::ALL.is_sorted_by_key(|code| code.status()));
        for name in &names {
            assert!(name.bytes().all(|byte| byte.is_ascii_lowercase() || byte == b'_'), "{name}");
            assert_eq!(Code::named(name).unwrap().name(), *name);
            assert_eq!(serde_json::to_value(Code::named(name)).unwrap(), *name);
        }
        let all = names.len();
        names.sort_unstable();
        names.dedup();
        assert_eq!(names.len(), all);
        assert_eq!(Code::named("no_such_code"), None);
    }

    #[test]
    fn a_bare_status_has_a_code_of_that_status() {
        for status in [400, 401, 403, 404, 405, 408, 413, 414, 415, 422, 426, 429, 431, 500] {
            assert_eq!(Code::of_status(status).status(), status);
        }
        assert_eq!(Code::of_status(418), Code::InvalidRequest);
        assert_eq!(Code::of_status(505), Code::Internal);
    }

    #[test]
    fn every_meaning_is_one_short_sentence() {
        for code in Code::ALL {
            let meaning = code.meaning();
            assert!(meaning.ends_with('.') && meaning.split_whitespace().count() <= 25, "{code}: {meaning}");
            assert!(!meaning.contains('|'), "{code}: it goes into a table");
        }
    }
}

#[cfg(feature = "openapi")]
mod schema {
    use std::borrow::Cow;

    use serde_json::json;
    use utoipa::openapi::RefOr;
    use utoipa::openapi::extensions::ExtensionsBuilder;
    use utoipa::openapi::schema::{ObjectBuilder, Schema, Type};
    use utoipa::{PartialSchema, ToSchema};

    use super::Code;

    impl PartialSchema for Code {
        fn schema() -> RefOr<Schema> {
            let all = Code::ALL.iter().map(|code| {
                let (status, retry) = (code.status(), code.retry().name());
                json!({ "code": code.name(), "status": status, "retry": retry, "meaning": code.meaning() })
            });
            // Only one extension: several would come in any order, and the document is compared.
            let extensions = ExtensionsBuilder::new().add("x-error-codes", all.collect::<Vec<_>>()).build();
            ObjectBuilder::new()
                .schema_type(Type::String)
                .enum_values(Some(Code::ALL.iter().map(|code| code.name())))
                .description(Some(described()))
                .extensions(Some(extensions))
                .into()
        }
    }

    impl ToSchema for Code {
        fn name() -> Cow<'static, str> {
            "ErrorCode".into()
        }
    }

    /// A table of all codes.
    fn described() -> String {
        let mut text = String::from(
            "Why a request failed. Later versions may add codes: treat an unknown code like its status. \
         *Again* means whether the same request can succeed later: `no`, `later` (wait a moment), or `after a change` \
         (of something other than the request).\n\n\
         | code | status | again | meaning |\n|---|---|---|---|\n",
        );
        for code in Code::ALL {
            let (name, status, retry) = (code.name(), code.status(), code.retry().name());
            text += &format!("| `{name}` | {status} | {retry} | {} |\n", code.meaning());
        }
        text
    }
}

//! The error codes of each route, for the OpenAPI document. A client can rely on it that a route has no other code; in
//! the unit tests, an error reply with another one fails.

use axum::http::Method;
use forkd_api::Code;

use Code::*;

/// Codes of the layers above the routes, of the host, and of wrong parameters. Any route may have them.
pub(super) const ANY: [Code; 10] = [
    InvalidRequest,
    Unauthorized,
    TokenExpired,
    Forbidden,
    OriginForbidden,
    UriTooLong,
    RateLimited,
    HeadersTooLarge,
    Internal,
    ShuttingDown,
];

/// Of a request with a body.
const BODY: &[Code] = &[RequestTimeout, BodyTooLarge, UnsupportedMediaType];

/// Of a POST, which may have an `Idempotency-Key`; the daemon reads its body to compare it.
pub(super) const POST: &[Code] = &[
    RequestTimeout,
    IdempotencyInProgress,
    IdempotencyOutcomeUnknown,
    IdempotencyAnswerLost,
    BodyTooLarge,
    UnsupportedMediaType,
    IdempotencyKeyReused,
    DaemonBusy,
];

/// Of a sandbox in a path.
const SANDBOX: &[Code] = &[SandboxNotFound, StateUnknown];

/// Of a sandbox that has to be in another state than it is.
pub(super) const STATE: &[Code] = &[
    SandboxStarting,
    SandboxPaused,
    SandboxWaitsForDisk,
    SandboxSuspending,
    SandboxEnded,
    SandboxBusy,
    SandboxReplaced,
    SandboxUnfit,
    MonitorRefused,
    SandboxLost,
    GuestFailed,
    GuestTimeout,
    SandboxUnresponsive,
    DiskFull,
];

/// Of a call to a guest's agent.
const GUEST: &[Code] = &[
    GuestForbidden,
    GuestNotFound,
    GuestConflict,
    GuestFailed,
    DaemonBusy,
    GuestBusy,
    GuestTimeout,
    GuestDiskFull,
];

/// Of a snapshot that a request names.
const SNAPSHOT: &[Code] = &[
    SnapshotNotFound,
    StateUnknown,
    SnapshotNotReady,
    SnapshotFailed,
    SnapshotUnusable,
    SnapshotDiskOnly,
    SnapshotReplaced,
];

/// Of a guest that boots or is forked.
const START: &[Code] = &[
    PathNotAllowed,
    ImageNotFound,
    PathNotFound,
    SandboxEnded,
    MonitorRefused,
    QuotaExceeded,
    TemplateEnded,
    GuestFailed,
    SandboxLost,
    DaemonBusy,
    LimitReached,
    GuestTimeout,
    DiskFull,
];

/// Of a snapshot that is made and saved.
const SAVE: &[Code] = &[
    TagTaken,
    SnapshotFailed,
    SnapshotReplaced,
    Cancelled,
    QuotaExceeded,
    TemplateEnded,
    DaemonBusy,
    LimitReached,
    DiskFull,
];

/// Of a branch, by its steps: see the front page of `branch`.
const BRANCH: &[Code] = &[
    TagTaken,
    SandboxStarting,
    SandboxPaused,
    SandboxEnded,
    SandboxBusy,
    SandboxReplaced,
    SandboxUnfit,
    SnapshotUnusable,
    Cancelled,
    MonitorRefused,
    QuotaExceeded,
    TemplateEnded,
    DaemonBusy,
    LimitReached,
    GuestTimeout,
    DiskFull,
];

/// Of a workspace in a path.
const WORKSPACE: &[Code] =
    &[WorkspaceRunning, WorkspaceNotRunning, WorkspaceNotFound, WorkspaceBusy, WorkspaceUnusable];

/// The codes of a route beside [`ANY`], in the order of [`Code::ALL`]; `None` for a route that is not in the table.
pub(super) fn of_route(method: &Method, path: &str) -> Option<Vec<Code>> {
    let sets: &[&[Code]] = match (method.as_str(), path) {
        ("GET", "/healthz" | "/version" | "/metrics" | "/v1/events" | "/v1/tree") => &[],
        ("GET", "/v1/sandboxes" | "/v1/snapshots" | "/v1/workspaces" | "/v1/tokens") => &[],
        ("POST", "/v1/sandboxes") => &[SNAPSHOT, START, STATE],
        ("GET", "/v1/sandboxes/{id}" | "/v1/sandboxes/{id}/console") => &[SANDBOX],
        ("GET", "/v1/sandboxes/{id}/stats") => &[SANDBOX, STATE],
        ("DELETE", "/v1/sandboxes/{id}") => &[SANDBOX, &[WorkspaceBusy]],
        ("PATCH", "/v1/sandboxes/{id}") => &[SANDBOX, STATE, &[QuotaExceeded]],
        ("POST", "/v1/sandboxes/{id}/pause" | "/v1/sandboxes/{id}/resume") => &[SANDBOX, STATE, START],
        ("POST", "/v1/sandboxes/{id}/rollback") => &[SANDBOX, STATE, SNAPSHOT, START, &[NoRollbackTarget]],
        ("POST", "/v1/sandboxes/{id}/branch") => &[SANDBOX, BRANCH],
        ("POST", "/v1/sandboxes/{id}/fork") => &[SANDBOX, STATE, SNAPSHOT, START],
        ("POST", "/v1/sandboxes/{id}/ping") => &[SANDBOX, STATE, GUEST],
        ("POST", "/v1/sandboxes/{id}/exec" | "/v1/sandboxes/{id}/eval") => &[SANDBOX, STATE, GUEST],
        ("POST", "/v1/sandboxes/{id}/json-lines" | "/v1/sandboxes/{id}/line") => &[SANDBOX, STATE, GUEST],
        ("GET", "/v1/sandboxes/{id}/exec/stream") => &[SANDBOX, STATE, GUEST, &[WebsocketRequired]],
        ("GET", "/v1/run") => &[&[WebsocketRequired]],
        ("PUT" | "DELETE", "/v1/sandboxes/{id}/agent-port" | "/v1/sandboxes/{id}/line-port") => {
            &[SANDBOX, STATE, GUEST]
        }
        ("GET", "/v1/sandboxes/{id}/files/list" | "/v1/sandboxes/{id}/files/tree") => {
            &[SANDBOX, STATE, GUEST, &[FolderTooLarge]]
        }
        ("GET", "/v1/sandboxes/{id}/files" | "/v1/sandboxes/{id}/files/stat")
        | ("PUT" | "DELETE", "/v1/sandboxes/{id}/files")
        | ("POST", "/v1/sandboxes/{id}/files/mkdir" | "/v1/sandboxes/{id}/files/move") => {
            &[SANDBOX, STATE, GUEST]
        }
        ("POST", "/v1/snapshots") => &[START, SNAPSHOT, SAVE],
        ("GET", "/v1/snapshots/{tag}" | "/v1/snapshots/{tag}/info") => &[SNAPSHOT],
        ("DELETE", "/v1/snapshots/{tag}") => &[SNAPSHOT, &[SnapshotInUse, WorkspaceBusy]],
        ("POST", "/v1/snapshots/{tag}/unload" | "/v1/snapshots/{tag}/owner") => {
            &[SNAPSHOT, &[SnapshotInUse, QuotaExceeded]]
        }
        ("POST", "/v1/snapshots/{tag}/compact") => &[SNAPSHOT, SAVE, START],
        ("POST", "/v1/workspaces") => &[WORKSPACE, SNAPSHOT, START, STATE, &[NameTaken]],
        ("GET", "/v1/workspaces/{name}") => &[WORKSPACE],
        ("DELETE", "/v1/workspaces/{name}") => &[WORKSPACE, &[SandboxBusy, SnapshotInUse, SnapshotReplaced]],
        ("POST", "/v1/workspaces/{name}/suspend") => &[WORKSPACE, STATE, SNAPSHOT, SAVE],
        ("POST", "/v1/workspaces/{name}/resume") => &[WORKSPACE, STATE, SNAPSHOT, START],
        ("POST", "/v1/tokens") => &[&[NameTaken, NameReserved, TooManyTokens]],
        ("DELETE", "/v1/tokens/{name}") | ("POST", "/v1/tokens/{name}/rotate") => {
            &[&[TokenNotFound, NameReserved]]
        }
        _ => return None,
    };
    let common: &[&[Code]] = match *method {
        Method::POST => &[POST],
        Method::PUT | Method::PATCH => &[BODY],
        _ => &[],
    };
    let has = |code: &Code| sets.iter().chain(common).any(|set| set.contains(code));
    Some(Code::ALL.iter().copied().filter(has).collect())
}

/// Checks the code of an error reply of a unit test.
#[cfg(test)]
pub(super) fn check(method: &Method, route: &str, error: &crate::error::Error) {
    let method = if method == Method::HEAD { &Method::GET } else { method };
    // A method that the route does not have, and the paths of other APIs.
    let Some(codes) = of_route(method, route) else { return };
    let code = error.code();
    assert!(
        codes.contains(&code) || ANY.contains(&code),
        "{method} {route} answered {code} ({error}); add the code in api/error_codes.rs"
    );
}

#[cfg(test)]
#[test]
#[should_panic(expected = "add the code in api/error_codes.rs")]
fn a_code_that_a_route_does_not_list_fails_the_test_that_gets_it() {
    check(&Method::GET, "/v1/sandboxes", &crate::error::Error::new(GuestDiskFull, "full"));
}

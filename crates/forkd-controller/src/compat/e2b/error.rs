//! Bodies of errors, as clients of the E2B API parse them.

use serde_json::{Value, json};

use crate::error::{Code, Error, Reader};

/// The code by which clients know that the guest's agent holds up a pause or a snapshot.
const AGENT_UNRESPONSIVE: &str = "sandbox_snapshot_guest_agent_unresponsive";

/// The body of an error with this status, of a request for `path`. Clients need `code` and `message`; some show
/// `error_code`.
pub(crate) fn body(status: u16, path: &str, error: &Error, reader: &Reader) -> Value {
    let shown = reader.logged(error);
    let stores = path.ends_with("/pause") || path.ends_with("/snapshots");
    let error_code = match error.code() {
        Code::SandboxUnresponsive | Code::GuestTimeout if stores => AGENT_UNRESPONSIVE,
        _ => &shown.code,
    };
    json!({
        "code": status,
        "message": shown.error,
        "error_code": error_code,
        "request_id": shown.request_id,
    })
}

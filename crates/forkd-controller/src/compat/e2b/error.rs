//! Bodies of errors, as clients of the E2B API parse them.

use serde_json::{Value, json};

use crate::error::{Error, Reader};

/// The body of an error with this status. Clients need `code` and `message`; some show `error_code`.
pub(crate) fn body(status: u16, error: &Error, reader: &Reader) -> Value {
    let shown = reader.logged(error);
    json!({
        "code": status,
        "message": shown.error,
        "error_code": shown.code,
        "request_id": shown.request_id,
    })
}

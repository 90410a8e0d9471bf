//! Errors of tools, in words for a model: the API's code and sentence, and which tool helps.

use forkd_api::{Code, ErrorBody, Retry};
use serde_json::{Value, json};

use crate::api::ApiReply;

/// The reason why a tool failed.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ToolError {
    pub(crate) code: String,
    pub(crate) message: String,
    pub(crate) request_id: String,
}

impl ToolError {
    pub(crate) fn new(code: &str, message: impl Into<String>) -> Self {
        ToolError { code: code.into(), message: message.into(), request_id: String::new() }
    }

    /// An argument is wrong.
    pub(crate) fn invalid(message: impl Into<String>) -> Self {
        ToolError::new(Code::InvalidRequest.name(), message)
    }

    /// The error in a reply of the daemon.
    pub(crate) fn of_reply(reply: &ApiReply) -> Self {
        if let Ok(ErrorBody { error, code, request_id }) = serde_json::from_slice(&reply.body)
            && !error.is_empty()
        {
            return ToolError { code, message: error, request_id };
        }
        let message = format!("the daemon replied with status {} and no reason", reply.status);
        ToolError::new(Code::of_status(reply.status).name(), message)
    }

    /// Whether the object does not exist.
    pub(crate) fn is_not_found(&self) -> bool {
        Code::named(&self.code).is_some_and(Code::is_not_found)
    }

    /// The error as text: what happened, and what to do.
    pub(crate) fn text(&self) -> String {
        let advice = advice(&self.code).map(|advice| format!(" {advice}")).unwrap_or_default();
        let end = if self.message.ends_with(['.', '!', '?']) { "" } else { "." };
        let id = match self.request_id.as_str() {
            "" => String::new(),
            id => format!(" (request id {id})"),
        };
        format!("{}: {}{end}{advice}{id}", self.code, self.message)
    }

    /// The error for programs.
    pub(crate) fn json(&self) -> Value {
        let retry = Code::named(&self.code).map(|code| code.retry().name());
        json!({
            "error": { "code": self.code, "message": self.message, "request_id": self.request_id, "retry": retry }
        })
    }
}

/// What helps, in terms of tools. The daemon's own sentences name commands of a terminal.
fn advice(code: &str) -> Option<&'static str> {
    let code = Code::named(code)?;
    Some(match code {
        Code::SandboxNotFound => {
            "list_sandboxes shows the sandboxes that exist; spawn_sandboxes makes new ones."
        }
        Code::SandboxEnded | Code::SandboxLost => {
            "rollback_sandbox runs it again from a branch; spawn_sandboxes makes another."
        }
        Code::SandboxUnresponsive => "kill_sandbox ends it; rollback_sandbox goes back to a branch.",
        Code::SnapshotNotFound => "list_snapshots shows the tags; create_snapshot makes a snapshot.",
        Code::SnapshotNotReady => "list_snapshots shows its status; call again when it is ready.",
        Code::ImageNotFound => "The operator builds an image with `forkd image build NAME`.",
        Code::QuotaExceeded | Code::LimitReached => "kill_sandbox ends sandboxes that are not needed.",
        Code::GuestNotFound => "list_files shows what is in a folder.",
        Code::TagTaken => "Choose another tag; list_snapshots shows those in use.",
        _ if code.retry() == Retry::Later => "The same call may succeed in a moment.",
        _ => return None,
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn reply(status: u16, body: &str) -> ApiReply {
        ApiReply { status, body: body.to_owned().into(), more: false, length: None }
    }

    #[test]
    fn an_error_has_the_apis_code_its_sentence_and_the_tool_that_helps() {
        let body = r#"{"error": "there is no sandbox sb1", "code": "sandbox_not_found", "request_id": "r1"}"#;
        let error = ToolError::of_reply(&reply(404, body));
        assert!(error.is_not_found());
        let text = error.text();
        assert!(text.starts_with("sandbox_not_found: there is no sandbox sb1. list_sandboxes"), "{text}");
        assert!(text.ends_with("(request id r1)"), "{text}");
        assert_eq!(error.json()["error"]["retry"], "no");
    }

    #[test]
    fn a_reply_without_a_reason_still_has_a_code() {
        for body in ["", "<html>", "{}", "[]"] {
            let error = ToolError::of_reply(&reply(502, body));
            assert!(error.text().contains("502"), "{error:?}");
        }
        assert_eq!(ToolError::of_reply(&reply(401, "")).code, "unauthorized");
    }
}

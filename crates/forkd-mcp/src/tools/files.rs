//! Tools that read, write and list files in a sandbox.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use bytes::Bytes;
use http::Method;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{Caller, Effect, Entry, Outcome, entry, sandbox_path};
use crate::api::{ApiBody, ApiRequest, encoded};
use crate::limit;
use crate::tool_error::ToolError;

pub(super) fn tools() -> Vec<Entry> {
    vec![
        entry(
            "read_file",
            "Read a file",
            Effect::Reads,
            "Read a file in a sandbox. A long file comes in parts: call again with the `offset` that the result \
             names. A file that is not UTF-8 comes as base64.",
            read_file,
        ),
        entry(
            "write_file",
            "Write a file",
            Effect::Destroys,
            "Write a file in a sandbox, completely or not at all. It replaces the file at this path; missing folders \
             are made.",
            write_file,
        ),
        entry(
            "list_files",
            "List files",
            Effect::Reads,
            "List a folder in a sandbox: path, type, size, permissions and time of each file.",
            list_files,
        ),
    ]
}

/// How bytes are written as text.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
enum Encoding {
    /// As they are.
    #[default]
    #[serde(rename = "utf-8")]
    Utf8,
    /// In base64.
    #[serde(rename = "base64")]
    Base64,
}

/// A file to read.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ReadFile {
    /// Id of the sandbox; list_sandboxes shows the ids.
    sandbox_id: String,
    /// Absolute path of the file.
    path: String,
    /// How many bytes to leave out at the beginning.
    #[serde(default)]
    offset: u64,
    /// The most bytes to read; as many as fit into a result when absent.
    max_bytes: Option<usize>,
}

async fn read_file(caller: Caller, args: ReadFile) -> Result<Outcome, ToolError> {
    // Room for the sentence at the end.
    let room = caller.output_limit - 512;
    let limit = args.max_bytes.unwrap_or(room).clamp(1, room);
    let request =
        ApiRequest { skip: args.offset, limit, ..ApiRequest::get(file_path(&args.sandbox_id, &args.path)?) };
    let reply = caller.ask(request).await?;
    let (text, encoding, taken) = as_text(&reply.body, reply.more, room);
    let end = args.offset.saturating_add(taken as u64);
    let more = reply.more || taken < reply.body.len();
    let mut structured = json!({
        "path": args.path,
        "content": text,
        "encoding": encoding,
        "offset": args.offset,
        "size": reply.length,
    });
    let mut shown = text;
    if more {
        let of = reply.length.map(|length| format!(" of {length}")).unwrap_or_default();
        let begin = args.offset;
        structured["next_offset"] = json!(end);
        shown += &format!(
            "\n[cut: bytes {begin} to {end}{of} are shown; for the rest, call read_file again with offset={end}]"
        );
    }
    if encoding == Encoding::Base64 {
        shown = format!("[the file is not UTF-8; this is base64]\n{shown}");
    }
    // The text has the content; twice the same would fill the model's context.
    limit::fit(&mut structured, caller.output_limit * 2, "the text of the result has it");
    Ok(Outcome::text(shown, structured))
}

/// Bytes as text, and how many of them: a part of a file may end in the middle of a character.
fn as_text(bytes: &[u8], more: bool, room: usize) -> (String, Encoding, usize) {
    match std::str::from_utf8(bytes) {
        Ok(text) => return (text.to_owned(), Encoding::Utf8, bytes.len()),
        // The last character is cut; the bytes before it are text.
        Err(error) if more && error.error_len().is_none() && error.valid_up_to() > 0 => {
            let text = String::from_utf8_lossy(&bytes[..error.valid_up_to()]).into_owned();
            return (text, Encoding::Utf8, error.valid_up_to());
        }
        Err(_) => {}
    }
    let taken = bytes.len().min(room / 4 * 3);
    (BASE64.encode(&bytes[..taken]), Encoding::Base64, taken)
}

/// The path of the route of a file.
pub(crate) fn file_path(sandbox_id: &str, path: &str) -> Result<String, ToolError> {
    Ok(format!("{}/files?path={}", sandbox_path(sandbox_id)?, encoded(path)))
}

/// A file to write.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct WriteFile {
    /// Id of the sandbox; list_sandboxes shows the ids.
    sandbox_id: String,
    /// Absolute path of the file.
    path: String,
    /// The whole content.
    content: String,
    /// How `content` is written: `utf-8`, or `base64` for bytes.
    #[serde(default)]
    encoding: Encoding,
    /// Permission bits in octal, such as "755". When absent, those of the replaced file, or the usual ones.
    mode: Option<String>,
}

async fn write_file(caller: Caller, args: WriteFile) -> Result<Outcome, ToolError> {
    let bytes = match args.encoding {
        Encoding::Utf8 => Bytes::from(args.content),
        Encoding::Base64 => match BASE64.decode(args.content.trim()) {
            Ok(bytes) => bytes.into(),
            Err(error) => return Err(ToolError::invalid(format!("the content is not base64: {error}"))),
        },
    };
    let mut path = file_path(&args.sandbox_id, &args.path)?;
    if let Some(mode) = args.mode {
        path += &format!("&mode={}", encoded(&mode));
    }
    let request = ApiRequest { body: ApiBody::Bytes(bytes), ..ApiRequest::new(Method::PUT, path) };
    let written = caller.json(request).await?;
    Ok(Outcome::object(&caller, written, "read_file reads the file"))
}

/// A folder to list.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListFiles {
    /// Id of the sandbox; list_sandboxes shows the ids.
    sandbox_id: String,
    /// Absolute path of the folder.
    #[serde(default = "root")]
    path: String,
    /// Number of levels, 1 to 64.
    #[serde(default = "one")]
    depth: u32,
    /// How many entries to leave out at the beginning: for the rest of a list that was cut.
    #[serde(default)]
    offset: usize,
}

fn root() -> String {
    "/".into()
}

fn one() -> u32 {
    1
}

async fn list_files(caller: Caller, args: ListFiles) -> Result<Outcome, ToolError> {
    let url = list_path(&args.sandbox_id, &args.path, args.depth)?;
    let mut listed = caller.json(ApiRequest::get(url)).await?;
    let entries = match listed["entries"].take() {
        Value::Array(entries) => entries,
        _ => Vec::new(),
    };
    Ok(Outcome::list(&caller, entries, args.offset))
}

/// The path of the route that lists a folder.
pub(crate) fn list_path(sandbox_id: &str, path: &str, depth: u32) -> Result<String, ToolError> {
    Ok(format!("{}/files/list?path={}&depth={depth}", sandbox_path(sandbox_id)?, encoded(path)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_part_of_a_file_ends_before_a_character_that_is_cut() {
        let text = "aä€".as_bytes();
        assert_eq!(as_text(text, false, 100), ("aä€".into(), Encoding::Utf8, 6));
        assert_eq!(as_text(&text[..5], true, 100), ("aä".into(), Encoding::Utf8, 3));
        assert_eq!(as_text(&text[..5], false, 100).1, Encoding::Base64);
        assert_eq!(as_text(&[0xff; 8], true, 8), (BASE64.encode([0xff; 6]), Encoding::Base64, 6));
        assert_eq!(as_text(&[0xe2], true, 100).1, Encoding::Base64);
    }
}

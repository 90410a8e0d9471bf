//! Resources: the tree as SVG, the console of a sandbox, and its files.
//!
//! - `forkd://tree.svg`
//! - `forkd://sandboxes/ID/console`
//! - `forkd://sandboxes/ID/files/PATH`: a file, or the list of a folder. PATH is below `/`.

use base64::Engine;
use base64::engine::general_purpose::STANDARD as BASE64;
use forkd_api::Tree;
use forkd_tree::{Forest, Node};
use rmcp::model::{Resource, ResourceContents, ResourceTemplate};
use serde_json::Value;

use crate::api::{ApiRequest, decoded};
use crate::limit;
use crate::tool_error::ToolError;
use crate::tools::files::{file_path, list_path};
use crate::tools::{Caller, sandbox_path};

/// The largest binary file that is read as a resource.
const MAX_BLOB: usize = 1 << 20;
/// The largest picture of the tree.
const MAX_SVG: usize = 1 << 20;
/// How many consoles are in the list of resources.
const MAX_LISTED: usize = 200;

/// What a URI names.
#[derive(Debug, PartialEq, Eq)]
enum Target {
    Tree,
    Console(String),
    Files(String, String),
}

fn target(uri: &str) -> Option<Target> {
    let rest = uri.strip_prefix("forkd://")?;
    if rest == "tree.svg" {
        return Some(Target::Tree);
    }
    let (id, rest) = rest.strip_prefix("sandboxes/")?.split_once('/')?;
    let id = decoded(id)?;
    match rest.split_once('/') {
        None if rest == "console" => Some(Target::Console(id)),
        None if rest == "files" => Some(Target::Files(id, "/".into())),
        Some(("files", path)) => {
            let path = decoded(path)?;
            // Some clients escape the slash before the path, some do not write it.
            Some(Target::Files(id, format!("/{}", path.trim_start_matches('/'))))
        }
        _ => None,
    }
}

/// The resources with a fixed URI, and a console for each sandbox.
pub(crate) async fn list(caller: &Caller) -> Result<Vec<Resource>, ToolError> {
    let mut all = vec![
        Resource::new("forkd://tree.svg", "tree.svg")
            .with_title("Fork tree")
            .with_description("Which snapshot or sandbox each one came from, as a picture.")
            .with_mime_type("image/svg+xml"),
    ];
    let sandboxes: Vec<Value> = caller.ask(ApiRequest::get("/v1/sandboxes")).await?.json()?;
    let ids = sandboxes.iter().filter_map(|sandbox| sandbox.get("id")?.as_str());
    all.extend(ids.take(MAX_LISTED).map(|id| {
        Resource::new(format!("forkd://sandboxes/{id}/console"), format!("{id} console"))
            .with_description(format!("The output of the console of sandbox {id}."))
            .with_mime_type("text/plain")
    }));
    Ok(all)
}

/// The resources whose URI has a parameter.
pub(crate) fn templates() -> Vec<ResourceTemplate> {
    vec![
        ResourceTemplate::new("forkd://sandboxes/{sandbox_id}/console", "console")
            .with_title("Console of a sandbox")
            .with_description("The newest output of a sandbox's console: its kernel and its init.")
            .with_mime_type("text/plain"),
        ResourceTemplate::new("forkd://sandboxes/{sandbox_id}/files/{+path}", "files")
            .with_title("Files of a sandbox")
            .with_description(
                "A file of a sandbox, or the list of a folder. The path has no slash at its beginning: \
                 forkd://sandboxes/sb4k2n/files/etc/hostname.",
            ),
    ]
}

/// Reads a resource; none if there is no resource with this URI.
pub(crate) async fn read(caller: &Caller, uri: &str) -> Result<Option<ResourceContents>, ToolError> {
    let contents = match target(uri) {
        None => return Ok(None),
        Some(Target::Tree) => {
            ResourceContents::text(picture(caller).await?, uri).with_mime_type("image/svg+xml")
        }
        Some(Target::Console(id)) => ResourceContents::text(console(caller, &id).await?, uri),
        Some(Target::Files(id, path)) => file(caller, uri, &id, &path).await?,
    };
    Ok(Some(contents))
}

async fn picture(caller: &Caller) -> Result<String, ToolError> {
    let tree: Tree<Node> = caller.ask(ApiRequest::get("/v1/tree")).await?.json()?;
    let picture = forkd_tree::svg(&Forest::new(tree.nodes));
    if picture.len() > MAX_SVG {
        let text = "the tree is too large for a picture; `forkd tree --svg FILE` draws it";
        return Err(ToolError::new("reply_too_long", text));
    }
    Ok(picture)
}

async fn console(caller: &Caller, id: &str) -> Result<String, ToolError> {
    let path = format!("{}/console", sandbox_path(id)?);
    let reply = caller.ask(ApiRequest::get(path.as_str())).await?;
    let text = String::from_utf8_lossy(&reply.body);
    // The newest part counts.
    let begin = limit::after(&text, text.len().saturating_sub(caller.output_limit - 256));
    if begin == 0 {
        return Ok(text.into_owned());
    }
    let all = text.len();
    Ok(format!(
        "[cut: {begin} of {all} bytes are left out here; `forkd logs {id}` prints them]\n{}",
        &text[begin..]
    ))
}

async fn file(caller: &Caller, uri: &str, id: &str, path: &str) -> Result<ResourceContents, ToolError> {
    let request = ApiRequest { limit: MAX_BLOB, ..ApiRequest::get(file_path(id, path)?) };
    let reply = match caller.ask(request).await {
        Ok(reply) => reply,
        Err(error) => {
            // The API reads regular files only. A folder is a list.
            return match caller.ask(ApiRequest::get(list_path(id, path, 1)?)).await {
                Ok(listed) => Ok(folder(caller, uri, &listed.json()?)),
                Err(_) => Err(error),
            };
        }
    };
    let how = "the tool read_file reads the rest, with its offset";
    match std::str::from_utf8(&reply.body) {
        Ok(text) => Ok(ResourceContents::text(limit::cut_end(text, caller.output_limit, how), uri)),
        Err(_) if reply.more => {
            let text = format!("the file is longer than {MAX_BLOB} bytes; {how}");
            Err(ToolError::new("reply_too_long", text))
        }
        Err(_) => Ok(ResourceContents::blob(BASE64.encode(&reply.body), uri)
            .with_mime_type("application/octet-stream")),
    }
}

fn folder(caller: &Caller, uri: &str, listed: &Value) -> ResourceContents {
    let entries = listed["entries"].as_array().map(Vec::as_slice).unwrap_or_default();
    let line = |entry: &Value| {
        let text = |field: &str| entry[field].as_str().unwrap_or("?").replace(['\n', '\r'], "?");
        format!("{} {:>10} {}", text("permissions"), entry["size"], text("path"))
    };
    let lines: Vec<String> = entries.iter().map(line).collect();
    let how = "the tool list_files lists the rest, with its offset";
    ResourceContents::text(limit::cut_end(&lines.join("\n"), caller.output_limit, how), uri)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_uri_names_one_thing_and_a_strange_one_nothing() {
        let files = |id: &str, path: &str| Some(Target::Files(id.into(), path.into()));
        assert_eq!(target("forkd://tree.svg"), Some(Target::Tree));
        assert_eq!(target("forkd://sandboxes/sb1/console"), Some(Target::Console("sb1".into())));
        assert_eq!(target("forkd://sandboxes/sb1/files/etc/hostname"), files("sb1", "/etc/hostname"));
        assert_eq!(target("forkd://sandboxes/sb1/files//etc/hostname"), files("sb1", "/etc/hostname"));
        assert_eq!(target("forkd://sandboxes/sb1/files/%2Fetc%2Fa%20b"), files("sb1", "/etc/a b"));
        assert_eq!(target("forkd://sandboxes/sb1/files"), files("sb1", "/"));
        assert_eq!(target("forkd://sandboxes/sb1/files/"), files("sb1", "/"));
        for strange in [
            "",
            "file:///etc/passwd",
            "forkd://",
            "forkd://sandboxes",
            "forkd://sandboxes/sb1",
            "forkd://sandboxes/sb1/secrets",
            "forkd://sandboxes/%ff/console",
            "forkd://sandboxes/sb1/console/x",
        ] {
            assert_eq!(target(strange), None, "{strange}");
        }
    }
}

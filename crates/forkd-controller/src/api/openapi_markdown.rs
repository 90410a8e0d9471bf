//! `docs/API.md`: the OpenAPI document as a page for people, with the scope each route needs.
//!
//! `FORKD_WRITE_OPENAPI=1 cargo test --release -p forkd-controller --lib openapi` writes it.

use std::collections::BTreeMap;
use std::fmt::Write;

use axum::http::Method;
use forkd_api::Code;
use serde_json::Value;

use crate::api::error_codes::{ANY, POST, STATE};
use crate::auth::policy;
use crate::auth::principal::Scope;

/// The sections of the page with the prefixes of their paths; a path belongs to the first section that matches.
const PARTS: [(&str, &[&str]); 9] = [
    ("Commands in a sandbox", &["/v1/sandboxes/{id}/exec", "/v1/sandboxes/{id}/eval", "/v1/run"]),
    ("Files in a sandbox", &["/v1/sandboxes/{id}/files"]),
    (
        "The JSON-lines protocol",
        &["/v1/sandboxes/{id}/json-lines", "/v1/sandboxes/{id}/agent-port", "/v1/sandboxes/{id}/line"],
    ),
    (
        "Branches and time",
        &[
            "/v1/sandboxes/{id}/branch",
            "/v1/sandboxes/{id}/rollback",
            "/v1/sandboxes/{id}/pause",
            "/v1/sandboxes/{id}/resume",
            "/v1/tree",
        ],
    ),
    ("Sandboxes", &["/v1/sandboxes"]),
    ("Snapshots", &["/v1/snapshots"]),
    ("Workspaces", &["/v1/workspaces"]),
    ("Tokens", &["/v1/tokens"]),
    ("The daemon", &["/"]),
];

/// The order of the sections on the page.
const ORDER: [usize; 9] = [4, 0, 1, 3, 5, 6, 7, 2, 8];

const INTRODUCTION: &str = "\
# The REST API

Made from [openapi.json](openapi.json), which is made from the code; the daemon serves it at `/openapi.json`.

The daemon listens on a unix socket (`/run/forkd/forkd.sock`), which needs no token, and on
`127.0.0.1:8889`, where every request but `/healthz` carries `Authorization: Bearer TOKEN`.
[SECURITY.md](SECURITY.md) shows how to get a token, and [RUNBOOK.md](RUNBOOK.md) how to call the API with `curl`.

- **Errors.** Every reply that is not 2xx has a body `{\"error\": \"…\", \"code\": \"…\", \"request_id\": \"…\"}`. `error`
  is a sentence for people: what is wrong and what to do. `code` is for programs, and does not change when the
  sentence does: [ErrorCode](#errorcode) lists all of them, and whether a retry helps. The daemon's log has
  details under the `request_id`, which is also in `X-Request-Id`. Causes on the host (paths, error numbers) are
  shown to clients of the unix socket and to admins only.
- **Scopes.** A token may `read`, `write` (which includes reading; the older name is `use`) or be `admin`; each route
  below names the scope it needs. Objects of other owners return 404 and are not listed.
- **Idempotency.** A POST with an `Idempotency-Key` (1 to 255 visible characters) is done once; the same request with
  the same key gets the first reply again, with `Idempotent-Replayed: true`.
- **Pages.** `limit` is the most entries of a reply. To get the next page, give `X-Next-Cursor` of this one as
  `cursor`.
- **Limits.** 429 means that the owner's quota is used up, or that a token sends too many requests; then
  `Retry-After` has the seconds to wait.
- **Bodies.** Unknown fields and duplicate fields are rejected.
";

/// The whole page.
fn page(document: &Value) -> String {
    let mut page = String::from(INTRODUCTION);
    let list = |codes: &mut dyn Iterator<Item = &Code>| {
        codes.map(|code| format!("`{code}`")).collect::<Vec<_>>().join(", ")
    };
    let _ = writeln!(
        page,
        "- **Codes of a route.** An error of a route has a code in its table, or one of these: {}. A POST may also \
         have {}. `{STATES}` in a table stands for {}. A WebSocket also sends codes in its `error` event.",
        list(&mut ANY.iter()),
        list(&mut POST.iter().filter(|code| is_idempotency(code.name()))),
        list(&mut STATE.iter().filter(|code| is_state(code))),
    );
    let parts = routes_by_part(document);
    let _ = writeln!(page, "\n| route | needs | |\n|---|---|---|");
    for part in ORDER {
        for (method, path, operation) in &parts[&part] {
            let (title, needs) = (title(method, path), needs(method, path));
            let what = line(&operation["summary"]);
            let _ = writeln!(page, "| [`{title}`](#{}) | {needs} | {what} |", anchor(&title));
        }
    }
    for part in ORDER {
        let _ = writeln!(page, "\n## {}", PARTS[part].0);
        for (method, path, operation) in &parts[&part] {
            route(&mut page, method, path, operation);
        }
    }
    let _ = writeln!(page, "\n## Types");
    for (name, schema) in object(&document["components"]["schemas"]) {
        named_type(&mut page, name, schema);
    }
    page
}

type Route<'a> = (String, &'a str, &'a Value);

fn routes_by_part(document: &Value) -> BTreeMap<usize, Vec<Route<'_>>> {
    let mut parts: BTreeMap<usize, Vec<Route<'_>>> =
        (0..PARTS.len()).map(|part| (part, Vec::new())).collect();
    for (path, methods) in object(&document["paths"]) {
        let part = PARTS.iter().position(|(_, starts)| starts.iter().any(|start| path.starts_with(start)));
        for (method, operation) in object(methods) {
            let routes = parts.entry(part.unwrap_or(PARTS.len() - 1)).or_default();
            routes.push((method.to_uppercase(), path, operation));
        }
    }
    parts
}

fn route(page: &mut String, method: &str, path: &str, operation: &Value) {
    let _ = writeln!(page, "\n### {}\n\n{}", title(method, path), paragraph(&operation["summary"]));
    if operation["description"].is_string() {
        let _ = writeln!(page, "\n{}", paragraph(&operation["description"]));
    }
    let parameters = operation["parameters"].as_array().into_iter().flatten();
    let rows: Vec<_> = parameters.filter(|one| one["in"] != "path").collect();
    if !rows.is_empty() {
        let _ = writeln!(page, "\n| parameter | in | type | |\n|---|---|---|---|");
    }
    for one in rows {
        let (name, place, kind) = (text(&one["name"]), text(&one["in"]), kind(&one["schema"]));
        let must = if one["required"] == true { "**Needed.** " } else { "" };
        let _ = writeln!(page, "| `{name}` | {place} | {kind} | {must}{} |", line(&one["description"]));
    }
    let body = &operation["requestBody"];
    for (media, content) in object(&body["content"]) {
        let must = if body["required"] == true { "" } else { ", which may be left out" };
        let _ = writeln!(page, "\nBody: {} (`{media}`){must}.", kind(&content["schema"]));
    }
    let _ = writeln!(page, "\n| status | body | |\n|---|---|---|");
    for (status, response) in object(&operation["responses"]) {
        let codes = special_codes(response);
        // Codes of every route are in the introduction.
        if status == "default" && codes.is_empty() {
            continue;
        }
        let (status, what) = match status {
            "default" => ("other", String::new()),
            status => (status, line(&response["description"])),
        };
        let between = if has_code(&what, response) { "; also " } else { ": " };
        let what = [what.trim_end_matches('.'), &codes.join(", ")].map(str::to_owned);
        let what: Vec<_> = what.into_iter().filter(|part| !part.is_empty()).collect();
        let bodies = object(&response["content"]).map(|(media, content)| match media {
            "application/json" => kind(&content["schema"]),
            other => format!("`{other}`"),
        });
        let bodies: Vec<_> = bodies.collect();
        let _ = writeln!(page, "| {status} | {} | {} |", bodies.join(", "), what.join(between));
    }
    websocket(page, &operation["x-websocket"]);
}

/// The codes of a response that neither its description names nor every route has.
fn special_codes(response: &Value) -> Vec<String> {
    let any = |code: &str| ANY.iter().any(|any| any.name() == code) || is_idempotency(code);
    let described = |code: &str| names(text(&response["description"]), code);
    let mut codes: Vec<_> = error_codes(response).filter(|code| !any(code) && !described(code)).collect();
    let states: Vec<_> = STATE.iter().filter(|code| is_state(code)).map(|code| code.name()).collect();
    if states.iter().all(|state| codes.contains(state)) {
        codes.retain(|code| !states.contains(code));
        codes.push(STATES);
    }
    codes.iter().map(|code| format!("`{code}`")).collect()
}

fn error_codes(response: &Value) -> impl Iterator<Item = &str> {
    response["x-error-codes"].as_array().into_iter().flatten().map(text)
}

/// Whether a description names a code of its response.
fn has_code(description: &str, response: &Value) -> bool {
    error_codes(response).any(|code| names(description, code))
}

/// Whether a description names `code`.
fn names(description: &str, code: &str) -> bool {
    description.contains(&format!("`{code}`"))
}

/// Stands for all codes of the state of a sandbox.
const STATES: &str = "sandbox_*";

fn is_state(code: &Code) -> bool {
    code.is_conflict() && code.name().starts_with("sandbox_")
}

fn is_idempotency(name: &str) -> bool {
    name.starts_with("idempotency_")
}

/// The frames of a WebSocket, in their order.
fn websocket(page: &mut String, talk: &Value) {
    if talk.is_null() {
        return;
    }
    let _ = writeln!(page, "\n{} {} {}", text(&talk["text"]), text(&talk["binary"]), text(&talk["close"]));
    let _ = writeln!(page, "\n| from | frame | how many | when | |\n|---|---|---|---|---|");
    for frame in talk["frames"].as_array().into_iter().flatten() {
        let content = match frame["channel"].as_u64() {
            Some(channel) => format!("binary, channel {channel}"),
            None => match frame["property"].as_str() {
                Some(property) => format!("{} `{property}`", kind(&frame["schema"])),
                None => kind(&frame["schema"]),
            },
        };
        let [from, count, phase] = ["from", "count", "phase"].map(|key| text(&frame[key]));
        let _ =
            writeln!(page, "| {from} | {content} | {count} | {phase} | {} |", text(&frame["description"]));
    }
}

fn named_type(page: &mut String, name: &str, schema: &Value) {
    let _ = writeln!(page, "\n### {name}\n\n{}", paragraph(&schema["description"]));
    if let Some(values) = schema["enum"].as_array() {
        let values: Vec<_> = values.iter().map(|value| format!("`{}`", text(value))).collect();
        let _ = writeln!(page, "\nOne of {}.", values.join(", "));
    }
    let cases = schema["oneOf"].as_array().map(Vec::as_slice).unwrap_or(std::slice::from_ref(schema));
    for case in cases {
        if cases.len() > 1 {
            let _ = writeln!(page, "\n{}", paragraph(&case["description"]));
        }
        fields(page, case);
    }
}

fn fields(page: &mut String, schema: &Value) {
    let needed =
        |name: &str| schema["required"].as_array().is_some_and(|all| all.iter().any(|one| one == name));
    if object(&schema["properties"]).next().is_some() {
        let _ = writeln!(page, "\n| field | type | |\n|---|---|---|");
    }
    for (name, field) in object(&schema["properties"]) {
        let must = if needed(name) { "" } else { " (may be absent)" };
        let _ = writeln!(page, "| `{name}` | {}{must} | {} |", kind(field), line(&described(field)));
    }
}

/// The description of a field. A nullable field has it in one of its two cases.
fn described(field: &Value) -> Value {
    let cases = field["oneOf"].as_array().into_iter().flatten();
    let mut said = std::iter::once(field).chain(cases).map(|one| &one["description"]);
    said.find(|description| description.is_string()).cloned().unwrap_or_default()
}

/// A short name for a type, with a link to its description.
fn kind(schema: &Value) -> String {
    if let Some(name) = schema["$ref"].as_str().and_then(|name| name.rsplit('/').next()) {
        return format!("[{name}](#{})", name.to_lowercase());
    }
    if let Some(cases) = schema["oneOf"].as_array() {
        return cases.iter().map(kind).collect::<Vec<_>>().join(" or ");
    }
    if let Some([only]) = schema["enum"].as_array().map(Vec::as_slice) {
        return format!("`\"{}\"`", text(only));
    }
    let several = schema["type"].as_array().into_iter().flatten();
    let types = several.chain(schema.get("type").filter(|one| one.is_string())).map(text);
    let types = types.map(|one| match one {
        "array" => format!("list of {}", kind(&schema["items"])),
        "object" if schema["additionalProperties"].is_object() => {
            format!("object of {}", kind(&schema["additionalProperties"]))
        }
        other => other.to_owned(),
    });
    let types: Vec<_> = types.collect();
    if types.is_empty() { "any".to_owned() } else { types.join(" or ") }
}

fn title(method: &str, path: &str) -> String {
    format!("{method} {path}")
}

/// The anchor that Markdown viewers make of a heading.
fn anchor(title: &str) -> String {
    let kept = title.chars().filter(|c| c.is_alphanumeric() || matches!(c, ' ' | '-' | '_'));
    kept.collect::<String>().to_lowercase().replace(' ', "-")
}

fn needs(method: &str, path: &str) -> &'static str {
    if policy::is_open(path) {
        return "nothing";
    }
    match policy::needed(&Method::from_bytes(method.as_bytes()).unwrap(), path) {
        Scope::Read => "read",
        Scope::Write => "write",
        Scope::Admin => "admin",
    }
}

fn object(value: &Value) -> impl Iterator<Item = (&str, &Value)> {
    value.as_object().into_iter().flatten().map(|(name, value)| (name.as_str(), value))
}

fn text(value: &Value) -> &str {
    value.as_str().unwrap_or_default()
}

fn paragraph(value: &Value) -> String {
    text(value).trim().to_owned()
}

/// On one line, for a table.
fn line(value: &Value) -> String {
    text(value).split_whitespace().collect::<Vec<_>>().join(" ").replace('|', "\\|")
}

#[test]
fn the_committed_page_matches_the_document() {
    let made = page(&serde_json::from_str(&crate::api::openapi()).unwrap());
    crate::api::tests::is_committed("docs/API.md", &made);
}

#[test]
fn every_route_and_type_is_on_the_page() {
    let document: Value = serde_json::from_str(&crate::api::openapi()).unwrap();
    let page = page(&document);
    for (path, methods) in object(&document["paths"]) {
        for (method, _) in object(methods) {
            let heading = format!("\n### {}\n", title(&method.to_uppercase(), path));
            assert_eq!(page.matches(&heading).count(), 1, "{heading}");
        }
    }
    for (name, _) in object(&document["components"]["schemas"]) {
        assert!(page.contains(&format!("\n### {name}\n")), "{name}");
    }
    for link in page.split("](#").skip(1).map(|rest| rest.split(')').next().unwrap()) {
        let headings = page.lines().filter_map(|line| line.strip_prefix("### "));
        assert!(headings.map(anchor).any(|heading| heading == link), "{link}");
    }
}

#[test]
fn every_operation_has_a_name_of_its_own() {
    let document: Value = serde_json::from_str(&crate::api::openapi()).unwrap();
    let operations = object(&document["paths"]).flat_map(|(_, methods)| object(methods));
    let mut names: Vec<_> = operations.map(|(_, operation)| text(&operation["operationId"])).collect();
    let all = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), all, "{names:?}");
    assert!(!names.contains(&""));
}

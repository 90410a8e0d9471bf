//! The tools: one table with names, words, schemas and functions.
//!
//! Eleven tools have the names, the arguments and the results of the reference's server; their other arguments are
//! additions. `sandboxes`, `snapshots`, `commands` and `files` have the functions.

mod commands;
pub(crate) mod files;
mod sandboxes;
mod snapshots;

use std::sync::{Arc, LazyLock};

use futures_util::FutureExt;
use futures_util::future::BoxFuture;
use rmcp::model::{CallToolResult, ContentBlock, JsonObject, Tool, ToolAnnotations};
use schemars::JsonSchema;
use schemars::generate::SchemaSettings;
use serde::de::DeserializeOwned;
use serde_json::{Value, json};

use crate::api::{Api, ApiReply, ApiRequest, ask, encoded};
use crate::limit;
use crate::session::{Makes, Session};
use crate::tool_error::ToolError;

/// What a call works with: the API with the client's rights, the client's session, and the limit of a text.
#[derive(Clone)]
pub(crate) struct Caller {
    pub(crate) api: Arc<dyn Api>,
    pub(crate) session: Arc<Session>,
    pub(crate) output_limit: usize,
}

impl std::fmt::Debug for Caller {
    fn fmt(&self, formatter: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.session.fmt(formatter)
    }
}

impl Caller {
    pub(crate) async fn ask(&self, request: ApiRequest) -> Result<ApiReply, ToolError> {
        ask(&*self.api, request).await
    }

    /// Sends a request whose reply is JSON.
    pub(crate) async fn json(&self, request: ApiRequest) -> Result<Value, ToolError> {
        self.ask(request).await?.json()
    }

    /// Sends a request that makes something. The end of the session ends it, unless it is kept.
    async fn make(&self, request: ApiRequest, makes: Makes, keep: bool) -> Result<Value, ToolError> {
        self.session.make(self.api.clone(), request, makes, keep).await
    }
}

/// The result of a tool.
#[derive(Debug)]
pub(crate) struct Outcome {
    texts: Vec<String>,
    structured: Value,
}

impl Outcome {
    /// An object, as JSON text and as structured content. Of long strings the middle is cut; `how` is how to get it.
    fn object(caller: &Caller, mut value: Value, how: &str) -> Self {
        limit::fit(&mut value, caller.output_limit, how);
        Outcome { texts: vec![value.to_string()], structured: value }
    }

    /// A list: a text for each entry, and all of them as `result`. The reference's server does the same.
    fn list(caller: &Caller, items: Vec<Value>, offset: usize) -> Self {
        let (shown, cut) = limit::fit_list(items, offset, caller.output_limit);
        let mut texts: Vec<String> = shown.iter().map(Value::to_string).collect();
        if texts.is_empty() {
            texts.push("[]".into());
        }
        let mut structured = json!({ "result": shown });
        if let Some(cut) = cut {
            structured["cut"] = json!(cut);
            texts.push(cut);
        }
        Outcome { texts, structured }
    }

    /// A text for people and models, and the same as an object. The caller has cut both.
    fn text(text: String, structured: Value) -> Self {
        Outcome { texts: vec![text], structured }
    }
}

type Run = Box<dyn Fn(Caller, JsonObject) -> BoxFuture<'static, Result<Outcome, ToolError>> + Send + Sync>;

/// What a tool does to its environment.
#[derive(Debug, Clone, Copy)]
enum Effect {
    /// It changes nothing.
    Reads,
    /// It makes something, and changes nothing that exists.
    Adds,
    /// It can lose data of a sandbox, or a sandbox.
    Destroys,
    /// It runs code of the caller.
    Runs,
}

struct Entry {
    tool: Tool,
    run: Run,
}

fn entry<A, F>(
    name: &'static str,
    title: &'static str,
    effect: Effect,
    description: &'static str,
    run: fn(Caller, A) -> F,
) -> Entry
where
    A: DeserializeOwned + JsonSchema + Send + 'static,
    F: Future<Output = Result<Outcome, ToolError>> + Send + 'static,
{
    let annotations = ToolAnnotations::with_title(title)
        .read_only(matches!(effect, Effect::Reads))
        .destructive(matches!(effect, Effect::Destroys | Effect::Runs))
        .idempotent(matches!(effect, Effect::Reads))
        .open_world(matches!(effect, Effect::Runs));
    let tool =
        Tool::new(name, description, Arc::new(schema::<A>())).with_title(title).with_annotations(annotations);
    let run: Run = Box::new(move |caller, arguments| match read::<A>(arguments) {
        Ok(arguments) => run(caller, arguments).boxed(),
        Err(error) => futures_util::future::ready(Err(error)).boxed(),
    });
    Entry { tool, run }
}

fn read<A: DeserializeOwned>(arguments: JsonObject) -> Result<A, ToolError> {
    serde_json::from_value(Value::Object(arguments))
        .map_err(|error| ToolError::invalid(format!("the arguments do not fit the tool: {error}")))
}

/// The schema of arguments, without references: not every client follows them.
fn schema<A: JsonSchema>() -> JsonObject {
    let settings = SchemaSettings::draft2020_12().with(|settings| settings.inline_subschemas = true);
    let schema = settings.into_generator().into_root_schema_for::<A>();
    let mut object = schema.as_object().cloned().unwrap_or_default();
    object.remove("title");
    object.remove("description");
    for property in object
        .get_mut("properties")
        .and_then(Value::as_object_mut)
        .into_iter()
        .flat_map(|all| all.values_mut())
    {
        without_null(property);
    }
    object
}

/// An optional argument has one type: not every client understands a type or null. A null is still accepted.
fn without_null(property: &mut Value) {
    let Some(fields) = property.as_object_mut() else { return };
    if fields.get("default") == Some(&Value::Null) {
        fields.remove("default");
    }
    if let Some(Value::Array(types)) = fields.get_mut("type") {
        types.retain(|one| one != "null");
        if let [one] = &types[..] {
            let one = one.clone();
            fields.insert("type".into(), one);
        }
    }
    if let Some(Value::Array(mut branches)) = fields.remove("anyOf") {
        branches.retain(|branch| branch["type"] != "null");
        match branches.pop() {
            Some(Value::Object(only)) if branches.is_empty() => {
                // The words of the argument stay.
                only.into_iter().for_each(|(name, value)| {
                    fields.entry(name).or_insert(value);
                });
            }
            last => {
                branches.extend(last);
                fields.insert("anyOf".into(), Value::Array(branches));
            }
        }
    }
}

static TABLE: LazyLock<Vec<Entry>> = LazyLock::new(|| {
    let mut table = snapshots::tools();
    table.extend(sandboxes::tools());
    table.extend(commands::tools());
    table.extend(files::tools());
    table
});

/// All tools.
pub(crate) fn list() -> Vec<Tool> {
    TABLE.iter().map(|entry| entry.tool.clone()).collect()
}

/// The tool of this name.
pub(crate) fn find(name: &str) -> Option<Tool> {
    TABLE.iter().find(|entry| entry.tool.name == name).map(|entry| entry.tool.clone())
}

/// Calls a tool; none if there is no tool of this name.
pub(crate) async fn call(caller: Caller, name: &str, arguments: JsonObject) -> Option<CallToolResult> {
    let entry = TABLE.iter().find(|entry| entry.tool.name == name)?;
    Some(match (entry.run)(caller, arguments).await {
        Ok(outcome) => {
            let mut result =
                CallToolResult::success(outcome.texts.into_iter().map(ContentBlock::text).collect());
            result.structured_content = Some(outcome.structured);
            result
        }
        Err(error) => {
            let mut result = CallToolResult::error(vec![ContentBlock::text(error.text())]);
            result.structured_content = Some(error.json());
            result
        }
    })
}

/// The path of a sandbox. The id comes from a model: it must stay one part of the path.
pub(crate) fn sandbox_path(id: &str) -> Result<String, ToolError> {
    Ok(format!("/v1/sandboxes/{}", name("sandbox_id", id)?))
}

/// A name as a part of a path.
pub(crate) fn name(argument: &str, name: &str) -> Result<String, ToolError> {
    if name.is_empty() || name.len() > 255 || name.chars().all(|c| c == '.') {
        return Err(ToolError::invalid(format!("{argument} is {name:?}, which is no name")));
    }
    Ok(encoded(name))
}

/// Leaves out the fields that are null: the API refuses some of them.
fn without_nulls(mut body: Value) -> Value {
    if let Value::Object(fields) = &mut body {
        fields.retain(|_, value| !value.is_null());
    }
    body
}

/// Arguments of tools that need none.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Nothing {}

/// The sandbox that a tool is about.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SandboxArgs {
    /// Id of the sandbox, such as `sb4k2n`; list_sandboxes shows the ids.
    sandbox_id: String,
}

/// The part of a list to return.
#[derive(Debug, serde::Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ListArgs {
    /// How many entries to leave out at the beginning: for the rest of a list that was cut.
    #[serde(default)]
    offset: usize,
}

#[cfg(test)]
mod tests;

//! Tools that make, list, keep and end sandboxes.

use std::collections::BTreeMap;
use std::time::Duration;

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Value, json};

use super::{
    Caller, Effect, Entry, ListArgs, Outcome, SandboxArgs, entry, name, sandbox_path, without_nulls,
};
use crate::api::ApiRequest;
use crate::session::Makes;
use crate::tool_error::ToolError;

/// How long the daemon may take to fork and start children. The first fork from a snapshot loads it from disk.
const SPAWN_PATIENCE: Duration = Duration::from_secs(10 * 60);
/// How to see an object that was cut.
const HOW: &str = "get_sandbox shows one sandbox";

pub(super) fn tools() -> Vec<Entry> {
    vec![
        entry(
            "spawn_sandboxes",
            "Fork sandboxes from a snapshot",
            Effect::Adds,
            "Fork sandboxes from a snapshot: each is a virtual machine of its own that continues with the snapshot's \
             memory, processes and files, within milliseconds. Use exec_command, run_code and the file tools in \
             them. They end at the end of this session, unless `keep` is true.",
            spawn_sandboxes,
        ),
        entry(
            "fork_sandbox",
            "Fork a running sandbox",
            Effect::Adds,
            "Fork children from the present moment of a running sandbox, which continues. All children have the same \
             memory, processes and files. Use it to try several ways from one state; compare the children, keep the \
             best one and kill the others. Nothing is saved: to return to this moment later, use branch_sandbox.",
            fork_sandbox,
        ),
        entry(
            "rollback_sandbox",
            "Roll a sandbox back",
            Effect::Destroys,
            "Take a sandbox back to a branch: it continues from that moment under the same id, and later work is \
             lost. Use it when a step failed.",
            rollback_sandbox,
        ),
        entry(
            "list_sandboxes",
            "List sandboxes",
            Effect::Reads,
            "List the sandboxes with their state, snapshot and memory.",
            list_sandboxes,
        ),
        entry("get_sandbox", "Show a sandbox", Effect::Reads, "Show one sandbox.", get_sandbox),
        entry(
            "ping_sandbox",
            "Ping a sandbox",
            Effect::Reads,
            "Ask the agent in a sandbox whether it is up and warm, and whether the sandbox has Python.",
            ping_sandbox,
        ),
        entry(
            "kill_sandbox",
            "End a sandbox",
            Effect::Destroys,
            "End a sandbox at once and remove it, with its memory and its files.",
            kill_sandbox,
        ),
        entry(
            "keep",
            "Keep sandboxes and snapshots",
            Effect::Adds,
            "Keep sandboxes or snapshots of this session: they stay when the session ends. Use it for the result that \
             the user wants to have. kill_sandbox still ends a sandbox that is kept.",
            keep,
        ),
    ]
}

/// Sandboxes to fork from a snapshot.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct SpawnSandboxes {
    /// Tag of the snapshot; list_snapshots shows the tags.
    snapshot_tag: String,
    /// How many sandboxes, 1 to 1000.
    #[serde(default = "one")]
    n: u32,
    /// Memory of the host that each sandbox may take, in MiB. When absent, what a guest of this size needs; a limit
    /// below that ends the guest when it uses its memory.
    memory_limit_mib: Option<u64>,
    /// Whether the sandboxes have a network. When absent, they have one if the snapshot has one.
    network: Option<bool>,
    /// Variables for every process started in them: the place for secrets.
    env: Option<BTreeMap<String, String>>,
    /// Accepted and ignored: every sandbox has a network of its own.
    per_child_netns: Option<bool>,
    /// Accepted and ignored.
    prewarm: Option<bool>,
    /// Accepted and ignored: every sandbox can be branched.
    live_fork: Option<bool>,
    /// Whether the sandboxes stay after this session.
    #[serde(default, skip_serializing)]
    keep: bool,
}

fn one() -> u32 {
    1
}

async fn spawn_sandboxes(caller: Caller, args: SpawnSandboxes) -> Result<Outcome, ToolError> {
    let keep = args.keep;
    make(caller, "/v1/sandboxes?results=each".into(), json!(args), keep).await
}

/// Children to fork from a sandbox.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct ForkSandbox {
    /// Id of the running sandbox; list_sandboxes shows the ids.
    #[serde(skip_serializing)]
    sandbox_id: String,
    /// How many children, 1 to 1000.
    #[serde(default = "one")]
    n: u32,
    /// Memory of the host that each child may take, in MiB. When absent, what a guest of this size needs.
    memory_limit_mib: Option<u64>,
    /// Whether the children have a network. When absent, they have one if the sandbox has one.
    network: Option<bool>,
    /// Variables for every process started in the children.
    env: Option<BTreeMap<String, String>>,
    /// Whether the children stay after this session.
    #[serde(default, skip_serializing)]
    keep: bool,
}

async fn fork_sandbox(caller: Caller, args: ForkSandbox) -> Result<Outcome, ToolError> {
    let path = format!("{}/fork?results=each", sandbox_path(&args.sandbox_id)?);
    let keep = args.keep;
    make(caller, path, json!(args), keep).await
}

/// Makes sandboxes. The result is the list of those that run; a child that does not run is an error beside it.
async fn make(caller: Caller, path: String, body: Value, keep: bool) -> Result<Outcome, ToolError> {
    let request = ApiRequest::post(path, without_nulls(body)).within(SPAWN_PATIENCE);
    let reply = caller.make(request, Makes::Sandboxes, keep).await?;
    let list = |field: &str| reply.get(field).and_then(Value::as_array).cloned().unwrap_or_default();
    let (children, errors) = (list("children"), list("errors"));
    let mut outcome = Outcome::list(&caller, children, 0);
    if let Some(first) = errors.first() {
        let reason = first.get("error").and_then(Value::as_str).unwrap_or("the daemon gave no reason");
        outcome.texts.push(format!("[{} of the sandboxes do not run; the first: {reason}]", errors.len()));
        outcome.structured["errors"] = json!(errors.iter().take(10).collect::<Vec<_>>());
    }
    Ok(outcome)
}

/// Where to roll back to.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct RollbackSandbox {
    /// Id of the sandbox; list_sandboxes shows the ids.
    #[serde(skip_serializing)]
    sandbox_id: String,
    /// Tag of the branch. When absent, the sandbox's latest branch, or else its snapshot.
    to: Option<String>,
}

async fn rollback_sandbox(caller: Caller, args: RollbackSandbox) -> Result<Outcome, ToolError> {
    let path = format!("{}/rollback", sandbox_path(&args.sandbox_id)?);
    let request = ApiRequest::post(path, without_nulls(json!(args))).within(SPAWN_PATIENCE);
    let sandbox = caller.json(request).await?;
    Ok(Outcome::object(&caller, sandbox, HOW))
}

async fn list_sandboxes(caller: Caller, args: ListArgs) -> Result<Outcome, ToolError> {
    let sandboxes = caller.ask(ApiRequest::get("/v1/sandboxes")).await?.json()?;
    Ok(Outcome::list(&caller, sandboxes, args.offset))
}

async fn get_sandbox(caller: Caller, args: SandboxArgs) -> Result<Outcome, ToolError> {
    let sandbox = caller.json(ApiRequest::get(sandbox_path(&args.sandbox_id)?)).await?;
    Ok(Outcome::object(&caller, sandbox, "the resource `console` has the output of the guest"))
}

async fn ping_sandbox(caller: Caller, args: SandboxArgs) -> Result<Outcome, ToolError> {
    let path = format!("{}/ping", sandbox_path(&args.sandbox_id)?);
    let pong = caller.json(ApiRequest::new(http::Method::POST, path)).await?;
    Ok(Outcome::object(&caller, pong, HOW))
}

async fn kill_sandbox(caller: Caller, args: SandboxArgs) -> Result<Outcome, ToolError> {
    caller.ask(ApiRequest::delete(sandbox_path(&args.sandbox_id)?)).await?;
    caller.session.forget(&args.sandbox_id);
    Ok(Outcome::object(&caller, json!({ "id": args.sandbox_id, "killed": true }), HOW))
}

/// What to keep.
#[derive(Debug, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct Keep {
    /// Ids of sandboxes.
    #[serde(default)]
    sandbox_ids: Vec<String>,
    /// Tags of snapshots and branches.
    #[serde(default)]
    snapshot_tags: Vec<String>,
}

async fn keep(caller: Caller, args: Keep) -> Result<Outcome, ToolError> {
    if args.sandbox_ids.is_empty() && args.snapshot_tags.is_empty() {
        return Err(ToolError::invalid("name what to keep: `sandbox_ids` or `snapshot_tags`"));
    }
    // All of them have to exist: a model that misspells a name must not believe that it is kept.
    for id in &args.sandbox_ids {
        caller.ask(ApiRequest::get(sandbox_path(id)?)).await?;
    }
    for tag in &args.snapshot_tags {
        caller.ask(ApiRequest::get(format!("/v1/snapshots/{}", name("snapshot_tags", tag)?))).await?;
    }
    let mut others = Vec::new();
    for id in &args.sandbox_ids {
        if !caller.session.keep_sandbox(&*caller.api, id).await? {
            others.push(id.clone());
        }
    }
    for tag in &args.snapshot_tags {
        if !caller.session.keep_snapshot(tag) {
            others.push(tag.clone());
        }
    }
    let kept: Vec<_> = args.sandbox_ids.iter().chain(&args.snapshot_tags).collect();
    let result = json!({ "kept": kept, "not_of_this_session_and_stay_anyway": others });
    Ok(Outcome::object(&caller, result, HOW))
}

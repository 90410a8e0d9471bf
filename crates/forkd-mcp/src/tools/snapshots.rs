//! Tools for snapshots and branches, and the tree.

use std::time::Duration;

use forkd_api::Tree;
use forkd_tree::{Forest, Letters, Node};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::json;

use super::{Caller, Effect, Entry, ListArgs, Nothing, Outcome, entry, sandbox_path, without_nulls};
use crate::api::ApiRequest;
use crate::limit;
use crate::session::Makes;
use crate::tool_error::ToolError;

/// How long the daemon may take to boot, warm up and save a guest. An emulated machine is slow.
const CREATE_PATIENCE: Duration = Duration::from_secs(30 * 60);
/// How long the daemon may take to save a branch.
const BRANCH_PATIENCE: Duration = Duration::from_secs(15 * 60);

pub(super) fn tools() -> Vec<Entry> {
    vec![
        entry(
            "list_snapshots",
            "List snapshots",
            Effect::Reads,
            "List the snapshots: stopped, warmed guests with a tag. spawn_sandboxes forks sandboxes from a tag. A \
             branch of a sandbox is in this list, too. Use one whose status is `ready`.",
            list_snapshots,
        ),
        entry(
            "create_snapshot",
            "Create a snapshot",
            Effect::Adds,
            "Boot a guest, warm it up, and save it under a tag, so that spawn_sandboxes forks from it in \
             milliseconds. Give an image of the operator, such as `python`, and optionally code to run first, such \
             as `import numpy`; or the paths of a kernel and a root disk on the daemon's host. It takes seconds to \
             minutes. The snapshot stays after this session, unless `keep` is false.",
            create_snapshot,
        ),
        entry(
            "branch_sandbox",
            "Branch a sandbox",
            Effect::Adds,
            "Save the present moment of a running sandbox as a snapshot: memory, processes and files. The sandbox \
             pauses for milliseconds and continues. Then spawn_sandboxes forks children from the tag, and \
             rollback_sandbox goes back to it. Branch before a step that may fail. The branch is removed at the end \
             of this session, unless `keep` is true.",
            branch_sandbox,
        ),
        entry(
            "tree",
            "Show the fork tree",
            Effect::Reads,
            "Show which snapshot or sandbox each one came from, as indented lines. The resource forkd://tree.svg has \
             the same as a picture.",
            tree,
        ),
    ]
}

async fn list_snapshots(caller: Caller, args: ListArgs) -> Result<Outcome, ToolError> {
    let snapshots = caller.ask(ApiRequest::get("/v1/snapshots")).await?.json()?;
    Ok(Outcome::list(&caller, snapshots, args.offset))
}

/// A snapshot to create.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct CreateSnapshot {
    /// Tag of the snapshot: 1 to 64 letters, digits, `-`, `_` or `.`.
    tag: String,
    /// Image to boot, such as `python`. Give either this or `kernel`.
    image: Option<String>,
    /// Command that warms the guest up: program and arguments, without a shell. It must end with status 0.
    warm_command: Option<Vec<String>>,
    /// Python code that warms the guest's interpreter up, such as `import numpy`. run_code and eval_code use that
    /// interpreter.
    warm_python: Option<String>,
    /// Memory of the guest in MiB; 512 when absent.
    mem_size_mib: Option<u64>,
    /// Number of vCPUs; 1 when absent.
    vcpus: Option<u8>,
    /// Whether the guests have a network; true when absent.
    network: Option<bool>,
    /// Absolute path of a kernel on the daemon's host, in place of an image.
    kernel: Option<String>,
    /// Absolute path of a root disk on the daemon's host, for `kernel`.
    rootfs: Option<String>,
    /// Accepted and ignored: a guest can always write to its disk.
    rw: Option<bool>,
    /// Accepted and ignored: every guest has a network of its own.
    tap: Option<String>,
    /// Accepted and ignored: the guest reports when it is ready.
    boot_wait_secs: Option<u64>,
    /// Whether the snapshot stays after this session.
    #[serde(default = "yes", skip_serializing)]
    keep: bool,
}

fn yes() -> bool {
    true
}

async fn create_snapshot(caller: Caller, args: CreateSnapshot) -> Result<Outcome, ToolError> {
    if args.image.is_none() && args.kernel.is_none() && args.rootfs.is_none() {
        return Err(ToolError::invalid("there is nothing to boot; give `image`, such as `python`"));
    }
    // The API reads an absent command as the image's own.
    let body = without_nulls(json!(args));
    let request = ApiRequest::post("/v1/snapshots", body).within(CREATE_PATIENCE);
    let made = caller.make(request, Makes::Snapshot, args.keep).await?;
    Ok(Outcome::object(&caller, made, "get it with list_snapshots"))
}

/// What a branch stores.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
enum Mode {
    /// Everything: the branch depends on no other snapshot.
    Full,
    /// The difference to the sandbox's snapshot.
    Diff,
    /// The difference, written while the sandbox runs.
    Live,
    /// The disk alone, without processes: sandboxes boot on it.
    Disk,
}

/// A branch to take.
#[derive(Debug, Serialize, Deserialize, JsonSchema)]
#[serde(deny_unknown_fields)]
struct BranchSandbox {
    /// Id of the sandbox; list_sandboxes shows the ids.
    #[serde(skip_serializing)]
    sandbox_id: String,
    /// Tag of the branch; generated when absent.
    tag: Option<String>,
    /// What to store: `live` (the default), `diff`, `full`, or `disk` for the files without the processes.
    mode: Option<Mode>,
    /// Older form of mode `diff`.
    #[serde(default, skip_serializing)]
    diff: bool,
    /// Accepted and ignored: the bytes written are always measured.
    measure_diff: Option<bool>,
    /// Whether to wait until the branch is on disk. Children can be forked from a `live` branch at once.
    #[serde(default = "yes", skip_serializing)]
    wait: bool,
    /// Whether the branch stays after this session.
    #[serde(default, skip_serializing)]
    keep: bool,
}

async fn branch_sandbox(caller: Caller, mut args: BranchSandbox) -> Result<Outcome, ToolError> {
    let path = format!("{}/branch", sandbox_path(&args.sandbox_id)?);
    args.mode = match (args.mode, args.diff) {
        (Some(_), true) => return Err(ToolError::invalid("give either `mode` or `diff`, not both")),
        (None, true) => Some(Mode::Diff),
        (mode, false) => Some(mode.unwrap_or(Mode::Live)),
    };
    let mut body = without_nulls(json!(args));
    if !args.wait {
        body["wait"] = json!(false);
    }
    let request = ApiRequest::post(path, body).within(BRANCH_PATIENCE);
    let made = caller.make(request, Makes::Snapshot, args.keep).await?;
    Ok(Outcome::object(&caller, made, "get it with list_snapshots"))
}

async fn tree(caller: Caller, _: Nothing) -> Result<Outcome, ToolError> {
    let tree: Tree<Node> = caller.ask(ApiRequest::get("/v1/tree")).await?.json()?;
    let mut structured = json!({ "nodes": tree.nodes });
    let forest = Forest::new(tree.nodes);
    let mut text = forkd_tree::text(&forest, Letters::Unicode);
    if text.is_empty() {
        text = "there are no snapshots and no sandboxes yet".into();
    }
    const HOW: &str =
        "kill_sandbox ends sandboxes that are not needed; list_sandboxes and list_snapshots have parts";
    let text = limit::cut_end(&text, caller.output_limit - 256, HOW);
    limit::fit(&mut structured, caller.output_limit, HOW);
    Ok(Outcome::text(text, structured))
}

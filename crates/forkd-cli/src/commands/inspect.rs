//! `forkd inspect`: one sandbox in detail.

use anyhow::Result;
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, with_daemon};
use crate::args::InspectArgs;
use crate::client::types;
use crate::client::{Daemon, Refused};
use crate::host::clock;
use crate::ui;

/// Prints a sandbox.
pub(crate) fn inspect(context: &Context, args: &InspectArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let all = inspect_parts(&daemon, &args.sandbox.id).await?;
        if args.answer.json {
            ui::print_json(&all)?;
        } else {
            ui::print(&render(&all, clock::now()))?;
        }
        Ok(0)
    })
}

/// The daemon's replies about it, each under its own name.
async fn inspect_parts(daemon: &Daemon, id: &str) -> Result<Value> {
    let path = types::sandbox_path(id);
    let sandbox = daemon.ask(Method::GET, &path, None).await?;
    // A sandbox without a process has no figures. Other missing parts are removed, or hidden from this token.
    let optional = async |path: Option<String>| match path {
        None => Ok(Value::Null),
        Some(path) => match daemon.ask(Method::GET, &path, None).await {
            Err(error) if error.is::<Refused>() => Ok(Value::Null),
            other => other,
        },
    };
    let named = |key: &str| sandbox.get(key).and_then(Value::as_str);
    let stats = optional(Some(format!("{path}/stats"))).await?;
    let snapshot = optional(named("snapshot_tag").map(types::snapshot_path)).await?;
    let workspace = optional(named("workspace").map(types::workspace_path)).await?;
    let tree = optional(Some("/v1/tree".to_owned())).await?;
    Ok(json!({
        "sandbox": sandbox, "stats": stats, "snapshot": snapshot, "workspace": workspace,
        "branches": branches(&tree, id),
    }))
}

/// The existing branches of a sandbox, oldest first.
fn branches(tree: &Value, id: &str) -> Vec<Value> {
    let nodes = tree.get("nodes").and_then(Value::as_array).into_iter().flatten();
    let this = nodes.clone().find(|node| node["kind"] == "sandbox" && node["name"] == id);
    let Some(this) = this.map(|node| &node["id"]) else { return Vec::new() };
    let taken = |node: &&Value| node["parent"] == *this && node["kind"] == "snapshot" && node["gone"] != true;
    let mut taken: Vec<Value> = nodes
        .filter(taken)
        .map(|node| json!({ "tag": node["name"], "created_at_unix": node["created_at_unix"] }))
        .collect();
    taken.sort_by_key(|branch| branch["created_at_unix"].as_u64());
    taken
}

fn render(all: &Value, now: u64) -> String {
    let (sandbox, stats) = (&all["sandbox"], &all["stats"]);
    let text = |value: &Value| match value {
        Value::Null => "-".to_owned(),
        Value::String(text) => text.clone(),
        other => other.to_string(),
    };
    let ago = |value: &Value| match value.as_u64() {
        Some(unix) => {
            format!("{}, {} ago", clock::timestamp(unix), ui::age(now.saturating_sub(unix)))
        }
        None => "-".to_owned(),
    };
    let kib = |value: &Value| {
        value.as_u64().map_or_else(|| "-".to_owned(), |kib| ui::bytes(kib.saturating_mul(1024)))
    };
    let size = |value: &Value| value.as_u64().map_or_else(|| "-".to_owned(), ui::bytes);
    let with = |first: String, second: &Value| match second.as_str() {
        Some(second) => format!("{first} ({second})"),
        None => first,
    };
    let labels = sandbox["labels"].as_object().into_iter().flatten();
    let labels: Vec<String> = labels.map(|(name, value)| format!("{name}={}", text(value))).collect();
    let tags = all["branches"].as_array().into_iter().flatten().map(|branch| text(&branch["tag"]));
    let tags: Vec<String> = tags.collect();
    let or_dash = |list: Vec<String>| if list.is_empty() { "-".to_owned() } else { list.join(", ") };
    let pairs = [
        ("id", text(&sandbox["id"])),
        ("owner", text(&sandbox["owner"])),
        ("state", with(text(&sandbox["state"]), &sandbox["reason"])),
        ("why", text(&sandbox["detail"])),
        ("created", ago(&sandbox["created_at_unix"])),
        ("last used", ago(&sandbox["last_active_unix"])),
        ("snapshot", text(&sandbox["snapshot_tag"])),
        ("forked from", text(&sandbox["forked_from"])),
        ("taken of", text(&all["snapshot"]["branched_from"])),
        ("image", text(&sandbox["image"])),
        ("back at", text(&sandbox["rolled_back_to"])),
        ("workspace", with(text(&sandbox["workspace"]), &all["workspace"]["status"])),
        ("labels", or_dash(labels)),
        ("process", text(&sandbox["pid"])),
        ("template", text(&all["snapshot"]["template"]["pid"])),
        ("vcpus", text(&sandbox["vcpus"])),
        ("memory", format!("{} MiB of the guest's", text(&sandbox["mem_size_mib"]))),
        ("memory limit", format!("{} MiB of this computer's", text(&sandbox["memory_limit_mib"]))),
        (
            "network",
            match sandbox["network"].as_bool() {
                Some(true) => format!("slot {}", text(&sandbox["netns"])),
                _ => "none".to_owned(),
            },
        ),
        (
            "egress",
            match sandbox["egress"].as_array() {
                Some(open) if !open.is_empty() => {
                    format!("public addresses, and {}", or_dash(open.iter().map(text).collect()))
                }
                Some(_) => "public addresses".to_owned(),
                None => "-".to_owned(),
            },
        ),
        ("agent port", text(&sandbox["guest_addr"])),
        (
            "expires",
            sandbox["expires_at_unix"].as_u64().map_or_else(
                || "never".to_owned(),
                |unix| format!("{}, in {}", clock::timestamp(unix), ui::age(unix.saturating_sub(now))),
            ),
        ),
        (
            "idle time-out",
            sandbox["idle_timeout_secs"].as_u64().map_or_else(|| "none".to_owned(), ui::seconds),
        ),
        ("then", with(text(&sandbox["on_timeout"]), &sandbox["suspend_as"])),
        ("branches", format!("{} taken; there: {}", text(&sandbox["branch_count"]), or_dash(tags))),
        ("private", kib(&stats["private_kib"])),
        ("shared", kib(&stats["shared_kib"])),
        ("disk", format!("{} of its own", size(&stats["disk_bytes"]))),
        ("cpu", stats["cpu_ms"].as_f64().map_or_else(|| "-".to_owned(), ui::milliseconds)),
        ("sent, received", format!("{}, {}", size(&stats["net_tx_bytes"]), size(&stats["net_rx_bytes"]))),
    ];
    // An absent value gets no line.
    let said: Vec<(&str, String)> = pairs.into_iter().filter(|(_, value)| value != "-").collect();
    ui::pairs(&said)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_screen_says_what_it_is_where_from_and_until_when() {
        let all = json!({
            "sandbox": { "id": "sb1", "owner": "ci", "snapshot_tag": "numpy", "forked_from": "sb9", "state": "paused",
                         "reason": "host_disk_full", "vcpus": 2, "mem_size_mib": 512, "memory_limit_mib": 640,
                         "network": true, "netns": "fk7", "egress": ["10.0.0.0/8"], "pid": 77,
                         "created_at_unix": 100, "expires_at_unix": 460, "on_timeout": "suspend",
                         "suspend_as": "monday", "branch_count": 3, "labels": { "job": "7" } },
            "stats": { "private_kib": 2048, "cpu_ms": 1500 },
            "snapshot": { "branched_from": "sb0" }, "workspace": null,
            "branches": [{ "tag": "b1" }, { "tag": "b2" }],
        });
        let text = render(&all, 160);
        let value = |name: &str| {
            let line = text.lines().find(|line| line.starts_with(&format!("{name}  ")));
            line.map(|line| line[name.len()..].trim_start().to_owned())
        };
        for (name, expected) in [
            ("id", "sb1"),
            ("owner", "ci"),
            ("state", "paused (host_disk_full)"),
            ("created", "1970-01-01T00:01:40Z, 1 min ago"),
            ("forked from", "sb9"),
            ("taken of", "sb0"),
            ("labels", "job=7"),
            ("network", "slot fk7"),
            ("egress", "public addresses, and 10.0.0.0/8"),
            ("expires", "1970-01-01T00:07:40Z, in 5 min"),
            ("idle time-out", "none"),
            ("then", "suspend (monday)"),
            ("branches", "3 taken; there: b1, b2"),
            ("private", "2.0 MiB"),
            ("cpu", "1.50 s"),
        ] {
            assert_eq!(value(name).as_deref(), Some(expected), "{name}\n{text}");
        }
        assert_eq!(value("workspace"), None, "{text}");
        assert!(text.lines().count() <= 30, "{text}");
    }

    #[test]
    fn branches_are_those_of_the_sandbox_that_are_still_there() {
        let tree = json!({ "nodes": [
            { "id": "a", "kind": "sandbox", "name": "sb1", "parent": null },
            { "id": "b", "kind": "snapshot", "name": "late", "parent": "a", "created_at_unix": 9 },
            { "id": "c", "kind": "snapshot", "name": "early", "parent": "a", "created_at_unix": 3 },
            { "id": "d", "kind": "snapshot", "name": "gone", "parent": "a", "gone": true },
            { "id": "e", "kind": "snapshot", "name": "another", "parent": "b" },
        ]});
        let names: Vec<Value> =
            branches(&tree, "sb1").into_iter().map(|branch| branch["tag"].clone()).collect();
        assert_eq!(names, ["early", "late"]);
        assert!(branches(&Value::Null, "sb1").is_empty());
    }
}

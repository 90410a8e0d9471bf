//! Time-outs and labels of sandboxes: `forkd update`, and the options of `spawn`, `ls` and `kill`.

use std::collections::BTreeMap;

use anyhow::Result;
use forkd_api::OnTimeout;
use forkd_protocol::names::percent;
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, report, with_daemon};
use crate::args::{FilterArgs, LifetimeArgs, UpdateArgs};
use crate::client::types::{self, Sandbox};
use crate::ui;

/// Adds the time-outs and labels on the command line to a request for sandboxes.
pub(super) fn add_lifetime(body: &mut Value, lifetime: &LifetimeArgs) {
    if !lifetime.label.is_empty() {
        body["labels"] = labels(&lifetime.label);
    }
    if let Some(secs) = lifetime.ttl {
        body["timeout_secs"] = json!(secs);
    }
    if let Some(secs) = lifetime.idle {
        body["idle_timeout_secs"] = json!(secs);
    }
    if let Some(action) = lifetime.on_timeout {
        body["on_timeout"] = json!(OnTimeout::from(action));
    }
    if let Some(tag) = &lifetime.suspend_as {
        body["suspend_as"] = json!(tag);
    }
}

fn labels(pairs: &[(String, String)]) -> Value {
    json!(pairs.iter().cloned().collect::<BTreeMap<_, _>>())
}

/// Changes sandboxes; a failure does not stop the others.
pub(crate) fn update(context: &Context, args: &UpdateArgs) -> Result<u8> {
    let body = changes(args);
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let update = async |id: &str| daemon.ask(Method::PATCH, &types::sandbox_path(id), Some(&body)).await;
        let mut results = types::for_each(&args.ids, update).await;
        if args.answer.json {
            let changed: Vec<_> = results.iter().filter_map(|(_, it)| it.as_ref().ok()).collect();
            ui::print_json(&changed)?;
            results.retain(|(_, it)| it.is_err());
        }
        report(context.ui, false, results, "changed")
    })
}

/// The changes; an absent field stays.
fn changes(args: &UpdateArgs) -> Value {
    let mut body = json!({});
    if let Some(secs) = args.ttl {
        body["timeout_secs"] = json!(secs.0);
    }
    if let Some(secs) = args.idle {
        body["idle_timeout_secs"] = json!(secs.0);
    }
    if let Some(action) = args.on_timeout {
        body["on_timeout"] = json!(OnTimeout::from(action));
    }
    if let Some(tag) = &args.suspend_as {
        body["suspend_as"] = json!(tag);
    }
    if !args.label.is_empty() || args.no_labels {
        body["labels"] = labels(&args.label);
    }
    body
}

/// The path that lists sandboxes with this filter.
pub(super) fn list_path(filter: &FilterArgs, others: &[(&str, &str)]) -> String {
    let labels = filter.label.iter().map(|label| ("label", label.as_str()));
    let tag = filter.tag.iter().map(|tag| ("snapshot_tag", tag.as_str()));
    let owner = filter.owner.iter().map(|owner| ("owner", owner.as_str()));
    let pairs = labels.chain(tag).chain(owner).chain(others.iter().copied());
    let query: Vec<String> = pairs.map(|(name, value)| format!("{name}={}", percent(value))).collect();
    match query.is_empty() {
        true => "/v1/sandboxes".to_owned(),
        false => format!("/v1/sandboxes?{}", query.join("&")),
    }
}

/// Whether the filter matches a sandbox. The daemon has filtered already; `kill` checks again, because an
/// older daemon without filters lists everything.
pub(super) fn matches(filter: &FilterArgs, sandbox: &Sandbox) -> bool {
    let has = |label: &String| match label.split_once('=') {
        Some((name, value)) => sandbox.labels.get(name).is_some_and(|it| it == value),
        None => sandbox.labels.contains_key(label),
    };
    let tagged = filter.tag.is_none() || sandbox.snapshot_tag == filter.tag;
    let owned = filter.owner.as_ref().is_none_or(|owner| sandbox.owner == *owner);
    tagged && owned && filter.label.iter().all(has)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn parse(line: &[&str]) -> Command {
        Cli::try_parse_from([&["forkd"], line].concat()).unwrap().command
    }

    #[test]
    fn what_is_typed_of_a_life_is_what_is_asked_for() {
        let line = ["spawn", "--tag", "t", "--label", "a=b=c", "--label", "d=", "--ttl", "9", "--idle", "8"];
        let Command::Spawn(spawn) =
            parse(&[&line[..], &["--on-timeout", "suspend", "--suspend-as", "x"]].concat())
        else {
            panic!()
        };
        let mut body = json!({});
        add_lifetime(&mut body, &spawn.children.lifetime);
        let asked = json!({ "labels": { "a": "b=c", "d": "" }, "timeout_secs": 9, "idle_timeout_secs": 8,
                            "on_timeout": "suspend", "suspend_as": "x" });
        assert_eq!(body, asked);
        let mut nothing = json!({});
        add_lifetime(&mut nothing, &LifetimeArgs::default());
        assert_eq!(nothing, json!({}));
    }

    #[test]
    fn only_what_was_typed_is_changed_and_none_is_never() {
        let Command::Update(update) = parse(&["update", "sb1", "--ttl", "none", "--idle", "7"]) else {
            panic!()
        };
        assert_eq!(changes(&update), json!({ "timeout_secs": null, "idle_timeout_secs": 7 }));
        let Command::Update(update) = parse(&["update", "sb1", "--no-labels"]) else { panic!() };
        assert_eq!(changes(&update), json!({ "labels": {} }));
        for wrong in [
            &["update", "sb1"][..],
            &["update", "--ttl", "1"],
            &["update", "sb1", "--ttl", "0"],
            &["update", "sb1", "--label", "a"],
            &["update", "sb1", "--label", "a=b", "--no-labels"],
            &["spawn", "--tag", "t", "--on-timeout", "explode"],
            &["fork", "--tag", "t", "--settle-secs", "1", "--ttl", "1"],
            &["kill", "sb1", "--label", "a"],
            &["kill", "--all", "--label", "a"],
            &["ls", "--state", "lost"],
        ] {
            let error = Cli::try_parse_from([&["forkd"], wrong].concat()).unwrap_err();
            assert_eq!(error.exit_code(), 2, "{wrong:?}");
        }
    }

    #[test]
    fn a_filter_is_asked_for_and_looked_at_again() {
        let label = vec!["a=b c".into(), "d".into()];
        let filter = FilterArgs { label, tag: Some("t".into()), owner: Some("ann".into()) };
        let path = list_path(&filter, &[("state", "running")]);
        assert_eq!(path, "/v1/sandboxes?label=a%3Db%20c&label=d&snapshot_tag=t&owner=ann&state=running");
        assert_eq!(list_path(&FilterArgs::default(), &[]), "/v1/sandboxes");
        let sandbox = |labels: Value| -> Sandbox {
            let info = json!({ "id": "sb1", "snapshot_tag": "t", "owner": "ann", "state": "running", "vcpus": 1,
                               "mem_size_mib": 1, "created_at_unix": 1, "labels": labels });
            types::read(&info).unwrap()
        };
        assert!(matches(&filter, &sandbox(json!({ "a": "b c", "d": "", "e": "f" }))));
        assert!(!matches(&filter, &sandbox(json!({ "a": "b c" }))));
        assert!(!matches(&filter, &sandbox(json!({ "a": "b", "d": "" }))));
        assert!(!matches(&filter, &sandbox(json!({}))));
        let of_another = FilterArgs { owner: Some("bob".into()), ..FilterArgs::default() };
        assert!(!matches(&of_another, &sandbox(json!({}))));
    }
}

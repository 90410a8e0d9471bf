//! `forkd ls`, `ping`, `pause`, `resume`, `rollback` and `kill`.

use std::time::Instant;

use anyhow::Result;
use forkd_api::{ArchivedSandbox, Code};
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, report, update, with_daemon};
use crate::args::{FilterArgs, KillArgs, LsArgs, PingArgs, RollbackArgs, SandboxesArgs};
use crate::client::types::{self, Sandbox};
use crate::client::{Daemon, Refused};
use crate::host::clock;
use crate::ui;
use crate::ui::columns::{self, Column};

/// Lists sandboxes.
pub(crate) fn list(context: &Context, args: &LsArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let state = args.state.iter().map(|state| ("state", state.as_str()));
        let archived = args.archived.then_some(types::ARCHIVED).into_iter().flatten();
        let others: Vec<_> = state.chain(archived).collect();
        let answer = daemon.ask(Method::GET, &update::list_path(&args.filter, &others), None).await?;
        let width = columns::width(args.wide);
        if args.answer.json {
            ui::print_json(&answer)?;
        } else if args.archived {
            ui::print(&render_archived(&types::read::<Vec<ArchivedSandbox>>(&answer)?, clock::now(), width))?;
        } else {
            let sandboxes: Vec<Sandbox> = types::read(&answer)?;
            ui::print(&render(&sandboxes, clock::now(), width))?;
            for sandbox in sandboxes.iter().filter(|sandbox| sandbox.state == "unknown") {
                let why = sandbox.detail.as_deref().unwrap_or("the daemon gives no reason; see its log");
                context.ui.warn(format!("sandbox {}: {why}", sandbox.id));
            }
        }
        Ok(0)
    })
}

fn render(sandboxes: &[Sandbox], now: u64, width: Option<usize>) -> String {
    let row = |sandbox: &Sandbox| {
        let from = match (&sandbox.forked_from, &sandbox.snapshot_tag, &sandbox.image) {
            (Some(source), _, _) => format!("sandbox {source}"),
            (None, Some(tag), _) => format!("snapshot {tag}"),
            (None, None, Some(image)) => format!("image {image}"),
            (None, None, None) => "-".to_owned(),
        };
        let is_forked = sandbox.forked_from.is_some() || sandbox.snapshot_tag.is_some();
        let from = match sandbox.rolled_back_to.as_ref().filter(|_| is_forked) {
            Some(branch) => format!("{from}, back at {branch}"),
            None => from,
        };
        let state = match &sandbox.reason {
            Some(reason) => format!("{} ({reason})", sandbox.state),
            None => sandbox.state.clone(),
        };
        vec![
            sandbox.id.clone(),
            from,
            state,
            sandbox.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string()),
            ui::age(now.saturating_sub(sandbox.created_at_unix)),
            sandbox.vcpus.to_string(),
            format!("{} MiB", sandbox.mem_size_mib),
            sandbox.branch_count.to_string(),
        ]
    };
    let columns = [
        Column::key("ID"),
        Column::text("FROM"),
        Column::text("STATE"),
        Column::extra("PID", 3),
        Column::extra("AGE", 1),
        Column::extra("CPUS", 4),
        Column::extra("MEMORY", 2),
        Column::extra("BRANCHES", 5),
    ];
    columns::table(&columns, &sandboxes.iter().map(row).collect::<Vec<_>>(), width)
}

fn render_archived(archived: &[ArchivedSandbox], now: u64, width: Option<usize>) -> String {
    let row = |it: &ArchivedSandbox| {
        let from = it.snapshot_tag.as_ref().map_or_else(|| "-".to_owned(), |tag| format!("snapshot {tag}"));
        let ended = format!("{} ago", ui::age(now.saturating_sub(it.ended_at_unix)));
        vec![it.id.clone(), from, ended, it.reason.clone(), it.detail.clone()]
    };
    let columns = [
        Column::key("ID"),
        Column::text("FROM"),
        Column::extra("ENDED", 1),
        Column::key("REASON"),
        Column::text("WHY"),
    ];
    columns::table(&columns, &archived.iter().map(row).collect::<Vec<_>>(), width)
}

/// Checks that agents answer; exits with 1 if one does not.
pub(crate) fn ping(context: &Context, args: &PingArgs) -> Result<u8> {
    if args.ids.is_empty() {
        return super::agent_port::ping(context, &args.target);
    }
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let pongs = types::for_each(&args.ids, async |id: &str| ping_one(&daemon, id).await).await;
        let all = pongs.iter().all(|(_, pong)| pong.is_ok());
        if args.answer.json {
            ui::print_json(&pongs.into_iter().map(pong_object).collect::<Vec<_>>())?;
        } else {
            for (id, pong) in pongs {
                match pong {
                    Ok((pong, ms)) => ui::print(&pong_line(id, &pong, ms))?,
                    Err(error) => context.ui.warn(format!("{id}: {error:#}")),
                }
            }
        }
        Ok(u8::from(!all))
    })
}

/// The agent's reply, and the milliseconds until it arrived.
async fn ping_one(daemon: &Daemon, id: &str) -> Result<(Value, f64)> {
    let asked = Instant::now();
    let pong = daemon.ask(Method::POST, &format!("{}/ping", types::sandbox_path(id)), None).await?;
    Ok((pong, asked.elapsed().as_secs_f64() * 1e3))
}

fn pong_line(id: &str, pong: &Value, ms: f64) -> String {
    let up = pong.get("uptimeMs").and_then(Value::as_u64);
    let up = up.map_or_else(String::new, |up| format!(", up for {}", ui::seconds(up / 1000)));
    format!("{id}: answers after {}{up}", ui::milliseconds(ms))
}

fn pong_object((id, pong): (&str, Result<(Value, f64)>)) -> Value {
    match pong {
        Ok((mut pong, ms)) => {
            if let Value::Object(fields) = &mut pong {
                fields.insert("id".into(), json!(id));
                fields.insert("ms".into(), json!(ms));
            }
            pong
        }
        Err(error) => json!({ "id": id, "pong": false, "error": format!("{error:#}") }),
    }
}

/// Pauses sandboxes; a failure does not stop the others.
pub(crate) fn pause(context: &Context, args: &SandboxesArgs) -> Result<u8> {
    post_each(context, args, "pause", "paused")
}

/// Resumes sandboxes; a failure does not stop the others.
pub(crate) fn resume(context: &Context, args: &SandboxesArgs) -> Result<u8> {
    post_each(context, args, "resume", "resumed")
}

fn post_each(context: &Context, args: &SandboxesArgs, verb: &str, done: &str) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        let tell = async |id: &str| {
            daemon.ask(Method::POST, &format!("{}/{verb}", types::sandbox_path(id)), None).await
        };
        report(context.ui, args.json, types::for_each(&args.ids, tell).await, done)
    })
}

/// Rolls a sandbox back to one of its branches.
pub(crate) fn rollback(context: &Context, args: &RollbackArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let progress = context.ui.spinner(format!("rolling {} back", args.sandbox.id));
        let path = format!("{}/rollback", types::sandbox_path(&args.sandbox.id));
        let body = args.to.as_ref().map_or_else(|| json!({}), |tag| json!({ "to": tag }));
        let answer = daemon.ask(Method::POST, &path, Some(&body)).await?;
        drop(progress);
        if args.answer.json {
            ui::print_json(&answer)?;
            return Ok(0);
        }
        let sandbox: Sandbox = types::read(&answer)?;
        let to = sandbox.rolled_back_to.as_ref().or(args.to.as_ref());
        let to = to.map_or_else(|| "where it was branched".to_owned(), Clone::clone);
        ui::print(&ui::without_control_chars(&format!("{}: back at {to}, {}", sandbox.id, sandbox.state)))?;
        Ok(0)
    })
}

/// Ends sandboxes; a failure does not stop the others.
pub(crate) fn kill(context: &Context, args: &KillArgs) -> Result<u8> {
    with_daemon(context, &args.daemon, async |daemon| {
        if !args.ids.is_empty() {
            let kill = async |id: &str| daemon.ask(Method::DELETE, &types::sandbox_path(id), None).await;
            return report(context.ui, args.json, types::for_each(&args.ids, kill).await, "killed");
        }
        let ids = matching(&daemon, &args.filter).await?;
        if args.json {
            let kill = async |id: &str| end(&daemon, id).await;
            return report(context.ui, true, types::for_each(&ids, kill).await, "killed");
        }
        let failed = kill_all(&daemon, &ids).await;
        for error in &failed {
            context.ui.warn(error);
        }
        let ended = ids.len().saturating_sub(failed.len());
        context.ui.note(format!("killed {}", ui::count(ended, "sandbox", "sandboxes")));
        Ok(u8::from(!failed.is_empty()))
    })
}

/// The ids of the sandboxes that a filter matches.
async fn matching(daemon: &Daemon, filter: &FilterArgs) -> Result<Vec<String>> {
    let mut sandboxes: Vec<Sandbox> = types::get(daemon, &update::list_path(filter, &[])).await?;
    sandboxes.retain(|sandbox| update::matches(filter, sandbox));
    Ok(sandboxes.into_iter().map(|sandbox| sandbox.id).collect())
}

/// Ends sandboxes and returns the errors. A sandbox that has ended already is a success.
pub(super) async fn kill_all(daemon: &Daemon, ids: &[String]) -> Vec<String> {
    let kill = async |id: &str| end(daemon, id).await;
    let results = types::for_each(ids, kill).await;
    results.into_iter().filter_map(|(id, ended)| Some(format!("{id}: {:#}", ended.err()?))).collect()
}

async fn end(daemon: &Daemon, id: &str) -> Result<()> {
    match daemon.ask(Method::DELETE, &types::sandbox_path(id), None).await {
        Err(error) if !Refused::is(&error, Code::SandboxNotFound) => Err(error),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn sandbox(id: &str, tag: Option<&str>) -> Value {
        json!({ "id": id, "snapshot_tag": tag, "image": "python", "state": "running", "pid": 7, "vcpus": 1,
                "mem_size_mib": 512, "created_at_unix": 100 })
    }

    #[test]
    fn sandboxes_are_listed_with_where_they_come_from_and_how_they_ended() {
        let mut ended = sandbox("sb3", Some("numpy"));
        ended["state"] = json!("ended");
        ended["reason"] = json!("panicked");
        ended["pid"] = Value::Null;
        let mut unknown = sandbox("sb5", Some("numpy"));
        unknown["state"] = json!("unknown");
        unknown["reason"] = json!("record_unreadable");
        let bare = json!({ "id": "sb4", "state": "running", "vcpus": 2, "mem_size_mib": 64,
                           "created_at_unix": 220, "image": null });
        let mut branched = sandbox("sb1", Some("numpy"));
        branched["branch_count"] = json!(3);
        branched["rolled_back_to"] = json!("fixed");
        let mut forked = sandbox("sb6", None);
        forked["forked_from"] = json!("sb1");
        let list = json!([branched, sandbox("sb2", None), ended, bare, unknown, forked]);
        let expected = "\
ID   FROM                           STATE                        PID  AGE    CPUS  MEMORY   BRANCHES
sb1  snapshot numpy, back at fixed  running                      7    2 min  1     512 MiB  3
sb2  image python                   running                      7    2 min  1     512 MiB  0
sb3  snapshot numpy                 ended (panicked)             -    2 min  1     512 MiB  0
sb4  -                              running                      -    0 s    2     64 MiB   0
sb5  snapshot numpy                 unknown (record_unreadable)  7    2 min  1     512 MiB  0
sb6  sandbox sb1                    running                      7    2 min  1     512 MiB  0";
        assert_eq!(render(&types::read::<Vec<Sandbox>>(&list).unwrap(), 220, None), expected);
        for width in [40, 80, 200] {
            let text = render(&types::read::<Vec<Sandbox>>(&list).unwrap(), 220, Some(width));
            assert!(text.lines().all(|line| line.chars().count() <= width), "{width}: {text}");
            assert!(text.starts_with("ID "), "{width}: {text}");
            assert_eq!(text.contains("BRANCHES"), width > 40, "{width}: {text}");
        }
    }

    #[test]
    fn a_pong_carries_the_agents_words_and_the_time_and_a_silent_one_its_reason() {
        let pong = json!({ "pong": true, "uptimeMs": 61_000 });
        assert_eq!(pong_line("sb1", &pong, 1.25), "sb1: answers after 1.2 ms, up for 1 min 1 s");
        assert_eq!(pong_object(("sb1", Ok((pong, 1.5))))["ms"], json!(1.5));
        let silent = pong_object(("sb2", Err(anyhow::anyhow!("no answer"))));
        assert_eq!(silent, json!({ "id": "sb2", "pong": false, "error": "no answer" }));
    }
}

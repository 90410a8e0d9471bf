//! `forkd fork` and `forkd spawn`: children of a snapshot, or of a running sandbox.

use std::collections::BTreeMap;
use std::net::SocketAddr;
use std::time::Duration;

use anyhow::Result;
use forkd_api::{MAX_TIMEOUT_SECS, SpawnError};
use hyper::Method;
use serde::Serialize;
use serde_json::{Value, json};
use tokio::net::TcpListener;

use super::{Context, sandboxes, update, with_daemon};
use crate::args::{ChildrenArgs, ForkArgs, SpawnArgs};
use crate::client::types::{self, Sandbox, Spawned};
use crate::client::{Address, Daemon};
use crate::compat::relay::{PREFIX, Relay, VerifiedDaemon};
use crate::host::clock;
use crate::host::process;
use crate::stream::signals::{Caught, Forwarded};
use crate::ui::{self, Ui};

/// Forks children and prints the times.
pub(crate) fn fork(context: &Context, args: &ForkArgs) -> Result<u8> {
    let ui = context.ui;
    with_daemon(context, &args.answer.daemon, async |daemon| {
        // Before the fork, so that ^C leaves no child behind.
        let mut signals = args.settle_secs.map(|_| Forwarded::listen()).transpose()?;
        let wanted = if args.settle_secs.is_some() { wanted_port().await? } else { None };
        let mut body = request(&args.children);
        let server = server(&daemon, args);
        if server == Some(PortServer::Daemon) {
            body[types::AGENT_PORT] = json!(true);
        }
        if let Some(settle) = args.settle_secs {
            // If this process is killed, the daemon ends the children. It measures with its own clock:
            // some seconds more, so that it does not end them while they are counted.
            body["timeout_secs"] = json!(settle.saturating_add(GRACE_SECS).min(MAX_TIMEOUT_SECS));
        }
        let asked_unix_ms = clock::now_ms();
        let asked = fork_children(&daemon, args, body, ui);
        let (answer, caught) = match &mut signals {
            None => (asked.await?, None),
            Some(signals) => match signals.finish(asked).await {
                Ok((answer, caught)) => (answer?, caught),
                Err(caught) => return Ok(caught.status()),
            },
        };
        let mut spawned: Spawned = types::read(&answer)?;
        let served = match server {
            Some(PortServer::Ourselves) => {
                let known = VerifiedDaemon::new(context, daemon.clone());
                serve_agent_ports(&known, &mut spawned.children, wanted).await
            }
            Some(PortServer::Left) => leave_agent_ports(context, &daemon, &mut spawned.children),
            Some(PortServer::Daemon) | None => Ok(()),
        };
        if let Err(error) = served {
            ui.warn(format!("the children have no agent ports: {error:#}"));
        }
        let times = Times::of(asked_unix_ms, &spawned.children);
        if args.answer.json {
            ui::print_json(&with_times(with_targets(answer, &spawned.children), &times))?;
        } else {
            ui::print(&render(&spawned, args.children.count, &times))?;
            print_targets(&spawned.children)?;
            warn_failed_children(&spawned.errors, ui);
        }
        if let (Some(secs), Some(signals)) = (args.settle_secs, &mut signals)
            && let Some(caught) = settle(&daemon, &spawned.children, secs, caught, signals, ui).await
        {
            return Ok(caught.status());
        }
        Ok(u8::from(!spawned.errors.is_empty()))
    })
}

/// Forks children and prints their ids.
pub(crate) fn spawn(context: &Context, args: &SpawnArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let mut body = request(&args.children);
        body["snapshot_tag"] = json!(args.tag);
        if args.agent_port {
            body[types::AGENT_PORT] = json!(true);
        }
        if args.no_wait {
            body["wait"] = json!(false);
        }
        let answer = spawn_children(&daemon, &body, context.ui).await?;
        let spawned: Spawned = types::read(&answer)?;
        if args.answer.json {
            ui::print_json(&answer)?;
        } else {
            let ids: Vec<&str> = spawned.children.iter().map(|child| child.id.as_str()).collect();
            ui::print(&ids.join("\n"))?;
            for child in spawned.children.iter().filter(|_| args.agent_port) {
                context.ui.note(format!("{}: {PREFIX}{}", child.id, child.guest_addr));
            }
            warn_failed_children(&spawned.errors, context.ui);
        }
        Ok(u8::from(!spawned.errors.is_empty()))
    })
}

/// The process that serves the agent ports of children.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum PortServer {
    /// This command, while it runs.
    Ourselves,
    Daemon,
    /// A detached process: the daemon's ports are not reachable, or not for this user.
    Left,
}

/// None: the user declined, or the daemon is on another host.
fn server(daemon: &Daemon, args: &ForkArgs) -> Option<PortServer> {
    if args.settle_secs.is_some() {
        return Some(PortServer::Ourselves);
    }
    match &daemon.address {
        _ if args.no_agent_port || !daemon.is_local() => None,
        // Its loopback is this host's, and users of its socket may use its ports.
        Address::Unix(_) => Some(PortServer::Daemon),
        // It may be in the machine, in a container, or behind a tunnel, and accept any user with a token.
        Address::Tcp(_) | Address::Tls(..) => Some(PortServer::Left),
    }
}

/// Binds the port that FORKD_TARGET names, before the fork: a client may connect to it soon, and must not
/// find another process there.
async fn wanted_port() -> Result<Option<TcpListener>> {
    let wanted = std::env::var("FORKD_TARGET").ok().and_then(|target| target.parse::<SocketAddr>().ok());
    match wanted.filter(|address| address.ip().is_loopback()) {
        Some(address) => Relay::bind(Some(address)).await.map(Some),
        None => Ok(None),
    }
}

/// Serves an agent port for each child while this command runs, the first one on `wanted`. The ports
/// become the children's addresses.
async fn serve_agent_ports(
    daemon: &VerifiedDaemon,
    children: &mut [Sandbox],
    mut wanted: Option<TcpListener>,
) -> Result<()> {
    process::raise_file_limit();
    for child in children {
        let listener = match wanted.take() {
            Some(listener) => listener,
            None => Relay::bind(None).await?,
        };
        child.guest_addr = Relay::serve(listener, daemon.clone(), &child.id)?.target.to_string();
    }
    Ok(())
}

/// Starts a process that serves an agent port for each child while it runs. The ports become the children's
/// addresses.
fn leave_agent_ports(context: &Context, daemon: &Daemon, children: &mut [Sandbox]) -> Result<()> {
    let ids: Vec<&str> = children.iter().map(|child| child.id.as_str()).collect();
    let mut targets = Relay::spawn_detached(&context.data, daemon, &ids)?;
    for child in children {
        // A child that has ended meanwhile has none.
        if let Some(target) = targets.remove(&child.id) {
            child.guest_addr = target;
        }
    }
    Ok(())
}

/// The daemon's reply with the children's addresses.
fn with_targets(mut answer: Value, children: &[Sandbox]) -> Value {
    if let Some(told) = answer.get_mut("children").and_then(Value::as_array_mut) {
        for (told, child) in told.iter_mut().zip(children) {
            told["guest_addr"] = json!(child.guest_addr);
        }
    }
    answer
}

/// Prints the agent ports of children that are on loopback.
fn print_targets(children: &[Sandbox]) -> Result<()> {
    let local = |child: &&Sandbox| child.guest_addr.starts_with("127.0.0.1:");
    for child in children.iter().filter(local) {
        ui::print(&format!("{PREFIX}{}  # {}", child.guest_addr, child.id))?;
    }
    Ok(())
}

/// How much longer than this command its children may live.
const GRACE_SECS: u64 = 10;

/// The request's body; the daemon chooses a default for each absent field.
fn request(args: &ChildrenArgs) -> Value {
    let mut body = json!({ "n": args.count });
    if args.no_network {
        body["network"] = json!(false);
    }
    if let Some(limit) = args.limit.memory_limit_mib {
        body["memory_limit_mib"] = json!(limit);
    }
    if !args.env.is_empty() {
        body["env"] = json!(args.env.iter().cloned().collect::<BTreeMap<_, _>>());
    }
    update::add_lifetime(&mut body, &args.lifetime);
    body
}

/// Requests children of what the command names. See [`spawn_children`].
async fn fork_children(daemon: &Daemon, args: &ForkArgs, mut body: Value, ui: Ui) -> Result<Value> {
    let Some(sandbox) = &args.sandbox else {
        body["snapshot_tag"] = json!(args.tag);
        return spawn_children(daemon, &body, ui).await;
    };
    let _progress = ui.spinner(format!("forking {} from {sandbox}", body["n"]));
    let path = format!("{}/fork?results=each", types::sandbox_path(sandbox));
    daemon.ask(Method::POST, &path, Some(&body)).await
}

/// Requests children of a snapshot. The reply lists those that did not start; it is an error if none did.
pub(super) async fn spawn_children(daemon: &Daemon, body: &Value, ui: Ui) -> Result<Value> {
    let _progress = ui.spinner(format!("forking {} from {}", body["n"], body["snapshot_tag"]));
    daemon.ask(Method::POST, "/v1/sandboxes?results=each", Some(body)).await
}

/// Waits, unless a signal has come already, then ends the children. Returns the signal that ended the wait.
async fn settle(
    daemon: &Daemon,
    children: &[Sandbox],
    secs: u64,
    caught: Option<Caught>,
    signals: &mut Forwarded,
    ui: Ui,
) -> Option<Caught> {
    let caught = match caught {
        Some(caught) => Some(caught),
        None => tokio::select! {
            () = tokio::time::sleep(Duration::from_secs(secs)) => None,
            caught = signals.next() => Some(caught),
        },
    };
    let ids: Vec<String> = children.iter().map(|child| child.id.clone()).collect();
    for error in sandboxes::kill_all(daemon, &ids).await {
        ui.warn(error);
    }
    caught
}

/// When children answered, in milliseconds since the daemon received the request. Absent without a wait.
#[derive(Debug, PartialEq, Serialize)]
pub(super) struct Times {
    asked_unix_ms: u64,
    first_ms: Option<f64>,
    p50_ms: Option<f64>,
    all_ms: Option<f64>,
}

impl Times {
    pub(super) fn of(asked_unix_ms: u64, children: &[Sandbox]) -> Self {
        let mut ready: Vec<f64> = children.iter().filter_map(|child| child.ready_ms).collect();
        ready.sort_by(f64::total_cmp);
        Times {
            asked_unix_ms,
            first_ms: ready.first().copied(),
            // The upper median.
            p50_ms: ready.get(ready.len() / 2).copied(),
            all_ms: ready.last().copied(),
        }
    }
}

/// The daemon's reply with the times.
pub(super) fn with_times(mut answer: Value, times: &Times) -> Value {
    if let Value::Object(fields) = &mut answer {
        fields.insert("times".into(), json!(times));
    }
    answer
}

/// The children, then the times.
pub(super) fn render(spawned: &Spawned, wanted: u16, times: &Times) -> String {
    let time = |ms: Option<f64>| ms.map_or_else(|| "-".to_owned(), ui::milliseconds);
    let row = |child: &Sandbox| {
        let pid = child.pid.map_or_else(|| "-".to_owned(), |pid| pid.to_string());
        vec![child.id.clone(), pid, time(child.ready_ms)]
    };
    let table = ui::table(&["ID", "PID", "ANSWERED"], &spawned.children.iter().map(row).collect::<Vec<_>>());
    format!(
        "{table}\n{} of {wanted} children answer\nasked         {}\nfirst answer  {}\nhalf of them  {}\nall answers   {}",
        spawned.children.len(),
        clock::timestamp(times.asked_unix_ms / 1000),
        time(times.first_ms),
        time(times.p50_ms),
        time(times.all_ms),
    )
}

pub(super) fn warn_failed_children(errors: &[SpawnError], ui: Ui) {
    for SpawnError { index, error, .. } in errors {
        ui.warn(format!("child {index} did not start: {error}"));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    fn child(id: &str, ready_ms: Option<f64>) -> Value {
        json!({ "id": id, "snapshot_tag": "t", "state": "running", "pid": 7, "vcpus": 1, "mem_size_mib": 512,
                "created_at_unix": 1, "ready_ms": ready_ms })
    }

    #[test]
    fn only_what_was_asked_for_is_in_the_request() {
        let line = ["forkd", "fork", "--tag", "t", "-n", "3"];
        let Command::Fork(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        assert_eq!((request(&args.children), args.tag.as_deref()), (json!({ "n": 3 }), Some("t")));
        let more = [&line[..], &["--no-network", "--memory-limit-mib", "64", "--env", "A=1", "-e", "B=2"]];
        let Command::Fork(args) = Cli::try_parse_from(more.concat()).unwrap().command else { panic!() };
        let body = request(&args.children);
        assert_eq!((&body["network"], &body["memory_limit_mib"]), (&json!(false), &json!(64)));
        assert_eq!(body["env"], json!({ "A": "1", "B": "2" }));
    }

    #[test]
    fn children_are_printed_with_the_first_the_middle_and_the_last_answer() {
        let answer = json!({ "children": [child("sb1", Some(9.0)), child("sb2", Some(4.0)),
                                          child("sb3", Some(1500.0))],
                             "errors": [{ "index": 3, "error": "no memory" }] });
        let spawned: Spawned = types::read(&answer).unwrap();
        let times = Times::of(45_296_789, &spawned.children);
        let expected = "\
ID   PID  ANSWERED
sb1  7    9.0 ms
sb2  7    4.0 ms
sb3  7    1.50 s
3 of 4 children answer
asked         1970-01-01T12:34:56Z
first answer  4.0 ms
half of them  9.0 ms
all answers   1.50 s";
        assert_eq!(render(&spawned, 4, &times), expected);
        let told = with_times(answer, &times);
        assert_eq!(told["children"][0]["id"], "sb1");
        assert_eq!(told["errors"][0]["index"], 3);
        assert_eq!(told["times"]["first_ms"], 4.0);
        assert_eq!(told["times"]["all_ms"], 1500.0);
    }

    #[test]
    fn children_nobody_waited_for_have_no_times() {
        let spawned: Spawned = types::read(&json!({ "children": [child("sb1", None)] })).unwrap();
        let times = Times::of(1, &spawned.children);
        assert_eq!(times, Times { asked_unix_ms: 1, first_ms: None, p50_ms: None, all_ms: None });
        assert!(render(&spawned, 1, &times).ends_with("all answers   -"));
    }
}

//! `forkd top`: the CPU and memory use of sandboxes; and `forkd logs`: the console of one.

use std::collections::HashMap;
use std::io::{IsTerminal, stdout};
use std::time::{Duration, Instant};

use anyhow::Result;
use hyper::Method;
use serde_json::{Value, json};

use super::{Context, with_daemon};
use crate::args::{LogsArgs, TopArgs};
use crate::client::Daemon;
use crate::client::types;
use crate::host::clock;
use crate::ui;
use crate::ui::columns::{self, Column};

/// The interval of samples.
const INTERVAL: Duration = Duration::from_secs(2);
/// The interval between the two samples of `--once`.
const ONCE_INTERVAL: Duration = Duration::from_secs(1);
/// The terminal codes that clear the screen.
const CLEAR: &str = "\x1b[H\x1b[2J";

/// Shows the use of sandboxes until a signal comes.
pub(crate) fn top(context: &Context, args: &TopArgs) -> Result<u8> {
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let mut earlier = HashMap::new();
        sample(&daemon, &mut earlier).await?;
        tokio::time::sleep(ONCE_INTERVAL).await;
        loop {
            let rows = sample(&daemon, &mut earlier).await?;
            if args.answer.json {
                ui::print(&serde_json::to_string(&rows)?)?;
            } else {
                let clear = if !args.once && stdout().is_terminal() { CLEAR } else { "" };
                ui::print(&format!("{clear}{}", render(&rows, clock::now(), columns::width(args.wide))))?;
            }
            if args.once {
                return Ok(0);
            }
            tokio::time::sleep(INTERVAL).await;
        }
    })
}

/// The last sample of each sandbox: its time and the CPU time until then.
type CpuSamples = HashMap<String, (Instant, u64)>;

/// The present use of each sandbox, and its CPU use since the last sample.
async fn sample(daemon: &Daemon, earlier: &mut CpuSamples) -> Result<Vec<Value>> {
    let sandboxes = daemon.ask(Method::GET, "/v1/sandboxes", None).await?;
    let sandboxes = sandboxes.as_array().cloned().unwrap_or_default();
    let id = |sandbox: &Value| sandbox.get("id").and_then(Value::as_str).unwrap_or_default().to_owned();
    let ids: Vec<String> = sandboxes.iter().map(id).collect();
    let ask = async |id: &str| {
        // A sandbox without a process has no figures.
        let stats = daemon.ask(Method::GET, &format!("{}/stats", types::sandbox_path(id)), None).await.ok();
        Ok::<_, anyhow::Error>((stats, Instant::now()))
    };
    let mut rows = Vec::with_capacity(ids.len());
    let mut now = CpuSamples::new();
    for (sandbox, (id, answer)) in sandboxes.iter().zip(types::for_each(&ids, ask).await) {
        let (stats, at) = answer?;
        let mut row = json!({});
        for key in ["id", "snapshot_tag", "forked_from", "image", "state", "created_at_unix"] {
            row[key] = sandbox.get(key).cloned().unwrap_or_default();
        }
        if let Some(stats) = stats {
            for key in ["private_kib", "shared_kib", "cpu_ms", "disk_bytes", "net_tx_bytes", "net_rx_bytes"] {
                row[key] = stats.get(key).cloned().unwrap_or_default();
            }
            if let Some(cpu_ms) = row["cpu_ms"].as_u64() {
                let percent = earlier.get(id).map(|(then, before)| {
                    let passed = at.duration_since(*then).as_secs_f64() * 1e3;
                    cpu_ms.saturating_sub(*before) as f64 / passed.max(1.0) * 100.0
                });
                row["cpu_percent"] = json!(percent.map(|percent| (percent * 10.0).round() / 10.0));
                now.insert(id.to_owned(), (at, cpu_ms));
            }
        }
        rows.push(row);
    }
    *earlier = now;
    Ok(rows)
}

fn render(rows: &[Value], now: u64, width: Option<usize>) -> String {
    let text = |row: &Value, key: &str| row[key].as_str().unwrap_or("-").to_owned();
    let size = |value: Option<u64>| value.map_or_else(|| "-".to_owned(), ui::bytes);
    let line = |row: &Value| {
        let net = row["net_tx_bytes"].as_u64().zip(row["net_rx_bytes"].as_u64());
        vec![
            text(row, "id"),
            ["snapshot_tag", "forked_from", "image"]
                .iter()
                .find_map(|key| row[*key].as_str())
                .unwrap_or("-")
                .to_owned(),
            text(row, "state"),
            row["cpu_percent"].as_f64().map_or_else(|| "-".to_owned(), |percent| format!("{percent:.1}")),
            size(row["private_kib"].as_u64().map(|kib| kib.saturating_mul(1024))),
            size(row["shared_kib"].as_u64().map(|kib| kib.saturating_mul(1024))),
            net.map_or_else(
                || "-".to_owned(),
                |(out, into)| format!("{} out, {} in", ui::bytes(out), ui::bytes(into)),
            ),
            ui::age(now.saturating_sub(row["created_at_unix"].as_u64().unwrap_or(now))),
        ]
    };
    let columns = [
        Column::key("ID"),
        Column::text("SNAPSHOT"),
        Column::extra("STATE", 2),
        Column::key("CPU %"),
        Column::extra("PRIVATE", 1),
        Column::extra("SHARED", 4),
        Column::extra("NET", 5),
        Column::extra("AGE", 3),
    ];
    columns::table(&columns, &rows.iter().map(line).collect::<Vec<_>>(), width)
}

/// Shows a console.
pub(crate) fn logs(context: &Context, args: &LogsArgs) -> Result<u8> {
    let mut path = format!("{}/console?follow={}", types::sandbox_path(&args.sandbox.id), args.follow);
    if let Some(lines) = args.tail {
        path.push_str(&format!("&tail={lines}"));
    }
    with_daemon(context, &args.daemon, async |daemon| {
        let mut stream = daemon.follow(&path).await?;
        while let Some(bytes) = stream.next().await? {
            // The daemon has removed control characters. Write it unchanged, so that no character is cut.
            ui::write_raw(&mut stdout().lock(), &bytes)?;
        }
        Ok(0)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_not_known_of_a_sandbox_is_a_dash() {
        let rows = [
            json!({"id": "sb1", "snapshot_tag": "numpy", "image": "python", "state": "running", "cpu_percent": 99.96,
                   "private_kib": 2048, "shared_kib": 1, "net_tx_bytes": 10, "net_rx_bytes": 2048,
                   "created_at_unix": 10}),
            json!({"id": "sb2", "snapshot_tag": null, "image": null, "state": "ended", "created_at_unix": 69}),
        ];
        let expected = "\
ID   SNAPSHOT  STATE    CPU %  PRIVATE  SHARED   NET                   AGE
sb1  numpy     running  100.0  2.0 MiB  1.0 KiB  10 B out, 2.0 KiB in  1 min
sb2  -         ended    -      -        -        -                     1 s";
        assert_eq!(render(&rows, 70, None), expected);
        let narrow = "\
ID   SNAPSHOT  STATE    CPU %  PRIVATE
sb1  numpy     running  100.0  2.0 MiB
sb2  -         ended    -      -";
        assert_eq!(render(&rows, 70, Some(40)), narrow);
    }
}

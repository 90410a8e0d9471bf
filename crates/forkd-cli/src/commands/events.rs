//! `forkd events`: prints one line per event.

use anyhow::{Result, bail};
use serde_json::Value;

use super::{Context, with_daemon};
use crate::args::EventsArgs;
use crate::ui;

/// The longest line of a stream: far more than any event.
const MAX_LINE: usize = 1 << 20;

/// Shows events.
pub(crate) fn events(context: &Context, args: &EventsArgs) -> Result<u8> {
    let follow = args.follow || !args.no_follow;
    let path = path(args, follow);
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let mut stream = daemon.follow(&path).await?;
        let (mut parser, mut last) = (Parser::default(), None);
        while let Some(bytes) = stream.next().await? {
            for (kind, data) in parser.feed(&bytes)? {
                last = data.get("id").and_then(Value::as_str).map(str::to_owned).or(last);
                if args.answer.json {
                    ui::print(&serde_json::to_string(&data)?)?;
                } else {
                    ui::print(&ui::without_control_chars(&line(&kind, &data)))?;
                }
            }
        }
        if follow {
            let again = last.map_or_else(String::new, |id| format!("; `--since {id}` continues from here"));
            bail!("the daemon ended the stream{again}");
        }
        Ok(0)
    })
}

fn path(args: &EventsArgs, follow: bool) -> String {
    let mut path = format!("/v1/events?follow={follow}");
    // Only characters that cannot be in a URL; the daemon reports any other problem.
    let plain = |text: &str| -> String {
        text.chars().filter(|c| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.' | ',')).collect()
    };
    let kinds = Some(args.kind.join(",")).filter(|kinds| !kinds.is_empty());
    for (name, value) in [("since", &args.since), ("sandbox", &args.sandbox), ("kind", &kinds)] {
        if let Some(value) = value {
            path.push_str(&format!("&{name}={}", plain(value)));
        }
    }
    path
}

/// An event as a line of text.
fn line(kind: &str, data: &Value) -> String {
    let text = |key: &str| data.get(key).and_then(Value::as_str);
    if kind == "lagged" {
        return match data.get("missed").and_then(Value::as_u64) {
            Some(missed) => format!("(missed {})", ui::count(missed as usize, "event", "events")),
            None => "(the daemon was restarted: some events are missed)".to_owned(),
        };
    }
    let mut words = vec![text("ts").unwrap_or("-").to_owned(), format!("{kind:<20}")];
    for (key, before) in
        [("sandbox", ""), ("snapshot", "snapshot "), ("workspace", "workspace "), ("reason", "")]
    {
        words.extend(text(key).map(|value| format!("{before}{value}")));
    }
    words.extend(data.get("ready_ms").and_then(Value::as_f64).map(ui::milliseconds));
    if text("reason") != Some("deleted") {
        // One line per event, whatever a guest wrote to its console.
        words.extend(
            text("detail").and_then(|detail| detail.lines().next()).map(|first| format!("({first})")),
        );
    }
    words.join("  ")
}

/// Parses a stream of server-sent events.
#[derive(Debug, Default)]
pub(super) struct Parser {
    line: Vec<u8>,
    kind: String,
    data: String,
}

impl Parser {
    /// Adds bytes and returns the events that are complete.
    pub(super) fn feed(&mut self, bytes: &[u8]) -> Result<Vec<(String, Value)>> {
        let mut events = Vec::new();
        for &byte in bytes {
            if byte != b'\n' {
                if self.line.len() >= MAX_LINE {
                    bail!("the daemon's reply is not a stream of events");
                }
                self.line.push(byte);
                continue;
            }
            let line = String::from_utf8_lossy(&std::mem::take(&mut self.line)).into_owned();
            let line = line.trim_end_matches('\r');
            if let Some(kind) = line.strip_prefix("event:") {
                self.kind = kind.trim().to_owned();
            } else if let Some(data) = line.strip_prefix("data:") {
                self.data = data.trim().to_owned();
            } else if line.is_empty() && !self.data.is_empty() {
                let data = serde_json::from_str(&std::mem::take(&mut self.data))?;
                events.push((std::mem::take(&mut self.kind), data));
            }
        }
        Ok(events)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    #[test]
    fn events_are_found_however_a_stream_is_cut_into_pieces() {
        let stream = ": keep-alive\n\nid: a-1\nevent: sandbox.ended\ndata: {\"id\":\"a-1\"}\n\n\
                      event: lagged\ndata: {\"missed\":3}\n\nevent: half\ndata: {";
        for size in [1, 3, 7, 1000] {
            let (mut parser, mut found) = (Parser::default(), Vec::new());
            for piece in stream.as_bytes().chunks(size) {
                found.extend(parser.feed(piece).unwrap());
            }
            let expected = [("sandbox.ended", json!({"id": "a-1"})), ("lagged", json!({"missed": 3}))];
            assert_eq!(found, expected.map(|(kind, data)| (kind.to_owned(), data)));
        }
        let endless = vec![b'x'; MAX_LINE + 1];
        assert!(Parser::default().feed(&endless).is_err());
    }

    #[test]
    fn an_event_is_one_line_whatever_a_guest_says() {
        let data = json!({"ts": "2026-01-31T12:34:56.789Z", "sandbox": "sb1", "snapshot": "numpy",
                          "reason": "panicked", "detail": "the kernel panicked\nand more"});
        let expected = "2026-01-31T12:34:56.789Z  sandbox.ended         sb1  snapshot numpy  panicked  \
                        (the kernel panicked)";
        assert_eq!(line("sandbox.ended", &data), expected);
        assert_eq!(line("lagged", &json!({"missed": 1})), "(missed 1 event)");
        assert!(line("lagged", &json!({"missed": null})).contains("restarted"));
    }
}

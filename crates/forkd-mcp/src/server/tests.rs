use std::sync::Arc;
use std::time::Duration;

use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader, DuplexStream, Lines, ReadHalf, WriteHalf};
use tokio::task::{JoinHandle, LocalSet};
use tokio_util::sync::CancellationToken;

use crate::Ended;
use crate::server::{MAX_MESSAGE, PROGRESS_EVERY, serve};
use crate::testing::FakeApi;

/// A client of a server over a pipe.
struct Client {
    lines: Lines<BufReader<ReadHalf<DuplexStream>>>,
    write: WriteHalf<DuplexStream>,
    api: Arc<FakeApi>,
    stop: CancellationToken,
    served: JoinHandle<Ended>,
}

impl Client {
    /// A client that has introduced itself.
    async fn start() -> Self {
        let (ours, theirs) = tokio::io::duplex(1 << 20);
        let (api, stop) = (FakeApi::new(), CancellationToken::new());
        let served = tokio::task::spawn_local({
            let (api, stop) = (api.clone(), stop.clone());
            async move { serve(api, 50 << 10, tokio::io::split(theirs), stop.cancelled_owned()).await }
        });
        let (read, write) = tokio::io::split(ours);
        let mut client = Client { lines: BufReader::new(read).lines(), write, api, stop, served };
        let about = json!({ "protocolVersion": "2025-06-18", "capabilities": {},
            "clientInfo": { "name": "test", "version": "1" } });
        let begun = client.ask("initialize", about).await;
        assert!(begun["result"]["instructions"].as_str().unwrap().contains("fork_sandbox"), "{begun}");
        client.line(&json!({ "jsonrpc": "2.0", "method": "notifications/initialized" }).to_string()).await;
        client
    }

    async fn line(&mut self, line: &str) {
        self.write.write_all(format!("{line}\n").as_bytes()).await.unwrap();
    }

    async fn next(&mut self) -> Value {
        let line = tokio::time::timeout(Duration::from_secs(60), self.lines.next_line()).await;
        serde_json::from_str(&line.expect("an answer").unwrap().expect("an open stream")).unwrap()
    }

    async fn ask(&mut self, method: &str, params: Value) -> Value {
        self.line(&json!({ "jsonrpc": "2.0", "id": 7, "method": method, "params": params }).to_string())
            .await;
        self.next().await
    }

    async fn spawn(&mut self) {
        let params = json!({ "name": "spawn_sandboxes", "arguments": { "snapshot_tag": "t" } });
        let reply = self.ask("tools/call", params).await;
        assert_eq!(reply["result"]["isError"], false, "{reply}");
    }
}

#[tokio::test]
async fn the_end_of_the_stream_ends_the_session_and_what_it_made() {
    LocalSet::new()
        .run_until(async {
            let mut client = Client::start().await;
            client.spawn().await;
            drop((client.lines, client.write));
            assert_eq!(client.served.await.unwrap(), Ended { sandboxes: 1, ..Ended::default() });
            assert!(client.api.sandboxes().is_empty());
        })
        .await;
}

#[tokio::test]
async fn a_signal_ends_the_session_and_what_it_made() {
    LocalSet::new()
        .run_until(async {
            let mut client = Client::start().await;
            client.spawn().await;
            client.stop.cancel();
            assert_eq!(client.served.await.unwrap().sandboxes, 1);
            assert!(client.api.sandboxes().is_empty());
        })
        .await;
}

#[tokio::test]
async fn strange_messages_do_not_end_the_session() {
    LocalSet::new()
        .run_until(async {
            let mut client = Client::start().await;
            client.line("{").await;
            client.line("").await;
            client.line(&"x".repeat(MAX_MESSAGE + 10)).await;
            client.line(&"[".repeat(100_000)).await;
            for strange in
                [json!({ "jsonrpc": "2.0", "id": {}, "method": 1 }), json!({ "hello": 1 }), json!([])]
            {
                client.line(&strange.to_string()).await;
            }
            // Some of them get an error; none of them hides the next answer.
            client
                .line(
                    &json!({ "jsonrpc": "2.0", "id": 99, "method": "tools/list", "params": {} }).to_string(),
                )
                .await;
            let tools = loop {
                let answer = client.next().await;
                if answer["id"] == 99 {
                    break answer;
                }
                assert!(answer["error"]["message"].is_string(), "{answer}");
            };
            assert_eq!(tools["result"]["tools"].as_array().unwrap().len(), crate::tools::list().len());
            let unknown = client.ask("tools/call", json!({ "name": "rm_rf", "arguments": {} })).await;
            assert_eq!(unknown["error"]["code"], -32602, "{unknown}");
            assert!(unknown["error"]["message"].as_str().unwrap().contains("rm_rf"), "{unknown}");
            assert_eq!(client.ask("no/such/method", json!({})).await["error"]["code"], -32601);
        })
        .await;
}

#[tokio::test]
async fn resources_and_prompts_are_listed_and_read() {
    LocalSet::new().run_until(async {
    let mut client = Client::start().await;
    client.spawn().await;
    let listed = client.ask("resources/list", json!({})).await["result"]["resources"].clone();
    let uris: Vec<&str> = listed.as_array().unwrap().iter().map(|one| one["uri"].as_str().unwrap()).collect();
    assert_eq!(uris, ["forkd://tree.svg", "forkd://sandboxes/sb1/console"]);
    let read = client.ask("resources/read", json!({ "uri": "forkd://tree.svg" })).await["result"]["contents"]
        [0]
    .clone();
    assert!(
        read["text"].as_str().unwrap().starts_with("<svg ") && read["mimeType"] == "image/svg+xml",
        "{read}"
    );
    client.api.put_file("/etc/hostname", b"sb1\n");
    client.api.put_file("/bin/x", &[0xff]);
    let uri = "forkd://sandboxes/sb1/files/etc/hostname";
    let read = client.ask("resources/read", json!({ "uri": uri })).await;
    assert_eq!(read["result"]["contents"][0]["text"], "sb1\n", "{read}");
    let read = client.ask("resources/read", json!({ "uri": "forkd://sandboxes/sb1/files/bin/x" })).await;
    assert_eq!(read["result"]["contents"][0]["blob"], "/w==", "{read}");
    let folder = json!({ "entries": [{ "path": "/srv/a", "permissions": "-rw-r--r--", "size": 3 }] });
    client.api.answer("GET /v1/sandboxes/sb1/files/list?path=%2Fsrv&depth=1", folder);
    let read = client.ask("resources/read", json!({ "uri": "forkd://sandboxes/sb1/files/srv" })).await;
    assert!(read["result"]["contents"][0]["text"].as_str().unwrap().ends_with("3 /srv/a"), "{read}");
    for missing in ["file:///etc/passwd", "forkd://sandboxes/sb1/files/none"] {
        let refused = client.ask("resources/read", json!({ "uri": missing })).await;
        assert_eq!(refused["error"]["code"], -32002, "{refused}");
    }
    let prompts = client.ask("prompts/list", json!({})).await["result"]["prompts"].clone();
    assert_eq!(prompts.as_array().unwrap().len(), 2);
    let prompt =
        client.ask("prompts/get", json!({ "name": "try_three_ways", "arguments": { "task": "sort" } })).await;
    assert!(
        prompt["result"]["messages"][0]["content"]["text"].as_str().unwrap().contains("sort"),
        "{prompt}"
    );
    let refused = client.ask("prompts/get", json!({ "name": "try_three_ways" })).await;
    assert!(refused["error"]["message"].as_str().unwrap().contains("`task`"), "{refused}");
}).await;
}

#[tokio::test]
async fn without_a_daemon_a_tool_says_what_to_do() {
    LocalSet::new()
        .run_until(async {
            let mut client = Client::start().await;
            client.api.lose_replies(1);
            let reply = client.ask("tools/call", json!({ "name": "list_sandboxes", "arguments": {} })).await
                ["result"]
                .clone();
            assert_eq!(reply["isError"], true);
            let text = reply["content"][0]["text"].as_str().unwrap();
            assert!(text.starts_with("daemon_unreachable: ") && text.contains("forkd serve"), "{text}");
        })
        .await;
}

#[tokio::test]
async fn a_client_that_wants_progress_gets_it() {
    LocalSet::new()
        .run_until(async {
            let mut client = Client::start().await;
            client.api.delay(PROGRESS_EVERY * 5 / 2);
            let params = json!({ "name": "spawn_sandboxes", "arguments": { "snapshot_tag": "t" },
        "_meta": { "progressToken": "p1" } });
            client
                .line(
                    &json!({ "jsonrpc": "2.0", "id": 3, "method": "tools/call", "params": params })
                        .to_string(),
                )
                .await;
            for _ in 0..2 {
                let progress = client.next().await;
                assert_eq!(
                    (&progress["method"], &progress["params"]["progressToken"]),
                    (&json!("notifications/progress"), &json!("p1"))
                );
                assert!(
                    progress["params"]["message"].as_str().unwrap().starts_with("spawn_sandboxes: "),
                    "{progress}"
                );
            }
            assert_eq!(client.next().await["id"], 3);
        })
        .await;
}

use rmcp::model::CallToolResult;
use serde_json::{Value, json};

use crate::limit::MIN_OUTPUT_LIMIT;
use crate::testing::FakeApi;
use crate::tools::{Caller, call, list};

/// Calls a tool: its texts and its structured content.
async fn used(caller: &Caller, name: &str, arguments: Value) -> (Vec<String>, Value) {
    let result = called(caller, name, arguments).await;
    assert_ne!(result.is_error, Some(true), "{result:?}");
    read(result)
}

/// Calls a tool that must fail: its text.
async fn failed(caller: &Caller, name: &str, arguments: Value) -> String {
    let result = called(caller, name, arguments).await;
    assert_eq!(result.is_error, Some(true), "{result:?}");
    let (texts, structured) = read(result);
    assert!(structured["error"]["code"].is_string(), "{structured}");
    texts.concat()
}

async fn called(caller: &Caller, name: &str, arguments: Value) -> CallToolResult {
    let Value::Object(arguments) = arguments else { panic!("{arguments}") };
    call(caller.clone(), name, arguments).await.unwrap_or_else(|| panic!("there is no tool {name}"))
}

fn read(result: CallToolResult) -> (Vec<String>, Value) {
    let texts = result.content.iter().map(|content| content.as_text().unwrap().text.clone());
    (texts.collect(), result.structured_content.unwrap())
}

#[test]
fn every_tool_has_words_a_closed_schema_and_annotations() {
    let tools = list();
    let names: Vec<&str> = tools.iter().map(|tool| &*tool.name).collect();
    for name in [
        "list_snapshots",
        "spawn_sandboxes",
        "branch_sandbox",
        "create_snapshot",
        "wait_for_text",
        "list_sandboxes",
        "get_sandbox",
        "kill_sandbox",
        "exec_command",
        "eval_code",
        "ping_sandbox",
        "fork_sandbox",
        "rollback_sandbox",
        "tree",
        "read_file",
        "write_file",
        "list_files",
        "run_code",
        "keep",
    ] {
        assert!(names.contains(&name), "{name}");
    }
    assert_eq!(names.len(), 19);
    for tool in &tools {
        let schema = Value::Object((*tool.input_schema).clone());
        assert_eq!(
            (&schema["type"], &schema["additionalProperties"]),
            (&json!("object"), &json!(false)),
            "{schema}"
        );
        assert!(!schema.to_string().contains("$ref"), "{schema}");
        for (name, property) in schema["properties"].as_object().into_iter().flatten() {
            assert!(property["description"].is_string(), "{}: {name}", tool.name);
            let is_typed = property["type"].is_string() || property["oneOf"].is_array();
            assert!(is_typed && !property.to_string().contains("null"), "{}: {property}", tool.name);
        }
        assert!(tool.description.as_ref().unwrap().len() > 10 && tool.title.is_some());
        let annotations = tool.annotations.as_ref().unwrap();
        let (reads, destroys) = (annotations.read_only_hint.unwrap(), annotations.destructive_hint.unwrap());
        assert!(!(reads && destroys), "{}", tool.name);
        assert_eq!(
            destroys,
            ["kill_sandbox", "rollback_sandbox", "write_file", "exec_command", "run_code", "eval_code"]
                .contains(&&*tool.name),
            "{}",
            tool.name
        );
    }
}

/// A limit that the client did not ask for would end guests that use their memory.
#[tokio::test]
async fn the_arguments_of_the_references_server_are_accepted_and_no_memory_limit_is_made_up() {
    let api = FakeApi::new();
    let caller = api.caller(50 << 10);
    let all = json!({ "snapshot_tag": "t", "n": 2, "per_child_netns": false, "memory_limit_mib": 256, "prewarm": false,
        "live_fork": false });
    let (texts, structured) = used(&caller, "spawn_sandboxes", all).await;
    assert_eq!((texts.len(), structured["result"].as_array().unwrap().len()), (2, 2));
    assert_eq!(serde_json::from_str::<Value>(&texts[0]).unwrap(), structured["result"][0]);
    used(&caller, "spawn_sandboxes", json!({ "snapshot_tag": "t" })).await;
    let sent = api.bodies("POST /v1/sandboxes?results=each");
    assert_eq!((&sent[0]["memory_limit_mib"], sent[1].get("memory_limit_mib")), (&json!(256), None));

    let branch = json!({ "sandbox_id": "sb1", "tag": "b", "diff": true, "measure_diff": false, "mode": null, "wait": true });
    used(&caller, "branch_sandbox", branch).await;
    used(&caller, "branch_sandbox", json!({ "sandbox_id": "sb1", "wait": false })).await;
    let sent = api.bodies("POST /v1/sandboxes/sb1/branch");
    assert_eq!((&sent[0]["mode"], &sent[0]["tag"]), (&json!("diff"), &json!("b")));
    assert_eq!(sent[1], json!({ "mode": "live", "wait": false }));
    failed(&caller, "branch_sandbox", json!({ "sandbox_id": "sb1", "mode": "full", "diff": true })).await;

    let create =
        json!({ "tag": "p", "kernel": "/k", "rootfs": "/r", "rw": true, "tap": null, "boot_wait_secs": 10 });
    used(&caller, "create_snapshot", create).await;
    let sent = api.bodies("POST /v1/snapshots");
    assert_eq!(
        sent[0],
        json!({ "tag": "p", "kernel": "/k", "rootfs": "/r", "rw": true, "boot_wait_secs": 10 })
    );
    let error = failed(&caller, "create_snapshot", json!({ "tag": "p" })).await;
    assert!(error.contains("`image`"), "{error}");

    let (_, killed) = used(&caller, "kill_sandbox", json!({ "sandbox_id": "sb1" })).await;
    assert_eq!(killed, json!({ "id": "sb1", "killed": true }));
    // The snapshot stays, the branches do not.
    caller.session.end().await;
    assert_eq!((api.sandboxes(), api.snapshots()), (vec![], vec!["p".into()]));
}

#[tokio::test]
async fn an_error_is_a_result_with_the_apis_code_and_the_tool_that_helps() {
    let api = FakeApi::new();
    let caller = api.caller(50 << 10);
    let error = failed(&caller, "get_sandbox", json!({ "sandbox_id": "sb9" })).await;
    assert!(error.starts_with("sandbox_not_found: ") && error.contains("list_sandboxes"), "{error}");
    for wrong in [json!({}), json!({ "sandbox_id": 7 }), json!({ "sandbox_id": "sb1", "force": true })] {
        let error = failed(&caller, "get_sandbox", wrong).await;
        assert!(error.starts_with("invalid_request: the arguments do not fit the tool"), "{error}");
    }
    for strange in ["", "..", ".", &"x".repeat(300)] {
        let error = failed(&caller, "kill_sandbox", json!({ "sandbox_id": strange })).await;
        assert!(error.contains("no name"), "{error}");
    }
    failed(&caller, "kill_sandbox", json!({ "sandbox_id": "../snapshots/t?x=" })).await;
    let lines = api.lines();
    assert!(lines.iter().any(|line| line == "DELETE /v1/sandboxes/..%2Fsnapshots%2Ft%3Fx%3D"), "{lines:?}");
    assert!(call(caller, "rm_rf", Default::default()).await.is_none());
}

#[tokio::test]
async fn long_output_is_cut_and_says_how_to_get_the_rest() {
    let api = FakeApi::new();
    let caller = api.caller(MIN_OUTPUT_LIMIT);
    let long = "0123456789".repeat(10_000);
    let reply = json!({ "stdout": long, "stderr": long, "exit_code": 0 });
    api.answer("POST /v1/sandboxes/sb1/exec", reply);
    let (texts, structured) =
        used(&caller, "exec_command", json!({ "sandbox_id": "sb1", "args": ["seq", "1"] })).await;
    assert!(texts[0].len() <= MIN_OUTPUT_LIMIT && structured.to_string().len() <= MIN_OUTPUT_LIMIT);
    assert!(texts[0].contains("read_file") && texts[0].contains("100000 bytes"), "{texts:?}");
    let numbers: Vec<u32> = (0..100_000).collect();
    let reply = json!({ "result": long, "error": null, "exit_code": 0, "stdout": "", "stderr": "", "traceback": null,
        "result_json": numbers });
    api.answer("POST /v1/sandboxes/sb1/eval", reply);
    for (tool, arguments) in [
        ("eval_code", json!({ "sandbox_id": "sb1", "code": "x" })),
        ("run_code", json!({ "sandbox_id": "sb1", "code": "x" })),
        ("run_code", json!({ "sandbox_id": "sb1", "code": "x", "language": "shell" })),
    ] {
        let (texts, structured) = used(&caller, tool, arguments).await;
        assert!(texts[0].len() <= MIN_OUTPUT_LIMIT && texts[0].contains("[cut: "), "{tool}: {texts:?}");
        assert!(structured.to_string().len() <= MIN_OUTPUT_LIMIT, "{tool}");
    }
}

#[tokio::test]
async fn run_code_shows_what_a_terminal_would_show() {
    let api = FakeApi::new();
    let caller = api.caller(50 << 10);
    let reply = json!({ "result": "42", "error": null, "exit_code": 0, "stdout": "hello\n", "stderr": "",
        "traceback": null, "result_json": 42 });
    api.answer("POST /v1/sandboxes/sb1/eval", reply);
    let (texts, structured) = used(&caller, "run_code", json!({ "sandbox_id": "sb1", "code": "x" })).await;
    assert_eq!(texts, ["stdout:\nhello\n\nvalue:\n42"]);
    assert_eq!((&structured["value"], &structured["error"]), (&json!("42"), &Value::Null));
    api.answer("POST /v1/sandboxes/sb1/exec", json!({ "stdout": "", "stderr": "no node", "exit_code": 127 }));
    let code = json!({ "sandbox_id": "sb1", "code": "x", "language": "javascript" });
    let (texts, _) = used(&caller, "run_code", code).await;
    assert_eq!(texts, ["stderr:\nno node\n\nexit code: 127"]);
    assert_eq!(api.bodies("POST /v1/sandboxes/sb1/exec")[0]["args"], json!(["node", "-"]));
}

#[tokio::test]
async fn a_file_is_read_in_parts_that_together_are_the_file() {
    let api = FakeApi::new();
    let caller = api.caller(MIN_OUTPUT_LIMIT);
    let text = "aä€😀\n".repeat(2000);
    api.put_file("/log", text.as_bytes());
    let (mut offset, mut all, mut parts) = (0, String::new(), 0);
    loop {
        let (texts, part) =
            used(&caller, "read_file", json!({ "sandbox_id": "sb1", "path": "/log", "offset": offset }))
                .await;
        assert!(texts[0].len() <= MIN_OUTPUT_LIMIT && part["encoding"] == "utf-8");
        all += part["content"].as_str().unwrap();
        parts += 1;
        let Some(next) = part["next_offset"].as_u64() else { break };
        assert!(texts[0].ends_with(&format!("offset={next}]")), "{texts:?}");
        offset = next;
    }
    assert!(all == text && parts > 5);
    api.put_file("/bin/x", &[0xff; 10]);
    let (texts, part) = used(&caller, "read_file", json!({ "sandbox_id": "sb1", "path": "/bin/x" })).await;
    assert_eq!((&part["encoding"], &part["content"]), (&json!("base64"), &json!("/////////////w==")));
    assert!(texts[0].contains("base64"));
    let error = failed(&caller, "read_file", json!({ "sandbox_id": "sb1", "path": "/none" })).await;
    assert!(error.starts_with("guest_not_found") && error.contains("list_files"), "{error}");
}

#[tokio::test]
async fn a_file_is_written_as_text_or_as_bytes() {
    let api = FakeApi::new();
    let caller = api.caller(50 << 10);
    let path = "/tmp/a b&c=?#%";
    let text = json!({ "sandbox_id": "sb1", "path": path, "content": "ä\n", "mode": "755" });
    let (_, written) = used(&caller, "write_file", text).await;
    assert_eq!((&written["path"], api.file(path)), (&json!(path), Some("ä\n".into())));
    assert!(api.lines()[0].ends_with("&mode=755"), "{:?}", api.lines());
    let bytes = json!({ "sandbox_id": "sb1", "path": "/x", "content": "AP8=", "encoding": "base64" });
    used(&caller, "write_file", bytes).await;
    assert_eq!(api.file("/x"), Some(vec![0, 255]));
    let wrong = json!({ "sandbox_id": "sb1", "path": "/x", "content": "%", "encoding": "base64" });
    assert!(failed(&caller, "write_file", wrong).await.contains("base64"));
}

#[tokio::test]
async fn a_text_is_waited_for_and_the_path_is_no_part_of_a_program() {
    let api = FakeApi::new();
    let caller = api.caller(50 << 10);
    api.answer(
        "POST /v1/sandboxes/sb1/exec",
        json!({ "stdout": format!("{}READY\n", "x".repeat(500)), "stderr": "", "exit_code": 0 }),
    );
    let path = "/tmp/$(reboot); 'x'";
    let (_, found) =
        used(&caller, "wait_for_text", json!({ "sandbox_id": "sb1", "path": path, "marker": "READY" })).await;
    assert_eq!((&found["found"], found["last_excerpt"].as_str().unwrap().len()), (&json!(true), 256));
    let sent = api.bodies("POST /v1/sandboxes/sb1/exec");
    let args = sent[0]["args"].as_array().unwrap();
    assert!(args[4] == path && !args[2].as_str().unwrap().contains("reboot"), "{args:?}");
    let never = json!({ "sandbox_id": "sb1", "path": "/x", "marker": "no", "timeout_secs": 0.2 });
    let (_, found) = used(&caller, "wait_for_text", never).await;
    assert_eq!(found["found"], false);
    for wrong in [
        json!({ "sandbox_id": "sb1", "path": "x", "marker": "y" }),
        json!({ "sandbox_id": "sb1", "path": "/x", "marker": "" }),
    ] {
        failed(&caller, "wait_for_text", wrong).await;
    }
}

#[tokio::test]
async fn keep_names_what_the_session_made_and_refuses_what_is_not_there() {
    let api = FakeApi::new();
    let caller = api.caller(50 << 10);
    used(&caller, "spawn_sandboxes", json!({ "snapshot_tag": "t" })).await;
    used(&caller, "fork_sandbox", json!({ "sandbox_id": "sb1", "n": 3 })).await;
    used(&caller, "branch_sandbox", json!({ "sandbox_id": "sb1", "tag": "good" })).await;
    let error = failed(&caller, "keep", json!({ "sandbox_ids": ["sb2", "sb99"] })).await;
    assert!(error.starts_with("sandbox_not_found"), "{error}");
    failed(&caller, "keep", json!({})).await;
    let (_, kept) = used(&caller, "keep", json!({ "sandbox_ids": ["sb2"], "snapshot_tags": ["good"] })).await;
    assert_eq!(kept["kept"], json!(["sb2", "good"]));
    caller.session.end().await;
    assert_eq!((api.sandboxes(), api.snapshots()), (vec!["sb2".into()], vec!["good".into()]));
}

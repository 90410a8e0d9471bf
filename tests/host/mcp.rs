//! The server of the Model Context Protocol, driven by the official clients and by the inspector's command line, over
//! standard input and output and over HTTP, with the daemon that everything here uses.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use forkd_tests::binary;
use serde_json::Value;

use crate::cli::{forkd, text};
use crate::node::Node;
use crate::pip::{environment, must};
use crate::sdk;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/mcp");

/// What the drivers read. They start `forkd`, so its folder is in `PATH`.
fn settings() -> [(&'static str, String); 4] {
    let [url, token, tag] = sdk::settings();
    let path = std::env::var("PATH").unwrap();
    [url, token, tag, ("PATH", format!("{}:{path}", binary("forkd").parent().unwrap().display()))]
}

/// Node.js, and a folder with the client and the inspector.
fn node() -> (PathBuf, PathBuf) {
    let node = Node::install();
    let folder = node.beside.join("npm-mcp");
    node.packages(Path::new(FOLDER), &folder);
    (node.node, folder)
}

#[test]
fn the_official_python_client_uses_every_tool_over_both_transports() {
    let requirements = Path::new(FOLDER).join("requirements.txt");
    let programs = environment("published-mcp", &requirements, &["--require-hashes"]);
    let mut drive = Command::new(programs.join("python"));
    let driven = drive.arg(Path::new(FOLDER).join("drive.py")).envs(settings()).output().unwrap();
    let printed = text(&must(driven, "the Python client").stdout);
    assert!(printed.contains("the Python client works"), "{printed}");
}

#[test]
fn the_official_typescript_client_works_over_both_transports() {
    let (node, folder) = node();
    // Beside the client, which is where a module is looked for.
    std::fs::copy(Path::new(FOLDER).join("drive.mjs"), folder.join("drive.mjs")).unwrap();
    let driven = Command::new(node).arg(folder.join("drive.mjs")).envs(settings()).output().unwrap();
    let printed = text(&must(driven, "the TypeScript client").stdout);
    assert!(printed.contains("the TypeScript client works"), "{printed}");
}

#[test]
fn the_inspectors_command_line_works_and_finds_no_fault_with_the_schemas() {
    let (node, folder) = node();
    let settings = settings();
    let (url, token) = (settings[0].1.clone(), settings[1].1.clone());
    let home = tempfile::tempdir().unwrap();
    let inspect = |args: &[&str]| -> Output {
        let mut command = Command::new(&node);
        command.arg(folder.join("node_modules/.bin/mcp-inspector")).arg("--cli").args(args);
        command.envs(settings.clone()).env("HOME", home.path()).output().unwrap()
    };
    let (address, secret) = (format!("FORKD_URL={url}"), format!("FORKD_TOKEN={token}"));
    let stdio = ["-e", address.as_str(), "-e", secret.as_str(), "forkd", "mcp"];
    let json = |output: Output| -> Value {
        let printed = text(&must(output, "the inspector").stdout);
        serde_json::from_str(&printed).unwrap_or_else(|error| panic!("{error}: {printed}"))
    };
    let tools = json(inspect(&[&stdio[..], &["--method", "tools/list", "--strict"]].concat()));
    assert_eq!(tools["tools"].as_array().unwrap().len(), 19, "{tools}");
    let endpoint = format!("{url}/mcp");
    let header = format!("Authorization: Bearer {token}");
    let http = [endpoint.as_str(), "--transport", "http", "--header", header.as_str()];
    let called =
        json(inspect(&[&http[..], &["--method", "tools/call", "--tool-name", "list_snapshots"]].concat()));
    assert!(called["structuredContent"]["result"].to_string().contains("\"sdk\""), "{called}");
    let read =
        json(inspect(&[&http[..], &["--method", "resources/read", "--uri", "forkd://tree.svg"]].concat()));
    assert_eq!(read["contents"][0]["mimeType"], "image/svg+xml", "{read}");
    let wrong = [endpoint.as_str(), "--transport", "http", "--header", "Authorization: Bearer wrong"];
    assert!(!inspect(&[&wrong[..], &["--method", "tools/list"]].concat()).status.success());
}

#[test]
fn the_settings_of_every_client_start_this_program() {
    for client in ["claude-desktop", "cursor", "cline", "vscode"] {
        let printed = must(forkd(None, &["mcp", "config", client]), client);
        let value: Value = serde_json::from_slice(&printed.stdout).unwrap();
        let key = if client == "vscode" { "servers" } else { "mcpServers" };
        let program = value[key]["forkd"]["command"].as_str().unwrap().to_owned();
        let version = Command::new(&program).arg("--version").output().unwrap();
        assert!(version.status.success(), "{program}");
        assert_eq!(value[key]["forkd"]["args"], serde_json::json!(["mcp"]));
    }
    let printed = text(&must(forkd(None, &["mcp", "config", "claude-code"]), "claude-code").stdout);
    assert!(printed.starts_with("claude mcp add forkd "), "{printed}");
    assert_eq!(forkd(None, &["mcp", "config", "claude-desktop", "--http"]).status.code(), Some(2));
    assert_eq!(forkd(None, &["mcp", "config", "notepad"]).status.code(), Some(2));
}

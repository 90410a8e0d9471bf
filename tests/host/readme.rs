//! The commands in the documents, run as a reader in a hurry would: in a shell, those of the README block
//! by block, those of docs/BRANCHING.md, docs/MCP.md, docs/SECURITY.md and docs/RUNBOOK.md one after the other.

use std::path::Path;
use std::process::{Command, Stdio};

use forkd_tests::binary;
use serde_json::Value;

use crate::cli::{forkd, text};

const README: &str = include_str!("../../README.md");
const SECURITY: &str = include_str!("../../docs/SECURITY.md");
const BRANCHING: &str = include_str!("../../docs/BRANCHING.md");
const RUNBOOK: &str = include_str!("../../docs/RUNBOOK.md");
const MCP: &str = include_str!("../../docs/MCP.md");

/// The indented blocks of a document, without those that are `make`'s: this test runs inside one of
/// them, and `make demo` is a test of its own. What is between fences is output, not commands.
fn blocks(document: &str) -> Vec<String> {
    let mut blocks = vec![String::new()];
    let mut fenced = false;
    for line in document.lines() {
        fenced ^= line.starts_with("```");
        match line.strip_prefix("    ") {
            Some(command) if !fenced && !command.starts_with("make ") => {
                let block = blocks.last_mut().unwrap();
                block.push_str(command);
                block.push('\n');
            }
            _ if blocks.last().is_some_and(|block| !block.is_empty()) => blocks.push(String::new()),
            _ => {}
        }
    }
    blocks.retain(|block| !block.is_empty());
    blocks
}

/// The names the documents give to images, snapshots and workspaces. Here they are others.
const NAMES: [&str; 12] = [
    "tools",
    "numpy",
    "thinking",
    "whole",
    "cold",
    "table",
    "sums",
    "sums-alone",
    "soon",
    "desk",
    "ci",
    "dashboard",
];

fn renamed(name: &str) -> String {
    format!("forkd-readme-{name}")
}

/// Commands as they are run here: the daemon's port is another one where 8889 was taken, and a reader's
/// own images, snapshots and workspaces are left alone.
fn script(commands: &str, url: &str) -> String {
    let in_word = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    let mut script = String::new();
    let mut rest = commands;
    while !rest.is_empty() {
        let (word, after) = rest.split_at(rest.find(|c| !in_word(c)).unwrap_or(rest.len()));
        let is_name = NAMES.contains(&word) && !script.ends_with("import ");
        script.push_str(&if is_name { renamed(word) } else { word.to_owned() });
        let (between, next) = after.split_at(after.find(in_word).unwrap_or(after.len()));
        script.push_str(between);
        rest = next;
    }
    script.replace("http://127.0.0.1:8889", url)
}

/// Runs commands in a folder where `target/release` is what is tested.
fn run(folder: &Path, commands: &str, status: i32) -> String {
    let output = Command::new("bash")
        .args(["-euxo", "pipefail", "-c", commands])
        .current_dir(folder)
        .stdin(Stdio::null())
        .output()
        .unwrap();
    let said = format!("{commands}\n{}{}", text(&output.stdout), text(&output.stderr));
    assert_eq!(output.status.code(), Some(status), "{said}");
    text(&output.stdout)
}

/// A folder as after `make build`.
fn built() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("target/release");
    std::fs::create_dir_all(bin.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(binary("forkd").parent().unwrap(), &bin).unwrap();
    folder
}

/// The daemon's address, a folder as after `make build`, and nothing left of an earlier run.
fn prepare() -> (String, tempfile::TempDir) {
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    let folder = built();
    for name in NAMES.map(renamed) {
        forkd(None, &["workspace", "rm", &name]);
        forkd(None, &["kill", "--tag", &name]);
        forkd(None, &["image", "rm", &name]);
    }
    forkd(None, &[&["rmi"][..], &NAMES.map(renamed).each_ref().map(String::as_str)].concat());
    (found["url"].as_str().unwrap().to_owned(), folder)
}

#[test]
fn every_everyday_command_is_in_the_documents_and_none_touches_what_is_a_readers_own() {
    let readme = script(&blocks(README).concat(), "http://127.0.0.1:1");
    for command in [
        "run", "snapshot", "fork", "spawn", "eval", "exec", "ping", "ls", "images", "kill", "unload", "rmi",
        "branch",
    ] {
        assert!(readme.contains(&format!("forkd {command} ")), "{command}:\n{readme}");
    }
    let branching = script(&blocks(BRANCHING).concat(), "http://127.0.0.1:1");
    for command in [
        "branch",
        "snapshot-diff",
        "snapshot-info",
        "snapshot-compact",
        "rmi --cascade",
        "rollback",
        "pause",
        "resume",
        "tree",
        "workspace create",
        "workspace suspend",
        "workspace ls",
        "workspace resume",
        "workspace rm",
    ] {
        assert!(branching.contains(&format!("\nforkd {command}")), "{command}:\n{branching}");
    }
    for script in [readme, branching] {
        assert!(!script.contains("kill --all") && !script.contains(":8889"), "{script}");
        for line in script.lines() {
            let words: Vec<&str> = line.split(" #").next().unwrap().split_whitespace().collect();
            let ours = |word: &str| word.starts_with("forkd-readme-") || word.starts_with('-');
            for pair in words.windows(2) {
                let named = ["--tag", "--from", "--to", "--snapshot", "unload", "build", "create"];
                assert!(!named.contains(&pair[0]) || ours(pair[1]), "{line}");
            }
            let removed = words.iter().skip_while(|word| !["rmi", "rm"].contains(word)).skip(1);
            assert!(removed.clone().all(|word| ours(word)), "{line}");
        }
    }
}

#[test]
fn every_command_in_the_readme_works() {
    let blocks = blocks(README);
    assert!(blocks.len() >= 4, "{blocks:?}");
    let (url, folder) = prepare();
    // Each block runs in a shell of its own; the README sets the path once, for all of them.
    let mut path = String::new();
    for block in blocks {
        let expected = if block.contains("exit 7") { 7 } else { 0 };
        let said = run(folder.path(), &format!("{path}{}", script(&block, &url)), expected);
        for (command, answer) in [
            ("numpy.zeros(5)", "[0.0, 0.0, 0.0, 0.0, 0.0]"),
            ("6 * 7", "\"42\""),
            ("numpy.ones(3)", "[1.0, 1.0, 1.0]"),
            ("fork --tag numpy -n 5", "5 of 5 children answer"),
            ("fork --tag thinking -n 3", "3 of 3 children answer"),
            ("branch $ID --tag thinking", "\npause "),
        ] {
            assert!(!block.contains(command) || said.contains(answer), "{block}\n{said}");
        }
        path.extend(
            block.lines().filter(|line| line.starts_with("export PATH=")).map(|line| format!("{line}\n")),
        );
    }
    assert!(forkd(None, &["image", "rm", &renamed("tools")]).status.success());
}

#[test]
fn every_command_in_the_document_on_security_works() {
    let (url, folder) = prepare();
    forkd(None, &["token", "rm", "forkd-readme-ci", "forkd-readme-dashboard"]);
    let commands = script(&blocks(SECURITY).concat(), &url);
    let said = run(folder.path(), &commands, 0);
    assert!(said.contains("forkd-readme-ci  ") && said.contains("\"api\":\"v1\""), "{said}");
    let left = text(&forkd(None, &["token", "ls", "--json"]).stdout);
    assert!(left.contains("default") && !left.contains("forkd-readme-"), "{left}");
}

#[test]
fn every_command_in_the_document_on_branching_works() {
    let (url, folder) = prepare();
    let said = run(folder.path(), &script(&blocks(BRANCHING).concat(), &url), 0);
    for answer in [
        "2 of 2 children answer",
        // A child goes on with what the sandbox had; taken back, the sandbox has it again.
        "['read', 'think', 'act']",
        "\n['read', 'think']\n",
        "depends on no other",
        "forkd-readme-desk: suspended",
    ] {
        assert!(said.contains(answer), "{answer}:\n{said}");
    }
    let drawn = std::fs::read_to_string(folder.path().join("tree.svg")).unwrap();
    assert!(drawn.starts_with("<svg ") && drawn.contains("forkd-readme-thinking"), "{drawn}");
    assert!(std::fs::read_to_string(folder.path().join("tree.dot")).unwrap().starts_with("digraph"));
    let left = text(&forkd(None, &["images", "--json"]).stdout);
    assert!(!left.contains("forkd-readme-"), "{left}");
}

#[test]
fn every_command_in_the_document_on_agents_works() {
    let (url, folder) = prepare();
    let said = run(
        folder.path(),
        &format!("export PATH=$PWD/target/release:$PATH\n{}", script(&blocks(MCP).concat(), &url)),
        0,
    );
    assert!(said.contains("\"mcpServers\"") && said.contains("claude mcp add forkd"), "{said}");
    assert!(forkd(None, &["rmi", &renamed("numpy")]).status.success());
}

/// Its commands start daemons of their own, without guests: they need nothing that the others prepare.
#[test]
fn every_command_in_the_runbook_works() {
    let folder = built();
    let said = run(folder.path(), &blocks(RUNBOOK).concat(), 0);
    for answer in ["{\"ok\":true}", "forkd_sandboxes_active 0", "\tGET\t/version\t200\tok"] {
        assert!(said.contains(answer), "{answer}:\n{said}");
    }
    for left in ["data/run", "restored/run"] {
        let run = folder.path().join(left);
        assert!(std::fs::symlink_metadata(&run).is_err(), "{left} is left: {said}");
    }
}

//! The README's commands, run as a reader in a hurry would: block by block, in a shell.

use std::process::{Command, Stdio};

use forkd_tests::binary;
use serde_json::Value;

use crate::natively::{forkd, text};

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

/// What the README's `tools` image is called here.
const TOOLS: &str = "forkd-readme-tools";
/// What its `numpy` snapshot is called here.
const SNAPSHOT: &str = "forkd-readme-numpy";

/// A block as it is run here: the daemon's port is another one where 8889 was taken, and a reader's own
/// image and snapshot are left alone.
fn script(block: &str, url: &str) -> String {
    let mut script = block.replace("http://127.0.0.1:8889", url);
    script = script.replace("image build tools", &format!("image build {TOOLS}"));
    for command in ["--tag", "unload", "rmi"] {
        script = script.replace(&format!("{command} numpy"), &format!("{command} {SNAPSHOT}"));
    }
    script
}

#[test]
fn every_everyday_command_is_in_the_readme_and_none_touches_what_is_a_readers_own() {
    let script = script(&blocks(include_str!("../../README.md")).concat(), "http://127.0.0.1:1");
    for command in
        ["run", "snapshot", "fork", "spawn", "eval", "exec", "ping", "ls", "images", "kill", "unload", "rmi"]
    {
        assert!(script.contains(&format!("target/release/forkd {command} ")), "{command}:\n{script}");
    }
    assert!(!script.contains("kill --all") && !script.contains(":8889"), "{script}");
    let named = script.lines().filter(|line| line.contains("--tag ") || line.contains("rmi "));
    assert!(named.clone().count() >= 4, "{script}");
    assert!(named.clone().all(|line| line.contains(SNAPSHOT)), "{script}");
}

#[test]
fn every_command_in_the_readme_works() {
    let blocks = blocks(include_str!("../../README.md"));
    assert!(blocks.len() >= 3, "{blocks:?}");
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let bin = folder.path().join("target/release");
    std::fs::create_dir_all(bin.parent().unwrap()).unwrap();
    std::os::unix::fs::symlink(binary("forkd").parent().unwrap(), &bin).unwrap();
    forkd(None, &["image", "rm", TOOLS]);
    forkd(None, &["kill", "--tag", SNAPSHOT]);
    forkd(None, &["rmi", SNAPSHOT]);
    for block in blocks {
        let script = script(&block, found["url"].as_str().unwrap());
        let output = Command::new("bash")
            .args(["-euo", "pipefail", "-c", &script])
            .current_dir(folder.path())
            .stdin(Stdio::null())
            .output()
            .unwrap();
        let expected = if block.contains("exit 7") { 7 } else { 0 };
        let said = format!("{block}\n{}{}", text(&output.stdout), text(&output.stderr));
        assert_eq!(output.status.code(), Some(expected), "{said}");
        for (command, answer) in [
            ("numpy.zeros(5)", "[0.0, 0.0, 0.0, 0.0, 0.0]"),
            ("6 * 7", "\"42\""),
            ("numpy.ones(3)", "[1.0, 1.0, 1.0]"),
            ("fork --tag numpy -n 5", "5 of 5 children answer"),
        ] {
            assert!(!block.contains(command) || text(&output.stdout).contains(answer), "{said}");
        }
    }
    assert!(forkd(None, &["image", "rm", TOOLS]).status.success());
}

//! The published clients of E2B, unmodified: the Python client from PyPI and the npm client, each into an environment of
//! its own, then all of their calls that forkd serves, against the daemon that everything here uses.

use std::io::Write;
use std::path::Path;
use std::process::{Command, Stdio};

use forkd_tests::{binary, eventually, library_path};
use serde_json::Value;

use crate::cli::{forkd, text};
use crate::machine::{machine_is_used, pull_plug};
use crate::node::Node;
use crate::pip::{environment, must};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/e2b");
/// The template of all sandboxes here: built and warmed once.
const TEMPLATE: &str = "base";

/// Kills the daemon, as the kernel does when memory is short.
const KILL_DAEMON: &str = "
import glob, os, signal
for path in glob.glob('/proc/[0-9]*/cmdline'):
    words = open(path, 'rb').read().split(b'\\0')
    if words[0].endswith(b'forkd') and b'serve' in words:
        os.kill(int(path.split('/')[2]), signal.SIGKILL)
        break
else:
    raise SystemExit('there is no daemon')
";

/// Address and token of the daemon, as the clients read them.
fn settings() -> [(&'static str, String); 4] {
    let prepared = forkd(None, &["template", "prepare", TEMPLATE]);
    must(prepared, "forkd template prepare");
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    let url = found["url"].as_str().unwrap().to_owned();
    let key = format!("e2b_{}", found["token"].as_str().unwrap());
    [
        ("E2B_API_URL", url.clone()),
        ("E2B_SANDBOX_URL", url),
        ("E2B_API_KEY", key),
        ("DRIVE_TEMPLATE", TEMPLATE.into()),
    ]
}

fn requirements() -> std::path::PathBuf {
    Path::new(FOLDER).join("requirements.txt")
}

/// The indented lines of the page, then its program.
fn page() -> String {
    let (before, program) = include_str!("../../docs/E2B.md").split_once("```python\n").unwrap();
    let (program, after) = program.split_once("```").unwrap();
    let commands = before.lines().chain(after.lines()).filter_map(|line| line.strip_prefix("    "));
    let commands: Vec<&str> = commands.collect();
    format!("set -e\n{}\npython3 - <<'END'\n{program}END\n", commands.join("\n"))
}

#[test]
fn the_commands_and_the_program_of_the_page_on_e2b_work() {
    let programs = environment("published-e2b", &requirements(), &["--require-hashes"]);
    let path = std::env::var("PATH").unwrap();
    let forkd = binary("forkd").parent().unwrap().display().to_string();
    let path = format!("{}:{forkd}:{path}", programs.display());
    let ran = Command::new("bash").args(["-c", &page()]).env("PATH", path).output().unwrap();
    let printed = text(&must(ran, "the page").stdout);
    assert!(printed.contains("Python 3"), "{printed}");
}

#[test]
fn the_published_python_client_of_e2b_works_unmodified() {
    let programs = environment("published-e2b", &requirements(), &["--require-hashes"]);
    let mut drive = Command::new(programs.join("python"));
    let driven = drive.arg(Path::new(FOLDER).join("drive.py")).envs(settings()).output().unwrap();
    let printed = text(&must(driven, "the Python client").stdout);
    assert!(printed.contains("the published Python client works"), "{printed}");
}

#[test]
fn sandboxes_survive_a_killed_daemon_and_a_paused_one_a_power_cut() {
    if !machine_is_used() {
        return;
    }
    let programs = environment("published-e2b", &requirements(), &["--require-hashes"]);
    let survive = |step: &str, before: &str| {
        let mut command = Command::new(programs.join("python"));
        command.arg(Path::new(FOLDER).join("survive.py")).arg(step).envs(settings());
        let mut running =
            command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).spawn().unwrap();
        running.stdin.take().unwrap().write_all(before.as_bytes()).unwrap();
        text(&must(running.wait_with_output().unwrap(), "the Python client").stdout)
    };
    let before = survive("begin", "");
    must(forkd(None, &["machine", "shell", "--", "python3", "-c", KILL_DAEMON]), "kill -9 of the daemon");
    // The machine's supervisor starts another one.
    eventually("the next daemon", || forkd(None, &["images"]).status.success().then_some(()));
    assert!(survive("look", &before).contains("they were kept"));
    pull_plug(&library_path());
    assert!(survive("connect", &before).contains("it survived"));
}

#[test]
fn the_published_npm_client_of_e2b_works_unmodified() {
    let node = Node::install();
    let folder = node.beside.join("npm");
    node.packages(Path::new(FOLDER), &folder);
    // Beside the client, which is where a module is looked for.
    std::fs::copy(Path::new(FOLDER).join("drive.mjs"), folder.join("drive.mjs")).unwrap();
    let mut drive = Command::new(node.node);
    let driven = drive.arg(folder.join("drive.mjs")).envs(settings()).output().unwrap();
    let printed = text(&must(driven, "the npm client").stdout);
    assert!(printed.contains("the published npm client works"), "{printed}");
}

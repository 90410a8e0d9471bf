//! The API, fuzzed from its own document by schemathesis: whatever the request, the daemon never fails,
//! answers in the documented shape, and goes on. Half a minute here, longer in `make soak`
//! (`FORKD_SCHEMA_SECS`).

use forkd_tests::test_name;
use std::path::Path;
use std::process::Command;

use crate::cli::text;
use crate::fanout::{can_run, daemon_with_tiny, ids, spawn};
use crate::pip::environment;

const REQUIREMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/schema/requirements.txt");

#[test]
fn nothing_the_api_document_allows_or_forbids_makes_the_daemon_fail() {
    if !can_run(test_name!()) {
        return;
    }
    let programs = environment("schemathesis", Path::new(REQUIREMENTS), &[]);
    let daemon = daemon_with_tiny(&[]);
    let kept = ids(&spawn(&daemon, 2));
    let token = std::fs::read_to_string(daemon.data_dir().join("token")).unwrap();
    let seconds = std::env::var("FORKD_SCHEMA_SECS").ok().filter(|text| !text.is_empty());
    // Some requests reach something: half of all ids and tags are of what there is.
    let settings = daemon.data_dir().join("schemathesis.toml");
    let known = format!(
        "[parameters]\nid = [\"{}\", \"{}\", \"sbnone\"]\ntag = [\"tiny\", \"none\"]\nname = [\"w\"]\n",
        kept[0], kept[1]
    );
    std::fs::write(&settings, known).unwrap();
    let run = Command::new(programs.join("schemathesis"))
        .arg("--config-file")
        .arg(&settings)
        .args(["run", &format!("http://127.0.0.1:{}/openapi.json", daemon.port())])
        .args(["--header", &format!("Authorization: Bearer {}", token.trim())])
        .args(["--checks", "not_a_server_error,content_type_conformance,status_code_conformance"])
        // Those that stream never come to an end.
        .args(["--exclude-path-regex", "(/events|/run|/stream|/console)$"])
        .args(["--phases", "coverage,fuzzing", "--request-timeout", "60", "--no-color"])
        .args(["--max-time", seconds.as_deref().unwrap_or("30"), "--suppress-health-check", "all"])
        .current_dir(daemon.data_dir())
        .output()
        .unwrap();
    let said = text(&run.stdout);
    assert!(run.status.success(), "{said}{}\n{}", text(&run.stderr), daemon.log());
    assert_eq!(daemon.request("GET", "/healthz", None).status, 200);
    let cases = said.lines().find(|line| line.contains(" generated")).unwrap_or_default();
    println!("campaign: | API fuzzing | {} s | {} |", seconds.as_deref().unwrap_or("30"), cases.trim());
}

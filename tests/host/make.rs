//! The parts of `make`, and its list of what did not run.

use std::path::Path;
use std::process::Command;

use crate::cli::text;

/// What a command in the project's folder prints.
fn output(program: &str, args: &[&str]) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap();
    let output = Command::new(program).args(args).current_dir(folder).output().unwrap();
    assert!(output.status.success(), "{program} {args:?}: {}", text(&output.stderr));
    text(&output.stdout).to_owned()
}

#[test]
fn advisories_have_a_command_and_are_listed_as_not_run() {
    assert!(output("make", &["--dry-run", "advisories"]).contains("cargo deny check advisories"));
    // CI has no network, and reports that.
    let lint = output("make", &["--dry-run", "lint"]);
    assert!(lint.contains("NOT RUN: advisories"), "{lint}");
    assert!(!lint.contains("cargo deny check advisories"), "{lint}");
}

#[test]
fn what_did_not_run_is_listed_once_from_all_logs() {
    let folder = tempfile::tempdir().unwrap();
    let (one, other) = (folder.path().join("log"), folder.path().join("log.outside"));
    std::fs::write(&one, "test x ... ok\nNOT RUN: b (no KVM)\nx NOT RUN: a\n").unwrap();
    std::fs::write(&other, "NOT RUN: b (no KVM)\nNOT RUN: c\n").unwrap();
    let list = |logs: &[&Path]| {
        let mut args = vec!["list"];
        args.extend(logs.iter().map(|log| log.to_str().unwrap()));
        output("scripts/test.sh", &args)
    };
    assert_eq!(list(&[&one, &other]), "NOT RUN: a\nNOT RUN: b (no KVM)\nNOT RUN: c\n");
    std::fs::write(&one, "test x ... ok\n").unwrap();
    assert!(!list(&[&one]).contains("NOT RUN"));
}

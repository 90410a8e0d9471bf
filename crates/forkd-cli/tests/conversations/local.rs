//! Commands about this host: settings, documentation, leftovers; and commands with several steps that use a
//! daemon.

use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Stdio};

use serde_json::{Value, json};

use crate::fake_daemon::{FakeDaemon, Said};
use crate::{child, snapshot};

/// Runs `forkd` without any daemon, with nothing of the caller's environment that concerns it.
fn forkd(data: &Path, args: &[&str], environment: &[(&str, &str)]) -> Said {
    let mut command = Command::new(env!("CARGO_BIN_EXE_forkd"));
    for (name, _) in std::env::vars_os() {
        if name.to_string_lossy().starts_with("FORKD_") {
            command.env_remove(name);
        }
    }
    command.args(args).stdin(Stdio::null()).env("FORKD_DATA_DIR", data).envs(environment.iter().copied());
    Said::from(command.output().unwrap())
}

fn setting(shown: &Value, key: &str) -> Value {
    let settings = shown["settings"].as_array().unwrap();
    settings.iter().find(|setting| setting["key"] == key).unwrap_or_else(|| panic!("{key}")).clone()
}

#[test]
fn flags_go_before_the_environment_and_that_before_the_file_and_that_before_the_default() {
    let data = tempfile::tempdir().unwrap();
    let file = data.path().join("config.toml");
    std::fs::write(
        &file,
        "bind = \"127.0.0.1:1\"\nnetwork_pool = 7\ndaemon_url = \"http://file:1\"\ndaemon_token = \"abc\"\n",
    )
    .unwrap();
    std::fs::set_permissions(&file, std::fs::Permissions::from_mode(0o600)).unwrap();
    let file = file.to_str().unwrap();
    let environment = [("FORKD_CONFIG", file), ("FORKD_BIND", "127.0.0.1:2")];
    let line = ["config", "--json", "--daemon-url", "http://flag:1"];
    let said = forkd(data.path(), &line, &environment);
    assert_eq!(said.status, Some(0), "{said:?}");
    let shown = said.json();
    assert_eq!(shown["file"], file);
    for (key, value, source) in [
        ("daemon_url", "http://flag:1", "flag"),
        ("bind", "127.0.0.1:2", "environment"),
        ("network_pool", "7", "file"),
        ("daemon_token", "(hidden)", "file"),
        ("machine_mib", "4096", "default"),
    ] {
        let setting = setting(&shown, key);
        assert_eq!((&setting["value"], &setting["source"]), (&json!(value), &json!(source)), "{key}");
    }
    assert_eq!(setting(&shown, "network_pool")["from"], format!("{file}:2"));
    assert!(!said.stdout.contains("abc"), "a secret is shown");
    let people = forkd(data.path(), &["--config", file, "config"], &[]);
    assert!(people.stdout.contains("network_pool") && people.stdout.contains(&format!("{file}:2")));
}

#[test]
fn a_wrong_file_stops_every_command_but_those_that_help() {
    let data = tempfile::tempdir().unwrap();
    let file = data.path().join("config.toml");
    std::fs::write(&file, "quiet = true\nnonsense = 1\n").unwrap();
    let path = file.to_str().unwrap();
    let where_ = format!("{path}:2: unknown key `nonsense`; known are ");
    for line in [&["ls"][..], &["config"], &["config", "check", path], &["where"]] {
        let said = forkd(data.path(), line, &[("FORKD_CONFIG", path)]);
        assert_eq!(said.status, Some(1), "{line:?}: {said:?}");
        assert!(said.stderr.contains(&where_), "{line:?}: {said:?}");
    }
    let said = forkd(data.path(), &["completions", "bash"], &[("FORKD_CONFIG", path)]);
    assert_eq!(said.status, Some(0), "{said:?}");
    let missing = forkd(data.path(), &["--config", "/nonexistent/x.toml", "where"], &[]);
    assert!(missing.status == Some(1) && missing.stderr.contains("/nonexistent/x.toml"), "{missing:?}");
    std::fs::write(&file, "quiet = true\n").unwrap();
    assert_eq!(forkd(data.path(), &["config", "check", path], &[]).status, Some(0));
}

#[test]
fn the_file_says_which_daemon_and_where_data_is() {
    let daemon = FakeDaemon::start(|_| (200, json!([])));
    let asked = daemon.forkd(&[]);
    let url = asked.get_envs().find(|(name, _)| *name == "FORKD_URL").unwrap().1.unwrap().to_owned();
    let folder = tempfile::tempdir().unwrap();
    let file = folder.path().join("c.toml");
    std::fs::write(&file, format!("daemon_url = {:?}\n", url.to_str().unwrap())).unwrap();
    let said = forkd(folder.path(), &["ls", "--config", file.to_str().unwrap()], &[]);
    assert_eq!(said.status, Some(0), "{said:?}");
    assert_eq!(daemon.lines(), ["GET /v1/sandboxes"]);
    let place = forkd(folder.path(), &["where"], &[]);
    assert_eq!(place.stdout, format!("{}\n", folder.path().display()));
    let place = forkd(folder.path(), &["where", "--json"], &[]).json();
    assert_eq!(place["socket"], folder.path().join("forkd.sock").to_str().unwrap());
}

#[test]
fn completions_and_manual_pages_are_what_shells_and_readers_understand() {
    let data = tempfile::tempdir().unwrap();
    for shell in ["bash", "zsh", "fish"] {
        let said = forkd(data.path(), &["completions", shell], &[]);
        assert_eq!(said.status, Some(0), "{said:?}");
        assert!(said.stdout.contains("snapshot-compact"), "{shell} does not know every command");
        let file = data.path().join(shell);
        std::fs::write(&file, &said.stdout).unwrap();
        // A script is checked only if its shell is installed; bash is everywhere.
        match Command::new(shell).arg("-n").arg(&file).output() {
            Ok(checked) => assert!(checked.status.success(), "{shell}: {checked:?}"),
            Err(_) => assert_ne!(shell, "bash", "bash is not there to check"),
        }
    }
    let page = forkd(data.path(), &["man"], &[]);
    assert!(page.status == Some(0) && page.stdout.contains(".TH forkd 1"), "{page:?}");
    let folder = data.path().join("man1");
    let said = forkd(data.path(), &["man", "--dir", folder.to_str().unwrap()], &[]);
    assert_eq!(said.status, Some(0), "{said:?}");
    let pages: Vec<_> = std::fs::read_dir(&folder).unwrap().map(|page| page.unwrap().path()).collect();
    for name in ["forkd.1", "forkd-branch.1", "forkd-workspace-create.1", "forkd-config.1"] {
        assert!(pages.iter().any(|page| page.ends_with(name)), "{name} is missing: {pages:?}");
    }
    for page in &pages {
        let text = std::fs::read_to_string(page).unwrap();
        assert!(text.contains(".TH ") && text.contains(".SH NAME"), "{}", page.display());
        // A formatter complains on standard error.
        if let Ok(checked) = Command::new("mandoc").args(["-T", "lint", "-W", "error"]).arg(page).output() {
            assert!(checked.status.success(), "{checked:?}");
        }
    }
}

#[test]
fn flags_that_lost_their_meaning_are_noted_and_those_that_meant_something_else_are_refused() {
    let daemon = FakeDaemon::start(|_| (201, json!({ "children": [child("sb1")], "errors": [] })));
    let line = ["spawn", "--tag", "t", "--per-child-netns", "--prewarm", "--live-fork", "--hugepages"];
    let said = daemon.run(&line);
    assert_eq!((said.status, said.stdout.as_str()), (Some(0), "sb1\n"), "{said:?}");
    assert_eq!(said.stderr.lines().count(), 4, "{said:?}");
    assert!(said.stderr.contains("forkd: --prewarm: ") && said.stderr.contains("; ignored"), "{said:?}");
    let quiet = daemon.run(&[&["--quiet"], &line[..]].concat());
    assert_eq!((quiet.status, quiet.stderr.as_str()), (Some(0), ""), "{quiet:?}");
    let before = daemon.lines().len();
    for (line, instead) in [
        (&["snapshot", "--tag", "t", "--image", "i", "--volume", "/a:/b"][..], "forkd image build"),
        (&["run", "--image", "i", "--extra", "jq", "--", "true"], "forkd parent build"),
        (&["run", "--image", "i", "--kernel", "k", "--", "true"], "forkd serve --kernel"),
    ] {
        let refused = daemon.run(line);
        assert_eq!(refused.status, Some(2), "{refused:?}");
        assert!(refused.stderr.contains(instead), "{refused:?}");
    }
    assert_eq!(daemon.lines().len(), before, "something was asked of the daemon");
}

#[test]
fn a_snapshot_of_a_sandbox_is_a_branch() {
    let daemon = FakeDaemon::start(|_| (201, snapshot("ready", None)));
    for (more, body) in [
        (&["--diff"][..], json!({ "mode": "diff", "tag": "t" })),
        (&["--live", "--no-wait"], json!({ "mode": "live", "tag": "t", "wait": false })),
        (&[], json!({ "mode": "full", "tag": "t" })),
    ] {
        let line = [&["snapshot", "--tag", "t", "--from-sandbox", "sb1"], more].concat();
        let said = daemon.run(&line);
        assert_eq!(said.status, Some(0), "{said:?}");
        assert_eq!(daemon.asked().last().unwrap(), &("POST /v1/sandboxes/sb1/branch".to_owned(), body));
    }
    for wrong in [
        &["snapshot", "--tag", "t", "--image", "i", "--diff"][..],
        &["snapshot", "--tag", "t", "--from-sandbox", "sb1", "--diff", "--live"],
        &["snapshot", "--tag", "t", "--from-sandbox", "sb1", "--no-wait"],
        &["snapshot", "--tag", "t", "--from-sandbox", "sb1", "--image", "i"],
    ] {
        assert_eq!(daemon.run(wrong).status, Some(2), "{wrong:?}");
    }
}

#[test]
fn an_image_becomes_a_snapshot_and_a_registrys_is_explained() {
    let daemon = FakeDaemon::start(|_| (202, snapshot("ready", None)));
    let said = daemon.run(&["from-image", "tools", "--tag", "t", "--tap", "tap0", "--mem-size-mib", "256"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    assert_eq!(daemon.asked()[0].1, json!({ "tag": "t", "image": "tools", "mem_size_mib": 256 }));
    let said = daemon.run(&["from-image", "python:3.12-slim", "--tag", "t"]);
    assert_eq!(said.status, Some(2), "{said:?}");
    assert!(said.stderr.contains("docker export") && said.stderr.contains("--tar python.tar"), "{said:?}");
    let said = daemon.run(&["from-image", "python", "--tag", "t", "--extra", "git"]);
    assert!(said.status == Some(1) && said.stderr.contains("build it there"), "{said:?}");
}

#[test]
fn a_quick_start_uses_what_is_there_makes_what_is_not_and_forks() {
    let children = || json!({ "children": [child("sb1"), child("sb2")], "errors": [] });
    let there = FakeDaemon::start(move |line| match line {
        "GET /v1/snapshots/quickstart" => (200, snapshot("ready", None)),
        _ => (201, children()),
    });
    let said = there.run(&["quickstart", "-n", "2", "--yes"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    assert!(said.stdout.contains("2 of 2 children answer"), "{said:?}");
    assert!(said.stderr.contains("forkd exec sb1"), "{said:?}");
    let fork =
        ("POST /v1/sandboxes?results=each".to_owned(), json!({ "snapshot_tag": "quickstart", "n": 2 }));
    assert_eq!(there.asked().last().unwrap(), &fork);
    let missing = FakeDaemon::start(move |line| match line {
        "GET /v1/snapshots/quickstart" => (404, json!({ "error": "there is no snapshot quickstart" })),
        line if line.contains("snapshots") => (202, snapshot("ready", None)),
        _ => (201, children()),
    });
    let told = missing.run(&["quickstart", "-n", "2", "--yes", "--json"]);
    assert_eq!(told.status, Some(0), "{told:?}");
    assert_eq!(
        (&told.json()["children"][1]["id"], &told.json()["snapshot"]["dir"]),
        (&json!("sb2"), &json!("/d"))
    );
    assert_eq!(missing.asked()[1].1, json!({ "tag": "quickstart", "image": "python" }));
    // Without a terminal, no user can confirm.
    let unasked = there.run(&["quickstart"]);
    assert!(unasked.status == Some(1) && unasked.stderr.contains("--yes"), "{unasked:?}");
}

#[test]
fn a_bench_tells_each_step_and_leaves_nothing_behind_even_when_one_fails() {
    let works = |failing: bool| {
        FakeDaemon::start(move |line| match line {
            "GET /v1/snapshots" => (200, json!([snapshot("failed", None), snapshot("ready", None)])),
            "POST /v1/sandboxes?results=each" => (201, json!({ "children": [child("sb1")], "errors": [] })),
            "POST /v1/sandboxes/sb1/exec" => {
                (200, json!({ "stdout": "", "stderr": "", "exit_code": 0, "timed_out": false }))
            }
            "POST /v1/sandboxes/sb1/branch" if failing => (500, json!({ "error": "no room" })),
            "POST /v1/sandboxes/sb1/branch" => {
                let mut branch = snapshot("ready", None);
                branch["pause_ms"] = json!(2.5);
                branch["bytes_written"] = json!(1 << 20);
                (201, branch)
            }
            _ => (204, Value::Null),
        })
    };
    let daemon = works(false);
    let said = daemon.run(&["bench", "--n", "3", "--per-child-netns"]);
    assert_eq!(said.status, Some(0), "{said:?}");
    for step in ["spawn", "exec", "branch", "fanout", "cleanup", "total"] {
        assert!(said.stdout.lines().any(|line| line.starts_with(step)), "{step}: {said:?}");
    }
    assert!(said.stdout.contains("paused for 2.5 ms; 1.0 MiB written"), "{said:?}");
    let told = works(false).run(&["bench", "--tag", "t", "--json"]).json();
    assert_eq!(
        (&told["tag"], &told["n"], &told["steps"][2]["name"]),
        (&json!("t"), &json!(5), &json!("branch"))
    );
    let removed = |daemon: &FakeDaemon| {
        let lines = daemon.lines();
        let branch = lines.iter().any(|line| line.starts_with("DELETE /v1/snapshots/bench-"));
        branch && lines.iter().any(|line| line == "DELETE /v1/sandboxes/sb1")
    };
    assert!(removed(&daemon), "{:?}", daemon.lines());
    let daemon = works(true);
    let said = daemon.run(&["bench"]);
    assert!(said.status == Some(1) && said.stderr.contains("no room"), "{said:?}");
    assert!(removed(&daemon), "{:?}", daemon.lines());
}

#[test]
fn what_became_of_each_is_json_as_well() {
    let daemon = FakeDaemon::start(|line| match line {
        "GET /v1/sandboxes" => (200, json!([child("sb1")])),
        line if line.contains("bad") => (404, json!({ "error": "no such thing" })),
        _ => (204, Value::Null),
    });
    let said = daemon.run(&["rmi", "good", "bad", "--json"]);
    let expected =
        json!([{ "name": "good", "ok": true }, { "name": "bad", "ok": false, "error": "no such thing" }]);
    assert_eq!((said.status, said.json()), (Some(1), expected));
    for line in [&["kill", "sb1", "--json"][..], &["kill", "--all", "--json"], &["pause", "sb1", "--json"]] {
        let said = daemon.run(line);
        assert_eq!((said.status, said.json()), (Some(0), json!([{ "name": "sb1", "ok": true }])), "{line:?}");
    }
}

#[test]
fn looking_for_leftovers_finds_what_nobody_owns_and_removes_nothing() {
    let (data, memory) = (tempfile::tempdir().unwrap(), tempfile::tempdir().unwrap());
    let (orphan, kept) = (memory.path().join("forkd-orphaned"), memory.path().join("forkd-in-hands"));
    for (folder, owner) in [(&orphan, Path::new("/nonexistent")), (&kept, data.path())] {
        std::fs::create_dir_all(folder.join("sandboxes/sb1")).unwrap();
        std::os::unix::fs::symlink(owner, folder.join("data")).unwrap();
    }
    std::os::unix::fs::symlink(&kept, data.path().join("run")).unwrap();
    let environment = [("XDG_RUNTIME_DIR", memory.path().to_str().unwrap())];
    let said = forkd(data.path(), &["cleanup", "--json"], &environment);
    assert_eq!(said.status, Some(0), "{said:?}");
    let found = said.json();
    assert_eq!(found["removed"], false);
    let action = |folder: &Path| {
        let leftovers = found["leftovers"].as_array().unwrap();
        leftovers.iter().find(|one| one["path"] == folder.to_str().unwrap()).unwrap()["action"].clone()
    };
    assert_eq!((action(&orphan), action(&kept)), (json!("delete"), json!("skip")));
    assert!(orphan.exists() && kept.exists());
    let people = forkd(data.path(), &["cleanup"], &environment);
    assert!(people.stdout.lines().any(|line| line.starts_with("DEL") && line.contains("forkd-orphaned")));
    assert!(people.stdout.lines().any(|line| line.starts_with("SKIP") && line.contains("forkd-in-hands")));
}

#[test]
fn a_doctor_counts_its_checks_and_fails_only_with_one_that_failed() {
    let daemon = FakeDaemon::start(|line| match line {
        "GET /healthz" => (200, json!({ "ok": true })),
        "GET /version" => (200, json!({ "version": "0.0.1", "api": "v1", "address": "127.0.0.1:1" })),
        "GET /v1/snapshots" => {
            let mut broken = snapshot("failed", None);
            broken["error"] = json!("made on a CPU of another maker");
            (200, json!([snapshot("ready", None), broken]))
        }
        _ => (404, Value::Null),
    });
    let said = daemon.run(&["doctor", "--json"]);
    let report = said.json();
    let check = |name: &str| {
        let checks = report["checks"].as_array().unwrap();
        checks.iter().find(|check| check["name"] == name).unwrap_or_else(|| panic!("{name}")).clone()
    };
    assert_eq!(check("daemon")["status"], "warn", "another version is worth a word");
    assert!(check("daemon")["detail"].as_str().unwrap().contains("version 0.0.1"));
    assert_eq!(check("snapshots")["status"], "warn");
    assert!(check("snapshots")["detail"].as_str().unwrap().contains("another maker"));
    let totals = &report["totals"];
    let count = |name: &str| totals[name].as_u64().unwrap();
    let all = count("pass") + count("warn") + count("fail") + count("skip");
    assert_eq!(all as usize, report["checks"].as_array().unwrap().len());
    assert_eq!(said.status, Some(i32::from(count("fail") > 0)), "{report}");
}

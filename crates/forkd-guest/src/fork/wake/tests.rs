//! The order in which processes of a child run, tested with this machine's own cgroups where it has some.

use std::{
    fs,
    os::unix::fs::PermissionsExt,
    path::Path,
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use serde_json::json;

use super::{
    super::tests::{freezable, warnings},
    *,
};
use crate::{
    agent::tests::{TestAgent, eventually},
    process::{Cgroups, Processes},
};

fn hook(agent: &TestAgent, name: &str, mode: u32, script: &str) {
    program(&agent.path("root/etc/forkd/forked.d").join(name), mode, script);
}

fn program(path: &Path, mode: u32, script: &str) {
    fs::create_dir_all(path.parent().unwrap()).unwrap();
    fs::write(path, format!("#!/bin/sh\n{script}\n")).unwrap();
    fs::set_permissions(path, fs::Permissions::from_mode(mode)).unwrap();
}

/// A script that writes to `answer` whether `file` stops changing.
fn looks_at(file: &Path, answer: &Path) -> String {
    let (file, answer) = (file.display(), answer.display());
    format!(
        "before=$(wc -c < {file}); sleep 0.3; after=$(wc -c < {file}); \
         [ $before = $after ] && echo still > {answer} || echo moving > {answer}"
    )
}

#[test]
fn hooks_run_in_the_order_of_their_names_and_know_who_they_are() {
    let Some(agent) = freezable() else { return };
    let log = agent.path("log");
    for (name, mode) in [("20-b", 0o755), ("10-a", 0o700), ("30-data", 0o644), (".40-hidden", 0o755)] {
        hook(&agent, name, mode, &format!("echo {name} $FORKD_SANDBOX_ID >> {}", log.display()));
    }
    let answer = agent.become_child("sbhooks", json!({})).unwrap();
    assert_eq!(warnings(&answer), Vec::<String>::new());
    assert_eq!(fs::read_to_string(&log).unwrap(), "10-a sbhooks\n20-b sbhooks\n");
}

#[test]
fn a_hook_that_fails_is_a_warning_and_the_next_one_runs() {
    let Some(agent) = freezable() else { return };
    hook(&agent, "1", 0o755, "echo reason one; echo reason two >&2; exit 3");
    hook(&agent, "2", 0o755, &format!("echo ran > {}", agent.path("second").display()));
    let warnings = warnings(&agent.become_child("sbhooks", json!({})).unwrap());
    assert_eq!(warnings.len(), 1, "{warnings:?}");
    for part in ["forked.d/1", "exit status 3", "reason one", "reason two"] {
        assert!(warnings[0].contains(part), "{part}: {warnings:?}");
    }
    assert!(agent.path("second").exists());
}

#[test]
fn hooks_that_take_too_long_are_killed_with_what_they_started_and_the_rest_is_named() {
    let agent = TestAgent::new();
    let file = agent.path("ticks");
    let tick = format!("while :; do echo x >> {}; sleep 0.01; done", file.display());
    let leave = if agent.cgroup.is_some() { "setsid" } else { "" };
    hook(&agent, "1", 0o755, &format!("{leave} sh -c '{tick}' & wait"));
    hook(&agent, "2", 0o755, "true");
    let processes = Processes::new(Cgroups::new(agent.cgroup.clone()), Arc::default());
    let mut warnings = Vec::new();
    let found = hooks::find(&agent.path("root/etc/forkd/forked.d"));
    let begun = Instant::now();
    hooks::Runner::new(&processes, Duration::from_millis(500)).run_all(&found, &mut warnings);
    assert!(begun.elapsed() < Duration::from_secs(30));
    assert_eq!(warnings.len(), 2, "{warnings:?}");
    assert!(warnings[0].contains("forked.d/1: killed"), "{warnings:?}");
    assert!(warnings[1].contains("forked.d/2: not run"), "{warnings:?}");
    eventually("the death of what it started", || {
        let before = fs::read(&file).unwrap_or_default().len();
        thread::sleep(Duration::from_millis(200));
        fs::read(&file).unwrap_or_default().len() == before
    });
}

#[test]
fn hooks_run_before_any_user_process_and_those_in_after_when_all_of_them_run() {
    let Some(agent) = freezable() else { return };
    let [ticks, log, before] = ["ticks", "log", "before"].map(|name| agent.path(name));
    let (told, said) = (agent.path("told"), log.display());
    let script = format!(
        "trap 'echo told > {}' USR1; while :; do echo x >> {}; sleep 0.01; done",
        told.display(),
        ticks.display()
    );
    let mut running = agent.start(json!({"process": {"cmd": "sh", "args": ["-c", script]}, "stdin": false}));
    let pid = running.pid();
    eventually("ticks", || fs::metadata(&ticks).is_ok_and(|known| known.len() > 2));
    let looks = looks_at(&ticks, &before);
    let told = told.display();
    hook(&agent, "10", 0o755, &format!("echo ten >> {said}; kill -USR1 {pid}\n{looks}\n[ ! -e {told} ]"));
    // Those in the order of their names too, and with the same variables.
    let waits = format!("until [ -e {told} ]; do sleep 0.05; done");
    hook(&agent, "after/1", 0o755, &format!("{waits}; echo after $FORKD_SANDBOX_ID >> {said}"));
    hook(&agent, "after/2", 0o755, &format!("echo last >> {said}"));
    assert_eq!(agent.call("/forkd.Agent/Freeze", json!({})).unwrap()["frozen"], true);
    let answer = agent.become_child("sbfirst", json!({})).unwrap();
    assert_eq!(warnings(&answer), Vec::<String>::new());
    assert_eq!(fs::read_to_string(&before).unwrap(), "still\n");
    assert_eq!(fs::read_to_string(&log).unwrap(), "ten\nafter sbfirst\nlast\n");
}

#[test]
fn what_a_hook_leaves_running_is_frozen_with_all_others_and_waits_for_later_hooks() {
    let Some(agent) = freezable() else { return };
    let [ticks, answer] = ["ticks", "answer"].map(|name| agent.path(name));
    let tick = format!("while :; do echo x >> {}; sleep 0.01; done", ticks.display());
    hook(&agent, "1", 0o755, &format!("setsid sh -c '{tick}' > /dev/null 2>&1 &"));
    assert_eq!(warnings(&agent.become_child("sbone", json!({})).unwrap()), Vec::<String>::new());
    let size = || fs::metadata(&ticks).map_or(0, |known| known.len());
    eventually("ticks", || size() > 2);
    hook(&agent, "1", 0o755, &looks_at(&ticks, &answer));
    assert_eq!(agent.call("/forkd.Agent/Freeze", json!({})).unwrap()["frozen"], true);
    let frozen_at = size();
    assert_eq!(warnings(&agent.become_child("sbtwo", json!({})).unwrap()), Vec::<String>::new());
    assert_eq!(fs::read_to_string(&answer).unwrap(), "still\n");
    eventually("ticks after the thaw", || size() > frozen_at);
}

#[test]
fn a_request_sent_again_runs_no_hook_twice() {
    let Some(agent) = freezable() else { return };
    let log = agent.path("log");
    hook(&agent, "1", 0o755, &format!("echo ran >> {}; exit 1", log.display()));
    let entropy = base64::Engine::encode(&base64::prelude::BASE64_STANDARD, [9; 64]);
    for time in ["1800000000000000001", "1800000000000000002"] {
        let more = json!({"entropy": entropy, "unixNanos": time});
        assert_eq!(warnings(&agent.become_child("sbagain", more).unwrap()).len(), 1);
    }
    assert_eq!(fs::read_to_string(&log).unwrap(), "ran\n");
    // With other entropy it is another fork, of the same sandbox.
    agent.become_child("sbagain", json!({})).unwrap();
    assert_eq!(fs::read_to_string(&log).unwrap(), "ran\nran\n");
}

/// Makes keys that differ, and none of the kind `ecdsa`.
const KEYGEN: &str = r#"
while [ $# -gt 1 ]; do
    case $1 in -t) kind=$2; shift ;; -f) file=$2; shift ;; -N) shift ;; esac
    shift
done
[ $kind != ecdsa ] || { echo no luck; exit 1; }
umask 077
echo "$kind $(cat /proc/sys/kernel/random/uuid)" > $file
echo public $(cat $file) > $file.pub
"#;

#[test]
fn a_child_has_ssh_host_keys_of_its_own_and_keeps_them_as_long_as_it_has_its_id() {
    let Some(agent) = freezable() else { return };
    let root = agent.path("root");
    let key = |name: &str| fs::read_to_string(root.join("etc/ssh").join(name)).unwrap_or_default();
    let hup = agent.path("hup");
    let become_one = |id: &str| warnings(&agent.become_child(id, json!({})).unwrap());
    let kinds = ["ssh_host_ed25519_key", "ssh_host_rsa_key"];
    fs::create_dir_all(root.join("etc/ssh")).unwrap();
    for name in [kinds[0], kinds[1], "ssh_host_ecdsa_key"] {
        fs::write(root.join("etc/ssh").join(name), "the image's").unwrap();
    }
    program(&root.join("usr/bin/ssh-keygen"), 0o755, KEYGEN);
    assert_eq!(become_one("sbnone"), Vec::<String>::new());
    assert_eq!(key(kinds[0]), "the image's", "no server, no new keys");

    let pid_file = root.join("run/sshd.pid");
    fs::create_dir_all(root.join("run")).unwrap();
    let server = format!(
        "trap 'echo hup >> {}' HUP; echo $$ > {}; while :; do sleep 0.02; done",
        hup.display(),
        pid_file.display()
    );
    let path = root.join("usr/sbin/sshd");
    program(&path, 0o755, &server);
    let _running = agent.start(json!({"process": {"cmd": path.to_str().unwrap()}, "stdin": false}));
    eventually("the server", || fs::metadata(&pid_file).is_ok_and(|known| known.len() > 0));

    let complaints = become_one("sbone");
    assert_eq!(complaints.len(), 1, "{complaints:?}");
    assert!(complaints[0].contains("ecdsa") && complaints[0].contains("no luck"), "{complaints:?}");
    assert_eq!(key("ssh_host_ecdsa_key"), "", "a key that could not be renewed proves nothing");
    let ones = kinds.map(key);
    for (made, kind) in ones.iter().zip(["ed25519", "rsa"]) {
        assert!(made.starts_with(kind), "{made}");
    }
    assert_eq!(key("ssh_host_rsa_key.pub"), format!("public {}", ones[1]));
    eventually("the server being told", || fs::read_to_string(&hup).is_ok_and(|hup| hup == "hup\n"));
    // Resumed or rolled back: the same sandbox.
    assert_eq!(become_one("sbone"), Vec::<String>::new());
    assert_eq!(kinds.map(key), ones);
    assert_eq!(become_one("sbtwo"), Vec::<String>::new());
    assert!(kinds.map(key).iter().zip(&ones).all(|(two, one)| two != one && !two.is_empty()));
    let entries = fs::read_dir(root.join("etc/ssh")).unwrap();
    let mut names: Vec<_> = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    assert_eq!(names, kinds.map(|kind| [kind.to_string(), format!("{kind}.pub")]).concat());
}

//! Signals end commands, whatever a command waits for, and whichever of the three signals comes.

use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::process::{Child, Command, ExitStatus};
use std::time::{Duration, Instant};

use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};

use crate::child;
use crate::fake_daemon::FakeDaemon;

/// Far above the two seconds that a command has. A command that needs this long is stuck, and is killed:
/// its status is then another one.
const STUCK: Duration = Duration::from_secs(60);

const SIGNALS: [Signal; 3] = [Signal::TERM, Signal::HUP, Signal::INT];

/// Every verb that asks a daemon something, with a line for each way of waiting.
const LINES: &[&[&str]] = &[
    &["snapshot", "--tag", "t", "--image", "python"],
    &["snapshot", "--tag", "t", "--from-sandbox", "sb1"],
    &["snapshot-diff", "--from", "f", "--tag", "t", "--exec", "true"],
    &["snapshot-info", "t"],
    &["snapshot-compact", "t", "--to", "u"],
    &["images"],
    &["rmi", "t"],
    &["unload", "t"],
    &["fork", "--tag", "t"],
    &["fork", "--tag", "t", "--settle-secs", "600"],
    &["spawn", "--tag", "t"],
    &["branch", "sb1"],
    &["rollback", "sb1"],
    &["pause", "sb1"],
    &["resume", "sb1"],
    &["tree"],
    &["workspace", "create", "w", "--snapshot", "t"],
    &["workspace", "ls"],
    &["workspace", "suspend", "w"],
    &["workspace", "resume", "w"],
    &["workspace", "rm", "w"],
    &["ls"],
    &["inspect", "sb1"],
    &["exec", "sb1", "--", "true"],
    &["exec", "-i", "sb1", "--", "true"],
    &["shell", "sb1", "--", "true"],
    &["run", "--image", "python", "--", "true"],
    &["cp", "-r", "sb1:/etc", "."],
    &["eval", "sb1", "--", "1"],
    &["ping", "sb1"],
    &["line", "sb1"],
    &["set", "sb1", "--ttl", "1"],
    &["kill", "sb1"],
    &["kill", "--all"],
    &["events"],
    &["top"],
    &["logs", "sb1", "-f"],
    &["doctor"],
    &["token", "add", "t"],
    &["token", "ls"],
    &["token", "rm", "t"],
    &["token", "rotate", "t"],
    &["bench"],
    &["bench", "--tag", "t"],
    &["quickstart", "--yes"],
    &["from-image", "tools", "--tag", "t"],
];

/// The command with the dispositions of a shell in the foreground, whatever the test's own are.
fn in_foreground(mut command: Command) -> Command {
    // SAFETY: between fork and exec only signal is called, which is async-signal-safe.
    unsafe {
        command.pre_exec(|| {
            for number in [libc::SIGTERM, libc::SIGHUP, libc::SIGINT] {
                libc::signal(number, libc::SIG_DFL);
            }
            Ok(())
        })
    };
    command
}

/// Sends signals to a command, and gives its status; it is killed when it is stuck.
fn end(mut command: Child, signal: Signal) -> ExitStatus {
    kill_process(Pid::from_child(&command), signal).unwrap();
    let begun = Instant::now();
    loop {
        if let Some(status) = command.try_wait().unwrap() {
            return status;
        }
        if begun.elapsed() > STUCK {
            command.kill().unwrap();
            return command.wait().unwrap();
        }
        std::thread::sleep(Duration::from_millis(10));
    }
}

/// Whether that is how a signal ends a command: by itself, or with the status that a shell gives it.
fn ended_by(status: ExitStatus, signal: Signal) -> bool {
    let number = signal.as_raw();
    status.signal() == Some(number) || status.code() == Some(128 + number)
}

/// Waits until the daemon was asked something; `None` if the command ended before.
fn asked(daemon: &FakeDaemon, command: &mut Child) -> Option<()> {
    let begun = Instant::now();
    while daemon.lines().is_empty() {
        if command.try_wait().unwrap().is_some() {
            return None;
        }
        assert!(begun.elapsed() < STUCK, "it asked nothing");
        std::thread::sleep(Duration::from_millis(5));
    }
    Some(())
}

/// A daemon that hears everything and never answers.
fn silent() -> FakeDaemon {
    FakeDaemon::start(|_| {
        loop {
            std::thread::park();
        }
    })
}

#[test]
fn no_command_that_waits_for_a_daemon_outlives_a_signal() {
    let run = |line: &'static [&'static str], signal: Signal| -> Result<(), String> {
        let daemon = silent();
        let mut command = in_foreground(daemon.forkd(line)).spawn().unwrap();
        if asked(&daemon, &mut command).is_none() {
            return Err(format!("{line:?} asked nothing: {:?}", command.wait_with_output()));
        }
        let status = end(command, signal);
        if ended_by(status, signal) { Ok(()) } else { Err(format!("{line:?}, {signal:?}: {status}")) }
    };
    let cases = LINES.iter().flat_map(|line| SIGNALS.map(|signal| (*line, signal)));
    let cases: Vec<_> = cases.collect();
    // Most of them do nothing but wait.
    let failed = std::thread::scope(|scope| {
        let parts: Vec<_> = cases
            .chunks(cases.len().div_ceil(8))
            .map(|part| {
                scope.spawn(move || {
                    part.iter().filter_map(|(line, signal)| run(line, *signal).err()).collect::<Vec<_>>()
                })
            })
            .collect();
        parts.into_iter().flat_map(|part| part.join().unwrap()).collect::<Vec<_>>()
    });
    assert!(failed.is_empty(), "{failed:#?}");
}

#[test]
fn a_bench_whose_guest_never_answers_ends_with_its_folder() {
    for signal in SIGNALS {
        let daemon = silent();
        let socket = daemon.socket();
        let line = ["bench", "spawn", "--case", "tiny", "--n", "1", "--socket", socket.to_str().unwrap()];
        let mut command = in_foreground(daemon.forkd(&line)).spawn().unwrap();
        asked(&daemon, &mut command).unwrap();
        assert_eq!(bench_folders(&daemon).len(), 1);
        let status = end(command, signal);
        assert!(ended_by(status, signal), "{signal:?}: {status}");
        assert_eq!(bench_folders(&daemon), [""; 0]);
    }
}

#[test]
fn children_that_settle_have_an_end_even_if_the_daemon_does_not_answer_any_more() {
    let daemon = FakeDaemon::start(|line| match line {
        "POST /v1/sandboxes?results=each" => (201, json!({ "children": [child("sb1")], "errors": [] })),
        _ => loop {
            std::thread::park();
        },
    });
    let line = ["fork", "--tag", "t", "--settle-secs", "600"];
    let mut command = in_foreground(daemon.forkd(&line)).spawn().unwrap();
    asked(&daemon, &mut command).unwrap();
    let status = end(command, Signal::TERM);
    assert!(ended_by(status, Signal::TERM), "{status}");
    let limit = daemon.asked()[0].1["timeout_secs"].clone();
    assert!(limit.as_u64() > Some(0), "the daemon would keep them: {limit}");
}

#[test]
fn a_save_is_waited_for_until_a_second_signal() {
    let daemon = FakeDaemon::start(|line| match line {
        "POST /v1/snapshots?wait=false" => {
            (202, json!({ "tag": "t", "status": "writing", "created_at_unix": 1, "mem_size_mib": 512 }))
        }
        _ => loop {
            std::thread::park();
        },
    });
    let line = ["snapshot", "--tag", "t", "--image", "python"];
    let mut command = in_foreground(daemon.forkd(&line)).spawn().unwrap();
    let heard = |line: &str| {
        let begun = Instant::now();
        while !daemon.lines().iter().any(|asked| asked == line) {
            assert!(begun.elapsed() < STUCK, "never asked for {line}");
            std::thread::sleep(Duration::from_millis(5));
        }
    };
    heard("GET /v1/snapshots/t");
    kill_process(Pid::from_child(&command), Signal::TERM).unwrap();
    heard("DELETE /v1/snapshots/t");
    assert!(command.try_wait().unwrap().is_none(), "it did not wait for the daemon to cancel");
    let status = end(command, Signal::HUP);
    assert!(ended_by(status, Signal::TERM) || ended_by(status, Signal::HUP), "{status}");
}

/// Folders that runs of `forkd bench` have there.
fn bench_folders(daemon: &FakeDaemon) -> Vec<String> {
    let entries = std::fs::read_dir(daemon.data()).unwrap().flatten();
    let names = entries.map(|entry| entry.file_name().into_string().unwrap());
    names.filter(|name| name.starts_with("bench-")).collect()
}

#[test]
fn cleanup_finds_what_a_killed_bench_left_and_spares_one_that_runs() {
    let daemon = silent();
    let socket = daemon.socket();
    let line = ["bench", "spawn", "--case", "tiny", "--n", "1", "--socket", socket.to_str().unwrap()];
    let mut command = in_foreground(daemon.forkd(&line)).spawn().unwrap();
    asked(&daemon, &mut command).unwrap();
    let folder = daemon.data().join(&bench_folders(&daemon)[0]);
    let look = |args: &[&str]| -> Value {
        let said = daemon.run(&[&["cleanup", "--json"], args].concat());
        assert_eq!(said.status, Some(0), "{said:?}");
        let leftovers = said.json()["leftovers"].as_array().unwrap().clone();
        let of_it = |one: &Value| one["path"] == folder.to_str().unwrap();
        leftovers.into_iter().find(of_it).unwrap_or_else(|| panic!("not found: {said:?}"))
    };
    assert_eq!(look(&[])["action"], "skip");
    command.kill().unwrap();
    command.wait().unwrap();
    assert_eq!((&look(&[])["action"], folder.exists()), (&json!("delete"), true));
}

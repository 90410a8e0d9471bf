//! What every command has in common, and what the parser refuses.

use super::*;
use clap::CommandFactory;

#[test]
fn the_commands_are_consistent() {
    Cli::command().debug_assert();
}

/// Calls `check` for each command that does something by itself and that help shows.
fn for_each_command(command: &clap::Command, above: &str, check: &mut dyn FnMut(&str, &clap::Command)) {
    for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
        let path = format!("{above}{}", inner.get_name());
        if !inner.has_subcommands() || !inner.is_subcommand_required_set() {
            check(&path, inner);
        }
        for_each_command(inner, &format!("{path} "), check);
    }
}

#[test]
fn every_command_shows_an_example_and_what_it_exits_with() {
    for_each_command(&grammar(), "", &mut |path, command| {
        let help = command.get_after_help().map(ToString::to_string).unwrap_or_default();
        assert!(help.contains("Example"), "{path} has no example in its help");
        assert!(help.contains("Exit status"), "{path} does not say what it exits with");
    });
}

/// What these print is a command's, a file's or nothing.
const NO_DATA: &[&str] = &[
    "run",
    "shell",
    "cp",
    "logs",
    "serve",
    "machine start",
    "machine stop",
    "machine shell",
    "bench report",
    "config check",
    "mcp",
    "mcp config",
    "completions",
    "man",
];

#[test]
fn every_command_that_prints_data_prints_json() {
    for_each_command(&grammar(), "", &mut |path, command| {
        let json = command.get_arguments().any(|arg| arg.get_long() == Some("json"));
        assert!(json || NO_DATA.contains(&path), "{path} has no --json");
    });
}

#[test]
fn every_command_that_talks_to_a_daemon_can_be_told_to_which() {
    const LOCAL: &[&str] = &["image ls", "image rm", "image build", "machine status", "paths", "cleanup"];
    const OWN: &[&str] = &["bench spawn", "bench branch", "bench e2b", "parent build"];
    for_each_command(&grammar(), "", &mut |path, command| {
        let url = command.get_arguments().any(|arg| arg.get_long() == Some("daemon-url"));
        let known = [NO_DATA, LOCAL, OWN].iter().any(|list| list.contains(&path));
        assert!(url || known, "{path} has no --daemon-url");
    });
}

#[test]
fn everything_after_the_dashes_belongs_to_the_command() {
    let cli = Cli::try_parse_from([
        "forkd", "run", "--image", "python", "-e", "A=b=c", "--", "sh", "-c", "exit 7", "--json",
    ])
    .unwrap();
    let Command::Run(run) = cli.command else { panic!("not run") };
    assert_eq!(run.command, ["sh", "-c", "exit 7", "--json"]);
    assert_eq!(run.process.env, [("A".to_owned(), "b=c".to_owned())]);
}

#[test]
fn options_stand_before_the_dashes_and_ids_before_or_after_them() {
    let parse = |line: &[&str]| Cli::try_parse_from([&["forkd"], line].concat()).unwrap().command;
    let Command::Exec(exec) = parse(&["exec", "--json", "sb1", "--", "ls", "--all"]) else { panic!() };
    assert!(exec.answer.json && exec.sandbox.id.as_deref() == Some("sb1"));
    assert_eq!(exec.command, ["ls", "--all"]);
    let Command::Eval(eval) = parse(&["eval", "sb1", "--", "-1", "+", "2"]) else { panic!() };
    assert_eq!(eval.code, ["-1", "+", "2"]);
    let Command::Fork(fork) = parse(&["fork", "--tag", "t", "-n", "1000"]) else { panic!() };
    assert_eq!((fork.children.count, fork.settle_secs), (1000, None));
    assert_eq!((fork.tag.as_deref(), fork.sandbox), (Some("t"), None));
    let Command::Fork(fork) = parse(&["fork", "sb1", "-n", "3", "--json"]) else { panic!() };
    assert_eq!((fork.tag, fork.sandbox.as_deref(), fork.children.count), (None, Some("sb1"), 3));
    let Command::Kill(kill) = parse(&["kill", "--tag", "t"]) else { panic!() };
    assert!(kill.ids.is_empty() && !kill.all && kill.filter.tag.as_deref() == Some("t"));
}

#[test]
fn what_makes_no_sense_is_wrong_usage() {
    for line in [
        &["forkd", "run", "--image", "python"][..],
        &["forkd", "run", "--", "sh"],
        &["forkd", "run", "--image", "p", "--vcpus", "0", "--", "sh"],
        &["forkd", "run", "--image", "p", "--env", "nothing", "--", "sh"],
        &["forkd", "run", "--image", "../p", "--", "sh"],
        &["forkd", "image", "build", "../x"],
        &["forkd", "image", "build", "x", "--tar", "a", "--folder", "b"],
        &["forkd", "image", "rm"],
        &["forkd", "snapshot", "--tag", "t"],
        &["forkd", "snapshot", "--tag", "../t", "--image", "python"],
        &["forkd", "snapshot", "--tag", "t", "--image", "python", "--vcpus", "0"],
        &["forkd", "fork", "-n", "3"],
        &["forkd", "fork", "numpy", "-n", "3"],
        &["forkd", "fork", "sb1", "--tag", "t"],
        &["forkd", "fork", "sb1", "sb2"],
        &["forkd", "spawn", "sb1"],
        &["forkd", "fork", "--tag", "t", "-n", "0"],
        &["forkd", "fork", "--tag", "t", "-n", "1001"],
        &["forkd", "spawn", "--tag", ".", "-n", "1"],
        &["forkd", "spawn", "--tag", "t", "--env", "=x"],
        &["forkd", "rmi"],
        &["forkd", "unload", "a/b"],
        &["forkd", "exec", "sb1"],
        &["forkd", "exec", "no-id", "--", "true"],
        &["forkd", "exec", "sb1", "--timeout", "0", "--", "true"],
        &["forkd", "exec", "sb1", "-i", "--json", "--", "true"],
        &["forkd", "shell"],
        &["forkd", "cp", "a"],
        &["forkd", "eval", "sb1"],
        &["forkd", "eval", "SB1", "--", "1"],
        &["forkd", "ping"],
        &["forkd", "kill"],
        &["forkd", "kill", "sb1", "--all"],
        &["forkd", "kill", "--all", "--tag", "t"],
        &["forkd", "kill", "../sb1"],
        &["forkd", "branch"],
        &["forkd", "branch", "numpy"],
        &["forkd", "branch", "sb1", "--tag", "a/b"],
        &["forkd", "branch", "sb1", "--mode", "fast"],
        &["forkd", "snapshot-diff", "--from", "a", "--tag", "b"],
        &["forkd", "snapshot-diff", "--from", "a", "--tag", "b", "--exec", "x", "--exec-timeout-secs", "0"],
        &["forkd", "snapshot-info"],
        &["forkd", "snapshot-compact", "a"],
        &["forkd", "snapshot-compact", "--to", "b"],
        &["forkd", "snapshot-compact", "a", "--from", "a", "--to", "b"],
        &["forkd", "rmi", "a", "--cascade", "--force"],
        &["forkd", "rollback", "sb1", "--to", ".."],
        &["forkd", "pause"],
        &["forkd", "resume", "numpy"],
        &["forkd", "tree", "--json", "--dot"],
        &["forkd", "tree", "--dot", "--svg", "x"],
        &["forkd", "workspace", "create", "w"],
        &["forkd", "workspace", "create", "../w", "--snapshot", "t"],
        &["forkd", "workspace", "suspend"],
        &["forkd", "workspace", "rm"],
        &["forkd", "token", "add"],
        &["forkd", "token", "add", "../x"],
        &["forkd", "token", "add", "x", "--scope", "root"],
        &["forkd", "token", "add", "x", "--expires-in", "0"],
        &["forkd", "token", "rm"],
        &["forkd", "serve", "--tls-cert", "x"],
        &["forkd", "serve", "--tls-key", "x"],
    ] {
        assert_eq!(Cli::try_parse_from(line).unwrap_err().exit_code(), 2, "{line:?}");
    }
}

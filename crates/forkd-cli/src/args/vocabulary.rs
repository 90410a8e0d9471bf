//! One name for one thing, in every command and in REST: tests that compare the grammar with the table of names,
//! `vocabulary.tsv`. A new flag needs a line there.

use std::collections::{BTreeMap, BTreeSet};

use clap::Command;
use serde_json::Value;

use super::grammar;

/// What a flag stands for.
struct Word {
    /// The field or parameter of REST, if there is one.
    rest: Option<&'static str>,
    meaning: &'static str,
}

/// The table, by flag.
fn table() -> BTreeMap<&'static str, Word> {
    let lines = include_str!("vocabulary.tsv").lines().skip(1);
    let mut table = BTreeMap::new();
    for line in lines {
        let [flag, rest, meaning] = line.split('\t').collect::<Vec<_>>()[..] else { panic!("{line}") };
        let word = Word { rest: (rest != "-").then_some(rest), meaning };
        assert!(table.insert(flag, word).is_none(), "{flag} is there twice");
    }
    table
}

/// Every flag that help shows, with the commands that take it.
fn flags() -> BTreeMap<String, Vec<String>> {
    fn walk(command: &Command, path: &str, found: &mut BTreeMap<String, Vec<String>>) {
        for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
            if let Some(long) = arg.get_long() {
                found.entry(long.to_owned()).or_default().push(path.to_owned());
            }
        }
        for inner in command.get_subcommands().filter(|inner| !inner.is_hide_set()) {
            walk(inner, &format!("{path} {}", inner.get_name()), found);
        }
    }
    let mut found = BTreeMap::new();
    let mut grammar = grammar().disable_help_subcommand(true);
    grammar.build();
    walk(&grammar, "forkd", &mut found);
    found
}

#[test]
fn every_flag_is_in_the_table_and_nothing_has_two_names() {
    let (table, flags) = (table(), flags());
    for (flag, commands) in &flags {
        assert!(table.contains_key(flag.as_str()), "--{flag} of {commands:?} is not in vocabulary.tsv");
    }
    let mut meanings = BTreeMap::new();
    for (flag, word) in &table {
        assert!(flags.contains_key(*flag), "no command has --{flag}");
        let other = meanings.insert(word.meaning, flag);
        assert_eq!(other, None, "--{flag} has the same meaning: {}", word.meaning);
    }
}

#[test]
fn a_flag_is_called_like_its_field_in_rest() {
    let openapi: Value = serde_json::from_str(include_str!("../../../../docs/openapi.json")).unwrap();
    let mut fields: BTreeSet<String> = BTreeSet::new();
    let schemas = openapi["components"]["schemas"].as_object().unwrap().iter();
    for (_, schema) in schemas.filter(|(name, _)| name.ends_with("Request")) {
        fields.extend(schema["properties"].as_object().into_iter().flatten().map(|(name, _)| name.clone()));
    }
    for operation in openapi["paths"].as_object().unwrap().values().flat_map(|path| path.as_object().unwrap())
    {
        let parameters = operation.1["parameters"].as_array().into_iter().flatten();
        fields.extend(parameters.filter_map(|one| one["name"].as_str().map(str::to_owned)));
    }
    for (flag, word) in table() {
        let name = flag.replace('-', "_");
        match word.rest {
            Some(rest) => {
                assert!(fields.contains(rest), "REST has no {rest}");
                // A flag that turns something off is called after what it turns off; one given several times
                // is in the singular.
                let named = [&name[..], name.trim_start_matches("no_"), &format!("{name}s")].contains(&rest);
                assert!(named, "--{flag} is {rest} in REST");
            }
            // A file that is moved has a `from`, too.
            None => assert!(
                !fields.contains(&name) || flag == "from",
                "--{flag} and {name} of REST: the same thing?"
            ),
        }
    }
}

#[test]
fn old_spellings_mean_the_same() {
    for (old, new) in [
        (&["fork", "--tag", "t", "--count", "3"][..], &["fork", "--tag", "t", "--n", "3"][..]),
        (&["spawn", "--tag", "t", "--ttl", "9"], &["spawn", "--tag", "t", "--timeout-secs", "9"]),
        (&["spawn", "--tag", "t", "--idle", "9"], &["spawn", "--tag", "t", "--idle-timeout-secs", "9"]),
        (&["set", "sb1", "--ttl", "none"], &["update", "sb1", "--timeout-secs", "none"]),
        (&["set", "sb1", "--idle", "7"], &["update", "sb1", "--idle-timeout-secs", "7"]),
        (
            &["run", "--image", "i", "--timeout", "9", "--", "x"],
            &["run", "--image", "i", "--timeout-secs", "9", "--", "x"],
        ),
        (&["exec", "sb1", "--timeout", "9", "--", "x"], &["exec", "sb1", "--timeout-secs", "9", "--", "x"]),
        (&["eval", "sb1", "--timeout", "9", "--", "x"], &["eval", "sb1", "--timeout-secs", "9", "--", "x"]),
        (
            &["snapshot-diff", "--from", "a", "--tag", "b", "--exec", "x", "--exec-timeout-secs", "9"],
            &["snapshot-diff", "--from", "a", "--tag", "b", "--exec", "x", "--timeout-secs", "9"],
        ),
        (
            &["snapshot", "--tag", "t", "--image", "i", "--warm", "x"],
            &["snapshot", "--tag", "t", "--image", "i", "--warm-command", "x"],
        ),
        (&["workspace", "create", "w", "--snapshot", "t"], &["workspace", "create", "w", "--tag", "t"]),
        (&["line", "sb1", "--listen", "127.0.0.1:1"], &["line", "sb1", "--bind", "127.0.0.1:1"]),
        (&["token", "add", "x", "--expires-in", "9"], &["token", "add", "x", "--expires-in-secs", "9"]),
        (&["ls", "--gone"], &["ls", "--archived"]),
        (&["token", "add", "x", "--scope", "use"], &["token", "add", "x", "--scope", "write"]),
        (&["line", "sb1"], &["agent-port", "sb1"]),
        (&["spawn", "--tag", "t", "--line-port"], &["spawn", "--tag", "t", "--agent-port"]),
        (&["fork", "--tag", "t", "--no-line-port"], &["fork", "--tag", "t", "--no-agent-port"]),
        (&["serve", "--line-ports"], &["serve", "--agent-ports"]),
        (&["where", "--json"], &["paths", "--json"]),
        (&["quickstart", "--count", "3"], &["quickstart", "--n", "3"]),
        (&["bench", "--count", "3"], &["bench", "--n", "3"]),
        (
            &["image", "build", "i", "--packages", "a,b"],
            &["image", "build", "i", "--extra", "a", "--extra", "b"],
        ),
    ] {
        let parse = |line: &[&str]| {
            let line = ["forkd"].iter().chain(line);
            <super::Cli as clap::Parser>::try_parse_from(line).map(|cli| format!("{:?}", cli.command))
        };
        let (old_meaning, new_meaning) = (parse(old), parse(new));
        assert!(old_meaning.is_ok(), "{old:?}: {old_meaning:?}");
        assert_eq!(old_meaning.unwrap(), new_meaning.unwrap(), "{old:?}");
    }
}

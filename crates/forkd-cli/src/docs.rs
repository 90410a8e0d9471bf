//! Completions, manual pages and docs/CLI.md, all generated from the grammar, as `--help` is.

use std::fmt::Write as _;
use std::path::Path;

use anyhow::{Context, Result};
use clap::{Arg, Command};

use crate::args::compat_flags::{self, Fate};
use crate::args::{Shell, grammar};
use crate::settings::{self, EXTRAS};
use crate::ui::{self, Ui};

/// Prints the completion script of a shell.
pub(crate) fn completions(shell: Shell) -> Result<u8> {
    let mut bytes = Vec::new();
    let mut grammar = grammar();
    let shell = match shell {
        Shell::Bash => clap_complete::Shell::Bash,
        Shell::Zsh => clap_complete::Shell::Zsh,
        Shell::Fish => clap_complete::Shell::Fish,
    };
    clap_complete::generate(shell, &mut grammar, "forkd", &mut bytes);
    ui::write_raw(&mut std::io::stdout().lock(), &bytes)?;
    Ok(0)
}

/// Prints the manual page of `forkd`, or writes all pages into a folder.
pub(crate) fn man(folder: Option<&Path>, ui: Ui) -> Result<u8> {
    let Some(folder) = folder else {
        let mut page = Vec::new();
        clap_mangen::Man::new(visible(grammar())).render(&mut page)?;
        ui::write_raw(&mut std::io::stdout().lock(), &page)?;
        return Ok(0);
    };
    let failed = || format!("cannot write manual pages into {}", folder.display());
    std::fs::create_dir_all(folder).with_context(failed)?;
    clap_mangen::generate_to(visible(grammar()), folder).with_context(failed)?;
    ui.note(format!("the manual pages are in {}", folder.display()));
    Ok(0)
}

/// The grammar without the `help` command, which would get pages as well.
fn visible(grammar: Command) -> Command {
    grammar.disable_help_subcommand(true)
}

/// docs/CLI.md.
pub(crate) fn markdown() -> String {
    let mut grammar = grammar().disable_help_subcommand(true);
    grammar.build();
    let mut text = String::from(INTRODUCTION);
    text.push_str("\n## Commands\n\n");
    for command in shown(&grammar) {
        let name = command.get_name();
        let _ = writeln!(text, "- [`forkd {name}`](#forkd-{name}): {}", about(command));
    }
    let _ = write!(text, "\n## Before every command\n\n{}", options(&grammar, true));
    for command in shown(&grammar) {
        describe(&mut text, command, "forkd");
    }
    text.push_str(&settings_part(&grammar));
    text.push_str(&obsolete_part());
    text
}

const INTRODUCTION: &str = "# The command line

Generated from `forkd --help`: `forkd docs cli > docs/CLI.md`. Results go to standard output, everything
else to standard error; `--json` prints the whole result for programs. Exit status: 0 done, 1 failed,
2 wrong usage. Commands that run a command exit with its status.
";

fn shown(command: &Command) -> impl Iterator<Item = &Command> {
    command.get_subcommands().filter(|command| !command.is_hide_set())
}

fn about(command: &Command) -> String {
    command.get_about().map(ToString::to_string).unwrap_or_default()
}

fn describe(text: &mut String, command: &Command, above: &str) {
    let path = format!("{above} {}", command.get_name());
    let _ = write!(text, "\n## {path}\n\n");
    let long = command.get_long_about().or(command.get_about()).map(ToString::to_string);
    let _ = write!(text, "{}\n\n", long.unwrap_or_default().trim());
    let mut usage = command.clone();
    let usage = usage.render_usage().to_string();
    let usage = usage.trim_start_matches("Usage: ");
    let _ = write!(text, "```text\n{}\n```\n\n", usage.trim());
    text.push_str(&options(command, false));
    if let Some(help) = command.get_after_help() {
        let _ = write!(text, "\n```text\n{}\n```\n", help.to_string().trim());
    }
    shown(command).for_each(|inner| describe(text, inner, &path));
}

/// A list of the options of a command; for the first command, of the global options.
fn options(command: &Command, global: bool) -> String {
    let mut text = String::new();
    for arg in command.get_arguments() {
        if arg.is_hide_set() || (arg.is_global_set() && !global) || arg.get_id() == "help" {
            continue;
        }
        let help = arg.get_long_help().or(arg.get_help()).map(ToString::to_string).unwrap_or_default();
        let help = help.split_whitespace().collect::<Vec<_>>().join(" ");
        let _ = writeln!(text, "- {}: {help}{}", spelling(arg), remarks(arg));
    }
    text
}

fn spelling(arg: &Arg) -> String {
    let values = arg.get_value_names().unwrap_or_default().iter().map(|name| name.as_str());
    let values: Vec<&str> = if arg.get_action().takes_values() { values.collect() } else { Vec::new() };
    let value = values.join(" ");
    let names: Vec<String> = arg
        .get_short()
        .map(|short| format!("-{short}"))
        .into_iter()
        .chain(arg.get_long().map(|long| format!("--{long}")))
        .collect();
    let spelled = match (names.is_empty(), value.is_empty()) {
        (true, _) => value,
        (false, true) => names.join(", "),
        (false, false) => format!("{} {value}", names.join(", ")),
    };
    format!("`{spelled}`")
}

fn remarks(arg: &Arg) -> String {
    let mut remarks = Vec::new();
    let defaults: Vec<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    if arg.get_action().takes_values() && !defaults.is_empty() {
        remarks.push(format!("default `{}`", defaults.join(",")));
    }
    let possible = arg.get_possible_values();
    if arg.get_action().takes_values() && !possible.is_empty() {
        let names: Vec<_> = possible.iter().map(|value| format!("`{}`", value.get_name())).collect();
        remarks.push(format!("one of {}", names.join(", ")));
    }
    if let Some(variable) = arg.get_env() {
        remarks.push(format!("variable `{}`", variable.to_string_lossy()));
    }
    if remarks.is_empty() { String::new() } else { format!(" ({})", remarks.join("; ")) }
}

fn settings_part(grammar: &Command) -> String {
    let mut text = String::from(
        "\n## The configuration file\n\n`/etc/forkd/config.toml`, or the one named by `--config` or \
         `FORKD_CONFIG`; TOML without tables. Precedence: flags, environment, file; `forkd config` shows \
         the source of each value. The daemon in the emulated machine does not read the file. Only its owner \
         may read a file with `daemon_token`. Keys:\n\n",
    );
    for (key, setting) in settings::options(grammar) {
        let variable = setting.arg.get_env().map(|name| format!(", `{}`", name.to_string_lossy()));
        let whose = if setting.of_daemon { "`forkd serve`" } else { "commands" };
        let _ = writeln!(
            text,
            "- `{key}`: `--{}` of {whose}{}",
            setting.arg.get_long().unwrap_or_default(),
            variable.unwrap_or_default()
        );
    }
    for extra in EXTRAS {
        let _ = writeln!(
            text,
            "- `{}`: of the emulated machine, `{}` (default `{}`)",
            extra.key, extra.variable, extra.default
        );
    }
    text
}

fn obsolete_part() -> String {
    let mut text = String::from(
        "\n## Flags without effect\n\nScripts for the reference use flags that have no effect here. forkd \
         accepts some and prints a note. It refuses the others, because the effect would differ from the \
         wanted one.\n\n",
    );
    for fate in [Fate::Ignored, Fate::Refused] {
        for flag in compat_flags::ALL.iter().filter(|flag| flag.fate == fate) {
            let commands: Vec<_> = flag.commands.iter().map(|name| format!("`{name}`")).collect();
            let what = if fate == Fate::Ignored { "ignored" } else { "refused" };
            let _ =
                writeln!(text, "- `--{}` of {} ({what}): {}", flag.flag, commands.join(", "), flag.instead);
        }
    }
    text.push_str(MISSING);
    text
}

const MISSING: &str = "
## What is missing

- `wp-bench` measured write protection by userfaultfd. forkd does not use it: a branch is a `fork(2)`.
  `forkd bench branch` measures both side by side.
- The checks of `doctor` for Firecracker, taps and Docker: forkd has its own monitor, creates networks
  itself and needs no Docker.
- `pull` of images from a registry: export them to a tar (see `forkd from-image`).
";

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_documentation_is_what_help_says() {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/../../docs/CLI.md");
        let made = markdown();
        if std::env::var_os("FORKD_WRITE_CLI").is_some() {
            std::fs::write(path, &made).unwrap();
        }
        let kept = std::fs::read_to_string(path).unwrap_or_default();
        assert!(
            kept == made,
            "docs/CLI.md differs from the grammar: FORKD_WRITE_CLI=1 cargo test --release -p forkd-cli the_documentation"
        );
    }

    #[test]
    fn every_command_and_option_that_help_shows_is_in_the_documentation() {
        fn check(text: &str, command: &Command, above: &str) {
            let path = format!("{above} {}", command.get_name());
            assert!(text.contains(&format!("\n## {path}\n")), "{path}");
            for arg in command.get_arguments().filter(|arg| !arg.is_hide_set()) {
                if let Some(long) = arg.get_long() {
                    assert!(text.contains(&format!("--{long}")), "{path} --{long}");
                }
            }
            shown(command).for_each(|inner| check(text, inner, &path));
        }
        let text = markdown();
        shown(&grammar()).for_each(|command| check(&text, command, "forkd"));
    }
}

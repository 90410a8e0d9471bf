//! Flags of the reference that have no effect here. forkd accepts some and prints a note; it refuses the
//! others and prints what to do instead.

use clap::{Arg, ArgAction, ArgMatches, Command, parser::ValueSource};

/// What forkd does with a command line that has such a flag.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fate {
    /// Run the command as if the flag were absent: the wanted effect happens anyway.
    Ignored,
    /// Refuse the command: its effect would differ from the wanted one.
    Refused,
}

/// A flag without effect.
#[derive(Debug)]
pub(crate) struct ObsoleteFlag {
    pub(crate) flag: &'static str,
    /// The name of its value, if it takes one.
    value: Option<&'static str>,
    /// The commands that accept it.
    pub(crate) commands: &'static [&'static str],
    pub(crate) fate: Fate,
    /// What to use, or what forkd does, instead.
    pub(crate) instead: &'static str,
}

const fn ignored(
    flag: &'static str,
    value: Option<&'static str>,
    commands: &'static [&'static str],
    instead: &'static str,
) -> ObsoleteFlag {
    ObsoleteFlag { flag, value, commands, fate: Fate::Ignored, instead }
}

const fn refused(
    flag: &'static str,
    value: &'static str,
    commands: &'static [&'static str],
    instead: &'static str,
) -> ObsoleteFlag {
    ObsoleteFlag { flag, value: Some(value), commands, fate: Fate::Refused, instead }
}

/// All flags without effect.
pub(crate) const ALL: &[ObsoleteFlag] = &[
    ignored(
        "tap",
        Some("NAME"),
        &["snapshot", "run", "from-image"],
        "the daemon creates a tap for every guest",
    ),
    ignored(
        "per-child-netns",
        None,
        &["fork", "spawn", "workspace create", "bench"],
        "every sandbox has its own network",
    ),
    ignored("prewarm", None, &["spawn"], "children share their parent's memory, so there is nothing to warm"),
    ignored("live-fork", None, &["fork", "spawn"], "every running child can be branched"),
    ignored("hugepages", None, &["fork", "spawn"], "huge pages are used where they help"),
    ignored(
        "keep-workdir",
        None,
        &["snapshot", "fork"],
        "forkd has no work directory; `forkd ls` shows running sandboxes",
    ),
    ignored("rw", None, &["snapshot"], "every sandbox writes to its own copy of the disk"),
    ignored(
        "boot-wait-secs",
        Some("SECS"),
        &["snapshot", "from-image"],
        "the daemon waits until the guest reports that it is warm",
    ),
    ignored("cache", Some("DIR"), &["run", "from-image"], "images are kept in the data directory"),
    refused(
        "kernel",
        "FILE",
        &["run", "from-image"],
        "the daemon chooses the kernel: `forkd serve --kernel FILE`",
    ),
    refused(
        "extra",
        "PKG",
        &["run"],
        "build an image with it (`forkd parent build IMAGE --extra PKG --output NAME`) and use --image NAME",
    ),
    refused(
        "volume",
        "HOST:GUEST",
        &["snapshot"],
        "add files to the image (`forkd image build NAME --folder DIR`) or copy them with `forkd cp`",
    ),
];

/// Adds these flags to the grammar, hidden from help.
pub(super) fn add(grammar: Command) -> Command {
    add_below(grammar, "")
}

/// Changes commands in place, so that help keeps its order.
fn add_below(command: Command, above: &str) -> Command {
    command.mut_subcommands(|mut inner| {
        let path = format!("{above}{}", inner.get_name());
        for obsolete in ALL.iter().filter(|obsolete| obsolete.commands.contains(&path.as_str())) {
            // The command may have gained a flag of this name that has an effect.
            if !inner.get_arguments().any(|arg| arg.get_long() == Some(obsolete.flag)) {
                inner = inner.arg(option(obsolete));
            }
        }
        add_below(inner, &format!("{path} "))
    })
}

fn option(obsolete: &ObsoleteFlag) -> Arg {
    let arg = Arg::new(id(obsolete)).long(obsolete.flag).hide(true);
    match obsolete.value {
        Some(value) => arg.value_name(value).action(ArgAction::Append),
        None => arg.action(ArgAction::SetTrue),
    }
}

/// The id of the flag in clap; no other option has it.
fn id(obsolete: &ObsoleteFlag) -> String {
    format!("obsolete-{}", obsolete.flag)
}

/// The flags without effect on this command line.
pub(crate) fn typed(matches: &ArgMatches) -> Vec<&'static ObsoleteFlag> {
    let mut innermost = matches;
    while let Some((_, inner)) = innermost.subcommand() {
        innermost = inner;
    }
    let is_typed = |obsolete: &&ObsoleteFlag| {
        let id = id(obsolete);
        innermost.ids().any(|known| known.as_str() == id)
            && innermost.value_source(&id) == Some(ValueSource::CommandLine)
    };
    ALL.iter().filter(is_typed).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_command_that_is_named_exists_and_help_keeps_its_order() {
        use clap::CommandFactory;
        let grammar = crate::args::grammar();
        for command in ALL.iter().flat_map(|obsolete| obsolete.commands) {
            let mut found = &grammar;
            for word in command.split(' ') {
                found = found.find_subcommand(word).unwrap_or_else(|| panic!("{command}"));
            }
        }
        let names = |grammar: &Command| -> Vec<String> {
            grammar.get_subcommands().map(|command| command.get_name().to_owned()).collect()
        };
        assert_eq!(names(&grammar), names(&crate::args::Cli::command()));
    }

    #[test]
    fn each_flag_is_known_to_the_commands_that_took_it_and_told_when_typed() {
        let grammar = crate::args::grammar();
        for (line, expected) in [
            (
                &["forkd", "fork", "--tag", "t", "--live-fork", "--hugepages"][..],
                &["live-fork", "hugepages"][..],
            ),
            (&["forkd", "snapshot", "--tag", "t", "--image", "i", "--tap", "x", "--rw"], &["tap", "rw"]),
            (
                &["forkd", "workspace", "create", "w", "--snapshot", "t", "--per-child-netns"],
                &["per-child-netns"],
            ),
            (&["forkd", "fork", "--tag", "t"], &[]),
        ] {
            let matches = grammar.clone().try_get_matches_from(line).unwrap();
            let flags: Vec<_> = typed(&matches).iter().map(|obsolete| obsolete.flag).collect();
            assert_eq!(flags, expected, "{line:?}");
        }
    }
}

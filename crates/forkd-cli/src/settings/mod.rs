//! Settings: options that a configuration file can hold.
//!
//! A setting is an option of `forkd serve`, a global option, or an option with an environment variable. The
//! list comes from the grammar, so a new option is a setting without a change here. The file's values
//! become the grammar's defaults: so flags and the environment override them, and the options' own rules
//! check them. [`file`] reads the file; [`show`] prints the source of each value.

mod file;
mod show;

use std::collections::BTreeMap;
use std::ffi::OsString;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

use anyhow::{Result, bail};
use clap::{Arg, ArgAction, Command};

pub(crate) use file::File;
pub(crate) use show::show;

/// The default path of the file.
pub(crate) const SYSTEM_FILE: &str = "/etc/forkd/config.toml";
/// The variable that names another file.
const FILE_VARIABLE: &str = "FORKD_CONFIG";
/// The option that names another file; it cannot be in the file itself.
const FILE_OPTION: &str = "config";

/// A setting without an option: it belongs to the emulated machine, which many commands can start.
#[derive(Debug)]
pub(crate) struct Extra {
    pub(crate) key: &'static str,
    pub(crate) variable: &'static str,
    pub(crate) default: &'static str,
    pub(crate) is_number: bool,
}

/// All settings without an option.
pub(crate) const EXTRAS: &[Extra] = &[
    Extra { key: "machine_mib", variable: "FORKD_MACHINE_MIB", default: "4096", is_number: true },
    Extra {
        key: "machine_watchdog_secs",
        variable: "FORKD_MACHINE_WATCHDOG_SECS",
        default: "120",
        is_number: true,
    },
    Extra { key: "qemu", variable: "FORKD_QEMU", default: "qemu-system-x86_64", is_number: false },
];

/// A setting whose old name stays accepted.
struct Renamed {
    key: &'static str,
    old_key: &'static str,
    old_variable: &'static str,
}

const RENAMED: &[Renamed] =
    &[Renamed { key: "agent_ports", old_key: "line_ports", old_variable: "FORKD_LINE_PORTS" }];

/// The present name of a key.
fn present_name(key: String) -> String {
    RENAMED.iter().find(|it| it.old_key == key).map_or(key, |it| it.key.to_owned())
}

/// The old variable of a setting and its value, if it is set.
fn old_variable(key: &str) -> Option<(&'static str, String)> {
    let name = RENAMED.iter().find(|it| it.key == key)?.old_variable;
    Some((name, std::env::var(name).ok()?))
}

/// The file that this process has read.
static READ: OnceLock<File> = OnceLock::new();

/// Reads the file named on the command line or in the environment, or the system's file. Without a file,
/// there are no settings.
pub(crate) fn read(grammar: &Command, line: &[OsString]) -> Result<File> {
    let file = match named(line).or_else(|| std::env::var_os(FILE_VARIABLE).map(PathBuf::from)) {
        Some(path) => File::read(&path, grammar)?,
        None => File::read_system(Path::new(SYSTEM_FILE), grammar)?,
    };
    Ok(READ.get_or_init(|| file).clone())
}

/// The path of the file that this process read, for processes that it starts.
pub(crate) fn path() -> Option<&'static Path> {
    READ.get().and_then(|file| file.path.as_deref())
}

/// The value of a setting that is not an option of this command: from the environment or the file.
pub(crate) fn value(key: &str, variable: &str) -> Option<OsString> {
    let in_file = || Some(READ.get()?.entries.get(key)?.values.first()?.into());
    std::env::var_os(variable).or_else(in_file)
}

/// The file named on the command line. It is needed before the line can be parsed; here as well, everything
/// after `--` belongs to the command in the guest.
fn named(line: &[OsString]) -> Option<PathBuf> {
    let mut words = line.iter().take_while(|word| *word != "--");
    while let Some(word) = words.next() {
        let word = word.to_str().unwrap_or_default();
        match word.strip_prefix("--config") {
            Some("") => return words.next().map(PathBuf::from),
            Some(rest) if rest.starts_with('=') => return Some(PathBuf::from(&rest[1..])),
            _ => {}
        }
    }
    None
}

/// The grammar, with the file's values as defaults.
pub(crate) fn with_defaults(grammar: Command, file: &File) -> Command {
    let is_serve = grammar.get_name() == "serve";
    let set = |arg: Arg| {
        let Some(key) = key(&arg, is_serve) else { return arg };
        match (old_variable(&key), file.entries.get(&key)) {
            (Some((_, value)), _) => arg.default_values([value]),
            (None, Some(entry)) => arg.default_values(entry.values.clone()),
            (None, None) => arg,
        }
    };
    grammar.mut_args(set).mut_subcommands(|command| with_defaults(command, file))
}

/// All settings that are options, by key.
pub(crate) fn options(grammar: &Command) -> BTreeMap<String, Setting> {
    let mut found = BTreeMap::new();
    collect(grammar, &mut found);
    found
}

/// A setting that is an option.
#[derive(Debug, Clone)]
pub(crate) struct Setting {
    pub(crate) arg: Arg,
    /// Whether it is an option of the daemon.
    pub(crate) of_daemon: bool,
}

fn collect(command: &Command, found: &mut BTreeMap<String, Setting>) {
    let is_serve = command.get_name() == "serve";
    for arg in command.get_arguments() {
        if let Some(key) = key(arg, is_serve) {
            let option = Setting { arg: arg.clone(), of_daemon: is_serve };
            // An option of the daemon counts as the daemon's, even if other commands take it as well.
            if is_serve {
                found.insert(key, option);
            } else {
                found.entry(key).or_insert(option);
            }
        }
    }
    command.get_subcommands().for_each(|command| collect(command, found));
}

/// The key of an option in the file, if it can be there.
fn key(arg: &Arg, of_serve: bool) -> Option<String> {
    let long = arg.get_long()?;
    let is_setting = of_serve || arg.is_global_set() || arg.get_env().is_some();
    let is_action = matches!(arg.get_action(), ArgAction::Help | ArgAction::HelpLong | ArgAction::Version);
    let takes_part = is_setting && !is_action && !arg.is_hide_set() && long != FILE_OPTION;
    takes_part.then(|| long.replace('-', "_"))
}

/// Whether the value of an option is a secret.
pub(crate) fn is_secret(arg: &Arg) -> bool {
    arg.is_hide_env_values_set()
}

/// Checks a value by the rules of its option.
fn check(arg: &Arg, value: &str) -> Result<()> {
    let probe = Arg::new("value")
        .long(arg.get_long().unwrap_or_default().to_owned())
        .value_parser(arg.get_value_parser().clone())
        .action(ArgAction::Append)
        .value_delimiter(arg.get_value_delimiter());
    let line = format!("--{}={value}", arg.get_long().unwrap_or_default());
    let parsed = Command::new("forkd").no_binary_name(true).arg(probe).try_get_matches_from([line]);
    if let Err(error) = parsed {
        let text = error.to_string();
        let reason = text.lines().take_while(|line| !line.starts_with("For more"));
        let reason: Vec<_> = reason.map(str::trim).filter(|line| !line.is_empty()).collect();
        bail!("{}", reason.join(" ").trim_start_matches("error: "));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_is_named_before_the_dashes_only() {
        let line = |words: &[&str]| named(&words.iter().map(OsString::from).collect::<Vec<_>>());
        assert_eq!(line(&["forkd", "--config", "a", "ls"]), Some("a".into()));
        assert_eq!(line(&["forkd", "ls", "--config=b"]), Some("b".into()));
        assert_eq!(line(&["forkd", "run", "--", "x", "--config", "c"]), None);
        assert_eq!(line(&["forkd", "ls", "--configure"]), None);
        assert_eq!(line(&["forkd", "--config"]), None);
    }

    #[test]
    fn every_option_of_the_daemon_is_a_setting_and_so_is_what_a_variable_stands_for() {
        let grammar = crate::args::grammar();
        let options = options(&grammar);
        let serve = grammar.get_subcommands().find(|command| command.get_name() == "serve").unwrap();
        for arg in serve.get_arguments().filter(|arg| !arg.is_hide_set()) {
            let key = arg.get_long().unwrap().replace('-', "_");
            assert!(options.get(&key).is_some_and(|option| option.of_daemon), "{key}");
        }
        assert!(options.contains_key("daemon_url") && options.contains_key("data_dir"));
        assert!(is_secret(&options["daemon_token"].arg) && !is_secret(&options["bind"].arg));
        for absent in ["config", "help", "json", "in_machine", "tag"] {
            assert!(!options.contains_key(absent), "{absent}");
        }
    }

    #[test]
    fn a_renamed_setting_is_understood_under_its_old_name() {
        let grammar = crate::args::grammar();
        let options = options(&grammar);
        for renamed in RENAMED {
            assert!(options.contains_key(renamed.key), "{}", renamed.key);
            let text = format!("{} = true", renamed.old_key);
            let file = File::parse("x.toml".as_ref(), &text, &grammar).unwrap();
            assert_eq!(file.entries[renamed.key].values, ["true"]);
        }
    }

    #[test]
    fn what_the_file_says_gives_way_to_what_is_typed() {
        use clap::FromArgMatches;
        let grammar = crate::args::grammar();
        let file = File::parse("x.toml".as_ref(), "bind = \"127.0.0.1:7\"\nnetwork-pool = 9\n", &grammar);
        let grammar = with_defaults(grammar, &file.unwrap());
        let serve = |line: &[&str]| {
            let line = ["forkd", "serve"].iter().chain(line);
            let matches = grammar.clone().try_get_matches_from(line).unwrap();
            match crate::args::Cli::from_arg_matches(&matches).unwrap().command {
                crate::args::Command::Serve(args) => (args.bind.to_string(), args.network_pool),
                _ => panic!("not serve"),
            }
        };
        assert_eq!(serve(&[]), ("127.0.0.1:7".to_owned(), 9));
        assert_eq!(serve(&["--bind", "127.0.0.1:8"]), ("127.0.0.1:8".to_owned(), 9));
    }
}

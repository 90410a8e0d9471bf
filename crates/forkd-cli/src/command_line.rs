//! Parses the command line, with the configuration file's values as defaults.

use std::ffi::OsString;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};

use crate::args::compat_flags::{self, ObsoleteFlag};
use crate::args::{Cli, grammar};
use crate::settings::{self, File};

/// A parsed command line.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) cli: Cli,
    /// The settings, or the problem with their file: a few commands work without them.
    pub(crate) settings: Result<File>,
    /// Settings given on the command line, with their values.
    pub(crate) typed: Vec<(String, String)>,
    /// Whether the output is for a program: `--json`.
    pub(crate) json: bool,
    /// Flags on the command line that have no effect.
    pub(crate) obsolete: Vec<&'static ObsoleteFlag>,
}

/// Parses the command line; a wrong one ends the process with a message.
pub(crate) fn read() -> Line {
    let words: Vec<OsString> = std::env::args_os().collect();
    let plain = grammar();
    let settings = settings::read(&plain, &words);
    let options = settings::options(&plain);
    let full = match &settings {
        Ok(file) => settings::with_defaults(plain, file),
        Err(_) => plain,
    };
    let matches = full.get_matches_from(words);
    let cli = Cli::from_arg_matches(&matches).unwrap_or_else(|error| error.exit());
    let ids = options.iter().map(|(key, setting)| (key.clone(), setting.arg.get_id().to_string()));
    let typed = ids.filter_map(|(key, id)| Some((key, typed(&matches, &id)?))).collect();
    let json = self::typed(&matches, "json").is_some();
    Line { cli, settings, typed, json, obsolete: compat_flags::typed(&matches) }
}

/// The value of an option on the command line, before or after the command's name.
fn typed(matches: &ArgMatches, id: &str) -> Option<String> {
    let here = matches.ids().any(|known| known.as_str() == id);
    if here && matches.value_source(id) == Some(ValueSource::CommandLine) {
        let values = matches.get_raw(id)?.map(|value| value.to_string_lossy().into_owned());
        let values: Vec<String> = values.collect();
        return Some(if values.is_empty() { "true".to_owned() } else { values.join(",") });
    }
    typed(matches.subcommand()?.1, id)
}

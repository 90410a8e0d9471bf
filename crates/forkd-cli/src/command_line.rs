//! The command line as a whole: what was typed, understood with the settings of the file.

use std::ffi::OsString;

use anyhow::Result;
use clap::parser::ValueSource;
use clap::{ArgMatches, FromArgMatches};

use crate::args::compat_flags::{self, ObsoleteFlag};
use crate::args::{Cli, grammar};
use crate::settings::{self, File};

/// A command line that was understood.
#[derive(Debug)]
pub(crate) struct Line {
    pub(crate) cli: Cli,
    /// The settings, or what is wrong with their file: a few commands work all the same.
    pub(crate) settings: Result<File>,
    /// Settings that were typed, with their values.
    pub(crate) typed: Vec<(String, String)>,
    /// Whether a program reads what it prints: `--json`.
    pub(crate) json: bool,
    /// Flags that were typed and have no meaning.
    pub(crate) obsolete: Vec<&'static ObsoleteFlag>,
}

/// Understands what was typed; what cannot be understood ends the process with help.
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

/// What was typed for an option, before or after the command's name.
fn typed(matches: &ArgMatches, id: &str) -> Option<String> {
    let here = matches.ids().any(|known| known.as_str() == id);
    if here && matches.value_source(id) == Some(ValueSource::CommandLine) {
        let values = matches.get_raw(id)?.map(|value| value.to_string_lossy().into_owned());
        let values: Vec<String> = values.collect();
        return Some(if values.is_empty() { "true".to_owned() } else { values.join(",") });
    }
    typed(matches.subcommand()?.1, id)
}

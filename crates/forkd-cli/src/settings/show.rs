//! Every setting with its value and the source of the value. Secrets are hidden.

use std::collections::BTreeSet;

use clap::{Arg, Command};
use serde::Serialize;

use super::{EXTRAS, File, is_secret, old_variable, options};
use crate::ui;

/// The source of a value, weakest first.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
pub(crate) enum Source {
    Default,
    File,
    Environment,
    Flag,
}

/// One setting.
#[derive(Debug, Serialize)]
pub(crate) struct Row {
    key: String,
    /// The value as on a command line; absent for a default that depends on other settings.
    value: Option<String>,
    source: Source,
    /// The line of the file, or the variable.
    #[serde(skip_serializing_if = "Option::is_none")]
    from: Option<String>,
    /// The default, in words.
    #[serde(skip_serializing_if = "Option::is_none")]
    default: Option<String>,
    /// Whether it is an option of the daemon.
    of_daemon: bool,
}

/// All settings.
#[derive(Debug, Serialize)]
pub(crate) struct SettingsList {
    /// The file that was read.
    file: Option<String>,
    settings: Vec<Row>,
}

/// Lists every setting. `typed` are the options on this command line, with their values.
pub(crate) fn show(grammar: &Command, file: &File, typed: &[(String, String)]) -> SettingsList {
    let origin = |key: &str| {
        let entry = file.entries.get(key)?;
        let path = file.path.as_ref()?.display();
        Some((entry.values.join(","), format!("{path}:{}", entry.line)))
    };
    let hidden = |arg: Option<&Arg>, value: String| match arg.is_some_and(is_secret) {
        true => "(hidden)".to_owned(),
        false => value,
    };
    let row = |key: &str, arg: Option<&Arg>, variable: Option<String>, of_daemon: bool| {
        let typed = typed.iter().find(|(typed, _)| typed == key).map(|(_, value)| value.clone());
        let in_environment = variable
            .and_then(|name| Some((std::env::var_os(&name)?.to_string_lossy().into_owned(), name)))
            .or_else(|| old_variable(key).map(|(name, value)| (value, name.to_owned())));
        let (value, source, from) = match (typed, in_environment, origin(key)) {
            (Some(value), ..) => (Some(value), Source::Flag, None),
            (None, Some((value, name)), _) => (Some(value), Source::Environment, Some(name)),
            (None, None, Some((value, line))) => (Some(value), Source::File, Some(line)),
            (None, None, None) => (arg.and_then(default_value), Source::Default, None),
        };
        let value = value.map(|value| hidden(arg, value));
        Row { key: key.to_owned(), value, source, from, default: arg.and_then(default_in_words), of_daemon }
    };
    let mut settings: Vec<Row> = options(grammar)
        .iter()
        .map(|(key, option)| {
            let variable = option.arg.get_env().map(|name| name.to_string_lossy().into_owned());
            row(key, Some(&option.arg), variable, option.of_daemon)
        })
        .collect();
    settings.extend(EXTRAS.iter().map(|extra| {
        let mut row = row(extra.key, None, Some(extra.variable.to_owned()), false);
        row.value.get_or_insert_with(|| extra.default.to_owned());
        row
    }));
    SettingsList { file: file.path.as_ref().map(|path| path.display().to_string()), settings }
}

impl SettingsList {
    /// The settings as a table.
    pub(crate) fn to_text(&self) -> String {
        let row = |row: &Row| {
            let default = || row.default.as_ref().map_or_else(|| "-".to_owned(), |text| format!("({text})"));
            let source = match (row.source, &row.from) {
                (Source::Default, _) => "default".to_owned(),
                (Source::Flag, _) => "flag".to_owned(),
                (Source::File, from) => from.clone().unwrap_or_else(|| "file".to_owned()),
                (Source::Environment, from) => from.clone().unwrap_or_else(|| "environment".to_owned()),
            };
            vec![row.key.clone(), row.value.clone().unwrap_or_else(default), source]
        };
        let rows: Vec<_> = self.settings.iter().map(row).collect();
        let file = self.file.as_deref().unwrap_or("none");
        format!("{}\n\nfile: {file}", ui::table(&["SETTING", "VALUE", "FROM"], &rows))
    }
}

fn default_value(arg: &Arg) -> Option<String> {
    if !arg.get_action().takes_values() {
        return Some("false".to_owned());
    }
    let values: BTreeSet<_> = arg.get_default_values().iter().map(|value| value.to_string_lossy()).collect();
    (!values.is_empty()).then(|| values.into_iter().collect::<Vec<_>>().join(","))
}

/// The default from the help text, for one that depends on other settings.
fn default_in_words(arg: &Arg) -> Option<String> {
    let help = arg.get_help()?.to_string();
    let (_, rest) = help.split_once("[default: ")?;
    Some(rest.split_once(']')?.0.split_whitespace().collect::<Vec<_>>().join(" "))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn value(shown: &SettingsList, key: &str) -> (Option<String>, Source) {
        let row = shown.settings.iter().find(|row| row.key == key).unwrap();
        (row.value.clone(), row.source)
    }

    #[test]
    fn what_is_typed_goes_before_the_file_and_the_file_before_the_default() {
        let grammar = crate::args::grammar();
        let text = "bind = \"127.0.0.1:1\"\ndata_dir = \"/srv\"\ndaemon_token = \"abc\"\nmachine_mib = 2048";
        let file = File::parse("c.toml".as_ref(), text, &grammar).unwrap();
        let shown = show(&grammar, &file, &[("data_dir".into(), "/typed".into())]);
        assert_eq!(value(&shown, "data_dir"), (Some("/typed".into()), Source::Flag));
        assert_eq!(value(&shown, "bind"), (Some("127.0.0.1:1".into()), Source::File));
        assert_eq!(value(&shown, "network_pool"), (Some("4".into()), Source::Default));
        assert_eq!(value(&shown, "machine_mib"), (Some("2048".into()), Source::File));
        assert_eq!(value(&shown, "daemon_token"), (Some("(hidden)".into()), Source::File));
        let text = shown.to_text();
        assert!(text.contains("c.toml:1") && text.contains("file: c.toml"), "{text}");
        assert!(!text.contains("abc"), "{text}");
        assert!(text.contains("(the library's)"), "{text}");
    }
}

//! The configuration file: TOML, one key per setting, no tables. Errors name the line.

use std::any::TypeId;
use std::collections::BTreeMap;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use anyhow::{Context, Result, bail};
use clap::{Arg, ArgAction, Command};
use toml::de::{DeTable, DeValue};

use super::{EXTRAS, Extra, Setting, check, is_secret, options, present_name};
use crate::host::files;

/// A parsed configuration file.
#[derive(Debug, Clone, Default)]
pub(crate) struct File {
    /// Its path; absent if there is no file.
    pub(crate) path: Option<PathBuf>,
    /// The path of the system's file, if this user may not read it.
    pub(crate) unreadable: Option<PathBuf>,
    pub(crate) entries: BTreeMap<String, Entry>,
}

/// One setting in it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Entry {
    /// The values as on a command line; several for a repeatable option.
    pub(crate) values: Vec<String>,
    pub(crate) line: usize,
}

/// The type of a setting's value.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum ValueKind {
    Text,
    Number,
    Truth,
}

impl File {
    /// Reads a file that the user named.
    pub(crate) fn read(path: &Path, grammar: &Command) -> Result<Self> {
        let bytes = files::read_small(path)?
            .with_context(|| format!("the configuration file {} is missing", path.display()))?;
        let text = String::from_utf8(bytes).with_context(|| format!("{} is not text", path.display()))?;
        let file = Self::parse(path, &text, grammar)?;
        file.check_private(path, grammar)?;
        Ok(file)
    }

    /// Reads the system's file, if it exists and this user may read it.
    pub(super) fn read_system(path: &Path, grammar: &Command) -> Result<Self> {
        match std::fs::File::open(path) {
            Ok(_) => Self::read(path, grammar),
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => {
                Ok(File { unreadable: Some(path.to_owned()), ..File::default() })
            }
            // A file that cannot be opened for another reason counts as absent.
            Err(_) => Ok(File::default()),
        }
    }

    /// Parses a file's text; the error lists all problems.
    pub(crate) fn parse(path: &Path, text: &str, grammar: &Command) -> Result<Self> {
        let line = |at: usize| text.as_bytes().iter().take(at).filter(|byte| **byte == b'\n').count() + 1;
        let table = DeTable::parse(text).map_err(|error| {
            let at = line(error.span().map_or(0, |span| span.start));
            anyhow::anyhow!("{}:{at}: {}", path.display(), error.message())
        })?;
        let options = options(grammar);
        let (mut entries, mut problems) = (BTreeMap::new(), Vec::new());
        for (key, value) in table.get_ref() {
            let at = line(key.span().start);
            // `-` and `_` mean the same.
            let name = present_name(key.get_ref().replace('-', "_"));
            match parse_value(&name, value.get_ref(), &options) {
                Ok(_) if entries.contains_key(&name) => {
                    problems.push((at, format!("`{name}` is there twice")));
                }
                Ok(values) => drop(entries.insert(name, Entry { values, line: at })),
                Err(error) => problems.push((at, format!("{error:#}"))),
            }
        }
        if problems.is_empty() {
            return Ok(File { path: Some(path.to_owned()), unreadable: None, entries });
        }
        problems.sort();
        let lines = problems.into_iter().map(|(at, problem)| format!("{}:{at}: {problem}", path.display()));
        bail!("{}", lines.collect::<Vec<_>>().join("\n"))
    }

    /// Refuses a secret in a file that other users can read.
    fn check_private(&self, path: &Path, grammar: &Command) -> Result<()> {
        let options = options(grammar);
        let secret = |key: &&String| options.get(*key).is_some_and(|option| is_secret(&option.arg));
        let Some(key) = self.entries.keys().find(secret) else { return Ok(()) };
        let mode = std::fs::metadata(path).map_or(0, |data| data.permissions().mode());
        if mode & 0o077 != 0 {
            let path = path.display();
            bail!("{path} holds a secret, {key}, and other users can read it: chmod 600 {path}");
        }
        Ok(())
    }
}

/// The value of a key, as on a command line.
fn parse_value(key: &str, value: &DeValue<'_>, options: &BTreeMap<String, Setting>) -> Result<Vec<String>> {
    if let Some(option) = options.get(key) {
        let values = plain(key, value, kind(&option.arg), may_be_many(&option.arg))?;
        for value in values.iter().filter(|_| kind(&option.arg) != ValueKind::Truth) {
            check(&option.arg, value)?;
        }
        return Ok(values);
    }
    if let Some(Extra { is_number, .. }) = EXTRAS.iter().find(|extra| extra.key == key) {
        return plain(key, value, if *is_number { ValueKind::Number } else { ValueKind::Text }, false);
    }
    let known: Vec<&str> =
        options.keys().map(String::as_str).chain(EXTRAS.iter().map(|extra| extra.key)).collect();
    bail!("unknown key `{key}`; known are {}", known.join(", "))
}

fn kind(arg: &Arg) -> ValueKind {
    if matches!(arg.get_action(), ArgAction::SetTrue | ArgAction::SetFalse) {
        return ValueKind::Truth;
    }
    let parsed = arg.get_value_parser().type_id();
    let numbers = [
        TypeId::of::<u8>(),
        TypeId::of::<u16>(),
        TypeId::of::<u32>(),
        TypeId::of::<u64>(),
        TypeId::of::<usize>(),
        TypeId::of::<i64>(),
    ];
    if numbers.iter().any(|number| parsed == *number) {
        ValueKind::Number
    } else if parsed == TypeId::of::<bool>() {
        ValueKind::Truth
    } else {
        ValueKind::Text
    }
}

fn may_be_many(arg: &Arg) -> bool {
    matches!(arg.get_action(), ArgAction::Append)
}

fn plain(key: &str, value: &DeValue<'_>, kind: ValueKind, many: bool) -> Result<Vec<String>> {
    let one = |value: &DeValue<'_>| match (kind, value) {
        (ValueKind::Text, DeValue::String(text)) => Ok(text.clone().into_owned()),
        (ValueKind::Number, DeValue::Integer(number)) if number.radix() == 10 => {
            Ok(number.as_str().to_owned())
        }
        (ValueKind::Truth, DeValue::Boolean(truth)) => Ok(truth.to_string()),
        (kind, value) => {
            let wanted = match kind {
                ValueKind::Text => "text in quotes",
                ValueKind::Number => "a number without quotes",
                ValueKind::Truth => "true or false",
            };
            let list = if many { ", or a list of these" } else { "" };
            bail!("`{key}` has to be {wanted}{list}; here it is of type {}", value.type_str())
        }
    };
    match value {
        DeValue::Array(values) if many => values.iter().map(|value| one(value.get_ref())).collect(),
        value => Ok(vec![one(value)?]),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn parse(text: &str) -> Result<File> {
        File::parse(Path::new("c.toml"), text, &crate::args::grammar())
    }

    #[test]
    fn values_are_kept_as_they_would_be_typed_with_the_line_they_are_on() {
        let file =
            parse("# mine\nbind = \"127.0.0.1:9000\"\n\nbranch-max-age = 3600\nquiet = true\n").unwrap();
        let entry = |values: &[&str], line| Entry {
            values: values.iter().map(|value| (*value).to_owned()).collect(),
            line,
        };
        assert_eq!(file.entries["bind"], entry(&["127.0.0.1:9000"], 2));
        assert_eq!(file.entries["branch_max_age"], entry(&["3600"], 4));
        assert_eq!(file.entries["quiet"], entry(&["true"], 5));
    }

    #[test]
    fn what_is_wrong_is_named_with_file_line_and_what_would_be_right() {
        for (text, line, why) in [
            ("\nnonsense = 1", 2, "unknown key `nonsense`; known are "),
            ("bind = 5", 1, "`bind` has to be text in quotes; here it is of type integer"),
            ("bind = \"here\"", 1, "invalid value 'here' for '--bind"),
            ("network_pool = \"4\"", 1, "a number without quotes"),
            ("network_pool = 1001", 1, "1001 is not in 0..=1000"),
            ("quiet = \"yes\"", 1, "true or false"),
            ("branch_max_count = -1", 1, "invalid value '-1'"),
            ("[limits]\nbind = 1", 1, "unknown key `limits`"),
            ("machine_mib = \"big\"", 1, "a number without quotes"),
            ("bind", 1, ""),
            ("network-pool = 1\nnetwork_pool = 2", 2, "twice"),
        ] {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.starts_with(&format!("c.toml:{line}: ")) && error.contains(why), "{text}: {error}");
        }
        let known = parse("nonsense = 1").unwrap_err().to_string();
        assert!(known.contains("bind") && known.contains("daemon_url") && known.contains("machine_mib"));
        let both = parse("a = 1\nbind = 2").unwrap_err().to_string();
        assert_eq!(both.lines().count(), 2, "{both}");
    }

    #[test]
    fn a_secret_in_a_file_that_others_can_read_is_refused() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("c.toml");
        std::fs::write(&path, "daemon_token = \"abc\"").unwrap();
        let set = |mode| std::fs::set_permissions(&path, std::fs::Permissions::from_mode(mode)).unwrap();
        set(0o644);
        let error = File::read(&path, &crate::args::grammar()).unwrap_err().to_string();
        assert!(error.contains("chmod 600") && !error.contains("abc"), "{error}");
        set(0o600);
        File::read(&path, &crate::args::grammar()).unwrap();
    }
}

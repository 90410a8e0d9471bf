//! Arguments about the lifetime and the labels of sandboxes, and filters by them.

use clap::{Args, ValueEnum};
use forkd_api::MAX_TIMEOUT_SECS;

use super::{AnswerArgs, parse_id, parse_name};

/// The action when the time-out of a sandbox expires.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTimeout {
    /// Delete it.
    Kill,
    /// Pause it; an idle sandbox resumes when a client uses it.
    Pause,
    /// Store it as a snapshot, then delete it.
    Suspend,
}

impl From<OnTimeout> for forkd_api::OnTimeout {
    fn from(action: OnTimeout) -> Self {
        match action {
            OnTimeout::Kill => forkd_api::OnTimeout::Kill,
            OnTimeout::Pause => forkd_api::OnTimeout::Pause,
            OnTimeout::Suspend => forkd_api::OnTimeout::Suspend,
        }
    }
}

/// The lifetime and the labels of new sandboxes.
#[derive(Debug, Default, Args)]
pub(crate) struct LifetimeArgs {
    /// Label of the children (`forkd ls --label` filters by it). Repeatable.
    #[arg(long, value_parser = parse_label, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,

    /// `--on-timeout` happens to the children after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "ttl", value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT_SECS),
          value_name = "SECS")]
    pub(crate) ttl: Option<u64>,

    /// `--on-timeout` happens to a child that no client used for this many seconds.
    #[arg(long = "idle-timeout-secs", alias = "idle",
          value_parser = clap::value_parser!(u64).range(1..=MAX_TIMEOUT_SECS), value_name = "SECS")]
    pub(crate) idle: Option<u64>,

    /// Action when a time-out expires [default: kill].
    #[arg(long, value_name = "ACTION")]
    pub(crate) on_timeout: Option<OnTimeout>,

    /// Tag of the snapshot that `--on-timeout suspend` creates [default: idle-ID].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) suspend_as: Option<String>,
}

/// A filter for sandboxes.
#[derive(Debug, Default, Args)]
pub(crate) struct FilterArgs {
    /// Only sandboxes with this label; `NAME` alone matches any value. Repeatable: all must match.
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) label: Vec<String>,

    /// Only children of this snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// Only sandboxes of this owner. Only admins see those of other owners.
    #[arg(long, value_parser = parse_name, value_name = "OWNER")]
    pub(crate) owner: Option<String>,
}

/// Change the time-outs and the labels of sandboxes.
///
/// Time-outs count from now. Settings that are not given stay; --label replaces all labels.
#[derive(Debug, Args)]
#[command(after_help = "Examples:
  forkd update sb4k2n --timeout-secs 3600
  forkd update sb4k2n --timeout-secs none --idle-timeout-secs 600 --on-timeout suspend
  forkd update sb4k2n sb7x1q --label job=7 --label team=red
  forkd update sb4k2n --no-labels

Exit status: 0 all changed, 1 one or more could not be, 2 wrong usage.")]
#[command(group = clap::ArgGroup::new("changes").required(true).multiple(true)
    .args(["ttl", "idle", "on_timeout", "suspend_as", "label", "no_labels"]))]
pub(crate) struct UpdateArgs {
    /// Ids of sandboxes (`forkd ls`).
    #[arg(required = true, value_parser = parse_id, value_name = "ID")]
    pub(crate) ids: Vec<String>,

    /// `--on-timeout` happens to the sandboxes in this many seconds, at most 30 days; `none`: never.
    #[arg(long = "timeout-secs", alias = "ttl", value_parser = parse_secs, value_name = "SECS")]
    pub(crate) ttl: Option<Secs>,

    /// `--on-timeout` happens to a sandbox that no client used for this many seconds; `none`: never.
    #[arg(long = "idle-timeout-secs", alias = "idle", value_parser = parse_secs, value_name = "SECS")]
    pub(crate) idle: Option<Secs>,

    /// Action when a time-out expires.
    #[arg(long, value_name = "ACTION")]
    pub(crate) on_timeout: Option<OnTimeout>,

    /// Tag of the snapshot that `suspend` creates.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) suspend_as: Option<String>,

    /// New label; replaces all present ones. Repeatable.
    #[arg(long, value_parser = parse_label, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,

    /// Remove all labels.
    #[arg(long, conflicts_with = "label")]
    pub(crate) no_labels: bool,

    #[command(flatten)]
    pub(crate) answer: AnswerArgs,
}

/// A time-out, or none.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Secs(pub(crate) Option<u64>);

fn parse_secs(text: &str) -> Result<Secs, String> {
    match (text, text.parse()) {
        ("none", _) => Ok(Secs(None)),
        (_, Ok(secs @ 1..=MAX_TIMEOUT_SECS)) => Ok(Secs(Some(secs))),
        _ => Err(format!("give seconds, 1 to {MAX_TIMEOUT_SECS}, or none")),
    }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

//! What can be typed about how long sandboxes live and what is written on them.

use clap::{Args, ValueEnum};

use super::{AnswerArgs, MAX_SECS, parse_id, parse_name};

/// What becomes of sandboxes whose time is over.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum OnTimeout {
    /// They are deleted.
    Kill,
    /// They are paused; an idle one goes on when somebody uses it.
    Pause,
    /// They are stored as snapshots, then deleted.
    Suspend,
}

impl OnTimeout {
    /// The daemon's word for it.
    pub(crate) fn name(self) -> &'static str {
        match self {
            OnTimeout::Kill => "kill",
            OnTimeout::Pause => "pause",
            OnTimeout::Suspend => "suspend",
        }
    }
}

/// How long sandboxes to make live, and what is written on them.
#[derive(Debug, Default, Args)]
pub(crate) struct LifetimeArgs {
    /// Label to find them by (`forkd ls --label`). May be given several times.
    #[arg(long, value_parser = parse_label, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,

    /// Their time is over after this many seconds, at most 30 days.
    #[arg(long = "timeout-secs", alias = "ttl", value_parser = clap::value_parser!(u64).range(1..=MAX_SECS),
          value_name = "SECS")]
    pub(crate) ttl: Option<u64>,

    /// Their time is over when nobody used them for this many seconds.
    #[arg(long = "idle-timeout-secs", alias = "idle",
          value_parser = clap::value_parser!(u64).range(1..=MAX_SECS), value_name = "SECS")]
    pub(crate) idle: Option<u64>,

    /// What becomes of them then [default: kill].
    #[arg(long, value_name = "ACTION")]
    pub(crate) on_timeout: Option<OnTimeout>,

    /// Snapshot to store one as, with `--on-timeout suspend` [default: idle-ID].
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) suspend_as: Option<String>,
}

/// Which sandboxes.
#[derive(Debug, Default, Args)]
pub(crate) struct FilterArgs {
    /// With this label; `NAME` alone for any value. May be given several times: all of them.
    #[arg(long, value_name = "NAME[=VALUE]", value_parser = clap::builder::NonEmptyStringValueParser::new())]
    pub(crate) label: Vec<String>,

    /// Children of this snapshot.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) tag: Option<String>,

    /// Of this owner. Those of others are seen by admins only.
    #[arg(long, value_parser = parse_name, value_name = "OWNER")]
    pub(crate) owner: Option<String>,
}

/// Change how long sandboxes live, what becomes of them then, and their labels.
///
/// Times count from now. What is not given stays as it is; labels are replaced, all of them.
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

    /// Their time is over in this many seconds, at most 30 days; `none`: never.
    #[arg(long = "timeout-secs", alias = "ttl", value_parser = parse_secs, value_name = "SECS")]
    pub(crate) ttl: Option<Secs>,

    /// Their time is over when nobody used them for this many seconds; `none`: never.
    #[arg(long = "idle-timeout-secs", alias = "idle", value_parser = parse_secs, value_name = "SECS")]
    pub(crate) idle: Option<Secs>,

    /// What becomes of them then.
    #[arg(long, value_name = "ACTION")]
    pub(crate) on_timeout: Option<OnTimeout>,

    /// Snapshot to store one as, with `suspend`.
    #[arg(long, value_parser = parse_name, value_name = "TAG")]
    pub(crate) suspend_as: Option<String>,

    /// All their labels from now on. May be given several times.
    #[arg(long, value_parser = parse_label, value_name = "NAME=VALUE")]
    pub(crate) label: Vec<(String, String)>,

    /// Remove their labels.
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
        (_, Ok(secs @ 1..=MAX_SECS)) => Ok(Secs(Some(secs))),
        _ => Err(format!("give seconds, 1 to {MAX_SECS}, or none")),
    }
}

fn parse_label(text: &str) -> Result<(String, String), String> {
    match text.split_once('=') {
        Some((name, value)) if !name.is_empty() => Ok((name.to_owned(), value.to_owned())),
        _ => Err("write it as NAME=VALUE".to_owned()),
    }
}

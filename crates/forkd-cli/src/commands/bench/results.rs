//! Results of a benchmark as they arrive: printed, kept, written to a file.

use std::fs;
use std::path::PathBuf;

use anyhow::{Context as _, Result};
use clap::Args;

use crate::commands::Context;
use crate::ui;

/// The output format of results.
#[derive(Debug, Args)]
pub(super) struct OutputArgs {
    /// Print one JSON object per line instead of a table.
    #[arg(long)]
    pub(super) json: bool,

    /// Also write these lines to a file.
    #[arg(long, value_name = "FILE")]
    out: Option<PathBuf>,
}

/// A result of one case.
pub(super) trait BenchResult: Sized {
    /// As one line of JSON.
    fn to_json(&self) -> String;

    /// The table of all results.
    fn summary(all: &[Self]) -> String;
}

pub(super) struct Results<'a, T> {
    output: &'a OutputArgs,
    pub(super) all: Vec<T>,
    /// The exit status.
    pub(super) status: u8,
}

impl<'a, T: BenchResult> Results<'a, T> {
    pub(super) fn new(output: &'a OutputArgs) -> Self {
        Results { output, all: Vec::new(), status: 0 }
    }

    pub(super) fn add(&mut self, outcome: T) -> Result<()> {
        if self.output.json {
            ui::print(&outcome.to_json())?;
        }
        self.all.push(outcome);
        Ok(())
    }

    /// Records a failed case; the other cases are still measured.
    pub(super) fn failed(&mut self, context: &Context, case: &str, error: &anyhow::Error) {
        context.ui.warn(format!("{case} could not be measured: {error:#}"));
        self.status = 1;
    }

    pub(super) fn conclude(self) -> Result<u8> {
        if let Some(path) = &self.output.out {
            let text: String = self.all.iter().map(|outcome| outcome.to_json() + "\n").collect();
            fs::write(path, text).with_context(|| format!("cannot write {}", path.display()))?;
        }
        if !self.output.json && !self.all.is_empty() {
            ui::print(&T::summary(&self.all))?;
        }
        Ok(self.status)
    }
}

//! `forkd doctor`.

use anyhow::Result;

use super::{Context, runtime};
use crate::args::DoctorArgs;
use crate::{doctor, ui};

/// Runs all checks and prints them; exits with 1 if a check failed.
pub(crate) fn doctor(context: &Context, args: &DoctorArgs) -> Result<u8> {
    let report = runtime()?.block_on(doctor::examine(&context.data, &args.answer.daemon, context.ui));
    if args.answer.json {
        ui::print_json(&report)?
    } else {
        ui::print(&report.to_text())?
    }
    Ok(u8::from(report.totals.fail > 0))
}

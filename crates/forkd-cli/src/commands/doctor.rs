//! `forkd doctor`.

use anyhow::Result;

use super::{Context, runtime};
use crate::args::DoctorArgs;
use crate::{doctor, ui};

/// Makes all checks and prints them; the status says whether forkd can work here.
pub(crate) fn doctor(context: &Context, args: &DoctorArgs) -> Result<u8> {
    let report = runtime()?.block_on(doctor::examine(&context.data, &args.answer.daemon, context.ui));
    if args.answer.json {
        ui::print_json(&report)?
    } else {
        ui::print(&report.to_text())?
    }
    Ok(if report.usable() { 0 } else { 1 })
}

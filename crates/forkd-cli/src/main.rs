//! The `forkd` command: what a person types, and the daemon's own process (`forkd serve`).
//!
//! It owns the surface (arguments, settings, output, exit statuses) and the emulated machine that
//! stands in where KVM cannot run Linux. It builds images in its own process, by way of `forkd-image`,
//! and asks the daemon for everything else. It knows nothing of KVM, sandboxes or guests beyond what
//! the daemon's API says.

mod args;
mod cleanup;
mod client;
mod command_line;
mod commands;
mod compat;
mod docs;
mod doctor;
mod host;
mod images;
mod log_format;
mod machine;
mod settings;
mod stream;
mod ui;

use std::process::ExitCode;

fn main() -> ExitCode {
    commands::execute(command_line::read())
}

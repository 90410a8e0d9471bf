//! The `forkd` command: the command line, and the daemon's own process (`forkd serve`).
//!
//! It owns the surface (arguments, settings, output, exit statuses) and the emulated machine for hosts
//! where KVM cannot run Linux. It builds images in its own process with `forkd-image`, and asks the daemon
//! for everything else. It knows KVM, sandboxes and guests only through the daemon's API.

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

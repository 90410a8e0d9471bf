//! The `forkd` command: what a person types, and the daemon's own process (`forkd serve`).
//!
//! It owns the surface (arguments, output, exit statuses) and the emulated machine that stands in
//! where KVM cannot run Linux. It builds images in its own process, by way of `forkd-image`, and
//! asks the daemon for everything else. It knows nothing of KVM, sandboxes or guests beyond what
//! the daemon's API says.

mod api;
mod args;
mod client;
mod clock;
mod commands;
mod daemon;
mod doctor;
mod files;
mod kvm;
mod library;
mod machine;
mod paths;
mod process;
mod signals;
mod stdio;
mod tree;
mod ui;

use std::process::ExitCode;

use clap::Parser;

fn main() -> ExitCode {
    commands::execute(args::Cli::parse())
}

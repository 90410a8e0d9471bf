//! This computer's terminal, when a shell in the machine uses it.

use std::io::IsTerminal;

use anyhow::{Context, Result};
use forkd_protocol::agent::{Pty, PtySize};
use rustix::termios::{OptionalActions, Termios};

/// The terminal, passing every key on; put back when dropped.
#[derive(Debug)]
pub(super) struct RawTerminal {
    before: Termios,
}

impl RawTerminal {
    /// Whether standard input and output are one.
    pub(super) fn is_there() -> bool {
        std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
    }

    pub(super) fn enter() -> Result<Self> {
        let stdin = std::io::stdin();
        let before = rustix::termios::tcgetattr(&stdin).context("cannot read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        rustix::termios::tcsetattr(&stdin, OptionalActions::Flush, &raw)
            .context("cannot set up the terminal")?;
        Ok(RawTerminal { before })
    }

    /// Its size.
    pub(super) fn size() -> Pty {
        let (cols, rows) = match rustix::termios::tcgetwinsize(std::io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => {
                (u32::from(size.ws_col), u32::from(size.ws_row))
            }
            _ => (80, 24),
        };
        Pty { size: PtySize { cols, rows } }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        let _ = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Flush, &self.before);
    }
}

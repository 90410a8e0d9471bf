//! This process's terminal, while a command in a guest uses it.

use std::io::IsTerminal;
use std::sync::Once;

use anyhow::{Context, Result};
use parking_lot::Mutex;
use rustix::termios::{OptionalActions, Termios};

/// The terminal's settings before raw mode. Here and not in [`RawTerminal`], so that a panic in any thread
/// can restore them before it prints its message.
static BEFORE: Mutex<Option<Termios>> = Mutex::new(None);

/// The terminal in raw mode, which passes every key on. Restored on drop and on a panic. The owner of this
/// catches the signals that would end the program.
#[derive(Debug)]
pub(crate) struct RawTerminal(());

impl RawTerminal {
    /// Whether standard input and output are a terminal.
    pub(crate) fn is_there() -> bool {
        std::io::stdin().is_terminal() && std::io::stdout().is_terminal()
    }

    pub(crate) fn enter() -> Result<Self> {
        static HOOK: Once = Once::new();
        HOOK.call_once(|| {
            let usual = std::panic::take_hook();
            std::panic::set_hook(Box::new(move |info| {
                put_back();
                usual(info);
            }));
        });
        let stdin = std::io::stdin();
        let before = rustix::termios::tcgetattr(&stdin).context("cannot read the terminal's settings")?;
        let mut raw = before.clone();
        raw.make_raw();
        *BEFORE.lock() = Some(before);
        let terminal = RawTerminal(());
        // Keys typed before are for the command as well.
        rustix::termios::tcsetattr(&stdin, OptionalActions::Now, &raw)
            .context("cannot set up the terminal")?;
        Ok(terminal)
    }

    /// Its size: columns and rows.
    pub(crate) fn size() -> (u16, u16) {
        match rustix::termios::tcgetwinsize(std::io::stdout()) {
            Ok(size) if size.ws_col > 0 && size.ws_row > 0 => (size.ws_col, size.ws_row),
            _ => (80, 24),
        }
    }
}

impl Drop for RawTerminal {
    fn drop(&mut self) {
        put_back();
    }
}

/// Restores the terminal, if it is in raw mode.
pub(crate) fn put_back() {
    if let Some(before) = BEFORE.lock().take() {
        let _ = rustix::termios::tcsetattr(std::io::stdin(), OptionalActions::Flush, &before);
    }
}

//! The watchdog: pings the agent of a sandbox and marks the sandbox unresponsive while no answer comes.

use std::time::Instant;

use crate::config::Timing;
use crate::sandbox::{Phase, Sandbox};

impl Sandbox {
    /// Pings the agent until it is dropped, and keeps the phase up to date. Without an agent it does nothing.
    pub(super) async fn watchdog(&self, timing: &Timing) {
        if self.spec.is_bare() {
            return std::future::pending().await;
        }
        let mut heard = Instant::now();
        loop {
            tokio::time::sleep(timing.ping_every).await;
            if matches!(self.phase(), Phase::Paused) {
                heard = Instant::now();
                continue;
            }
            match self.agent.ping().await {
                Ok(_) => {
                    heard = Instant::now();
                    self.heard();
                }
                Err(error) => tracing::debug!(sandbox = self.id, %error, "agent ping failed"),
            }
            let silent = heard.elapsed() > timing.unresponsive_after;
            if self.answers(!silent) {
                match silent {
                    true => tracing::warn!(sandbox = self.id, "sandbox does not answer"),
                    false => tracing::info!(sandbox = self.id, "sandbox answers again"),
                }
            }
        }
    }
}

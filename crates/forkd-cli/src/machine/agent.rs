//! The client of the machine's agent.

use std::time::Duration;

use forkd_controller::agent::{Agent, Endpoint};

/// The time limit of a reply: the machine is slow, and may be busy.
const REPLY_TIMEOUT: Duration = Duration::from_secs(15);

/// A client of the agent behind a loopback port.
pub(super) fn connect(port: u16, token: &str) -> Agent {
    Agent::new(Endpoint::Tcp { address: format!("127.0.0.1:{port}"), token: token.to_owned() }, REPLY_TIMEOUT)
}

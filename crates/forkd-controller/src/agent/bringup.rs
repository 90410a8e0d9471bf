//! The steps that bring up a guest's agent: up, warm, frozen, and in a child its own identity.
//!
//! A failure is one sentence; the caller adds the console's end.

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forkd_protocol::agent::{
    BecomeRequest, BecomeResponse, FreezeRequest, FreezeSync, Pong, WarmRequest, WarmState,
};

use crate::agent::{self, Agent};
use crate::config::Timing;
use crate::monitor::console;
use crate::util::random::fill_random;

type Result<T> = std::result::Result<T, String>;

/// Bytes of entropy for a child.
const ENTROPY: usize = 64;
/// How long a boot waits until the image's command can be used.
const USABLE: Duration = Duration::from_secs(30);

/// Returns when the agent of a booting guest responds.
pub(crate) async fn up(agent: &Agent, timing: &Timing) -> Result<Pong> {
    knock(timing, || agent.ping()).await
}

/// Repeats a call until the agent responds or the boot time is over. A guest that is still coming up can lose
/// a call, so the first ones have a short time limit. A refusal is a response.
async fn knock<T, F: Future<Output = agent::Result<T>>>(
    timing: &Timing,
    mut call: impl FnMut() -> F,
) -> Result<T> {
    let mut pause = Duration::from_millis(5);
    let mut patience = timing.call.min(Duration::from_secs(2));
    let mut last = String::from("nothing was tried");
    let knocking = async {
        loop {
            match tokio::time::timeout(patience, call()).await {
                Ok(Ok(answer)) => return Ok(answer),
                Ok(Err(agent::Error::Refused(error))) => {
                    return Err(console::printable(error.to_string().as_bytes()));
                }
                Ok(Err(error)) => {
                    tracing::trace!(%error, "agent not up yet");
                    last = error.public();
                }
                Err(_) => {
                    last = format!("no answer within {patience:?}");
                    patience = (patience * 2).min(timing.call);
                }
            }
            tokio::time::sleep(pause).await;
            pause = (pause * 3 / 2).min(Duration::from_millis(250));
        }
    };
    match tokio::time::timeout(timing.boot, knocking).await {
        Ok(answer) => answer,
        Err(_) => Err(format!("the agent was not up after {} s ({last})", timing.boot.as_secs())),
    }
}

/// Runs a warm-up to its end.
pub(crate) async fn warm_up(agent: &Agent, request: &WarmRequest, timing: &Timing) -> Result<()> {
    // Clients of a guest in use wait for it, and have time limits of their own.
    let limit = if request.until_usable { timing.warm.min(USABLE) } else { timing.warm };
    let deadline = Instant::now() + limit;
    loop {
        let status = agent.warm(request).await;
        let status = status.map_err(|error| format!("the warm-up failed: {}", error.public()))?;
        match status.state {
            WarmState::Ready => return Ok(()),
            WarmState::Failed => {
                let error = status.error.unwrap_or_else(|| "no reason given".into());
                let error = console::printable(error.as_bytes());
                return Err(format!("the warm-up failed: {error}"));
            }
            WarmState::Cold | WarmState::Warming if Instant::now() > deadline => {
                return Err(format!("the warm-up took longer than {} s", limit.as_secs()));
            }
            WarmState::Cold | WarmState::Warming => tokio::time::sleep(Duration::from_millis(100)).await,
        }
    }
}

/// Prepares the guest for many forks, within `limit`.
pub(crate) async fn freeze(agent: &Agent, limit: Duration) -> Result<()> {
    // Data that the guest writes to its disk now need not be written by each of its children.
    let frozen = agent
        .freeze(limit, FreezeRequest { sync: FreezeSync::Full, ..FreezeRequest::default() })
        .await
        .map_err(|error| format!("the guest could not be frozen: {}", error.public()))?;
    match frozen.frozen {
        true => Ok(()),
        false => Err("the guest could not be frozen: some of its processes do not stand still".into()),
    }
}

/// Gives a child its own identity: the first call it gets.
pub(crate) async fn become_sandbox(
    agent: &Agent,
    id: &str,
    envs: &BTreeMap<String, String>,
    timing: &Timing,
) -> Result<BecomeResponse> {
    let mut random = [0u8; ENTROPY + 16];
    fill_random(&mut random).map_err(|error| error.to_string())?;
    let (entropy, machine_id) = random.split_at(ENTROPY);
    let request = BecomeRequest {
        sandbox_id: id.to_owned(),
        hostname: id.to_owned(),
        machine_id: machine_id.iter().map(|byte| format!("{byte:02x}")).collect(),
        unix_nanos: 0,
        entropy: Some(entropy.to_vec()),
        envs: envs.clone(),
    };
    knock(timing, || agent.become_sandbox(request.clone())).await
}

/// The image's own warm-up, followed by the user's.
pub(crate) fn combine(image: &WarmRequest, command: Vec<String>, python: Option<String>) -> WarmRequest {
    let python = match (&image.python, python) {
        (Some(first), Some(then)) => Some(format!("{first}\n{then}")),
        (first, then) => then.or_else(|| first.clone()),
    };
    let command = if command.is_empty() { image.command.clone() } else { command };
    WarmRequest { command, python, until_usable: false }
}

/// What starts the image's command in a guest that boots to be used; none if the image has no command.
pub(crate) fn start_of(image: &WarmRequest) -> Option<WarmRequest> {
    let start = WarmRequest { command: image.command.clone(), python: None, until_usable: true };
    (!start.command.is_empty()).then_some(start)
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::testing::fake_guest::FakeDaemon;

    #[tokio::test]
    async fn a_boot_of_a_guest_that_was_warm_starts_the_images_command_and_imports_nothing() {
        let image = WarmRequest {
            command: vec!["serve".into()],
            python: Some("import numpy".into()),
            ..WarmRequest::default()
        };
        assert_eq!(start_of(&WarmRequest { command: Vec::new(), ..image.clone() }), None);
        let daemon = FakeDaemon::start().await;
        let start = start_of(&image).unwrap();
        warm_up(&daemon.sandbox.agent, &start, &Timing::default()).await.unwrap();
        let sent = daemon.guest.calls_of("Warm");
        assert_eq!(sent, [json!({ "command": ["serve"], "untilUsable": true })]);
    }
}

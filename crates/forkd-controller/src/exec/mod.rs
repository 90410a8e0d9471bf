//! Commands in a sandbox: their results, their exit statuses, and the one place that counts them.

pub(crate) mod eval;
pub(crate) mod run;
pub(crate) mod stream;

use forkd_protocol::agent::End;
use forkd_protocol::connect::{self, Code, exit_code};

use crate::agent;
use crate::error::Result;
use crate::sandbox::Sandbox;

/// Exit status of a command after a timeout, as in `timeout(1)`.
pub(crate) const TIMED_OUT: i32 = 124;

/// The result of a command.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Finish {
    /// It ran to its end: the exit status as a shell reports it, and the signal, if any.
    Ended { exit_code: i32, signal: Option<i32> },
    /// The agent killed it at its timeout.
    TimedOut,
    /// It did not start: the exit status as a shell reports it, and the reason.
    NotStarted { exit_code: i32, why: String },
}

impl Finish {
    /// The result of a command that ran to its end.
    pub(crate) fn ended(end: &End) -> Self {
        match end.signal {
            Some(signal @ 1..=64) => Finish::Ended { exit_code: 128 + signal, signal: Some(signal) },
            _ => Finish::Ended { exit_code: end.exit_code, signal: None },
        }
    }

    /// The result of a command that the agent reports an error for. Errors that are not about the command stay
    /// errors.
    pub(crate) fn failed(error: agent::Error) -> agent::Result<Self> {
        match error {
            agent::Error::Refused(refused) => match refused.code {
                Code::DeadlineExceeded => Ok(Finish::TimedOut),
                Code::InvalidArgument => {
                    Ok(Finish::NotStarted { exit_code: status_of(&refused), why: refused.message })
                }
                _ => Err(refused.into()),
            },
            other => Err(other),
        }
    }

    /// The exit status.
    pub(crate) fn exit_code(&self) -> i32 {
        match self {
            Finish::Ended { exit_code, .. } | Finish::NotStarted { exit_code, .. } => *exit_code,
            Finish::TimedOut => TIMED_OUT,
        }
    }
}

/// Runs a command with the agent of `sandbox` and counts its result. A caller that drops this future cancels the
/// command: it counts as `cancelled`.
pub(crate) async fn counted(sandbox: &Sandbox, run: impl Future<Output = Result<Finish>>) -> Result<Finish> {
    let came_out = |finish: &Finish| (finish.exit_code(), matches!(finish, Finish::TimedOut));
    sandbox.telemetry.metrics.exec(run, came_out).await
}

/// The exit status of a command that an agent refused to start.
fn status_of(refused: &connect::Error) -> i32 {
    match refused.exit_code {
        // The agent runs among untrusted code, so any other number is ignored.
        Some(exit_code::NOT_FOUND) => exit_code::NOT_FOUND,
        Some(_) => exit_code::CANNOT_EXECUTE,
        None => status_of_an_older_agent(&refused.message),
    }
}

/// Like [`status_of`], for an agent that sends no exit status. A snapshot keeps its agent, so such agents stay in
/// use. They refuse every command with one code; only the message shows that there is no program.
fn status_of_an_older_agent(message: &str) -> i32 {
    match message.ends_with(": not found in this image") {
        true => exit_code::NOT_FOUND,
        false => exit_code::CANNOT_EXECUTE,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_killed_command_has_the_status_a_shell_gives() {
        let finish = |end: End| match Finish::ended(&end) {
            Finish::Ended { exit_code, signal } => (exit_code, signal),
            other => panic!("{other:?}"),
        };
        assert_eq!(finish(End { exit_code: -1, signal: Some(9), ..End::default() }), (137, Some(9)));
        assert_eq!(finish(End { exit_code: 7, exited: true, ..End::default() }), (7, None));
        // A hostile agent's number must not overflow.
        assert_eq!(finish(End { exit_code: 3, signal: Some(i32::MAX), ..End::default() }), (3, None));
    }

    #[test]
    fn a_command_that_does_not_start_has_the_status_its_agent_gives() {
        let status = |message: &str, exit_code: Option<i32>| {
            let refused = connect::Error { exit_code, ..connect::Error::new(Code::InvalidArgument, message) };
            Finish::failed(refused.into()).unwrap().exit_code()
        };
        // The wording does not matter.
        assert_eq!(status("x: gone", Some(127)), 127);
        assert_eq!(status("x: not found in this image", Some(126)), 126);
        assert_eq!(status("x", Some(0)), 126, "not believed");
        // Agents of snapshots from an earlier version.
        assert_eq!(status("x: not found in this image", None), 127);
        assert_eq!(status("/not found: root may not execute it (permission denied)", None), 126);
    }

    #[test]
    fn an_error_that_is_not_about_the_command_stays_one() {
        for code in [Code::Unauthenticated, Code::ResourceExhausted, Code::Internal] {
            let refused = connect::Error::new(code, "x");
            assert!(Finish::failed(refused.into()).is_err(), "{code:?}");
        }
        let late = connect::Error::new(Code::DeadlineExceeded, "x");
        assert_eq!(Finish::failed(late.into()).unwrap(), Finish::TimedOut);
        assert!(Finish::failed(agent::Error::NoRoom).is_err());
    }
}

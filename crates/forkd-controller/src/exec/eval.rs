//! Evaluations in a sandbox's warm interpreter.

use std::time::Duration;

use forkd_api::{EvalReply, EvalRequest};
use forkd_protocol::agent as wire;

use crate::agent::ResponseBudget;
use crate::error::Result;
use crate::exec::TIMED_OUT;
use crate::exec::run::ran_out;
use crate::sandbox::Sandbox;
use crate::sandbox::agent_call::AgentCall;

/// Evaluates code within `limit`, which overrides the request's. The caller holds the reply's budget until the reply
/// is sent.
pub(crate) async fn evaluate(
    sandbox: &Sandbox,
    request: EvalRequest,
    limit: Duration,
) -> Result<(EvalReply, ResponseBudget)> {
    sandbox.ready().await?;
    let code = wire::EvalRequest { code: request.code };
    let evaluated = AgentCall::COMMAND.run(sandbox, async {
        match sandbox.agent.eval(&code, limit).await {
            Err(error) if error.is_deadline() => Ok(None),
            other => other.map(Some),
        }
    });
    let came_out = |evaluated: &Option<(wire::EvalResponse<_>, ResponseBudget)>| match evaluated {
        Some((answer, _)) => (i32::from(answer.error.is_some()), false),
        None => (TIMED_OUT, true),
    };
    Ok(match sandbox.telemetry.metrics.exec(evaluated, came_out).await? {
        Some((answer, room)) => {
            let reply = EvalReply {
                exit_code: i32::from(answer.error.is_some()),
                result: answer.result,
                error: answer.error,
                stdout: answer.stdout,
                stderr: answer.stderr,
                traceback: answer.traceback,
                result_json: answer.result_json,
            };
            (reply, room)
        }
        None => {
            let error = Some(ran_out(limit));
            (EvalReply { error, exit_code: TIMED_OUT, ..EvalReply::default() }, ResponseBudget::default())
        }
    })
}

//! `forkd exec`, `forkd shell` and `forkd eval`: commands and code in an existing sandbox.

use std::collections::BTreeMap;
use std::io;

use anyhow::Result;
use forkd_api::stream::ExecStreamRequest;
use forkd_api::{EvalReply, EvalRequest, ExecReply, ExecRequest};
use hyper::Method;

use super::{Context, WrongUsage, with_daemon};
use crate::args::{DaemonArgs, EvalArgs, ExecArgs, ProcessArgs, ShellArgs, StreamArgs};
use crate::client::types;
use crate::compat::json_lines;
use crate::stream::conversation::{self, Conversation, Streams};
use crate::stream::terminal::RawTerminal;
use crate::ui::{self, Ui};

/// The default time limit of a command, in seconds.
const USUAL_TIMEOUT: u64 = 600;
/// The interactive shell: bash if the image has it.
const LOGIN_SHELL: &str = "if [ -x /bin/bash ]; then exec /bin/bash -l; else exec /bin/sh -l; fi";

/// Runs a command and returns its status.
pub(crate) fn exec(context: &Context, args: ExecArgs) -> Result<u8> {
    let timeout = args.timeout.unwrap_or(USUAL_TIMEOUT);
    let StreamArgs { interactive, tty } = args.streams;
    let Some(id) = &args.sandbox.id else {
        if interactive || tty {
            return Err(WrongUsage::new("-i and -t do not work with --target").into());
        }
        let request = json_lines::exec_request(&args.command, timeout);
        return super::agent_port::exec(context, &args.sandbox.target, &request, args.answer.json);
    };
    if interactive || tty {
        let request = stream_request(args.command, args.process, args.timeout, tty);
        return stream(context, &args.answer.daemon, id, interactive, &request);
    }
    let path = format!("{}/exec", types::sandbox_path(id));
    let request = ExecRequest {
        args: args.command,
        timeout_secs: timeout,
        env: args.process.env.into_iter().collect::<BTreeMap<_, _>>(),
        cwd: args.process.cwd,
        user: args.process.user,
        stdin: None,
    };
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let answer = daemon.ask(Method::POST, &path, Some(&serde_json::to_value(&request)?)).await?;
        let reply: ExecReply = types::read(&answer)?;
        if args.answer.json {
            ui::print_json(&answer)?;
        } else {
            show_exec(&reply, &mut io::stdout().lock(), "--timeout-secs", context.ui)?;
        }
        Ok(status(reply.exit_code))
    })
}

/// Runs a shell or a command on this terminal and returns its status.
pub(crate) fn shell(context: &Context, args: ShellArgs) -> Result<u8> {
    let tty = RawTerminal::is_there();
    let command = match args.command {
        command if !command.is_empty() => command,
        _ if tty => ["/bin/sh", "-c", LOGIN_SHELL].map(str::to_owned).into(),
        // Commands come from a pipe.
        _ => vec!["/bin/sh".to_owned()],
    };
    let mut process = args.process;
    if let (true, Ok(name)) = (tty, std::env::var("TERM")) {
        // Before the user's variables, which override these.
        process.env.insert(0, ("TERM".to_owned(), name));
    }
    let request = stream_request(command, process, None, tty);
    stream(context, &args.daemon, &args.sandbox.id, true, &request)
}

fn stream_request(
    args: Vec<String>,
    process: ProcessArgs,
    timeout_secs: Option<u64>,
    tty: bool,
) -> ExecStreamRequest {
    ExecStreamRequest {
        args,
        env: process.env.into_iter().collect(),
        cwd: process.cwd,
        user: process.user,
        timeout_secs,
        pty: tty.then(conversation::terminal_size),
        keep: false,
    }
}

/// Runs a command with the streams of this process.
fn stream(
    context: &Context,
    daemon: &DaemonArgs,
    id: &str,
    stdin: bool,
    request: &ExecStreamRequest,
) -> Result<u8> {
    let path = format!("{}/exec/stream", types::sandbox_path(id));
    let streams = Streams { stdin, tty: request.pty.is_some() };
    with_daemon(context, daemon, async |daemon| {
        let socket = daemon.websocket(&path).await?;
        Conversation::new(socket, context.ui, streams).hold(request).await
    })
}

/// Prints a command's output, its standard output on `stdout`. `option` is the flag for more time.
pub(super) fn show_exec(reply: &ExecReply, stdout: &mut impl io::Write, option: &str, ui: Ui) -> Result<()> {
    ui::write_raw(stdout, reply.stdout.as_bytes())?;
    ui::write_raw(&mut io::stderr().lock(), reply.stderr.as_bytes())?;
    if reply.stdout_truncated || reply.stderr_truncated {
        ui.warn("the command wrote more than the daemon keeps; redirect its output to a file in the sandbox");
    }
    if reply.timed_out {
        ui.warn(format!("the command reached its time limit; raise it with {option}"));
    } else if let Some(error) = &reply.error {
        ui.warn(error);
    }
    Ok(())
}

/// Evaluates code and returns 0, or 1 if it raised.
pub(crate) fn eval(context: &Context, args: &EvalArgs) -> Result<u8> {
    let Some(id) = &args.sandbox.id else {
        let request = json_lines::eval_request(&args.code.join(" "), args.limit.timeout);
        return super::agent_port::eval(context, &args.sandbox.target, &request, args.answer.json);
    };
    let path = format!("{}/eval", types::sandbox_path(id));
    let request = EvalRequest { code: args.code.join(" "), timeout_secs: args.limit.timeout };
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let answer = daemon.ask(Method::POST, &path, Some(&serde_json::to_value(&request)?)).await?;
        let reply: EvalReply = types::read(&answer)?;
        if args.answer.json {
            ui::print_json(&answer)?;
        } else {
            let (stdout, stderr) = eval_output(&reply);
            ui::write_raw(&mut io::stdout().lock(), stdout.as_bytes())?;
            ui::write_raw(&mut io::stderr().lock(), stderr.as_bytes())?;
        }
        Ok(status(reply.exit_code))
    })
}

/// The text for standard output and for standard error: the code's output, then the result or the error on
/// its own line.
fn eval_output(reply: &EvalReply) -> (String, String) {
    let failure = reply.traceback.as_ref().or(reply.error.as_ref());
    (with_line(&reply.stdout, reply.result.as_ref()), with_line(&reply.stderr, failure))
}

fn with_line(text: &str, line: Option<&String>) -> String {
    let Some(line) = line else { return text.to_owned() };
    let gap = if text.is_empty() || text.ends_with('\n') { "" } else { "\n" };
    format!("{text}{gap}{}\n", line.trim_end_matches('\n'))
}

/// A guest's exit status as this command's. A status that does not fit is a failure, never a success.
pub(super) fn status(exit_code: i32) -> u8 {
    u8::try_from(exit_code).unwrap_or(u8::MAX)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_code_printed_comes_before_its_value_and_each_on_its_own_stream() {
        let reply = EvalReply {
            result: Some("42".into()),
            stdout: "no newline".into(),
            stderr: "careful\n".into(),
            ..EvalReply::default()
        };
        assert_eq!(eval_output(&reply), ("no newline\n42\n".into(), "careful\n".into()));
        assert_eq!(eval_output(&EvalReply::default()), (String::new(), String::new()));
    }

    #[test]
    fn code_that_raised_gives_its_traceback_or_at_least_the_error() {
        let mut reply = EvalReply { error: Some("NameError: x".into()), ..EvalReply::default() };
        assert_eq!(eval_output(&reply).1, "NameError: x\n");
        reply.traceback = Some("Traceback …\nNameError: x\n".into());
        assert_eq!(eval_output(&reply).1, "Traceback …\nNameError: x\n");
    }

    #[test]
    fn a_strange_status_is_never_success() {
        assert_eq!([status(0), status(7), status(124)], [0, 7, 124]);
        assert_eq!([status(-1), status(256), status(i32::MIN)], [255; 3]);
    }
}

//! Running the host's programs: found or named with their package, never left behind, their last
//! words kept for the error message.

use std::collections::VecDeque;
use std::io::{BufRead, BufReader, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{ChildStdout, Command, Stdio};

use crate::error::{Error, Result};

/// Where programs are looked for besides `PATH`: users often have no sbin in theirs.
const EXTRA_PATH: &str = "/usr/local/sbin:/usr/sbin:/sbin:/usr/local/bin:/usr/bin:/bin";
/// How many of a program's last lines an error message shows.
const TAIL_LINES: usize = 15;
/// The longest line kept of a program's output.
const MAX_LINE: u64 = 4096;

fn search_path() -> String {
    match std::env::var("PATH") {
        Ok(path) if !path.is_empty() => format!("{path}:{EXTRA_PATH}"),
        _ => EXTRA_PATH.into(),
    }
}

/// Where program `name` is, if the host has it.
pub(crate) fn find(name: &str) -> Option<PathBuf> {
    std::env::split_paths(&search_path()).map(|folder| folder.join(name)).find(|path| is_executable(path))
}

fn is_executable(path: &Path) -> bool {
    path.is_file() && rustix::fs::access(path, rustix::fs::Access::EXEC_OK).is_ok()
}

/// A command for program `name` of Debian package `package`, or an error that names both.
pub(crate) fn command(name: &str, package: &str) -> Result<Command> {
    let program = find(name).ok_or_else(|| {
        Error::Host(format!("{name} is not installed; install it with `apt-get install {package}`"))
    })?;
    let mut command = Command::new(program);
    command.env("PATH", search_path()).env("LC_ALL", "C").env("DEBIAN_FRONTEND", "noninteractive");
    command.stdin(Stdio::null());
    // A build that is killed must not leave a package installation running behind it, in a folder
    // that the next build removes.
    // SAFETY: between fork and exec the closure makes one system call and touches no memory of the
    // parent's.
    unsafe {
        command.pre_exec(|| {
            rustix::process::set_parent_process_death_signal(Some(rustix::process::Signal::TERM))?;
            Ok(())
        });
    }
    Ok(command)
}

/// Runs `command` and gives its standard output.
pub(crate) fn output(command: Command) -> Result<String> {
    stream(
        command,
        |stdout| {
            let mut text = Vec::new();
            stdout.read_to_end(&mut text).map_err(Error::io("read the output of", Path::new("a program")))?;
            Ok(String::from_utf8_lossy(&text).into_owned())
        },
        |_| {},
    )
}

/// Runs `command`, gives its standard output to `consume` and each line of its standard error to
/// `line`. When both the program and `consume` fail, the program is the one to blame.
///
/// Output that `consume` leaves is still read to the end: mmdebstrap sends a hang-up to its whole process
/// group, which is ours, when its output is not read.
pub(crate) fn stream<T>(
    mut command: Command,
    consume: impl FnOnce(&mut ChildStdout) -> Result<T>,
    line: impl Fn(&str) + Send,
) -> Result<T> {
    let program = command.get_program().to_owned();
    let name = Path::new(&program).file_name().unwrap_or(&program).to_string_lossy().into_owned();
    let start = command.stdout(Stdio::piped()).stderr(Stdio::piped()).spawn();
    let mut child = start.map_err(Error::io("start", Path::new(&program)))?;
    let (Some(mut stdout), Some(stderr)) = (child.stdout.take(), child.stderr.take()) else {
        return Err(Error::Tool(format!("{name} has no output")));
    };
    std::thread::scope(|scope| {
        let reader = scope.spawn(|| tail_of(stderr, line));
        let consumed = consume(&mut stdout);
        let _ = drain(&mut stdout);
        let status = child.wait().map_err(Error::io("wait for", Path::new(&program)))?;
        let tail = reader.join().unwrap_or_default();
        if status.success() {
            consumed
        } else {
            Err(Error::Tool(format!("{name} failed ({status}):\n{tail}")))
        }
    })
}

/// For [`stream`]: discards the output, which the program must still be able to write.
pub(crate) fn drain(stdout: &mut ChildStdout) -> Result<()> {
    std::io::copy(stdout, &mut std::io::sink())
        .map_err(Error::io("read the output of", Path::new("a program")))?;
    Ok(())
}

/// Reads `stderr` to its end, shows each line and gives the last ones.
fn tail_of(stderr: impl Read, line: impl Fn(&str)) -> String {
    let mut reader = BufReader::new(stderr);
    let mut tail = VecDeque::new();
    loop {
        let mut bytes = Vec::new();
        match reader.by_ref().take(MAX_LINE).read_until(b'\n', &mut bytes) {
            Ok(0) | Err(_) => break,
            Ok(_) => {}
        }
        let text = String::from_utf8_lossy(&bytes);
        let text = text.trim_end();
        if text.is_empty() {
            continue;
        }
        line(text);
        if tail.len() == TAIL_LINES {
            tail.pop_front();
        }
        tail.push_back(format!("  {text}"));
    }
    tail.make_contiguous().join("\n")
}

#[cfg(test)]
mod tests {
    use super::*;

    fn shell(script: &str) -> Command {
        let mut command = command("sh", "dash").unwrap();
        command.args(["-c", script]);
        command
    }

    #[test]
    fn a_missing_program_is_named_with_its_package() {
        let error = command("no-such-program", "some-package").unwrap_err().to_string();
        assert!(
            error.contains("no-such-program") && error.contains("apt-get install some-package"),
            "{error}"
        );
    }

    #[test]
    fn a_failing_program_is_quoted() {
        let error = output(shell("echo one >&2; echo two >&2; exit 3")).unwrap_err().to_string();
        assert!(error.contains("sh failed") && error.contains("one\n  two"), "{error}");
        assert_eq!(output(shell("echo fine")).unwrap(), "fine\n");
    }

    #[test]
    fn who_stops_reading_gets_his_own_error_back_and_the_program_ends_in_peace() {
        let stop = |_: &mut ChildStdout| Err::<(), _>(Error::Invalid("enough".into()));
        // More than a pipe holds; a write that fails is what mmdebstrap answers with its hang-up.
        let script =
            "trap '' PIPE; i=0; while [ $i -lt 20000 ]; do echo 0123456789 || exit 9; i=$((i+1)); done";
        let error = stream(shell(script), stop, |_| {}).unwrap_err();
        assert_eq!(error.to_string(), "enough");
    }
}

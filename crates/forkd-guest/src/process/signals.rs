//! Signals by name and in words.

/// Names, numbers, and the text for a process that a signal has ended.
const SIGNALS: &[(&str, i32, &str)] = &[
    ("HUP", libc::SIGHUP, "hangup"),
    ("INT", libc::SIGINT, "interrupt"),
    ("QUIT", libc::SIGQUIT, "quit"),
    ("ILL", libc::SIGILL, "illegal instruction"),
    ("TRAP", libc::SIGTRAP, "trace/breakpoint trap"),
    ("ABRT", libc::SIGABRT, "aborted"),
    ("BUS", libc::SIGBUS, "bus error"),
    ("FPE", libc::SIGFPE, "floating point exception"),
    ("KILL", libc::SIGKILL, "killed"),
    ("USR1", libc::SIGUSR1, "user defined signal 1"),
    ("SEGV", libc::SIGSEGV, "segmentation fault"),
    ("USR2", libc::SIGUSR2, "user defined signal 2"),
    ("PIPE", libc::SIGPIPE, "broken pipe"),
    ("ALRM", libc::SIGALRM, "alarm clock"),
    ("TERM", libc::SIGTERM, "terminated"),
    ("STKFLT", libc::SIGSTKFLT, "stack fault"),
    ("CHLD", libc::SIGCHLD, "child exited"),
    ("CONT", libc::SIGCONT, "continued"),
    ("STOP", libc::SIGSTOP, "stopped (signal)"),
    ("TSTP", libc::SIGTSTP, "stopped"),
    ("TTIN", libc::SIGTTIN, "stopped (tty input)"),
    ("TTOU", libc::SIGTTOU, "stopped (tty output)"),
    ("URG", libc::SIGURG, "urgent I/O condition"),
    ("XCPU", libc::SIGXCPU, "CPU time limit exceeded"),
    ("XFSZ", libc::SIGXFSZ, "file size limit exceeded"),
    ("VTALRM", libc::SIGVTALRM, "virtual timer expired"),
    ("PROF", libc::SIGPROF, "profiling timer expired"),
    ("WINCH", libc::SIGWINCH, "window changed"),
    ("IO", libc::SIGIO, "I/O possible"),
    ("PWR", libc::SIGPWR, "power failure"),
    ("SYS", libc::SIGSYS, "bad system call"),
];

/// The number of `SIGNAL_SIGTERM`, `SIGTERM`, `TERM` or `15`.
pub(crate) fn number(name: &str) -> Option<i32> {
    if let Ok(number) = name.parse() {
        return SIGNALS.iter().find(|(_, known, _)| *known == number).map(|_| number);
    }
    let name = name.strip_prefix("SIGNAL_").unwrap_or(name);
    let name = name.strip_prefix("SIG").unwrap_or(name);
    SIGNALS.iter().find(|(known, _, _)| *known == name).map(|(_, number, _)| *number)
}

/// The signal in words.
pub(crate) fn describe(number: i32) -> String {
    let known = SIGNALS.iter().find(|(_, n, _)| *n == number);
    known.map_or_else(|| format!("signal {number}"), |(_, _, words)| (*words).to_string())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn signals_are_known_by_the_names_clients_use() {
        assert_eq!(number("SIGNAL_SIGKILL"), Some(9));
        assert_eq!(number("SIGTERM"), Some(15));
        assert_eq!(number("INT"), Some(2));
        assert_eq!(
            (number("9"), number("15"), number("0"), number("-9"), number("99")),
            (Some(9), Some(15), None, None, None)
        );
        assert_eq!(number("SIGNAL_UNSPECIFIED"), None);
        assert_eq!(number(""), None);
        assert_eq!(describe(9), "killed");
        assert_eq!(describe(40), "signal 40");
    }
}

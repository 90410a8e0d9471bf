//! A process that stands for a monitor: it has a real pid and real children, and a thread of the test speaks for it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::Pid;

/// Forks for a process of [`Shell::start`].
pub(crate) struct Shell {
    orders: ChildStdin,
    pids: BufReader<ChildStdout>,
}

impl Shell {
    /// Starts a process that forks when it is told to, and runs until it is killed as long as this is not dropped.
    pub(crate) fn start() -> (Child, Shell) {
        let script = "while read line; do sleep 1000 >&2 & echo $!; done";
        let mut process = Command::new("sh")
            .args(["-c", script])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let pids = BufReader::new(process.stdout.take().unwrap());
        (process, Shell { orders, pids })
    }

    /// Has it fork a child that does nothing.
    pub(crate) fn fork(&mut self) -> Pid {
        let mut pid = String::new();
        self.orders.write_all(b"\n").unwrap();
        self.pids.read_line(&mut pid).unwrap();
        Pid::from_raw(pid.trim().parse().unwrap()).unwrap()
    }
}

/// Whether there is a process `pid` that has not ended.
pub(crate) fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

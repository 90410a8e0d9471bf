//! A process in the place of a monitor: it has a real pid and real children, and a thread of the test answers for it.

use std::io::{BufRead, BufReader, Write};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};

use rustix::process::Pid;

/// Makes a process of [`Shell::start`] fork.
pub(crate) struct Shell {
    orders: ChildStdin,
    pids: BufReader<ChildStdout>,
}

impl Shell {
    /// Starts a process that forks on [`Shell::fork`], and runs until it is killed or this is dropped.
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

    /// Forks a child that does nothing.
    pub(crate) fn fork(&mut self) -> Pid {
        let mut pid = String::new();
        self.orders.write_all(b"\n").unwrap();
        self.pids.read_line(&mut pid).unwrap();
        Pid::from_raw(pid.trim().parse().unwrap()).unwrap()
    }
}

/// Whether there is a running process `pid`.
pub(crate) fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

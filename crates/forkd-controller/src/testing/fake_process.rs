//! A process in the place of a monitor: it has a real pid and real children, and a thread of the test answers for it.

use std::fs::File;
use std::io::{BufRead, BufReader, Read, Write};
use std::process::{Child, Command, Stdio};

use rustix::fs::{CWD, Mode};
use rustix::process::Pid;

/// For each line, which is a folder, forks a child that does the same as this process, with its orders and its answers
/// in two FIFOs of that folder. Writes the pid of each.
const SCRIPT: &str = r#"
serve() {
    while read line; do
        (serve < "$line/orders" > "$line/pids") &
        echo $!
    done
}
serve
"#;

/// Makes a process of [`Shell::start`] fork.
pub(crate) struct Shell {
    orders: Box<dyn Write + Send>,
    pids: BufReader<Box<dyn Read + Send>>,
}

impl Shell {
    /// Starts a process that forks on [`Shell::fork`], and runs until it is killed or this is dropped.
    pub(crate) fn start() -> (Child, Shell) {
        let mut process = Command::new("sh")
            .args(["-c", SCRIPT])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::null())
            .spawn()
            .unwrap();
        let orders = process.stdin.take().unwrap();
        let pids = process.stdout.take().unwrap();
        (process, Shell::of(orders, pids))
    }

    fn of(orders: impl Write + Send + 'static, pids: impl Read + Send + 'static) -> Shell {
        Shell { orders: Box::new(orders), pids: BufReader::new(Box::new(pids)) }
    }

    /// Forks a child that does nothing, and that can fork, too.
    pub(crate) fn fork(&mut self) -> (Pid, Shell) {
        let folder = tempfile::tempdir().unwrap();
        let [orders, pids] = ["orders", "pids"].map(|name| folder.path().join(name));
        for path in [&orders, &pids] {
            rustix::fs::mkfifoat(CWD, path, Mode::RUSR | Mode::WUSR).unwrap();
        }
        let mut pid = String::new();
        self.orders.write_all(format!("{}\n", folder.path().display()).as_bytes()).unwrap();
        self.orders.flush().unwrap();
        self.pids.read_line(&mut pid).unwrap();
        let pid = Pid::from_raw(pid.trim().parse().unwrap()).unwrap();
        // In the order in which the child opens them.
        let orders = File::options().write(true).open(orders).unwrap();
        (pid, Shell::of(orders, File::open(pids).unwrap()))
    }
}

/// Whether there is a running process `pid`.
pub(crate) fn runs(pid: i32) -> bool {
    std::fs::read_to_string(format!("/proc/{pid}/stat")).is_ok_and(|stat| !stat.contains(") Z "))
}

//! Requests to a daemon with checks of the responses, and guests whose state is visible from outside.

use forkd_vmm::guest_code;
use serde_json::Value;

use crate::daemon::{Daemon, eventually};

guest_code! {
    /// Prints A to Z over and over, a line with one letter every few milliseconds. Reports that it is ready whenever
    /// the VM generation id has changed: at its start, and in every child.
    pub(crate) fn spells,
    "xor ebx, ebx",
    "mov r8d, 65",
    "2: mov rax, qword ptr [0xe8000]",
    "cmp rax, rbx",
    "je 3f",
    "mov rbx, rax",
    "mov edx, 0x602",
    "out dx, al",
    "3: mov eax, r8d",
    "mov edx, 0x3f8",
    "out dx, al",
    "mov al, 10",
    "out dx, al",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "mov rsi, rax",
    "4: pause",
    "mov rax, qword ptr [0xe8000]",
    "cmp rax, rbx",
    "jne 5f",
    "rdtsc",
    "shl rdx, 32",
    "or rax, rdx",
    "sub rax, rsi",
    "cmp rax, 0x1000000",
    "jb 4b",
    "5: inc r8d",
    "cmp r8d, 91",
    "jb 2b",
    "mov r8d, 65",
    "jmp 2b",
}

guest_code! {
    /// Reports that it is ready once, and never in a child.
    pub(crate) fn is_mute,
    "mov edx, 0x602",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

impl Daemon {
    /// A daemon with the two guests above as `kernel` and `mute`.
    pub(crate) fn spelling() -> Option<Daemon> {
        Daemon::start(&[("kernel", spells()), ("mute", is_mute())])
    }

    /// Sends a request that must succeed with this status.
    pub(crate) fn done(&self, status: u16, method: &str, path: &str, body: Option<Value>) -> Value {
        let (got, answer) = self.request(method, path, body);
        assert_eq!(got, status, "{method} {path}: {answer}\n{}", self.log());
        answer
    }

    /// Sends a request that must fail with this status and this code.
    pub(crate) fn refused(
        &self,
        status: u16,
        code: &str,
        method: &str,
        path: &str,
        body: Option<Value>,
    ) -> Value {
        let (got, answer) = self.request(method, path, body);
        assert_eq!(got, status, "{method} {path}: {answer}\n{}", self.log());
        assert_eq!(answer["code"], code, "{method} {path}: {answer}");
        assert!(answer["request_id"].as_str().is_some_and(|id| !id.is_empty()), "{answer}");
        answer
    }

    pub(crate) fn sandbox(&self, id: &str) -> Value {
        self.done(200, "GET", &format!("/v1/sandboxes/{id}"), None)
    }

    /// The pid of the template of `tag`.
    pub(crate) fn template_of(&self, tag: &str) -> i32 {
        let info = self.done(200, "GET", &format!("/v1/snapshots/{tag}"), None);
        info["template"]["pid"].as_i64().unwrap() as i32
    }

    /// The console output of a guest.
    pub(crate) fn printed(&self, id: &str) -> String {
        let console = self.place("sandboxes").join(id).join("console.log");
        std::fs::read_to_string(console).unwrap_or_default()
    }

    /// The first letter from a guest of [`spells`]: it shows the instant of the fork.
    pub(crate) fn first_letter(&self, id: &str) -> char {
        eventually("a letter", || !self.printed(id).is_empty());
        self.printed(id).chars().next().unwrap()
    }

    /// Kills the daemon at once, even while it answers a request.
    pub(crate) fn pull_the_plug(&self) {
        let pid = rustix::process::Pid::from_raw(self.child.id() as i32).unwrap();
        rustix::process::kill_process(pid, rustix::process::Signal::KILL).unwrap();
    }
}

/// How many live children process `pid` has.
pub(crate) fn children_of(pid: i32) -> usize {
    let parent = |stat: &str| -> Option<i32> { stat.rsplit_once(") ")?.1.split(' ').nth(1)?.parse().ok() };
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let stats = processes.filter_map(|entry| std::fs::read_to_string(entry.path().join("stat")).ok());
    stats.filter(|stat| !stat.contains(") Z ") && parent(stat) == Some(pid)).count()
}

pub(crate) fn id(info: &Value) -> String {
    info["id"].as_str().unwrap().to_owned()
}

/// A route of a sandbox.
pub(crate) fn route(info: &Value, verb: &str) -> String {
    format!("/v1/sandboxes/{}/{verb}", id(info))
}

//! The same fan-out with Firecracker, for comparison: one snapshot, `n` processes that each load it.
//!
//! A child's time is counted as everywhere else: from the moment of asking for all of them until that child's
//! guest has written to its serial console. Firecracker is driven over its API sockets, as its documentation
//! has it; the processes run without its jailer.

use std::fs::{self, File};
use std::io::{Read, Write};
use std::os::unix::fs::FileExt;
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::time::{Duration, Instant};

use forkd_vmm::{asm_guest, guest_code};
use serde_json::{Value, json};

use crate::burst::Burst;
use crate::host::{self, MEMORY_SAMPLE};
use crate::{Error, Result, system};

/// The guest's output, which is in no log.
const WORD: u8 = 0x07;
/// How long one process may take for everything.
const LIMIT: Duration = Duration::from_secs(60);
/// Threads that only wait need little.
const STACK: usize = 64 << 10;

/// Where the guest looks for the flag: its address, which is also the place in the snapshot's memory file. Nothing
/// else of the guest or of Firecracker lies there.
pub const FLAG: u64 = 0x20_0000;

guest_code! {
    /// Writes a byte and waits for the flag, which only the snapshot's memory file has. So only children come
    /// to its end, where they write the byte again and sleep. Firecracker changes the generation id of a
    /// child, too, but not at an address that holds for every version.
    fn byte_again_in_every_clone,
    "mov edx, 0x3f8",
    "mov al, 7",
    "out dx, al",
    "2: pause",
    "cmp qword ptr [0x200000], 0",
    "je 2b",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

// The code above spells it out.
const _: () = assert!(FLAG == 0x20_0000 && WORD == 7);

/// The guest as a kernel file.
pub fn kernel() -> Vec<u8> {
    asm_guest::elf_kernel(byte_again_in_every_clone())
}

/// Writes the flag into a snapshot's memory file: every guest that is loaded from it finds the flag.
pub fn raise_flag(memory: &Path) -> Result<()> {
    let failed = || format!("write the flag into {}", memory.display());
    let file = File::options().write(true).open(memory).map_err(system(failed()))?;
    let length = file.metadata().map_err(system(failed()))?.len();
    if length < FLAG + 8 {
        return Err(Error::Invalid(format!(
            "{} has {length} bytes, fewer than the guest's memory: this Firecracker writes another kind of file",
            memory.display()
        )));
    }
    file.write_all_at(&1u64.to_le_bytes(), FLAG).map_err(system(failed()))
}

guest_code! {
    /// Makes its pages dirty, writes a byte, and goes on rewriting them; steered by the numbers that follow
    /// the code, see [`crate::writer`]. Its monitor puts boot tables where forkd's are, and the hole for
    /// devices, too.
    fn byte_and_writes_on,
    "mov edi, 0xa008",
    "mov eax, 0xc003",
    "2: mov qword ptr [rdi], rax",
    "add edi, 8",
    "add eax, 0x1000",
    "cmp edi, 0xa028",
    "jne 2b",
    "mov edi, 0xc000",
    "mov eax, 0x40000083",
    "2: mov qword ptr [rdi], rax",
    "add edi, 8",
    "add rax, 0x200000",
    "cmp edi, 0x10000",
    "jne 2b",
    "lea r12, [rip + 9f]",
    "mov r8, qword ptr [r12 + 24]",
    "mov edx, 0x3f8",
    "xor r13d, r13d",
    "3: inc r13",
    "test r8, r8",
    "jz 6f",
    "mov edi, 0x200000",
    "mov rcx, qword ptr [r12]",
    "call 8f",
    "mov rdi, qword ptr [r12 + 8]",
    "mov rcx, qword ptr [r12 + 16]",
    "call 8f",
    // Once, after the first time.
    "6: cmp r13, 1",
    "jne 3b",
    "mov al, 7",
    "out dx, al",
    "jmp 3b",
    "7: mov qword ptr [rdi], r13",
    "add rdi, r8",
    "8: cmp rdi, rcx",
    "jb 7b",
    "ret",
    ".balign 8",
    "9:",
}

/// Which snapshot is taken.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum SnapshotKind {
    /// All of memory.
    Full,
    /// What was written since the last one.
    Diff,
}

impl SnapshotKind {
    /// As in results.
    pub fn name(self) -> &'static str {
        match self {
            SnapshotKind::Full => "firecracker_full",
            SnapshotKind::Diff => "firecracker_diff",
        }
    }
}

/// A guest of Firecracker's that keeps writing, to be snapshot while it runs.
#[derive(Debug)]
pub struct Writing {
    process: Process,
    firecracker: Firecracker,
}

impl Writing {
    /// Boots one that keeps writing to a page every `distance` bytes, and waits until it has written to all
    /// of them. Files go to `folder`.
    pub fn boot(program: &Path, folder: &Path, mem_mib: u64, distance: u64) -> Result<Writing> {
        let firecracker = Firecracker { program: program.to_owned(), folder: folder.to_owned() };
        let kernel = folder.join("writer");
        let code = crate::writer::with_numbers(byte_and_writes_on(), mem_mib, &[distance]);
        fs::write(&kernel, asm_guest::elf_kernel(&code))
            .map_err(system(format!("write {}", kernel.display())))?;
        let mut process = firecracker.process("writing")?;
        process.request("PUT", "/boot-source", &json!({ "kernel_image_path": kernel, "boot_args": "" }))?;
        let machine = json!({ "vcpu_count": 1, "mem_size_mib": mem_mib, "track_dirty_pages": true });
        process.request("PUT", "/machine-config", &machine)?;
        process.request("PUT", "/actions", &json!({ "action_type": "InstanceStart" }))?;
        process.await_word()?;
        Ok(Writing { process, firecracker })
    }

    /// Takes a snapshot; returns how long the guest stood still for it, in milliseconds.
    pub fn snapshot(&self, kind: SnapshotKind) -> Result<f64> {
        let kind = if kind == SnapshotKind::Full { "Full" } else { "Diff" };
        let Firecracker { folder, .. } = &self.firecracker;
        let (state, memory) = (folder.join("writing-state"), folder.join(format!("writing-{kind}")));
        let files = json!({ "snapshot_type": kind, "snapshot_path": state, "mem_file_path": memory });
        let begin = Instant::now();
        self.process.request("PATCH", "/vm", &json!({ "state": "Paused" }))?;
        self.process.request("PUT", "/snapshot/create", &files)?;
        self.process.request("PATCH", "/vm", &json!({ "state": "Resumed" }))?;
        let took = begin.elapsed().as_secs_f64() * 1e3;
        // The next one begins with a new file, too.
        for path in [state, memory] {
            let _ = fs::remove_file(path);
        }
        Ok(took)
    }
}

/// A snapshot to load children from.
#[derive(Debug)]
pub struct Firecracker {
    program: PathBuf,
    folder: PathBuf,
}

impl Firecracker {
    /// Boots the guest, waits until it runs, and snapshots it into `folder`.
    pub fn snapshot(program: &Path, folder: &Path, mem_mib: u64) -> Result<Firecracker> {
        let snapshot = Firecracker { program: program.to_owned(), folder: folder.to_owned() };
        let kernel = folder.join("kernel");
        fs::write(&kernel, self::kernel()).map_err(system(format!("write {}", kernel.display())))?;
        let mut parent = snapshot.process("parent")?;
        parent.request("PUT", "/boot-source", &json!({ "kernel_image_path": kernel, "boot_args": "" }))?;
        parent.request("PUT", "/machine-config", &json!({ "vcpu_count": 1, "mem_size_mib": mem_mib }))?;
        parent.request("PUT", "/actions", &json!({ "action_type": "InstanceStart" }))?;
        parent.await_word()?;
        parent.request("PATCH", "/vm", &json!({ "state": "Paused" }))?;
        let files = json!({
            "snapshot_type": "Full", "snapshot_path": snapshot.state(), "mem_file_path": snapshot.memory(),
        });
        parent.request("PUT", "/snapshot/create", &files)?;
        // The parent does not see it: its memory is not the file.
        raise_flag(&snapshot.memory())?;
        Ok(snapshot)
    }

    /// Loads `n` children at once; they stay alive until the last has answered.
    pub fn burst(&self, n: usize) -> Result<Burst> {
        allow_descriptors();
        let load = json!({
            "snapshot_path": self.state(), "resume_vm": true,
            "mem_backend": { "backend_type": "File", "backend_path": self.memory() },
        });
        let available = host::available_kib();
        let asked = Instant::now();
        let one = |index: usize| -> Result<(Process, f64)> {
            let mut process = self.process(&format!("child-{index}"))?;
            process.request("PUT", "/snapshot/load", &load)?;
            process.await_word()?;
            Ok((process, asked.elapsed().as_secs_f64() * 1e3))
        };
        let outcomes: Vec<Result<(Process, f64)>> = std::thread::scope(|scope| {
            let spawn = |index| {
                let builder = std::thread::Builder::new().stack_size(STACK);
                builder.spawn_scoped(scope, move || one(index)).map_err(system("start a thread"))
            };
            let threads: Vec<_> = (0..n).map(spawn).collect();
            let join = |thread: Result<std::thread::ScopedJoinHandle<'_, _>>| {
                thread?.join().unwrap_or_else(|_| Err(Error::Invalid("a thread panicked".into())))
            };
            threads.into_iter().map(join).collect()
        });
        let mut burst = Burst { asked: n, ..Burst::default() };
        let mut children = Vec::new();
        for outcome in outcomes {
            match outcome {
                Ok((process, ms)) => {
                    burst.times_ms.push(ms);
                    children.push(process);
                }
                Err(error) => burst.errors.push(error.to_string()),
            }
        }
        burst.all_ms = burst.times_ms.iter().copied().fold(0.0, f64::max);
        burst.host_kib = host::difference_per_child(available, host::available_kib(), children.len());
        burst.memory =
            host::memory_of(children.iter().take(MEMORY_SAMPLE).map(|process| process.child.id() as i32));
        Ok(burst)
    }

    fn state(&self) -> PathBuf {
        self.folder.join("state")
    }

    fn memory(&self) -> PathBuf {
        self.folder.join("memory")
    }

    fn process(&self, name: &str) -> Result<Process> {
        let socket = self.folder.join(name).with_extension("sock");
        let failed = || format!("start {}", self.program.display());
        let errors = File::create(self.folder.join("log")).map_err(system(failed()))?;
        let mut command = Command::new(&self.program);
        command.arg("--api-sock").arg(&socket).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(errors);
        let mut child = command.spawn().map_err(system(failed()))?;
        let output = child.stdout.take().ok_or_else(|| Error::Invalid("a process without output".into()))?;
        Ok(Process { child, socket, output, begin: Instant::now() })
    }
}

/// A Firecracker; killed when dropped.
#[derive(Debug)]
struct Process {
    child: Child,
    socket: PathBuf,
    output: ChildStdout,
    begin: Instant,
}

impl Process {
    /// One call of its API, which has to succeed.
    fn request(&self, method: &str, path: &str, body: &Value) -> Result<()> {
        let failed = || format!("ask Firecracker for {path}");
        let mut stream = self.connect()?;
        stream.set_read_timeout(Some(LIMIT)).map_err(system(failed()))?;
        let body = body.to_string();
        let head = format!(
            "{method} {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\nContent-Length: {}\r\n\r\n",
            body.len()
        );
        stream.write_all((head + &body).as_bytes()).map_err(system(failed()))?;
        // An answer is shorter than this, and comes in one piece; its status is at its front.
        let mut answer = [0; 4096];
        let count = stream.read(&mut answer).map_err(system(failed()))?;
        check(path, &answer[..count])
    }

    /// Connects as soon as its socket is there.
    fn connect(&self) -> Result<UnixStream> {
        loop {
            match UnixStream::connect(&self.socket) {
                Ok(stream) => return Ok(stream),
                Err(error) if self.begin.elapsed() > LIMIT => {
                    return Err(system("connect to Firecracker's API socket")(error));
                }
                Err(_) => std::thread::sleep(Duration::from_micros(500)),
            }
        }
    }

    /// Waits until the guest has written its byte.
    fn await_word(&mut self) -> Result<()> {
        let mut bytes = [0; 512];
        loop {
            let silent =
                || Error::Invalid(format!("the guest in Firecracker is silent for {} s", LIMIT.as_secs()));
            let left = LIMIT.checked_sub(self.begin.elapsed()).ok_or_else(silent)?;
            let patience = rustix::event::Timespec { tv_sec: left.as_secs() as i64 + 1, tv_nsec: 0 };
            let mut ready = [rustix::event::PollFd::new(&self.output, rustix::event::PollFlags::IN)];
            rustix::event::poll(&mut ready, Some(&patience)).map_err(system("wait for the guest"))?;
            if ready[0].revents().is_empty() {
                return Err(silent());
            }
            let count = self.output.read(&mut bytes).map_err(system("read the guest's console"))?;
            if count == 0 {
                return Err(Error::Invalid("Firecracker ended before its guest said anything".into()));
            }
            if bytes[..count].contains(&WORD) {
                return Ok(());
            }
        }
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = fs::remove_file(&self.socket);
    }
}

/// Whether an answer's status is a success.
fn check(path: &str, answer: &[u8]) -> Result<()> {
    let text = String::from_utf8_lossy(answer);
    let status = text.strip_prefix("HTTP/1.1 ").and_then(|rest| rest.get(..3));
    match status {
        Some(status) if status.starts_with('2') => Ok(()),
        _ => Err(Error::Invalid(format!("Firecracker refused {path}: {}", text.trim()))),
    }
}

/// Each child takes a descriptor here, and the usual limit is lower than the most children.
fn allow_descriptors() {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    // Children that do not fit are reported as such.
    let _ = setrlimit(Resource::Nofile, Rlimit { current: limit.maximum, ..limit });
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::PermissionsExt;

    #[test]
    fn only_a_status_of_success_is_success() {
        assert!(check("/vm", b"HTTP/1.1 204 No Content\r\n\r\n").is_ok());
        for answer in ["HTTP/1.1 400 Bad Request\r\n\r\n{\"fault_message\":\"x\"}", "", "nonsense"] {
            assert!(check("/vm", answer.as_bytes()).is_err(), "{answer}");
        }
    }

    /// A program that speaks as little of Firecracker's API as the burst needs. Its guest has a memory file and
    /// answers in a child only when it finds the flag there.
    const STAND_IN: &str = r#"#!/usr/bin/env python3
import os, socket, sys
memory = os.path.join(os.path.dirname(sys.argv[2]), "memory")
listener = socket.socket(socket.AF_UNIX)
listener.bind(sys.argv[2])
listener.listen()
while True:
    stream = listener.accept()[0]
    request = stream.recv(65536).decode()
    if "/snapshot/create" in request:
        os.truncate(os.open(memory, os.O_CREAT | os.O_WRONLY), 512 << 20)
    if "/snapshot/load" in request and "child-1." in sys.argv[2]:
        stream.sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")
        continue
    stream.sendall(b"HTTP/1.1 204 No Content\r\n\r\n")
    flagged = "/snapshot/load" in request and any(os.pread(os.open(memory, os.O_RDONLY), 8, 0x200000))
    if "/actions" in request or flagged:
        os.write(1, b"a log line\n\x07")
"#;

    #[test]
    fn a_snapshot_is_timed_from_pause_to_resume_and_leaves_no_files() {
        let folder = tempfile::tempdir().unwrap();
        let program = stand_in(folder.path());
        let writing = Writing::boot(&program, folder.path(), 512, 4096).unwrap();
        for kind in [SnapshotKind::Full, SnapshotKind::Diff] {
            assert!(writing.snapshot(kind).unwrap() > 0.0);
        }
        assert!(!folder.path().join("writing-state").exists());
    }

    #[test]
    fn the_flag_is_in_the_file_where_the_guest_looks_and_nothing_else_changes() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("memory");
        let before = vec![7u8; (FLAG + 4096) as usize];
        fs::write(&memory, &before).unwrap();
        raise_flag(&memory).unwrap();
        let after = fs::read(&memory).unwrap();
        let flag = FLAG as usize..FLAG as usize + 8;
        assert_eq!(after[flag.clone()], 1u64.to_le_bytes());
        assert!(after.len() == before.len() && after[..flag.start] == before[..flag.start]);
        assert!(after[flag.end..] == before[flag.end..]);
    }

    #[test]
    fn a_memory_file_without_room_for_the_flag_is_refused_and_not_grown() {
        let folder = tempfile::tempdir().unwrap();
        let memory = folder.path().join("memory");
        fs::write(&memory, "short").unwrap();
        assert!(matches!(raise_flag(&memory), Err(Error::Invalid(_))));
        assert_eq!(fs::read(&memory).unwrap(), b"short");
        assert!(matches!(raise_flag(&folder.path().join("none")), Err(Error::System { .. })));
    }

    fn stand_in(folder: &Path) -> PathBuf {
        let program = folder.join("firecracker");
        fs::write(&program, STAND_IN).unwrap();
        fs::set_permissions(&program, fs::Permissions::from_mode(0o755)).unwrap();
        program
    }

    #[test]
    fn children_that_answer_are_timed_and_those_that_do_not_are_counted() {
        let folder = tempfile::tempdir().unwrap();
        let program = stand_in(folder.path());
        let snapshot = Firecracker::snapshot(&program, folder.path(), 512).unwrap();
        let burst = snapshot.burst(3).unwrap();
        assert_eq!((burst.asked, burst.times_ms.len(), burst.errors.len()), (3, 2, 1));
        assert!(burst.errors[0].contains("/snapshot/load"), "{:?}", burst.errors);
        assert!(burst.all_ms > 0.0 && burst.memory.len() == 2);
    }
}

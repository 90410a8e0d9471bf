//! Branches as the controller takes them: requests, what comes of them, and guests that are easily branched.

#![allow(
    clippy::unwrap_used,
    dead_code,
    unreachable_pub,
    missing_docs,
    unused_imports,
    reason = "each test binary uses a part of this"
)]

use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::FileExt;

use forkd_protocol::control::{BranchConfig, Event, FdRef, Reply, Request, SaveConfig, VERSION, WaitStatus};
use forkd_vmm::{asm_guest, guest_code};

use crate::support::{Boot, Controller, Monitor, file_with, listen, open_kvm, wait_until};
pub use crate::templates::{boot_ready, fork, start};

guest_code! {
    /// Counts for ever, and reports ready at first and after each change of its generation id.
    pub fn counter,
    "mov rbx, qword ptr [0xe8000]",
    "mov dx, 0x602",
    "2: out dx, al",
    "3: inc qword ptr [0x200000]",
    "cmp qword ptr [0xe8000], rbx",
    "je 3b",
    "mov rbx, qword ptr [0xe8000]",
    "jmp 2b",
}

guest_code! {
    /// Reports ready and sleeps for ever.
    pub fn sleeper,
    "mov dx, 0x602",
    "out dx, al",
    "cli",
    "2: hlt",
    "jmp 2b",
}

/// Where [`counter`] counts.
pub const COUNTER: u64 = 0x20_0000;

/// A running guest, or `None` where there is no KVM.
pub fn run(test: &str, code: &[u8]) -> Option<(Monitor, Controller)> {
    let monitor = start(&[]);
    let boot = Boot::new(open_kvm(test)?, file_with(&asm_guest::elf_kernel(code)));
    let mut controller = monitor.attach();
    boot_ready(&boot, &mut controller);
    Some((monitor, controller))
}

/// A request to branch, with the descriptors it names and the connection that waits for the branch.
pub struct Branching {
    pub config: BranchConfig,
    pub fds: Vec<OwnedFd>,
    pub controller: Controller,
    pub folder: tempfile::TempDir,
}

impl Branching {
    /// Of a VM without disks.
    pub fn new() -> Branching {
        let folder = tempfile::tempdir().unwrap();
        let socket = folder.path().join("control.sock");
        let listener = listen(&socket);
        let controller = Controller::connect(&socket);
        controller.channel.send(&Request::Hello { version: VERSION }, &[]).unwrap();
        let config = BranchConfig { control: FdRef(0), layers: Vec::new() };
        Branching { config, fds: vec![listener], controller, folder }
    }

    /// Sends the request and takes the reply.
    pub fn run(self, source: &mut Controller) -> Result<Branch, String> {
        let Branching { config, fds, mut controller, folder } = self;
        let borrowed: Vec<_> = fds.iter().map(|fd| fd.as_fd()).collect();
        source.channel.send(&Request::Branch(config), &borrowed).unwrap();
        drop(fds);
        match source.reply_with_fds() {
            (Reply::Branched { pid, layers, .. }, mut fds) => {
                let pidfd = fds.remove(0);
                assert_eq!(layers.iter().flatten().count(), fds.len());
                let reply = controller.reply();
                assert!(matches!(reply, Reply::Hello { version: VERSION, .. }), "{reply:?}");
                Ok(Branch { pid, pidfd, layers: fds, controller, _folder: folder })
            }
            (Reply::Error { message }, _) => Err(message),
            other => panic!("{other:?}"),
        }
    }
}

/// A branch: a template with its own process. Killed when it is dropped.
pub struct Branch {
    pub pid: i32,
    pub pidfd: OwnedFd,
    /// The layers it froze.
    pub layers: Vec<OwnedFd>,
    pub controller: Controller,
    pub _folder: tempfile::TempDir,
}

impl Branch {
    pub fn kill(&self) {
        let _ = rustix::process::pidfd_send_signal(&self.pidfd, rustix::process::Signal::KILL);
    }
}

impl Drop for Branch {
    fn drop(&mut self) {
        self.kill();
    }
}

pub fn branch(source: &mut Controller) -> Branch {
    Branching::new().run(source).unwrap()
}

/// The memory of a template, as a file.
pub fn memory_of(template: &mut Controller) -> File {
    save(template).1
}

/// A template's state and memory, as files.
pub fn save(template: &mut Controller) -> (File, File) {
    static NEXT: std::sync::atomic::AtomicU32 = std::sync::atomic::AtomicU32::new(0);
    let name = format!("saver{}", NEXT.fetch_add(1, std::sync::atomic::Ordering::SeqCst));
    // Not on a disk: that would be waited for.
    let file = || File::from(rustix::fs::memfd_create("saved", rustix::fs::MemfdFlags::CLOEXEC).unwrap());
    let (state, memory) = (file(), file());
    let save = SaveConfig {
        child: name.clone(),
        state: FdRef(0),
        memory: Some(FdRef(1)),
        parent: Vec::new(),
        pagemap: None,
        disks: Vec::new(),
        progress: None,
    };
    let reply = template.request(&Request::Save(save), &[state.as_fd(), memory.as_fd()]);
    assert!(matches!(reply, Reply::Forked { .. }), "{reply:?}");
    let saved = Event::ChildEnded { child: name, status: WaitStatus::Exited(0) };
    while template.event().0 != saved {}
    (state, memory)
}

pub fn number(memory: &File, offset: u64) -> u64 {
    let mut bytes = [0; 8];
    memory.read_exact_at(&mut bytes, offset).unwrap();
    u64::from_le_bytes(bytes)
}

/// A branch of a guest that has counted beyond `count`: one that was just forked or resumed may not have run
/// yet.
pub fn branch_beyond(source: &mut Controller, count: u64) -> Branch {
    let mut beyond = None;
    wait_until("the guest does not go on counting", || {
        let mut branch = branch(source);
        let counted = number(&memory_of(&mut branch.controller), COUNTER);
        beyond = (counted > count).then_some(branch);
        beyond.is_some()
    });
    beyond.unwrap()
}

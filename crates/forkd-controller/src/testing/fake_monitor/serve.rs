//! What a fake monitor does with its connection: the answers of a real one, unless its script says otherwise.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::{Arc, MutexGuard, PoisonError};

use forkd_protocol::control::{
    BranchConfig, Channel, Child, Event, FdRef, ForkConfig, Message, Reply, Request, Role, SaveConfig,
    Status, VERSION, WaitStatus,
};
use rustix::event::{PollFd, PollFlags};
use rustix::net::{Shutdown, SocketFlags, accept_with, shutdown};
use rustix::process::{Pid, PidfdFlags, Signal, pidfd_open, pidfd_send_signal};

use super::{Act, FakeMonitor, Forked, Shared, State};
use crate::host::images::reopen;
use crate::testing::fake_guest::serve_guest;

impl Shared {
    pub(super) fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn play(self: Arc<Self>) {
        let Some(listener) = &self.listener else { return };
        while let Ok(socket) = accept_with(&**listener, SocketFlags::CLOEXEC) {
            self.talk(Channel::new(socket));
        }
    }

    /// As the kernel does when the process is gone.
    pub(super) fn close(&self) {
        if let Some(listener) = &self.listener {
            let _ = shutdown(&**listener, Shutdown::Both);
        }
        if let Some(control) = self.state().control.take() {
            let _ = shutdown(&*control, Shutdown::Both);
        }
    }

    /// Serves one connection.
    fn talk(self: &Arc<Self>, control: Channel) {
        let control = Arc::new(control);
        self.state().control = Some(control.clone());
        while let Ok(Some((request, fds))) = control.recv::<Request>() {
            {
                let mut state = self.state();
                state.requests.push(request.clone());
                state.descriptors.extend(Some(fds.len()).filter(|fds| *fds > 0));
            }
            let act = (self.script.lock().unwrap())(&request);
            match act {
                Act::Execute => self.execute(request, fds),
                Act::Answer(reply) => self.send(&Message::Reply(reply), &[]),
                Act::AnswerWith(reply, fds) => self.send(&Message::Reply(reply), &fds),
                Act::Say(messages) => messages.iter().for_each(|message| self.send(message, &[])),
                Act::Play(play) => play(&control),
                Act::Hang => {}
                Act::HangUp => break,
                Act::Die => self.die(),
            }
        }
        self.state().control = None;
        let _ = shutdown(&*control, Shutdown::Both);
    }

    pub(super) fn send(&self, message: &Message, fds: &[OwnedFd]) {
        let control = self.state().control.clone();
        let fds: Vec<_> = fds.iter().map(AsFd::as_fd).collect();
        // The daemon may be gone.
        let _ = control.map(|control| control.send(message, &fds));
    }

    fn reply(&self, reply: Reply) {
        self.send(&Message::Reply(reply), &[]);
    }

    fn execute(self: &Arc<Self>, request: Request, fds: Vec<OwnedFd>) {
        let set_running = |running| {
            let mut state = self.state();
            (state.running, state.disk_full) = (running, false);
        };
        match request {
            Request::Hello { version } => {
                self.reply(Reply::Hello { version, monitor: "fake".into(), newest: VERSION });
                let (ready, disk_full) = {
                    let state = self.state();
                    (state.ready && state.role == Role::Sandbox, state.disk_full)
                };
                if ready {
                    self.send(&Message::Event(Event::Ready), &[]);
                }
                if disk_full {
                    self.send(&Message::Event(Event::DiskFull), &[]);
                }
            }
            Request::Boot(_) => self.reply(Reply::Booted),
            Request::Freeze => {
                self.state().role = Role::Template;
                self.reply(Reply::Frozen);
            }
            Request::Load(_) => {
                self.state().role = Role::Template;
                self.reply(Reply::Loaded);
            }
            Request::Seal { .. } => {
                self.state().branched.layer = None;
                self.reply(Reply::Sealed);
            }
            Request::ReplaceLayers { .. } => self.reply(Reply::Replaced),
            Request::Pause => {
                set_running(false);
                self.reply(Reply::Paused);
            }
            Request::Resume => {
                set_running(true);
                self.reply(Reply::Resumed);
            }
            Request::Layers => {
                let layers: Vec<_> =
                    self.state().layers.iter().map(|layer| layer.try_clone().unwrap()).collect();
                let disks = vec![(0..layers.len()).map(FdRef).collect()];
                self.send(&Message::Reply(Reply::Layers { disks }), &layers);
            }
            Request::Status => {
                let status = {
                    let state = self.state();
                    Status { role: state.role, running: state.running, ready: state.ready }
                };
                self.reply(Reply::Status(status));
            }
            Request::Children => {
                let children = self.state().children.iter().map(Forked::seen).collect();
                self.reply(Reply::Children { children });
            }
            Request::Acknowledge { children } => {
                self.state().children.retain(|child| !child.ended || !children.contains(&child.name));
                self.reply(Reply::Acknowledged);
            }
            Request::Fork(config) => self.obey_fork(&config, fds),
            Request::Branch(config) => self.obey_branch(&config, fds),
            Request::Save(config) => self.obey_save(config, fds),
            Request::Merge(config) => self.done(&config.child),
            Request::Stop => {
                self.reply(Reply::Stopped);
                self.die();
            }
        }
    }

    fn obey_fork(self: &Arc<Self>, config: &ForkConfig, fds: Vec<OwnedFd>) {
        let mut fds: Vec<Option<OwnedFd>> = fds.into_iter().map(Some).collect();
        let (guest, ready) = {
            let state = self.state();
            (state.guest.clone(), state.children_are_ready)
        };
        if let (Some(FdRef(vsock)), Some(guest)) = (config.vsock, guest) {
            let listener = UnixListener::from(fds[vsock].take().unwrap());
            listener.set_nonblocking(true).unwrap();
            let _in = self.runtime.enter();
            let listener = tokio::net::UnixListener::from_std(listener).unwrap();
            self.runtime.spawn(serve_guest(listener, guest));
        }
        let control = fds.get_mut(config.control.0).and_then(Option::take);
        let child = self.fork_ready(&config.child, control, ready);
        let pidfd = child.shared.pidfd.try_clone().unwrap();
        self.send(&Message::Reply(Reply::Forked { pid: child.pid }), &[pidfd]);
    }

    fn obey_branch(self: &Arc<Self>, config: &BranchConfig, fds: Vec<OwnedFd>) {
        let (pid, shell) = self.shell.lock().unwrap().fork();
        let listener = fds.into_iter().nth(config.control.0);
        let raw = pid.as_raw_nonzero().get();
        let branch = FakeMonitor::silent(raw, shell, Role::Template, true, listener, self.runtime.clone());
        let (script, layer, process) = {
            let state = self.state();
            let layer = state.branched.layer.as_ref().map(|layer| layer.try_clone().unwrap());
            (state.branch_script, layer, state.branched.process.unwrap_or(pid))
        };
        branch.script(script);
        // It shares the frozen layer, if it was sent one.
        let shared = layer.as_ref().map(|layer| File::from(layer.try_clone().unwrap()));
        let shared = shared.filter(|layer| layer.metadata().unwrap().is_file());
        branch.shared.state().layers = shared.and_then(|layer| reopen(&layer).ok()).into_iter().collect();
        let branch = branch.start();
        self.remember("branch", &branch);
        let layers = config.layers.iter().map(|_| Some(FdRef(1))).collect();
        let pidfd = pidfd_open(process, PidfdFlags::empty()).unwrap();
        let fds: Vec<_> = [Some(pidfd), layer].into_iter().flatten().collect();
        self.send(&Message::Reply(Reply::Branched { pid: raw, pause_us: 1, layers }), &fds);
    }

    fn obey_save(&self, config: SaveConfig, fds: Vec<OwnedFd>) {
        for FdRef(file) in [Some(config.state), config.memory].into_iter().flatten() {
            File::from(fds[file].try_clone().unwrap()).write_all(&[7; 4096]).unwrap();
        }
        drop(fds);
        self.done(&config.child);
    }

    /// Has a process do something, which it has done before it is looked at.
    fn done(&self, name: &str) {
        let mut process = std::process::Command::new("true").spawn().unwrap();
        let pid = process.id() as i32;
        let pidfd = pidfd_open(Pid::from_raw(pid).unwrap(), PidfdFlags::empty()).unwrap();
        process.wait().unwrap();
        self.send(&Message::Reply(Reply::Forked { pid }), &[pidfd]);
        let ended = Event::ChildEnded { child: name.to_owned(), status: WaitStatus::Exited(0) };
        self.send(&Message::Event(ended), &[]);
    }

    pub(super) fn fork(self: &Arc<Self>, name: &str, listener: Option<OwnedFd>) -> FakeMonitor {
        self.fork_ready(name, listener, true)
    }

    fn fork_ready(self: &Arc<Self>, name: &str, listener: Option<OwnedFd>, ready: bool) -> FakeMonitor {
        let (pid, shell) = self.shell.lock().unwrap().fork();
        let pid = pid.as_raw_nonzero().get();
        let child = FakeMonitor::new(pid, shell, Role::Sandbox, ready, listener, self.runtime.clone());
        self.remember(name, &child);
        child
    }

    /// Tells the daemon when the child ends.
    fn remember(self: &Arc<Self>, name: &str, child: &FakeMonitor) {
        let pidfd = Arc::new(child.shared.pidfd.try_clone().unwrap());
        self.state().children.push(Forked {
            name: name.to_owned(),
            pid: child.pid,
            pidfd: pidfd.clone(),
            monitor: Some(child.clone()),
            status: None,
            ended: false,
        });
        let (template, name, pid) = (Arc::downgrade(self), name.to_owned(), child.pid);
        std::thread::spawn(move || {
            wait_for(&pidfd);
            let Some(template) = template.upgrade() else { return };
            let status = {
                let mut state = template.state();
                let Some(child) = state.children.iter_mut().find(|child| child.pid == pid) else { return };
                child.ended = true;
                *child.status.get_or_insert(WaitStatus::Signaled(9))
            };
            if template.state().role == Role::Template {
                template.send(&Message::Event(Event::ChildEnded { child: name, status }), &[]);
            }
        });
    }

    pub(super) fn die(&self) {
        let _ = pidfd_send_signal(&self.pidfd, Signal::KILL);
        if let Some(mut process) = self.process.lock().unwrap().take() {
            let _ = process.wait();
        }
        self.close();
    }
}

impl Forked {
    fn seen(&self) -> Child {
        Child { name: self.name.clone(), pid: self.pid, status: self.status.filter(|_| self.ended) }
    }
}

/// Returns when the process has ended.
pub(super) fn wait_for(pidfd: &OwnedFd) {
    let mut polled = [PollFd::new(pidfd, PollFlags::IN)];
    while rustix::event::poll(&mut polled, None).is_err() {}
}

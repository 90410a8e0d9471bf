//! The control thread: serves the controller, one connection after the other, in every role of the process.
//!
//! ```text
//! idle ──Boot──► sandbox ──Freeze──► template ──fork──► sandbox  (in a new process)
//!   └──────────────Load────────────────┘  └─────fork──► saver    (in a new process)
//!                sandbox ──Branch─────────────────────► template (in a new process)
//! ```
//!
//! A VM does not depend on the controller. When a connection ends, however it ends, the VM goes on and the
//! next connection is accepted. An invalid message closes its connection and nothing else. A controller that
//! connects while another one is served waits in the socket's queue.

mod branches;
mod connection;
mod guest_connections;

use std::os::fd::{AsFd, OwnedFd};

use forkd_protocol::control::{
    BootConfig, BranchConfig, EndReason, Event, FdRef, LoadConfig, Reply, Request, Role, Status, VmEnd,
};

use crate::branch::{self, Branch, Branched};
use crate::config;
use crate::event_loop::as_fd;
use crate::fork::SingleThreaded;
use crate::state::Frozen;
use crate::template::{self, ForkedChild, Template, TemplateOutcome};
use crate::vm::{Paused, Running, Vm};
use crate::{Error, Result, seccomp};
use branches::Branches;
pub(crate) use connection::ControlSocket;
use guest_connections::{Inbox, Outbox};

/// How serving ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Finish {
    /// The controller sent a stop request.
    Stopped,
    /// The VM ended by itself.
    Ended(VmEnd),
    /// This process was a saver and has saved.
    Saved,
}

/// Serves controllers that connect to `listener` until the VM has ended, or the template was stopped.
/// In a process that a template forks this goes on as whatever was forked.
pub fn serve(listener: OwnedFd, seccomp: seccomp::Mode) -> Result<Finish> {
    let mut monitor = Monitor::idle(ControlSocket::new(listener)?, seccomp)?;
    loop {
        let (alone, frozen, control) = match monitor.serve()? {
            MonitorOutcome::Finish(finish) => return Ok(finish),
            MonitorOutcome::Template(alone, frozen, control) => (alone, *frozen, control),
            MonitorOutcome::Branch(branch, source) => branch.become_template(*source)?,
        };
        let template = Template::new(alone, frozen, control)?;
        monitor = match template.serve()? {
            TemplateOutcome::Stopped => return Ok(Finish::Stopped),
            TemplateOutcome::Saver(saver) => return saver.save().map(|()| Finish::Saved),
            TemplateOutcome::Child(child) => Monitor::start_child(*child, seccomp)?,
        };
    }
}

/// The result of [`Monitor::serve`].
enum MonitorOutcome {
    Finish(Finish),
    Template(SingleThreaded, Box<Frozen>, ControlSocket),
    /// This is a new process, and the VM its source's.
    Branch(Box<branch::ForkedBranch>, Box<Running>),
}

/// The control thread of a process that waits for its VM, or runs it.
struct Monitor {
    control: ControlSocket,
    seccomp: seccomp::Mode,
    running: Option<Running>,
    branches: Branches,
    /// Whether the attached controller was sent the `Ready` event.
    ready_sent: bool,
    /// Whether the monitor itself paused the VM, because the host's disk is full.
    disk_full: bool,
    /// Whether the attached controller was sent the `DiskFull` event.
    disk_full_sent: bool,
    outbox: Outbox,
    inbox: Inbox,
}

impl Monitor {
    fn idle(control: ControlSocket, seccomp: seccomp::Mode) -> Result<Monitor> {
        let (outbox, inbox) = guest_connections::queue()?;
        Ok(Monitor {
            control,
            seccomp,
            running: None,
            branches: Branches::default(),
            ready_sent: false,
            disk_full: false,
            disk_full_sent: false,
            outbox,
            inbox,
        })
    }

    /// The monitor of a child that was just forked. Its guest runs when this returns: only then does it serve
    /// the controller, which waits in the socket's queue.
    fn start_child(child: ForkedChild, seccomp: seccomp::Mode) -> Result<Monitor> {
        template::name_process(c"forkd-sandbox");
        let mut monitor = Monitor::idle(child.control, seccomp)?;
        let outbox = monitor.outbox.clone();
        let parts = child.parts.with(Box::new(move |port, fd| outbox.offer(port, fd)));
        let vm = parts.and_then(|parts| child.frozen.thaw(parts));
        match vm.and_then(|vm| vm.start(seccomp)) {
            Ok(running) => {
                monitor.running = Some(running);
                Ok(monitor)
            }
            Err(error) => {
                let end = failure(&error);
                monitor.control.send_to_waiting(Event::Ended(end));
                Err(error)
            }
        }
    }

    fn serve(mut self) -> Result<MonitorOutcome> {
        loop {
            let ready = self.wait()?;
            // The end first: no request can change it now.
            if ready.report_event
                && let Some(end) = self.read_report()
            {
                return Ok(MonitorOutcome::Finish(self.finish(end)));
            }
            if ready.guest_connections {
                self.pass_guest_connections();
            }
            if ready.branches.contains(&true)
                && let Some(running) = &self.running
            {
                self.branches.remove_ended(&ready.branches, running.memory());
            }
            if ready.control {
                let request = self.control.step();
                self.inbox.set_attached(self.control.attached());
                self.ready_sent &= self.control.attached();
                self.disk_full_sent &= self.control.attached();
                // They may have come before the hello.
                self.send_ready();
                self.send_disk_full();
                if let Some((request, fds)) = request
                    && let Some(next) = self.answer(request, fds)
                {
                    return match next {
                        MonitorTransition::Finish(finish) => Ok(MonitorOutcome::Finish(finish)),
                        MonitorTransition::Template(alone, frozen) => {
                            Ok(MonitorOutcome::Template(alone, frozen, self.control))
                        }
                        MonitorTransition::Branch(branch, source) => {
                            // All of it is still the source's.
                            std::mem::forget(self);
                            Ok(MonitorOutcome::Branch(branch, source))
                        }
                        MonitorTransition::Failed(error) => Err(error),
                    };
                }
            }
            self.control.drop_silent();
        }
    }

    fn wait(&self) -> Result<Ready> {
        let mut others = vec![as_fd(self.inbox.event())];
        // Only a VM has branches, so they come after its event.
        others.extend(self.running.as_ref().map(|running| as_fd(running.report_event())));
        others.extend(self.branches.watched());
        let all = self.control.wait(&others)?;
        let ready = |index: usize| all.get(index).copied().unwrap_or(false);
        let branches = all.get(3..).unwrap_or_default().to_vec();
        Ok(Ready { control: ready(0), guest_connections: ready(1), report_event: ready(2), branches })
    }

    /// Reads the reports of the VM's threads. Returns the VM's end, if it has come.
    fn read_report(&mut self) -> Option<VmEnd> {
        let running = self.running.as_ref()?;
        // Read before the check: a report in between sets the event again.
        let _ = running.report_event().read();
        let end = running.end();
        let disk_full = running.take_disk_full();
        self.send_ready();
        if disk_full && end.is_none() {
            self.pause_for_room();
        }
        end
    }

    /// Pauses the VM until there is room for what the guest writes; the controller decides when. One that is
    /// paused stays so: resuming it tries the write again.
    fn pause_for_room(&mut self) {
        let Some(vm) = self.running.as_mut().filter(|vm| !vm.is_paused()) else { return };
        // A VM that has ended meanwhile needs no pause: its end is the next report.
        if vm.pause().map(Paused::keep).is_ok() {
            self.disk_full = true;
            self.disk_full_sent = false;
            self.send_disk_full();
        }
    }

    fn send_disk_full(&mut self) {
        if self.disk_full && !self.disk_full_sent {
            self.disk_full_sent = self.control.send_event(Event::DiskFull, &[]);
        }
    }

    fn send_ready(&mut self) {
        if !self.ready_sent && self.running.as_ref().is_some_and(Running::is_ready) {
            self.ready_sent = self.control.send_event(Event::Ready, &[]);
        }
    }

    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>) -> Option<MonitorTransition> {
        let reply = match request {
            Request::Boot(config) => self.boot(config, fds).map(|()| Reply::Booted),
            Request::Freeze => return self.freeze(),
            Request::Load(config) => match self.load(config, fds) {
                Ok((alone, frozen)) => {
                    self.control.reply(Reply::Loaded);
                    return Some(MonitorTransition::Template(alone, Box::new(frozen)));
                }
                Err(error) => Err(error),
            },
            Request::Branch(config) => return self.branch(config, fds),
            Request::Pause => self.vm().and_then(|vm| vm.pause().map(Paused::keep)).map(|()| {
                self.disk_full = false;
                Reply::Paused
            }),
            Request::Resume => self.vm().and_then(Running::resume).map(|()| {
                self.disk_full = false;
                Reply::Resumed
            }),
            Request::Seal { layers } => {
                self.vm().and_then(|vm| branch::seal(vm, &layers, fds)).map(|()| Reply::Sealed)
            }
            Request::ReplaceLayers { disks } => {
                self.vm().and_then(|vm| branch::replace_layers(vm, &disks, fds)).map(|()| Reply::Replaced)
            }
            Request::Fork(_)
            | Request::Save(_)
            | Request::Merge(_)
            | Request::Layers
            | Request::Children
            | Request::Acknowledge { .. } => {
                Err(Error::Config("this is no template; freeze the VM, or load a snapshot".into()))
            }
            // The handshake was served before.
            Request::Status | Request::Hello { .. } => Ok(Reply::Status(self.status())),
            Request::Stop => {
                if let Some(running) = self.running.take() {
                    running.stop();
                }
                self.control.reply(Reply::Stopped);
                return Some(MonitorTransition::Finish(Finish::Stopped));
            }
        };
        match reply {
            Ok(reply) => self.control.reply(reply),
            Err(error) => self.control.reply_error(&error),
        }
        None
    }

    fn status(&self) -> Status {
        let role = if self.running.is_some() { Role::Sandbox } else { Role::Idle };
        let ready = self.running.as_ref().is_some_and(Running::is_ready);
        let running = self.running.as_ref().is_some_and(|vm| !vm.is_paused());
        Status { role, running, ready }
    }

    /// The VM, if there is one.
    fn vm(&mut self) -> Result<&mut Running> {
        self.running.as_mut().ok_or_else(|| Error::Config("there is no VM; boot one".into()))
    }

    fn branch(&mut self, config: BranchConfig, fds: Vec<OwnedFd>) -> Option<MonitorTransition> {
        let branched = self.vm().and_then(|vm| branch::branch(vm, config, fds));
        match branched {
            Ok(Branched::Source(branch)) => {
                self.answer_branched(&branch);
                // The VM runs and the controller has its answer: this holds up neither.
                if let Some(vm) = &self.running {
                    self.branches.add(branch.pidfd, vm.memory());
                }
            }
            // This is another process now.
            Ok(Branched::Branch(branch)) => {
                return self.running.take().map(|source| MonitorTransition::Branch(branch, Box::new(source)));
            }
            Err(error) => self.control.reply_error(&error),
        }
        None
    }

    fn answer_branched(&mut self, branch: &Branch) {
        let mut fds = vec![branch.pidfd.as_fd()];
        let mut layers = Vec::with_capacity(branch.layers.len());
        for layer in &branch.layers {
            layers.push(layer.as_ref().map(|_| FdRef(fds.len())));
            fds.extend(layer.as_ref().map(AsFd::as_fd));
        }
        let pause_us = u64::try_from(branch.pause.as_micros()).unwrap_or(u64::MAX);
        self.control.reply_with(Reply::Branched { pid: branch.pid, pause_us, layers }, &fds);
    }

    fn boot(&mut self, config: BootConfig, fds: Vec<OwnedFd>) -> Result<()> {
        self.must_be_idle()?;
        let outbox = self.outbox.clone();
        let parts = config::resolve(config, fds, Box::new(move |port, fd| outbox.offer(port, fd)))?;
        template::name_process(c"forkd-sandbox");
        self.running = Some(Vm::build(parts)?.start(self.seccomp)?);
        self.branches = Branches::of_booted();
        Ok(())
    }

    fn load(&self, config: LoadConfig, fds: Vec<OwnedFd>) -> Result<(SingleThreaded, Frozen)> {
        self.must_be_idle()?;
        let frozen = template::load(config, fds)?;
        Ok((SingleThreaded::check()?, frozen))
    }

    fn must_be_idle(&self) -> Result<()> {
        if self.running.is_none() {
            return Ok(());
        }
        Err(Error::Config("this monitor runs a VM already; start another monitor".into()))
    }

    fn freeze(&mut self) -> Option<MonitorTransition> {
        let Some(running) = self.running.take() else {
            let error = Error::Config("there is no VM to freeze; boot one".into());
            self.control.reply_error(&error);
            return None;
        };
        match running.freeze().and_then(|frozen| Ok((SingleThreaded::check()?, frozen))) {
            Ok((alone, frozen)) => {
                self.control.reply(Reply::Frozen);
                Some(MonitorTransition::Template(alone, Box::new(frozen)))
            }
            // The VM is neither running nor frozen: there is nothing to go on with.
            Err(error) => {
                self.control.reply_error(&error);
                self.control.send_event(Event::Ended(failure(&error)), &[]);
                Some(MonitorTransition::Failed(error))
            }
        }
    }

    /// Passes connections of the guest on to the controller. Without a controller, closes them.
    fn pass_guest_connections(&mut self) {
        for (port, fd) in self.inbox.take() {
            self.control.send_event(Event::GuestConnection { port }, &[fd.as_fd()]);
        }
    }

    fn finish(mut self, end: VmEnd) -> Finish {
        if let Some(running) = self.running.take() {
            running.stop();
        }
        self.control.send_event(Event::Ended(end.clone()), &[]);
        Finish::Ended(end)
    }
}

/// The reasons why the control thread woke up.
struct Ready {
    control: bool,
    guest_connections: bool,
    report_event: bool,
    /// For each branch that is watched, whether it has ended.
    branches: Vec<bool>,
}

/// The effect of a request on the process.
enum MonitorTransition {
    Finish(Finish),
    Template(SingleThreaded, Box<Frozen>),
    Branch(Box<branch::ForkedBranch>, Box<Running>),
    Failed(Error),
}

/// The end of a VM that the monitor could not go on with.
pub(crate) fn failure(error: &Error) -> VmEnd {
    VmEnd { reason: EndReason::Failed, detail: error.chain(), console_tail: String::new() }
}

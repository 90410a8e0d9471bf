//! The control thread: serves the controller, one connection after the other, whatever the process is
//! by now.
//!
//! ```text
//! idle ──Boot──► sandbox ──Freeze──► template ──fork──► sandbox  (in a new process)
//!   └──────────────Load────────────────┘  └─────fork──► saver    (in a new process)
//!                sandbox ──Branch─────────────────────► template (in a new process)
//! ```
//!
//! A VM does not depend on the controller. When a connection ends, however it ends, the VM goes on and
//! the next connection is accepted. What cannot be understood closes its connection and nothing else. A
//! controller that connects while another one is served waits in the socket's queue.

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
use crate::template::{self, Newborn, Template};
use crate::vm::{Paused, Running, Vm};
use crate::{Error, Result, seccomp};
use branches::Branches;
pub(crate) use connection::Controllers;
use guest_connections::{Inbox, Outbox};

/// How serving ended.
#[derive(Debug, PartialEq, Eq)]
pub enum Finish {
    /// The controller said stop.
    Stopped,
    /// The VM ended by itself.
    Ended(VmEnd),
    /// This process was a saver and has saved.
    Saved,
}

/// Serves controllers that connect to `listener` until the VM has ended, or the template was stopped.
/// In a process that a template forks this goes on as whatever was forked.
pub fn serve(listener: OwnedFd, seccomp: seccomp::Mode) -> Result<Finish> {
    let mut monitor = Monitor::idle(Controllers::new(listener)?, seccomp)?;
    loop {
        let (alone, frozen, controllers) = match monitor.serve()? {
            Outcome::Finish(finish) => return Ok(finish),
            Outcome::Template(alone, frozen, controllers) => (alone, *frozen, controllers),
            Outcome::Branch(newborn, source) => newborn.settle(*source)?,
        };
        let template = Template::new(alone, frozen, controllers)?;
        monitor = match template.serve()? {
            template::Outcome::Stopped => return Ok(Finish::Stopped),
            template::Outcome::Saver(saver) => return saver.save().map(|()| Finish::Saved),
            template::Outcome::Child(newborn) => Monitor::born(*newborn, seccomp)?,
        };
    }
}

/// What comes after [`Monitor::serve`].
enum Outcome {
    Finish(Finish),
    Template(SingleThreaded, Box<Frozen>, Controllers),
    /// This is a new process, and the VM its source's.
    Branch(Box<branch::Newborn>, Box<Running>),
}

/// The control thread of a process that waits for its VM, or runs it.
struct Monitor {
    controllers: Controllers,
    seccomp: seccomp::Mode,
    running: Option<Running>,
    branches: Branches,
    /// Whether the controller that is attached was told that the guest is ready.
    ready_told: bool,
    /// Whether the monitor itself paused the VM, because the host's disk is full.
    disk_full: bool,
    /// Whether the controller that is attached was told so.
    disk_full_told: bool,
    outbox: Outbox,
    inbox: Inbox,
}

impl Monitor {
    fn idle(controllers: Controllers, seccomp: seccomp::Mode) -> Result<Monitor> {
        let (outbox, inbox) = guest_connections::queue()?;
        Ok(Monitor {
            controllers,
            seccomp,
            running: None,
            branches: Branches::default(),
            ready_told: false,
            disk_full: false,
            disk_full_told: false,
            outbox,
            inbox,
        })
    }

    /// The monitor of a child that was just forked. Its guest runs when this returns: only then is there
    /// time for the controller, who waits in the socket's queue.
    fn born(newborn: Newborn, seccomp: seccomp::Mode) -> Result<Monitor> {
        template::name_process(c"forkd-sandbox");
        let mut monitor = Monitor::idle(newborn.controllers, seccomp)?;
        let outbox = monitor.outbox.clone();
        let parts = newborn.parts.with(Box::new(move |port, fd| outbox.offer(port, fd)));
        let vm = parts.and_then(|parts| newborn.frozen.thaw(parts));
        match vm.and_then(|vm| vm.start(seccomp)) {
            Ok(running) => {
                monitor.running = Some(running);
                Ok(monitor)
            }
            Err(error) => {
                let end = failure(&error);
                monitor.controllers.tell_unasked(Event::Ended(end));
                Err(error)
            }
        }
    }

    fn serve(mut self) -> Result<Outcome> {
        loop {
            let ready = self.wait()?;
            // The end first: nothing said now can change it.
            if ready.news
                && let Some(end) = self.look_at_news()
            {
                return Ok(Outcome::Finish(self.finish(end)));
            }
            if ready.guest_connections {
                self.pass_guest_connections();
            }
            if ready.branches.contains(&true)
                && let Some(running) = &self.running
            {
                self.branches.forget(&ready.branches, running.memory());
            }
            if ready.control {
                let request = self.controllers.step();
                self.inbox.set_attached(self.controllers.attached());
                self.ready_told &= self.controllers.attached();
                self.disk_full_told &= self.controllers.attached();
                // They may have come before the hello.
                self.tell_ready();
                self.tell_disk_full();
                if let Some((request, fds)) = request
                    && let Some(next) = self.answer(request, fds)
                {
                    return match next {
                        Next::Finish(finish) => Ok(Outcome::Finish(finish)),
                        Next::Template(alone, frozen) => {
                            Ok(Outcome::Template(alone, frozen, self.controllers))
                        }
                        Next::Branch(newborn, source) => {
                            // All of it is still the source's.
                            std::mem::forget(self);
                            Ok(Outcome::Branch(newborn, source))
                        }
                        Next::Failed(error) => Err(error),
                    };
                }
            }
            self.controllers.drop_silent();
        }
    }

    fn wait(&self) -> Result<Ready> {
        let mut others = vec![as_fd(self.inbox.event())];
        // Only a VM has branches, so they come after its news.
        others.extend(self.running.as_ref().map(|running| as_fd(running.news())));
        others.extend(self.branches.watched());
        let all = self.controllers.wait(&others)?;
        let ready = |index: usize| all.get(index).copied().unwrap_or(false);
        let branches = all.get(3..).unwrap_or_default().to_vec();
        Ok(Ready { control: ready(0), guest_connections: ready(1), news: ready(2), branches })
    }

    /// Looks at what the VM's threads have to tell. Returns the VM's end, if it has come.
    fn look_at_news(&mut self) -> Option<VmEnd> {
        let running = self.running.as_ref()?;
        // Read before looking: what is told in between is told again.
        let _ = running.news().read();
        let end = running.end();
        let disk_full = running.take_disk_full();
        self.tell_ready();
        if disk_full && end.is_none() {
            self.pause_for_room();
        }
        end
    }

    /// Pauses the VM until there is room for what the guest writes; the controller decides when. One that is
    /// paused stays so: resuming it tries the write again.
    fn pause_for_room(&mut self) {
        let Some(vm) = self.running.as_mut().filter(|vm| !vm.is_paused()) else { return };
        // A VM that has ended meanwhile needs no pause: its end is the next news.
        if vm.pause().map(Paused::keep).is_ok() {
            self.disk_full = true;
            self.disk_full_told = false;
            self.tell_disk_full();
        }
    }

    fn tell_disk_full(&mut self) {
        if self.disk_full && !self.disk_full_told {
            self.disk_full_told = self.controllers.tell(Event::DiskFull, &[]);
        }
    }

    fn tell_ready(&mut self) {
        if !self.ready_told && self.running.as_ref().is_some_and(Running::is_ready) {
            self.ready_told = self.controllers.tell(Event::Ready, &[]);
        }
    }

    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>) -> Option<Next> {
        let reply = match request {
            Request::Boot(config) => self.boot(config, fds).map(|()| Reply::Booted),
            Request::Freeze => return self.freeze(),
            Request::Load(config) => match self.load(config, fds) {
                Ok((alone, frozen)) => {
                    self.controllers.reply(Reply::Loaded);
                    return Some(Next::Template(alone, Box::new(frozen)));
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
                self.controllers.reply(Reply::Stopped);
                return Some(Next::Finish(Finish::Stopped));
            }
        };
        match reply {
            Ok(reply) => self.controllers.reply(reply),
            Err(error) => self.controllers.reply_error(&error),
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

    fn branch(&mut self, config: BranchConfig, fds: Vec<OwnedFd>) -> Option<Next> {
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
            Ok(Branched::Branch(newborn)) => {
                return self.running.take().map(|source| Next::Branch(newborn, Box::new(source)));
            }
            Err(error) => self.controllers.reply_error(&error),
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
        self.controllers.reply_with(Reply::Branched { pid: branch.pid, pause_us, layers }, &fds);
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

    fn freeze(&mut self) -> Option<Next> {
        let Some(running) = self.running.take() else {
            let error = Error::Config("there is no VM to freeze; boot one".into());
            self.controllers.reply_error(&error);
            return None;
        };
        match running.freeze().and_then(|frozen| Ok((SingleThreaded::check()?, frozen))) {
            Ok((alone, frozen)) => {
                self.controllers.reply(Reply::Frozen);
                Some(Next::Template(alone, Box::new(frozen)))
            }
            // The VM is neither running nor frozen: there is nothing to go on with.
            Err(error) => {
                self.controllers.reply_error(&error);
                self.controllers.tell(Event::Ended(failure(&error)), &[]);
                Some(Next::Failed(error))
            }
        }
    }

    /// Passes on what the guest connected to. With no controller to take it, a connection is closed.
    fn pass_guest_connections(&mut self) {
        for (port, fd) in self.inbox.take() {
            self.controllers.tell(Event::GuestConnection { port }, &[fd.as_fd()]);
        }
    }

    fn finish(mut self, end: VmEnd) -> Finish {
        if let Some(running) = self.running.take() {
            running.stop();
        }
        self.controllers.tell(Event::Ended(end.clone()), &[]);
        Finish::Ended(end)
    }
}

/// What woke the control thread.
struct Ready {
    control: bool,
    guest_connections: bool,
    news: bool,
    /// For each branch that is watched, whether it has ended.
    branches: Vec<bool>,
}

/// What a request makes of the process.
enum Next {
    Finish(Finish),
    Template(SingleThreaded, Box<Frozen>),
    Branch(Box<branch::Newborn>, Box<Running>),
    Failed(Error),
}

/// The end of a VM that the monitor could not go on with.
pub(crate) fn failure(error: &Error) -> VmEnd {
    VmEnd { reason: EndReason::Failed, detail: error.chain(), console_tail: String::new() }
}

//! A template: a frozen VM in a process with one thread, which forks children and savers.
//!
//! A child goes on from the frozen state in memory it shares with the template until one of the two writes. A
//! saver writes the template to files while all other processes go on. Both inherit the template's jail, and
//! neither needs it any more: when it ends, they go on.
//!
//! The template reaps its children and keeps each exit status until a controller has acknowledged it. A
//! failure with one child is an answer to that request; the template goes on.

mod children;
mod saver;

use std::ffi::CStr;
use std::fs::File;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::net::UnixListener;
use std::sync::Arc;

use forkd_protocol::control::{
    Event, FdRef, ForkConfig, LoadConfig, MAX_FDS, ReplacedLayers, Reply, Request, Role, Status,
};

use crate::config::{Access, Attached};
use crate::control::ControlSocket;
use crate::devices::serial::ConsoleLog;
use crate::devices::virtio::vsock::GuestConnections;
use crate::fork::{Forked, SingleThreaded};
use crate::state::{ChildParts, Expected, Frozen};
use crate::{Error, Result};
use children::{ChildSignal, Children};
use saver::Job;
pub(crate) use saver::Saver;

/// The control thread, and only thread, of a template.
pub(crate) struct Template {
    /// The proof that it is the only one, which a fork requires.
    alone: SingleThreaded,
    frozen: Frozen,
    control: ControlSocket,
    children: Children,
    signal: ChildSignal,
}

/// How [`Template::serve`] ends: by a stop, or because this is not the template any more.
pub(crate) enum TemplateOutcome {
    Stopped,
    Child(Box<ForkedChild>),
    Saver(Box<Saver>),
}

/// A child, right after the fork.
pub(crate) struct ForkedChild {
    /// The frozen VM, which is the child's own now.
    pub(crate) frozen: Frozen,
    /// Where its controller waits.
    pub(crate) control: ControlSocket,
    /// Its own resources.
    pub(crate) parts: ForkResources,
}

impl Template {
    pub(crate) fn new(alone: SingleThreaded, frozen: Frozen, control: ControlSocket) -> Result<Template> {
        name_process(c"forkd-template");
        let signal = ChildSignal::new()?;
        Ok(Template { alone, frozen, control, children: Children::default(), signal })
    }

    /// Serves controllers until one sends a stop request. Also returns in every process forked here, with the
    /// template's own descriptors closed.
    pub(crate) fn serve(mut self) -> Result<TemplateOutcome> {
        loop {
            let ready = self.control.wait(&[self.signal.as_fd()])?;
            let ready = |index: usize| ready.get(index).copied().unwrap_or(false);
            if ready(1) {
                self.reap();
            }
            if ready(0)
                && let Some((request, fds)) = self.control.step()
            {
                match self.answer(request, fds) {
                    TemplateTransition::Serve => {}
                    TemplateTransition::Stop => return Ok(TemplateOutcome::Stopped),
                    TemplateTransition::BeChild(control, parts) => {
                        let frozen = self.frozen;
                        return Ok(TemplateOutcome::Child(Box::new(ForkedChild { frozen, control, parts })));
                    }
                    TemplateTransition::BeSaver(job) => {
                        return Ok(TemplateOutcome::Saver(Box::new(Saver::new(self.frozen, *job))));
                    }
                }
            }
            self.control.drop_silent();
        }
    }

    fn reap(&mut self) {
        self.signal.clear();
        for (child, status) in self.children.reap() {
            self.control.send_event(Event::ChildEnded { child, status }, &[]);
        }
    }

    fn answer(&mut self, request: Request, fds: Vec<OwnedFd>) -> TemplateTransition {
        let reply = match request {
            Request::Fork(config) => return self.fork_child(config, fds),
            Request::Save(config) => {
                return self.fork_saver(config.child.clone(), |frozen| Job::save(frozen, config, fds));
            }
            Request::Merge(config) => {
                return self.fork_saver(config.child.clone(), |frozen| Job::merge(frozen, config, fds));
            }
            Request::Layers => return self.answer_layers(),
            Request::Seal { layers } => match self.seal(&layers, fds) {
                Ok(()) => Reply::Sealed,
                Err(error) => Reply::Error { message: error.chain() },
            },
            Request::ReplaceLayers { disks } => match self.replace_layers(&disks, fds) {
                Ok(()) => Reply::Replaced,
                Err(error) => Reply::Error { message: error.chain() },
            },
            Request::Children => {
                // A child that has ended must not be listed as alive, whichever event is read first.
                self.reap();
                Reply::Children { children: self.children.list().to_vec() }
            }
            Request::Acknowledge { children } => {
                self.children.acknowledge(&children);
                Reply::Acknowledged
            }
            // The handshake was served before.
            Request::Status | Request::Hello { .. } => {
                Reply::Status(Status { role: Role::Template, running: false, ready: false })
            }
            Request::Boot(_)
            | Request::Load(_)
            | Request::Freeze
            | Request::Branch(_)
            | Request::Pause
            | Request::Resume => {
                Reply::Error { message: "this is a template already; start another monitor".into() }
            }
            Request::Stop => {
                self.control.reply(Reply::Stopped);
                return TemplateTransition::Stop;
            }
        };
        self.control.reply(reply);
        TemplateTransition::Serve
    }

    fn seal(&mut self, layers: &[Option<FdRef>], fds: Vec<OwnedFd>) -> Result<()> {
        let mut fds = Attached::new(fds);
        let mut files = Vec::with_capacity(layers.len());
        for (index, layer) in layers.iter().enumerate() {
            let take = |fd| fds.take(&format!("layers[{index}]"), fd, Access::Read).map(File::from);
            files.push(layer.map(take).transpose()?);
        }
        self.frozen.seal(files)
    }

    fn replace_layers(&mut self, disks: &[Option<ReplacedLayers>], fds: Vec<OwnedFd>) -> Result<()> {
        let mut fds = Attached::new(fds);
        self.frozen.replace_layers(saver::merged_layers(disks, &mut fds, Access::Read)?)
    }

    fn fork_child(&mut self, config: ForkConfig, fds: Vec<OwnedFd>) -> TemplateTransition {
        let mut fds = Attached::new(fds);
        let name = config.child.clone();
        let checked = self.children.check_name(&name).and_then(|()| ForkResources::resolve(config, &mut fds));
        let forked = checked.and_then(|(control, cgroup, parts)| {
            let forked = self.alone.fork(cgroup.as_ref().map(AsFd::as_fd));
            let forked = forked.map_err(Error::system("fork a child"))?;
            Ok((forked, control, parts))
        });
        match forked {
            // The other descriptors of the message go with this function's end, in both processes.
            Ok((Forked::Child, control, parts)) => TemplateTransition::BeChild(control, parts),
            Ok((Forked::Parent { pid, pidfd }, ..)) => self.answer_forked(name, pid, &pidfd),
            Err(error) => self.answer_error(&error),
        }
    }

    /// Forks a process for the job that `prepare` has checked.
    fn fork_saver(
        &mut self,
        name: String,
        prepare: impl FnOnce(&Frozen) -> Result<Job>,
    ) -> TemplateTransition {
        let forked = self.children.check_name(&name).and_then(|()| {
            let job = prepare(&self.frozen)?;
            Ok((self.alone.fork(None).map_err(Error::system("fork a saver"))?, job))
        });
        match forked {
            Ok((Forked::Child, job)) => TemplateTransition::BeSaver(Box::new(job)),
            Ok((Forked::Parent { pid, pidfd }, _)) => self.answer_forked(name, pid, &pidfd),
            Err(error) => self.answer_error(&error),
        }
    }

    fn answer_layers(&mut self) -> TemplateTransition {
        let mut fds = Vec::new();
        let mut disks = Vec::new();
        for disk in self.frozen.disks() {
            let layers = disk.frozen_layers();
            disks.push((fds.len()..fds.len() + layers.len()).map(FdRef).collect());
            fds.extend(layers.iter().map(AsFd::as_fd));
        }
        if fds.len() > MAX_FDS {
            let text = format!("{} layers do not fit into an answer; merge some of them first", fds.len());
            self.control.reply(Reply::Error { message: text });
        } else {
            self.control.reply_with(Reply::Layers { disks }, &fds);
        }
        TemplateTransition::Serve
    }

    fn answer_forked(&mut self, name: String, pid: i32, pidfd: &OwnedFd) -> TemplateTransition {
        self.children.add(name, pid);
        self.control.reply_with(Reply::Forked { pid }, &[pidfd.as_fd()]);
        TemplateTransition::Serve
    }

    fn answer_error(&mut self, error: &Error) -> TemplateTransition {
        self.control.reply_error(error);
        TemplateTransition::Serve
    }
}

/// The effect of a request on the process.
enum TemplateTransition {
    Serve,
    Stop,
    BeChild(ControlSocket, ForkResources),
    BeSaver(Box<Job>),
}

/// A child's own resources, checked before there is a child.
pub(crate) struct ForkResources {
    console: File,
    console_limit: u64,
    layers: Vec<Option<File>>,
    tap: Option<OwnedFd>,
    vsock: Option<OwnedFd>,
}

impl ForkResources {
    fn resolve(
        config: ForkConfig,
        fds: &mut Attached,
    ) -> Result<(ControlSocket, Option<OwnedFd>, ForkResources)> {
        let control = ControlSocket::new(fds.take_listener("control", config.control)?)?;
        let console = fds.take("console", config.console, Access::Both)?.into();
        let mut layers = Vec::new();
        for (index, layer) in config.layers.into_iter().enumerate() {
            let take = |fd| fds.take(&format!("layers[{index}]"), fd, Access::Both).map(File::from);
            layers.push(layer.map(take).transpose()?);
        }
        let tap = config.tap.map(|fd| fds.take_tap("tap", fd)).transpose()?;
        let vsock = config.vsock.map(|fd| fds.take_listener("vsock", fd)).transpose()?;
        let cgroup = config.cgroup.map(|fd| fds.take("cgroup", fd, Access::Read)).transpose()?;
        let parts = ForkResources { console, console_limit: config.console_limit, layers, tap, vsock };
        Ok((control, cgroup, parts))
    }

    /// In the child: adds the way for connections of its guest.
    pub(crate) fn with(self, guest_connections: GuestConnections) -> Result<ChildParts> {
        let ForkResources { console, console_limit, layers, tap, vsock } = self;
        let console = ConsoleLog::new(console, console_limit)
            .map_err(|error| Error::Config(format!("console: {error}")))?;
        let vsock = vsock.map(UnixListener::from);
        Ok(ChildParts { console: Arc::new(console), layers, tap, vsock, guest_connections })
    }
}

/// Loads the snapshot that `config` and its descriptors describe.
pub(crate) fn load(config: LoadConfig, fds: Vec<OwnedFd>) -> Result<Frozen> {
    let mut fds = Attached::new(fds);
    let kvm = fds.take("kvm", config.kvm, Access::Both)?;
    let kvm = crate::vm::open_kvm(kvm.into())?;
    let expected =
        Expected { vcpus: config.vcpus, mem_mib: config.mem_mib, guest_ports: config.guest_ports.clone() };
    let state = File::from(fds.share("state", config.state)?);
    let memory = share_all(&mut fds, "memory", &config.memory)?;
    let mut disks = Vec::new();
    for (index, disk) in config.disks.into_iter().enumerate() {
        let base = File::from(fds.share(&format!("disks[{index}].base"), disk.base)?);
        disks.push((base, share_all(&mut fds, &format!("disks[{index}].layers"), &disk.layers)?));
    }
    let sizes = disks.iter().map(|(base, _): &(File, _)| base.metadata().map(|meta| meta.len()));
    let disk_bytes = sizes.sum::<std::io::Result<u64>>().map_err(Error::system("look at a disk"))?;
    let state = crate::state::file::read_for_disks(&state, disk_bytes)?;
    expected.check(&state)?;
    Frozen::load(kvm, state, memory, disks)
}

/// Files that are only read from.
pub(crate) fn share_all(fds: &mut Attached, name: &str, files: &[FdRef]) -> Result<Vec<File>> {
    let share = |(index, fd): (usize, &FdRef)| fds.share(&format!("{name}[{index}]"), *fd).map(File::from);
    files.iter().enumerate().map(share).collect()
}

/// Names the process, for process listings.
pub(crate) fn name_process(name: &CStr) {
    // It fails for no name that is a string.
    let _ = rustix::thread::set_name(name);
}

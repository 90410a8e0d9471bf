//! Forks a template off a VM that goes on, and moves the layers of its disks.
//!
//! The VM stands still while its KVM state is saved and the process is copied, and for nothing else. In the
//! copy only the control thread exists. Everything else of the source lies in its memory as it was at that
//! instant: the threads at their gates with no lock held, the devices between two events. So the devices can
//! be read. But their descriptors are still the source's own, and so is everything whose drop would act on
//! them: threads, sockets, watches. The copy drops none of these. It leaks them with `forget`, and closes the
//! descriptors by their numbers.

use std::fs::File;
use std::io::{self, Read, Write};
use std::os::fd::{OwnedFd, RawFd};
use std::os::unix::net::UnixStream;
use std::time::Duration;

use forkd_protocol::control::{BranchConfig, Event, FdRef, ReplacedLayers};

use crate::affinity;
use crate::config::{Access, Attached};
use crate::control::{self, ControlSocket};
use crate::devices::virtio::block::{Disk, DiskError};
use crate::fork::{self, SingleThreaded};
use crate::state::Frozen;
use crate::vm::{self, ForkedBeside, KvmState, Paused, Running};
use crate::{Error, Result, memory};

/// Which process this is after [`branch`].
pub(crate) enum Branched {
    /// The VM, which goes on.
    Source(Branch),
    /// The new process.
    Branch(Box<ForkedBranch>),
}

/// A branch, as its source sees it.
pub(crate) struct Branch {
    pub(crate) pid: i32,
    pub(crate) pidfd: OwnedFd,
    /// For how long the vCPUs stood still.
    pub(crate) pause: Duration,
    /// For each disk the layer that was its topmost one; none for a read-only disk.
    pub(crate) layers: Vec<Option<File>>,
}

/// A branch right after the fork, with everything of its source around it.
pub(crate) struct ForkedBranch {
    saved: KvmState,
    control: ControlSocket,
    /// Whether its source confirmed the branch.
    confirmed: Result<()>,
}

/// Branches `vm`, which goes on, with the next layers of its disks that `config` names. An error changes
/// nothing.
pub(crate) fn branch(vm: &mut Running, config: BranchConfig, fds: Vec<OwnedFd>) -> Result<Branched> {
    let mut fds = Attached::new(fds);
    let control = ControlSocket::new(fds.take_listener("control", config.control)?)?;
    let next = take_layers(&mut fds, &config.layers, Access::Both)?;
    // Steps that can fail come before the pause.
    let layers = vm.with_disks(|disks| {
        check_each(&disks, &next, |disk, layer| disk.check_layer(layer.as_ref()))?;
        disks.iter().map(|disk| top_layer(disk)).collect::<Result<Vec<_>>>()
    })?;
    let (source, branch) = UnixStream::pair().map_err(Error::system("connect a branch with its source"))?;

    let paused = vm.pause()?;
    let usual = affinity::current();
    paused.move_to_vcpu();
    let saved = paused.save()?;
    let ForkedBeside::Parent { pid, paused } = paused.fork()? else {
        // Now, while this CPU is free: once the guest has it again, the branch would have to wait for it.
        affinity::move_to(usual);
        // Only the source itself keeps its end open: by its closing the branch notices the source's death.
        drop(source);
        // Before anything else: the guest stands still, and its source wants the CPU this would take.
        let confirmed = await_source(branch);
        return Ok(Branched::Branch(Box::new(ForkedBranch { saved, control, confirmed })));
    };
    // Otherwise the guest, which has waited, would have this CPU for itself for some milliseconds, and the
    // caller of the branch would wait for that, too.
    affinity::move_to(usual);
    let pause = paused.run_vcpus();
    // Without its source's confirmation the branch exits, which it also does when `source` is closed.
    let pidfd = fork::detach(pid).map_err(Error::system("get hold of a branch"))?;
    add_layers(&paused, next)?;
    drop(paused);
    let _ = (&source).write_all(&[1]);
    Ok(Branched::Source(Branch { pid, pidfd, pause, layers }))
}

/// Gives every disk its next layer, which was checked before.
fn add_layers(paused: &Paused<'_>, next: Vec<Option<File>>) -> Result<()> {
    paused.vm.with_disks(|disks| {
        let mut pairs = disks.into_iter().zip(next);
        pairs.try_for_each(|(disk, layer)| disk.add_layer(layer)).map_err(failed("a disk"))
    })
}

/// Another descriptor of the layer a disk writes to.
fn top_layer(disk: &Disk) -> Result<Option<File>> {
    let top = disk.files().last().filter(|_| !disk.is_read_only());
    top.map(File::try_clone).transpose().map_err(Error::system("copy a descriptor"))
}

impl ForkedBranch {
    /// Makes a template of the copy of `source` in this process. On failure it sends the reason to the
    /// controller that waits.
    ///
    /// The caller owns no descriptor of its own any more but the usual ones.
    pub(crate) fn become_template(self, source: Running) -> Result<(SingleThreaded, Frozen, ControlSocket)> {
        let ForkedBranch { saved, control, confirmed } = self;
        confirmed?;
        let alone = SingleThreaded::check();
        match alone.and_then(|alone| Ok((alone, freeze_copy(saved, source)?))) {
            Ok((alone, frozen)) => {
                let mut kept = frozen.descriptors();
                kept.push(control.listener());
                close_all_but(kept)?;
                Ok((alone, frozen, control))
            }
            Err(error) => {
                control.send_to_waiting(Event::Ended(control::failure(&error)));
                Err(error)
            }
        }
    }
}

/// Waits until the source has confirmed the branch.
fn await_source(mut word: UnixStream) -> Result<()> {
    word.read_exact(&mut [0]).map_err(Error::system("become a branch: its source is gone"))
}

/// Makes a stopped VM of what this process inherited of a running one.
fn freeze_copy(saved: KvmState, source: Running) -> Result<Frozen> {
    let Running {
        vcpus,
        devices,
        paused: _,
        bus,
        console,
        report,
        generation,
        fd,
        kvm,
        host_tsc_khz,
        cpuids: _,
        msrs: _,
        memory,
    } = source;
    let collected = vm::collect(saved, &bus, &generation, &memory);
    // The threads are not here, and the rest is shared with the source.
    std::mem::forget((vcpus, devices, bus, console, report, generation, fd));
    let (state, disks) = collected?;
    memory::use_small_pages(&memory);
    Frozen::new(kvm, host_tsc_khz, state, memory, disks)
}

/// Closes all descriptors but standard input, output and error, and those in `kept`.
fn close_all_but(mut kept: Vec<RawFd>) -> Result<()> {
    kept.extend(0..=2);
    kept.sort_unstable();
    let ends = kept.iter().skip(1).map(|fd| *fd as u32).chain([u32::MAX]);
    for (fd, end) in kept.iter().zip(ends) {
        let (first, last) = (*fd as u32 + 1, end.saturating_sub(u32::from(end != u32::MAX)));
        if first > last {
            continue;
        }
        // SAFETY: the owners of these descriptors were leaked with `forget` and are not used again.
        if unsafe { libc::close_range(first, last, 0) } != 0 {
            return Err(Error::system("close what belongs to the source")(io::Error::last_os_error()));
        }
    }
    Ok(())
}

/// Takes `layers`, for each disk of `vm` its topmost frozen layer opened for reading only, in the place of
/// what it could be written through. All or nothing.
pub(crate) fn seal(vm: &Running, layers: &[Option<FdRef>], fds: Vec<OwnedFd>) -> Result<()> {
    let layers = take_layers(&mut Attached::new(fds), layers, Access::Read)?;
    vm.with_disks(|disks| {
        check_each(&disks, &layers, |disk, layer| disk.check_seal(layer.as_ref()))?;
        disks.into_iter().zip(layers).for_each(|(disk, layer)| disk.seal(layer));
        Ok(())
    })
}

/// Uses one file in the place of several frozen layers, for each disk of `vm` that `replaced` has something
/// for. All or nothing.
pub(crate) fn replace_layers(
    vm: &Running,
    replaced: &[Option<ReplacedLayers>],
    fds: Vec<OwnedFd>,
) -> Result<()> {
    let layers: Vec<_> = replaced.iter().map(|one| one.map(|one| one.layer)).collect();
    let layers = take_layers(&mut Attached::new(fds), &layers, Access::Read)?;
    let counts = replaced.iter().map(|one| one.map_or(0, |one| usize::from(one.count)));
    let replaced: Vec<_> = counts.zip(layers).collect();
    vm.with_disks(|disks| {
        check_each(&disks, &replaced, |disk, (count, layer)| {
            layer.as_ref().map_or(Ok(()), |layer| disk.check_replace(*count, layer))
        })?;
        for (disk, (count, layer)) in disks.into_iter().zip(replaced) {
            if let Some(layer) = layer {
                disk.replace(count, layer);
            }
        }
        Ok(())
    })
}

fn take_layers(fds: &mut Attached, layers: &[Option<FdRef>], access: Access) -> Result<Vec<Option<File>>> {
    let take = |(index, layer): (usize, &Option<FdRef>)| {
        layer.map(|fd| fds.take(&format!("layers[{index}]"), fd, access).map(File::from)).transpose()
    };
    layers.iter().enumerate().map(take).collect()
}

/// Checks the file that was given for each disk.
fn check_each<T>(
    disks: &[&mut Disk],
    given: &[T],
    check: impl Fn(&Disk, &T) -> std::result::Result<(), DiskError>,
) -> Result<()> {
    if given.len() != disks.len() {
        let (expected, found) = (disks.len(), given.len());
        return Err(Error::Config(format!("the VM has {expected} disks, but layers of {found} were given")));
    }
    for (index, (disk, one)) in disks.iter().zip(given).enumerate() {
        check(disk, one).map_err(failed(&format!("layers[{index}]")))?;
    }
    Ok(())
}

fn failed(name: &str) -> impl FnOnce(DiskError) -> Error {
    let name = name.to_owned();
    move |error| Error::Config(format!("{name}: {error}"))
}

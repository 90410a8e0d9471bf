//! The bare alternatives: the same memory, with nothing of forkd around it, forked, write-protected and copied.
//!
//! A process of one thread holds memory as a sandbox's process does: mapped privately from a file
//! ([`Kind::Layer`]), or anonymous in huge pages and inherited from a template ([`Kind::Huge`]), and known to
//! KVM as the memory of a VM, which has no vCPU and never runs; then it makes the same pages dirty. After
//! that it serves requests, one line at a time, so that the benchmark can interleave it with other
//! measurements: noise then hits all of them.

use std::fs::File;
use std::io::{BufRead, Read, Write};
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::Path;
use std::time::Instant;

use forkd_vmm::memory;
use kvm_bindings::kvm_userspace_memory_region;
use kvm_ioctls::{Kvm, VmFd};
use rustix::mm::{Advice, UserfaultfdFlags};
use rustix::process::WaitOptions;
use serde::{Deserialize, Serialize};
use vm_memory::{Bytes, FileOffset, MmapRegion, VolatileMemory};

use crate::writer::{FIRST, HUGE_PAGE, distance};
use crate::{Error, Result, system};

/// Where memory comes from.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    /// A private mapping of a file, in pages of 4 KiB.
    Layer,
    /// Anonymous, in huge pages.
    Huge,
}

impl Kind {
    /// As in results.
    pub fn name(self) -> &'static str {
        match self {
            Kind::Layer => "layer",
            Kind::Huge => "huge",
        }
    }
}

/// What can be done to the memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Method {
    /// `fork(2)`. Timed in the parent; the child lives until what it shares was written to again.
    Fork,
    /// The same, of memory that is no VM's: what is missing is the kernel telling KVM of the fork.
    ForkPlain,
    /// Write-protection of all pages by `userfaultfd`, registered before.
    UffdWp,
    /// A copy into fresh memory of huge pages. What is copied is mapped in before.
    Copy,
}

impl Method {
    /// As in results.
    pub fn name(self) -> &'static str {
        match self {
            Method::Fork => "fork",
            Method::ForkPlain => "fork_plain",
            Method::UffdWp => "uffd_wp",
            Method::Copy => "copy",
        }
    }
}

/// What [`serve`] is asked for: one line.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Request {
    /// Does this, and reports how long it took.
    Do(Method),
    /// Writes all those pages again, as the guest does, and ends the child of the last fork after that.
    Rewrite,
}

/// An answer of [`serve`]: one line.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer {
    /// All pages are written, for the first time or again.
    Ready,
    /// It took this long.
    Ms(f64),
    /// It cannot be done, and why.
    Impossible(String),
}

/// Makes memory of this kind, sends [`Answer::Ready`], and then serves the request in each line of `input`,
/// until there are no more. `file` is as long as the memory; only [`Kind::Layer`] maps it. Refused in a
/// process with more than one thread.
pub fn serve(
    kind: Kind,
    file: &Path,
    mem_mib: u64,
    dirty_pct: u64,
    input: impl BufRead,
    output: impl Write,
) -> Result<()> {
    crate::floor::must_have_one_thread()?;
    let memory = TestMemory::map(kind, file, mem_mib, distance(dirty_pct)?)?;
    if kind == Kind::Layer {
        return memory.serve(input, output);
    }
    // A template's: all of it resident. It stays with this process, and the measurement goes on in a
    // child, as a sandbox does.
    memory.write_every(0, HUGE_PAGE, 0)?;
    // SAFETY: there is no other thread that could hold a lock the child needs.
    match unsafe { libc::fork() } {
        0 => {
            let status = match memory.serve(input, output) {
                Ok(()) => 0,
                Err(error) => {
                    eprintln!("forkd: {error}");
                    1
                }
            };
            // SAFETY: ends the child without running what its parent may have left to be run at exit.
            unsafe { libc::_exit(status) }
        }
        -1 => Err(system("fork")(std::io::Error::last_os_error())),
        pid => wait(pid),
    }
}

/// Memory, and which of its pages are dirty.
struct TestMemory {
    region: MmapRegion,
    distance: u64,
}

impl TestMemory {
    fn map(kind: Kind, file: &Path, mem_mib: u64, distance: u64) -> Result<TestMemory> {
        let length = mem_mib
            .checked_mul(1 << 20)
            .and_then(|length| usize::try_from(length).ok())
            .filter(|length| *length as u64 > FIRST)
            .ok_or_else(|| Error::Invalid(format!("{mem_mib} MiB of memory cannot be mapped")))?;
        let region = match kind {
            Kind::Huge => anonymous(length)?,
            Kind::Layer => {
                let failed = || format!("map {}", file.display());
                let file = File::open(file).map_err(system(failed()))?;
                if file.metadata().map_err(system(failed()))?.len() < length as u64 {
                    return Err(Error::Invalid(format!("cannot {}: it is too short", failed())));
                }
                mapping(length, Some(file), 0)?
            }
        };
        Ok(TestMemory { region, distance })
    }

    fn serve(&self, input: impl BufRead, mut output: impl Write) -> Result<()> {
        let mut tell = |answer: &Answer| {
            let line = serde_json::to_string(answer).unwrap_or_default() + "\n";
            output.write_all(line.as_bytes()).and_then(|()| output.flush()).map_err(system("answer"))
        };
        // Here, and not when it was mapped: a VM belongs to the process that has made it.
        let mut vm = Some(self.of_a_vm()?);
        self.dirty(1)?;
        tell(&Answer::Ready)?;
        // The guest's branch lives until the guest has written everything again, and so does this.
        let mut living: Option<Child> = None;
        for (turn, line) in (2..).zip(input.lines()) {
            let line = line.map_err(system("read what to do"))?;
            let request: Request = serde_json::from_str(&line)
                .map_err(|error| Error::Invalid(format!("`{line}` is nothing that can be done: {error}")))?;
            let took = match request {
                Request::Do(method @ (Method::Fork | Method::ForkPlain)) => {
                    // It has the VM open, too.
                    living.take().map_or(Ok(()), Child::end)?;
                    if method == Method::ForkPlain {
                        vm = None;
                    }
                    let forked = self.fork();
                    if vm.is_none() {
                        vm = Some(self.of_a_vm()?);
                    }
                    forked.map(|(took, child)| {
                        living = Some(child);
                        took
                    })
                }
                Request::Do(Method::UffdWp) => self.write_protect(),
                Request::Do(Method::Copy) => self.copy(),
                Request::Rewrite => {
                    self.dirty(turn)?;
                    living.take().map_or(Ok(()), Child::end)?;
                    tell(&Answer::Ready)?;
                    continue;
                }
            };
            tell(&took.map_or_else(|error| Answer::Impossible(error.to_string()), Answer::Ms))?;
        }
        living.map_or(Ok(()), Child::end)
    }

    /// Makes a VM that has this memory, laid out as a guest's is. From then on the kernel notifies KVM of
    /// each change of the memory's mappings, and where it has no nested paging, it looks at its notes of
    /// every page.
    fn of_a_vm(&self) -> Result<VmFd> {
        let kvm = |what: &str| {
            let what = what.to_owned();
            move |error: kvm_ioctls::Error| system(what)(std::io::Error::from(error))
        };
        let vm = Kvm::new().and_then(|kvm| kvm.create_vm()).map_err(kvm("make a VM"))?;
        let mut address = self.region.as_ptr() as u64;
        for (slot, (start, length)) in (0..).zip(memory::ranges(self.region.size() as u64 >> 20)) {
            let region = kvm_userspace_memory_region {
                slot,
                guest_phys_addr: start,
                memory_size: length,
                userspace_addr: address,
                flags: 0,
            };
            // SAFETY: the range is a part of the mapping, which outlives the VM; and that never runs.
            unsafe { vm.set_user_memory_region(region) }.map_err(kvm("give memory to a VM"))?;
            address += length;
        }
        Ok(vm)
    }

    /// Writes `value` to the pages the guest writes to.
    fn dirty(&self, value: u64) -> Result<()> {
        self.write_every(FIRST, self.distance, value)
    }

    fn write_every(&self, start: u64, distance: u64, value: u64) -> Result<()> {
        if distance == 0 {
            return Ok(());
        }
        let slice = self.region.as_volatile_slice();
        for at in (start as usize..slice.len()).step_by(distance as usize) {
            slice.write_obj(value, at).map_err(|error| Error::Invalid(error.to_string()))?;
        }
        Ok(())
    }

    /// The child lives on, as a branch does: what is written next has to be copied.
    fn fork(&self) -> Result<(f64, Child)> {
        let (waits, lives) = rustix::pipe::pipe().map_err(system("make a pipe"))?;
        let begin = Instant::now();
        // SAFETY: there is no other thread that could hold a lock the child needs, and it needs none.
        match unsafe { libc::fork() } {
            0 => {
                drop(lives);
                let _ = rustix::io::read(&waits, &mut [0]);
                // SAFETY: ends the child without running what its parent may have left to be run at exit.
                unsafe { libc::_exit(0) }
            }
            -1 => Err(system("fork")(std::io::Error::last_os_error())),
            pid => Ok((milliseconds(begin), Child { pid, lives })),
        }
    }

    fn write_protect(&self) -> Result<f64> {
        let uffd = Uffd::new()?;
        uffd.register(&self.region)?;
        let begin = Instant::now();
        uffd.write_protect(&self.region)?;
        let took = milliseconds(begin);
        // Closing it lifts the protection.
        drop(uffd);
        Ok(took)
    }

    /// Copies in a child: what is mapped in to be copied would else stay mapped, and forks after this
    /// would be dearer than those of a process that never copied.
    fn copy(&self) -> Result<f64> {
        let (result, told) = rustix::pipe::pipe().map_err(system("make a pipe"))?;
        // SAFETY: there is no other thread that could hold a lock the child needs.
        match unsafe { libc::fork() } {
            0 => {
                let status = match self.copied() {
                    Ok(took) => i32::from(rustix::io::write(&told, &took.to_le_bytes()).is_err()),
                    Err(error) => {
                        eprintln!("forkd: a copy of memory: {error}");
                        1
                    }
                };
                // SAFETY: ends the child without running what its parent may have left to be run at exit.
                unsafe { libc::_exit(status) }
            }
            -1 => Err(system("fork")(std::io::Error::last_os_error())),
            pid => {
                drop(told);
                let mut took = [0; 8];
                let read = File::from(result).read_exact(&mut took);
                wait(pid)?;
                read.map_err(system("copy the memory"))?;
                Ok(f64::from_le_bytes(took))
            }
        }
    }

    fn copied(&self) -> Result<f64> {
        advise(&self.region, Advice::LinuxPopulateRead, "map in what is copied")?;
        let begin = Instant::now();
        let copy = anonymous(self.region.size())?;
        self.region.as_volatile_slice().copy_to_volatile_slice(copy.as_volatile_slice());
        Ok(milliseconds(begin))
    }
}

/// A child that lives until it is ended.
struct Child {
    pid: libc::pid_t,
    lives: OwnedFd,
}

impl Child {
    fn end(self) -> Result<()> {
        drop(self.lives);
        wait(self.pid)
    }
}

fn milliseconds(begin: Instant) -> f64 {
    begin.elapsed().as_secs_f64() * 1e3
}

fn wait(pid: libc::pid_t) -> Result<()> {
    let wait = || rustix::process::waitpid(rustix::process::Pid::from_raw(pid), WaitOptions::empty());
    let status = rustix::io::retry_on_intr(wait).map_err(system("wait for a child"))?;
    match status {
        Some((_, status)) if status.exit_status() == Some(0) => Ok(()),
        _ => Err(Error::Invalid("a child of the measurement failed".into())),
    }
}

/// Memory in huge pages, as the guest memory of a booted VM is.
fn anonymous(length: usize) -> Result<MmapRegion> {
    let region = mapping(length, None, libc::MAP_ANONYMOUS)?;
    advise(&region, Advice::LinuxHugepage, "ask for huge pages")?;
    Ok(region)
}

fn mapping(length: usize, file: Option<File>, flags: libc::c_int) -> Result<MmapRegion> {
    let flags = flags | libc::MAP_PRIVATE | libc::MAP_NORESERVE;
    let file = file.map(|file| FileOffset::new(file, 0));
    MmapRegion::build(file, length, libc::PROT_READ | libc::PROT_WRITE, flags)
        .map_err(|error| Error::Invalid(format!("{} MiB cannot be mapped: {error}", length >> 20)))
}

fn advise(region: &MmapRegion, advice: Advice, what: &str) -> Result<()> {
    // SAFETY: the range is the whole of a mapping, and the advice changes none of its bytes.
    unsafe { rustix::mm::madvise(region.as_ptr().cast(), region.size(), advice) }.map_err(system(what))
}

/// A `userfaultfd` that can write-protect.
struct Uffd(OwnedFd);

/// The kernel's structures, from `linux/userfaultfd.h`.
#[repr(C)]
struct UffdApi {
    api: u64,
    features: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdRegister {
    start: u64,
    length: u64,
    mode: u64,
    ioctls: u64,
}

#[repr(C)]
struct UffdWriteProtect {
    start: u64,
    length: u64,
    mode: u64,
}

const UFFD_API: u64 = 0xaa;
const UFFD_FEATURE_PAGEFAULT_FLAG_WP: u64 = 1;
const UFFDIO_API: libc::c_ulong = 0xc018_aa3f;
const UFFDIO_REGISTER: libc::c_ulong = 0xc020_aa00;
const UFFDIO_REGISTER_MODE_WP: u64 = 2;
const UFFDIO_WRITEPROTECT: libc::c_ulong = 0xc018_aa06;
const UFFDIO_WRITEPROTECT_MODE_WP: u64 = 1;

impl Uffd {
    fn new() -> Result<Uffd> {
        // SAFETY: nothing is done with it but what this module does.
        let descriptor = unsafe { rustix::mm::userfaultfd(UserfaultfdFlags::CLOEXEC) };
        let uffd = Uffd(descriptor.map_err(system("make a userfaultfd"))?);
        let mut api = UffdApi { api: UFFD_API, features: UFFD_FEATURE_PAGEFAULT_FLAG_WP, ioctls: 0 };
        uffd.call(UFFDIO_API, &mut api, "use userfaultfd's write-protection")?;
        Ok(uffd)
    }

    fn register(&self, region: &MmapRegion) -> Result<()> {
        let (start, length) = (region.as_ptr() as u64, region.size() as u64);
        let mut request = UffdRegister { start, length, mode: UFFDIO_REGISTER_MODE_WP, ioctls: 0 };
        self.call(UFFDIO_REGISTER, &mut request, "register memory of this kind for write-protection")
    }

    /// No thread may write before this is dropped: no thread would handle the fault.
    fn write_protect(&self, region: &MmapRegion) -> Result<()> {
        let (start, length) = (region.as_ptr() as u64, region.size() as u64);
        let mut request = UffdWriteProtect { start, length, mode: UFFDIO_WRITEPROTECT_MODE_WP };
        self.call(UFFDIO_WRITEPROTECT, &mut request, "write-protect the memory")
    }

    fn call<T>(&self, code: libc::c_ulong, request: &mut T, what: &str) -> Result<()> {
        // SAFETY: `request` is the structure this ioctl reads and writes, and outlives the call.
        let status = unsafe { libc::ioctl(self.0.as_raw_fd(), code, std::ptr::from_mut(request)) };
        if status == 0 { Ok(()) } else { Err(system(what)(std::io::Error::last_os_error())) }
    }
}

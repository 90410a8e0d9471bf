//! One microVM in one process: KVM, memory, boot, devices, walls.
//!
//! The controller starts a monitor, which jails itself. From then on it only has the descriptors that it gets
//! over its control socket: no paths, no tags, no HTTP. From the outside in:
//!
//! - [`jail`], [`seccomp`]: the walls, put up first;
//! - [`control`]: the main thread, serves the controller;
//! - `template`: the same thread in a process that holds a frozen VM, and forks;
//! - [`config`]: from the controller's request to the parts of a VM, everything checked;
//! - [`vm`]: builds a VM from its parts, starts, pauses and ends it;
//! - [`vcpu`]: the threads that run the guest; [`bus`]: dispatches the guest's register accesses to devices;
//!   [`event_loop`]: the thread that serves the devices; [`gate`]: where both park; [`exit`]: their reports
//!   to the control thread;
//! - `branch`: forks a template off a VM, which goes on; [`fork`]: `fork(2)`, and the proofs it requires;
//! - [`devices`]: virtio, serial console, VM generation id, power;
//! - [`state`]: a stopped VM: frozen, saved, loaded, thawed;
//! - [`boot`]: kernel, boot parameters, ACPI tables, CPUID, registers;
//! - [`memory`], [`layout`]: guest memory and its address map;
//! - [`probe`], [`asm_guest`]: tests with guests of a few instructions whether this `/dev/kvm` runs Linux;
//! - [`fuzz`]: the bodies of the fuzz targets.
//!
//! Threads: one per vCPU, one for all devices, the main thread for control. No async runtime: the
//! process is made to `fork`.

mod affinity;
pub mod asm_guest;
pub mod boot;
mod branch;
pub mod bus;
pub mod config;
pub mod control;
pub mod devices;
mod error;
pub mod event_loop;
pub mod exit;
pub mod fork;
pub mod fuzz;
pub mod gate;
pub mod jail;
pub mod layout;
pub mod memory;
pub mod probe;
pub mod seccomp;
pub mod state;
mod template;
pub mod vcpu;
pub mod vm;

pub use error::{Error, Result};

/// Guest memory as everything in this crate sees it: private mappings, no dirty tracking.
pub type GuestMemory = vm_memory::GuestMemoryMmap<memory::Mapping>;

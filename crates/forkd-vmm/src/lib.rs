//! One microVM in one process: KVM, memory, boot, devices, walls.
//!
//! A monitor is started by the controller, jails itself, and from then on knows nothing but the
//! descriptors it is handed over its control socket: no paths, no tags, no HTTP. From the outside in:
//!
//! - [`jail`], [`seccomp`]: the walls, put up first;
//! - [`control`]: the main thread, serves the controller;
//! - `template`: the same thread in a process that holds a frozen VM, and forks;
//! - [`config`]: from the controller's wishes to the parts of a VM, everything checked;
//! - [`vm`]: builds a VM from its parts, starts, pauses and ends it;
//! - [`vcpu`]: the threads that run the guest; [`bus`]: what the guest's register accesses reach;
//!   [`event_loop`]: the thread that serves the devices; [`gate`]: where both wait when told to;
//!   [`exit`]: who notices the end says why;
//! - `branch`: forks a template off a VM, which goes on; [`fork`]: `fork(2)`, and the proofs it asks for;
//! - [`devices`]: virtio, serial console, VM generation id, power;
//! - [`state`]: a stopped VM: frozen, saved, loaded, thawed;
//! - [`boot`]: kernel, boot parameters, ACPI tables, CPUID, registers;
//! - [`memory`], [`layout`]: guest memory, and what is where in it;
//! - [`probe`], [`asm_guest`]: does this `/dev/kvm` run Linux? Asked with guests of a few instructions;
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

//! The VM generation id: sixteen bytes in guest memory that differ in every copy of a VM.
//!
//! A guest that sees them change knows that it is a copy and that its random numbers are another VM's too.
//! ACPI has their address and the interrupt that signals a change.

use std::io;

use rustix::io::retry_on_intr;
use rustix::rand::{GetRandomFlags, getrandom};
use vm_memory::{Bytes, GuestAddress};
use vmm_sys_util::eventfd::EventFd;

use crate::GuestMemory;

/// Bytes of an id.
pub const ID_SIZE: usize = 16;

/// The device.
#[derive(Debug)]
pub struct GenerationId {
    memory: GuestMemory,
    address: GuestAddress,
    interrupt: EventFd,
}

impl GenerationId {
    /// Puts a first id at `address`, which ACPI announces and nothing else uses. `interrupt` is
    /// raised for every later one.
    pub fn new(memory: GuestMemory, address: GuestAddress, interrupt: EventFd) -> io::Result<GenerationId> {
        let device = GenerationId { memory, address, interrupt };
        device.place()?;
        Ok(device)
    }

    /// The device of a copy of a VM, which has an id already: to be renewed before it runs.
    pub fn restore(memory: GuestMemory, address: GuestAddress, interrupt: EventFd) -> GenerationId {
        GenerationId { memory, address, interrupt }
    }

    /// The id that the guest has now.
    pub fn id(&self) -> io::Result<[u8; ID_SIZE]> {
        self.memory.read_obj(self.address).map_err(io::Error::other)
    }

    /// Makes the guest another generation: a new id, then the interrupt. Called for every copy,
    /// after its interrupt controller is restored and before its vCPUs run.
    pub fn renew(&self) -> io::Result<()> {
        self.place()?;
        self.interrupt.write(1)
    }

    fn place(&self) -> io::Result<()> {
        let mut id = [0u8; ID_SIZE];
        let mut filled = 0;
        while filled < ID_SIZE {
            filled += retry_on_intr(|| getrandom(&mut id[filled..], GetRandomFlags::empty()))?;
        }
        self.memory.write_slice(&id, self.address).map_err(io::Error::other)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use vmm_sys_util::eventfd::EFD_NONBLOCK;

    #[test]
    fn every_renewal_is_another_id_and_an_interrupt() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        let address = GuestAddress(0x100);
        let device = GenerationId::new(memory.clone(), address, interrupt.try_clone().unwrap()).unwrap();
        let first: [u8; ID_SIZE] = memory.read_obj(address).unwrap();
        assert_ne!(first, [0; ID_SIZE]);
        assert!(interrupt.read().is_err(), "a new guest has nothing to be told");
        device.renew().unwrap();
        assert_ne!(memory.read_obj::<[u8; ID_SIZE]>(address).unwrap(), first);
        assert_eq!(interrupt.read().unwrap(), 1);
    }

    #[test]
    fn an_address_outside_memory_is_refused() {
        let memory = GuestMemory::from_ranges(&[(GuestAddress(0), 0x1000)]).unwrap();
        let interrupt = EventFd::new(EFD_NONBLOCK).unwrap();
        assert!(GenerationId::new(memory, GuestAddress(0xff8), interrupt).is_err());
    }
}

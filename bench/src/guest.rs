//! The tiny guest: reports ready, and again in every copy of itself.

use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

use forkd_vmm::boot::registers;
use forkd_vmm::{asm_guest, guest_code, memory};
use vm_memory::{Bytes, GuestAddress};

use crate::{Error, Result, system};

guest_code! {
    /// Writes to the ready port and waits until the VM generation id changes, which it does in every
    /// child before its first instruction; then it writes again and sleeps for good. Only the parent
    /// spins, until it is frozen: a thousand children that did would measure the scheduler.
    fn ready_again_in_every_child,
    "mov edx, 0x602",
    "mov rbx, qword ptr [0xe8000]",
    "out dx, al",
    "2: pause",
    "cmp rbx, qword ptr [0xe8000]",
    "je 2b",
    "out dx, al",
    "3: hlt",
    "jmp 3b",
}

// The code above spells these out.
const _: () = assert!(forkd_vmm::layout::READY_PORT == 0x602 && forkd_vmm::layout::GENERATION_ID == 0xe_8000);

/// The guest as a kernel file for the real path.
pub fn kernel() -> Vec<u8> {
    asm_guest::elf_kernel(ready_again_in_every_child())
}

/// Everything the guest needs is below this.
const USED: usize = 2 << 20;
const PAGE: usize = 4096;

/// Makes a memory file as a snapshot of the guest has it: `mib` MiB, holes but for the guest's code
/// and the tables it was booted with.
pub fn write_memory_file(path: &Path, mib: u64) -> Result<()> {
    let memory = memory::allocate(USED as u64 >> 20)?;
    registers::write_boot_tables(&memory)?;
    let image = |error: vm_memory::GuestMemoryError| Error::Invalid(error.to_string());
    memory.write_slice(ready_again_in_every_child(), GuestAddress(asm_guest::CODE)).map_err(image)?;
    let mut bytes = vec![0; USED];
    memory.read_slice(&mut bytes, GuestAddress(0)).map_err(image)?;

    let failed = || format!("write {}", path.display());
    let file = File::create(path).map_err(system(failed()))?;
    file.set_len(mib << 20).map_err(system(failed()))?;
    for (index, page) in bytes.chunks(PAGE).enumerate().filter(|(_, page)| page.iter().any(|byte| *byte != 0))
    {
        file.write_all_at(page, (index * PAGE) as u64).map_err(system(failed()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::os::unix::fs::MetadataExt;

    #[test]
    fn a_memory_file_is_as_long_as_the_memory_and_holds_almost_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("memory");
        write_memory_file(&path, 512).unwrap();
        let data = std::fs::metadata(&path).unwrap();
        assert_eq!(data.len(), 512 << 20);
        assert!(data.blocks() * 512 < 1 << 20, "{} blocks", data.blocks());
    }
}

//! The tiny guest that keeps writing: what is branched.
//!
//! Booted, it writes to some of its pages and reports ready. A VM that is forked from it sees another VM
//! generation id before its first instruction. The first to see one, the sandbox under measurement, makes its
//! pages dirty, reports that, and goes on rewriting them for good. VMs forked from that one, children of its
//! branches, report at once that they run; whether they write then is an option.

use forkd_vmm::layout::{GENERATION_ID, HIGH_RAM, MMIO_HOLE_END, MMIO_HOLE_START, READY_PORT};
use forkd_vmm::{asm_guest, guest_code};

use crate::{Error, Result};

/// A page of the guest, and of the host.
pub const PAGE: u64 = 4096;
/// A huge page.
pub const HUGE_PAGE: u64 = 2 << 20;
/// Below this are the guest's code, its tables and what the monitor put there; it writes above.
pub const FIRST: u64 = 2 << 20;
/// The most memory it has page tables for.
pub const MAX_MEM_MIB: u64 = 4096;

guest_code! {
    /// The guest of the front page, steered by the numbers that follow the code: see [`Writer::kernel`]. r12:
    /// the numbers. rbx: the generation. r13: how many generations were seen. rax: what is written.
    fn writes_and_says_when_it_is_forked,
    // The boot tables map one GiB: four more, in huge pages, in the pages after the boot tables.
    "mov edi, 0xa008",
    "mov eax, 0xc003",
    "2: mov qword ptr [rdi], rax",
    "add edi, 8",
    "add eax, 0x1000",
    "cmp edi, 0xa028",
    "jne 2b",
    "mov edi, 0xc000",
    "mov eax, 0x40000083",
    "2: mov qword ptr [rdi], rax",
    "add edi, 8",
    "add rax, 0x200000",
    "cmp edi, 0x10000",
    "jne 2b",
    "lea r12, [rip + 9f]",
    // The parent: writes the number it was given, is ready, waits to be forked.
    "mov rax, qword ptr [r12 + 32]",
    "mov r8, qword ptr [r12 + 24]",
    "xor r9d, r9d",
    "call 7f",
    "xor r13d, r13d",
    "mov rbx, qword ptr [0xe8000]",
    "mov edx, 0x602",
    "out dx, al",
    "2: pause",
    "cmp rbx, qword ptr [0xe8000]",
    "je 2b",
    // Forked, for the first time or again.
    "3: mov rbx, qword ptr [0xe8000]",
    "inc r13",
    "mov rax, r13",
    "cmp r13, 1",
    "jne 4f",
    "mov r8, qword ptr [r12 + 40]",
    "xor r9d, r9d",
    "call 7f",
    "4: mov edx, 0x602",
    "out dx, al",
    // The pages every generation writes, each of its own: as many pages further as it is generations old.
    "mov r8, qword ptr [r12 + 48]",
    "mov r9, r13",
    "shl r9, 12",
    "call 7f",
    // The first goes on writing, and looks at every page whether it was forked.
    "mov r8, qword ptr [r12 + 40]",
    "cmp r13, 1",
    "jne 6f",
    "test r8, r8",
    "jz 6f",
    "5: inc rax",
    "mov edi, 0x200000",
    "mov rcx, qword ptr [r12]",
    "call 8f",
    "jne 3b",
    "mov rdi, qword ptr [r12 + 8]",
    "mov rcx, qword ptr [r12 + 16]",
    "call 8f",
    "jne 3b",
    "jmp 5b",
    "6: pause",
    "cmp rbx, qword ptr [0xe8000]",
    "je 6b",
    "jmp 3b",
    // Writes rax to every r8-th byte from r9 on, in both ranges of memory; to none if r8 is 0.
    "7: test r8, r8",
    "jz 2f",
    "lea rdi, [r9 + 0x200000]",
    "mov rcx, qword ptr [r12]",
    "call 10f",
    "mov rdi, qword ptr [r12 + 8]",
    "add rdi, r9",
    "mov rcx, qword ptr [r12 + 16]",
    "call 10f",
    "2: ret",
    "3: mov qword ptr [rdi], rax",
    "add rdi, r8",
    "10: cmp rdi, rcx",
    "jb 3b",
    "ret",
    // The same in one range, from rdi to rcx; returns early, with `ne`, when it was forked.
    "3: mov qword ptr [rdi], rax",
    "add rdi, r8",
    "cmp rbx, qword ptr [0xe8000]",
    "jne 2f",
    "8: cmp rdi, rcx",
    "jb 3b",
    "cmp rbx, qword ptr [0xe8000]",
    "2: ret",
    ".balign 8",
    "9:",
}

// The code above spells these out.
const _: () = assert!(READY_PORT == 0x602 && GENERATION_ID == 0xe_8000 && FIRST == 0x20_0000);
const _: () =
    assert!(forkd_vmm::layout::BOOT_PAGE_TABLES == 0x9000 && forkd_vmm::layout::CMDLINE >= 0x1_0000);
const _: () = assert!(asm_guest::CODE == HIGH_RAM);

/// What a writing guest writes. Distances are in bytes, multiples of a page, and 0 for no page at all.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Writer {
    /// Its memory.
    pub mem_mib: u64,
    /// From one page the booted guest writes to the next.
    pub booted: u64,
    /// What it writes there: 0 makes pages resident that hold nothing.
    pub value: u64,
    /// From one page the sandbox keeps writing to the next.
    pub dirty: u64,
    /// From one page that each generation writes once to its next; every generation writes others.
    pub each: u64,
}

impl Writer {
    /// The guest as a kernel file.
    pub fn kernel(&self) -> Result<Vec<u8>> {
        if self.mem_mib < 4 || self.mem_mib > MAX_MEM_MIB {
            let mib = self.mem_mib;
            return Err(Error::Invalid(format!("{mib} MiB: the writing guest has 4 to {MAX_MEM_MIB}")));
        }
        if [self.booted, self.dirty, self.each].iter().any(|distance| !distance.is_multiple_of(PAGE)) {
            return Err(Error::Invalid("distances between written pages are whole pages".into()));
        }
        let numbers = [self.booted, self.value, self.dirty, self.each];
        Ok(asm_guest::elf_kernel(&with_numbers(writes_and_says_when_it_is_forked(), self.mem_mib, &numbers)))
    }

    /// How many pages each generation writes once.
    pub fn pages_of_each(&self, generation: u64) -> u64 {
        if self.each == 0 {
            return 0;
        }
        let in_range =
            |(start, end): (u64, u64)| end.saturating_sub(start + generation * PAGE).div_ceil(self.each);
        ranges(self.mem_mib).into_iter().map(in_range).sum()
    }
}

/// Code that writes, followed by where: the end of the lower range, begin and end of the upper one, and
/// `numbers`.
pub(crate) fn with_numbers(code: &[u8], mem_mib: u64, numbers: &[u64]) -> Vec<u8> {
    let [(_, low), (high_start, high_end)] = ranges(mem_mib);
    let numbers = [low, high_start, high_end].into_iter().chain(numbers.iter().copied());
    code.iter().copied().chain(numbers.flat_map(u64::to_le_bytes)).collect()
}

/// The memory that is written to, as guest addresses: below the hole for devices, and above.
fn ranges(mem_mib: u64) -> [(u64, u64); 2] {
    let bytes = mem_mib << 20;
    let low = bytes.min(MMIO_HOLE_START);
    [(FIRST, low), (MMIO_HOLE_END, MMIO_HOLE_END + (bytes - low))]
}

/// The distance between pages that makes `percent` of all pages dirty, evenly spread: the worst case,
/// as every page table is in use.
pub fn distance(percent: u64) -> Result<u64> {
    match percent {
        0 => Ok(0),
        1..=100 if 100 % percent == 0 => Ok(100 / percent * PAGE),
        _ => Err(Error::Invalid(format!("{percent} % of pages: it must be 0 or divide 100"))),
    }
}

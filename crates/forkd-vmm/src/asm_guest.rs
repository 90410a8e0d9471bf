//! Tiny guests: a few instructions where others boot Linux.
//!
//! The probe asks KVM with them whether it works, and the tests drive the whole monitor with them,
//! in milliseconds and also on hosts whose KVM is too poor for Linux.

/// Defines a function that returns machine code for a guest, from lines of Intel-syntax assembly:
///
/// ```
/// forkd_vmm::guest_code! {
///     /// Says hello and stops.
///     fn hello,
///     "mov al, 'h'",
///     "mov dx, 0x3f8",
///     "out dx, al",
///     "hlt",
/// }
///
/// fn main() {
///     assert_eq!(hello().last(), Some(&0xf4));
/// }
/// ```
///
/// Lines are assembled for 64-bit mode, or for real mode after `.code16`. The code must not depend on where
/// it is linked: address its own parts relative to `rip`. Names must be unique in a program.
#[macro_export]
macro_rules! guest_code {
    ($(#[$meta:meta])* $vis:vis fn $name:ident, $($line:expr),+ $(,)?) => {
        ::core::arch::global_asm!(
            ".pushsection .rodata",
            concat!(".globl forkd_guest_", stringify!($name)),
            concat!("forkd_guest_", stringify!($name), ":"),
            $($line,)+
            concat!(".globl forkd_guest_end_", stringify!($name)),
            concat!("forkd_guest_end_", stringify!($name), ":"),
            ".code64",
            ".popsection",
        );

        $(#[$meta])*
        $vis fn $name() -> &'static [u8] {
            unsafe extern "C" {
                #[link_name = concat!("forkd_guest_", stringify!($name))]
                static START: u8;
                #[link_name = concat!("forkd_guest_end_", stringify!($name))]
                static END: u8;
            }
            // SAFETY: the two symbols bound the read-only bytes assembled above.
            unsafe {
                let length = (&raw const END).offset_from(&raw const START);
                ::core::slice::from_raw_parts(&raw const START, length as usize)
            }
        }
    };
}

/// Where [`elf_kernel`] puts the code: the lowest address a kernel may have.
pub const CODE: u64 = crate::layout::HIGH_RAM;

/// The smallest vmlinux: an ELF file of one segment that holds `code`, entered at its first byte in
/// 64-bit mode, at address [`CODE`].
pub fn elf_kernel(code: &[u8]) -> Vec<u8> {
    const HEADERS: u64 = 64 + 56;
    let mut elf = b"\x7fELF\x02\x01\x01\0\0\0\0\0\0\0\0\0".to_vec();
    let mut put = |bytes: &[u8]| elf.extend_from_slice(bytes);
    // An executable (2) for x86-64 (62), ELF version 1.
    put(&[2, 0, 62, 0, 1, 0, 0, 0]);
    for field in [CODE, 64, 0] {
        put(&field.to_le_bytes());
    }
    // No flags; sizes of the two headers; one program header; no sections.
    for field in [0, 0, 64, 56, 1, 0, 0, 0u16] {
        put(&field.to_le_bytes());
    }
    // A loadable segment (1), readable and executable (5), linked where kernels are.
    put(&[1, 0, 0, 0, 5, 0, 0, 0]);
    let length = code.len() as u64;
    for field in [HEADERS, 0xffff_ffff_8000_0000 + CODE, CODE, length, length, 0x1000] {
        put(&field.to_le_bytes());
    }
    put(code);
    elf
}

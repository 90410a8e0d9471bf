//! From a bzImage, the compressed file distributions ship, to the ELF vmlinux in it.
//!
//! Done once, natively: a guest that starts from the vmlinux does not have to decompress itself,
//! which takes seconds under emulation. The file format is the boot protocol's, documented in the
//! kernel under `Documentation/arch/x86/boot.rst`.

use std::io::Read;

use flate2::read::GzDecoder;
use lzma_rust2::{LzmaReader, XzReader};
use ruzstd::decoding::StreamingDecoder;

use crate::compress::{XZ_LIMIT_KIB, read_all};
use crate::elf;

/// Offset of the boot protocol's magic.
const MAGIC_AT: usize = 0x202;
const MAGIC: &[u8] = b"HdrS";
/// Since boot protocol 2.08 the header holds the payload's position.
const FIRST_WITH_PAYLOAD: usize = 0x0208;
/// A generic vmlinux has 60 MiB; debugging builds a few hundred.
const MAX_VMLINUX: u64 = 1 << 30;
/// Blocks of the legacy LZ4 format, the only one the kernel uses, decompress to at most this much.
const LZ4_BLOCK: usize = 8 << 20;

/// Whether `data` starts like a bzImage.
pub(crate) fn is_bzimage(data: &[u8]) -> bool {
    data.get(MAGIC_AT..MAGIC_AT + 4) == Some(MAGIC)
}

/// The vmlinux in bzImage `data`. The error completes "it …".
pub(crate) fn vmlinux(data: &[u8]) -> Result<Vec<u8>, String> {
    let payload = payload(data)?;
    let vmlinux = decompress(payload)?;
    elf::check_vmlinux(&vmlinux, vmlinux.len() as u64)
        .map_err(|error| format!("holds a kernel that {error}"))?;
    Ok(vmlinux)
}

/// The kernel's release, such as `6.1.0-54-amd64`, from the header.
pub(crate) fn release(data: &[u8]) -> Option<String> {
    let offset = usize::from(u16::from_le_bytes(data.get(0x20e..0x210)?.try_into().ok()?));
    let text = data.get(offset.checked_add(0x200)?..)?.get(..256)?;
    let word = text.split(|byte| matches!(byte, 0 | b' ')).next()?;
    String::from_utf8(word.to_vec()).ok().filter(|release| !release.is_empty())
}

/// Checks that a file of `length` bytes that starts with `head` is a bzImage, and whole. The error
/// completes "it …".
pub(crate) fn check(head: &[u8], length: u64) -> Result<(), String> {
    let range = payload_range(head)?;
    if range.end as u64 > length { Err("is truncated".into()) } else { Ok(()) }
}

fn payload(data: &[u8]) -> Result<&[u8], String> {
    data.get(payload_range(data)?).ok_or_else(|| "is truncated".into())
}

fn payload_range(data: &[u8]) -> Result<std::ops::Range<usize>, String> {
    if !is_bzimage(data) {
        return Err("is not a bzImage".into());
    }
    let truncated = || "is truncated".to_string();
    let word = |at: usize| -> Option<usize> {
        let bytes = data.get(at..at + 4)?.try_into().ok()?;
        usize::try_from(u32::from_le_bytes(bytes)).ok()
    };
    let version = word(0x206).ok_or_else(truncated)? & 0xffff;
    if version < FIRST_WITH_PAYLOAD {
        return Err(format!("speaks boot protocol {version:#x}, older than {FIRST_WITH_PAYLOAD:#x}"));
    }
    let setup_sectors = match data[0x1f1] {
        0 => 4,
        sectors => usize::from(sectors),
    };
    let offset = word(0x248).ok_or_else(truncated)?;
    let length = word(0x24c).ok_or_else(truncated)?;
    let start = ((setup_sectors + 1) * 512).checked_add(offset).ok_or_else(truncated)?;
    let end = start.checked_add(length).ok_or_else(truncated)?;
    Ok(start..end)
}

fn decompress(payload: &[u8]) -> Result<Vec<u8>, String> {
    let broken = |error: std::io::Error| format!("holds a payload that does not decompress: {error}");
    // All formats but gzip are followed by four bytes with the decompressed size, which only LZ4
    // would take for data.
    if payload.starts_with(&[0x1f, 0x8b]) {
        read_all(GzDecoder::new(payload), MAX_VMLINUX).map_err(broken)
    } else if payload.starts_with(&[0xfd, b'7', b'z', b'X', b'Z', 0]) {
        let reader = XzReader::new_mem_limit(payload, false, XZ_LIMIT_KIB);
        read_all(reader, MAX_VMLINUX).map_err(broken)
    } else if payload.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) {
        let reader = StreamingDecoder::new(payload).map_err(|error| broken(std::io::Error::other(error)))?;
        read_all(reader, MAX_VMLINUX).map_err(broken)
    } else if payload.starts_with(&[0x02, 0x21, 0x4c, 0x18]) {
        lz4(&payload[4..payload.len().saturating_sub(4).max(4)]).map_err(broken)
    } else if payload.starts_with(&[0x5d, 0, 0]) {
        let reader = LzmaReader::new_mem_limit(payload, XZ_LIMIT_KIB, None).map_err(broken)?;
        read_all(reader, MAX_VMLINUX).map_err(broken)
    } else if elf::is_elf(payload) {
        Ok(payload.to_vec())
    } else {
        Err("is compressed in a way forkd does not know (it knows gzip, xz, zstd, lz4 and lzma); \
             give the vmlinux instead"
            .into())
    }
}

fn lz4(mut blocks: &[u8]) -> std::io::Result<Vec<u8>> {
    let mut out = Vec::new();
    let mut block = vec![0u8; LZ4_BLOCK];
    while !blocks.is_empty() {
        let mut length = [0u8; 4];
        blocks.read_exact(&mut length)?;
        let length = usize::try_from(u32::from_le_bytes(length)).unwrap_or(usize::MAX);
        let (this, rest) = blocks.split_at_checked(length).ok_or(std::io::ErrorKind::UnexpectedEof)?;
        let count = lz4_flex::block::decompress_into(this, &mut block).map_err(std::io::Error::other)?;
        out.extend(&block[..count]);
        if out.len() as u64 > MAX_VMLINUX {
            return Err(std::io::Error::other("it is too large"));
        }
        blocks = rest;
    }
    Ok(out)
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    /// A bzImage around `payload`, as the kernel's build makes it.
    fn bzimage(payload: &[u8]) -> Vec<u8> {
        let mut file = vec![0u8; 0x400];
        file[0x1f1] = 1;
        file[MAGIC_AT..MAGIC_AT + 4].copy_from_slice(MAGIC);
        file[0x206..0x208].copy_from_slice(&0x020fu16.to_le_bytes());
        file[0x20e..0x210].copy_from_slice(&0x100u16.to_le_bytes());
        file[0x300..0x310].copy_from_slice(b"6.1.0-9-test (x)");
        file[0x24c..0x250].copy_from_slice(&u32::try_from(payload.len()).unwrap().to_le_bytes());
        file.extend(payload);
        file
    }

    fn gzipped(data: &[u8]) -> Vec<u8> {
        let mut encoder = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
        encoder.write_all(data).unwrap();
        encoder.finish().unwrap()
    }

    #[test]
    fn the_kernel_comes_out_of_its_wrapping() {
        let kernel = elf::samples::vmlinux(b"code");
        // One LZ4 block of literals: a token for 15 and more, the rest of the length, the bytes.
        let mut block = vec![0xf0, u8::try_from(kernel.len() - 15).unwrap()];
        block.extend(&kernel);
        let mut lz4 = vec![0x02, 0x21, 0x4c, 0x18];
        lz4.extend(u32::try_from(block.len()).unwrap().to_le_bytes());
        lz4.extend(&block);
        lz4.extend(u32::try_from(kernel.len()).unwrap().to_le_bytes());
        for payload in [gzipped(&kernel), lz4, kernel.clone()] {
            let image = bzimage(&payload);
            assert_eq!(vmlinux(&image).unwrap(), kernel);
            assert_eq!(release(&image).as_deref(), Some("6.1.0-9-test"));
        }
    }

    #[test]
    fn a_broken_bzimage_is_an_error_wherever_it_breaks() {
        let image = bzimage(&gzipped(&elf::samples::vmlinux(b"code")));
        for cut in 0..image.len() {
            assert!(vmlinux(&image[..cut]).is_err(), "{cut}");
            let _ = release(&image[..cut]);
        }
        assert!(vmlinux(&bzimage(b"who knows what this is")).unwrap_err().contains("does not know"));
        assert!(vmlinux(&bzimage(&gzipped(b"#!/bin/sh"))).unwrap_err().contains("not an ELF"));
    }
}

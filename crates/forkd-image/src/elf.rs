//! The part of ELF this crate needs: the architecture, whether a kernel can be booted, and a module's
//! description of itself. Reads hostile files: every offset is checked.

/// `e_machine` of x86-64.
const MACHINE_X86_64: u16 = 62;
const TYPE_EXEC: u16 = 2;
const SEGMENT_LOAD: u32 = 1;

fn bytes<const N: usize>(data: &[u8], at: u64) -> Option<[u8; N]> {
    let at = usize::try_from(at).ok()?;
    data.get(at..at.checked_add(N)?)?.try_into().ok()
}

fn u16_at(data: &[u8], at: u64) -> Option<u16> {
    bytes(data, at).map(u16::from_le_bytes)
}

fn u32_at(data: &[u8], at: u64) -> Option<u32> {
    bytes(data, at).map(u32::from_le_bytes)
}

fn u64_at(data: &[u8], at: u64) -> Option<u64> {
    bytes(data, at).map(u64::from_le_bytes)
}

/// Whether `data` starts like any ELF file.
pub(crate) fn is_elf(data: &[u8]) -> bool {
    data.starts_with(b"\x7fELF")
}

/// Name of the architecture an ELF file is for; only its first 20 bytes are looked at.
pub(crate) fn architecture(data: &[u8]) -> Option<String> {
    if !is_elf(data) {
        return None;
    }
    let (class, order) = (*data.get(4)?, *data.get(5)?);
    let machine = bytes(data, 18)?;
    let machine = if order == 2 { u16::from_be_bytes(machine) } else { u16::from_le_bytes(machine) };
    Some(match (machine, class) {
        (MACHINE_X86_64, 2) => "x86_64".into(),
        (MACHINE_X86_64, _) => "x32".into(),
        (3, _) => "i386".into(),
        (40, _) => "arm".into(),
        (183, _) => "aarch64".into(),
        (243, _) => "riscv64".into(),
        (22, _) => "s390x".into(),
        (21, _) => "ppc64".into(),
        (other, _) => format!("ELF machine {other}"),
    })
}

/// Checks that a file of `length` bytes that starts with `data` is a kernel that can be loaded: an
/// executable for x86-64 whose segments lie within it. The error completes "it …".
pub(crate) fn check_vmlinux(data: &[u8], length: u64) -> Result<(), String> {
    match architecture(data) {
        None => return Err("is not an ELF file".into()),
        Some(arch) if arch != "x86_64" => return Err(format!("is for {arch}, not for x86_64")),
        Some(_) => {}
    }
    let truncated = || "is truncated: a segment lies beyond its end".to_string();
    if u16_at(data, 16) != Some(TYPE_EXEC) {
        return Err("is an ELF file, but no executable".into());
    }
    let table = u64_at(data, 32).ok_or_else(truncated)?;
    let entry_size = u64::from(u16_at(data, 54).ok_or_else(truncated)?);
    let count = u64::from(u16_at(data, 56).ok_or_else(truncated)?);
    let mut loadable = 0;
    for index in 0..count {
        let at = table.checked_add(index * entry_size).ok_or_else(truncated)?;
        if u32_at(data, at).ok_or_else(truncated)? != SEGMENT_LOAD {
            continue;
        }
        let offset = at.checked_add(8).and_then(|at| u64_at(data, at)).ok_or_else(truncated)?;
        let size = at.checked_add(32).and_then(|at| u64_at(data, at)).ok_or_else(truncated)?;
        let end = offset.checked_add(size).ok_or_else(truncated)?;
        if end > length {
            return Err(truncated());
        }
        loadable += 1;
    }
    if loadable == 0 { Err("has nothing to load".into()) } else { Ok(()) }
}

/// The section called `name` of a 64-bit ELF file.
pub(crate) fn section<'a>(data: &'a [u8], name: &str) -> Option<&'a [u8]> {
    if architecture(data)? != "x86_64" {
        return None;
    }
    let table = u64_at(data, 40)?;
    let entry_size = u64::from(u16_at(data, 58)?);
    let count = u64::from(u16_at(data, 60)?);
    let header = |index: u64| table.checked_add(index * entry_size);
    let contents = |at: u64| {
        let start = usize::try_from(u64_at(data, at.checked_add(24)?)?).ok()?;
        let length = usize::try_from(u64_at(data, at.checked_add(32)?)?).ok()?;
        data.get(start..start.checked_add(length)?)
    };
    let names = contents(header(u64::from(u16_at(data, 62)?))?)?;
    (0..count).find_map(|index| {
        let at = header(index)?;
        let start = usize::try_from(u32_at(data, at)?).ok()?;
        let found = names.get(start..)?.split(|byte| *byte == 0).next()?;
        if found == name.as_bytes() { contents(at) } else { None }
    })
}

/// Small ELF files for tests.
#[cfg(test)]
pub(crate) mod samples {
    /// An executable for x86-64 with one segment of `payload`.
    pub(crate) fn vmlinux(payload: &[u8]) -> Vec<u8> {
        let mut file = vec![0u8; 64 + 56];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[16..18].copy_from_slice(&2u16.to_le_bytes());
        file[18..20].copy_from_slice(&62u16.to_le_bytes());
        file[32..40].copy_from_slice(&64u64.to_le_bytes());
        file[54..56].copy_from_slice(&56u16.to_le_bytes());
        file[56..58].copy_from_slice(&1u16.to_le_bytes());
        file[64..68].copy_from_slice(&1u32.to_le_bytes());
        file[72..80].copy_from_slice(&120u64.to_le_bytes());
        file[96..104].copy_from_slice(&(payload.len() as u64).to_le_bytes());
        file.extend(payload);
        file
    }

    /// A module whose `.modinfo` holds `info`.
    pub(crate) fn module(info: &[u8]) -> Vec<u8> {
        let names = b"\0.modinfo\0.shstrtab\0";
        let mut file = vec![0u8; 64];
        file[..6].copy_from_slice(b"\x7fELF\x02\x01");
        file[16..18].copy_from_slice(&1u16.to_le_bytes());
        file[18..20].copy_from_slice(&62u16.to_le_bytes());
        let info_at = file.len();
        file.extend(info);
        let names_at = file.len();
        file.extend(names);
        let table = file.len() as u64;
        file[40..48].copy_from_slice(&table.to_le_bytes());
        file[58..60].copy_from_slice(&64u16.to_le_bytes());
        file[60..62].copy_from_slice(&3u16.to_le_bytes());
        file[62..64].copy_from_slice(&2u16.to_le_bytes());
        let sections = [(0u32, 0usize, 0usize), (1, info_at, info.len()), (10, names_at, names.len())];
        for (name, at, length) in sections {
            let mut header = [0u8; 64];
            header[..4].copy_from_slice(&name.to_le_bytes());
            header[24..32].copy_from_slice(&(at as u64).to_le_bytes());
            header[32..40].copy_from_slice(&(length as u64).to_le_bytes());
            file.extend(header);
        }
        file
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn check_vmlinux(data: &[u8]) -> Result<(), String> {
        super::check_vmlinux(data, data.len() as u64)
    }

    #[test]
    fn a_kernel_that_is_not_one_is_told_apart() {
        let good = samples::vmlinux(b"code");
        assert_eq!(check_vmlinux(&good), Ok(()));
        assert!(check_vmlinux(b"#!/bin/sh\n").unwrap_err().contains("not an ELF"));
        assert!(check_vmlinux(&good[..good.len() - 1]).unwrap_err().contains("truncated"));
        let mut arm = good.clone();
        arm[18] = 183;
        assert!(check_vmlinux(&arm).unwrap_err().contains("aarch64"));
    }

    #[test]
    fn any_prefix_and_any_changed_byte_is_read_without_a_panic() {
        for sample in [samples::vmlinux(b"code"), samples::module(b"depends=a,b\0")] {
            for cut in 0..sample.len() {
                let _ = check_vmlinux(&sample[..cut]);
                let _ = section(&sample[..cut], ".modinfo");
                for value in [0u8, 1, 0x7f, 0xff] {
                    let mut changed = sample.clone();
                    changed[cut] = value;
                    let _ = check_vmlinux(&changed);
                    let _ = section(&changed, ".modinfo");
                }
            }
        }
    }
}

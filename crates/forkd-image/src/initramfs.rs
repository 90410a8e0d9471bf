//! The initial RAM file system: a `newc` cpio archive with our init, its plan and the modules it
//! loads.
//!
//! Uncompressed, because unpacking is what costs time under emulation; the same input gives the
//! same bytes.

use std::path::Path;

use forkd_protocol::init::InitPlan;

use crate::error::{Error, Result};
use crate::kernel::Kernel;

const FOLDER: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const CONSOLE: u32 = 0o020_600;

/// An initramfs that runs `guest_binary` (a static program) as init, with `modules` and all they
/// depend on, and `plan` for what to do. `plan.modules` is filled in here. Names in `modules` that
/// end in `?` may be missing; those the kernel has built in are left out.
pub fn build_initramfs(
    guest_binary: &Path,
    kernel: &Kernel,
    modules: &[&str],
    mut plan: InitPlan,
) -> Result<Vec<u8>> {
    let init = std::fs::read(guest_binary).map_err(Error::io("read", guest_binary))?;
    let modules = kernel.load_order(modules)?;
    let file_names =
        modules.iter().enumerate().map(|(index, module)| format!("{index:03}-{}.ko", module.name));
    plan.modules = file_names.collect();
    let plan_text = serde_json::to_vec(&plan)
        .map_err(|error| Error::Invalid(format!("the init plan cannot be written: {error}")))?;

    let mut archive = Archive::default();
    for folder in ["dev", "forkd", "forkd/modules", "newroot", "proc", "run", "sys"] {
        archive.add(folder, FOLDER, None, &[])?;
    }
    // The kernel opens it for init before anything is mounted.
    archive.add("dev/console", CONSOLE, Some((5, 1)), &[])?;
    archive.add("init", PROGRAM, None, &init)?;
    archive.add("forkd/init.json", FILE, None, &plan_text)?;
    for (name, module) in plan.modules.iter().zip(&modules) {
        archive.add(&format!("forkd/modules/{name}"), FILE, None, &module.bytes)?;
    }
    archive.finish()
}

/// A `newc` archive in the making.
#[derive(Default)]
struct Archive {
    bytes: Vec<u8>,
    entries: u32,
}

impl Archive {
    fn add(&mut self, name: &str, mode: u32, device: Option<(u32, u32)>, contents: &[u8]) -> Result<()> {
        let too_large = || Error::Invalid(format!("{name} is too large for an initramfs"));
        let size = u32::try_from(contents.len()).map_err(|_| too_large())?;
        let name_size = u32::try_from(name.len() + 1).map_err(|_| too_large())?;
        let (major, minor) = device.unwrap_or_default();
        // Two files with one inode number and more than one link would be taken for hard links.
        self.entries += 1;
        let links = if mode & 0o170_000 == 0o040_000 { 2 } else { 1 };
        let fields = [self.entries, mode, 0, 0, links, 0, size, 0, 0, major, minor, name_size, 0];
        self.bytes.extend(b"070701");
        for field in fields {
            self.bytes.extend(format!("{field:08x}").bytes());
        }
        self.bytes.extend(name.bytes());
        self.bytes.push(0);
        self.pad();
        self.bytes.extend(contents);
        self.pad();
        Ok(())
    }

    fn pad(&mut self) {
        self.bytes.resize(self.bytes.len().next_multiple_of(4), 0);
    }

    fn finish(mut self) -> Result<Vec<u8>> {
        self.add("TRAILER!!!", 0, None, &[])?;
        Ok(self.bytes)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::elf::samples;
    use std::fs;

    /// What is in archive `bytes`: names, modes and contents.
    fn entries(mut bytes: &[u8]) -> Vec<(String, u32, Vec<u8>)> {
        let mut found = Vec::new();
        loop {
            assert_eq!(&bytes[..6], b"070701");
            let field = |index: usize| {
                let text = std::str::from_utf8(&bytes[6 + index * 8..14 + index * 8]).unwrap();
                u32::from_str_radix(text, 16).unwrap()
            };
            let (mode, size, name_size) = (field(1), field(6) as usize, field(11) as usize);
            let name = String::from_utf8(bytes[110..110 + name_size - 1].to_vec()).unwrap();
            let start = (110 + name_size).next_multiple_of(4);
            let contents = bytes[start..start + size].to_vec();
            if name == "TRAILER!!!" {
                return found;
            }
            found.push((name, mode, contents));
            bytes = &bytes[(start + size).next_multiple_of(4)..];
        }
    }

    #[test]
    fn an_initramfs_holds_init_its_plan_and_the_modules_in_load_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name);
        fs::create_dir(path("modules")).unwrap();
        fs::write(path("modules/b.ko"), samples::module(b"depends=\0")).unwrap();
        fs::write(path("modules/a.ko"), samples::module(b"depends=b\0")).unwrap();
        fs::write(path("vmlinux"), samples::vmlinux(b"code")).unwrap();
        fs::write(path("guest"), b"#!init").unwrap();
        // The modules are found beside the kernel.
        let kernel = Kernel::from_path(&path("vmlinux"), None).unwrap();
        let plan = InitPlan { hostname: "box".into(), ..InitPlan::default() };
        let bytes = build_initramfs(&path("guest"), &kernel, &["a", "c?"], plan.clone()).unwrap();
        assert_eq!(bytes, build_initramfs(&path("guest"), &kernel, &["a", "c?"], plan).unwrap());

        let entries = entries(&bytes);
        let get = |name: &str| entries.iter().find(|entry| entry.0 == name).unwrap();
        assert_eq!(get("init").1, PROGRAM);
        assert_eq!(get("init").2, b"#!init");
        assert_eq!(get("dev/console").1, CONSOLE);
        let plan: InitPlan = serde_json::from_slice(&get("forkd/init.json").2).unwrap();
        assert_eq!(plan.hostname, "box");
        assert_eq!(plan.modules, ["000-b.ko", "001-a.ko"]);
        assert_eq!(get("forkd/modules/001-a.ko").2, samples::module(b"depends=b\0"));
    }
}

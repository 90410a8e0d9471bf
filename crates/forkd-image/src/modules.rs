//! Kernel modules: finding them in a folder, and the order to load them in.
//!
//! Dependencies are read from the modules themselves (`depends=` in their `.modinfo` section), not
//! from `modules.dep`: a kernel package has no such file until it is installed and depmod has run,
//! and we never install it. What a kernel has built in is listed in `modules.builtin`, which packages
//! do ship.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::compress;
use crate::elf;
use crate::error::{Error, Result};

/// The most files a modules folder is searched through. Distributions have about 6,000.
const MAX_FILES: usize = 200_000;
/// The largest module known has 12 MiB.
const MAX_MODULE: u64 = 128 << 20;
const MAX_BUILTIN: u64 = 16 << 20;

/// The modules of one kernel.
#[derive(Debug, Clone, Default)]
pub struct ModuleSet {
    folder: PathBuf,
    files: BTreeMap<String, PathBuf>,
    builtin: BTreeSet<String>,
}

/// A module, ready to be loaded.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Module {
    /// Its name as the kernel shows it: with underscores.
    pub name: String,
    /// The ELF file, decompressed.
    pub bytes: Vec<u8>,
}

impl ModuleSet {
    /// Looks through `folder`: a `/lib/modules/<version>`, or a plain folder of `.ko` files.
    pub fn open(folder: &Path) -> Result<ModuleSet> {
        let mut set = ModuleSet { folder: folder.to_owned(), ..ModuleSet::default() };
        let mut pending = vec![folder.to_owned()];
        let mut seen = 0;
        while let Some(next) = pending.pop() {
            for entry in fs::read_dir(&next).map_err(Error::io("read", &next))? {
                let entry = entry.map_err(Error::io("read", &next))?;
                seen += 1;
                if seen > MAX_FILES {
                    let text = format!("{} holds more than {MAX_FILES} files", folder.display());
                    return Err(Error::Invalid(format!("{text}; it is not a folder of kernel modules")));
                }
                // Symlinks are not followed: `build` and `source` lead out of the folder.
                let kind = entry.file_type().map_err(Error::io("read", &next))?;
                if kind.is_dir() {
                    pending.push(entry.path());
                } else if kind.is_file()
                    && let Some(name) = module_name(&entry.file_name().to_string_lossy())
                {
                    set.files.insert(name, entry.path());
                }
            }
        }
        let builtin = folder.join("modules.builtin");
        if builtin.exists() {
            let file = File::open(&builtin).map_err(Error::io("open", &builtin))?;
            let text = compress::read_all(file, MAX_BUILTIN).map_err(Error::io("read", &builtin))?;
            let text = String::from_utf8_lossy(&text).into_owned();
            set.builtin = text.lines().filter_map(|line| module_name(line.rsplit('/').next()?)).collect();
        }
        Ok(set)
    }

    /// The modules in `wanted` and all they depend on, each once, in an order they can be loaded in.
    /// What the kernel has built in is left out. A name that ends in `?` may be missing.
    pub fn load_order(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        let mut order = Vec::new();
        let mut done = BTreeSet::new();
        for name in wanted {
            let (name, optional) = match name.strip_suffix('?') {
                Some(name) => (name, true),
                None => (*name, false),
            };
            let name = normal(name);
            if self.has(&name) {
                self.add(name, &mut order, &mut done)?;
            } else if !optional {
                return Err(self.missing(&name, None));
            }
        }
        Ok(order)
    }

    /// Whether the kernel has `name`, as a module or built in.
    fn has(&self, name: &str) -> bool {
        self.builtin.contains(name) || self.files.contains_key(name)
    }

    /// Adds `name` after its dependencies. Depth first with a stack of its own: the dependencies come from
    /// files, so recursion would have no bound.
    fn add(&self, name: String, order: &mut Vec<Module>, done: &mut BTreeSet<String>) -> Result<()> {
        let mut stack: Vec<(Module, Vec<String>)> = Vec::new();
        let mut next = Some((name, None::<String>));
        loop {
            if let Some((name, by)) = next.take()
                && !self.builtin.contains(&name)
                && done.insert(name.clone())
            {
                let path = self.files.get(&name).ok_or_else(|| self.missing(&name, by.as_deref()))?;
                let module = read_module(&name, path)?;
                let depends = depends(&module.bytes).ok_or_else(|| {
                    Error::Invalid(format!("{} is not a kernel module for x86_64", path.display()))
                })?;
                stack.push((module, depends));
            }
            match stack.last_mut() {
                None => return Ok(()),
                Some((module, depends)) => match depends.pop() {
                    Some(name) => next = Some((name, Some(module.name.clone()))),
                    None => order.extend(stack.pop().map(|(module, _)| module)),
                },
            }
        }
    }

    fn missing(&self, name: &str, by: Option<&str>) -> Error {
        let by = by.map(|by| format!(", which {by} depends on,")).unwrap_or_default();
        Error::NotFound(format!(
            "kernel module {name}{by} is neither in {} nor built into the kernel; \
             use a kernel that has it, such as the distribution's generic one",
            self.folder.display()
        ))
    }
}

/// The kernel takes `-` and `_` for the same in module names.
fn normal(name: &str) -> String {
    name.replace('-', "_")
}

/// `virtio_rng` for `virtio-rng.ko.xz`.
fn module_name(file: &str) -> Option<String> {
    let (name, suffix) = file.rsplit_once(".ko")?;
    matches!(suffix, "" | ".xz" | ".zst" | ".gz").then(|| normal(name))
}

fn read_module(name: &str, path: &Path) -> Result<Module> {
    let file = File::open(path).map_err(Error::io("open", path))?;
    let bytes = compress::read_all(compress::reader(file)?, MAX_MODULE).map_err(Error::io("read", path))?;
    Ok(Module { name: name.to_owned(), bytes })
}

/// The dependencies of the module in `bytes`, last first.
fn depends(bytes: &[u8]) -> Option<Vec<String>> {
    let info = elf::section(bytes, ".modinfo")?;
    let mut names: Vec<String> = info
        .split(|byte| *byte == 0)
        .filter_map(|line| std::str::from_utf8(line).ok()?.strip_prefix("depends="))
        .flat_map(|list| list.split(','))
        .filter(|name| !name.is_empty())
        .map(normal)
        .collect();
    names.reverse();
    Some(names)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(modules: &[(&str, &str)]) -> tempfile::TempDir {
        let folder = tempfile::tempdir().unwrap();
        fs::create_dir_all(folder.path().join("kernel/fs")).unwrap();
        for (file, depends) in modules {
            let info = format!("license=GPL\0depends={depends}\0name=x\0");
            fs::write(folder.path().join("kernel/fs").join(file), elf::samples::module(info.as_bytes()))
                .unwrap();
        }
        fs::write(folder.path().join("modules.builtin"), "kernel/drivers/virtio/virtio.ko\n").unwrap();
        folder
    }

    fn order(folder: &Path, wanted: &[&str]) -> Result<Vec<String>> {
        let modules = ModuleSet::open(folder)?.load_order(wanted)?;
        Ok(modules.into_iter().map(|module| module.name).collect())
    }

    #[test]
    fn what_a_module_needs_is_loaded_before_it_and_only_once() {
        let folder = folder(&[
            ("ext4.ko", "mbcache,jbd2,virtio"),
            ("jbd2.ko", "crc"),
            ("mbcache.ko", ""),
            ("crc.ko", ""),
            ("virtio-rng.ko", "virtio,crc"),
        ]);
        assert_eq!(
            order(folder.path(), &["ext4", "virtio_rng", "jbd2", "virtio"]).unwrap(),
            ["mbcache", "crc", "jbd2", "ext4", "virtio_rng"]
        );
    }

    #[test]
    fn a_missing_module_is_named_unless_it_is_optional() {
        let folder = folder(&[("a.ko", "b")]);
        assert!(order(folder.path(), &["c?"]).unwrap().is_empty());
        let error = order(folder.path(), &["c"]).unwrap_err().to_string();
        assert!(error.contains("module c is neither"), "{error}");
        let error = order(folder.path(), &["a"]).unwrap_err().to_string();
        assert!(error.contains("module b, which a depends on,"), "{error}");
    }

    #[test]
    fn modules_that_depend_on_each_other_do_not_loop() {
        let folder = folder(&[("a.ko", "b"), ("b.ko", "a")]);
        assert_eq!(order(folder.path(), &["a"]).unwrap(), ["b", "a"]);
    }

    #[test]
    fn garbage_called_a_module_is_refused() {
        let folder = folder(&[]);
        fs::write(folder.path().join("a.ko"), b"garbage").unwrap();
        assert!(order(folder.path(), &["a"]).unwrap_err().to_string().contains("not a kernel module"));
    }
}

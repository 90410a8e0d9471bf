//! A kernel and the modules that go with it.

use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};

use serde::{Deserialize, Serialize};

use crate::bzimage;
use crate::elf;
use crate::error::{Error, Result};
use crate::library::read_manifest;
use crate::modules::{Module, ModuleSet};

/// Version of the folder format of kernels.
pub(crate) const FORMAT: u32 = 1;
pub(crate) const MANIFEST: &str = "kernel.json";
pub(crate) const VMLINUX: &str = "vmlinux";
pub(crate) const VMLINUZ: &str = "vmlinuz";
pub(crate) const MODULES: &str = "modules";
/// How much of a kernel file is read to recognise its kind: all headers lie within.
const HEAD: u64 = 64 << 10;

/// Modules a guest's initramfs loads: its devices, its root file system, and what ends single sockets in a
/// child (`tcp_diag`, `udp_diag`). ext4 finds its checksum by an alias that only depmod could resolve, so the
/// module behind it is named here.
pub const GUEST_MODULES: &[&str] = &[
    "virtio_mmio",
    "virtio_blk",
    "crc32c_generic?",
    "crc32c_intel?",
    "ext4",
    "virtio_net",
    "vmw_vsock_virtio_transport",
    "virtio_rng?",
    "vmgenid?",
    "tcp_diag?",
    "udp_diag?",
];

/// Modules the emulated machine's initramfs loads: the host's files over 9p, KVM on the emulated
/// (AMD) processor, its data disk, disks in files, and what network slots are made of.
pub const MACHINE_MODULES: &[&str] = &[
    "virtio_pci",
    "9pnet_virtio",
    "9p",
    "overlay",
    "virtio_blk",
    "crc32c_generic?",
    "crc32c_intel?",
    "ext4",
    "loop?",
    "virtio_net",
    "virtio_rng?",
    "kvm_amd",
    "tun",
    "veth",
    "bridge",
    "nf_tables",
    "nf_conntrack",
    "nf_nat",
    "nft_chain_nat",
    "nft_ct",
    "nft_nat?",
    "nft_masq",
    "nft_limit?",
    "nft_connlimit?",
    "nft_objref?",
    "nft_reject_inet?",
    "nft_fib_inet?",
    "nft_log?",
    "nft_counter?",
];

/// Modules kept besides those: for root file systems, containers and hosts of other kinds.
pub(crate) const MORE_MODULES: &[&str] = &[
    "virtio_mmio?",
    "kvm_intel?",
    "squashfs?",
    "erofs?",
    "xfs?",
    "btrfs?",
    "fuse?",
    "virtiofs?",
    "dm_mod?",
    "dummy?",
    "macvlan?",
    "br_netfilter?",
    "nft_redir?",
    "nft_compat?",
    "xt_MASQUERADE?",
    "xt_conntrack?",
    "ip_tables?",
    "vhost_vsock?",
    "vsock_loopback?",
    "virtio_console?",
    "virtio_balloon?",
    "virtio_mem?",
    "configs?",
];

/// The manifest of a library's kernel; `kernel.json` in its folder.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct KernelManifest {
    pub(crate) format: u32,
    pub(crate) version: String,
    /// Where it came from, for people.
    pub(crate) source: String,
    pub(crate) vmlinux_bytes: u64,
    pub(crate) vmlinuz_bytes: u64,
    /// Modules that were looked for when it was fetched, whether it has them or not. Older versions of forkd
    /// did not write it.
    #[serde(default)]
    pub(crate) looked_for: Vec<String>,
}

/// Names of all modules that a library keeps of a kernel.
pub(crate) fn kept_modules() -> Vec<String> {
    let names = [GUEST_MODULES, MACHINE_MODULES, MORE_MODULES].concat();
    names.iter().map(|name| name.trim_end_matches('?').to_owned()).collect()
}

/// A kernel.
#[derive(Debug, Clone)]
pub struct Kernel {
    /// Its release, such as `6.1.0-54-amd64`, or its file's name where that is not known.
    pub version: String,
    /// Where it came from, for people.
    pub source: String,
    /// What to boot: an ELF vmlinux, or a bzImage if one was given by path.
    pub image: PathBuf,
    /// The same kernel as a bzImage, if there is one.
    pub bzimage: Option<PathBuf>,
    /// Its modules. `None` if they are unknown; such a kernel has only what is built in.
    modules: Option<ModuleSet>,
    /// Whether it was fetched with every module that this version of forkd keeps.
    complete: bool,
}

impl Kernel {
    /// The kernel in a library's folder.
    pub(crate) fn read(folder: &Path) -> Result<Kernel> {
        let fix = format!("remove {} and forkd fetches it again", folder.display());
        let manifest: KernelManifest = read_manifest(&folder.join(MANIFEST), FORMAT, &fix)?;
        let files = [(VMLINUX, manifest.vmlinux_bytes), (VMLINUZ, manifest.vmlinuz_bytes)];
        for (name, bytes) in files {
            let path = folder.join(name);
            let found = std::fs::metadata(&path).map_err(Error::io("read", &path))?.len();
            if found != bytes {
                return Err(Error::Invalid(format!(
                    "{} has {found} bytes and should have {bytes}; {fix}",
                    path.display()
                )));
            }
        }
        Ok(Kernel {
            version: manifest.version,
            source: manifest.source,
            image: folder.join(VMLINUX),
            bzimage: Some(folder.join(VMLINUZ)),
            modules: Some(ModuleSet::open(&folder.join(MODULES))?),
            complete: kept_modules().iter().all(|name| manifest.looked_for.contains(name)),
        })
    }

    /// The vmlinux or bzImage at `path`, with its folder of modules (a `/lib/modules/<version>`). When
    /// none is named, one called `modules` beside the file counts, as libraries have it; without one
    /// the kernel is taken to have everything built in.
    pub fn from_path(path: &Path, modules: Option<&Path>) -> Result<Kernel> {
        let file = File::open(path).map_err(Error::io("open", path))?;
        let length = file.metadata().map_err(Error::io("read", path))?.len();
        let mut head = Vec::new();
        file.take(HEAD).read_to_end(&mut head).map_err(Error::io("read", path))?;
        let refuse = |why: String| {
            Error::Invalid(format!(
                "{} is no kernel forkd can boot: it {why}; give an ELF vmlinux or a bzImage for x86_64",
                path.display()
            ))
        };
        let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let (version, bzimage) = if elf::is_elf(&head) {
            elf::check_vmlinux(&head, length).map_err(refuse)?;
            (name, None)
        } else if bzimage::is_bzimage(&head) {
            bzimage::check(&head, length).map_err(refuse)?;
            (bzimage::release(&head).unwrap_or(name), Some(path.to_owned()))
        } else {
            return Err(refuse("is neither an ELF file nor a bzImage".into()));
        };
        let beside = path.with_file_name(MODULES);
        let modules = modules.or_else(|| beside.is_dir().then_some(beside.as_path()));
        let modules = modules.map(ModuleSet::open).transpose()?;
        Ok(Kernel {
            version,
            source: format!("file {}", path.display()),
            image: path.to_owned(),
            bzimage,
            modules,
            complete: true,
        })
    }

    /// Whether the library has all of it. A kernel that an older version of forkd fetched may lack modules that
    /// this one uses; [`crate::Library::ensure_kernel`] fetches it again.
    pub fn is_complete(&self) -> bool {
        self.complete
    }

    /// The modules in `wanted` with all they depend on, in load order; see [`ModuleSet::load_order`]. Empty
    /// for a kernel whose modules are unknown.
    pub fn load_order(&self, wanted: &[&str]) -> Result<Vec<Module>> {
        self.modules.as_ref().map_or(Ok(Vec::new()), |modules| modules.load_order(wanted))
    }
}

/// A key that sorts versions as people do: numbers by value.
pub(crate) fn version_key(version: &str) -> Vec<(u64, String)> {
    let mut key = Vec::new();
    let mut rest = version;
    while !rest.is_empty() {
        let word_end = rest.find(|c: char| c.is_ascii_digit()).unwrap_or(rest.len());
        let (word, after) = rest.split_at(word_end);
        let number_end = after.find(|c: char| !c.is_ascii_digit()).unwrap_or(after.len());
        let (number, after) = after.split_at(number_end);
        key.push((number.parse().unwrap_or(0), word.to_owned()));
        rest = after;
    }
    key
}

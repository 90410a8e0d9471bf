//! The files of a boot. This is the only module that knows the library of images and kernels.

use std::fs::File;
use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;

use forkd_image::{GUEST_MODULES, IMAGE_FORMAT, Kernel, Library, Manifest, build_initramfs};
use forkd_protocol::agent::WarmRequest;
use forkd_protocol::init::{InitPlan, InterfacePlan};
use forkd_protocol::json_lines::LINE_PORT;
use forkd_store::BaseImage;
use parking_lot::Mutex;
use rustix::fs::{MemfdFlags, Mode, OFlags, SealFlags};

use crate::config::Config;
use crate::error::{Code, Error, Result};
use crate::host::allowed_paths;

/// The open files of a boot.
#[derive(Debug, Clone)]
pub(crate) struct BootSource {
    kernel: Arc<OwnedFd>,
    /// The parts that a guest with an image has; a bare kernel has none.
    root: Option<Root>,
    /// What a snapshot has of the disk; none of a fresh one.
    disk_layers: Option<Arc<DiskLayers>>,
}

/// The frozen layers of a guest's disk and the state with its block map, from a snapshot of disks alone.
#[derive(Debug)]
pub(crate) struct DiskLayers {
    pub(crate) state: OwnedFd,
    /// Oldest first.
    pub(crate) layers: Vec<OwnedFd>,
}

#[derive(Debug, Clone)]
struct Root {
    initramfs: Arc<OwnedFd>,
    disk: Arc<OwnedFd>,
    image: Manifest,
}

/// Descriptors of one boot, for one monitor.
#[derive(Debug)]
pub(crate) struct BootFiles {
    pub(crate) kernel: OwnedFd,
    pub(crate) root: Option<RootFiles>,
    pub(crate) disk_layers: Option<DiskLayers>,
}

/// The files by which a guest finds its image.
#[derive(Debug)]
pub(crate) struct RootFiles {
    pub(crate) initramfs: OwnedFd,
    /// The image's root disk.
    pub(crate) disk: OwnedFd,
}

impl BootSource {
    /// A kernel without an image.
    pub(crate) fn bare(config: &Config, kernel: &Path) -> Result<Self> {
        let kernel = allowed_paths::kernel(config, kernel)?;
        Ok(BootSource { kernel: Arc::new(kernel.into()), root: None, disk_layers: None })
    }

    /// The same with the disk of a snapshot.
    pub(crate) fn on(self, disk: DiskLayers) -> Self {
        BootSource { disk_layers: Some(Arc::new(disk)), ..self }
    }

    /// Descriptors for one boot. Each boot gets new ones, for reading only: a monitor must not share a file
    /// position with another one, nor write.
    pub(crate) fn open(&self) -> Result<BootFiles> {
        let root = match &self.root {
            Some(root) => Some(RootFiles { initramfs: reopen(&root.initramfs)?, disk: reopen(&root.disk)? }),
            None => None,
        };
        let disk_layers = self.disk_layers.as_ref().map(|disk| {
            let layers = disk.layers.iter().map(reopen).collect::<Result<_>>()?;
            Ok::<_, Error>(DiskLayers { state: reopen(&disk.state)?, layers })
        });
        Ok(BootFiles { kernel: reopen(&self.kernel)?, root, disk_layers: disk_layers.transpose()? })
    }

    /// The frozen layers of its disk.
    pub(crate) fn disk_layers(&self) -> &[OwnedFd] {
        self.disk_layers.as_ref().map_or(&[], |disk| &disk.layers)
    }

    /// The manifest of its image.
    pub(crate) fn image(&self) -> Option<&Manifest> {
        self.root.as_ref().map(|root| &root.image)
    }

    /// The identity of the file under its disk.
    pub(crate) fn base(&self) -> Result<Option<BaseImage>> {
        let Some(root) = &self.root else { return Ok(None) };
        let disk = File::from(reopen(&root.disk)?);
        let base = BaseImage::of(&root.image.name, &root.image.disk_digest, &disk);
        base.map(Some).map_err(|error| Error::host("cannot look at the image's disk", error))
    }
}

/// Another descriptor of the same file, for reading.
pub(crate) fn reopen(fd: impl AsFd) -> Result<OwnedFd> {
    // Non-blocking: no effect on regular files, and any other file must not block the daemon.
    let flags = OFlags::RDONLY | OFlags::NONBLOCK | OFlags::CLOEXEC;
    let path = format!("/proc/self/fd/{}", fd.as_fd().as_raw_fd());
    rustix::fs::open(path, flags, Mode::empty())
        .map_err(|error| Error::host("cannot open a file again", error))
}

/// Finds images and kernels. All calls block.
#[derive(Debug)]
pub(crate) struct ImageLibrary {
    library: Library,
    kernel: Option<PathBuf>,
    guest: PathBuf,
    /// The last initramfs with the JSON-lines service, and the last one without: to build one, modules are unpacked,
    /// which takes time.
    initramfs: Mutex<[Option<LastInitramfs>; 2]>,
}

/// The source files of an initramfs, with their sizes and times.
type Ingredients = [(PathBuf, u64, SystemTime); 2];

/// What an initramfs was built from, and its file.
type LastInitramfs = (Ingredients, Arc<OwnedFd>);

/// Images for programs written for E2B. Those may start a server of their own on the port of the JSON-lines service,
/// which is Jupyter's too; E2B leaves it free.
const WITHOUT_LINES: [&str; 2] = ["base", "code-interpreter-v1"];

/// The port of the JSON-lines service in guests of the image.
fn line_port(image: &str) -> Option<u16> {
    (!WITHOUT_LINES.contains(&image)).then_some(LINE_PORT)
}

impl ImageLibrary {
    pub(crate) fn new(config: &Config) -> Self {
        ImageLibrary {
            library: Library::open(&config.library_dir),
            kernel: config.kernel.clone(),
            guest: config.guest.clone(),
            initramfs: Mutex::default(),
        }
    }

    /// Finds and opens the files to boot a guest of `image`.
    pub(crate) fn find(&self, image: &str) -> Result<BootSource> {
        let image = self.library.image(image)?;
        let kernel = match &self.kernel {
            Some(path) => kernel_at(path)?,
            None => self.library.kernel(None)?,
        };
        let initramfs = self.initramfs(&kernel, line_port(&image.manifest.name))?;
        let disk = open(&image.disk)?;
        let root = Some(Root { initramfs, disk, image: image.manifest });
        Ok(BootSource { kernel: open(&kernel.image)?, root, disk_layers: None })
    }

    /// Opens the files to boot a guest from a disk outside the library.
    pub(crate) fn find_disk(
        &self,
        config: &Config,
        kernel: Option<&Path>,
        rootfs: &Path,
    ) -> Result<BootSource> {
        let named = kernel.map(|kernel| allowed_paths::kernel(config, kernel)).transpose()?;
        let kernel = match kernel.or(self.kernel.as_deref()) {
            Some(path) => {
                kernel_at(path).map_err(|error| Error::invalid("the kernel cannot be used").because(error))?
            }
            None => self.library.kernel(None)?,
        };
        let disk = check_rootfs(rootfs, allowed_paths::disk(config, rootfs)?)?;
        let image = Manifest {
            format: IMAGE_FORMAT,
            name: rootfs.display().to_string(),
            created: 0,
            source: "a disk of its own".into(),
            architecture: std::env::consts::ARCH.into(),
            disk_bytes: disk.metadata().map_or(0, |meta| meta.len()),
            disk_digest: NO_DIGEST.into(),
            python: false,
            warm: WarmRequest { python: Some(IMPORT_NUMPY.into()), ..WarmRequest::default() },
            definition: None,
        };
        let initramfs = self.initramfs(&kernel, Some(LINE_PORT))?;
        let root = Some(Root { initramfs, disk: Arc::new(disk.into()), image });
        // The file that was checked, even if its path leads to another one by now.
        let kernel = match named {
            Some(named) => Arc::new(named.into()),
            None => open(&kernel.image)?,
        };
        Ok(BootSource { kernel, root, disk_layers: None })
    }

    /// The disk of `image`, under a snapshot's own layers, and its identity.
    pub(crate) fn disk(&self, config: &Config, image: &str) -> Result<(OwnedFd, BaseImage)> {
        if image.starts_with('/') {
            let path = Path::new(image);
            let disk = check_rootfs(path, allowed_paths::disk(config, path)?)?;
            let base = BaseImage::of(image, NO_DIGEST, &disk)
                .map_err(|error| Error::host(format!("cannot read {image}"), error))?;
            return Ok((disk.into(), base));
        }
        let image = self.library.image(image)?;
        let disk = File::open(&image.disk)
            .map_err(|error| Error::host(format!("cannot open {}", image.disk.display()), error))?;
        let base = BaseImage::of(&image.manifest.name, &image.manifest.disk_digest, &disk)
            .map_err(|error| Error::host(format!("cannot read {}", image.disk.display()), error))?;
        Ok((disk.into(), base))
    }

    fn initramfs(&self, kernel: &Kernel, line_port: Option<u16>) -> Result<Arc<OwnedFd>> {
        let ingredients = [ingredient(&kernel.image)?, ingredient(&self.guest)?];
        // Held while it is made: other boots that need it wait, and do not make the same.
        let mut last = self.initramfs.lock();
        let last = &mut last[usize::from(line_port.is_some())];
        if let Some((made_of, initramfs)) = last.as_ref()
            && *made_of == ingredients
        {
            return Ok(initramfs.clone());
        }
        // The guest configures the interface if it has one.
        let interface = InterfacePlan {
            name: "eth0".into(),
            address: format!("{}/{}", forkd_net::GUEST_ADDRESS, forkd_net::GUEST_PREFIX),
            gateway: Some(forkd_net::GATEWAY_ADDRESS.to_string()),
        };
        let plan = InitPlan {
            hostname: "sandbox".into(),
            network: vec![interface],
            name_servers: vec![forkd_net::GATEWAY_ADDRESS.to_string()],
            line_port,
            ..InitPlan::default()
        };
        let bytes = build_initramfs(&self.guest, kernel, GUEST_MODULES, plan)?;
        let initramfs =
            sealed(&bytes).map_err(|error| Error::host("cannot hold an initramfs in memory", error))?;
        let initramfs = Arc::new(initramfs);
        *last = Some((ingredients, initramfs.clone()));
        Ok(initramfs)
    }
}

/// The warm-up that the reference's agent does in a guest with Python, so that clients need not: import numpy, if
/// it is installed.
const IMPORT_NUMPY: &str = "try:\n    import numpy, numpy as np\nexcept ImportError:\n    pass";

/// The digest of a disk outside the library: its size and time identify it instead.
const NO_DIGEST: &str = "";

/// Checks a disk that a request named.
fn check_rootfs(path: &Path, disk: File) -> Result<File> {
    match disk.metadata() {
        Ok(meta) if meta.is_file() && meta.len() > 0 && meta.len() % SECTOR == 0 => Ok(disk),
        _ => Err(Error::invalid(format!(
            "{} is not a disk image: give a regular file of whole sectors of {SECTOR} bytes, with an ext4 file system",
            path.display()
        ))),
    }
}

/// The size of a disk's sector.
const SECTOR: u64 = 512;

/// A kernel at a given path, with the host's modules for it if there are any.
fn kernel_at(path: &Path) -> Result<Kernel> {
    let kernel = Kernel::from_path(path, None)?;
    let modules = Path::new("/lib/modules").join(&kernel.version);
    match modules.is_dir() {
        true => Ok(Kernel::from_path(path, Some(&modules))?),
        false => Ok(kernel),
    }
}

fn open(path: &Path) -> Result<Arc<OwnedFd>> {
    let file =
        File::open(path).map_err(|error| Error::host(format!("cannot open {}", path.display()), error))?;
    Ok(Arc::new(file.into()))
}

fn ingredient(path: &Path) -> Result<(PathBuf, u64, SystemTime)> {
    let known = std::fs::metadata(path).and_then(|metadata| Ok((metadata.len(), metadata.modified()?)));
    let (length, modified) =
        known.map_err(|error| Error::host(format!("cannot read {}", path.display()), error))?;
    Ok((path.to_owned(), length, modified))
}

/// `bytes` in a sealed file without a name, which no process can change.
fn sealed(bytes: &[u8]) -> std::io::Result<OwnedFd> {
    let fd = rustix::fs::memfd_create("initramfs", MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
    let mut file = File::from(fd);
    file.write_all(bytes)?;
    rustix::fs::fcntl_add_seals(
        &file,
        SealFlags::WRITE | SealFlags::GROW | SealFlags::SHRINK | SealFlags::SEAL,
    )?;
    Ok(file.into())
}

impl From<forkd_image::Error> for Error {
    fn from(error: forkd_image::Error) -> Self {
        match error {
            forkd_image::Error::NotFound(text) => Error::new(Code::ImageNotFound, text),
            error => Error::host("the library of images failed", error),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::{Read, Seek};

    #[test]
    fn every_boot_reads_from_the_start_and_none_can_write() {
        let fd = sealed(b"initramfs").unwrap();
        for _ in 0..2 {
            let mut file = File::from(reopen(&fd).unwrap());
            let mut text = String::new();
            file.read_to_string(&mut text).unwrap();
            assert_eq!(text, "initramfs");
            assert!(file.write_all(b"x").is_err());
        }
        let mut original = File::from(fd);
        original.rewind().unwrap();
        assert!(original.write_all(b"x").is_err(), "sealed, even for the first descriptor");
    }

    #[test]
    fn the_port_of_the_json_lines_service_is_free_in_images_for_e2b() {
        for (image, port) in
            [("base", None), ("code-interpreter-v1", None), ("python", Some(8888)), ("mine", Some(8888))]
        {
            assert_eq!(line_port(image), port, "{image}");
        }
    }

    #[test]
    fn the_error_for_a_missing_image_has_the_fix() {
        let dir = tempfile::tempdir().unwrap();
        let finder = ImageLibrary::new(&Config::new(dir.path()));
        let error = finder.find("python").unwrap_err();
        assert_eq!(error.code(), Code::ImageNotFound);
        assert!(error.public().contains("forkd image build python"), "{error}");
    }
}

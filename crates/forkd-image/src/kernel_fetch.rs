//! Getting a kernel: the distribution's newest generic one, from its package, without installing it;
//! where that cannot be had, the one the host has installed.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use crate::apt::Apt;
use crate::bzimage;
use crate::compress::read_all;
use crate::error::{Error, Result};
use crate::kernel::{
    FORMAT, Kernel, KernelManifest, MANIFEST, MODULES, VMLINUX, VMLINUZ, kept_modules, version_key,
};
use crate::library::{Library, publish, unfinished};
use crate::modules::ModuleSet;
use crate::progress::Progress;
use crate::tools;

/// Kernel packages have about 15 MiB of bzImage.
const MAX_VMLINUZ: u64 = 256 << 20;

/// A kernel as files: where its bzImage and its modules are, and where they came from.
struct Found {
    version: String,
    vmlinuz: PathBuf,
    modules: PathBuf,
    source: String,
}

/// Puts the distribution's kernel into `library`. The caller holds the kernels' lock.
pub(crate) fn fetch(library: &Library, progress: &dyn Progress) -> Result<Kernel> {
    let kernels = library.kernels_folder();
    let folder = unfinished(&kernels, "kernel")?;
    let work = folder.join("work");
    fs::create_dir_all(&work).map_err(Error::io("create", &work))?;
    let built = find(&work, progress).and_then(|found| {
        fill(&folder, &found, progress)?;
        fs::remove_dir_all(&work).map_err(Error::io("remove", &work))?;
        publish(&folder, &kernels.join(&found.version))?;
        Ok(found.version)
    });
    match built {
        Ok(version) => library.kernel(Some(&version)),
        Err(error) => {
            // Best effort: the next fetch removes what stays.
            let _ = fs::remove_dir_all(&folder);
            Err(error)
        }
    }
}

fn find(work: &Path, progress: &dyn Progress) -> Result<Found> {
    let failed = match download(work, progress) {
        Ok(found) => return Ok(found),
        Err(error) => error,
    };
    match installed(Path::new("/")) {
        Some(found) => {
            progress.log(&format!("no kernel package could be had ({failed}); using the installed kernel"));
            Ok(found)
        }
        None => Err(failed),
    }
}

/// Downloads and unpacks the distribution's generic kernel.
fn download(work: &Path, progress: &dyn Progress) -> Result<Found> {
    let apt = Apt::open(&work.join("apt"), progress)?;
    let meta =
        if apt.distribution().origin == "Ubuntu" { "linux-image-generic" } else { "linux-image-amd64" };
    let depends = apt.depends(meta)?.unwrap_or_default();
    let package = depends.iter().find(|name| is_image_package(name)).ok_or_else(|| {
        Error::Host(format!(
            "apt knows no kernel: {meta} is not among its packages; give a kernel by its path instead"
        ))
    })?;
    let mut packages = vec![package.clone()];
    // Debian's image package holds the modules; Ubuntu's has them in packages of their own.
    if let Some(version) = package.strip_prefix("linux-image-") {
        for modules in [format!("linux-modules-{version}"), format!("linux-modules-extra-{version}")] {
            if apt.depends(&modules)?.is_some() {
                packages.push(modules);
            }
        }
    }
    progress.step(&format!("downloading {package}"));
    let archives = work.join("packages");
    fs::create_dir_all(&archives).map_err(Error::io("create", &archives))?;
    apt.download(&packages, &archives, progress)?;
    progress.step(&format!("unpacking {package}"));
    let tree = work.join("tree");
    let mut source = package.clone();
    for entry in fs::read_dir(&archives).map_err(Error::io("read", &archives))? {
        let archive = entry.map_err(Error::io("read", &archives))?.path();
        let mut command = tools::command("dpkg-deb", "dpkg")?;
        command.arg("-x").arg(&archive).arg(&tree);
        tools::output(command)?;
        if let Some(version) = archive.file_name().and_then(|name| name.to_str()?.split('_').nth(1)) {
            source = format!("{} package {package} {version}", apt.distribution().origin);
        }
    }
    let mut found = installed(&tree).ok_or_else(|| {
        Error::Host(format!("package {package} holds no kernel; give one by its path instead"))
    })?;
    found.source = source;
    Ok(found)
}

/// `linux-image-6.1.0-54-amd64`, but neither a meta package nor a debugging one.
fn is_image_package(name: &str) -> bool {
    let version = name.strip_prefix("linux-image-").or_else(|| name.strip_prefix("linux-image-unsigned-"));
    version.is_some_and(|version| {
        version.starts_with(|c: char| c.is_ascii_digit()) && !version.ends_with("-dbg")
    })
}

/// The newest kernel under `root` that can be read and has its modules. The cloud and real-time
/// builds come last: the first lacks the VM generation id driver.
fn installed(root: &Path) -> Option<Found> {
    let boot = root.join("boot");
    let mut found: Vec<Found> = fs::read_dir(&boot)
        .ok()?
        .filter_map(|entry| {
            let name = entry.ok()?.file_name().into_string().ok()?;
            let version = name.strip_prefix("vmlinuz-")?.to_owned();
            let vmlinuz = boot.join(&name);
            File::open(&vmlinuz).ok()?;
            let modules =
                ["lib/modules", "usr/lib/modules"].iter().map(|folder| root.join(folder).join(&version));
            let modules = modules.into_iter().find(|path| path.is_dir())?;
            let source = format!("installed kernel {}", vmlinuz.display());
            Some(Found { version, vmlinuz, modules, source })
        })
        .collect();
    found.sort_by_key(|kernel| {
        let special = kernel.version.contains("cloud") || kernel.version.contains("-rt");
        (!special, version_key(&kernel.version))
    });
    found.pop()
}

/// Makes everything a kernel's folder holds.
fn fill(folder: &Path, found: &Found, progress: &dyn Progress) -> Result<()> {
    progress.step(&format!("preparing kernel {}", found.version));
    let write = |path: PathBuf, bytes: &[u8]| fs::write(&path, bytes).map_err(Error::io("write", &path));
    let file = File::open(&found.vmlinuz).map_err(Error::io("open", &found.vmlinuz))?;
    let vmlinuz = read_all(file, MAX_VMLINUZ).map_err(Error::io("read", &found.vmlinuz))?;
    let vmlinux = bzimage::vmlinux(&vmlinuz).map_err(|why| {
        Error::Invalid(format!("{} is no usable kernel: it {why}", found.vmlinuz.display()))
    })?;
    write(folder.join(VMLINUZ), &vmlinuz)?;
    write(folder.join(VMLINUX), &vmlinux)?;

    // A few MiB of the several hundred a distribution ships: what guests and the emulated machine load. A
    // module that this kernel lacks is an error only when a caller asks for it.
    let modules = folder.join(MODULES);
    fs::create_dir(&modules).map_err(Error::io("create", &modules))?;
    let set = ModuleSet::open(&found.modules)?;
    let looked_for = kept_modules();
    let wanted: Vec<String> = looked_for.iter().map(|name| format!("{name}?")).collect();
    let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
    for module in set.load_order(&wanted)? {
        write(modules.join(format!("{}.ko", module.name)), &module.bytes)?;
    }
    let builtin = found.modules.join("modules.builtin");
    if builtin.exists() {
        let target = modules.join("modules.builtin");
        fs::copy(&builtin, &target).map_err(Error::io("write", &target))?;
    }
    let manifest = KernelManifest {
        format: FORMAT,
        version: found.version.clone(),
        source: found.source.clone(),
        vmlinux_bytes: vmlinux.len() as u64,
        vmlinuz_bytes: vmlinuz.len() as u64,
        looked_for,
    };
    let text = serde_json::to_vec_pretty(&manifest).map_err(|error| Error::Invalid(error.to_string()))?;
    write(folder.join(MANIFEST), &text)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn meta_and_debugging_packages_are_not_taken_for_kernels() {
        assert!(is_image_package("linux-image-6.1.0-54-amd64"));
        assert!(is_image_package("linux-image-6.8.0-49-generic"));
        for other in ["linux-image-amd64", "linux-image-6.1.0-54-amd64-dbg", "linux-firmware", "kmod"] {
            assert!(!is_image_package(other), "{other}");
        }
    }

    #[test]
    fn the_newest_generic_kernel_with_modules_is_chosen() {
        let root = tempfile::tempdir().unwrap();
        let path = |name: &str| root.path().join(name);
        fs::create_dir_all(path("boot")).unwrap();
        for version in ["6.1.0-9-amd64", "6.1.0-54-amd64", "6.1.0-60-cloud-amd64", "6.1.0-70-amd64"] {
            fs::write(path(&format!("boot/vmlinuz-{version}")), b"").unwrap();
            if !version.contains("70") {
                fs::create_dir_all(path(&format!("lib/modules/{version}"))).unwrap();
            }
        }
        assert_eq!(installed(root.path()).unwrap().version, "6.1.0-54-amd64");
    }
}

//! Images and kernels: the only module that calls `forkd-image`. It builds everything on this host, in the
//! data directory; the emulated machine only reads the results.

use std::path::{Path, PathBuf};

use anyhow::{Context, Result};
use forkd_image::{Additions, Image, ImageSource, ImageSpec, Kernel, Library, Silent};
use forkd_protocol::init::InitPlan;
use parking_lot::Mutex;
use serde::Serialize;

pub(crate) use forkd_image::MACHINE_MODULES;

use crate::args::ImageBuildArgs;
use crate::host::paths::DataDir;
use crate::ui::{self, Ui};

/// An image, as `forkd image ls` prints it.
#[derive(Debug, Serialize)]
pub(crate) struct ImageRow {
    pub(crate) name: String,
    /// The size that a guest sees.
    pub(crate) disk_bytes: u64,
    /// Its bytes on the host's disk.
    pub(crate) used_bytes: u64,
    pub(crate) python: bool,
    /// Seconds since 1970.
    pub(crate) created: u64,
    /// Its source.
    pub(crate) source: String,
    /// The damage, if there is one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub(crate) problem: Option<String>,
}

impl From<&Image> for ImageRow {
    fn from(image: &Image) -> Self {
        ImageRow {
            name: image.name().to_owned(),
            disk_bytes: image.manifest.disk_bytes,
            used_bytes: image.used_bytes(),
            python: image.manifest.python,
            created: image.manifest.created,
            source: image.manifest.source.clone(),
            problem: None,
        }
    }
}

/// Builds an image from the arguments.
pub(crate) fn build(data: &DataDir, args: ImageBuildArgs, ui: Ui) -> Result<ImageRow> {
    data.create()?;
    let mut spec = specification(&args);
    spec.force = args.force;
    if let Some(size) = args.size_mib {
        spec.size_mib = size;
    }
    let name = &args.name;
    let image =
        show(ui, &format!("building image {name}"), |progress| library(data).build_image(&spec, progress))?;
    ensure_guest_kernel(data, ui)?;
    Ok(ImageRow::from(&image))
}

fn specification(args: &ImageBuildArgs) -> ImageSpec {
    let mut additions = Additions::default();
    additions.sudo = args.sudo;
    additions.pip.clone_from(&args.pip);
    additions.npm.clone_from(&args.npm);
    let source = match (&args.tar, &args.folder) {
        (Some(path), _) => ImageSource::Tar(path.clone()),
        (_, Some(path)) => ImageSource::Folder(path.clone()),
        (None, None) => {
            let as_known =
                args.packages.is_empty() && args.suite.is_none() && additions == Additions::default();
            if let Some(known) = ImageSpec::predefined(&args.name).filter(|_| as_known) {
                return known;
            }
            ImageSource::Packages { suite: args.suite.clone(), packages: args.packages.clone() }
        }
    };
    let mut spec = ImageSpec::new(&args.name, source);
    spec.additions = additions;
    spec
}

/// All images; damaged ones with their problem.
pub(crate) fn list(data: &DataDir) -> Result<Vec<ImageRow>> {
    let row = |(name, image): (String, forkd_image::Result<Image>)| match image {
        Ok(image) => ImageRow::from(&image),
        Err(error) => ImageRow {
            name,
            disk_bytes: 0,
            used_bytes: 0,
            python: false,
            created: 0,
            source: String::new(),
            problem: Some(error.to_string()),
        },
    };
    Ok(library(data).images()?.into_iter().map(row).collect())
}

/// Removes an image.
pub(crate) fn remove(data: &DataDir, name: &str) -> Result<()> {
    Ok(library(data).remove_image(name, &Silent)?)
}

/// Builds the image if it is missing and forkd has a recipe for it.
pub(crate) fn ensure_image(data: &DataDir, name: &str, ui: Ui) -> Result<()> {
    if library(data).image(name).is_ok() {
        return Ok(());
    }
    data.create()?;
    show(ui, &format!("preparing image {name}"), |progress| library(data).ensure_image(name, progress))?;
    Ok(())
}

/// How the image of a name compares with forkd's recipe for it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Freshness {
    /// There is none, or a damaged one.
    Missing,
    /// It is built by the recipe, or there is no recipe.
    Current,
    /// It is built in another way: by hand, or by another version of forkd.
    Other,
}

/// Compares the image with the recipe.
pub(crate) fn freshness(data: &DataDir, name: &str) -> Freshness {
    let Ok(image) = library(data).image(name) else { return Freshness::Missing };
    match ImageSpec::predefined(name).and_then(|recipe| recipe.definition()) {
        Some(definition) if image.manifest.definition.as_ref() != Some(&definition) => Freshness::Other,
        _ => Freshness::Current,
    }
}

/// Builds the image by its recipe and replaces the one there is.
pub(crate) fn rebuild(data: &DataDir, name: &str, ui: Ui) -> Result<()> {
    let mut spec = ImageSpec::predefined(name).with_context(|| format!("forkd has no recipe for {name}"))?;
    spec.force = true;
    show(ui, &format!("building image {name}"), |progress| library(data).build_image(&spec, progress))?;
    Ok(())
}

/// Builds the image `name` if it is missing: the recipe `base` with more packages or another size.
pub(crate) fn derive(
    data: &DataDir,
    base: &str,
    name: &str,
    packages: &[String],
    size_mib: Option<u64>,
    ui: Ui,
) -> Result<()> {
    if library(data).image(name).is_ok() {
        return Ok(());
    }
    let Some(mut spec) = ImageSpec::predefined(base) else {
        anyhow::bail!(
            "forkd can add packages only to images with a recipe, such as python, and {base} has none: build it \
            again with `forkd image build {name} --extra {}`",
            if packages.is_empty() { "…".to_owned() } else { packages.join(",") }
        );
    };
    if let ImageSource::Packages { packages: all, .. } = &mut spec.source {
        all.extend(packages.iter().filter(|package| !all.contains(package)).cloned().collect::<Vec<_>>());
    }
    name.clone_into(&mut spec.name);
    spec.size_mib = size_mib.unwrap_or(spec.size_mib);
    data.create()?;
    show(ui, &format!("building image {name}"), |progress| library(data).build_image(&spec, progress))?;
    Ok(())
}

/// Fetches a kernel for guests if it is missing.
pub(crate) fn ensure_guest_kernel(data: &DataDir, ui: Ui) -> Result<()> {
    ensure_kernel(data, ui).map(drop)
}

fn ensure_kernel(data: &DataDir, ui: Ui) -> Result<Kernel> {
    if let Ok(kernel) = library(data).kernel(None)
        && kernel.is_complete()
    {
        return Ok(kernel);
    }
    data.create()?;
    show(ui, "fetching a kernel", |progress| library(data).ensure_kernel(progress))
}

/// A description of the kernel in the library; `None` if there is none yet.
pub(crate) fn installed_kernel(data: &DataDir) -> Result<Option<String>> {
    match library(data).kernel(None) {
        Ok(kernel) => Ok(Some(format!("{} from {}", kernel.version, kernel.source))),
        Err(forkd_image::Error::NotFound(_)) => Ok(None),
        Err(error) => Err(error.into()),
    }
}

/// The kernel of the emulated machine: the same as the guests'.
#[derive(Debug)]
pub(crate) struct MachineKernel {
    /// A bzImage, the format that QEMU boots.
    pub(crate) path: PathBuf,
    kernel: Kernel,
}

/// The kernel for the emulated machine, fetched if there is none.
pub(crate) fn machine_kernel(data: &DataDir, ui: Ui) -> Result<MachineKernel> {
    let kernel = ensure_kernel(data, ui)?;
    let path = kernel.bzimage.clone().context("the kernel has no bzImage, which QEMU needs")?;
    Ok(MachineKernel { path, kernel })
}

impl MachineKernel {
    /// An initramfs that runs `guest` with `plan`.
    pub(crate) fn initramfs(&self, guest: &Path, plan: InitPlan) -> Result<Vec<u8>> {
        Ok(forkd_image::build_initramfs(guest, &self.kernel, MACHINE_MODULES, plan)?)
    }
}

fn library(data: &DataDir) -> Library {
    Library::open(data.root())
}

/// Does `work` and shows its progress.
fn show<T>(
    ui: Ui,
    title: &str,
    work: impl FnOnce(&dyn forkd_image::Progress) -> forkd_image::Result<T>,
) -> Result<T> {
    let shown = BuildProgress { progress: ui.progress(title), step: Mutex::default() };
    let result = work(&shown)?;
    shown.progress.done(&format!("{title}: done"));
    Ok(result)
}

/// Forwards the progress of a build to the display.
struct BuildProgress {
    progress: ui::Progress,
    step: Mutex<String>,
}

impl forkd_image::Progress for BuildProgress {
    fn step(&self, text: &str) {
        text.clone_into(&mut self.step.lock());
        self.progress.update(text);
    }

    fn fraction(&self, done: f64) {
        self.progress.tick(&format!("{} ({:.0} %)", self.step.lock(), done * 100.0));
    }

    fn log(&self, line: &str) {
        self.progress.tick(&format!("{}: {}", self.step.lock(), line.trim()));
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;

    fn specified(line: &[&str]) -> ImageSpec {
        let cli = crate::args::Cli::try_parse_from(["forkd", "image", "build"].iter().chain(line)).unwrap();
        let crate::args::Command::Image(crate::args::ImageCommand::Build(args)) = cli.command else {
            panic!("not a build")
        };
        specification(&args)
    }

    #[test]
    fn a_known_image_is_built_as_known_unless_its_source_is_given() {
        assert_eq!(Some(specified(&["python"])), ImageSpec::predefined("python"));
        let chosen = ImageSource::Packages { suite: None, packages: vec!["git".into(), "jq".into()] };
        assert_eq!(specified(&["python", "--packages", "git,jq"]).source, chosen);
        assert_eq!(specified(&["mine", "--tar", "a.tar"]).source, ImageSource::Tar("a.tar".into()));
        let with_pip = specified(&["base", "--pip", "requests", "--sudo"]);
        assert_eq!(
            (with_pip.additions.pip.as_slice(), with_pip.additions.sudo),
            (&["requests".into()][..], true)
        );
        assert_ne!(Some(with_pip), ImageSpec::predefined("base"));
        let minimal = ImageSource::Packages { suite: Some("trixie".into()), packages: vec![] };
        assert_eq!(specified(&["mine", "--suite", "trixie"]).source, minimal);
    }
}

//! Whole images from small folders and tars, with the host's own mke2fs.

use std::fs;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Mutex;

use crate::elf::samples;
use crate::*;

/// Remembers the steps it was told.
#[derive(Default)]
struct Steps(Mutex<Vec<String>>);

impl Progress for Steps {
    fn step(&self, text: &str) {
        self.0.lock().unwrap().push(text.into());
    }
}

/// A root file system as small as it gets, with a merged /usr.
fn small_root(folder: &Path) -> PathBuf {
    let root = folder.join("source");
    fs::create_dir_all(root.join("usr/bin")).unwrap();
    fs::write(root.join("usr/bin/busybox"), samples::vmlinux(b"code")).unwrap();
    fs::set_permissions(root.join("usr/bin/busybox"), fs::Permissions::from_mode(0o755)).unwrap();
    symlink("/usr/bin/busybox", root.join("usr/bin/sh")).unwrap();
    symlink("usr/bin", root.join("bin")).unwrap();
    root
}

fn spec(source: ImageSource) -> ImageSpec {
    let mut spec = ImageSpec::new("small", source);
    spec.size_mib = 64;
    spec
}

/// What debugfs answers to `request`.
fn debugfs(disk: &Path, request: &str) -> String {
    let program = crate::tools::find("debugfs").unwrap();
    let output = Command::new(program).args(["-R", request]).arg(disk).output().unwrap();
    String::from_utf8(output.stdout).unwrap()
}

fn tar_of(root: &Path, archive: &Path, options: &[&str]) {
    let status =
        Command::new("tar").arg("-C").arg(root).args(options).arg("-cf").arg(archive).arg(".").status();
    assert!(status.unwrap().success());
}

#[test]
fn an_image_from_a_folder_has_its_files_and_is_found_again() {
    let folder = tempfile::tempdir().unwrap();
    let root = small_root(folder.path());
    fs::write(root.join("big"), vec![7; 3 << 20]).unwrap();
    fs::hard_link(root.join("big"), root.join("same")).unwrap();
    let library = Library::open(&folder.path().join("library"));
    let built = library.build_image(&spec(ImageSource::Folder(root)), &Silent).unwrap();
    assert_eq!(built, library.image("small").unwrap());
    assert_eq!(built.manifest.disk_bytes, 64 << 20);
    assert!(!built.manifest.python);
    assert!(built.used_bytes() < 16 << 20, "{}", built.used_bytes());
    let listed = library.images().unwrap();
    assert_eq!(listed.len(), 1);
    assert_eq!(listed[0].0, "small");

    let stat = debugfs(&built.disk, "stat /big");
    assert!(stat.contains("Links: 2") && stat.contains("User:     0"), "{stat}");
    assert!(debugfs(&built.disk, "stat /bin").contains("Fast link dest: \"usr/bin\""));
    library.remove_image("small", &Silent).unwrap();
    assert!(matches!(library.image("small"), Err(Error::NotFound(_))));
}

#[test]
fn an_image_from_a_tar_keeps_what_only_root_could_have_unpacked() {
    let folder = tempfile::tempdir().unwrap();
    let root = small_root(folder.path());
    let archive = folder.path().join("root.tar.gz");
    tar_of(&root, &archive, &["--owner=11", "--group=22", "--mode=u+s", "-z"]);
    let library = Library::open(&folder.path().join("library"));
    let mut spec = spec(ImageSource::Tar(archive));
    spec.warm.python = Some("import this".into());
    let image = library.build_image(&spec, &Silent).unwrap();
    let stat = debugfs(&image.disk, "stat /usr/bin/busybox");
    assert!(stat.contains("User:    11   Group:    22") && stat.contains("Mode:  04755"), "{stat}");
    assert_eq!(library.image("small").unwrap().manifest.warm.python.as_deref(), Some("import this"));
}

#[test]
fn an_extended_attribute_of_a_tar_reaches_the_image() {
    let folder = tempfile::tempdir().unwrap();
    let archive = folder.path().join("root.tar");
    let mut builder = tar::Builder::new(fs::File::create(&archive).unwrap());
    let program = samples::vmlinux(b"code");
    builder.append_pax_extensions([("SCHILY.xattr.user.colour", &b"blue"[..])]).unwrap();
    let mut header = tar::Header::new_ustar();
    header.set_mode(0o755);
    header.set_uid(0);
    header.set_gid(0);
    header.set_size(program.len() as u64);
    builder.append_data(&mut header, "bin/sh", &program[..]).unwrap();
    builder.finish().unwrap();
    let library = Library::open(&folder.path().join("library"));
    let image = library.build_image(&spec(ImageSource::Tar(archive)), &Silent).unwrap();
    assert!(debugfs(&image.disk, "ea_get /bin/sh user.colour").contains("blue"));
}

#[test]
fn an_image_without_a_shell_for_this_machine_is_refused() {
    let folder = tempfile::tempdir().unwrap();
    let library = Library::open(&folder.path().join("library"));
    let refused = |change: &dyn Fn(&Path)| {
        let source = tempfile::tempdir().unwrap();
        let root = small_root(source.path());
        change(&root);
        library.build_image(&spec(ImageSource::Folder(root)), &Silent).unwrap_err().to_string()
    };
    assert!(refused(&|root| fs::remove_file(root.join("usr/bin/sh")).unwrap()).contains("no /bin/sh"));
    assert!(refused(&|root| fs::remove_file(root.join("usr/bin/busybox")).unwrap()).contains("no /bin/sh"));
    let script = |root: &Path| fs::write(root.join("usr/bin/busybox"), "#!/bin/sh\nexec /bin/sh\n").unwrap();
    assert!(refused(&script).contains("not an ELF program"));
    let mut foreign = samples::vmlinux(b"code");
    foreign[18] = 183;
    let arm = |root: &Path| fs::write(root.join("usr/bin/busybox"), &foreign).unwrap();
    assert!(refused(&arm).contains("aarch64"));
    assert!(library.images().unwrap().is_empty());
    assert!(!folder.path().join("library/images/.unfinished-small").exists());
}

#[test]
fn a_truncated_disk_is_named_with_both_sizes_and_the_fix() {
    let folder = tempfile::tempdir().unwrap();
    let root = small_root(folder.path());
    let library = Library::open(&folder.path().join("library"));
    let mut spec = spec(ImageSource::Folder(root));
    let image = library.build_image(&spec, &Silent).unwrap();
    fs::File::options().write(true).open(&image.disk).unwrap().set_len(1000).unwrap();
    let error = library.image("small").unwrap_err().to_string();
    for part in ["disk.ext4", " 1000 ", " 67108864", "forkd image build small --force"] {
        assert!(error.contains(part), "{error}");
    }
    // It is listed as damaged, is not replaced by accident, and can be replaced.
    assert!(library.images().unwrap()[0].1.is_err());
    assert!(library.build_image(&spec, &Silent).unwrap_err().to_string().contains("--force"));
    spec.force = true;
    library.build_image(&spec, &Silent).unwrap();
    assert!(library.image("small").is_ok());
}

#[test]
fn a_broken_or_foreign_manifest_is_an_error_with_a_fix() {
    let folder = tempfile::tempdir().unwrap();
    let library = Library::open(folder.path());
    let manifest = folder.path().join("images/x/image.json");
    fs::create_dir_all(manifest.parent().unwrap()).unwrap();
    assert!(library.image("x").unwrap_err().to_string().contains("is missing"));
    for text in ["", "{}", "nonsense", r#"{"format":99}"#, r#"{"format":1}"#] {
        fs::write(&manifest, text).unwrap();
        let error = library.image("x").unwrap_err().to_string();
        assert!(error.contains("image.json") && error.contains("--force"), "{error}");
    }
}

#[test]
fn names_that_are_paths_never_reach_the_disk() {
    let library = Library::open(Path::new("/nonexistent"));
    for name in ["", "..", "a/b", ".lock-x", "-x"] {
        assert!(matches!(library.image(name), Err(Error::Invalid(_))), "{name}");
        assert!(matches!(library.remove_image(name, &Silent), Err(Error::Invalid(_))), "{name}");
        let spec = ImageSpec::new(name, ImageSource::Folder("/".into()));
        assert!(matches!(library.build_image(&spec, &Silent), Err(Error::Invalid(_))), "{name}");
    }
    let error = library.image("other").unwrap_err().to_string();
    assert!(error.contains("no image other") && error.contains("it has: none"), "{error}");
    assert!(library.images().unwrap().is_empty());
}

#[test]
fn what_does_not_fit_is_refused_with_a_size_that_might() {
    let folder = tempfile::tempdir().unwrap();
    let root = small_root(folder.path());
    let noise: Vec<u8> = (0..50u32 << 20).map(|n| (n ^ (n >> 9)) as u8).collect();
    fs::write(root.join("large"), &noise).unwrap();
    let archive = folder.path().join("root.tar");
    tar_of(&root, &archive, &[]);
    let library = Library::open(&folder.path().join("library"));
    // 50 MiB pass the first check and do not fit beside journal and inodes; 100 MiB never do.
    let error =
        library.build_image(&spec(ImageSource::Folder(root.clone())), &Silent).unwrap_err().to_string();
    assert!(error.contains("--size-mib 128"), "{error}");
    fs::write(root.join("larger"), &noise).unwrap();
    tar_of(&root, &archive, &[]);
    for source in [ImageSource::Folder(root), ImageSource::Tar(archive)] {
        let error = library.build_image(&spec(source), &Silent).unwrap_err().to_string();
        assert!(error.contains("--size-mib 128"), "{error}");
    }
}

#[test]
fn what_a_killed_build_left_is_removed_by_the_next() {
    let folder = tempfile::tempdir().unwrap();
    let root = small_root(folder.path());
    let left = folder.path().join("library/images/.unfinished-small/work/root");
    fs::create_dir_all(&left).unwrap();
    fs::write(left.join("half"), "x").unwrap();
    let library = Library::open(&folder.path().join("library"));
    assert!(library.images().unwrap().is_empty());
    let image = library.build_image(&spec(ImageSource::Folder(root)), &Silent).unwrap();
    let names = |path: &Path| {
        let mut names: Vec<_> = fs::read_dir(path).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        names
    };
    assert_eq!(names(image.disk.parent().unwrap()), ["disk.ext4", "image.json"]);
    assert_eq!(names(&folder.path().join("library/images")), [".lock-small", "small"]);
}

#[test]
fn the_second_of_two_builders_waits_and_says_so() {
    let folder = tempfile::tempdir().unwrap();
    let root = small_root(folder.path());
    let library = Library::open(&folder.path().join("library"));
    let images = folder.path().join("library/images");
    let steps = Steps::default();
    std::thread::scope(|scope| {
        let first = crate::library::Lock::take(&images, "small", "x", &Silent).unwrap();
        let second = scope.spawn(|| library.build_image(&spec(ImageSource::Folder(root)), &steps));
        while steps.0.lock().unwrap().is_empty() {
            std::thread::yield_now();
        }
        assert!(!second.is_finished());
        drop(first);
        second.join().unwrap().unwrap();
    });
    assert!(steps.0.lock().unwrap()[0].contains("waiting for another process"));
}

#[test]
fn kernels_are_found_by_version_by_path_and_newest_first() {
    let folder = tempfile::tempdir().unwrap();
    let library = Library::open(folder.path());
    assert!(matches!(library.kernel(None), Err(Error::NotFound(_))));
    let vmlinux = samples::vmlinux(b"code");
    for version in ["6.1.0-9-amd64", "6.1.0-54-amd64", "6.0.107+deb13-amd64"] {
        let path = folder.path().join("kernels").join(version);
        fs::create_dir_all(path.join("modules")).unwrap();
        fs::write(path.join("vmlinux"), &vmlinux).unwrap();
        fs::write(path.join("vmlinuz"), b"x").unwrap();
        let size = vmlinux.len();
        let text = format!(
            r#"{{"format":1,"version":"{version}","source":"test","vmlinux_bytes":{size},"vmlinuz_bytes":1}}"#
        );
        fs::write(path.join("kernel.json"), text).unwrap();
    }
    assert_eq!(library.kernel(None).unwrap().version, "6.1.0-54-amd64");
    assert_eq!(library.kernel(Some("6.1.0-9-amd64")).unwrap().version, "6.1.0-9-amd64");
    let error = library.kernel(Some("5.0")).unwrap_err().to_string();
    assert!(error.contains("6.0.107+deb13-amd64, 6.1.0-54-amd64, 6.1.0-9-amd64"), "{error}");
    let path = folder.path().join("kernels/6.1.0-9-amd64/vmlinux");
    assert_eq!(library.kernel(path.to_str()).unwrap().image, path);
    fs::write(&path, &vmlinux[..50]).unwrap();
    let error = library.kernel(Some("6.1.0-9-amd64")).unwrap_err().to_string();
    assert!(error.contains("has 50 bytes and should have"), "{error}");
    for bad in [&vmlinux[..50], b"#!/bin/sh\n", b""] {
        fs::write(&path, bad).unwrap();
        let error = library.kernel(path.to_str()).unwrap_err().to_string();
        assert!(error.contains("is no kernel forkd can boot"), "{error}");
    }
}

#[test]
fn a_kernel_that_an_older_forkd_fetched_is_fetched_again_and_does_if_that_fails() {
    use std::sync::atomic::{AtomicUsize, Ordering};
    static FETCHES: AtomicUsize = AtomicUsize::new(0);
    fn write(library: &Library, looked_for: &[String]) {
        let folder = library.root().join("kernels/6.1.0-54-amd64");
        fs::create_dir_all(folder.join("modules")).unwrap();
        for name in ["vmlinux", "vmlinuz"] {
            fs::write(folder.join(name), b"x").unwrap();
        }
        let mut manifest = serde_json::json!({
            "format": 1, "version": "6.1.0-54-amd64", "source": "test", "vmlinux_bytes": 1, "vmlinuz_bytes": 1,
        });
        if !looked_for.is_empty() {
            manifest["looked_for"] = looked_for.into();
        }
        fs::write(folder.join("kernel.json"), manifest.to_string()).unwrap();
    }
    fn fail(_: &Library, _: &dyn crate::Progress) -> crate::Result<crate::Kernel> {
        FETCHES.fetch_add(1, Ordering::SeqCst);
        Err(Error::Host("there is no network".into()))
    }
    fn fetch(library: &Library, _: &dyn crate::Progress) -> crate::Result<crate::Kernel> {
        FETCHES.fetch_add(1, Ordering::SeqCst);
        write(library, &crate::kernel::kept_modules());
        library.kernel(None)
    }
    let folder = tempfile::tempdir().unwrap();
    let library = Library::open(folder.path());
    let ensure = |fetch| library.ensure_kernel_with(fetch, &Silent).unwrap().is_complete();
    let fetches = || FETCHES.load(Ordering::SeqCst);
    write(&library, &[]);
    assert!(!ensure(fail));
    assert_eq!(fetches(), 1);
    // Not at every start.
    assert!(!ensure(fetch));
    assert_eq!(fetches(), 1);
    // A day later.
    fs::remove_file(folder.path().join("kernels/.tried")).unwrap();
    assert!(ensure(fetch));
    assert!(!folder.path().join("kernels/.tried").exists(), "only failures count");
    assert!(ensure(fail));
    assert_eq!(fetches(), 2);
}

#[test]
fn manifests_are_written_as_in_their_golden_files() {
    fn is_golden<T: serde::de::DeserializeOwned + serde::Serialize>(name: &str, format: u32) {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/golden");
        let path = folder.join(format!("{name}.v{format}.json"));
        let manifest: T = crate::library::read_manifest(&path, format, "mend it").unwrap();
        let golden: serde_json::Value = serde_json::from_slice(&fs::read(&path).unwrap()).unwrap();
        assert_eq!(
            serde_json::to_value(&manifest).unwrap(),
            golden,
            "{name}: add the line, or mend the format"
        );
    }
    is_golden::<crate::image::Manifest>("image", crate::image::FORMAT);
    is_golden::<crate::kernel::KernelManifest>("kernel", crate::kernel::FORMAT);
}

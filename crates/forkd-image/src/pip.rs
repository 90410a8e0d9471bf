//! Packages of PyPI, installed by the host's pip for the image's Python. Only wheels are used: nothing is compiled,
//! and no code of a package runs.

use std::fs::{self, File};
use std::io::Read;
use std::path::Path;

use rustix::fs::OFlags;

use crate::additions::Layer;
use crate::error::{Error, Result};
use crate::library::Lock;
use crate::progress::Progress;
use crate::tools;
use crate::tree::Tree;

/// The newest Python 3 that is looked for.
const NEWEST_MINOR: u32 = 40;
/// The text before the version in the C library, which is how it is known without running it.
const GLIBC: &[u8] = b"GNU C Library";
const GLIBC_VERSION: &[u8] = b"release version 2.";
/// Larger than any C library.
const MAX_LIBRARY: u64 = 16 << 20;

/// Refuses what is not the name of a package, and a host without pip.
pub(crate) fn check(packages: &[String]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    if let Some(wrong) = packages.iter().find(|name| !is_requirement(name)) {
        return Err(Error::Invalid(format!(
            "{wrong:?} is not the name of a package of PyPI; examples: requests, requests==2.32.3"
        )));
    }
    tools::command("pip3", "python3-pip").map(drop)
}

/// pip also takes paths and addresses, and what starts with `-` is an option.
fn is_requirement(text: &str) -> bool {
    text.starts_with(|c: char| c.is_ascii_alphanumeric())
        && text.chars().all(|c| c.is_ascii_alphanumeric() || "-._+[]=<>!~*".contains(c))
}

/// The image's Python.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Python {
    minor: u32,
    /// Path of the program, without the leading `/`.
    program: String,
    /// Where its packages are, without the leading `/`.
    packages: String,
}

impl Python {
    /// The newest Python 3 in `tree`.
    pub(crate) fn find(tree: &Tree) -> Option<Python> {
        let minors = (3..=NEWEST_MINOR).rev();
        minors.flat_map(|minor| ["usr/local", "usr"].map(|prefix| (minor, prefix))).find_map(
            |(minor, prefix)| {
                let program = format!("{prefix}/bin/python3.{minor}");
                if !tree.is_program(&program) {
                    return None;
                }
                let own = prefix == "usr/local";
                // Debian's Python looks for packages that are not Debian's in a folder of its own.
                let debians = !own && tree.node("usr/lib/python3/dist-packages").is_some();
                let packages = match (own, debians) {
                    (true, _) => format!("usr/local/lib/python3.{minor}/site-packages"),
                    (_, true) => format!("usr/local/lib/python3.{minor}/dist-packages"),
                    _ => format!("usr/lib/python3.{minor}/site-packages"),
                };
                Some(Python { minor, program, packages })
            },
        )
    }

    /// The name of its program and of its folders.
    pub(crate) fn name(&self) -> String {
        format!("python3.{}", self.minor)
    }
}

/// Packages to install.
pub(crate) struct Job<'a> {
    pub(crate) packages: &'a [String],
    /// Without those they depend on.
    pub(crate) alone: bool,
    pub(crate) work: &'a Path,
    pub(crate) lock: &'a Lock,
}

/// Installs packages for all users of the image.
pub(crate) fn install(job: &Job<'_>, tree: &Tree, layer: &mut Layer, progress: &dyn Progress) -> Result<()> {
    let python = Python::find(tree).ok_or_else(|| {
        Error::Invalid("the image has no Python for packages of PyPI; add it: `--extra python3`".into())
    })?;
    progress.step("fetching packages with pip");
    let target = job.work.join("pip");
    let mut command = tools::command("pip3", "python3-pip")?;
    command.stdin(job.lock.as_stdin()?).current_dir(job.work);
    command.args(["install", "--quiet", "--no-compile", "--no-input", "--disable-pip-version-check"]);
    command.args(["--no-warn-script-location", "--only-binary=:all:", "--implementation=cp"]);
    command.arg(format!("--python-version=3.{}", python.minor));
    command.args(platforms(tree).iter().map(|platform| format!("--platform={platform}")));
    if job.alone {
        command.arg("--no-deps");
    }
    command.arg("--target").arg(&target).arg("--").args(job.packages);
    tools::stream(command, tools::drain, |line| progress.log(line)).map_err(explain)?;
    let programs = target.join("bin");
    if programs.is_dir() {
        run_with(&programs, &python)?;
        layer.copy(&programs, "usr/local/bin", &|_| true)?;
        fs::remove_dir_all(&programs).map_err(Error::io("remove", &programs))?;
    }
    layer.copy(&target, &python.packages, &|_| true)
}

/// pip writes the host's Python into the first line of programs: they run with the image's.
fn run_with(folder: &Path, python: &Python) -> Result<()> {
    for entry in fs::read_dir(folder).map_err(Error::io("read", folder))? {
        let path = entry.map_err(Error::io("read", folder))?.path();
        // A package may have a folder there. A link would lead out of the build, to a file of the host.
        if !fs::symlink_metadata(&path).map_err(Error::io("read", &path))?.is_file() {
            continue;
        }
        let bytes = fs::read(&path).map_err(Error::io("read", &path))?;
        let Some(body) = without_first_line(&bytes) else { continue };
        let text = [format!("#!/{}\n", python.program).as_bytes(), body].concat();
        fs::write(&path, text).map_err(Error::io("write", &path))?;
    }
    Ok(())
}

/// A Python program without the lines that start its interpreter; `None` for another file.
fn without_first_line(bytes: &[u8]) -> Option<&[u8]> {
    let (first, rest) = split_line(bytes)?;
    let text = String::from_utf8_lossy(first);
    if !text.starts_with("#!") {
        return None;
    }
    if text.contains("python") {
        return Some(rest);
    }
    // An interpreter whose path is too long for the first line: a shell starts it.
    let (second, rest) = split_line(rest)?;
    second.starts_with(b"'''exec'").then(|| split_line(rest).map_or(rest, |(_, rest)| rest))
}

fn split_line(bytes: &[u8]) -> Option<(&[u8], &[u8])> {
    let end = bytes.iter().position(|byte| *byte == b'\n')?;
    Some((&bytes[..end], &bytes[end + 1..]))
}

/// The platforms whose wheels run in the image, as their names have them, the best one first.
fn platforms(tree: &Tree) -> Vec<String> {
    let Some(minor) = glibc_minor(tree) else {
        return ["musllinux_1_2_x86_64", "musllinux_1_1_x86_64"].map(str::to_owned).into();
    };
    let mut platforms: Vec<String> =
        (5..=minor).rev().map(|minor| format!("manylinux_2_{minor}_x86_64")).collect();
    let old = [(17, "manylinux2014_x86_64"), (12, "manylinux2010_x86_64"), (5, "manylinux1_x86_64")];
    platforms.extend(old.iter().filter(|(since, _)| minor >= *since).map(|(_, name)| (*name).to_owned()));
    platforms
}

/// The minor version of the image's GNU C library; `None` if it has another one.
fn glibc_minor(tree: &Tree) -> Option<u32> {
    ["lib/x86_64-linux-gnu/libc.so.6", "lib64/libc.so.6", "usr/lib/libc.so.6"].iter().find_map(|path| {
        let file = tree.open(path.as_bytes(), OFlags::RDONLY | OFlags::NONBLOCK).ok()?;
        let mut bytes = Vec::new();
        File::from(file).take(MAX_LIBRARY).read_to_end(&mut bytes).ok()?;
        version_in(&bytes)
    })
}

fn version_in(library: &[u8]) -> Option<u32> {
    let find = |bytes: &[u8], text: &[u8]| bytes.windows(text.len()).position(|window| window == text);
    let text = &library[find(library, GLIBC)?..];
    let digits = &text[find(text, GLIBC_VERSION)? + GLIBC_VERSION.len()..];
    let digits: String = digits
        .iter()
        .take(4)
        .take_while(|byte| byte.is_ascii_digit())
        .map(|byte| char::from(*byte))
        .collect();
    digits.parse().ok().filter(|minor| *minor < 1000)
}

fn explain(error: Error) -> Error {
    let Error::Tool(text) = error else { return error };
    let fix = if text.contains("No matching distribution") || text.contains("Could not find a version") {
        "; the name or the version may be wrong, or it has no wheel for the image's Python"
    } else if text.contains("connection") || text.contains("Name or service not known") {
        "; check the network and pip's proxy settings"
    } else {
        ""
    };
    Error::Tool(format!("{text}{fix}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_names_of_packages_reach_the_command_line() {
        for good in ["requests", "requests==2.32.3", "uvicorn[standard]", "a>=1", "ruamel.yaml~=0.18"] {
            assert!(is_requirement(good), "{good}");
        }
        for bad in ["", "-r", "./x", "/x.whl", "git+https://x", "a @ b", "a b", "$(id)"] {
            assert!(!is_requirement(bad), "{bad}");
        }
    }

    #[test]
    fn the_c_library_says_which_wheels_run() {
        let library = b"\0\0GNU C Library (Debian GLIBC 2.36-9) stable release version 2.36.\nCopyright";
        assert_eq!(version_in(library), Some(36));
        assert_eq!(version_in(b"musl libc (x86_64)"), None);
        assert_eq!(version_in(b"GNU C Library release version 2."), None);
    }

    #[test]
    fn programs_run_with_the_python_of_the_image() {
        let body = b"import sys\n".as_slice();
        let long = b"#!/bin/sh\n'''exec' /a/long/python3 \"$0\" \"$@\"\n' '''\nimport sys\n";
        assert_eq!(without_first_line(b"#!/root/bin/python3.12\nimport sys\n"), Some(body));
        assert_eq!(without_first_line(long), Some(body));
        assert_eq!(without_first_line(b"#!/bin/sh\necho\n"), None);
        assert_eq!(without_first_line(b"\x7fELF\n"), None);
    }

    #[test]
    fn only_files_of_the_build_are_changed() {
        let place = tempfile::tempdir().unwrap();
        let (programs, hosts) = (place.path().join("bin"), place.path().join("hosts"));
        fs::create_dir_all(programs.join("folder")).unwrap();
        let text = "#!/root/bin/python3.12\nimport sys\n";
        fs::write(&hosts, text).unwrap();
        fs::write(programs.join("tool"), text).unwrap();
        std::os::unix::fs::symlink(&hosts, programs.join("link")).unwrap();
        let python = Python { minor: 12, program: "usr/bin/python3.12".into(), packages: String::new() };
        run_with(&programs, &python).unwrap();
        assert_eq!(fs::read_to_string(programs.join("tool")).unwrap(), "#!/usr/bin/python3.12\nimport sys\n");
        assert_eq!(fs::read_to_string(&hosts).unwrap(), text);
    }
}

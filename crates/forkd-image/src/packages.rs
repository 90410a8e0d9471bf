//! A root file system from distribution packages, with mmdebstrap or, where only that is there,
//! debootstrap.

use std::fs;
use std::path::Path;
use std::process::Command;

use crate::apt::{Apt, Source, acquire_options};
use crate::error::{Error, Result};
use crate::library::Lock;
use crate::progress::Progress;
use crate::tools;
use crate::tree::Tree;
use crate::unpack;

/// Sandboxes need no manuals. Licences stay.
const LEFT_OUT: &[&str] = &[
    "path-exclude=/usr/share/man/*",
    "path-exclude=/usr/share/info/*",
    "path-exclude=/usr/share/locale/*",
    "path-exclude=/usr/share/doc/*",
    "path-include=/usr/share/doc/*/copyright",
];
/// A crash during the installation throws everything away, so dpkg need not wait for the disk.
const UNSAFE_IO: &str = "force-unsafe-io";
/// Name under which the host's proxy settings are in the new system while it is being built.
const HOST_SETTINGS: &str = "/etc/apt/apt.conf.d/00forkd-build";
/// Run on the finished system, with its folder in `$1`: a user to run commands as, and nothing left
/// of the host that built it. Names and addresses come when a VM starts.
const FINISH: &str = r#"set -eu
rm -f "$1/etc/apt/apt.conf.d/00forkd-build"
find "$1/etc/dpkg/dpkg.cfg.d" -name 99mmdebstrap -exec sed -i /force-unsafe-io/d {} +
chroot "$1" useradd --create-home --uid 1000 --user-group --shell /bin/bash user
echo forkd > "$1/etc/hostname"
printf '127.0.0.1\tlocalhost forkd\n::1\tlocalhost ip6-localhost ip6-loopback\n' > "$1/etc/hosts"
rm -f "$1/etc/resolv.conf"
: > "$1/etc/resolv.conf"
: > "$1/etc/machine-id"
rm -rf "$1"/var/lib/apt/lists/*_* "$1"/var/cache/apt/*.bin "$1"/var/cache/apt/archives/*.deb
rm -rf "$1"/var/log/apt "$1"/var/log/*.log "$1"/var/cache/debconf/*-old "$1"/var/lib/dpkg/*-old
"#;

/// A system to install.
pub(crate) struct Job<'a> {
    /// Packages besides the essential ones.
    pub(crate) packages: &'a [String],
    /// Paths, with `*`, that packages do not unpack.
    pub(crate) left_out: &'a [String],
    /// Folder for everything on the way; its `root` takes the files.
    pub(crate) work: &'a Path,
    /// Size of the disk they must fit into.
    pub(crate) size: u64,
    /// Held until the last program that works in the folder has ended.
    pub(crate) lock: &'a Lock,
    pub(crate) progress: &'a dyn Progress,
}

/// Installs release `suite`, the host's when absent. Gives the files and a description of where they
/// came from.
pub(crate) fn install(suite: Option<&str>, job: &Job<'_>) -> Result<(Tree, String)> {
    for word in job.packages.iter().map(String::as_str).chain(suite) {
        if !is_package_word(word) {
            return Err(Error::Invalid(format!("{word:?} is not the name of a package or a release")));
        }
    }
    let with_mmdebstrap = tools::find("mmdebstrap").is_some();
    if !with_mmdebstrap && tools::find("debootstrap").is_none() {
        return Err(Error::Host(
            "building from packages needs mmdebstrap; install it with `apt-get install mmdebstrap`".into(),
        ));
    }
    let apt = Apt::open(&job.work.join("apt"), job.progress)?;
    let sources = apt.sources(suite)?;
    let suite = suite.unwrap_or(&apt.distribution().codename);
    let description = format!("{} {suite}: {}", apt.distribution().origin, job.packages.join(" "));
    let bootstrap = if with_mmdebstrap { mmdebstrap } else { debootstrap };
    Ok((bootstrap(suite, &sources, job)?, description))
}

/// Debian's rule for package names, with what apt takes behind them (`:amd64`, `=1.2-3`). None of
/// it can start an option, be a path or split a list.
fn is_package_word(word: &str) -> bool {
    word.starts_with(|c: char| c.is_ascii_alphanumeric())
        && word.chars().all(|c| c.is_ascii_alphanumeric() || "+-.:=~_".contains(c))
}

fn mmdebstrap(suite: &str, sources: &[Source], job: &Job<'_>) -> Result<Tree> {
    let Job { packages, left_out, work, size, lock, progress } = *job;
    let list = work.join("forkd.sources");
    let text: Vec<String> = sources.iter().map(Source::to_deb822).collect();
    fs::write(&list, text.join("\n")).map_err(Error::io("write", &list))?;
    let settings = work.join("apt.conf");
    fs::write(&settings, acquire_options()?).map_err(Error::io("write", &settings))?;

    let mut command = tools::command("mmdebstrap", "mmdebstrap")?;
    command.stdin(lock.as_stdin()?);
    command.args(["--mode=auto", "--variant=minbase", "--format=tar"]);
    command.arg(format!("--include={}", packages.join(",")));
    command.args(LEFT_OUT.iter().map(|option| format!("--dpkgopt={option}")));
    command.args(left_out.iter().map(|path| format!("--dpkgopt=path-exclude={path}")));
    command.arg(format!("--dpkgopt={UNSAFE_IO}"));
    command.arg("--aptopt=Acquire::Languages \"none\"");
    command.arg(format!("--setup-hook=upload {} {HOST_SETTINGS}", shell_quoted(&settings)?));
    // In one line, or mmdebstrap wonders whether it is the name of a script.
    command.arg(format!("--customize-hook={}", FINISH.trim().replace('\n', "; ")));
    command.arg(suite).arg("-").arg(&list);
    if rustix::process::geteuid().is_root() {
        // Not in /tmp, which may be small and in memory. Without root, mmdebstrap runs as other users
        // that could not reach our folder.
        command.env("TMPDIR", work);
    }
    let root = work.join("root");
    let mut tree = Tree::empty(&root)?;
    tools::stream(
        command,
        |stdout| unpack::unpack(stdout, &mut tree, size, &|line| progress.log(line)),
        |line| {
            progress.log(line);
            if let Some(text) = step_of(line) {
                progress.step(text);
            }
        },
    )
    .map_err(explain)?;
    Ok(tree)
}

/// The step a line of mmdebstrap's output announces.
fn step_of(line: &str) -> Option<&'static str> {
    let line = line.strip_prefix("I: ")?;
    let steps = [
        ("running apt-get update", "reading package lists"),
        ("downloading packages", "downloading packages"),
        ("extracting archives", "unpacking the base system"),
        ("installing essential", "installing the base system"),
        ("installing remaining", "installing packages"),
        ("cleaning package lists", "cleaning up"),
        ("creating tarball", "collecting files"),
    ];
    steps.iter().find(|(start, _)| line.starts_with(start)).map(|(_, step)| *step)
}

/// Adds the fix to failures that have one.
fn explain(error: Error) -> Error {
    let Error::Tool(text) = error else { return error };
    let root = rustix::process::geteuid().is_root();
    let fix = if text.contains("Unable to locate package") || text.contains("has no installation candidate") {
        "; look for the right name with `apt-cache search`"
    } else if !root && ["mode", "newuidmap", "unshare", "subuid"].iter().any(|word| text.contains(word)) {
        "; building from packages without root needs the package uidmap and a range for you in /etc/subuid \
         and /etc/subgid, or the packages fakechroot and fakeroot; or run `sudo forkd image build …`"
    } else if text.contains("Could not resolve") || text.contains("Could not connect") {
        "; check the network and apt's proxy settings: `apt-get update` has to work"
    } else {
        ""
    };
    Error::Tool(format!("{text}{fix}"))
}

fn debootstrap(suite: &str, sources: &[Source], job: &Job<'_>) -> Result<Tree> {
    let Job { packages, work, size, lock, progress, .. } = *job;
    if !rustix::process::geteuid().is_root() {
        return Err(Error::Host(
            "debootstrap needs root; install mmdebstrap, which does not (`apt-get install mmdebstrap`), or \
             run `sudo forkd image build …`"
                .into(),
        ));
    }
    let source = sources.iter().find(|source| source.suite == suite).ok_or_else(|| {
        Error::Host(format!(
            "apt has no source for {suite} itself, which debootstrap needs; install mmdebstrap"
        ))
    })?;
    let root = work.join("root");
    // A mount namespace of its own: what debootstrap mounts is gone with it, also when it is killed,
    // and no clean-up can ever reach the host's /proc or /dev.
    let isolated = || -> Result<Command> {
        let mut command = tools::command("unshare", "util-linux")?;
        command.stdin(lock.as_stdin()?).args(["--mount", "--"]);
        Ok(command)
    };
    progress.step("installing packages with debootstrap");
    let mut command = isolated()?;
    command.args(["debootstrap", "--variant=minbase"]);
    command.arg(format!("--include={}", packages.join(",")));
    command.arg(format!("--components={}", source.components.join(",")));
    command.arg(suite).arg(&root).arg(&source.uri);
    let lines = |line: &str| progress.log(line);
    tools::stream(command, tools::drain, lines).map_err(explain)?;
    let mut command = isolated()?;
    command.args(["sh", "-c", FINISH, "sh"]).arg(&root);
    tools::stream(command, tools::drain, lines)?;
    let list = root.join("etc/apt/sources.list");
    fs::write(&list, "").map_err(Error::io("write", &list))?;
    let list = root.join("etc/apt/sources.list.d/forkd.sources");
    let text: Vec<String> = sources.iter().map(Source::to_deb822).collect();
    fs::write(&list, text.join("\n")).map_err(Error::io("write", &list))?;
    Tree::scan(&root, size)
}

/// mmdebstrap splits the words of its `upload` hook as a shell does.
fn shell_quoted(path: &Path) -> Result<String> {
    let text = path.to_str().filter(|text| !text.contains('\'')).ok_or_else(|| {
        Error::Host(format!("{} has strange characters; choose another FORKD_DATA_DIR", path.display()))
    })?;
    Ok(format!("'{text}'"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_package_names_reach_the_command_line() {
        for good in ["python3", "g++", "libc6:amd64", "bash=5.2.15-2+b2", "trixie"] {
            assert!(is_package_word(good), "{good}");
        }
        for bad in ["", "-y", "a,b", "./x.deb", "/x.deb", "a b", "$(id)", "?priority"] {
            assert!(!is_package_word(bad), "{bad}");
        }
    }
}

//! Packages of npm, installed by the host's npm for every user of the image.

use std::path::Path;

use crate::additions::Layer;
use crate::error::{Error, Result};
use crate::library::Lock;
use crate::progress::Progress;
use crate::tools;

/// Native parts for other systems, which packages bring in a folder `prebuilds`.
const OTHER_SYSTEMS: &[&str] = &["win32", "darwin", "android", "freebsd"];

/// Refuses what is not the name of a package, and a host without npm.
pub(crate) fn check(packages: &[String]) -> Result<()> {
    if packages.is_empty() {
        return Ok(());
    }
    if let Some(wrong) = packages.iter().find(|name| !is_package(name)) {
        return Err(Error::Invalid(format!(
            "{wrong:?} is not the name of a package of npm; examples: typescript, typescript@5.4.5, @types/node"
        )));
    }
    tools::command("npm", "npm").map(drop)
}

/// npm also takes paths, addresses and repositories, and what starts with `-` is an option.
fn is_package(text: &str) -> bool {
    let (scope, rest) = match text.strip_prefix('@') {
        Some(scoped) => match scoped.split_once('/') {
            Some((scope, rest)) => (Some(scope), rest),
            None => return false,
        },
        None => (None, text),
    };
    let (name, version) = rest.split_once('@').unwrap_or((rest, "latest"));
    let is_word = |word: &str| {
        word.starts_with(|c: char| c.is_ascii_alphanumeric())
            && word.chars().all(|c| c.is_ascii_alphanumeric() || "-._+".contains(c))
    };
    let version = version.trim_start_matches(['^', '~', '<', '>', '=']);
    scope.is_none_or(is_word) && is_word(name) && is_word(version)
}

/// Installs `packages` below /usr/local. Their scripts do not run: what needs a compiler stays without it.
pub(crate) fn install(
    packages: &[String],
    work: &Path,
    lock: &Lock,
    layer: &mut Layer,
    progress: &dyn Progress,
) -> Result<()> {
    progress.step("fetching packages with npm");
    let prefix = work.join("npm");
    let mut command = tools::command("npm", "npm")?;
    command.stdin(lock.as_stdin()?).current_dir(work);
    command.args(["install", "--global", "--ignore-scripts", "--omit=dev"]);
    command.args(["--no-audit", "--no-fund", "--no-update-notifier", "--loglevel=error", "--prefix"]);
    command.arg(&prefix).args(packages);
    tools::stream(command, tools::drain, |line| progress.log(line)).map_err(explain)?;
    for part in ["bin", "lib"] {
        let folder = prefix.join(part);
        if folder.is_dir() {
            layer.copy(&folder, &format!("usr/local/{part}"), &is_for_guests)?;
        }
    }
    Ok(())
}

fn is_for_guests(path: &Path) -> bool {
    let mut parts = path.components().rev().map(|part| part.as_os_str().to_string_lossy());
    let (name, above) = (parts.next().unwrap_or_default(), parts.next().unwrap_or_default());
    above != "prebuilds" || !OTHER_SYSTEMS.iter().any(|system| name.starts_with(system))
}

fn explain(error: Error) -> Error {
    let Error::Tool(text) = error else { return error };
    let fix = if text.contains("E404") {
        "; look for the right name with `npm search`"
    } else if ["ENOTFOUND", "ECONNREFUSED", "ETIMEDOUT", "EAI_AGAIN"].iter().any(|code| text.contains(code)) {
        "; check the network and npm's proxy settings: `npm ping` has to work"
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
        for good in ["typescript", "typescript@5.4.5", "@types/node", "@types/node@^18", "ijavascript@latest"]
        {
            assert!(is_package(good), "{good}");
        }
        for bad in
            ["", "-g", "../x", "/x", "user/repository", "git+ssh://x", "@x", "a b", "a@/x", "a@", "@/a"]
        {
            assert!(!is_package(bad), "{bad}");
        }
    }

    #[test]
    fn native_parts_for_other_systems_are_left_out() {
        assert!(!is_for_guests(Path::new("node_modules/zeromq/prebuilds/win32-x64")));
        assert!(is_for_guests(Path::new("node_modules/zeromq/prebuilds/linux-x64")));
        assert!(is_for_guests(Path::new("node_modules/win32-names")));
    }
}

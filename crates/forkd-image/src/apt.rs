//! The host's apt: which package sources it has, how it reaches them, and packages from them.
//!
//! Nothing of the host changes and no root is needed: lists and packages go to a folder of our own,
//! so that what we see is fresh even where the host's lists are old or were removed. No mirror is
//! ever named here; all come from the host's configuration.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use crate::error::{Error, Result};
use crate::progress::Progress;
use crate::tools;

/// Lists apt fetches for graphical tools; large, and of no use here.
const UNWANTED: &[&str] = &["DEP-11", "DEP-11-icons-small", "DEP-11-icons", "Contents-deb", "CNF"];
/// What of the host's apt configuration decides how sources are reached.
const ACQUIRE: &[&str] = &[
    "Acquire::http::",
    "Acquire::https::",
    "Acquire::ForceIPv",
    "Acquire::Retries",
    "Acquire::Check-Valid-Until",
    "Acquire::Check-Date",
    "Acquire::Max-FutureTime",
    "Acquire::AllowInsecureRepositories",
];

/// The host's distribution.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Distribution {
    /// What its package sources call their origin: `Debian` or `Ubuntu`.
    pub(crate) origin: &'static str,
    /// Code name of its release.
    pub(crate) codename: String,
}

impl Distribution {
    /// As in `/etc/os-release`.
    pub(crate) fn of_host() -> Result<Distribution> {
        let text = fs::read_to_string("/etc/os-release").unwrap_or_default();
        Distribution::parse(&text).ok_or_else(|| {
            Error::Host(
                "building from packages needs a Debian or Ubuntu host; here, build images from a tar or a \
                 folder (`forkd image build NAME --tar FILE`), and give a kernel by its path"
                    .into(),
            )
        })
    }

    fn parse(os_release: &str) -> Option<Distribution> {
        let field = |name: &str| {
            let value = os_release.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix('='))?;
            Some(value.trim().trim_matches('"').to_owned()).filter(|value| !value.is_empty())
        };
        let kin = format!("{} {}", field("ID")?, field("ID_LIKE").unwrap_or_default());
        let (origin, own) = if kin.split_whitespace().any(|word| word == "ubuntu") {
            ("Ubuntu", "UBUNTU_CODENAME")
        } else if kin.split_whitespace().any(|word| word == "debian") {
            ("Debian", "DEBIAN_CODENAME")
        } else {
            return None;
        };
        Some(Distribution { origin, codename: field(own).or_else(|| field("VERSION_CODENAME"))? })
    }
}

/// A package source of the distribution itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Source {
    pub(crate) uri: String,
    /// Such as `bookworm-updates`.
    pub(crate) suite: String,
    pub(crate) components: Vec<String>,
    /// The trust options of its entry, as lines of a deb822 file.
    trust: String,
}

impl Source {
    /// As an entry of a deb822 file.
    pub(crate) fn to_deb822(&self) -> String {
        let components = self.components.join(" ");
        format!(
            "Types: deb\nURIs: {}\nSuites: {}\nComponents: {components}\n{}",
            self.uri, self.suite, self.trust
        )
    }
}

/// A view of the host's package sources.
pub(crate) struct Apt {
    folder: PathBuf,
    distribution: Distribution,
}

impl Apt {
    /// Fetches fresh package lists into `folder`, which is made.
    pub(crate) fn open(folder: &Path, progress: &dyn Progress) -> Result<Apt> {
        let distribution = Distribution::of_host()?;
        for part in ["lists/partial", "cache/archives/partial"] {
            let path = folder.join(part);
            fs::create_dir_all(&path).map_err(Error::io("create", &path))?;
        }
        let apt = Apt { folder: folder.to_owned(), distribution };
        progress.step("asking apt for its package lists");
        let mut command = apt.command("apt-get")?;
        command.arg("update");
        // One source that cannot be reached, such as a third party's, does not make the others
        // useless: what counts is whether the distribution's are there afterwards.
        let updated = tools::stream(command, tools::drain, |line| progress.log(line));
        if apt.targets()?.is_empty() {
            updated?;
            let Distribution { origin, codename } = &apt.distribution;
            return Err(Error::Host(format!(
                "apt has no package source of {origin} {codename} that it can reach; look at \
                 /etc/apt/sources.list and /etc/apt/sources.list.d, and at what `apt-get update` says"
            )));
        }
        Ok(apt)
    }

    /// An apt program that works in our folder.
    fn command(&self, program: &str) -> Result<Command> {
        let mut command = tools::command(program, "apt")?;
        let folder = self.folder.display();
        command.arg("-qq");
        for option in [
            format!("Dir::State::Lists={folder}/lists"),
            format!("Dir::Cache={folder}/cache"),
            "Debug::NoLocking=1".into(),
            // Its unprivileged user could not enter our folder.
            "APT::Sandbox::User=root".into(),
            "Acquire::Languages=none".into(),
        ] {
            command.arg("-o").arg(option);
        }
        for list in UNWANTED {
            command.arg("-o").arg(format!("Acquire::IndexTargets::deb::{list}::DefaultEnabled=false"));
        }
        Ok(command)
    }

    /// Lists of the distribution itself: address, suite, component and entry, one per line.
    fn targets(&self) -> Result<Vec<[String; 4]>> {
        let mut command = self.command("apt-get")?;
        command.args(["indextargets", "--format"]);
        command.arg("$(ORIGIN)|$(CODENAME)|$(REPO_URI)|$(RELEASE)|$(COMPONENT)|$(SOURCESENTRY)");
        command.args(["Created-By: Packages", "Architecture: amd64"]);
        Ok(parse_targets(&tools::output(command)?, &self.distribution))
    }

    /// The distribution's own sources for release `suite`, the host's when absent. Third parties'
    /// are left out, and so are backports.
    pub(crate) fn sources(&self, suite: Option<&str>) -> Result<Vec<Source>> {
        let mut sources = BTreeMap::<(String, String), Source>::new();
        for [uri, release, component, entry] in self.targets()? {
            let suite = match suite {
                Some(suite) => match release.split_once('-') {
                    Some((_, part)) => format!("{suite}-{part}"),
                    None => suite.to_owned(),
                },
                None => release,
            };
            let source = sources.entry((uri.clone(), suite.clone())).or_insert_with(|| {
                let trust = trust_of_entry(&entry);
                Source { uri, suite, components: Vec::new(), trust }
            });
            if !source.components.contains(&component) {
                source.components.push(component);
            }
        }
        Ok(sources.into_values().collect())
    }

    /// The distribution this is a view of.
    pub(crate) fn distribution(&self) -> &Distribution {
        &self.distribution
    }

    /// What `package` depends on directly; `None` if there is no such package.
    pub(crate) fn depends(&self, package: &str) -> Result<Option<Vec<String>>> {
        let mut command = self.command("apt-cache")?;
        command.args(["depends", "--important", package]);
        match tools::output(command) {
            Err(Error::Tool(text)) if text.contains("No packages found") => Ok(None),
            other => Ok(Some(
                other?
                    .lines()
                    .filter_map(|line| Some(line.trim().strip_prefix("Depends: ")?.to_owned()))
                    .collect(),
            )),
        }
    }

    /// Downloads `packages` into `folder`.
    pub(crate) fn download(&self, packages: &[String], folder: &Path, progress: &dyn Progress) -> Result<()> {
        let mut command = self.command("apt-get")?;
        command.current_dir(folder).arg("download").args(packages);
        tools::stream(command, tools::drain, |line| progress.log(line))
    }
}

/// How the host reaches its sources (proxies, certificates), as lines of an apt configuration.
pub(crate) fn acquire_options() -> Result<String> {
    let mut command = tools::command("apt-config", "apt")?;
    command.arg("dump");
    let text = tools::output(command)?;
    let wanted = |line: &&str| ACQUIRE.iter().any(|start| line.starts_with(start));
    Ok(text.lines().filter(wanted).map(|line| format!("{line}\n")).collect())
}

fn parse_targets(text: &str, distribution: &Distribution) -> Vec<[String; 4]> {
    let mut targets = Vec::new();
    for line in text.lines() {
        let fields: Vec<&str> = line.split('|').collect();
        let [origin, codename, uri, release, component, entry] = fields[..] else { continue };
        // The release is the name in the source entry. For an alias such as `stable` the code name is used.
        // Otherwise the name counts, because Ubuntu's code name does not distinguish updates from backports.
        let host = distribution.codename.as_str();
        let name = if release.starts_with(host) { release } else { codename };
        let own = matches!(name.strip_prefix(host), Some("" | "-updates" | "-security"));
        // The origin is what the signed list says, so a third party that uses the distribution's
        // suite names is not taken for it.
        if origin == distribution.origin && own {
            targets.push([uri, release, component, entry].map(str::to_owned));
        }
    }
    targets
}

/// The trust options of the source entry at `place` (`file:number`). The number counts lines in a `.list`
/// file and paragraphs in a `.sources` file.
fn trust_of_entry(place: &str) -> String {
    let Some((file, number)) = place.rsplit_once(':') else { return String::new() };
    let (Ok(text), Ok(number)) = (fs::read_to_string(file), number.parse::<usize>()) else {
        return String::new();
    };
    if file.ends_with(".sources") { trust_in_deb822(&text, number) } else { trust_in_list(&text, number) }
}

fn trust_in_deb822(text: &str, number: usize) -> String {
    // Comments first: a line of them does not end a paragraph, nor a field.
    let lines: Vec<&str> = text.lines().filter(|line| !line.starts_with('#')).collect();
    let mut paragraphs = lines.split(|line| line.trim().is_empty()).filter(|lines| !lines.is_empty());
    let Some(paragraph) = paragraphs.nth(number.saturating_sub(1)) else { return String::new() };
    let mut trust = String::new();
    let mut inside = false;
    for line in paragraph {
        // A field goes on in lines that start with a blank: a key may be written out in full.
        if !line.starts_with([' ', '\t']) {
            let name = line.split(':').next().unwrap_or_default().to_ascii_lowercase();
            inside = matches!(name.as_str(), "signed-by" | "trusted");
        }
        if inside {
            trust.push_str(line);
            trust.push('\n');
        }
    }
    trust
}

fn trust_in_list(text: &str, number: usize) -> String {
    let line = text.lines().nth(number.saturating_sub(1)).unwrap_or_default();
    let options =
        line.split_once('[').and_then(|(_, rest)| rest.split_once(']')).map_or("", |(inside, _)| inside);
    let mut trust = String::new();
    for option in options.split_whitespace() {
        match option.split_once('=') {
            Some(("signed-by", value)) => {
                trust.push_str(&format!("Signed-By: {}\n", value.replace(',', " ")))
            }
            Some(("trusted", value)) => trust.push_str(&format!("Trusted: {value}\n")),
            _ => {}
        }
    }
    trust
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_host_is_known_by_its_own_or_its_parents_name() {
        let parse = |text: &str| Distribution::parse(text).map(|host| (host.origin, host.codename));
        assert_eq!(parse("ID=debian\nVERSION_CODENAME=bookworm\n"), Some(("Debian", "bookworm".to_owned())));
        assert_eq!(
            parse("ID=ubuntu\nID_LIKE=debian\nVERSION_CODENAME=\"noble\"\nUBUNTU_CODENAME=noble\n"),
            Some(("Ubuntu", "noble".to_owned()))
        );
        assert_eq!(
            parse("ID=linuxmint\nID_LIKE=\"ubuntu debian\"\nVERSION_CODENAME=xia\nUBUNTU_CODENAME=noble\n"),
            Some(("Ubuntu", "noble".to_owned()))
        );
        assert_eq!(parse("ID=fedora\nVERSION_CODENAME=x\n"), None);
    }

    #[test]
    fn only_the_distributions_own_sources_are_used() {
        let host = Distribution { origin: "Debian", codename: "bookworm".into() };
        let text = "Debian|bookworm|http://mirror/debian/|bookworm|main|/etc/apt/sources.list:1\n\
                    Debian|bookworm-security|http://mirror/sec/|bookworm-security|main|/x:2\n\
                    Debian Backports|bookworm-backports|http://mirror/debian/|bookworm-backports|main|/x:3\n\
                    . bookworm|bookworm|http://third/party/|bookworm|main|/x:4\n\
                    Docker|bookworm|http://third/docker/|bookworm|stable|/x:5\n\
                    $(ORIGIN)|$(CODENAME)|http://unreachable/|bookworm|main|/x:6\n";
        let targets = parse_targets(text, &host);
        let suites: Vec<&str> = targets.iter().map(|target| target[1].as_str()).collect();
        assert_eq!(suites, ["bookworm", "bookworm-security"]);
        // Ubuntu's updates have the code name of the release itself.
        let host = Distribution { origin: "Ubuntu", codename: "noble".into() };
        let text = "Ubuntu|noble|http://m/ubuntu/|noble-updates|main|/x:1\n\
                    Ubuntu|noble|http://m/ubuntu/|noble-backports|main|/x:1\n";
        assert_eq!(parse_targets(text, &host).len(), 1);
    }

    #[test]
    fn whom_to_trust_is_read_from_both_kinds_of_files() {
        let text = "# header\n\nTypes: deb\nURIs: http://a\nSigned-By: /a.gpg\n\n\
                    Types: deb\n# note\nSigned-By:\n -----BEGIN\n .\n -----END\nTrusted: yes\n";
        assert_eq!(trust_in_deb822(text, 1), "Signed-By: /a.gpg\n");
        assert_eq!(trust_in_deb822(text, 2), "Signed-By:\n -----BEGIN\n .\n -----END\nTrusted: yes\n");
        let text = "# x\ndeb [arch=amd64 signed-by=/b.gpg,/c.gpg trusted=yes] http://b stable main\n";
        assert_eq!(trust_in_list(text, 2), "Signed-By: /b.gpg /c.gpg\nTrusted: yes\n");
        assert_eq!(trust_in_list(text, 1), "");
    }
}

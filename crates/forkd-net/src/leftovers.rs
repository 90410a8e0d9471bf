//! Lists and removes all parts of forkd in this host's network, of all daemons.

use std::io;
use std::path::Path;

use crate::nft::{self, Nft};
use crate::slot::{self, PREFIX};
use crate::{Error, Result};

/// The parts of forkd in this host's network.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Leftovers {
    /// The files that namespaces of slots are mounted on.
    pub namespaces: Vec<String>,
    /// The links of slots.
    pub links: Vec<String>,
    /// Our tables of packet filter rules.
    pub tables: Vec<String>,
}

impl Leftovers {
    /// Whether there is nothing.
    pub fn is_empty(&self) -> bool {
        *self == Leftovers::default()
    }
}

/// Lists the parts of forkd in this host's network, of all daemons.
pub fn leftovers() -> Result<Leftovers> {
    let namespaces = namespaces().map_err(Error::system("listing", "mounts"))?;
    let links = links().map_err(Error::system("listing", "links"))?;
    let has_table = Nft::find().map_or(Ok(false), |nft| nft.has_table())?;
    let tables = has_table.then(|| nft::TABLE.to_owned()).into_iter().collect();
    Ok(Leftovers { namespaces, links, tables })
}

/// Removes the namespace of a slot that no sandbox has, and the link that leads to it. `file` is one of
/// [`Leftovers::namespaces`].
pub fn remove_namespace(file: &Path) -> Result<()> {
    let name = file.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    if slot::index(name).is_none() {
        return Err(Error::BadName(name.to_owned()));
    }
    slot::remove(name, file)
}

/// Removes our rules from this host, if no slot of any daemon is left that needs them.
pub fn remove_rules() -> Result<()> {
    let links = links().map_err(Error::system("listing", "links"))?;
    match Nft::find() {
        Some(nft) if links.is_empty() => nft.remove_table(),
        _ => Ok(()),
    }
}

/// The mount points of slots' namespaces.
fn namespaces() -> io::Result<Vec<String>> {
    let mounts = std::fs::read_to_string("/proc/thread-self/mountinfo")?;
    Ok(mounts.lines().filter_map(namespace_in).map(str::to_owned).collect())
}

/// The mount point in a line of mountinfo, if a slot's namespace is mounted there.
fn namespace_in(line: &str) -> Option<&str> {
    let (mount, file_system) = line.split_once(" - ")?;
    let point = mount.split(' ').nth(4)?;
    let name = Path::new(point).file_name()?.to_str()?;
    (file_system.starts_with("nsfs ") && slot::index(name).is_some()).then_some(point)
}

/// The links of slots in the calling thread's namespace.
pub(crate) fn links() -> io::Result<Vec<String>> {
    let devices = std::fs::read_to_string("/proc/thread-self/net/dev")?;
    let names = devices.lines().filter_map(|line| Some(line.split_once(':')?.0.trim()));
    Ok(names.filter(|name| name.starts_with(PREFIX)).map(str::to_owned).collect())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn namespaces_of_slots_are_told_from_other_mounts() {
        let line =
            |point: &str, kind: &str| format!("90 29 0:4 net:[402] {point} rw shared:3 - {kind} nsfs rw");
        assert_eq!(namespace_in(&line("/run/forkd/netns/forkd-7", "nsfs")), Some("/run/forkd/netns/forkd-7"));
        assert_eq!(namespace_in(&line("/run/netns/other", "nsfs")), None);
        assert_eq!(namespace_in(&line("/mnt/forkd-7", "ext4")), None);
        assert_eq!(namespace_in("garbage"), None);
    }
}

//! Disk layers that monitors are handed, and what they send as such.
//!
//! A monitor that its guest broke into can send any descriptor it has, and say of any layer that it has given
//! back the right to write. The daemon opens only what it handed out itself, and asks the kernel for the rest.

use std::collections::HashSet;
use std::fs::{File, Metadata};
use std::io;
use std::os::fd::{AsFd, OwnedFd};
use std::os::unix::fs::MetadataExt;

use forkd_store::{Writers, writers};
use parking_lot::Mutex;

use crate::error::{Error, Result};
use crate::host::images::reopen;
use crate::util::task::blocking;

/// How many layers of one lineage are remembered. File systems use the numbers of removed files again, so most
/// lineages stay far below.
const MAX_KNOWN: usize = 1 << 18;

/// The layers that the processes of one lineage were handed.
#[derive(Debug)]
pub(crate) struct Handed(Mutex<Option<HashSet<(u64, u64)>>>);

impl Handed {
    /// For a lineage that begins.
    pub(crate) fn nothing() -> Self {
        Handed(Mutex::new(Some(HashSet::new())))
    }

    /// For a lineage that an earlier daemon began: what was handed out is not known.
    pub(crate) fn unknown() -> Self {
        Handed(Mutex::new(None))
    }

    /// Takes note of `layer`, which is about to be handed out.
    pub(crate) fn add(&self, layer: impl AsFd) -> Result<()> {
        let failed = |error| Error::host("cannot look at a disk layer", error);
        let layer = File::from(layer.as_fd().try_clone_to_owned().map_err(failed)?);
        let id = id(&layer.metadata().map_err(failed)?);
        let mut known = self.0.lock();
        if known.as_mut().is_some_and(|known| known.insert(id) && known.len() > MAX_KNOWN) {
            *known = None;
        }
        Ok(())
    }

    /// `sent`, which came from a monitor as one of its frozen layers, opened for reading. An error if it is
    /// something else.
    pub(crate) fn returned(&self, sent: OwnedFd) -> std::result::Result<OwnedFd, String> {
        let sent = File::from(sent);
        let meta = sent.metadata().map_err(|error| error.to_string())?;
        // Before it is opened: that may wait, or do something, if it is no file.
        if !meta.is_file() {
            return Err("it sent something else than a file as a disk layer".into());
        }
        let is_ours = match &*self.0.lock() {
            Some(known) => known.contains(&id(&meta)),
            // As layers are: without a name, or published.
            None => meta.nlink() == 0 || meta.mode() & 0o222 == 0,
        };
        if !is_ours {
            return Err("it sent a file as a disk layer that it was not handed as one".into());
        }
        reopen(&sent).map_err(|error| error.to_string())
    }
}

fn id(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// Whether a process keeps the right to write to one of `layers`, which the daemon has open for reading only.
/// Waits a moment for those that are about to give it back. Where the file system cannot say, a monitor's word
/// counts: what is published there is copied.
pub(crate) async fn are_kept(layers: &[OwnedFd]) -> Result<bool> {
    let copies: io::Result<Vec<File>> =
        layers.iter().map(|layer| Ok(File::from(layer.try_clone()?))).collect();
    let failed = |error| Error::host("cannot look at a disk layer", error);
    let copies = copies.map_err(failed)?;
    blocking("looking at disk layers", move || {
        for layer in &copies {
            if writers(layer).map_err(failed)? == Writers::Some {
                return Ok(true);
            }
        }
        Ok(false)
    })
    .await
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;

    #[test]
    fn only_files_that_were_handed_out_are_opened_again_and_only_for_reading() {
        let folder = tempfile::tempdir().unwrap();
        let handed = Handed::nothing();
        let layer = crate::host::disk_layer::layer(folder.path()).unwrap();
        let foreign = crate::host::disk_layer::layer(folder.path()).unwrap();
        handed.add(&layer).unwrap();
        let mut returned = File::from(handed.returned(layer).unwrap());
        assert!(returned.write_all(b"x").is_err());
        let error = handed.returned(foreign).unwrap_err();
        assert!(error.contains("not handed"), "{error}");
    }

    #[test]
    fn nothing_but_files_is_opened_again_whatever_is_known() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("pipe");
        rustix::fs::mkfifoat(rustix::fs::CWD, &path, rustix::fs::Mode::RUSR).unwrap();
        let flags = rustix::fs::OFlags::RDONLY | rustix::fs::OFlags::NONBLOCK;
        for handed in [Handed::nothing(), Handed::unknown()] {
            let pipe = rustix::fs::open(&path, flags, rustix::fs::Mode::empty()).unwrap();
            handed.add(&pipe).unwrap();
            // To open it again would wait for a writer.
            let others = [pipe, File::open("/dev/null").unwrap().into(), File::open("/").unwrap().into()];
            for other in others {
                let error = handed.returned(other).unwrap_err();
                assert!(error.contains("something else than a file"), "{error}");
            }
        }
    }

    #[test]
    fn after_a_restart_what_looks_like_a_layer_is_taken_and_nothing_else() {
        let folder = tempfile::tempdir().unwrap();
        let handed = Handed::unknown();
        handed.returned(crate::host::disk_layer::layer(folder.path()).unwrap()).unwrap();
        handed.returned(crate::host::disk_layer::file(folder.path(), "console.log").unwrap()).unwrap_err();
    }

    #[tokio::test]
    async fn the_right_to_write_to_a_layer_is_gone_when_no_process_has_it() {
        let folder = tempfile::tempdir().unwrap();
        let layer = crate::host::disk_layer::layer(folder.path()).unwrap();
        let sealed = [reopen(&layer).unwrap()];
        match writers(&File::from(reopen(&layer).unwrap())).unwrap() {
            Writers::Unknown(why) => return eprintln!("NOT RUN: no leases here ({why})"),
            _ => assert!(are_kept(&sealed).await.unwrap()),
        }
        drop(layer);
        assert!(!are_kept(&sealed).await.unwrap());
    }
}

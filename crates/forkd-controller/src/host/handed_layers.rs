//! The disk layers that the daemon passed to monitors, and a check of those that monitors send back.
//!
//! A monitor that its guest broke into can send any of its descriptors, and can claim of any layer that it gave up
//! the right to write. So the daemon opens only layers that it passed out itself, and asks the kernel for writers.

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

/// How many layers of one lineage are remembered. File systems reuse the inode numbers of removed files, so most
/// lineages have far fewer.
const MAX_KNOWN: usize = 1 << 18;

/// The layers that the daemon passed to the processes of one lineage.
#[derive(Debug)]
pub(crate) struct Handed(Mutex<Option<HashSet<(u64, u64)>>>);

impl Handed {
    /// No layers, for a new lineage.
    pub(crate) fn nothing() -> Self {
        Handed(Mutex::new(Some(HashSet::new())))
    }

    /// Unknown layers, for a lineage of an earlier daemon.
    pub(crate) fn unknown() -> Self {
        Handed(Mutex::new(None))
    }

    /// Records `layer`, which is about to be passed to a process.
    pub(crate) fn add(&self, layer: impl AsFd) -> Result<()> {
        let failed = |error| Error::host("cannot read the attributes of a disk layer", error);
        let layer = File::from(layer.as_fd().try_clone_to_owned().map_err(failed)?);
        let id = id(&layer.metadata().map_err(failed)?);
        let mut known = self.0.lock();
        if known.as_mut().is_some_and(|known| known.insert(id) && known.len() > MAX_KNOWN) {
            *known = None;
        }
        Ok(())
    }

    /// Opens for reading the layer that a monitor sent as one of its frozen layers. An error if it is not one
    /// of the lineage's layers.
    pub(crate) fn returned(&self, sent: OwnedFd) -> std::result::Result<OwnedFd, String> {
        let sent = File::from(sent);
        let meta = sent.metadata().map_err(|error| error.to_string())?;
        // Checked before it is opened: to open anything but a file may block, or have side effects.
        if !meta.is_file() {
            return Err("it sent something else than a file as a disk layer".into());
        }
        let is_ours = match &*self.0.lock() {
            Some(known) => known.contains(&id(&meta)),
            // The properties of layers: without a name, or published and read-only.
            None => meta.nlink() == 0 || meta.mode() & 0o222 == 0,
        };
        if !is_ours {
            return Err("it sent a file as a disk layer that was not handed to it".into());
        }
        reopen(&sent).map_err(|error| error.to_string())
    }
}

fn id(meta: &Metadata) -> (u64, u64) {
    (meta.dev(), meta.ino())
}

/// Whether a process keeps the right to write to one of `layers`, which the daemon has open for reading only.
/// Waits a moment for processes that are about to give it up. Where the file system cannot tell, the monitor's
/// claim counts; published layers are copied there.
pub(crate) async fn are_kept(layers: &[OwnedFd]) -> Result<bool> {
    let copies: io::Result<Vec<File>> =
        layers.iter().map(|layer| Ok(File::from(layer.try_clone()?))).collect();
    let failed = |error| Error::host("cannot read the attributes of a disk layer", error);
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
            // Opening it again would wait for a writer.
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

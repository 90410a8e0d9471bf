//! Merging the frozen disk layers of a template: a long chain of branches keeps a short chain of layers.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;

use forkd_protocol::control::{FdRef, MergeConfig, ReplacedLayers};

use crate::error::{Error, Result};
use crate::host::handed_layers::are_kept;
use crate::host::images::reopen;
use crate::monitor::Replacement;
use crate::snapshot::registry::SnapshotRegistry;
use crate::snapshot::save::{finish, follow};
use crate::snapshot::template::Template;
use crate::util::random::new_id;

/// The number of frozen layers of a disk from which on they are merged into one.
const MERGE_FROM: usize = 8;

/// The sandbox a branch was taken of. It has the frozen layers of the branch's template, and maybe newer ones.
pub(crate) trait LayerSource: Send {
    /// Corrects the sandbox's count of frozen layers: the template has `most` on its fullest disk.
    fn count_layers(&self, most: usize) -> impl Future<Output = ()> + Send;

    /// Replaces the frozen layers of each disk by one file. The fullest disk had `most` layers.
    fn replace_layers(
        self,
        layers: Vec<Option<Replacement>>,
        most: usize,
    ) -> impl Future<Output = Result<()>> + Send;
}

/// The source of a template whose sandbox is gone, or that was loaded from a snapshot.
pub(crate) struct NoSource;

impl LayerSource for NoSource {
    async fn count_layers(&self, _most: usize) {}

    async fn replace_layers(self, _layers: Vec<Option<Replacement>>, _most: usize) -> Result<()> {
        Ok(())
    }
}

/// Merges the frozen layers of a new branch, if its disks have many. The source then uses the merged files, too:
/// it has the same layers, and maybe newer ones.
pub(crate) async fn merge(
    snapshots: &SnapshotRegistry,
    source: impl LayerSource,
    template: &Arc<Template>,
) -> Result<()> {
    if template.about.guest.image.is_none() {
        return Ok(());
    }
    let _alone = template.disks.lock().await;
    let counts: Vec<usize> = template.layers().await?.iter().map(Vec::len).collect();
    let most = counts.iter().copied().max().unwrap_or(0);
    source.count_layers(most).await;
    if most < MERGE_FROM {
        return Ok(());
    }
    let mut files = Vec::with_capacity(counts.len());
    for count in counts {
        let file =
            (count > 1).then(|| template.lineage.layer(&snapshots.host.config.data_dir)).transpose()?;
        files.push(file.zip(u8::try_from(count).ok()).map(|(file, count)| (count, file)));
    }
    let (mut fds, mut disks) = (Vec::new(), Vec::with_capacity(files.len()));
    for file in &files {
        disks.push(match file {
            Some((count, file)) => {
                fds.push(file.try_clone().map_err(|error| Error::host("cannot use a disk layer", error))?);
                Some(ReplacedLayers { count: *count, layer: FdRef(fds.len() - 1) })
            }
            None => None,
        });
    }
    let name = new_id("merge")?;
    let pending = template.merge(MergeConfig { child: name.clone(), disks }, fds).await;
    let ended = follow(template, pending, || {}).await;
    finish(template, &name, ended, "layers could not be merged", None)?;
    let files = given_back(files).await?;
    template.replace_layers(replacements(&files)?).await?;
    source.replace_layers(replacements(&files)?, most).await
}

/// Reopens the files for reading; an error if a process can still write to one of them.
async fn given_back(files: Vec<Option<(u8, OwnedFd)>>) -> Result<Vec<Option<(u8, OwnedFd)>>> {
    let for_reading = |(count, file): (u8, OwnedFd)| Ok((count, reopen(file)?));
    let files = files.into_iter().map(|file| file.map(for_reading).transpose());
    let files = files.collect::<Result<Vec<_>>>()?;
    for (_, file) in files.iter().flatten() {
        if are_kept(std::slice::from_ref(file)).await? {
            return Err(Error::host(
                "layers could not be merged",
                "a process kept the right to write to the result",
            ));
        }
    }
    Ok(files)
}

/// `files` as replacements of layers, each reopened for reading.
fn replacements(files: &[Option<(u8, OwnedFd)>]) -> Result<Vec<Option<Replacement>>> {
    let replacement =
        |(count, file): &(u8, OwnedFd)| Ok(Replacement { count: *count, layer: reopen(file.as_fd())? });
    files.iter().map(|file| file.as_ref().map(replacement).transpose()).collect()
}

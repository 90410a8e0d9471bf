//! A stopped VM written to files, and the frozen layers of its disks.
//!
//! Saving takes two steps. [`Frozen::prepare_save`] looks at everything it was given and refuses with the
//! reason; nothing is written. [`Frozen::save`] takes its time, in a process that has nothing else to do.

use std::fs::File;
use std::io;

use super::memory_layer::{self, LayerChain, Progress};
use super::{BlockState, DevicePart, DeviceState, Frozen, file};
use crate::devices::virtio::block::DiskError;
use crate::{Error, Result};

/// Where a VM is saved to.
#[derive(Debug)]
pub struct SaveFiles {
    /// An empty file for the state.
    pub state: File,
    /// An empty file for the memory layer. Without it only the disks are saved, and the state is theirs alone.
    pub memory: Option<File>,
    /// The memory layers of the parent, the oldest first, which the VM must come from. With none, the new
    /// layer holds everything.
    pub parent: Vec<File>,
    /// The `pagemap` of a process that has the VM's memory where it is here. Without it all pages are
    /// looked at.
    pub pagemap: Option<File>,
    /// For each disk an empty file that takes all its frozen layers as one, or none to keep them as they
    /// are. May be empty, which is none for each.
    pub disks: Vec<Option<File>>,
    /// Gets the progress.
    pub progress: Option<File>,
}

/// A save that passed all checks.
#[derive(Debug)]
pub struct Saving {
    files: SaveFiles,
    parent: Option<LayerChain>,
}

/// Frozen layers of a disk that become one.
#[derive(Debug)]
pub struct MergedLayers {
    /// How many, counted from the oldest.
    pub count: usize,
    /// The one.
    pub layer: File,
}

impl Frozen {
    /// Looks at everything a save was given.
    pub fn prepare_save(&self, mut files: SaveFiles) -> Result<Saving> {
        if files.disks.is_empty() {
            files.disks.resize_with(self.disks.len(), || None);
        }
        self.check_disks(files.disks.len())?;
        for (index, (disk, merged)) in self.disks.iter().zip(&files.disks).enumerate() {
            if merged.is_some() && disk.frozen_layers().is_empty() {
                return Err(Error::Config(format!("disks[{index}]: the disk has no layers to merge")));
            }
        }
        if files.memory.is_none() && (files.pagemap.is_some() || !files.parent.is_empty()) {
            return Err(Error::Config("a save without memory takes neither parent nor pagemap".into()));
        }
        if let Some(pagemap) = &files.pagemap {
            // Of this very process, or the one it was forked from: there, what is on our heap is.
            memory_layer::check_pagemap(pagemap, self.state.vcpus.as_ptr().cast())?;
        }
        let layers = std::mem::take(&mut files.parent);
        let parent = match layers.is_empty() {
            true => None,
            false => Some(LayerChain::open(layers, self.memory_bytes())?),
        };
        Ok(Saving { files, parent })
    }

    /// Writes everything but the bases of the disks and layers that stay as they are; without a memory layer
    /// only what belongs to the disks. When it returns all
    /// files are safely on disk. The VM has the merged layers then.
    pub fn save(&mut self, saving: Saving) -> Result<()> {
        let Saving { files, parent } = saving;
        let reporting = || Error::system::<io::Error>("report progress");
        let total = files.memory.as_ref().map_or(0, |_| self.memory_bytes());
        let mut progress = Progress::new(files.progress, total);
        progress.report().map_err(reporting())?;
        let pagemap = files.pagemap.as_ref();
        if let Some(layer) = &files.memory {
            memory_layer::save(&self.memory, layer, parent.as_ref(), pagemap, &mut progress)?;
        }
        let mut merged = Vec::new();
        for (disk, layer) in self.disks.iter_mut().zip(files.disks) {
            let Some(layer) = layer else { continue };
            let count = disk.frozen_layers().len();
            disk.merge_into(count, &layer, |bytes| progress.add(0, bytes)).map_err(merging)?;
            merged.push(layer.try_clone().map_err(Error::system("copy a descriptor"))?);
            disk.replace(count, layer);
        }
        self.report_disk_progress();
        match &files.memory {
            Some(_) => file::write(&self.state, &files.state)?,
            None => file::write_disks(&self.disk_states(), &files.state)?,
        }

        let to_disk = Error::system::<io::Error>;
        for layer in merged {
            layer.sync_all().map_err(to_disk("write a merged layer to the disk"))?;
        }
        if let Some(layer) = &files.memory {
            layer.sync_all().map_err(to_disk("write the memory layer to the disk"))?;
        }
        files.state.sync_all().map_err(to_disk("write the state file to the disk"))?;
        progress.report().map_err(reporting())
    }

    /// Whether [`Frozen::merge_layers`] can do this.
    pub fn check_merge(&self, disks: &[Option<MergedLayers>]) -> Result<()> {
        self.check_disks(disks.len())?;
        for (index, (disk, merged)) in self.disks.iter().zip(disks).enumerate() {
            if let Some(merged) = merged {
                disk.check_count(merged.count).map_err(of_disk(index))?;
            }
        }
        Ok(())
    }

    /// Copies frozen layers into one empty file for each disk, see [`Disk::merge_into`](crate::devices::virtio::block::Disk::merge_into). When it returns
    /// these are safely on disk. The VM does not use them yet.
    pub fn merge_layers(&self, disks: Vec<Option<MergedLayers>>) -> Result<()> {
        for (disk, merged) in self.disks.iter().zip(disks) {
            if let Some(MergedLayers { count, layer }) = merged {
                disk.merge_into(count, &layer, |_| Ok(())).map_err(merging)?;
                layer.sync_all().map_err(Error::system("write a merged layer to the disk"))?;
            }
        }
        Ok(())
    }

    /// Uses one file in the place of several frozen layers of a disk. All or nothing.
    pub fn replace_layers(&mut self, disks: Vec<Option<MergedLayers>>) -> Result<()> {
        self.check_disks(disks.len())?;
        for (index, (disk, merged)) in self.disks.iter().zip(&disks).enumerate() {
            if let Some(merged) = merged {
                disk.check_replace(merged.count, &merged.layer).map_err(of_disk(index))?;
            }
        }
        for (disk, merged) in self.disks.iter_mut().zip(disks) {
            if let Some(merged) = merged {
                disk.replace(merged.count, merged.layer);
            }
        }
        self.report_disk_progress();
        Ok(())
    }

    /// Takes `layers`, for each disk its topmost frozen layer opened for reading only, in the place of
    /// what the VM wrote to. All or nothing.
    pub fn seal(&mut self, layers: Vec<Option<File>>) -> Result<()> {
        self.check_disks(layers.len())?;
        for (index, (disk, layer)) in self.disks.iter().zip(&layers).enumerate() {
            disk.check_seal(layer.as_ref())
                .map_err(|error| Error::Config(format!("layers[{index}]: {error}")))?;
        }
        for (disk, layer) in self.disks.iter_mut().zip(layers) {
            disk.seal(layer);
        }
        Ok(())
    }

    fn check_disks(&self, found: usize) -> Result<()> {
        let expected = self.disks.len();
        if found == expected {
            return Ok(());
        }
        Err(Error::Config(format!("the VM has {expected} disks, but files for {found} were given")))
    }

    fn memory_bytes(&self) -> u64 {
        self.state.memory.iter().map(|range| range.length).sum()
    }

    /// The state of its disks, in order.
    fn disk_states(&self) -> Vec<BlockState> {
        let disk = |device: &DeviceState| match &device.part {
            DevicePart::Block(state) => Some(state.clone()),
            _ => None,
        };
        self.state.devices.iter().filter_map(disk).collect()
    }

    /// Updates the disks' part of the state.
    fn report_disk_progress(&mut self) {
        let states = self.state.devices.iter_mut().filter_map(|device| match &mut device.part {
            DevicePart::Block(state) => Some(state),
            _ => None,
        });
        for (state, disk) in states.zip(&self.disks) {
            state.files = disk.files().len() as u8;
            state.runs = disk.runs();
        }
    }
}

fn merging(error: DiskError) -> Error {
    match error {
        DiskError::Io(error) => Error::system("merge the layers of a disk")(error),
        error => Error::Config(error.to_string()),
    }
}

fn of_disk(index: usize) -> impl FnOnce(DiskError) -> Error {
    move |error| Error::Config(format!("disks[{index}]: {error}"))
}

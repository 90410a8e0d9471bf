//! virtio-blk over a [`Disk`].

mod disk;
mod layers;
#[cfg(test)]
mod layers_tests;
#[cfg(test)]
mod tests;

pub use disk::{Disk, DiskError};

use std::io::ErrorKind;

use virtio_bindings::virtio_blk;
use virtio_bindings::virtio_ids::VIRTIO_ID_BLOCK;

use super::buffers::Buffers;
use super::queue::{DescriptorChain, Malformed, VirtQueue};
use super::{VirtioDevice, read_config_bytes};
use crate::GuestMemory;
use crate::state::{BlockState, DevicePart};
use disk::{BLOCK, SECTOR};

const QUEUE_SIZE: u16 = 256;
/// The most pieces of memory in one request: the queue's length without header and status.
const MAX_SEGMENTS: u32 = QUEUE_SIZE as u32 - 2;
/// The most bytes in one piece. With [`MAX_SEGMENTS`] it bounds what one request can make us do.
const MAX_SEGMENT_SIZE: u32 = 64 << 10;
const MAX_REQUEST: usize = MAX_SEGMENTS as usize * MAX_SEGMENT_SIZE as usize;
/// After so many bytes, or requests, other devices get their turn.
const MAX_BYTES_PER_EVENT: usize = 4 << 20;
const MAX_REQUESTS_PER_EVENT: usize = 64;

const HEADER_SIZE: usize = 16;
const ID_SIZE: usize = virtio_blk::VIRTIO_BLK_ID_BYTES as usize;

/// The device.
#[derive(Debug)]
pub struct Block {
    disk: Disk,
    id: [u8; ID_SIZE],
    config: [u8; 60],
    /// Whether a write waits in the queue because the host's disk is full, and the event loop does not know yet.
    disk_full: bool,
}

/// Why a request was not done, as far as the driver's status shows it.
enum Refusal {
    IoError,
    Unsupported,
    /// The host's disk, or the monitor's quota of it, is full. The driver gets to know nothing: the request is
    /// tried again. An error would have the guest's file system give up for good.
    DiskFull,
}

impl From<std::io::Error> for Refusal {
    fn from(error: std::io::Error) -> Self {
        if matches!(error.kind(), ErrorKind::StorageFull | ErrorKind::QuotaExceeded) {
            return Refusal::DiskFull;
        }
        // A driver can make any read or write fail by asking for missing sectors. The status is its answer; a
        // log line for each would let it fill the host's log.
        Refusal::IoError
    }
}

impl Block {
    /// Serves `disk`. The first twenty bytes of `id` are shown to the guest as its serial number.
    pub fn new(disk: Disk, id: &str) -> Block {
        let mut id_bytes = [0; ID_SIZE];
        let shown = id.len().min(ID_SIZE);
        id_bytes[..shown].copy_from_slice(&id.as_bytes()[..shown]);
        Block::with_id(disk, id_bytes)
    }

    /// Serves `disk`, with the serial number `id`.
    pub fn with_id(disk: Disk, id: [u8; ID_SIZE]) -> Block {
        let mut config = [0; 60];
        config[0..8].copy_from_slice(&(disk.size() / SECTOR).to_le_bytes());
        config[8..12].copy_from_slice(&MAX_SEGMENT_SIZE.to_le_bytes());
        config[12..16].copy_from_slice(&MAX_SEGMENTS.to_le_bytes());
        config[20..24].copy_from_slice(&(SECTOR as u32).to_le_bytes());
        // A guest that knows our block size writes whole blocks, and nothing has to be copied first.
        config[24] = (BLOCK / SECTOR).trailing_zeros() as u8;
        Block { disk, id, config, disk_full: false }
    }

    /// The features of a disk that can be written to, or not.
    pub fn features_of(writable: bool) -> u64 {
        u64::from(!writable) << virtio_blk::VIRTIO_BLK_F_RO
            | 1 << virtio_blk::VIRTIO_BLK_F_SIZE_MAX
            | 1 << virtio_blk::VIRTIO_BLK_F_SEG_MAX
            | 1 << virtio_blk::VIRTIO_BLK_F_BLK_SIZE
            | 1 << virtio_blk::VIRTIO_BLK_F_TOPOLOGY
            | 1 << virtio_blk::VIRTIO_BLK_F_FLUSH
    }

    /// A disk has one queue.
    pub const QUEUE_SIZES: &'static [u16] = &[QUEUE_SIZE];

    /// Serves one request. Returns how many bytes were written into it, and how many it was about; nothing if the
    /// request is to be put back, to be served once more as if it never was.
    fn serve(&mut self, chain: &mut DescriptorChain<'_>) -> Result<Option<(usize, usize)>, Malformed> {
        let mut header = [0; HEADER_SIZE];
        let head = chain.readable.split_to(HEADER_SIZE).ok_or(Malformed("a request without header"))?;
        let fits = head.copy_to(&mut header);
        // The status is the last writable byte; the bytes before it are data.
        let data_len = chain.writable.len().checked_sub(1).ok_or(Malformed("a request without status"))?;
        let writable = chain.writable.split_to(data_len).ok_or(Malformed("a request without status"))?;
        let readable = std::mem::take(&mut chain.readable);
        let moved = readable.len() + data_len;

        let (status, written) = match self.transfer(&header, readable, writable) {
            Ok(written) => (virtio_blk::VIRTIO_BLK_S_OK, written),
            Err(Refusal::IoError) => (virtio_blk::VIRTIO_BLK_S_IOERR, 0),
            Err(Refusal::DiskFull) => return Ok(None),
            Err(Refusal::Unsupported) => (virtio_blk::VIRTIO_BLK_S_UNSUPP, 0),
        };
        if !fits || !chain.writable.copy_from(&[status as u8]) {
            return Err(Malformed("a request without status"));
        }
        // The length reported is what was written without a gap: the status counts only if nothing
        // before it is missing.
        Ok(Some((if written == data_len { written + 1 } else { written }, moved)))
    }

    /// Does what the header asks for and returns how many bytes were written for the guest.
    fn transfer(
        &mut self,
        header: &[u8; HEADER_SIZE],
        readable: Buffers<'_>,
        writable: Buffers<'_>,
    ) -> Result<usize, Refusal> {
        let (kind, sector) = header.split_at(8);
        let kind = u32::from_le_bytes([kind[0], kind[1], kind[2], kind[3]]);
        let sector = sector.iter().rev().fold(0, |value, byte| value << 8 | u64::from(*byte));
        let data = if kind == virtio_blk::VIRTIO_BLK_T_OUT { &readable } else { &writable };
        let len = data.len();
        let is_transfer = kind == virtio_blk::VIRTIO_BLK_T_IN || kind == virtio_blk::VIRTIO_BLK_T_OUT;
        if is_transfer && (len > MAX_REQUEST || !(len as u64).is_multiple_of(SECTOR)) {
            return Err(Refusal::IoError);
        }
        let offset = sector.checked_mul(SECTOR);
        match kind {
            virtio_blk::VIRTIO_BLK_T_IN => {
                self.disk.read(offset.ok_or(Refusal::IoError)?, writable)?;
                Ok(len)
            }
            virtio_blk::VIRTIO_BLK_T_OUT => {
                self.disk.write(offset.ok_or(Refusal::IoError)?, readable)?;
                Ok(0)
            }
            // Nothing to wait for: written data is in the page cache, which outlives this process but not the
            // host, and a sandbox's layer is not used after the host went down. Saving a snapshot syncs the
            // layer itself.
            virtio_blk::VIRTIO_BLK_T_FLUSH => Ok(0),
            virtio_blk::VIRTIO_BLK_T_GET_ID => {
                let shown = len.min(ID_SIZE);
                if !writable.copy_from(&self.id[..shown]) {
                    return Err(Refusal::IoError);
                }
                Ok(shown)
            }
            _ => Err(Refusal::Unsupported),
        }
    }
}

impl VirtioDevice for Block {
    fn device_type(&self) -> u32 {
        VIRTIO_ID_BLOCK
    }

    fn features(&self) -> u64 {
        Block::features_of(!self.disk.is_read_only())
    }

    fn queue_sizes(&self) -> &'static [u16] {
        Self::QUEUE_SIZES
    }

    fn take_disk_full(&mut self) -> bool {
        std::mem::take(&mut self.disk_full)
    }

    fn disk(&mut self) -> Option<&mut Disk> {
        Some(&mut self.disk)
    }

    fn freeze(&mut self) -> (DevicePart, Option<Disk>) {
        self.disk.freeze();
        let state = BlockState {
            id: self.id,
            size: self.disk.size(),
            writable: !self.disk.is_read_only(),
            files: self.disk.files().len() as u8,
            runs: self.disk.runs(),
        };
        (DevicePart::Block(state), Some(std::mem::take(&mut self.disk)))
    }

    fn read_config(&self, offset: u64, data: &mut [u8]) {
        read_config_bytes(&self.config, offset, data);
    }

    fn queue_event(
        &mut self,
        index: usize,
        queues: &mut [VirtQueue],
        memory: &GuestMemory,
    ) -> Result<(), Malformed> {
        let queue = &mut queues[index];
        let mut moved = 0;
        for _ in 0..MAX_REQUESTS_PER_EVENT {
            if moved >= MAX_BYTES_PER_EVENT {
                break;
            }
            let Some(mut chain) = queue.pop(memory)? else { return Ok(()) };
            let Some((written, bytes)) = self.serve(&mut chain)? else {
                queue.put_back(chain);
                self.disk_full = true;
                return Ok(());
            };
            moved += bytes;
            queue.finish(memory, chain, written)?;
        }
        queue.call_again();
        Ok(())
    }
}

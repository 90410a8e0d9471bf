//! Guest memory as files: a chain of layers.
//!
//! Memory is counted in pages of 4 KiB, all ranges one after the other; guest addresses do not occur here.
//! The oldest layer of a chain is a plain file with all of memory and holes where it is zero. Every other one
//! is [packed](packed): the pages that differ from the layers below, and an index of them.
//!
//! - [`packed`]: one packed layer as a file, written and read;
//! - [`chain`]: several layers as one memory: which page is in which file;
//! - [`restore`]: a chain mapped as guest memory;
//! - [`save`]: guest memory written as the next layer of a chain, or as the first one of another.
//!
//! Every byte of a layer is untrusted. Before a guest is made the files are checked for consistency, not for
//! identity: digests are the store's.

mod chain;
mod packed;
mod restore;
mod save;
#[cfg(test)]
mod tests;

pub(crate) use chain::LayerChain;
pub(crate) use packed::check_any_bytes;
pub(crate) use restore::map;
pub(crate) use save::{Progress, check_pagemap, save};

use crate::Error;
use crate::layout::PAGE;

const PAGE_BYTES: usize = PAGE as usize;
const ZERO_PAGE: [u8; PAGE_BYTES] = [0; PAGE_BYTES];
/// How many pages are looked at, or moved, in one go: a mebibyte.
const CHUNK: u32 = 256;
/// How many bytes are written in one go. Some kernels give up the CPU only when all of them are in the file's
/// cache, and that may need memory first: more of them would hold up guests for milliseconds.
const PIECE: usize = 64 << 10;

/// The error for a damaged layer, with the remedy. The oldest layer is number 0.
fn damaged(layer: usize, what: &str) -> Error {
    Error::Config(format!("memory layer {layer} cannot be used: {what}; make the snapshot again"))
}

/// Writes the pages of `bytes` that are not zero to `file`, the first at `offset` and those in a row together;
/// returns how many bytes that were.
fn write_data(file: &std::fs::File, offset: u64, bytes: &[u8]) -> std::io::Result<u64> {
    use std::os::unix::fs::FileExt;
    let is_data: Vec<bool> = bytes.chunks(PAGE_BYTES).map(|page| page != ZERO_PAGE).collect();
    let (mut start, mut written) = (0, 0);
    let pieces = is_data.chunks(PIECE / PAGE_BYTES);
    for run in pieces.flat_map(|piece| piece.chunk_by(|one, next| one == next)) {
        let end = (start + run.len() * PAGE_BYTES).min(bytes.len());
        if run[0] {
            file.write_all_at(&bytes[start..end], offset + start as u64)?;
            written += (end - start) as u64;
        }
        start = end;
    }
    Ok(written)
}

//! Telling compressed data by its first bytes, and reading it.

use std::io::{self, BufRead, BufReader, Read};

use flate2::bufread::MultiGzDecoder;
use lzma_rust2::XzReader;
use ruzstd::decoding::StreamingDecoder;

use crate::error::{Error, Result};

/// The most memory an xz stream may ask for. `xz -9` needs 65 MiB.
pub(crate) const XZ_LIMIT_KIB: u32 = 256 << 10;

const GZIP: &[u8] = &[0x1f, 0x8b];
const XZ: &[u8] = &[0xfd, b'7', b'z', b'X', b'Z', 0];
const ZSTD: &[u8] = &[0x28, 0xb5, 0x2f, 0xfd];
const BZIP2: &[u8] = b"BZh";

/// Reads `inner` through the decoder its first bytes ask for; as it is, when they ask for none.
pub(crate) fn reader<'a>(inner: impl Read + 'a) -> Result<Box<dyn Read + 'a>> {
    let mut inner = BufReader::with_capacity(128 << 10, inner);
    let start = inner.fill_buf().map_err(|error| Error::Invalid(format!("cannot read it: {error}")))?;
    if start.starts_with(GZIP) {
        Ok(Box::new(MultiGzDecoder::new(inner)))
    } else if start.starts_with(XZ) {
        Ok(Box::new(XzReader::new_mem_limit(inner, true, XZ_LIMIT_KIB)))
    } else if start.starts_with(ZSTD) {
        Ok(Box::new(ZstdFrames { state: Zstd::Between(inner) }))
    } else if start.starts_with(BZIP2) {
        Err(Error::Invalid("it is compressed with bzip2; use gzip, xz, zstd or no compression".into()))
    } else {
        Ok(Box::new(inner))
    }
}

/// Everything `inner` holds, decompressed, up to `limit` bytes.
pub(crate) fn read_all(inner: impl Read, limit: u64) -> io::Result<Vec<u8>> {
    let mut bytes = Vec::new();
    inner.take(limit + 1).read_to_end(&mut bytes)?;
    if bytes.len() as u64 > limit {
        return Err(io::Error::new(io::ErrorKind::InvalidData, format!("more than {limit} bytes")));
    }
    Ok(bytes)
}

/// A zstd file is a row of frames; the decoder reads one.
struct ZstdFrames<R: Read> {
    state: Zstd<R>,
}

enum Zstd<R: Read> {
    Between(R),
    Inside(Box<StreamingDecoder<R, ruzstd::decoding::FrameDecoder>>),
    Broken,
}

impl<R: BufRead> Read for ZstdFrames<R> {
    fn read(&mut self, buffer: &mut [u8]) -> io::Result<usize> {
        if buffer.is_empty() {
            return Ok(0);
        }
        loop {
            match std::mem::replace(&mut self.state, Zstd::Broken) {
                Zstd::Between(mut inner) => {
                    if inner.fill_buf()?.is_empty() {
                        self.state = Zstd::Between(inner);
                        return Ok(0);
                    }
                    let decoder = StreamingDecoder::new(inner).map_err(io::Error::other)?;
                    self.state = Zstd::Inside(Box::new(decoder));
                }
                Zstd::Inside(mut decoder) => match decoder.read(buffer)? {
                    0 => self.state = Zstd::Between(decoder.into_inner()),
                    count => {
                        self.state = Zstd::Inside(decoder);
                        return Ok(count);
                    }
                },
                Zstd::Broken => return Err(io::ErrorKind::InvalidData.into()),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Write;
    use std::process::{Command, Stdio};

    fn compressed_by(program: &[&str], data: &[u8]) -> Option<Vec<u8>> {
        crate::tools::find(program[0])?;
        let mut child = Command::new(program[0])
            .args(&program[1..])
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        let mut stdin = child.stdin.take().unwrap();
        let data = data.to_vec();
        let writer = std::thread::spawn(move || stdin.write_all(&data).unwrap());
        let output = child.wait_with_output().unwrap().stdout;
        writer.join().unwrap();
        Some(output)
    }

    #[test]
    fn what_was_compressed_comes_out_again_also_when_it_comes_in_pieces() {
        let data: Vec<u8> = (0..400_000u32).flat_map(|n| (n / 7).to_le_bytes()).collect();
        for program in [&["gzip", "-c"][..], &["xz", "-c"], &["zstd", "-c"], &["cat"]] {
            let Some(one) = compressed_by(program, &data) else {
                // Not through `eprintln!`, which the test harness swallows.
                let line = format!("NOT RUN: reading what {0} compresses: there is no {0} here", program[0]);
                writeln!(io::stderr(), "{line}").unwrap();
                continue;
            };
            let twice = [one.clone(), one].concat();
            let out = read_all(reader(&twice[..]).unwrap(), 10 << 20).unwrap();
            assert!(out == [&data[..], &data[..]].concat(), "{program:?}");
        }
    }

    #[test]
    fn output_without_end_is_cut_off() {
        assert!(read_all(io::repeat(0), 1000).is_err());
    }
}

//! Request bodies: how long they are and how they are cut.

use std::io;

use super::head::Head;

/// The longest line with a chunk's size, extensions included, and the longest trailer line.
const MAX_LINE: usize = 4 << 10;
/// The most trailer lines.
const MAX_TRAILERS: usize = 100;

/// Where in its body a request is.
#[derive(Debug, PartialEq)]
pub(super) enum Framing {
    /// There is none.
    Empty,
    /// This many bytes are left.
    Bytes(u64),
    /// Before the line with a chunk's size.
    ChunkSize,
    /// This many bytes of a chunk are left.
    Chunk(u64),
    /// All chunks and the trailers are read.
    Done,
}

impl Framing {
    /// How the body after `head` is framed.
    pub(super) fn of(head: &Head) -> Result<Framing, (u16, &'static str)> {
        let encodings: Vec<&str> = head.all("transfer-encoding").collect();
        let lengths: Vec<&str> = head.all("content-length").collect();
        match (&encodings[..], &lengths[..]) {
            ([], []) => Ok(Framing::Empty),
            ([encoding], []) if encoding.eq_ignore_ascii_case("chunked") => Ok(Framing::ChunkSize),
            (_, []) => Err((501, "the only transfer encoding understood is chunked")),
            // Two different opinions on where a request ends are how requests get smuggled.
            ([], [first, rest @ ..]) if rest.iter().all(|other| other == first) => {
                let digits = first.bytes().all(|b| b.is_ascii_digit());
                match first.parse() {
                    Ok(0) if digits => Ok(Framing::Empty),
                    Ok(length) if digits => Ok(Framing::Bytes(length)),
                    _ => Err((400, "the content length is not a number")),
                }
            }
            _ => Err((400, "the request has two lengths")),
        }
    }

    /// Whether nothing of the body is left.
    pub(super) fn is_done(&self) -> bool {
        matches!(self, Framing::Empty | Framing::Bytes(0) | Framing::Done)
    }

    /// Reads body bytes into `buf`, taking raw bytes from `input`.
    pub(super) fn read(
        &mut self,
        input: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>,
        buf: &mut [u8],
    ) -> io::Result<usize> {
        if buf.is_empty() {
            return Ok(0);
        }
        loop {
            match self {
                Framing::Empty | Framing::Bytes(0) | Framing::Done => return Ok(0),
                Framing::Bytes(left) | Framing::Chunk(left) if *left > 0 => {
                    let most = usize::try_from(*left).unwrap_or(usize::MAX).min(buf.len());
                    let n = input(&mut buf[..most])?;
                    if n == 0 {
                        return Err(io::ErrorKind::UnexpectedEof.into());
                    }
                    *left = left.saturating_sub(n as u64);
                    if *self == Framing::Chunk(0) {
                        // With the chunk, not with the next one: a reader that waits for more input must not take
                        // the end of a chunk for it.
                        if !read_line(input)?.is_empty() {
                            return Err(malformed());
                        }
                        *self = Framing::ChunkSize;
                    }
                    return Ok(n);
                }
                Framing::Bytes(_) | Framing::Chunk(_) => *self = Framing::ChunkSize,
                Framing::ChunkSize => {
                    *self = match chunk_size(&read_line(input)?).ok_or_else(malformed)? {
                        0 => {
                            read_trailers(input)?;
                            Framing::Done
                        }
                        size => Framing::Chunk(size),
                    };
                }
            }
        }
    }
}

fn malformed() -> io::Error {
    io::Error::new(io::ErrorKind::InvalidData, "the chunked body is malformed")
}

fn chunk_size(line: &[u8]) -> Option<u64> {
    let digits = line.split(|b| *b == b';').next()?.trim_ascii();
    // `from_str_radix` would take a sign.
    if digits.is_empty() || !digits.iter().all(u8::is_ascii_hexdigit) {
        return None;
    }
    u64::from_str_radix(std::str::from_utf8(digits).ok()?, 16).ok()
}

fn read_trailers(input: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<()> {
    for _ in 0..MAX_TRAILERS {
        if read_line(input)?.is_empty() {
            return Ok(());
        }
    }
    Err(malformed())
}

/// One line without its end. Byte by byte: these lines are short and the bytes mostly in memory.
fn read_line(input: &mut dyn FnMut(&mut [u8]) -> io::Result<usize>) -> io::Result<Vec<u8>> {
    let mut line = Vec::new();
    let mut byte = [0];
    while line.len() <= MAX_LINE {
        if input(&mut byte)? == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        if byte[0] == b'\n' {
            if line.last() == Some(&b'\r') {
                line.pop();
            }
            return Ok(line);
        }
        line.push(byte[0]);
    }
    Err(malformed())
}

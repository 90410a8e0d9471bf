//! Guest memory as one request points to it: a list of pieces, treated as one run of bytes.
//!
//! The guest can change these bytes at any moment, so they are never seen as Rust slices: they are
//! copied out once and then looked at, or handed to the kernel by address.

use std::fs::File;
use std::io;
use std::os::fd::{AsRawFd, BorrowedFd, RawFd};

use vm_memory::VolatileSlice;

/// The most pieces one request may have. The kernel takes 1024 addresses per call, and no driver
/// needs more than a few more than the queue is long.
pub const MAX_PIECES: usize = 512;

/// A run of guest memory, in pieces.
#[derive(Debug, Default, Clone)]
pub struct Buffers<'m> {
    pieces: Vec<VolatileSlice<'m>>,
    len: usize,
}

impl<'m> Buffers<'m> {
    /// Adds a piece at the end.
    pub fn push(&mut self, piece: VolatileSlice<'m>) {
        self.len += piece.len();
        self.pieces.push(piece);
    }

    /// Bytes in all.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are no bytes.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    /// Takes the first `count` bytes off; `None`, and no change, if there are fewer.
    pub fn split_to(&mut self, count: usize) -> Option<Buffers<'m>> {
        if count > self.len {
            return None;
        }
        let mut front = Buffers::default();
        let mut whole = 0;
        for piece in &self.pieces {
            if front.len + piece.len() > count {
                break;
            }
            front.push(*piece);
            whole += 1;
        }
        self.pieces.drain(..whole);
        let missing = count - front.len;
        if missing > 0 {
            let (head, tail) = self.pieces[0].split_at(missing).ok()?;
            front.push(head);
            self.pieces[0] = tail;
        }
        self.len -= count;
        Some(front)
    }

    /// Fills `out` from the front without taking anything off; `false`, and nothing done, if there
    /// are fewer bytes.
    #[must_use]
    pub fn copy_to(&self, out: &mut [u8]) -> bool {
        if out.len() > self.len {
            return false;
        }
        let mut done = 0;
        for piece in &self.pieces {
            done += piece.copy_to(&mut out[done..]);
        }
        true
    }

    /// Writes `data` at the front without taking anything off; `false`, and nothing done, if it
    /// does not fit.
    #[must_use]
    pub fn copy_from(&self, data: &[u8]) -> bool {
        if data.len() > self.len {
            return false;
        }
        let mut rest = data;
        for piece in &self.pieces {
            let count = piece.len().min(rest.len());
            piece.copy_from(&rest[..count]);
            rest = &rest[count..];
        }
        true
    }

    /// Fills all of it from `file` at `offset`; a file that ends before is an error.
    pub fn fill_from(mut self, file: &File, offset: u64) -> io::Result<()> {
        let mut offset = file_offset(offset)?;
        while !self.is_empty() {
            let done = self.with_iovecs(None, |iovecs, count| {
                // SAFETY: every iovec points to guest memory that `self.pieces` keeps mapped and
                // whose bounds were checked when it was added; no Rust reference to it exists.
                unsafe { libc::preadv(file.as_raw_fd(), iovecs, count, offset) }
            });
            offset = self.advance(done, offset, io::ErrorKind::UnexpectedEof)?;
        }
        Ok(())
    }

    /// Writes all of it to `file` at `offset`.
    pub fn store_to(mut self, file: &File, offset: u64) -> io::Result<()> {
        let mut offset = file_offset(offset)?;
        while !self.is_empty() {
            let done = self.with_iovecs(None, |iovecs, count| {
                // SAFETY: as in `fill_from`; the kernel only reads the memory.
                unsafe { libc::pwritev(file.as_raw_fd(), iovecs, count, offset) }
            });
            offset = self.advance(done, offset, io::ErrorKind::WriteZero)?;
        }
        Ok(())
    }

    /// Reads once from `fd` (a packet, or what a stream has).
    pub fn read_from(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        retry(|| {
            self.with_iovecs(None, |iovecs, count| {
                // SAFETY: as in `fill_from`.
                unsafe { libc::readv(fd.as_raw_fd(), iovecs, count) }
            })
        })
    }

    /// Writes `prefix` and all of it to `fd` in one call: one packet.
    pub fn write_packet(&self, prefix: &[u8], fd: BorrowedFd<'_>) -> io::Result<usize> {
        retry(|| {
            self.with_iovecs(Some(prefix), |iovecs, count| {
                // SAFETY: as in `fill_from`; the first iovec is `prefix`, alive and only read.
                unsafe { libc::writev(fd.as_raw_fd(), iovecs, count) }
            })
        })
    }

    /// Receives from the socket `fd` without waiting.
    pub fn receive_from(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.message(fd.as_raw_fd(), |fd, message| {
            // SAFETY: `message` is a valid header whose iovecs point to guest memory that stays
            // mapped (see `fill_from`).
            unsafe { libc::recvmsg(fd, message, libc::MSG_DONTWAIT) }
        })
    }

    /// Sends to the socket `fd` what it takes without waiting.
    pub fn send_to(&self, fd: BorrowedFd<'_>) -> io::Result<usize> {
        self.message(fd.as_raw_fd(), |fd, message| {
            // SAFETY: as in `receive_from`; the kernel only reads the memory.
            unsafe { libc::sendmsg(fd, message, libc::MSG_DONTWAIT | libc::MSG_NOSIGNAL) }
        })
    }

    fn message(&self, fd: RawFd, call: impl Fn(RawFd, *mut libc::msghdr) -> isize) -> io::Result<usize> {
        retry(|| {
            self.with_iovecs(None, |iovecs, count| {
                // SAFETY: all-zero is a valid `msghdr`: no name, no ancillary data.
                let mut message: libc::msghdr = unsafe { std::mem::zeroed() };
                message.msg_iov = iovecs.cast_mut();
                message.msg_iovlen = count as usize;
                call(fd, &mut message)
            })
        })
    }

    /// Takes off what a call transferred and returns the next file offset.
    fn advance(&mut self, done: isize, offset: i64, end: io::ErrorKind) -> io::Result<i64> {
        let done = match check(done) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => return Ok(offset),
            Ok(0) => return Err(end.into()),
            other => other?,
        };
        self.split_to(done).ok_or(io::ErrorKind::InvalidData)?;
        offset.checked_add(done as i64).ok_or_else(|| io::ErrorKind::InvalidInput.into())
    }

    fn with_iovecs(
        &self,
        prefix: Option<&[u8]>,
        call: impl FnOnce(*const libc::iovec, libc::c_int) -> isize,
    ) -> isize {
        // The guards keep the mappings alive for as long as the kernel may use the addresses.
        let guards: Vec<_> = self.pieces.iter().map(VolatileSlice::ptr_guard_mut).collect();
        let prefix = prefix
            .map(|bytes| libc::iovec { iov_base: bytes.as_ptr().cast_mut().cast(), iov_len: bytes.len() });
        let pieces =
            guards.iter().map(|guard| libc::iovec { iov_base: guard.as_ptr().cast(), iov_len: guard.len() });
        let iovecs: Vec<_> = prefix.into_iter().chain(pieces).collect();
        call(iovecs.as_ptr(), iovecs.len() as libc::c_int)
    }
}

fn file_offset(offset: u64) -> io::Result<i64> {
    i64::try_from(offset).map_err(|_| io::ErrorKind::InvalidInput.into())
}

fn check(result: isize) -> io::Result<usize> {
    usize::try_from(result).map_err(|_| io::Error::last_os_error())
}

fn retry(mut call: impl FnMut() -> isize) -> io::Result<usize> {
    loop {
        match check(call()) {
            Err(error) if error.kind() == io::ErrorKind::Interrupted => {}
            other => return other,
        }
    }
}

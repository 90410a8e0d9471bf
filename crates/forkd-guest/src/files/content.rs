//! Whole files over HTTP: `GET` and `POST /files`.

use std::{
    fs::File,
    io::{self, Read, Write},
    path::Path,
};

use flate2::{Compression, write::GzEncoder};
use forkd_protocol::connect::Error;
use rustix::fs::{Mode, OFlags};
use serde_json::json;

use super::upload;
use crate::{
    http::{Exchange, Head},
    users::{self, User},
};

/// Bytes moved at once.
pub(super) const PIECE: usize = 64 << 10;

/// An HTTP error: status and message.
pub(super) type HttpError = (u16, String);

/// Answers `/files`. `user` looks up the user that the caller names.
pub(crate) fn call(exchange: &mut Exchange, user: &dyn Fn(&Head) -> Result<User, Error>) -> io::Result<()> {
    let user = match user(exchange.head()) {
        Ok(user) => user,
        Err(error) => return refuse(exchange, (error.code.http_status(), error.message)),
    };
    match exchange.head().method.as_str() {
        "GET" | "HEAD" => download(exchange, &user),
        "POST" => upload::call(exchange, &user),
        method => {
            let message = format!("/files takes GET, HEAD and POST, not {method}");
            refuse_with(exchange, &[("allow", "GET, HEAD, POST")], (405, message))
        }
    }
}

pub(crate) fn refuse(exchange: &mut Exchange, error: HttpError) -> io::Result<()> {
    refuse_with(exchange, &[], error)
}

fn refuse_with(
    exchange: &mut Exchange,
    headers: &[(&str, &str)],
    (status, message): HttpError,
) -> io::Result<()> {
    let body = json!({ "code": status, "message": message }).to_string();
    exchange.respond(status, &[&[("content-type", "application/json")], headers].concat(), body.as_bytes())
}

/// The HTTP error for a failed file operation.
pub(super) fn refusal(path: &Path, error: &io::Error) -> HttpError {
    let status = match error.raw_os_error() {
        Some(libc::ENOENT) => 404,
        Some(libc::EBUSY) => 409,
        Some(libc::EACCES | libc::EPERM | libc::EROFS) => 403,
        Some(libc::ENOSPC | libc::EDQUOT) => 507,
        Some(libc::ETXTBSY) => 409,
        Some(
            libc::EISDIR | libc::ENOTDIR | libc::ELOOP | libc::ENAMETOOLONG | libc::EINVAL | libc::ENXIO,
        ) => 400,
        _ if error.kind() == io::ErrorKind::InvalidInput => 400,
        _ => 500,
    };
    (status, format!("{}: {error}", path.display()))
}

/// Opens a regular file; nothing else is a file here, and a pipe or a device could block for ever.
pub(super) fn open_regular(path: &Path, flags: OFlags) -> io::Result<File> {
    let flags = flags | OFlags::CLOEXEC | OFlags::NOCTTY | OFlags::NONBLOCK;
    let file = File::from(rustix::fs::open(path, flags, Mode::from_raw_mode(0o666))?);
    let kind = file.metadata()?.file_type();
    if kind.is_dir() {
        return Err(io::Error::from_raw_os_error(libc::EISDIR));
    }
    if !kind.is_file() {
        return Err(io::Error::new(io::ErrorKind::InvalidInput, "not a regular file"));
    }
    Ok(file)
}

fn download(exchange: &mut Exchange, user: &User) -> io::Result<()> {
    let path = match user.resolve(exchange.head().query("path").unwrap_or_default()) {
        Ok(path) => path,
        Err(error) => return refuse(exchange, (400, error.message)),
    };
    let opened = users::act_as(user).and_then(|_acting| {
        let file = open_regular(&path, OFlags::RDONLY)?;
        Ok((file.metadata()?.len(), file))
    });
    let (len, mut file) = match opened {
        Ok(opened) => opened,
        Err(error) => return refuse(exchange, refusal(&path, &error)),
    };
    let mut buf = vec![0; PIECE];
    let headers = [("content-type", "application/octet-stream")];
    // Clients that want it ask for gzip alone. Those that list all they can read get the length instead.
    if len > 0 && exchange.head().header("accept-encoding") == Some("gzip") {
        exchange.begin(200, &[headers[0], ("content-encoding", "gzip")], None)?;
        return send_gzip(&mut file, len, exchange, &mut buf);
    }
    if len > 0 {
        exchange.begin(200, &headers, Some(len))?;
        // A file that grows meanwhile is cut at the announced length. One that shrinks breaks the connection,
        // which is the only way left to report it.
        copy(&mut file.take(len), exchange, &mut buf)?;
        return exchange.finish();
    }
    // Files of /proc and the like have length 0 and are not empty.
    let first = match file.read(&mut buf) {
        Ok(first) => first,
        Err(error) => return refuse(exchange, refusal(&path, &error)),
    };
    if first == 0 {
        return exchange.respond(200, &headers, b"");
    }
    exchange.begin(200, &headers, None)?;
    exchange.send(&buf[..first])?;
    copy(&mut file, exchange, &mut buf)?;
    exchange.finish()
}

/// Sends `len` bytes of the file compressed, to the end of the response.
fn send_gzip(file: &mut File, len: u64, exchange: &mut Exchange, buf: &mut [u8]) -> io::Result<()> {
    struct Body<'x, 'e>(&'x mut Exchange<'e>);
    impl Write for Body<'_, '_> {
        fn write(&mut self, piece: &[u8]) -> io::Result<usize> {
            self.0.send(piece)?;
            Ok(piece.len())
        }

        fn flush(&mut self) -> io::Result<()> {
            Ok(())
        }
    }
    let mut encoder = GzEncoder::new(Body(exchange), Compression::fast());
    let mut left = len;
    while left > 0 {
        let most = usize::try_from(left).unwrap_or(usize::MAX).min(buf.len());
        match file.read(&mut buf[..most])? {
            // As without compression, a file that shrinks breaks the connection.
            0 => return Err(io::ErrorKind::UnexpectedEof.into()),
            n => {
                encoder.write_all(&buf[..n])?;
                left -= n as u64;
            }
        }
    }
    encoder.finish()?.0.finish()
}

fn copy(file: &mut impl Read, exchange: &mut Exchange, buf: &mut [u8]) -> io::Result<()> {
    loop {
        match file.read(buf)? {
            0 => return Ok(()),
            n => exchange.send(&buf[..n])?,
        }
    }
}

#[cfg(test)]
mod tests;

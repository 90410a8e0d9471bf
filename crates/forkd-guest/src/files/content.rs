//! Whole files over HTTP: `GET` and `POST /files`.
//!
//! A write goes straight into the file, which is truncated first, and not into a temporary file that takes
//! its place: the file keeps its owner, its mode, its links and the processes that have it open, as with a
//! shell's `>`. The price: a write that breaks off leaves the part that came. With `whole=true` a write goes
//! into a [`Draft`] instead, which takes the file's place when all of it has come.

use std::{
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::Path,
};

use super::draft::Draft;

use forkd_protocol::{agent::WrittenFile, connect::Error};
use rustix::fs::{Mode, OFlags};
use serde_json::json;

use crate::{
    http::{Exchange, Head},
    users::{self, User},
};

/// Bytes moved at once.
const PIECE: usize = 64 << 10;

/// An HTTP error: status and message.
type HttpError = (u16, String);

/// Answers `/files`. `user` looks up the user that the caller names.
pub(crate) fn call(exchange: &mut Exchange, user: &dyn Fn(&Head) -> Result<User, Error>) -> io::Result<()> {
    let found = user(exchange.head());
    let user = match found {
        Ok(user) => user,
        Err(error) => return refuse(exchange, (error.code.http_status(), error.message)),
    };
    match exchange.head().method.as_str() {
        "GET" | "HEAD" => download(exchange, &user),
        "POST" => upload(exchange, &user),
        _ => exchange.respond(405, &[("allow", "GET, HEAD, POST")], b""),
    }
}

pub(crate) fn refuse(exchange: &mut Exchange, (status, message): HttpError) -> io::Result<()> {
    let body = json!({ "code": status, "message": message }).to_string();
    exchange.respond(status, &[("content-type", "application/json")], body.as_bytes())
}

/// The HTTP error for a failed file operation.
fn refusal(path: &Path, error: &io::Error) -> HttpError {
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

fn copy(file: &mut impl Read, exchange: &mut Exchange, buf: &mut [u8]) -> io::Result<()> {
    loop {
        match file.read(buf)? {
            0 => return Ok(()),
            n => exchange.send(&buf[..n])?,
        }
    }
}

fn upload(exchange: &mut Exchange, user: &User) -> io::Result<()> {
    let head = exchange.head();
    // Forms with several files are another body format of the same call; they belong here.
    let refused = match (head.content_type(), head.header("content-encoding"), head.query("path")) {
        (Some(other), _, _) if other != "application/octet-stream" => {
            Some((415, format!("the body is {other}; send the file itself as application/octet-stream")))
        }
        (_, Some(encoding), _) if encoding != "identity" => Some((415, "send the file uncompressed".into())),
        (_, _, None | Some("")) => Some((400, "the query has no path to write to".into())),
        _ => None,
    };
    if let Some(refused) = refused {
        return refuse(exchange, refused);
    }
    let path = match user.resolve(head.query("path").unwrap_or_default()) {
        Ok(path) => path,
        Err(error) => return refuse(exchange, (400, error.message)),
    };
    let (whole, mode) = match (head.query("whole"), head.query("mode").map(parse_mode)) {
        (_, Some(None)) => {
            return refuse(exchange, (400, "the mode is not an octal number up to 7777".into()));
        }
        (whole, mode) => (whole == Some("true"), mode.flatten()),
    };
    let mut place = match users::act_as(user).and_then(|_acting| UploadTarget::open(&path, whole, mode)) {
        Ok(place) => place,
        Err(error) => return refuse(exchange, refusal(&path, &error)),
    };
    let mut buf = vec![0; PIECE];
    loop {
        let n = match exchange.read(&mut buf) {
            Ok(0) => break,
            Ok(n) => n,
            Err(error) if error.kind() == io::ErrorKind::InvalidData => {
                return refuse(exchange, (400, error.to_string()));
            }
            Err(error) => return Err(error),
        };
        if let Err(error) = place.file().write_all(&buf[..n]) {
            return refuse(exchange, refusal(&path, &error));
        }
    }
    let whole = whole.then_some(matches!(place, UploadTarget::Draft(_)));
    if let Err(error) = place.close(user) {
        return refuse(exchange, refusal(&path, &error));
    }
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let path = path.to_string_lossy().into_owned();
    let written = [WrittenFile { path, name, r#type: "file".into(), whole, ..WrittenFile::default() }];
    let body = serde_json::to_vec(&written).map_err(io::Error::other)?;
    exchange.respond(200, &[("content-type", "application/json")], &body)
}

/// The permission bits a query names.
fn parse_mode(text: &str) -> Option<u32> {
    let digits = !text.is_empty() && text.bytes().all(|byte| byte.is_ascii_digit());
    u32::from_str_radix(text, 8).ok().filter(|mode| digits && *mode <= 0o7777)
}

/// Where an upload goes.
enum UploadTarget {
    InPlace(File),
    Draft(Draft),
}

impl UploadTarget {
    /// Acts with the permissions of the thread's current user.
    fn open(path: &Path, whole: bool, mode: Option<u32>) -> io::Result<UploadTarget> {
        if let Some(parent) = path.parent() {
            fs::create_dir_all(parent)?;
        }
        if whole && let Some(draft) = Draft::begin(path, mode)? {
            return Ok(UploadTarget::Draft(draft));
        }
        let file = open_regular(path, OFlags::WRONLY | OFlags::CREATE)?;
        if let Some(mode) = mode {
            file.set_permissions(Permissions::from_mode(mode))?;
        }
        file.set_len(0)?;
        Ok(UploadTarget::InPlace(file))
    }

    fn file(&mut self) -> &mut File {
        match self {
            UploadTarget::InPlace(file) | UploadTarget::Draft(Draft { file, .. }) => file,
        }
    }

    fn close(self, user: &User) -> io::Result<()> {
        match self {
            UploadTarget::InPlace(_) => Ok(()),
            UploadTarget::Draft(draft) => {
                draft.dress()?;
                let _acting = users::act_as(user)?;
                draft.place()
            }
        }
    }
}

#[cfg(test)]
mod tests;

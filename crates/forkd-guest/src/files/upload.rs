//! `POST /files`: one file as it is, or a form with files.
//!
//! An upload goes into a [`Draft`], which takes the file's place when all of it has come: one that breaks off leaves
//! what was there. With `whole=false` it goes straight into the file, which is truncated first: the file keeps its
//! links and the processes that have it open, as with a shell's `>`, and an upload that breaks off leaves the part
//! that came.

use std::{
    collections::HashSet,
    fs::{self, File, Permissions},
    io::{self, Read, Write},
    os::unix::fs::PermissionsExt,
    path::{Path, PathBuf},
};

use flate2::read::MultiGzDecoder;
use forkd_protocol::agent::WrittenFile;
use rustix::fs::OFlags;

use super::{
    content::{HttpError, PIECE, open_regular, refusal, refuse},
    draft::Draft,
    metadata::{self, Metadata},
    multipart::{self, Form},
};
use crate::{
    http::{Exchange, Head},
    users::{self, User},
};

/// The field of a form that holds a file.
const FILE_FIELD: &str = "file";
/// The most files in one form, and the most bytes that their paths take together.
const MAX_FILES: usize = 10_000;
const MAX_PATHS: usize = 4 << 20;

/// Why an upload failed.
enum UploadError {
    /// The client gets the reason.
    Refused(HttpError),
    /// The connection cannot go on.
    Broken(io::Error),
}

impl From<HttpError> for UploadError {
    fn from(error: HttpError) -> Self {
        UploadError::Refused(error)
    }
}

/// The parts of an upload that its head names.
struct UploadRequest {
    path: Option<PathBuf>,
    /// The boundary of a form.
    boundary: Option<String>,
    gzip: bool,
    whole: Option<bool>,
    mode: Option<u32>,
    metadata: Metadata,
}

/// Answers `POST /files`.
pub(super) fn call(exchange: &mut Exchange, user: &User) -> io::Result<()> {
    let uploaded = UploadRequest::of(exchange.head(), user)
        .map_err(UploadError::from)
        .and_then(|request| request.receive(exchange, user));
    match uploaded {
        Ok(written) => {
            let body = serde_json::to_vec(&written).map_err(io::Error::other)?;
            exchange.respond(200, &[("content-type", "application/json")], &body)
        }
        Err(UploadError::Refused(error)) => refuse(exchange, error),
        Err(UploadError::Broken(error)) => Err(error),
    }
}

impl UploadRequest {
    fn of(head: &Head, user: &User) -> Result<Self, HttpError> {
        let boundary = match (head.content_type(), head.header("content-type")) {
            (Some("application/octet-stream"), _) | (None, _) => None,
            (Some(kind), Some(whole)) if kind.eq_ignore_ascii_case("multipart/form-data") => {
                let boundary =
                    multipart::boundary(whole).ok_or((400, "the form has no valid boundary".into()));
                Some(boundary?.to_owned())
            }
            (Some(other), _) => {
                let message = format!(
                    "the body is {other}; send the file itself as application/octet-stream, or multipart/form-data"
                );
                return Err((415, message));
            }
        };
        let gzip = match head.header("content-encoding") {
            None | Some("" | "identity") => false,
            Some("gzip") => true,
            Some(other) => return Err((415, format!("the body is compressed with {other}; use gzip"))),
        };
        let path = match head.query("path") {
            None | Some("") if boundary.is_some() => None,
            None | Some("") => return Err((400, "the query has no path to write to".into())),
            Some(path) => Some(user.resolve(path).map_err(|error| (400, error.message))?),
        };
        let mode = match head.query("mode").map(parse_mode) {
            Some(None) => return Err((400, "the mode is not an octal number up to 7777".into())),
            mode => mode.flatten(),
        };
        let whole = head.query("whole").map(|whole| whole == "true");
        let metadata = metadata::of_headers(head).map_err(|message| (400, message))?;
        Ok(UploadRequest { path, boundary, gzip, whole, mode, metadata })
    }

    fn receive(&self, body: &mut dyn Read, user: &User) -> Result<Vec<WrittenFile>, UploadError> {
        let mut unpacked;
        let body: &mut dyn Read = match self.gzip {
            true => {
                unpacked = MultiGzDecoder::new(body);
                &mut unpacked
            }
            false => body,
        };
        match (&self.boundary, &self.path) {
            (Some(boundary), _) => self.receive_form(Form::new(body, boundary), user),
            (None, Some(path)) => Ok(vec![self.store(body, path, user)?]),
            (None, None) => Err((400, "the query has no path to write to".into()).into()),
        }
    }

    /// Stores the files of a form, one after the other.
    fn receive_form<R: Read>(&self, mut form: Form<R>, user: &User) -> Result<Vec<WrittenFile>, UploadError> {
        let mut written = Vec::new();
        let mut paths = HashSet::new();
        let mut size = 0;
        while let Some(part) = form.next_part().map_err(|error| self.broken(error))? {
            if part.name != FILE_FIELD {
                continue;
            }
            let path = match (&self.path, part.filename.as_deref()) {
                (Some(path), _) => path.clone(),
                (None, None | Some("")) => {
                    return Err((400, "a file of the form has no name, and the query no path".into()).into());
                }
                (None, Some(name)) => user.resolve(name).map_err(|error| (400, error.message))?,
            };
            size += path.as_os_str().len();
            if written.len() == MAX_FILES || size > MAX_PATHS {
                let message = format!("a form has at most {MAX_FILES} files and {MAX_PATHS} bytes of paths");
                return Err((400, message).into());
            }
            if !paths.insert(path.clone()) {
                return Err((400, format!("{}: the form has two files for it", path.display())).into());
            }
            written.push(self.store(&mut form, &path, user)?);
        }
        if written.is_empty() {
            return Err((400, format!("the form has no part named {FILE_FIELD:?}")).into());
        }
        Ok(written)
    }

    /// Writes one file.
    fn store(&self, content: &mut dyn Read, path: &Path, user: &User) -> Result<WrittenFile, UploadError> {
        let refused = |error: io::Error| UploadError::Refused(refusal(path, &error));
        let mut target = users::act_as(user)
            .and_then(|_acting| UploadTarget::open(path, self.whole != Some(false), self.mode))
            .map_err(refused)?;
        let mut buf = vec![0; PIECE];
        loop {
            match content.read(&mut buf).map_err(|error| self.broken(error))? {
                0 => break,
                n => target.file().write_all(&buf[..n]).map_err(refused)?,
            }
        }
        metadata::replace(target.file(), &self.metadata).map_err(|error| match error.raw_os_error() {
            Some(libc::EOPNOTSUPP) => {
                let message = format!("{}: its file system cannot store metadata", path.display());
                UploadError::Refused((400, message))
            }
            _ => refused(error),
        })?;
        let whole = self.whole.filter(|whole| *whole).map(|_| matches!(target, UploadTarget::Draft(_)));
        target.close(user).map_err(refused)?;
        Ok(WrittenFile {
            name: path.file_name().unwrap_or_default().to_string_lossy().into_owned(),
            path: path.to_string_lossy().into_owned(),
            r#type: "file".into(),
            whole,
            metadata: self.metadata.clone(),
        })
    }

    /// The error of a body that cannot be read on.
    fn broken(&self, error: io::Error) -> UploadError {
        match error.kind() {
            io::ErrorKind::InvalidData => UploadError::Refused((400, error.to_string())),
            // What is no gzip, or ends in the middle of it.
            io::ErrorKind::InvalidInput | io::ErrorKind::UnexpectedEof if self.gzip => {
                UploadError::Refused((400, format!("the body is not valid gzip: {error}")))
            }
            _ => UploadError::Broken(error),
        }
    }
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

//! Files of one sandbox, through the daemon.

use anyhow::Result;
use bytes::Bytes;
use forkd_api::{Code, FileInfo, FileKind, FileList, FileTree, MkdirRequest};
use futures_util::StreamExt;
use http_body_util::{BodyExt, Empty, StreamBody};
use hyper::Method;
use hyper::body::Frame;
use serde_json::json;

use crate::client::types;
use crate::client::{Daemon, Refused, Streamed, Streaming};

/// The files of a sandbox, with the permissions of a user.
#[derive(Debug)]
pub(crate) struct Remote<'d> {
    daemon: &'d Daemon,
    files: String,
    user: Option<String>,
}

impl<'d> Remote<'d> {
    pub(crate) fn new(daemon: &'d Daemon, id: &str, user: Option<String>) -> Self {
        Remote { daemon, files: format!("{}/files", types::sandbox_path(id)), user }
    }

    fn route(&self, verb: &str, path: &str) -> String {
        let mut route = format!("{}{verb}?path={}", self.files, percent(path));
        if let Some(user) = &self.user {
            route.push_str(&format!("&user={}", percent(user)));
        }
        route
    }

    /// The file or folder at `path`; `None` if nothing is there.
    pub(crate) async fn stat(&self, path: &str) -> Result<Option<FileInfo>> {
        match self.daemon.ask(Method::GET, &self.route("/stat", path), None).await {
            Ok(answer) => Ok(Some(types::read(&answer)?)),
            Err(error) if Refused::is(&error, Code::GuestNotFound) => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Whether `path` is a folder or a link to one.
    pub(crate) async fn is_folder(&self, path: &str) -> Result<bool> {
        let found = self.stat(path).await?;
        Ok(found.is_some_and(|info| info.target_type.unwrap_or(info.r#type) == FileKind::Directory))
    }

    /// The entries of a folder, one level deep.
    pub(crate) async fn list(&self, path: &str) -> Result<Vec<FileInfo>> {
        let answer = self.daemon.ask(Method::GET, &self.route("/list", path), None).await?;
        Ok(types::read::<FileList>(&answer)?.entries)
    }

    /// A folder with all below it, with hashes.
    pub(crate) async fn tree(&self, path: &str) -> Result<FileTree> {
        let route = format!("{}&hash=true", self.route("/tree", path));
        types::read(&self.daemon.ask(Method::GET, &route, None).await?)
    }

    /// Creates a folder, unless it exists.
    pub(crate) async fn make_folder(&self, path: &str) -> Result<()> {
        let route = format!("{}/mkdir", self.files);
        let request = json!(MkdirRequest { path: path.into(), user: self.user.clone() });
        match self.daemon.ask(Method::POST, &route, Some(&request)).await {
            Err(error) if Refused::is(&error, Code::GuestConflict) && self.is_folder(path).await? => Ok(()),
            other => other.map(drop),
        }
    }

    /// Opens a file for reading.
    pub(crate) async fn read(&self, path: &str) -> Result<Streaming> {
        let nothing: Streamed = Empty::new().map_err(|never| match never {}).boxed_unsync();
        self.daemon.stream(Method::GET, &self.route("", path), nothing).await
    }

    /// Writes a file from `pieces`, whole or not at all.
    pub(crate) async fn write<S>(&self, path: &str, mode: Option<u32>, pieces: S) -> Result<()>
    where
        S: futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    {
        let mut route = self.route("", path);
        if let Some(mode) = mode {
            route.push_str(&format!("&mode={:o}", mode & 0o777));
        }
        let body = StreamBody::new(pieces.map(|piece| piece.map(Frame::data)).boxed()).boxed_unsync();
        self.daemon.stream(Method::PUT, &route, body).await?.collect().await.map(drop)
    }
}

/// Everything but unreserved characters as `%XX`.
fn percent(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for byte in text.bytes() {
        match byte {
            b'A'..=b'Z' | b'a'..=b'z' | b'0'..=b'9' | b'-' | b'.' | b'_' | b'~' | b'/' => {
                out.push(char::from(byte));
            }
            _ => out.push_str(&format!("%{byte:02X}")),
        }
    }
    out
}

//! Files of a guest: streams of whole files, and their metadata.
//!
//! The client holds only a few pieces of a file in memory. It gives up a guest that neither takes nor sends a
//! piece for a while. The caller watches the other end of the stream.

use std::io;
use std::time::Duration;

use bytes::Bytes;
use forkd_protocol::agent::{
    EntryInfo, EntryList, EntryResponse, ListDirRequest, MoveRequest, PathRequest, WrittenFile,
};
use forkd_protocol::connect::Code;
use futures_util::StreamExt;
use http_body_util::{BodyExt, StreamBody};
use hyper::body::{Frame, Incoming};
use hyper::header::{AUTHORIZATION, CONTENT_LENGTH};
use serde::Serialize;
use serde::de::DeserializeOwned;
use tokio::sync::mpsc;
use tokio_util::task::AbortOnDropHandle;

use super::connection::{Call, Connection, Outbound};
use super::{Agent, Empty, Error, MAX_SHORT_ANSWER, ResponseBudget, Result, basic, files_uri, parse, within};
use crate::util::task;

/// How many pieces of an upload wait for the guest.
const QUEUE: usize = 2;

impl Agent {
    /// The time limit of a guest for one piece of a file, or for a whole folder.
    pub(super) fn file_patience(&self) -> Duration {
        self.patience.saturating_mul(3)
    }

    /// Opens a file to read.
    pub async fn download(&self, path: &str, user: Option<&str>) -> Result<Download> {
        let call = Call::get(&files_uri(path, user));
        let opened = async {
            let mut connection = self.connect().await?;
            let response = connection.send(call).await?;
            let length = response.headers().get(CONTENT_LENGTH);
            let length = length.and_then(|length| length.to_str().ok()?.parse().ok());
            let patience = self.file_patience();
            Ok(Download { length, connection, body: response.into_body(), patience })
        };
        within(self.file_patience(), opened).await
    }

    /// Begins a file, and creates its folders. The guest, if it can, puts the file in place only when the upload
    /// is [finished](Upload::finish). An upload that is dropped before leaves nothing.
    pub async fn upload(&self, path: &str, user: Option<&str>, mode: Option<u32>) -> Result<Upload> {
        let mut uri = files_uri(path, user) + "&whole=true";
        if let Some(mode) = mode {
            uri.push_str(&format!("&mode={mode:o}"));
        }
        let mut connection = within(self.patience, self.connect()).await?;
        let (pieces, queued) = mpsc::channel(QUEUE);
        let call = Call::send_body(&uri, "application/octet-stream", body_of(queued));
        let answer = task::companion(async move { connection.call(call, MAX_SHORT_ANSWER).await });
        Ok(Upload { pieces, answer, patience: self.file_patience() })
    }

    /// The metadata of a file.
    pub async fn stat(&self, path: &str, user: Option<&str>) -> Result<EntryInfo> {
        let request = PathRequest { path: path.to_owned() };
        Ok(self.filesystem::<EntryResponse>("Stat", &request, user).await?.entry)
    }

    /// The entries of a folder, `depth` levels deep.
    pub async fn list_dir(
        &self,
        path: &str,
        depth: u32,
        user: Option<&str>,
    ) -> Result<(Vec<EntryInfo>, ResponseBudget)> {
        let request = ListDirRequest { path: path.to_owned(), depth };
        let call = filesystem_call("ListDir", &request, user)?;
        let (list, room) = self.long_answer::<EntryList>(call, self.file_patience()).await?;
        Ok((list.entries, room))
    }

    /// Creates a folder and its parents.
    pub async fn make_dir(&self, path: &str, user: Option<&str>) -> Result<EntryInfo> {
        let request = PathRequest { path: path.to_owned() };
        Ok(self.filesystem::<EntryResponse>("MakeDir", &request, user).await?.entry)
    }

    /// Renames a file.
    pub async fn move_file(&self, from: &str, to: &str, user: Option<&str>) -> Result<EntryInfo> {
        let request = MoveRequest { source: from.to_owned(), destination: to.to_owned() };
        Ok(self.filesystem::<EntryResponse>("Move", &request, user).await?.entry)
    }

    /// Removes a file, a link or an empty folder.
    pub async fn remove_one(&self, path: &str, user: Option<&str>) -> Result<()> {
        let request = PathRequest { path: path.to_owned() };
        self.filesystem::<Empty>("RemoveOne", &request, user).await.map(drop)
    }

    /// Removes a file or a folder with all its contents. A missing path is no error.
    pub async fn remove_all(&self, path: &str, user: Option<&str>) -> Result<()> {
        let request = PathRequest { path: path.to_owned() };
        self.filesystem::<Empty>("Remove", &request, user).await.map(drop)
    }

    async fn filesystem<T: DeserializeOwned>(
        &self,
        method: &str,
        request: &impl Serialize,
        user: Option<&str>,
    ) -> Result<T> {
        let call = filesystem_call(method, request, user)?;
        self.answer(call, self.file_patience()).await.map_err(|error| match error {
            Error::Refused(refused) if refused.code == Code::ResourceExhausted => {
                Error::DiskFull(refused.message)
            }
            other => other,
        })
    }
}

fn filesystem_call(method: &str, request: &impl Serialize, user: Option<&str>) -> Result<Call> {
    let call = Call::unary(&format!("/filesystem.Filesystem/{method}"), request)?;
    Ok(match user {
        Some(user) => call.header(AUTHORIZATION.as_str(), basic(user)),
        None => call,
    })
}

/// A file that the guest sends.
#[derive(Debug)]
pub struct Download {
    /// Its size, if the guest knows it.
    pub length: Option<u64>,
    connection: Connection,
    body: Incoming,
    patience: Duration,
}

impl Download {
    /// The next piece; `None` at the end.
    pub async fn next(&mut self) -> Result<Option<Bytes>> {
        let piece = async {
            loop {
                match self.body.frame().await {
                    Some(Ok(frame)) => match frame.into_data() {
                        Ok(data) if data.is_empty() => {}
                        Ok(data) => return Ok(Some(data)),
                        // A response's trailers carry nothing.
                        Err(_) => {}
                    },
                    Some(Err(error)) => return Err(self.connection.broken(&error)),
                    None => return Ok(None),
                }
            }
        };
        within(self.patience, piece).await
    }
}

/// A file that the guest receives.
#[derive(Debug)]
pub struct Upload {
    pieces: mpsc::Sender<Piece>,
    answer: AbortOnDropHandle<Result<Bytes>>,
    patience: Duration,
}

/// An entry of the queue. Only `End` marks the end of the file; a closed queue does not.
#[derive(Debug)]
enum Piece {
    Bytes(Bytes),
    End,
}

/// The body of an upload, as long as pieces come. If the queue closes without `End`, the body breaks off, so
/// that the guest does not take it for a whole file.
fn body_of(queued: mpsc::Receiver<Piece>) -> Outbound {
    let frames = futures_util::stream::unfold(Some(queued), |queued| async {
        let mut queued = queued?;
        match queued.recv().await {
            Some(Piece::Bytes(bytes)) => Some((Ok(Frame::data(bytes)), Some(queued))),
            Some(Piece::End) => None,
            None => Some((Err(io::Error::other("the upload was given up")), None)),
        }
    });
    StreamBody::new(frames.boxed()).boxed_unsync()
}

impl Upload {
    /// Sends a piece; waits while the guest takes none. After an error there is nothing more to send.
    pub async fn send(&mut self, bytes: Bytes) -> Result<()> {
        self.hand_over(Piece::Bytes(bytes)).await
    }

    /// Ends the file, and returns the guest's description of it.
    pub async fn finish(mut self) -> Result<WrittenFile> {
        self.hand_over(Piece::End).await?;
        let answer =
            within(self.patience, async { (&mut self.answer).await.unwrap_or_else(|_| Err(lost())) });
        let written: Vec<WrittenFile> = parse(&answer.await?)?;
        written
            .into_iter()
            .next()
            .ok_or_else(|| Error::Protocol("the response to an upload names no file".into()))
    }

    async fn hand_over(&mut self, piece: Piece) -> Result<()> {
        let handed = async {
            let sent = tokio::select! {
                biased;
                // Only a guest that refuses answers before it has everything.
                answer = &mut self.answer => return Err(early(answer.ok())),
                sent = self.pieces.send(piece) => sent,
            };
            match sent {
                Ok(()) => Ok(()),
                Err(_) => Err(early((&mut self.answer).await.ok())),
            }
        };
        within(self.patience, handed).await
    }
}

fn early(answer: Option<Result<Bytes>>) -> Error {
    match answer {
        Some(Err(error)) => error,
        Some(Ok(_)) => Error::Protocol("the response to an upload came before its end".into()),
        None => lost(),
    }
}

fn lost() -> Error {
    Error::Unreachable("the connection ended in the middle of a file".into())
}

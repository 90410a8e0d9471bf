//! `GET /v1/sandboxes/{id}/console`: the output of a guest's console, and its further output.

use std::fs::File;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::Path;
use std::time::Duration;

use axum::Extension;
use axum::body::Body;
use axum::extract::State;
use axum::http::header;
use axum::response::{IntoResponse, Response};
use bytes::Bytes;
use forkd_api::ErrorBody;
use futures_util::stream;
use serde::Deserialize;

use crate::api::ApiContext;
use crate::api::extract::{Id, Params};
use crate::auth::principal::Principal;
use crate::error::Result;
use crate::monitor::console::{self, printable};
use crate::sandbox::Phase;
use crate::util::task::blocking;

/// Interval between reads of a console that a client follows.
const LOOK_EVERY: Duration = Duration::from_millis(250);
/// The most bytes sent at once.
const CHUNK: usize = 64 << 10;
/// Sent in place of output that was cut, because the console was too long, before the client had it.
const CUT: &str = "\n[forkd: some of the console was cut]\n";

/// Query parameters: which part of a console.
#[derive(Debug, Default, Deserialize)]
pub(crate) struct Wanted {
    tail: Option<usize>,
    follow: Option<bool>,
}

/// Returns the output of the guest's console, or the newest part of a long one.
#[utoipa::path(
    get, path = "/v1/sandboxes/{id}/console",
    params(
        ("id" = String, Path),
        ("tail" = Option<usize>, Query, description = "Only this many lines from the end"),
        ("follow" = Option<bool>, Query, description = "True: stream further output until the sandbox ends"),
    ),
    responses(
        (status = 200, body = String, content_type = "text/plain; charset=utf-8"),
        (status = 404, body = ErrorBody),
    ),
)]
pub(crate) async fn console(
    State(app): State<ApiContext>,
    Extension(who): Extension<Principal>,
    Id(id): Id,
    Params(wanted): Params<Wanted>,
) -> Result<Response> {
    let (path, limit) = (app.registry.known(&id)?.console_path(), app.config.limits.console_limit);
    let kind = [(header::CONTENT_TYPE, "text/plain; charset=utf-8")];
    if wanted.follow != Some(true) {
        let text = blocking("reading the console", move || Ok(console::tail(&path, limit))).await?;
        let text = wanted.tail.map_or(text.as_str(), |lines| last_lines(&text, lines)).to_owned();
        return Ok((kind, text).into_response());
    }
    let mut follower = Follower { app, who, id, reader: Reader::default(), over: false };
    let first = follower.read().await;
    let first = wanted.tail.map_or(first.as_str(), |lines| last_lines(&first, lines)).to_owned();
    let stream = stream::unfold((Some(first), follower), |(first, mut follower)| async move {
        let text = match first {
            Some(first) => first,
            None => follower.next().await?,
        };
        Some((Ok::<_, std::convert::Infallible>(Bytes::from(text)), (None, follower)))
    });
    Ok((kind, Body::from_stream(stream)).into_response())
}

/// The last `lines` lines of `text`.
fn last_lines(text: &str, lines: usize) -> &str {
    let body = text.strip_suffix('\n').unwrap_or(text);
    if lines == 0 {
        return "";
    }
    match body.rmatch_indices('\n').nth(lines - 1) {
        Some((index, _)) => &text[index + 1..],
        None => text,
    }
}

/// A client that follows a console.
struct Follower {
    app: ApiContext,
    who: Principal,
    id: String,
    reader: Reader,
    /// Whether the console will have no further output.
    over: bool,
}

impl Follower {
    /// Waits for new output and returns it.
    async fn next(&mut self) -> Option<String> {
        let stopping = self.app.stopping.clone();
        loop {
            if self.over {
                return None;
            }
            tokio::select! {
                () = tokio::time::sleep(LOOK_EVERY) => {}
                () = stopping.cancelled() => return None,
                () = self.app.tokens.revoked(&self.who) => return None,
            }
            let text = self.read().await;
            if !text.is_empty() {
                return Some(text);
            }
        }
    }

    async fn read(&mut self) -> String {
        // The registry is asked each time, because a rollback replaces the sandbox. The end is checked before the
        // console is read: then the console holds its last output.
        let Ok(sandbox) = self.app.registry.get(&self.id) else {
            self.over = true;
            return String::new();
        };
        self.over = matches!(sandbox.phase(), Phase::Ended(_));
        let (path, mut reader) = (sandbox.console_path(), std::mem::take(&mut self.reader));
        let read = blocking("reading the console", move || {
            let text = reader.read(&path);
            Ok((text, reader))
        });
        match read.await {
            Ok((text, reader)) => {
                self.over &= text.is_empty();
                self.reader = reader;
                text
            }
            Err(_) => {
                self.over = true;
                String::new()
            }
        }
    }
}

/// A position in a console.
#[derive(Debug, Default)]
struct Reader {
    /// The file that `at` belongs to.
    inode: u64,
    at: u64,
    /// The first bytes of a character whose last bytes are not written yet.
    rest: Vec<u8>,
}

impl Reader {
    /// The new output, at most [`CHUNK`] bytes except for the first read. Blocks.
    fn read(&mut self, path: &Path) -> String {
        let Ok(file) = File::open(path) else { return String::new() };
        let Ok(about) = file.metadata() else { return String::new() };
        let mut text = String::new();
        let first = self.inode == 0;
        if self.inode != about.ino() {
            *self = Reader { inode: about.ino(), ..Reader::default() };
        } else if about.len() < self.at {
            // The older half of the file was cut, and the position with it.
            *self = Reader { inode: about.ino(), at: about.len(), rest: Vec::new() };
            text.push_str(CUT);
        }
        let new = usize::try_from(about.len() - self.at).unwrap_or(usize::MAX);
        let mut bytes = std::mem::take(&mut self.rest);
        let kept = bytes.len();
        bytes.resize(kept + if first { new } else { new.min(CHUNK) }, 0);
        let Ok(count) = file.read_at(&mut bytes[kept..], self.at) else { return text };
        bytes.truncate(kept + count);
        self.at += count as u64;
        if let Err(error) = std::str::from_utf8(&bytes)
            && error.error_len().is_none()
        {
            self.rest = bytes.split_off(error.valid_up_to());
        }
        text.push_str(&printable(&bytes));
        text
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_last_lines_are_as_many_as_asked_for() {
        for (lines, end) in [(0, ""), (1, "c\n"), (2, "b\nc\n"), (3, "a\nb\nc\n"), (9, "a\nb\nc\n")] {
            assert_eq!(last_lines("a\nb\nc\n", lines), end);
        }
        assert_eq!(last_lines("a\nb", 1), "b");
        assert_eq!(last_lines("", 1), "");
    }

    #[test]
    fn a_follower_gets_every_character_once_and_a_notice_of_cuts() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("console.log");
        let mut reader = Reader::default();
        assert_eq!(reader.read(&path), "");
        std::fs::write(&path, b"one \xc3").unwrap();
        assert_eq!(reader.read(&path), "one ");
        std::fs::write(&path, b"one \xc3\xa9\n").unwrap();
        assert_eq!(reader.read(&path), "é\n");
        assert_eq!(reader.read(&path), "");
        std::fs::write(&path, b"cut").unwrap();
        assert_eq!(reader.read(&path), CUT);
        // Another file in its place: a rollback.
        std::fs::write(folder.path().join("next"), b"anew").unwrap();
        std::fs::rename(folder.path().join("next"), &path).unwrap();
        assert_eq!(reader.read(&path), "anew");
    }
}

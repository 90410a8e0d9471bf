//! A folder of a guest with all below it, as a stream of entries.
//!
//! The client checks every entry: a client of the daemon may write files by these paths.

use std::time::Duration;

use forkd_protocol::agent::{MAX_TREE_ENTRIES, TreeEntries, TreeEntry, TreeRequest};
use forkd_protocol::connect::TIMEOUT_HEADER;
use hyper::header::AUTHORIZATION;

use super::connection::Call;
use super::messages::Messages;
use super::{Agent, Error, Result, basic, millis, within};

impl Agent {
    /// Begins to list a folder. After `limit` the agent ends the stream with an error that
    /// [is a deadline](Error::is_deadline).
    pub(crate) async fn tree(
        &self,
        path: &str,
        hash: bool,
        limit: Duration,
        user: Option<&str>,
    ) -> Result<TreeStream> {
        let request = TreeRequest { path: path.to_owned(), hash };
        let mut call = Call::stream("/forkd.Agent/Tree", &request).header(TIMEOUT_HEADER, millis(limit));
        if let Some(user) = user {
            call = call.header(AUTHORIZATION.as_str(), basic(user));
        }
        let opened = async {
            let mut connection = self.connect().await?;
            let body = connection.open_stream(call).await?;
            Ok(Messages::new(connection, body))
        };
        let messages = within(self.patience, opened).await?;
        Ok(TreeStream { messages, patience: self.file_patience(), last: Vec::new(), entries: 0 })
    }
}

/// The entries of a folder. Dropping it ends the agent's walk.
#[derive(Debug)]
pub(crate) struct TreeStream {
    messages: Messages,
    patience: Duration,
    /// The path of the last entry.
    last: Vec<u8>,
    /// How many entries came.
    entries: usize,
}

impl TreeStream {
    /// The next entries; `None` after the last ones. An agent that works long sends lists without entries.
    pub(crate) async fn next(&mut self) -> Result<Option<Vec<TreeEntry>>> {
        let Some(message) = within(self.patience, self.messages.next::<TreeEntries>()).await? else {
            return Ok(None);
        };
        self.entries += message.entries.len();
        if self.entries > MAX_TREE_ENTRIES {
            return Err(Error::Protocol(format!("a tree has more than {MAX_TREE_ENTRIES} entries")));
        }
        for entry in &message.entries {
            self.check(entry)?;
        }
        Ok(Some(message.entries))
    }

    fn check(&mut self, entry: &TreeEntry) -> Result<()> {
        let path = entry.path_bytes.as_deref().unwrap_or(entry.path.as_bytes());
        let is_text = std::str::from_utf8(path).is_ok();
        let is_same = String::from_utf8_lossy(path) == entry.path && is_text == entry.path_bytes.is_none();
        let goes_down = |name: &[u8]| !matches!(name, b"" | b"." | b"..") && !name.contains(&0);
        if !is_same || !path.split(|byte| *byte == b'/').all(goes_down) {
            return Err(Error::Protocol(format!("{:?} is not a path below a folder", entry.path)));
        }
        if path <= self.last.as_slice() {
            return Err(Error::Protocol(format!("{:?} is not in the order of paths", entry.path)));
        }
        self.last = path.to_vec();
        let is_digit = |byte: u8| byte.is_ascii_digit() || (b'a'..=b'f').contains(&byte);
        if entry.sha256.as_ref().is_some_and(|hash| hash.len() != 64 || !hash.bytes().all(is_digit)) {
            return Err(Error::Protocol(format!("the hash of {:?} is not a SHA-256", entry.path)));
        }
        Ok(())
    }
}

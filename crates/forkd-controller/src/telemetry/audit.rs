//! The audit log: the identity, origin and outcome of every request, one JSON object per line, append-only. It has no
//! body, query or token, so no secret reaches it.
//!
//! A thread of its own writes it. Requests put their lines into a bounded queue. When the queue is full, because the
//! disk hangs, a request's line waits a moment for room and is then lost; lost lines are counted and logged. The file
//! may be moved away at any time, as `logrotate` does: before each write the thread opens it anew if the path is now
//! another file, or none.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use serde::Serialize;
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::{mpsc, oneshot};

use crate::error::{Error, Result};
use crate::telemetry::metrics::Metrics;
use crate::util::task::{self, Task};
use crate::util::time;

/// The longest path, target and user agent in the audit log, each.
pub(crate) const MAX_TEXT: usize = 256;
/// How many lines wait to be written.
const QUEUE: usize = 8192;
/// How many lines one write has.
const BATCH: usize = 256;
/// How long a line waits for room in the queue.
const WRITE_TIMEOUT: Duration = Duration::from_secs(1);
/// How long the daemon's stop waits for the disk.
const CLOSE_WAIT: Duration = Duration::from_secs(5);

/// One line of the log.
#[derive(Debug, Serialize)]
pub(crate) struct AuditRecord {
    pub(crate) ts: String,
    pub(crate) request_id: String,
    /// The name of the token, or `local`; none for an unauthenticated client.
    pub(crate) identity: Option<String>,
    pub(crate) owner: Option<String>,
    /// An address, or the user behind a unix socket.
    pub(crate) peer: Option<String>,
    pub(crate) method: String,
    pub(crate) path: String,
    /// None if the path matched no route.
    pub(crate) route: Option<String>,
    /// The ids, tags or names of the request's objects.
    pub(crate) target: Option<String>,
    /// None if the client disconnected before the response.
    pub(crate) status: Option<u16>,
    /// `ok`, `refused`, `failed`, `abandoned`; `begun` and `ended` for a stream.
    pub(crate) outcome: &'static str,
    pub(crate) latency_us: u64,
    pub(crate) ua: Option<String>,
}

/// The object of a request, if only the handler knows it: in the extensions of its response.
#[derive(Debug, Clone)]
pub(crate) struct AuditTarget(pub(crate) String);

impl AuditTarget {
    /// Several objects, as many as fit.
    pub(crate) fn all<'a>(names: impl IntoIterator<Item = &'a str>) -> Self {
        let mut target = String::new();
        for name in names {
            if target.len() + name.len() >= MAX_TEXT {
                target.push('…');
                break;
            }
            target.push_str(if target.is_empty() { "" } else { "," });
            target.push_str(name);
        }
        AuditTarget(target)
    }
}

enum AuditJob {
    Write(Box<AuditRecord>),
    /// Open the file again.
    Reopen,
    /// Reply when everything before this job is on disk.
    Flush(oneshot::Sender<()>),
}

/// The queue of the thread that writes.
#[derive(Debug)]
pub(crate) struct Audit {
    jobs: mpsc::Sender<AuditJob>,
    metrics: Arc<Metrics>,
}

impl Audit {
    /// Opens the log at `path`, and creates it, readable only by the daemon's user, if it is missing. SIGHUP opens
    /// it again. Must be called in a runtime.
    pub(crate) fn open(path: PathBuf, metrics: Arc<Metrics>) -> Result<Self> {
        let file = open(&path).map_err(|error| {
            let fix = "make its folder writable, or choose another file with --audit-log or FORKD_AUDIT_LOG";
            Error::host(format!("cannot open the audit log {}", path.display()), format!("{error}; {fix}"))
        })?;
        let (jobs, queue) = mpsc::channel(QUEUE);
        let torn = is_torn(&path);
        let log = Log { path, file, torn, failing: 0, metrics: metrics.clone() };
        let started = std::thread::Builder::new().name("audit".into()).spawn(move || log.write_all(queue));
        started.map_err(|error| Error::host("cannot start a thread", error))?;
        let reopen = jobs.downgrade();
        let hangups =
            signal(SignalKind::hangup()).map_err(|error| Error::host("cannot catch signals", error))?;
        let hangups = Arc::new(tokio::sync::Mutex::new(hangups));
        task::keep_running(Task::AuditReopen, move || {
            let (hangups, reopen) = (hangups.clone(), reopen.clone());
            async move {
                while hangups.lock().await.recv().await.is_some() {
                    let Some(jobs) = reopen.upgrade() else { return };
                    let _ = jobs.send(AuditJob::Reopen).await;
                }
            }
        });
        Ok(Audit { jobs, metrics })
    }

    /// Queues `line`. Does not block.
    pub(crate) fn write(&self, line: AuditRecord) {
        let full = match self.jobs.try_send(AuditJob::Write(Box::new(line))) {
            Ok(()) => return,
            Err(mpsc::error::TrySendError::Full(job)) => job,
            Err(mpsc::error::TrySendError::Closed(_)) => return self.metrics.audit_dropped.inc(),
        };
        let (jobs, metrics) = (self.jobs.clone(), self.metrics.clone());
        // On a task of its own: the client may have dropped the request already.
        let lost = metrics.clone();
        let work = async move {
            if jobs.send_timeout(full, WRITE_TIMEOUT).await.is_err() {
                metrics.audit_dropped.inc();
                tracing::error!("audit record dropped: log too slow");
            }
        };
        task::spawn_or(Task::AuditLine, work, move |_| lost.audit_dropped.inc());
    }

    /// Returns when all pending lines are on disk.
    pub(crate) async fn close(&self) {
        let flushed = async {
            let (notify, notified) = oneshot::channel();
            if self.jobs.send(AuditJob::Flush(notify)).await.is_ok() {
                let _ = notified.await;
            }
        };
        if tokio::time::timeout(CLOSE_WAIT, flushed).await.is_err() {
            tracing::error!("audit log not written to its end: the disk is too slow");
        }
    }
}

fn open(path: &Path) -> io::Result<File> {
    OpenOptions::new().append(true).create(true).mode(0o600).open(path)
}

/// Whether the file ends in the middle of a line, after a write that was cut off.
fn is_torn(path: &Path) -> bool {
    let last = || {
        let length = std::fs::metadata(path).ok().filter(|meta| meta.is_file())?.len();
        let mut last = [0];
        File::open(path).ok()?.read_exact_at(&mut last, length.checked_sub(1)?).ok()?;
        Some(last[0])
    };
    last().is_some_and(|last| last != b'\n')
}

/// The state of the writing thread.
struct Log {
    path: PathBuf,
    file: File,
    /// Whether the file ends in the middle of a line.
    torn: bool,
    /// How many lines in a row could not be written.
    failing: u64,
    metrics: Arc<Metrics>,
}

impl Log {
    fn write_all(mut self, mut queue: mpsc::Receiver<AuditJob>) {
        let mut jobs = Vec::with_capacity(BATCH);
        while queue.blocking_recv_many(&mut jobs, BATCH) > 0 {
            let (mut text, mut lines, mut waiting) = (Vec::new(), 0, Vec::new());
            let mut reopen = self.is_elsewhere();
            for job in jobs.drain(..) {
                match job {
                    AuditJob::Write(line) => {
                        lines += 1;
                        // Plain data: it always serialises.
                        let _ = serde_json::to_writer(&mut text, &line);
                        text.push(b'\n');
                    }
                    AuditJob::Reopen => reopen = true,
                    AuditJob::Flush(notify) => waiting.push(notify),
                }
            }
            if reopen {
                self.reopen();
            }
            self.write(&text, lines);
            if !waiting.is_empty()
                && let Err(error) = self.file.sync_data()
            {
                tracing::error!(%error, path = %self.path.display(), "audit log not synced");
            }
            for notify in waiting {
                let _ = notify.send(());
            }
        }
    }

    /// Whether the path names another file than the open one.
    fn is_elsewhere(&self) -> bool {
        let (Ok(ours), Ok(there)) = (self.file.metadata(), std::fs::metadata(&self.path)) else {
            return true;
        };
        (ours.dev(), ours.ino()) != (there.dev(), there.ino())
    }

    fn reopen(&mut self) {
        match open(&self.path) {
            Ok(file) => {
                self.file = file;
                self.torn = is_torn(&self.path);
            }
            // The open file is better than none.
            Err(error) => {
                tracing::error!(%error, path = %self.path.display(), "audit log not opened again");
            }
        }
    }

    fn write(&mut self, text: &[u8], lines: u64) {
        if lines == 0 {
            return;
        }
        let ended = if self.torn { self.file.write_all(b"\n") } else { Ok(()) };
        match ended.and_then(|()| self.file.write_all(text)) {
            Ok(()) => {
                if self.failing > 0 {
                    tracing::warn!(lost = self.failing, "audit log writable again");
                }
                (self.torn, self.failing) = (false, 0);
            }
            Err(error) => {
                self.metrics.audit_dropped.inc_by(lines);
                if self.failing == 0 {
                    let path = self.path.display();
                    tracing::error!(%error, %path, "audit log not written: requests are served without it");
                }
                // A part of it may have been written.
                (self.torn, self.failing) = (true, self.failing.saturating_add(lines));
            }
        }
    }
}

impl AuditRecord {
    /// The current time, as in a line.
    pub(crate) fn now() -> String {
        time::timestamp_ms(time::now_ms())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn line(path: &str) -> AuditRecord {
        AuditRecord {
            ts: AuditRecord::now(),
            request_id: "1".into(),
            identity: None,
            owner: None,
            peer: None,
            method: "GET".into(),
            path: path.into(),
            route: None,
            target: None,
            status: Some(404),
            outcome: "refused",
            latency_us: 7,
            ua: None,
        }
    }

    fn paths(file: &Path) -> Vec<String> {
        let text = std::fs::read_to_string(file).unwrap();
        let read = |line: &str| serde_json::from_str::<serde_json::Value>(line).expect(line);
        text.lines().map(|line| read(line)["path"].as_str().unwrap().to_owned()).collect()
    }

    #[tokio::test]
    async fn a_log_that_is_moved_away_is_begun_anew_and_nothing_is_lost() {
        let folder = tempfile::tempdir().unwrap();
        let (path, moved) = (folder.path().join("audit.log"), folder.path().join("audit.log.1"));
        let audit = Audit::open(path.clone(), Arc::new(Metrics::new())).unwrap();
        audit.write(line("/one"));
        audit.close().await;
        std::fs::rename(&path, &moved).unwrap();
        audit.write(line("/two"));
        audit.close().await;
        // Truncated in place, as `copytruncate` does.
        File::options().write(true).truncate(true).open(&path).unwrap();
        audit.write(line("/three"));
        audit.close().await;
        assert_eq!((paths(&moved), paths(&path)), (vec!["/one".into()], vec!["/three".to_owned()]));
        use std::os::unix::fs::PermissionsExt;
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
    }

    #[tokio::test]
    async fn a_line_that_an_earlier_daemon_could_not_finish_does_not_spoil_the_next() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        for (before, after) in [("", vec![]), ("{\"half\":", vec!["{\"half\":"]), ("{}\n", vec!["{}"])] {
            std::fs::write(&path, before).unwrap();
            let audit = Audit::open(path.clone(), Arc::new(Metrics::new())).unwrap();
            audit.write(line("/next"));
            audit.close().await;
            let text = std::fs::read_to_string(&path).unwrap();
            let mut lines: Vec<&str> = text.lines().collect();
            let last: serde_json::Value = serde_json::from_str(lines.pop().unwrap()).expect(&text);
            assert_eq!((last["path"].as_str(), lines), (Some("/next"), after));
        }
    }

    #[tokio::test]
    async fn many_lines_at_once_all_arrive_in_order() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("audit.log");
        let audit = Audit::open(path.clone(), Arc::new(Metrics::new())).unwrap();
        for index in 0..3000 {
            audit.write(line(&format!("/{index}")));
        }
        audit.close().await;
        assert_eq!(paths(&path), (0..3000).map(|index| format!("/{index}")).collect::<Vec<_>>());
    }

    #[tokio::test]
    async fn a_full_disk_is_counted_and_stops_no_request() {
        let metrics = Arc::new(Metrics::new());
        let audit = Audit::open("/dev/full".into(), metrics.clone()).unwrap();
        for _ in 0..3 {
            audit.write(line("/lost"));
            audit.close().await;
        }
        let mut page = crate::telemetry::prometheus::Page::default();
        metrics.show(&mut page);
        assert!(page.finish().unwrap().contains("\nforkd_audit_dropped_total 3\n"));
    }

    #[tokio::test]
    async fn a_log_that_cannot_be_is_an_error_with_the_fix() {
        let error = Audit::open("/nonexistent/audit.log".into(), Arc::new(Metrics::new())).unwrap_err();
        assert!(error.to_string().contains("--audit-log"), "{error}");
    }
}

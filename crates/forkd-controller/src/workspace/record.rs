//! Workspaces on disk: one file `NAME.json` each, in one folder.
//!
//! The daemon replaces a file as a whole: it writes a new file beside it, syncs that, renames it and syncs the
//! folder. So after a crash a record is the old one or the new one. Files are not trusted: the daemon follows no
//! link, reads no large file, and checks every name in a record before it uses the name. Calls block.

use std::fs::{self, File};
use std::io::{self, Read, Write};
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};

use forkd_protocol::names::{is_valid_name, is_valid_sandbox_id};
use serde::{Deserialize, Serialize};

use crate::sandbox::e2b::E2bState;
use crate::util::fs::make_private_dir;

/// The version of records this daemon writes and reads.
pub(crate) const VERSION: u32 = 1;
/// The largest file that is read. A real one has less than a KiB, beside the metadata and variables of a sandbox of the
/// E2B API.
const MAX_FILE: u64 = 1 << 20;
/// The longest name of a workspace. The tags of its states contain the name, and the length of tags has a limit.
pub(crate) const MAX_NAME: usize = 48;
/// The most states: their numbers fit into 12 digits of a tag.
const MAX_STATES: u64 = 999_999_999_999;

/// The record of a workspace.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub(crate) struct WorkspaceRecord {
    pub(crate) version: u32,
    pub(crate) id: String,
    pub(crate) name: String,
    #[serde(default = "crate::auth::principal::local_owner")]
    pub(crate) owner: String,
    /// The snapshot that the first sandbox was forked from; empty if that was forked from another sandbox.
    pub(crate) source_snapshot_tag: String,
    /// The snapshot that the next sandbox is forked from; none before the first suspend.
    pub(crate) current_state_tag: Option<String>,
    /// The sandbox that is meant to run now.
    pub(crate) live_sandbox_id: Option<String>,
    pub(crate) network: bool,
    pub(crate) memory_limit_mib: Option<u64>,
    pub(crate) created_at_unix: u64,
    /// When the workspace was last created, suspended or resumed.
    pub(crate) last_active_unix: u64,
    /// The number of states begun so far: the number in the tag of the last one.
    pub(crate) states: u64,
    /// Tags to be removed: earlier states, and states that were begun and not finished.
    pub(crate) retired: Vec<String>,
    /// Whether a deletion has begun.
    pub(crate) deleted: bool,
    /// The state of the E2B API, for a sandbox of that API that was paused. Such a workspace is called like its
    /// sandbox, and the sandbox keeps that id when it is resumed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) e2b: Option<Box<E2bState>>,
    /// The deadline of that sandbox while it runs, if its deadline ends it. If the sandbox is lost, the daemon obeys it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) kill_at_unix: Option<u64>,
    /// The request that created that sandbox, if it had an idempotency key.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(crate) request: Option<String>,
}

impl WorkspaceRecord {
    pub(crate) fn new(id: String, name: &str, source_snapshot_tag: &str, now_unix: u64) -> Self {
        WorkspaceRecord {
            version: VERSION,
            id,
            name: name.to_owned(),
            owner: crate::auth::principal::local_owner(),
            source_snapshot_tag: source_snapshot_tag.to_owned(),
            current_state_tag: None,
            live_sandbox_id: None,
            network: true,
            memory_limit_mib: None,
            created_at_unix: now_unix,
            last_active_unix: now_unix,
            states: 0,
            retired: Vec::new(),
            deleted: false,
            e2b: None,
            kill_at_unix: None,
            request: None,
        }
    }

    /// The tag of state `number`; none if the number is too large.
    pub(crate) fn state_tag(&self, number: u64) -> Option<String> {
        (number <= MAX_STATES).then(|| format!("ws-{}-{number}", self.name))
    }

    /// The tag of the snapshot that the next sandbox is forked from.
    pub(crate) fn tag(&self) -> &str {
        self.current_state_tag.as_deref().unwrap_or(&self.source_snapshot_tag)
    }

    fn parse(bytes: &[u8], name: &str) -> Result<WorkspaceRecord, String> {
        /// The fields that every version has.
        #[derive(Deserialize)]
        struct Header {
            version: u64,
        }
        let header: Header = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        // First of all: the record of another version may have fields that this one would refuse as unknown.
        if header.version != u64::from(VERSION) {
            return Err(format!("it has version {}, this forkd reads {VERSION}", header.version));
        }
        let record: WorkspaceRecord = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
        record.check(name)?;
        Ok(record)
    }

    fn check(&self, name: &str) -> Result<(), String> {
        if self.name != name {
            return Err(format!("it is that of another workspace, {:?}", self.name));
        }
        if !is_valid_workspace(name) {
            return Err("no workspace can have that name".into());
        }
        // None of a sandbox that was forked from another one.
        let source = Some(&self.source_snapshot_tag).filter(|tag| !tag.is_empty());
        let tags = source.into_iter().chain(&self.current_state_tag).chain(&self.retired);
        if let Some(tag) = tags.into_iter().find(|tag| !is_valid_name(tag)) {
            return Err(format!("{tag:?} is no tag"));
        }
        if let Some(id) = self.live_sandbox_id.as_ref().filter(|id| !is_valid_sandbox_id(id)) {
            return Err(format!("{id:?} is no sandbox"));
        }
        let mut rest = self.id.strip_prefix("ws").unwrap_or_default().bytes();
        if self.id.len() > 32 || self.id.len() < 3 || !rest.all(|byte| byte.is_ascii_alphanumeric()) {
            return Err(format!("{:?} is no id of a workspace", self.id));
        }
        if self.states > MAX_STATES {
            return Err(format!("{} is too large for a number of states", self.states));
        }
        Ok(())
    }
}

/// Reads the record in `bytes` and returns what would be written of it.
#[cfg(test)]
pub(crate) fn read_and_write(bytes: &[u8], name: &str) -> Vec<u8> {
    serde_json::to_vec_pretty(&WorkspaceRecord::parse(bytes, name).unwrap()).unwrap()
}

/// Whether a workspace can have this name.
pub(crate) fn is_valid_workspace(name: &str) -> bool {
    is_valid_name(name) && name.len() <= MAX_NAME
}

/// The folder of all records.
#[derive(Debug, Clone)]
pub(crate) struct Folder(PathBuf);

impl Folder {
    /// Opens the folder and reads its files. Returns for each name the record, or why it cannot be used.
    #[allow(clippy::type_complexity)]
    pub(crate) fn open(path: &Path) -> io::Result<(Folder, Vec<(String, Result<WorkspaceRecord, String>)>)> {
        make_private_dir(path)?;
        if let Some(parent) = path.parent() {
            File::open(parent)?.sync_all()?;
        }
        let mut found = Vec::new();
        for entry in fs::read_dir(path)? {
            let path = entry?.path();
            let file = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if file.starts_with('.') && file.ends_with(NEW) {
                // The write was not finished, so no request was answered with success.
                let _ = fs::remove_file(&path);
                continue;
            }
            match file.strip_suffix(JSON).filter(|name| is_valid_workspace(name)) {
                Some(name) => found.push((name.to_owned(), read(&path, name))),
                None => tracing::warn!(path = %path.display(), "not a workspace file; left alone"),
            }
        }
        found.sort_by(|a, b| a.0.cmp(&b.0));
        Ok((Folder(path.to_owned()), found))
    }

    /// The file of the workspace `name`.
    pub(crate) fn path(&self, name: &str) -> PathBuf {
        self.0.join(format!("{name}{JSON}"))
    }

    /// Writes a record: when this returns, the record survives a crash.
    pub(crate) fn write(&self, record: &WorkspaceRecord) -> io::Result<()> {
        record.check(&record.name).map_err(io::Error::other)?;
        let new = self.0.join(format!(".{}{NEW}", record.name));
        let _ = fs::remove_file(&new);
        let mut file = File::options().write(true).create_new(true).mode(0o600).open(&new)?;
        file.write_all(&serde_json::to_vec_pretty(record)?)?;
        file.sync_all()?;
        fs::rename(&new, self.path(&record.name))?;
        self.sync()
    }

    /// Removes a record, for good.
    pub(crate) fn remove(&self, name: &str) -> io::Result<()> {
        match fs::remove_file(self.path(name)) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            other => other?,
        }
        self.sync()
    }

    fn sync(&self) -> io::Result<()> {
        File::open(&self.0)?.sync_all()
    }
}

const JSON: &str = ".json";
const NEW: &str = ".json.new";

fn read(path: &Path, name: &str) -> Result<WorkspaceRecord, String> {
    // Non-blocking, because the file may be a pipe. The flag has no effect on regular files.
    let flags = libc::O_NOFOLLOW | libc::O_NONBLOCK;
    let opened = File::options().read(true).custom_flags(flags).open(path);
    let file = opened.map_err(|error| match error.raw_os_error() {
        Some(libc::ELOOP) => "it is a symbolic link, not a file".into(),
        _ => error.to_string(),
    })?;
    if !file.metadata().map_err(|error| error.to_string())?.is_file() {
        return Err("it is not a regular file".into());
    }
    let mut bytes = Vec::new();
    file.take(MAX_FILE + 1).read_to_end(&mut bytes).map_err(|error| error.to_string())?;
    if bytes.len() as u64 > MAX_FILE {
        return Err(format!("it has more than {} KiB, no record does", MAX_FILE >> 10));
    }
    WorkspaceRecord::parse(&bytes, name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn record(name: &str) -> WorkspaceRecord {
        WorkspaceRecord {
            current_state_tag: Some("ws-box-3".into()),
            live_sandbox_id: Some("sb1".into()),
            memory_limit_mib: Some(256),
            states: 3,
            retired: vec!["ws-box-2".into()],
            ..WorkspaceRecord::new("ws0a".into(), name, "py", 7)
        }
    }

    #[test]
    fn a_record_comes_back_as_it_was_written_and_only_the_last_one() {
        let place = tempfile::tempdir().unwrap();
        let path = place.path().join("workspaces");
        let (folder, found) = Folder::open(&path).unwrap();
        assert!(found.is_empty());
        let first = record("box");
        let last = WorkspaceRecord { live_sandbox_id: None, states: 4, ..first.clone() };
        for written in [&first, &last, &record("a.b")] {
            folder.write(written).unwrap();
        }
        let (_, found) = Folder::open(&path).unwrap();
        assert_eq!(found, [("a.b".into(), Ok(record("a.b"))), ("box".into(), Ok(last))]);
        folder.remove("box").unwrap();
        folder.remove("box").unwrap();
        assert_eq!(Folder::open(&path).unwrap().1.len(), 1);
    }

    #[test]
    fn a_write_that_was_cut_off_leaves_the_old_record_and_nothing_else() {
        let place = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::open(place.path()).unwrap();
        folder.write(&record("box")).unwrap();
        let whole = serde_json::to_vec(&WorkspaceRecord { states: 9, ..record("box") }).unwrap();
        for length in [0, 1, whole.len() / 2, whole.len()] {
            fs::write(place.path().join(".box.json.new"), &whole[..length]).unwrap();
            let (folder, found) = Folder::open(place.path()).unwrap();
            assert_eq!(found, [("box".into(), Ok(record("box")))]);
            assert_eq!(fs::read_dir(place.path()).unwrap().count(), 1);
            // And the rest of a cut-off write does not stop the next one.
            fs::write(place.path().join(".box.json.new"), &whole[..length]).unwrap();
            folder.write(&record("box")).unwrap();
        }
    }

    #[test]
    fn a_hostile_file_is_refused_with_the_reason() {
        let place = tempfile::tempdir().unwrap();
        let (folder, _) = Folder::open(place.path()).unwrap();
        folder.write(&record("good")).unwrap();
        let json = |change: &dyn Fn(&mut serde_json::Value)| {
            let mut value = serde_json::to_value(record("bad")).unwrap();
            change(&mut value);
            value.to_string()
        };
        let cases: Vec<(String, &str)> = vec![
            (String::new(), "EOF"),
            ("[]".into(), "expected"),
            ("{\"version\":1}".into(), "missing field"),
            (json(&|it| it["version"] = 2.into()), "version 2"),
            (json(&|it| it["version"] = (1u64 << 40).into()), "version 1099511627776"),
            (json(&|it| it["name"] = "good".into()), "another workspace"),
            (json(&|it| it["source_snapshot_tag"] = "../../etc".into()), "no tag"),
            (json(&|it| it["current_state_tag"] = "a/b".into()), "no tag"),
            (json(&|it| it["retired"] = serde_json::json!(["ok", ".."])), "no tag"),
            (json(&|it| it["live_sandbox_id"] = "sb/..".into()), "no sandbox"),
            (json(&|it| it["id"] = "x".into()), "no id"),
            (json(&|it| it["id"] = "ws".into()), "no id"),
            (json(&|it| it["states"] = u64::MAX.into()), "states"),
            (json(&|it| it["surprise"] = 1.into()), "unknown field"),
            (" ".repeat(1100 << 10), "1024 KiB"),
        ];
        for (text, why) in cases {
            fs::write(folder.path("bad"), text).unwrap();
            let (_, found) = Folder::open(place.path()).unwrap();
            let [(bad, refused), (good, whole)] = &found[..] else { panic!("{found:?}") };
            assert_eq!((bad.as_str(), good.as_str()), ("bad", "good"));
            assert!(refused.as_ref().unwrap_err().contains(why), "{refused:?}, not {why}");
            assert!(whole.is_ok());
        }
        fs::remove_file(folder.path("bad")).unwrap();
        std::os::unix::fs::symlink(folder.path("good"), folder.path("bad")).unwrap();
        let refused = Folder::open(place.path()).unwrap().1[0].1.clone().unwrap_err();
        assert!(refused.contains("symbolic link"), "{refused}");
        fs::remove_file(folder.path("bad")).unwrap();
        fs::create_dir(folder.path("bad")).unwrap();
        let refused = Folder::open(place.path()).unwrap().1[0].1.clone().unwrap_err();
        assert!(refused.contains("regular file"), "{refused}");
    }

    #[test]
    fn what_is_not_a_workspaces_file_is_left_alone() {
        let place = tempfile::tempdir().unwrap();
        let long = format!("{}.json", "x".repeat(MAX_NAME + 1));
        for name in ["notes.txt", "-x.json", &long] {
            fs::write(place.path().join(name), "{}").unwrap();
        }
        let (_, found) = Folder::open(place.path()).unwrap();
        assert!(found.is_empty(), "{found:?}");
        assert_eq!(fs::read_dir(place.path()).unwrap().count(), 3);
    }

    #[test]
    fn the_tag_of_every_state_is_a_tag() {
        let longest = WorkspaceRecord::new("ws1".into(), &"x".repeat(MAX_NAME), "py", 0);
        assert!(is_valid_name(&longest.state_tag(1).unwrap()));
        assert!(is_valid_name(&longest.state_tag(MAX_STATES).unwrap()));
        assert_eq!(longest.state_tag(MAX_STATES + 1), None);
        assert_eq!(longest.tag(), "py");
        assert_eq!(record("box").tag(), "ws-box-3");
    }
}

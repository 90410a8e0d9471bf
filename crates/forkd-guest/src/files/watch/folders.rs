//! The folders of one watcher, and what the kernel (inotify) reports of them.
//!
//! A folder that is made, or moved, below a watched one is watched as well if the watcher is recursive. The kernel
//! names a folder by a number: the map from numbers to paths is kept here.

use std::{
    collections::{HashMap, HashSet, VecDeque},
    ffi::OsStr,
    fs, io,
    mem::MaybeUninit,
    os::{
        fd::{AsFd, BorrowedFd, OwnedFd},
        unix::ffi::OsStrExt,
    },
    path::{Path, PathBuf},
    sync::{
        Arc,
        atomic::{AtomicUsize, Ordering},
    },
    time::Duration,
};

use forkd_protocol::connect::{Code, Error};
use rustix::{
    event::{PollFd, PollFlags},
    fs::inotify::{self, CreateFlags, ReadFlags, Reader, WatchFlags},
    io::Errno,
};

use crate::{
    files::{draft, service::failed},
    sys,
    users::{self, User},
};

/// The most folders that all watchers watch together.
pub(super) const MAX_FOLDERS: usize = 16_384;
/// The most changes that wait in memory: as many as wait in the kernel.
const MAX_WAITING: usize = 16_384;
/// Bytes read from the kernel at once.
const BATCH: usize = 16 << 10;

/// What happened to a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum ChangeKind {
    Create,
    Write,
    Remove,
    Rename,
    Chmod,
}

/// Something that happened to a file; its path is relative to the watched folder.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct Change {
    pub(super) path: PathBuf,
    pub(super) kind: ChangeKind,
}

/// A report of the kernel.
struct Report {
    folder: i32,
    flags: ReadFlags,
    /// Pairs the two reports of a rename.
    cookie: u32,
    name: Option<PathBuf>,
}

/// The watched folders.
pub(super) struct Folders {
    inotify: OwnedFd,
    pub(super) root: PathBuf,
    pub(super) user: User,
    recursive: bool,
    /// Relative to the root, by the kernel's number.
    paths: HashMap<i32, PathBuf>,
    /// How many folders all watchers watch.
    all: Arc<AtomicUsize>,
    changes: VecDeque<Change>,
    /// Folders that were moved and did not yet appear under another name, with the folders below them.
    moved: Vec<(u32, Vec<i32>)>,
    /// Files found in new folders: the kernel may report them, too.
    found: HashSet<PathBuf>,
    /// The draft that is renamed now, and whether it becomes a new file.
    draft: Option<(u32, bool)>,
}

impl Folders {
    /// Watches a folder, with the permissions of `user`.
    pub(super) fn watch(
        root: PathBuf,
        recursive: bool,
        user: User,
        all: Arc<AtomicUsize>,
    ) -> Result<Self, Error> {
        let inotify = inotify::init(CreateFlags::CLOEXEC | CreateFlags::NONBLOCK).map_err(no_resources)?;
        let mut folders = Folders {
            inotify,
            root,
            user,
            recursive,
            paths: HashMap::new(),
            all,
            changes: VecDeque::new(),
            moved: Vec::new(),
            found: HashSet::new(),
            draft: None,
        };
        folders.add_all(Path::new(""), false)?;
        Ok(folders)
    }

    /// The next change; `None` after `wait`, or as soon as `stop` is readable. After `data_loss` changes are
    /// missing, and those that come later are right again.
    pub(super) fn next(
        &mut self,
        wait: Option<Duration>,
        stop: Option<BorrowedFd>,
    ) -> Result<Option<Change>, Error> {
        if let Some(change) = self.changes.pop_front() {
            return Ok(Some(change));
        }
        let mut fds = vec![PollFd::new(&self.inotify, PollFlags::IN)];
        fds.extend(stop.map(|stop| PollFd::from_borrowed_fd(stop, PollFlags::IN)));
        sys::poll(&mut fds, wait).map_err(|error| failed(&self.root, &error))?;
        if !fds[0].revents().is_empty() {
            self.read()?;
        }
        Ok(self.changes.pop_front())
    }

    /// Reads what the kernel reports now.
    fn read(&mut self) -> Result<(), Error> {
        for report in self.reports().map_err(|errno| failed(&self.root, &errno.into()))? {
            if let Err(error) = self.handle(report) {
                self.forget();
                return Err(error);
            }
        }
        if self.changes.len() > MAX_WAITING || self.found.len() > MAX_WAITING {
            self.forget();
            return Err(lost());
        }
        let mut fds = [PollFd::new(&self.inotify, PollFlags::IN)];
        let polled = sys::poll(&mut fds, Some(Duration::ZERO));
        if polled.is_ok() && fds[0].revents().is_empty() {
            self.settle();
        }
        Ok(())
    }

    fn reports(&self) -> Result<Vec<Report>, Errno> {
        let mut buf = [MaybeUninit::uninit(); BATCH];
        let mut reader = Reader::new(&self.inotify, &mut buf);
        let mut reports = Vec::new();
        loop {
            match reader.next() {
                Ok(event) => reports.push(Report {
                    folder: event.wd(),
                    flags: event.events(),
                    cookie: event.cookie(),
                    name: event.file_name().map(|name| OsStr::from_bytes(name.to_bytes()).into()),
                }),
                Err(Errno::AGAIN | Errno::INTR) => return Ok(reports),
                Err(errno) => return Err(errno),
            }
            if reader.is_buffer_empty() {
                return Ok(reports);
            }
        }
    }

    fn handle(&mut self, report: Report) -> Result<(), Error> {
        let Report { folder, flags, cookie, name } = report;
        if flags.contains(ReadFlags::QUEUE_OVERFLOW) {
            // Folders may have been made unnoticed.
            self.add_all(Path::new(""), false)?;
            return Err(lost());
        }
        if flags.contains(ReadFlags::IGNORED) {
            self.remove(folder);
            return Ok(());
        }
        let Some(above) = self.paths.get(&folder) else { return Ok(()) };
        let Some(name) = name else {
            // Of a folder below the root, the one above it has a report as well.
            if above.as_os_str().is_empty()
                && let Some(kind) = kind_of(flags)
            {
                self.changes.push_back(Change { path: ".".into(), kind });
            }
            return Ok(());
        };
        let path = above.join(&name);
        if self.handle_draft(&name, &path, flags, cookie) {
            return Ok(());
        }
        let Some(kind) = kind_of(flags) else { return Ok(()) };
        if matches!(kind, ChangeKind::Create | ChangeKind::Remove | ChangeKind::Rename)
            && self.found.remove(&path)
            && kind == ChangeKind::Create
        {
            return Ok(());
        }
        self.changes.push_back(Change { path: path.clone(), kind });
        if !self.recursive || !flags.contains(ReadFlags::ISDIR) {
            return Ok(());
        }
        match kind {
            ChangeKind::Rename => {
                let below = self.paths.iter().filter(|(_, known)| known.starts_with(&path));
                self.moved.push((cookie, below.map(|(folder, _)| *folder).collect()));
                Ok(())
            }
            ChangeKind::Create => {
                let made = flags.contains(ReadFlags::CREATE);
                self.moved.retain(|(known, _)| made || *known != cookie);
                self.add_all(&path, made)
            }
            _ => Ok(()),
        }
    }

    /// Uploads go through drafts, which are nothing that clients know of: they get what an upload in place would
    /// cause. Whether the report is about a draft.
    fn handle_draft(&mut self, name: &Path, path: &Path, flags: ReadFlags, cookie: u32) -> bool {
        if let Some(new) = draft::is_new_file(name.as_os_str().as_bytes()) {
            if flags.contains(ReadFlags::MOVED_FROM) {
                self.draft = Some((cookie, new));
            }
            return true;
        }
        if !flags.contains(ReadFlags::MOVED_TO) {
            return false;
        }
        let Some((_, new)) = self.draft.take_if(|(known, _)| *known == cookie) else { return false };
        if new {
            self.changes.push_back(Change { path: path.into(), kind: ChangeKind::Create });
        }
        self.changes.push_back(Change { path: path.into(), kind: ChangeKind::Write });
        true
    }

    /// Watches a folder and, if the watcher is recursive, all below it; reports what is in it if it is `new`.
    fn add_all(&mut self, path: &Path, new: bool) -> Result<(), Error> {
        let user = self.user.clone();
        let _acting = users::act_as(&user).map_err(|error| failed(Path::new(&user.name), &error))?;
        let mut folders = vec![path.to_path_buf()];
        while let Some(folder) = folders.pop() {
            match self.add(&folder) {
                Ok(()) => {}
                Err(Errno::NOSPC | Errno::MFILE) => {
                    let message =
                        format!("{MAX_FOLDERS} folders are watched, or as many as the guest can watch");
                    return Err(Error::new(Code::ResourceExhausted, message));
                }
                Err(errno) if folder.as_os_str().is_empty() => return Err(failed(&self.root, &errno.into())),
                // One the user may not read, or that is gone already.
                Err(_) => continue,
            }
            if !self.recursive {
                continue;
            }
            for entry in fs::read_dir(self.root.join(&folder)).into_iter().flatten().flatten() {
                let path = folder.join(entry.file_name());
                if new && draft::is_new_file(entry.file_name().as_bytes()).is_none() {
                    if self.found.len() > MAX_WAITING {
                        return Err(lost());
                    }
                    self.found.insert(path.clone());
                    self.changes.push_back(Change { path: path.clone(), kind: ChangeKind::Create });
                }
                if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                    folders.push(path);
                }
            }
        }
        Ok(())
    }

    fn add(&mut self, folder: &Path) -> Result<(), Errno> {
        let mut flags = WatchFlags::CREATE
            | WatchFlags::MOVED_TO
            | WatchFlags::MOVED_FROM
            | WatchFlags::MODIFY
            | WatchFlags::DELETE
            | WatchFlags::ATTRIB
            | WatchFlags::ONLYDIR;
        flags |= match folder.as_os_str().is_empty() {
            true => WatchFlags::DELETE_SELF | WatchFlags::MOVE_SELF,
            // A link put there meanwhile must not lead out of the tree.
            false => WatchFlags::DONT_FOLLOW,
        };
        let path = if folder.as_os_str().is_empty() { self.root.clone() } else { self.root.join(folder) };
        let full = self.all.fetch_add(1, Ordering::Relaxed) >= MAX_FOLDERS;
        let added = if full { Err(Errno::NOSPC) } else { inotify::add_watch(&self.inotify, path, flags) };
        let known = added.map(|number| self.paths.insert(number, folder.to_path_buf()).is_some());
        if known != Ok(false) {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
        known.map(drop)
    }

    fn remove(&mut self, folder: i32) {
        if self.paths.remove(&folder).is_some() {
            self.all.fetch_sub(1, Ordering::Relaxed);
        }
    }

    /// The kernel has no more to report: a folder that was moved is not below the root any more.
    fn settle(&mut self) {
        for (_, folders) in std::mem::take(&mut self.moved) {
            for folder in folders {
                // Its removal is reported.
                let _ = inotify::remove_watch(&self.inotify, folder);
            }
        }
        self.found.clear();
        self.draft = None;
    }

    /// Starts anew after changes were lost.
    fn forget(&mut self) {
        self.changes.clear();
        self.settle();
    }
}

impl Drop for Folders {
    fn drop(&mut self) {
        self.all.fetch_sub(self.paths.len(), Ordering::Relaxed);
    }
}

impl AsFd for Folders {
    fn as_fd(&self) -> BorrowedFd<'_> {
        self.inotify.as_fd()
    }
}

fn kind_of(flags: ReadFlags) -> Option<ChangeKind> {
    let any = |wanted| flags.intersects(wanted);
    Some(match () {
        () if any(ReadFlags::CREATE | ReadFlags::MOVED_TO) => ChangeKind::Create,
        () if any(ReadFlags::DELETE | ReadFlags::DELETE_SELF) => ChangeKind::Remove,
        () if any(ReadFlags::MOVED_FROM | ReadFlags::MOVE_SELF) => ChangeKind::Rename,
        () if any(ReadFlags::MODIFY) => ChangeKind::Write,
        () if any(ReadFlags::ATTRIB) => ChangeKind::Chmod,
        () => return None,
    })
}

fn no_resources(errno: Errno) -> Error {
    let message = format!("the guest has no more watchers: {}", io::Error::from(errno));
    Error::new(Code::ResourceExhausted, message)
}

/// The error of a watcher that missed changes.
pub(super) fn lost() -> Error {
    let message = "changes came faster than they were read, and some are lost: look at the folder itself";
    Error::new(Code::DataLoss, message)
}

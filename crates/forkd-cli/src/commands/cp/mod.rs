//! `forkd cp`: files and folders into a sandbox or out of it.

mod place;
pub(super) mod remote;
mod side;

use std::io::Read;
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use anyhow::{Context as _, Result, bail};
use bytes::Bytes;
use forkd_api::{FileInfo, FileKind};

use place::{DestinationFolder, is_plain_name};
use remote::Remote;
use side::{Copied, Side};

use super::{Context, WrongUsage, with_daemon};
use crate::args::CpArgs;
use crate::stream::stdio::{self, OutputStream, OutputWriter};
use crate::ui::{self, Progress};

/// The number of bytes of a file in memory at once.
const PIECE: usize = 64 << 10;
/// The limit of nested folders: each level of a copy out of a sandbox keeps a descriptor.
const MAX_DEPTH: usize = 200;
/// The limit of entries of a copy: a guest could list entries for ever.
const MAX_ENTRIES: u64 = 2_000_000;

const ONE_SIDE: &str = "exactly one side must be in a sandbox: write it as SANDBOX:/PATH";
const NEEDS_RECURSIVE: &str = "that is a folder: copy it with -r";

/// Copies; returns 1 if something was skipped.
pub(crate) fn cp(context: &Context, args: &CpArgs) -> Result<u8> {
    let sides = (Side::parse(&args.source), Side::parse(&args.destination));
    if matches!(&sides, (Side::There(..), Side::There(..)))
        || !matches!(&sides, (Side::There(..), _) | (_, Side::There(..)))
    {
        return Err(WrongUsage::new(ONE_SIDE).into());
    }
    let copied = with_daemon_copied(context, args, sides)?;
    for skipped in &copied.skipped {
        context.ui.warn(format!("skipped {}: {}", skipped.path, skipped.reason));
    }
    // Standard output may hold the file itself.
    if args.answer.json && args.destination != "-" {
        ui::print_json(&copied)?;
    } else {
        let files = ui::count(usize::try_from(copied.files).unwrap_or(usize::MAX), "file", "files");
        context.ui.note(format!("copied {files}, {}", ui::bytes(copied.bytes)));
    }
    Ok(u8::from(!copied.skipped.is_empty()))
}

fn with_daemon_copied(context: &Context, args: &CpArgs, sides: (Side, Side)) -> Result<Copied> {
    let mut copied = Copied::default();
    with_daemon(context, &args.answer.daemon, async |daemon| {
        let progress = context.ui.spinner(format!("copying {}", args.source));
        let remote = |id: &str| Remote::new(&daemon, id, args.user.clone());
        match sides {
            (Side::There(id, path), to) => {
                let mut out = CopyOut { remote: remote(&id), copied: &mut copied, progress, entries: 0 };
                out.copy(&path, to, args.recursive).await?;
            }
            (from, Side::There(id, path)) => {
                let mut into = CopyIn { remote: remote(&id), copied: &mut copied, progress };
                into.copy(from, &path, args.recursive).await?;
            }
            _ => return Err(WrongUsage::new(ONE_SIDE).into()),
        }
        Ok(0)
    })?;
    Ok(copied)
}

/// A copy out of a sandbox.
struct CopyOut<'c> {
    remote: Remote<'c>,
    copied: &'c mut Copied,
    progress: Option<Progress>,
    entries: u64,
}

impl CopyOut<'_> {
    async fn copy(&mut self, path: &str, to: Side, recursive: bool) -> Result<()> {
        let Some(found) = self.remote.stat(path).await? else { bail!("there is no {path} in the sandbox") };
        let kind = found.target_type.unwrap_or(found.r#type);
        // A link that the user named is followed; its permission bits have no meaning.
        let mode = if found.target_type.is_some() { 0o777 } else { found.mode };
        match (kind, to) {
            (FileKind::Directory, _) if !recursive => Err(WrongUsage::new(NEEDS_RECURSIVE).into()),
            (FileKind::Directory, Side::Here(to)) => {
                let place = match to.is_dir() {
                    true => {
                        let top = DestinationFolder::open(&to)?;
                        // The guest's root has no name: its content goes into the folder itself.
                        if base(path).is_empty() { top } else { top.folder(base(path), mode)? }
                    }
                    false => {
                        std::fs::create_dir_all(&to)
                            .with_context(|| format!("cannot make {}", to.display()))?;
                        DestinationFolder::open(&to)?
                    }
                };
                self.folder(place, path.to_owned()).await
            }
            (FileKind::Directory, _) => bail!("a folder cannot be written to standard output"),
            (_, Side::Standard) => self.show(path).await,
            (_, Side::Here(to)) => {
                let (folder, name) = match to.is_dir() {
                    true => (to, base(path).to_owned()),
                    false => split(&to)?,
                };
                let mode = if found.target_type.is_some() { 0o666 } else { mode };
                self.file(&DestinationFolder::open(&folder)?, &name, path, mode).await
            }
            (_, Side::There(..)) => Err(WrongUsage::new(ONE_SIDE).into()),
        }
    }

    /// Copies a folder with its content.
    async fn folder(&mut self, place: DestinationFolder, path: String) -> Result<()> {
        let mut left = vec![(place, path, 0)];
        while let Some((place, path, depth)) = left.pop() {
            let entries = match self.remote.list(&path).await {
                Ok(entries) => entries,
                Err(error) if depth == 0 => return Err(error),
                Err(error) => {
                    self.copied.skip(path, format!("{error:#}"));
                    continue;
                }
            };
            self.copied.folders += 1;
            for entry in entries {
                self.entries += 1;
                if self.entries > MAX_ENTRIES {
                    bail!("more than {MAX_ENTRIES} files and folders: copy it in parts");
                }
                let shown = format!("{}/{}", path.trim_end_matches('/'), entry.name);
                match self.entry(&place, &entry, &shown).await {
                    Ok(Some(_)) if depth >= MAX_DEPTH => {
                        self.copied.skip(shown, format!("more than {MAX_DEPTH} nested folders"));
                    }
                    Ok(Some(inner)) => left.push((inner, shown, depth + 1)),
                    Ok(None) => {}
                    Err(error) => self.copied.skip(shown, format!("{error:#}")),
                }
            }
        }
        Ok(())
    }

    /// Copies one entry of a folder. For a folder, returns the destination of its content.
    async fn entry(
        &mut self,
        place: &DestinationFolder,
        entry: &FileInfo,
        path: &str,
    ) -> Result<Option<DestinationFolder>> {
        if !is_plain_name(&entry.name) {
            bail!("its name would lead out of the folder");
        }
        match entry.r#type {
            FileKind::Directory => Ok(Some(place.folder(&entry.name, entry.mode)?)),
            FileKind::File => self.file(place, &entry.name, path, entry.mode).await.map(|()| None),
            FileKind::Symlink => bail!("a link"),
            FileKind::Other => bail!("neither file nor folder"),
        }
    }

    async fn file(&mut self, place: &DestinationFolder, name: &str, path: &str, mode: u32) -> Result<()> {
        let mut pieces = self.remote.read(path).await?;
        let mut draft = place.draft(name, mode)?;
        let mut size = 0;
        while let Some(piece) = pieces.next().await? {
            draft.write(&piece)?;
            size += piece.len() as u64;
            tick(self.progress.as_ref(), self.copied.bytes + size);
        }
        draft.keep()?;
        self.copied.files += 1;
        self.copied.bytes += size;
        Ok(())
    }

    async fn show(&mut self, path: &str) -> Result<()> {
        let mut pieces = self.remote.read(path).await?;
        self.progress = None;
        let output = OutputWriter::start();
        while let Some(piece) = pieces.next().await? {
            self.copied.bytes += piece.len() as u64;
            tokio::select! {
                () = output.write(OutputStream::Stdout, piece) => {}
                // The reader has left: it has what it wanted.
                () = output.broken() => break,
            }
        }
        self.copied.files += 1;
        output.finish().await
    }
}

/// A copy into a sandbox.
struct CopyIn<'c> {
    remote: Remote<'c>,
    copied: &'c mut Copied,
    progress: Option<Progress>,
}

impl CopyIn<'_> {
    async fn copy(&mut self, from: Side, path: &str, recursive: bool) -> Result<()> {
        let from = match from {
            Side::Here(from) => from,
            _ => {
                let input = stdio::read_stdin();
                let pieces = futures_util::stream::unfold(input, |mut input| async {
                    input.recv().await.map(|piece| (Ok(piece), input))
                });
                return self.write(path, None, pieces).await;
            }
        };
        let found = std::fs::metadata(&from).with_context(|| format!("cannot read {}", from.display()))?;
        if found.is_dir() && !recursive {
            return Err(WrongUsage::new(NEEDS_RECURSIVE).into());
        }
        let into_folder = self.remote.is_folder(path).await?;
        let target = match from.file_name().and_then(|name| name.to_str()) {
            Some(name) if into_folder || path.ends_with('/') => join(path, name),
            // Such as `.` and `..`: the content goes into the folder.
            _ if into_folder && found.is_dir() => path.to_owned(),
            None if into_folder => {
                bail!("the name of {} is not UTF-8: give a name for its copy", from.display())
            }
            _ => path.to_owned(),
        };
        match found.is_dir() {
            true => self.folder(from, target).await,
            false => self.file(&from, &target, found.permissions().mode()).await,
        }
    }

    async fn folder(&mut self, from: PathBuf, path: String) -> Result<()> {
        let mut left = vec![(from, path)];
        while let Some((from, path)) = left.pop() {
            self.remote.make_folder(&path).await?;
            self.copied.folders += 1;
            let read = std::fs::read_dir(&from).and_then(|entries| entries.collect::<Result<Vec<_>, _>>());
            let mut entries = read.with_context(|| format!("cannot read {}", from.display()))?;
            entries.sort_by_key(std::fs::DirEntry::file_name);
            for entry in entries {
                let (from, shown) = (entry.path(), entry.path().display().to_string());
                let Some(target) = entry.file_name().to_str().map(|name| join(&path, name)) else {
                    self.copied.skip(shown, "its name is not UTF-8");
                    continue;
                };
                let found = entry.metadata().with_context(|| format!("cannot read {shown}"))?;
                if found.is_dir() {
                    left.push((from, target));
                } else if !found.is_file() {
                    let what = if found.is_symlink() { "a link" } else { "neither file nor folder" };
                    self.copied.skip(shown, what);
                } else {
                    self.file(&from, &target, found.permissions().mode()).await?;
                }
            }
        }
        Ok(())
    }

    async fn file(&mut self, from: &Path, path: &str, mode: u32) -> Result<()> {
        let file = std::fs::File::open(from).with_context(|| format!("cannot read {}", from.display()))?;
        let pieces = futures_util::stream::unfold(Some(file), |file| async {
            let mut file = file?;
            let mut buffer = vec![0; PIECE];
            match file.read(&mut buffer) {
                Ok(0) => None,
                Ok(count) => {
                    buffer.truncate(count);
                    Some((Ok(Bytes::from(buffer)), Some(file)))
                }
                // The daemon sees an incomplete body, and the guest gets no file.
                Err(error) => Some((Err(error), None)),
            }
        });
        self.write(path, Some(mode), pieces).await
    }

    async fn write<S>(&mut self, path: &str, mode: Option<u32>, pieces: S) -> Result<()>
    where
        S: futures_util::Stream<Item = std::io::Result<Bytes>> + Send + 'static,
    {
        use futures_util::StreamExt;
        let sent = Arc::new(AtomicU64::new(0));
        let count = sent.clone();
        let counted = pieces.inspect(move |piece| {
            let bytes = piece.as_ref().map_or(0, |piece| piece.len() as u64);
            count.fetch_add(bytes, Ordering::Relaxed);
        });
        let writing = self.remote.write(path, mode, counted);
        tokio::pin!(writing);
        let mut ticks = tokio::time::interval(std::time::Duration::from_millis(200));
        loop {
            tokio::select! {
                written = &mut writing => {
                    written.with_context(|| format!("cannot write {path} in the sandbox"))?;
                    self.copied.files += 1;
                    self.copied.bytes += sent.load(Ordering::Relaxed);
                    return Ok(());
                }
                _ = ticks.tick() => {
                    tick(self.progress.as_ref(), self.copied.bytes + sent.load(Ordering::Relaxed));
                }
            }
        }
    }
}

fn tick(progress: Option<&Progress>, bytes: u64) {
    if let Some(progress) = progress {
        progress.tick(&ui::bytes(bytes));
    }
}

/// The last part of a guest's path; empty for the root.
fn base(path: &str) -> &str {
    path.trim_end_matches('/').rsplit('/').next().unwrap_or_default()
}

fn join(folder: &str, name: &str) -> String {
    format!("{}/{name}", folder.trim_end_matches('/'))
}

/// The folder and the name of a new file.
fn split(path: &Path) -> Result<(PathBuf, String)> {
    let name = path.file_name().and_then(|name| name.to_str());
    let name = name.with_context(|| format!("{} is not a name for a file", path.display()))?;
    Ok((path.parent().map(Path::to_path_buf).unwrap_or_default(), name.to_owned()))
}

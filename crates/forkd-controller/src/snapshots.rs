//! All snapshots: the ones on disk, the ones being made, and the template each has while it is in use.
//!
//! A tag has at most one *current* template, started when a child is first asked for, or left over
//! from making the snapshot. One that is current no more (unloaded, deleted, lost) lives on as long as
//! its children do: see [`Template`].

use std::collections::{BTreeMap, HashMap};
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use forkd_protocol::control::{DiskFiles, FdRef, LoadConfig};
use forkd_protocol::names::{NAME_RULE, is_valid_name};
use forkd_store::{Snapshot, Store};
use tokio::sync::watch;

use crate::boot;
use crate::error::{Error, Kind, Result};
use crate::host::{Host, blocking, make_private_dir, new_id};
use crate::lineage::Lineage;
use crate::monitor::{Launch, Monitor};
use crate::template::{About, Adopted, Guest, Plan, Record, Source, Template};

/// All snapshots of a daemon.
#[derive(Debug)]
pub(crate) struct Snapshots {
    pub(crate) host: Arc<Host>,
    pub(crate) store: Store,
    /// Where each template has its folder.
    pub(crate) folder: PathBuf,
    entries: Mutex<BTreeMap<String, Arc<Entry>>>,
}

/// One snapshot.
#[derive(Debug)]
pub(crate) struct Entry {
    pub(crate) tag: String,
    state: Mutex<State>,
    current: Mutex<Option<Arc<Template>>>,
    /// Held by whoever starts a template: one at a time.
    starting: tokio::sync::Mutex<()>,
}

/// Where a snapshot stands.
#[derive(Debug, Clone)]
pub(crate) enum State {
    Writing(Arc<Making>),
    Ready(Box<Snapshot>),
    /// It cannot be used, or was never finished: why.
    Failed {
        error: Error,
        making: Option<Arc<Making>>,
    },
}

/// A snapshot that is being made.
#[derive(Debug)]
pub(crate) struct Making {
    pub(crate) order: crate::making::Order,
    pub(crate) begun_at_unix: u64,
    pub(crate) phase: watch::Sender<crate::making::Phase>,
    cancelled: watch::Sender<bool>,
    done: watch::Sender<bool>,
}

impl Making {
    /// Returns when somebody does not want it any more.
    pub(crate) async fn cancelled(&self) {
        let _ = self.cancelled.subscribe().wait_for(|cancelled| *cancelled).await;
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Entry {
    fn new(tag: &str, state: State) -> Arc<Self> {
        let (state, current, starting) = (Mutex::new(state), Mutex::default(), Default::default());
        Arc::new(Entry { tag: tag.to_owned(), state, current, starting })
    }

    pub(crate) fn state(&self) -> State {
        lock(&self.state).clone()
    }

    /// Its live template.
    pub(crate) fn current(&self) -> Option<Arc<Template>> {
        lock(&self.current).clone().filter(|template| template.is_alive())
    }

    fn snapshot(&self) -> Result<Snapshot> {
        let conflict = |text| Err(Error::new(Kind::Conflict, text));
        match self.state() {
            State::Ready(snapshot) => Ok(*snapshot),
            State::Writing(_) => {
                conflict(format!("snapshot {} is still being made; try again later", self.tag))
            }
            State::Failed { error, making: Some(_) } => {
                conflict(format!("snapshot {} was not finished ({}); make it again", self.tag, error.message))
            }
            State::Failed { error, making: None } => Err(error),
        }
    }
}

impl Snapshots {
    /// The snapshots in the host's data directory, and the templates an earlier daemon left running,
    /// with what they say of their children.
    pub(crate) async fn open(host: Arc<Host>) -> Result<(Arc<Self>, Leftovers)> {
        let data = host.config.data_dir.clone();
        let folder = host.config.run_dir.join("templates");
        make_private_dir(&folder)
            .map_err(|error| Error::host(format!("cannot make {}", folder.display()), error))?;
        let read = move || {
            let store = Store::open(&data.join("snapshots"))?;
            let entries = store.list()?.into_iter().map(|(tag, snapshot)| {
                let state = match snapshot {
                    Ok(snapshot) => State::Ready(Box::new(snapshot)),
                    Err(error) => State::Failed { error: error.into(), making: None },
                };
                (tag.clone(), Entry::new(&tag, state))
            });
            let entries = entries.collect();
            Ok((store, entries))
        };
        let (store, entries) = blocking("reading the snapshots", read).await?;
        let snapshots = Arc::new(Snapshots { host, store, folder, entries: Mutex::new(entries) });
        let leftovers = snapshots.adopt().await?;
        Ok((snapshots, leftovers))
    }

    /// All of them, by tag.
    pub(crate) fn list(&self) -> Vec<Arc<Entry>> {
        lock(&self.entries).values().cloned().collect()
    }

    pub(crate) fn get(&self, tag: &str) -> Result<Arc<Entry>> {
        check_tag(tag)?;
        let found = lock(&self.entries).get(tag).cloned();
        found.ok_or_else(|| {
            let text =
                format!("there is no snapshot {tag}; `forkd images` lists them, `forkd snapshot` makes one");
            Error::new(Kind::NotFound, text)
        })
    }

    /// Begins to make a snapshot. The work goes on whether or not anybody waits for it.
    pub(crate) fn make(self: &Arc<Self>, order: crate::making::Order) -> Result<(Arc<Entry>, Arc<Making>)> {
        check_tag(&order.tag)?;
        let making = Arc::new(Making {
            begun_at_unix: crate::guest::unix_nanos() / 1_000_000_000,
            phase: watch::Sender::new(crate::making::Phase::Booting),
            cancelled: watch::Sender::new(false),
            done: watch::Sender::new(false),
            order,
        });
        let tag = making.order.tag.clone();
        let entry = Entry::new(&tag, State::Writing(making.clone()));
        {
            let mut entries = lock(&self.entries);
            let taken = entries.get(&tag).map(|entry| entry.state());
            let text = match taken {
                None | Some(State::Failed { making: Some(_), .. }) => None,
                Some(State::Writing(_)) => Some(format!("snapshot {tag} is being made")),
                Some(_) => Some(format!("snapshot {tag} exists; remove it first, or choose another tag")),
            };
            if let Some(text) = text {
                return Err(Error::new(Kind::Conflict, text));
            }
            entries.insert(tag, entry.clone());
        }
        let (snapshots, made, job) = (self.clone(), entry.clone(), making.clone());
        tokio::spawn(async move { snapshots.finish(made, job).await });
        Ok((entry, making))
    }

    async fn finish(&self, entry: Arc<Entry>, making: Arc<Making>) {
        let made = crate::making::make(self, &making).await;
        let state = match made {
            Ok((snapshot, template)) => {
                tracing::info!(tag = entry.tag, "snapshot is ready");
                *lock(&entry.current) = Some(template);
                State::Ready(Box::new(snapshot))
            }
            Err(error) => {
                tracing::warn!(tag = entry.tag, error = error.message, "a snapshot could not be made");
                State::Failed { error, making: Some(making.clone()) }
            }
        };
        *lock(&entry.state) = state;
        making.done.send_replace(true);
    }

    /// Returns when a snapshot is made, or why it could not be.
    pub(crate) async fn made(&self, entry: &Entry, making: &Making) -> Result<()> {
        let _ = making.done.subscribe().wait_for(|done| *done).await;
        match entry.state() {
            State::Failed { error, .. } => Err(error),
            _ => Ok(()),
        }
    }

    /// Removes a snapshot, or stops making it. Children that run go on.
    pub(crate) async fn remove(self: &Arc<Self>, tag: &str) -> Result<()> {
        let entry = self.get(tag)?;
        if let State::Writing(making) = entry.state() {
            making.cancelled.send_replace(true);
            let _ = making.done.subscribe().wait_for(|done| *done).await;
        }
        let on_disk = !matches!(entry.state(), State::Failed { making: Some(_), .. });
        if on_disk {
            let (store, tag) = (self.store.clone(), tag.to_owned());
            let removed = blocking("removing a snapshot", move || Ok(store.remove(&tag)?)).await;
            match removed {
                Err(error) if error.kind == Kind::NotFound => {}
                other => other?,
            }
        }
        {
            let mut entries = lock(&self.entries);
            // Somebody else may have removed it and made it again meanwhile.
            if entries.get(tag).is_some_and(|now| Arc::ptr_eq(now, &entry)) {
                entries.remove(tag);
            }
        }
        lock(&entry.current).take();
        Ok(())
    }

    /// Lets go of the live template: it ends with its last child, and the next spawn starts another.
    pub(crate) fn unload(&self, tag: &str) -> Result<()> {
        let entry = self.get(tag)?;
        entry.snapshot()?;
        lock(&entry.current).take();
        Ok(())
    }

    /// The template to fork children of `tag` from: the live one, or one started from disk.
    pub(crate) async fn template(self: &Arc<Self>, tag: &str) -> Result<Arc<Template>> {
        let entry = self.get(tag)?;
        entry.snapshot()?;
        if let Some(template) = entry.current() {
            return Ok(template);
        }
        let snapshots = self.clone();
        // In a task of its own: others may wait for it when whoever asked first is gone.
        let started = tokio::spawn(async move {
            let _alone = entry.starting.lock().await;
            if let Some(template) = entry.current() {
                return Ok(template);
            }
            entry.snapshot()?;
            let template = snapshots.load(&entry.tag).await?;
            *lock(&entry.current) = Some(template.clone());
            Ok(template)
        });
        started.await.unwrap_or_else(|error| Err(Error::host("starting a template", error)))
    }

    async fn load(&self, tag: &str) -> Result<Arc<Template>> {
        let (host, id) = (self.host.clone(), new_id("tp")?);
        // Read anew: what is on the disk counts, not what it was when the daemon last looked.
        let (store, wanted) = (self.store.clone(), tag.to_owned());
        let snapshot = blocking("reading a snapshot", move || Ok(store.get(&wanted)?)).await?;
        let folder = self.folder.join(&id);
        let ground = Ground { id: id.clone(), folder: folder.clone() };
        let known = snapshot.clone();
        // Everything that can be wrong with the files is found here, before anything starts.
        let opened = blocking("opening a snapshot", move || {
            let (config, fds) = open(&host, &known)?;
            let (lineage, launch) = ground.prepare(&host)?;
            Ok((config, fds, lineage, launch))
        });
        let (config, fds, lineage, launch) = opened.await?;
        let loaded = async {
            let monitor = Monitor::launch(launch, self.host.config.timing.call).await?;
            let facts = &snapshot.manifest().facts;
            let guest = Guest {
                image: facts.image.as_ref().map(|image| image.name.clone()),
                vcpus: facts.vcpus,
                mem_mib: facts.mem_size_mib,
                network: facts.network,
                python: facts.python,
            };
            let plan = self.plan(id, &folder, snapshot.tag(), Source::Disk, guest, lineage);
            let template = Template::load(plan, monitor, config, fds, self.host.config.timing.boot).await;
            let template = template.map_err(|error| {
                let text = format!("snapshot {} cannot be used here: {}", snapshot.tag(), error.message);
                Error::new(error.kind, text)
            })?;
            template
                .record(snapshot.manifest().created_at_unix)
                .map_err(|error| Error::host("cannot record a template", error))?;
            tracing::info!(tag = snapshot.tag(), template = template.id, "template started from disk");
            Ok(template)
        };
        let loaded = loaded.await;
        if loaded.is_err() {
            self.host.janitor.remove_folder(folder).await;
        }
        loaded
    }

    pub(crate) fn plan(
        &self,
        id: String,
        folder: &std::path::Path,
        tag: &str,
        source: Source,
        guest: Guest,
        lineage: Arc<Lineage>,
    ) -> Plan {
        let about = About { tag: tag.to_owned(), source, lineage: lineage.slot, guest };
        Plan { id, folder: folder.to_owned(), about, lineage, janitor: self.host.janitor.clone() }
    }

    /// Takes over the templates an earlier daemon left running, and ends what was half-made.
    async fn adopt(self: &Arc<Self>) -> Result<Leftovers> {
        let read = |error| Error::host(format!("cannot read {}", self.folder.display()), error);
        let mut leftovers = Leftovers::default();
        for found in std::fs::read_dir(&self.folder).map_err(read)? {
            let folder = found.map_err(read)?.path();
            let id = folder.file_name().unwrap_or_default().to_string_lossy().into_owned();
            if !is_valid_name(&id) {
                tracing::warn!(path = %folder.display(), "not a template's folder; left alone");
                continue;
            }
            let record = Record::read(&folder);
            let lineage = record.as_ref().and_then(|r| self.host.lineages.resume(r.about.lineage, &id));
            let adopted = match (record, lineage) {
                (Some(record), Some(lineage)) => {
                    let Record { created_at_unix, about } = record;
                    let janitor = self.host.janitor.clone();
                    let plan = Plan {
                        id: id.clone(),
                        folder: folder.clone(),
                        about,
                        lineage: lineage.clone(),
                        janitor,
                    };
                    leftovers.lineages.insert(id.clone(), lineage);
                    Template::adopt(plan, self.host.config.timing.call)
                        .await
                        .map(|found| (created_at_unix, found))
                }
                _ => Err(Error::host("it is half-made", "it has no record")),
            };
            match adopted {
                Ok((created_at_unix, (template, children))) => {
                    self.install(&template, created_at_unix);
                    leftovers.templates.insert(id, (template, children));
                }
                Err(error) => {
                    tracing::warn!(
                        template = id,
                        error = error.message,
                        "a template is not taken over; ending it"
                    );
                    if let Some(process) = crate::process::Identity::read(&folder).and_then(|it| it.open()) {
                        process.end(&id).await;
                    }
                    if !leftovers.lineages.contains_key(&id) {
                        self.host.lineages.forget(&id);
                    }
                    self.host.janitor.remove_folder(folder).await;
                }
            }
        }
        Ok(leftovers)
    }

    /// Makes an adopted template the current one of its snapshot, if that still is the same.
    fn install(&self, template: &Arc<Template>, created_at_unix: u64) {
        let Ok(entry) = self.get(&template.about.tag) else { return };
        if entry.snapshot().is_ok_and(|snapshot| snapshot.manifest().created_at_unix == created_at_unix) {
            lock(&entry.current).get_or_insert_with(|| template.clone());
        }
    }

    /// Stops what is being made and lets go of the templates, which run on.
    pub(crate) async fn close(&self) {
        for entry in self.list() {
            if let State::Writing(making) = entry.state() {
                making.cancelled.send_replace(true);
                let _ = making.done.subscribe().wait_for(|done| *done).await;
            }
            if let Some(template) = lock(&entry.current).take() {
                template.leave();
                template.lineage.leave();
            }
        }
    }
}

/// What an earlier daemon left of templates.
#[derive(Debug, Default)]
pub(crate) struct Leftovers {
    /// Templates that live, with their children by name.
    pub(crate) templates: HashMap<String, (Arc<Template>, HashMap<String, Adopted>)>,
    /// Lineages by their template's id, also of templates that are gone.
    pub(crate) lineages: HashMap<String, Arc<Lineage>>,
}

/// The place of a template that is about to be started.
#[derive(Debug, Clone)]
pub(crate) struct Ground {
    pub(crate) id: String,
    pub(crate) folder: PathBuf,
}

impl Ground {
    /// Makes folder, lineage and cgroup. Blocks.
    pub(crate) fn prepare(&self, host: &Host) -> Result<(Arc<Lineage>, Launch)> {
        let lineage = host.lineages.begin(&self.id)?;
        let leaf = lineage.cgroup.as_ref().map(|cgroup| cgroup.template().and_then(|leaf| leaf.door()));
        let door = leaf.transpose().map_err(|error| Error::host("cannot make a cgroup", error))?;
        make_private_dir(&self.folder)
            .map_err(|error| Error::host(format!("cannot make {}", self.folder.display()), error))?;
        let launch = Launch {
            id: self.id.clone(),
            folder: self.folder.clone(),
            vmm: host.config.vmm.clone(),
            uid: lineage.uid(),
            door: door.map(Arc::new),
        };
        Ok((lineage, launch))
    }
}

/// Opens and checks everything a template of `snapshot` is loaded from. Blocks.
fn open(host: &Host, snapshot: &Snapshot) -> Result<(LoadConfig, Vec<std::os::fd::OwnedFd>)> {
    let image = match &snapshot.manifest().facts.image {
        Some(image) => {
            let (disk, base) = host.finder.disk(&image.name).map_err(|error| {
                let text = format!("snapshot {} needs its image: {}", snapshot.tag(), error.message);
                Error::new(Kind::Conflict, text)
            })?;
            snapshot.check_image(&base)?;
            Some(disk)
        }
        None => None,
    };
    let files = snapshot.open()?;
    let mut fds = Vec::new();
    let mut attach = |fd: std::os::fd::OwnedFd| {
        fds.push(fd);
        FdRef(fds.len() - 1)
    };
    let mut config = LoadConfig {
        kvm: attach(boot::kvm()?),
        state: attach(files.state.into()),
        memory: vec![attach(files.memory.into())],
        disks: Vec::new(),
    };
    if let (Some(base), Some(disk)) = (image, files.disks.into_iter().next()) {
        let layers = disk.layers.into_iter().map(|layer| attach(layer.into())).collect();
        config.disks = vec![DiskFiles { base: attach(base), layers }];
    }
    Ok((config, fds))
}

fn check_tag(tag: &str) -> Result<()> {
    match is_valid_name(tag) {
        true => Ok(()),
        false => Err(Error::invalid(format!("a tag must be {NAME_RULE}"))),
    }
}

impl From<forkd_store::Error> for Error {
    fn from(error: forkd_store::Error) -> Self {
        use forkd_store::Error as Store;
        let kind = match &error {
            Store::Invalid(_) => Kind::Invalid,
            Store::NotFound(_) => Kind::NotFound,
            Store::Exists(_) | Store::Unusable(_) => Kind::Conflict,
            Store::Io { .. } => Kind::Internal,
        };
        Error::new(kind, crate::network::chain(&error))
    }
}

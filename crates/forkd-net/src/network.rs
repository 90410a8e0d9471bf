//! The host's side of all slots: which exist, which are taken, and which an earlier daemon left behind.

use std::collections::HashSet;
use std::fs::File;
use std::io;
use std::net::Ipv4Addr;
use std::os::fd::AsFd;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use crate::attached::{self, Watch};
use crate::egress::{FlowLimits, Opening};
use crate::leftovers::links;
use crate::nft::{self, Nft, Policy};
use crate::slot::{self, Outbound, Slot};
use crate::{Error, GATEWAY_ADDRESS, GUEST_PREFIX, Result, link, namespace, resolver};

/// How many names are tried if other daemons take them at the same moment.
const ATTEMPTS: usize = 16;

/// The settings of a [`Network`].
#[derive(Debug, Clone)]
pub struct NetworkConfig {
    /// The folder with the names of namespaces. Every file in it with the name of a slot is a slot. Two daemons must not
    /// share the folder.
    pub run_dir: PathBuf,
    /// The network of the addresses between slots and host, four for each slot. All daemons of a host use the same one,
    /// because the host's rules have one.
    pub outer: Ipv4Addr,
    /// Its prefix length.
    pub outer_prefix: u8,
    /// The name server of guests; `None` takes this host's.
    pub resolver: Option<Ipv4Addr>,
    /// Private networks, and networks this host is attached to, that guests may reach. Never this host itself.
    pub opened: Vec<Opening>,
    /// How many flows each slot may have.
    pub flows: FlowLimits,
}

impl NetworkConfig {
    /// The defaults: 10.43.0.0/16, room for 16,384 slots, and this host's name server.
    pub fn new(run_dir: impl Into<PathBuf>) -> Self {
        let outer = Ipv4Addr::new(10, 43, 0, 0);
        NetworkConfig {
            run_dir: run_dir.into(),
            outer,
            outer_prefix: 16,
            resolver: None,
            opened: Vec::new(),
            flows: FlowLimits::default(),
        }
    }

    /// How many slots there can be.
    fn capacity(&self) -> Result<u32> {
        let bad = || Error::BadOuterNetwork(format!("{}/{}", self.outer, self.outer_prefix));
        if !(8..=28).contains(&self.outer_prefix) {
            return Err(bad());
        }
        let hosts = u32::MAX >> self.outer_prefix;
        let inner = u32::from(GATEWAY_ADDRESS);
        let outer = u32::from(self.outer);
        if outer & hosts != 0 || inner & !hosts == outer || is_inner(outer) {
            return Err(bad());
        }
        Ok(1 << (30 - self.outer_prefix))
    }
}

/// Makes slots. Copies are handles of the same one.
///
/// A daemon that starts opens it, [adopts](Network::adopt) the slots of the sandboxes it finds alive,
/// and [sweeps](Network::sweep) away the others.
#[derive(Debug, Clone)]
pub struct Network(Arc<Inner>);

#[derive(Debug)]
struct Inner {
    config: NetworkConfig,
    capacity: u32,
    /// The namespace of the far ends of all cables: the one in which the network was opened.
    host: File,
    outbound: std::result::Result<Rules, String>,
    resolver: Option<Ipv4Addr>,
    indexes: Mutex<Indexes>,
}

/// Outbound access of slots.
#[derive(Debug)]
struct Rules {
    nft: Nft,
    text: String,
    /// Until the rules are taken back from the host.
    watch: Mutex<Option<Watch>>,
}

#[derive(Debug, Default)]
struct Indexes {
    /// Those of slots with a live [`Slot`], or that are being made.
    used: HashSet<u32>,
    /// Those among them whose slots have the rules of an earlier daemon.
    outdated: Vec<u32>,
    /// Where to look for a free one. It goes round, so that a late answer to an ended sandbox does not
    /// find the next one at the same address.
    next: u32,
}

impl Network {
    /// Prepares the host: packet filter rules and forwarding of IPv4, which stays on. Where that fails, slots
    /// have no outbound access, and [`outbound`](Network::outbound) returns the reason.
    pub fn open(config: NetworkConfig) -> Result<Self> {
        if !rustix::process::geteuid().is_root() {
            return Err(Error::NotRoot);
        }
        let capacity = config.capacity()?;
        std::fs::create_dir_all(&config.run_dir)
            .map_err(Error::system("making the folder", &config.run_dir.display().to_string()))?;
        let host = namespace::current().map_err(Error::system("opening", "this network namespace"))?;
        // One with an address of the guests' own network would be looked for at the tap.
        let resolver =
            config.resolver.or_else(resolver::of_this_host).filter(|address| !is_inner((*address).into()));
        let outbound = prepare_host(&config, resolver).map_err(|error| chain(&error));
        let indexes = Mutex::default();
        Ok(Network(Arc::new(Inner { config, capacity, host, outbound, resolver, indexes })))
    }

    /// Whether slots have a way out; else why not, for people.
    pub fn outbound(&self) -> std::result::Result<(), &str> {
        self.0.outbound.as_ref().map(|_| ()).map_err(String::as_str)
    }

    /// The name server that guests are led to; `None` if the host has none that they could use, or if
    /// there is no way out.
    pub fn resolver(&self) -> Option<Ipv4Addr> {
        self.0.resolver.filter(|_| self.0.outbound.is_ok())
    }

    /// Makes a slot.
    pub fn make(&self) -> Result<Slot> {
        let mut attempts = 0;
        loop {
            let index = self.reserve()?;
            let name = slot::name(index);
            let file = self.file(&name);
            let outbound = self.outbound_of(index);
            let error = match slot::make(&name, &file, outbound.as_ref()) {
                Ok(tap) => {
                    let outer = outbound.map(|outbound| outbound.address);
                    return Ok(Slot::new(self.clone(), index, Some(tap), outer));
                }
                Err(error) => error,
            };
            attempts += 1;
            // A link of that name is another daemon's, made this very moment.
            let taken = matches!(&error, Error::System { source, .. }
                if source.kind() == io::ErrorKind::AlreadyExists);
            // What could not be removed keeps its index, and a later daemon finds its file.
            slot::remove(&name, &file)?;
            self.release(index);
            if !taken || attempts >= ATTEMPTS {
                return Err(error);
            }
        }
    }

    /// Takes over a slot that an earlier daemon made and a sandbox still uses.
    pub fn adopt(&self, name: &str) -> Result<Slot> {
        let bad = |reason| Error::BadSlot { name: name.to_owned(), reason };
        let index = slot::index(name)
            .filter(|index| *index < self.0.capacity)
            .ok_or_else(|| bad("that is not a name of slots here"))?;
        let mounted = namespace::is_mounted(&self.file(name))
            .map_err(Error::system("looking at the namespace", name))?;
        if !mounted {
            return Err(bad("there is no such slot"));
        }
        if !self.indexes().used.insert(index) {
            return Err(bad("it is in use already"));
        }
        let connected = link::exists(name).map_err(Error::system("looking for the link", name));
        match connected {
            Ok(connected) => {
                if connected {
                    self.indexes().outdated.push(index);
                }
                Ok(Slot::new(self.clone(), index, None, connected.then(|| self.outer(index, 2))))
            }
            Err(error) => {
                self.release(index);
                Err(error)
            }
        }
    }

    /// Gives all slots that were adopted the rules of this network. A slot that cannot take them keeps its
    /// rules; the errors name it and the reason.
    pub fn renew(&self) -> Vec<Error> {
        let Ok(rules) = &self.0.outbound else { return Vec::new() };
        let outdated = std::mem::take(&mut self.indexes().outdated);
        let renewed = in_parallel(outdated, |index| {
            let name = slot::name(index);
            namespace::inside(&self.file(&name), || rules.nft.load(&rules.text))
                .map_err(Error::system("entering the network slot", &name))
                .flatten()
        });
        renewed.into_iter().filter_map(Result::err).collect()
    }

    /// Removes all slots without an owner, and returns them.
    pub fn sweep(&self) -> Result<Vec<String>> {
        let folder = self.0.config.run_dir.display().to_string();
        let failed = |error: io::Error| Error::system("reading the folder", &folder)(error);
        // A slot that is being made at this moment has its index in `used` before there is a file.
        let names: Vec<String> = std::fs::read_dir(&self.0.config.run_dir)
            .map_err(failed)?
            .map(|entry| Ok(entry.map_err(failed)?.file_name().into_string().unwrap_or_default()))
            .collect::<Result<_>>()?;
        // Reserved while they are removed, so that no caller gets one that is half removed.
        let left = names.into_iter().filter_map(|name| Some((slot::index(&name)?, name)));
        let left: Vec<_> = left.filter(|(index, _)| self.indexes().used.insert(*index)).collect();
        let removed = in_parallel(left, |(index, name)| {
            let result = slot::remove(&name, &self.file(&name));
            self.release(index);
            result.map(|()| name)
        });
        removed.into_iter().collect()
    }

    /// Takes the rules back from the host, if no slot of any daemon is left that needs them.
    pub fn close(&self) -> Result<()> {
        let links = links().map_err(Error::system("listing", "links"))?;
        match &self.0.outbound {
            Ok(rules) if links.is_empty() => {
                drop(rules.watch.lock().unwrap_or_else(PoisonError::into_inner).take());
                rules.nft.remove_table()
            }
            _ => Ok(()),
        }
    }

    /// The file that the namespace of the slot `name` is mounted on.
    pub(crate) fn file(&self, name: &str) -> PathBuf {
        self.0.config.run_dir.join(name)
    }

    /// Gives an index back whose slot is gone.
    pub(crate) fn release(&self, index: u32) {
        self.indexes().used.remove(&index);
    }

    /// Reserves an index: in memory and by an empty file, which keeps it from being given away again
    /// after a crash.
    fn reserve(&self) -> Result<u32> {
        let mut indexes = self.indexes();
        for _ in 0..self.0.capacity {
            let index = indexes.next;
            indexes.next = (index + 1) % self.0.capacity;
            if indexes.used.contains(&index) {
                continue;
            }
            let name = slot::name(index);
            if link::exists(&name).map_err(Error::system("looking for the link", &name))? {
                continue;
            }
            match File::create_new(self.file(&name)) {
                Ok(_) => {
                    indexes.used.insert(index);
                    return Ok(index);
                }
                Err(error) if error.kind() == io::ErrorKind::AlreadyExists => {}
                Err(error) => return Err(Error::system("making the file of", &name)(error)),
            }
        }
        Err(Error::Full(self.0.capacity))
    }

    fn outbound_of(&self, index: u32) -> Option<Outbound<'_>> {
        let rules = self.0.outbound.as_ref().ok()?;
        Some(Outbound {
            host: self.0.host.as_fd(),
            nft: &rules.nft,
            rules: &rules.text,
            gateway: self.outer(index, 1),
            address: self.outer(index, 2),
        })
    }

    /// One of the four addresses of a slot: the network's, the host's, its own, all.
    fn outer(&self, index: u32, which: u32) -> Ipv4Addr {
        Ipv4Addr::from(u32::from(self.0.config.outer) + index * 4 + which)
    }

    fn indexes(&self) -> MutexGuard<'_, Indexes> {
        // Every change is one step: a panic elsewhere leaves nothing half done.
        self.0.indexes.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Whether the address is one of the network that every guest is in.
fn is_inner(address: u32) -> bool {
    (address ^ u32::from(GATEWAY_ADDRESS)) >> (32 - GUEST_PREFIX) == 0
}

/// Makes the host translate and forward packets from slots.
fn prepare_host(config: &NetworkConfig, resolver: Option<Ipv4Addr>) -> Result<Rules> {
    let nft = Nft::find().ok_or_else(|| Error::Nft("it is not installed (package nftables)".into()))?;
    let policy = Policy { resolver, opened: config.opened.clone(), flows: config.flows };
    let text = nft::slot_rules(&policy);
    // Whether this kernel has all of it shows when it is loaded: once, where it does no harm.
    namespace::in_new(|| nft.load(&text)).map_err(Error::system("making", "a namespace"))??;
    let networks = attached::networks().map_err(Error::system("reading", "the routing table"))?;
    // The rules first: forwarding without them would let guests anywhere.
    let outer = format!("{}/{}", config.outer, config.outer_prefix);
    nft.load(&nft::host_rules(&outer, &policy, &networks))?;
    let watch =
        Watch::start(nft.clone(), networks).map_err(Error::system("watching", "the routing table"))?;
    namespace::set_parameter("ipv4/ip_forward", "1")
        .map_err(Error::system("switching on", "forwarding of IPv4"))?;
    Ok(Rules { nft, text, watch: Mutex::new(Some(watch)) })
}

/// Does something to each, several at a time: removing a slot is mostly waiting for the kernel.
pub(crate) fn in_parallel<T: Send, R: Send>(items: Vec<T>, work: impl Fn(T) -> R + Sync) -> Vec<R> {
    const THREADS: usize = 8;
    let items = Mutex::new(items.into_iter());
    let next = || items.lock().unwrap_or_else(PoisonError::into_inner).next();
    let some = || std::iter::from_fn(next).map(&work).collect::<Vec<R>>();
    std::thread::scope(|scope| {
        // This thread too: what others cannot be started for is still done.
        let start = |_| std::thread::Builder::new().spawn_scoped(scope, some).ok();
        let others: Vec<_> = (1..THREADS).filter_map(start).collect();
        let mut done = some();
        for other in others {
            done.extend(other.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        done
    })
}

/// An error with its causes, in one line.
fn chain(error: &dyn std::error::Error) -> String {
    let causes = std::iter::successors(Some(error), |error| error.source());
    causes.map(ToString::to_string).collect::<Vec<_>>().join(": ")
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    fn config(outer: [u8; 4], outer_prefix: u8) -> NetworkConfig {
        NetworkConfig { outer: outer.into(), outer_prefix, ..NetworkConfig::new("/nowhere") }
    }

    #[test]
    fn a_network_has_one_slot_for_every_four_addresses() {
        assert_eq!(config([10, 43, 0, 0], 16).capacity().unwrap(), 16384);
        assert_eq!(config([10, 43, 0, 240], 28).capacity().unwrap(), 4);
    }

    #[test]
    fn outer_networks_that_cannot_work_are_refused() {
        for (outer, prefix) in [
            ([10, 43, 0, 1], 16),   // not its first address
            ([10, 42, 0, 0], 16),   // has the guests' own network in it
            ([10, 42, 0, 128], 28), // is in the guests' own network
            ([10, 43, 0, 0], 30),   // too small
            ([0, 0, 0, 0], 0),      // too large
            ([10, 43, 0, 0], 255),  // nonsense
        ] {
            assert!(matches!(config(outer, prefix).capacity(), Err(Error::BadOuterNetwork(_))), "{prefix}");
        }
    }

    fn without_host(run_dir: &Path, outer_prefix: u8) -> Network {
        let config = NetworkConfig { outer_prefix, ..NetworkConfig::new(run_dir) };
        Network(Arc::new(Inner {
            capacity: config.capacity().unwrap(),
            config,
            host: namespace::current().unwrap(),
            outbound: Err("not in this test".into()),
            resolver: None,
            indexes: Mutex::default(),
        }))
    }

    #[test]
    fn threads_that_reserve_at_once_never_get_the_same_index() {
        let folder = tempfile::tempdir().unwrap();
        let network = without_host(folder.path(), 22);
        let reserve = || (0..32).map(|_| network.reserve().unwrap()).collect::<Vec<_>>();
        let all: HashSet<u32> = std::thread::scope(|scope| {
            let threads: Vec<_> = (0..8).map(|_| scope.spawn(reserve)).collect();
            threads.into_iter().flat_map(|thread| thread.join().unwrap()).collect()
        });
        assert_eq!(all.len(), 256);
        assert!(matches!(network.reserve(), Err(Error::Full(256))));
        network.release(7);
        assert!(network.reserve().is_err(), "its file says that there is something left of it");
        std::fs::remove_file(network.file("forkd-7")).unwrap();
        assert_eq!(network.reserve().unwrap(), 7);
    }

    #[test]
    fn an_index_a_killed_daemon_used_is_not_given_away_before_it_is_swept() {
        let folder = tempfile::tempdir().unwrap();
        for used in 0..3 {
            File::create_new(folder.path().join(slot::name(used))).unwrap();
        }
        std::fs::write(folder.path().join("forkd-of-another-kind"), "").unwrap();
        let network = without_host(folder.path(), 28);
        assert_eq!(network.reserve().unwrap(), 3);
        assert!(matches!(network.reserve(), Err(Error::Full(4))));
        let mut swept = network.sweep().unwrap();
        swept.sort();
        assert_eq!(swept, ["forkd-0", "forkd-1", "forkd-2"]);
        assert!(folder.path().join("forkd-3").exists(), "this one is in use");
        assert!(folder.path().join("forkd-of-another-kind").exists(), "not ours");
        assert_eq!(network.reserve().unwrap(), 0);
    }

    #[test]
    fn only_slots_that_exist_can_be_adopted() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("forkd-1"), "no namespace").unwrap();
        let network = without_host(folder.path(), 28);
        for name in ["forkd-0", "forkd-1", "forkd-4", "../forkd-1", "eth0"] {
            assert!(matches!(network.adopt(name), Err(Error::BadSlot { .. })), "{name}");
        }
    }
}

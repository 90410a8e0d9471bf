//! Several clients at once, with Linux guests: each finds in its sandboxes, and in the children of its
//! branches, its own data and nothing of another client's. Some seconds here; the campaign is `make soak`
//! (`FORKD_LOAD_SECS`, `FORKD_LOAD_CLIENTS`).

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use forkd_tests::number;
use forkd_tests::random::Random;
use serde_json::json;

use crate::parent::{TAG, daemon};

/// The most sandboxes, and branches, a client has at a time.
const MOST: usize = 2;

/// Something, and what its client last wrote in there: nothing is 0.
type Written = (String, u64);

/// One of several.
struct Client {
    index: u64,
    random: Random,
    sandboxes: Vec<Written>,
    branches: Vec<Written>,
    /// How often something was made or written.
    made: u64,
    /// How often each thing was done.
    done: BTreeMap<&'static str, u64>,
}

impl Client {
    fn step(&mut self) {
        match self.random.below(6) {
            0 => self.spawn(),
            1 => self.write(),
            2 => self.read(),
            3 => self.branch(),
            4 => self.delete(),
            _ if self.branches.len() == MOST => self.remove_branches(),
            _ => self.write(),
        }
    }

    fn count(&mut self, what: &'static str) {
        *self.done.entry(what).or_insert(0) += 1;
    }

    /// One of the sandboxes.
    fn pick(&mut self) -> Option<usize> {
        let count = self.sandboxes.len() as u64;
        (count > 0).then(|| self.random.below(count) as usize)
    }

    fn spawn(&mut self) {
        if self.sandboxes.len() == MOST {
            return;
        }
        let (tag, value) = match self.branches.last() {
            Some(branch) if self.random.below(2) == 0 => branch.clone(),
            _ => (TAG.to_owned(), 0),
        };
        let id = daemon().fork(&tag, 1).remove(0);
        self.sandboxes.push((id, value));
        self.count("spawn");
        self.look(self.sandboxes.len() - 1);
    }

    /// Writes to memory and to the disk.
    fn write(&mut self) {
        let Some(at) = self.pick() else { return };
        self.made += 1;
        let (id, value) = (self.sandboxes[at].0.clone(), self.index * 1_000_000 + self.made);
        daemon().sh(&id, &format!("echo {value} > /root/value && echo {value} > /run/value"));
        self.sandboxes[at].1 = value;
        self.count("write");
    }

    fn read(&mut self) {
        if let Some(at) = self.pick() {
            self.look(at);
        }
    }

    fn look(&mut self, at: usize) {
        let (id, value) = &self.sandboxes[at];
        let found = daemon().sh(id, "cat /root/value /run/value 2>/dev/null; true");
        let expected = if *value == 0 { String::new() } else { format!("{value}\n{value}\n") };
        assert_eq!(found, expected, "{id} of client {}", self.index);
        self.count("read");
    }

    fn branch(&mut self) {
        let Some(at) = self.pick().filter(|_| self.branches.len() < MOST) else { return };
        self.made += 1;
        let (tag, wait) = (format!("load-{}-{}", self.index, self.made), self.random.below(2) == 0);
        let (id, value) = self.sandboxes[at].clone();
        daemon().branch(&id, json!({"tag": tag, "mode": "live", "wait": wait}));
        self.branches.push((tag, value));
        self.count("branch");
    }

    fn delete(&mut self) {
        let Some(at) = self.pick() else { return };
        let (id, _) = self.sandboxes.swap_remove(at);
        daemon().delete(&[id]);
        self.count("delete");
    }

    fn remove_branches(&mut self) {
        // The newest first: it may be built on the other.
        while let Some((tag, _)) = self.branches.pop() {
            let response = daemon().delete_snapshot(&tag, "?cascade=true");
            assert!([204, 404].contains(&response.status), "{response:?}");
            self.count("remove");
        }
    }

    fn leave(mut self) -> BTreeMap<&'static str, u64> {
        while !self.sandboxes.is_empty() {
            self.delete();
        }
        self.remove_branches();
        self.done
    }
}

#[test]
fn several_clients_at_once_find_what_is_theirs() {
    let (seconds, clients) = (number("FORKD_LOAD_SECS", 15), number("FORKD_LOAD_CLIENTS", 4));
    // Booting and warming is not counted.
    daemon();
    let mut seeds = Random::start("load");
    let end = Instant::now() + Duration::from_secs(seconds);
    let mut done = BTreeMap::new();
    std::thread::scope(|scope| {
        let working: Vec<_> = (1..=clients)
            .map(|index| {
                let random = seeds.another();
                let (sandboxes, branches, done) = Default::default();
                let mut client = Client { index, random, sandboxes, branches, made: 0, done };
                scope.spawn(move || {
                    // Whatever comes first: everybody makes, writes, branches and forks that once.
                    client.spawn();
                    client.write();
                    client.branch();
                    while Instant::now() < end {
                        client.step();
                    }
                    client.leave()
                })
            })
            .collect();
        for client in working {
            for (what, count) in client.join().unwrap() {
                *done.entry(what).or_insert(0) += count;
            }
        }
    });
    println!(
        "campaign: | load, Linux guests, {clients} clients | {seconds} s | {done:?}, all as they must be |"
    );
}

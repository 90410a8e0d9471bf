//! Many clients at once, each with sandboxes and branches of its own: no wrong answer, nothing left behind.
//! A few seconds here; the campaign is `make soak` (`FORKD_LOAD_SECS`, `FORKD_LOAD_CLIENTS`), whose figures
//! go to `bench/RESULTS.md`.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use forkd_tests::daemon::Daemon;
use forkd_tests::http::Response;
use forkd_tests::random::Random;
use forkd_tests::{eventually, number, test_name};
use serde_json::{Value, json};

use crate::fanout::{can_run, census, daemon_with_tiny, descriptors, ids, spawn};

/// The most sandboxes and branches a client has at a time.
const MOST: usize = 6;

/// One of many.
struct Client<'d> {
    daemon: &'d Daemon,
    index: u64,
    random: Random,
    sandboxes: Vec<String>,
    branches: Vec<String>,
    made: u64,
    /// How often each thing was done.
    done: BTreeMap<&'static str, u64>,
}

impl Client<'_> {
    /// Asks, and asks again while the daemon names a limit; nothing else may be refused.
    fn ask(&mut self, what: &'static str, method: &str, path: &str, body: Option<Value>) -> Response {
        loop {
            let response = self.daemon.request(method, path, body.clone());
            if ![429, 503].contains(&response.status) {
                *self.done.entry(what).or_insert(0) += 1;
                return response;
            }
            let code = response.json()["code"].clone();
            let limits = ["limit_reached", "daemon_busy", "quota_exceeded", "rate_limited"];
            assert!(limits.iter().any(|limit| code == *limit), "{what}: {response:?}");
            *self.done.entry("later").or_insert(0) += 1;
            std::thread::sleep(Duration::from_millis(20));
        }
    }

    fn step(&mut self) {
        match self.random.below(10) {
            0..3 => self.spawn(),
            3..5 => self.look(),
            5 => self.branch(),
            6 => self.pause(),
            _ => self.delete(),
        }
    }

    fn pick(&mut self) -> Option<String> {
        let count = self.sandboxes.len() as u64;
        (count > 0).then(|| self.sandboxes[self.random.below(count) as usize].clone())
    }

    fn spawn(&mut self) {
        if self.sandboxes.len() >= MOST {
            return;
        }
        let body = json!({"snapshot_tag": "tiny", "n": 1 + self.random.below(3), "network": false});
        let response = self.ask("spawn", "POST", "/v1/sandboxes", Some(body));
        assert_eq!(response.status, 201, "{response:?}");
        for child in response.json().as_array().unwrap() {
            assert_eq!(
                (&child["snapshot_tag"], &child["state"]),
                (&json!("tiny"), &json!("running")),
                "{child}"
            );
            self.sandboxes.push(child["id"].as_str().unwrap().to_owned());
        }
    }

    fn look(&mut self) {
        let list = self.ask("list", "GET", "/v1/sandboxes", None).json();
        let all: Vec<&str> = list.as_array().unwrap().iter().map(|it| it["id"].as_str().unwrap()).collect();
        assert!(self.sandboxes.iter().all(|id| all.contains(&id.as_str())), "one of mine is not listed");
        let Some(id) = self.pick() else { return };
        let info = self.ask("get", "GET", &format!("/v1/sandboxes/{id}"), None).json();
        assert_eq!((&info["id"], &info["state"]), (&json!(id), &json!("running")), "{info}");
        // A guest of a few instructions has no agent to run a command, and the error says that.
        let exec = json!({"args": ["true"]});
        let response = self.ask("exec", "POST", &format!("/v1/sandboxes/{id}/exec"), Some(exec));
        assert_eq!(response.status, 409, "{response:?}");
    }

    fn branch(&mut self) {
        let Some(id) = self.pick().filter(|_| self.branches.len() < MOST) else { return };
        let tag = format!("load-{}-{}", self.index, self.made);
        self.made += 1;
        let wait = self.random.below(2) == 0;
        let body = json!({"tag": tag, "mode": "live", "wait": wait});
        let response = self.ask("branch", "POST", &format!("/v1/sandboxes/{id}/branch"), Some(body));
        assert_eq!(response.status, if wait { 201 } else { 202 }, "{response:?}");
        self.branches.push(tag);
    }

    fn pause(&mut self) {
        let Some(id) = self.pick() else { return };
        for (verb, state) in [("pause", "paused"), ("resume", "running")] {
            let response = self.ask(verb, "POST", &format!("/v1/sandboxes/{id}/{verb}"), None);
            assert_eq!((response.status, &response.json()["state"]), (200, &json!(state)), "{response:?}");
        }
    }

    fn delete(&mut self) {
        if let Some(id) = self.pick() {
            let response = self.ask("delete", "DELETE", &format!("/v1/sandboxes/{id}"), None);
            assert_eq!(response.status, 204, "{response:?}");
            self.sandboxes.retain(|other| *other != id);
            let response = self.ask("get", "GET", &format!("/v1/sandboxes/{id}"), None);
            assert_eq!(response.status, 404, "{response:?}");
        }
        if self.branches.len() == MOST {
            self.remove_branches();
        }
    }

    fn remove_branches(&mut self) {
        // The newest first: later ones may be built on earlier ones.
        while let Some(tag) = self.branches.pop() {
            let path = format!("/v1/snapshots/{tag}?cascade=true");
            let response = self.ask("remove", "DELETE", &path, None);
            assert!([204, 404].contains(&response.status), "{response:?}");
        }
    }

    fn leave(mut self) -> BTreeMap<&'static str, u64> {
        for id in std::mem::take(&mut self.sandboxes) {
            let response = self.ask("delete", "DELETE", &format!("/v1/sandboxes/{id}"), None);
            assert_eq!(response.status, 204, "{response:?}");
        }
        self.remove_branches();
        self.done
    }
}

/// How long `/healthz` takes, over and over, until `over`; in milliseconds, sorted.
fn probe(daemon: &Daemon, over: &AtomicBool) -> Vec<f64> {
    let mut times = Vec::new();
    while !over.load(Ordering::Relaxed) {
        let begin = Instant::now();
        assert_eq!(daemon.request("GET", "/healthz", None).status, 200);
        times.push(begin.elapsed().as_secs_f64() * 1e3);
        std::thread::sleep(Duration::from_millis(20));
    }
    times.sort_by(f64::total_cmp);
    times
}

fn memory_kib(daemon: &Daemon) -> u64 {
    let status = std::fs::read_to_string(format!("/proc/{}/status", daemon.pid())).unwrap();
    let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:")).unwrap();
    line.trim().trim_end_matches(" kB").parse().unwrap()
}

#[test]
fn many_clients_at_once_get_right_answers_and_leave_nothing() {
    if !can_run(test_name!()) {
        return;
    }
    let (seconds, clients) = (number("FORKD_LOAD_SECS", 6), number("FORKD_LOAD_CLIENTS", 24));
    let daemon = daemon_with_tiny(&[]);
    daemon.delete(&ids(&spawn(&daemon, 1)));
    let (before, fds) = (census(&daemon), descriptors(&daemon));
    let over = AtomicBool::new(false);
    let mut seeds = Random::start("load");
    let (done, times, memory) = std::thread::scope(|scope| {
        let end = Instant::now() + Duration::from_secs(seconds);
        let probing = scope.spawn(|| probe(&daemon, &over));
        let working: Vec<_> = (0..clients)
            .map(|index| {
                let (daemon, random) = (&daemon, seeds.another());
                let (sandboxes, branches) = Default::default();
                let mut client =
                    Client { daemon, index, random, sandboxes, branches, made: 0, done: BTreeMap::new() };
                scope.spawn(move || {
                    while Instant::now() < end {
                        client.step();
                    }
                    client.leave()
                })
            })
            .collect();
        std::thread::sleep(Duration::from_secs(seconds) / 4);
        let early = memory_kib(&daemon);
        let mut done = BTreeMap::new();
        for client in working {
            for (what, count) in client.join().unwrap() {
                *done.entry(what).or_insert(0) += count;
            }
        }
        over.store(true, Ordering::Relaxed);
        (done, probing.join().unwrap(), (early, memory_kib(&daemon)))
    });
    let p99 = times[(times.len() * 99 / 100).min(times.len() - 1)];
    println!(
        "campaign: | load, {clients} clients | {seconds} s | {done:?}, all as they must be; healthz p99 {p99:.1} ms; \
         the daemon had {} MiB after a quarter, {} MiB at the end |",
        memory.0 >> 10,
        memory.1 >> 10,
    );
    // Flat, but for what a short run has not used yet.
    assert!(
        memory.1 < memory.0 * 3 / 2 + (32 << 10),
        "the daemon grew from {} to {} KiB",
        memory.0,
        memory.1
    );
    for what in ["spawn", "branch", "delete", "pause"] {
        assert!(done.get(what).is_some_and(|count| *count > 0), "no {what} in {done:?}");
    }
    eventually("everything to go", || {
        (census(&daemon) == before && descriptors(&daemon) <= fds).then_some(())
    });
}

//! Daemon, template, sandbox and saver killed at random, one at a time, while work goes on. After each kill
//! the invariants are checked: acknowledged objects exist and work, lost ones are reported as such, and no
//! unknown process or file is left. A few times here, a hundred in `make soak`.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Duration;

use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use forkd_tests::random::{Random, rounds};
use forkd_tests::test_name;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::fanout::{can_run, census};
use crate::kills::savers;
use crate::pattern::{self, daemon_with_pattern, delete_all, error, find, store_is_tidy};

/// What was acknowledged, and so must be there.
struct Known {
    sandboxes: BTreeSet<String>,
    snapshots: BTreeSet<String>,
}

/// Whom to kill.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
enum Victim {
    Daemon,
    Template,
    Sandbox,
    Saver,
}

fn kill(pid: u32) {
    // It may be over by itself.
    let _ = kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL);
}

/// Kills one, if there is such a one, while a branch is being made. Returns the sandbox that was killed.
fn strike(daemon: &mut Daemon, victim: Victim, random: &mut Random, known: &mut Known) -> Option<String> {
    let tag = format!("f{}", random.below(1 << 40));
    let sources: Vec<String> = known.sandboxes.iter().cloned().collect();
    let source = sources[random.below(sources.len() as u64) as usize].clone();
    let body = json!({"tag": tag, "mode": "live", "wait": random.below(2) == 0});
    let delay = random.time(Duration::from_millis(200));
    let mut fallen = None;
    let answer = std::thread::scope(|scope| {
        let daemon = &*daemon;
        let path = format!("/v1/sandboxes/{source}/branch");
        let asking = scope.spawn(move || daemon.try_request("POST", &path, Some(body)));
        std::thread::sleep(delay);
        let chosen = |pids: Vec<u32>, random: &mut Random| {
            let count = pids.len() as u64;
            (count > 0).then(|| pids[random.below(count) as usize])
        };
        match victim {
            Victim::Daemon => kill(daemon.pid()),
            Victim::Template => chosen(daemon.templates(), random).into_iter().for_each(kill),
            Victim::Saver => {
                let savers = savers(daemon).into_iter().map(|pid| pid as u32).collect();
                chosen(savers, random).into_iter().for_each(kill);
            }
            Victim::Sandbox => {
                let id = sources[random.below(sources.len() as u64) as usize].clone();
                kill(daemon.sandbox(&id)["pid"].as_u64().unwrap() as u32);
                fallen = Some(id);
            }
        }
        asking.join().unwrap()
    });
    if victim == Victim::Daemon {
        daemon.restart();
    }
    if let Ok(response) = answer {
        let ready = response.status == 201;
        // A template that was killed before it was saved takes an unsaved branch with it.
        if ready {
            known.snapshots.insert(tag);
        } else {
            assert!([202, 409, 500, 502, 503].contains(&response.status), "{victim:?}: {response:?}");
        }
    }
    fallen
}

/// Forks a child. A request to a template that was just killed fails with an error that asks for a retry.
fn forked(daemon: &Daemon, tag: &str) -> String {
    let body = json!({"snapshot_tag": tag, "network": false});
    let id = eventually("a child", || {
        let response = daemon.request("POST", "/v1/sandboxes", Some(body.clone()));
        if response.status == 201 {
            return Some(response.json()[0]["id"].as_str().unwrap().to_owned());
        }
        assert!(error(&response).contains("ask again"), "{tag}: {response:?}\n{}", daemon.log());
        None
    });
    daemon.leave_time_for_savers(&id);
    id
}

/// Everything that was acknowledged is there and works.
fn holds(daemon: &Daemon, known: &mut Known, fallen: Option<String>) {
    if let Some(id) = fallen {
        known.sandboxes.remove(&id);
        eventually("the sandbox that was killed to be said to have ended", || {
            (daemon.sandbox(&id)["state"] == "ended").then_some(())
        });
        assert_eq!(daemon.request("DELETE", &format!("/v1/sandboxes/{id}"), None).status, 204);
    }
    for id in &known.sandboxes {
        let info = daemon.sandbox(id);
        assert_eq!(info["state"], "running", "{info}\n{}", daemon.log());
        let pid = info["pid"].as_u64().unwrap();
        assert!(forkd_tests::daemon::is_monitor(pid as u32), "{info}");
    }
    for tag in &known.snapshots {
        assert_eq!(find(daemon, tag).unwrap()["status"], "ready", "{tag}:\n{}", daemon.log());
        let child = forked(daemon, tag);
        daemon.delete(&[child]);
    }
    // Branches under way are saved, or failed with a reason; failed ones are deleted.
    for tag in pattern::tags(daemon) {
        if !known.snapshots.contains(&tag) {
            // A branch that was never acknowledged may also be gone any moment.
            eventually("a branch to be saved, or not", || {
                find(daemon, &tag).is_none_or(|info| info["status"] != "writing").then_some(())
            });
            delete_all(daemon, &[tag]);
        }
    }
    nobody_is_unknown(daemon);
    store_is_tidy(daemon);
}

/// Every process is a sandbox or a template that the daemon knows, and every folder is theirs.
fn nobody_is_unknown(daemon: &Daemon) {
    eventually("no process or folder that nobody knows", || {
        let census = census(daemon);
        let processes = census.iter().filter(|name| name.starts_with("process ")).count();
        let (sandboxes, templates) = (daemon.monitors().len(), daemon.templates().len());
        let listed = daemon.sandboxes().len();
        (processes == sandboxes + templates && sandboxes == listed && daemon.folders() == listed)
            .then_some(())
    });
}

#[test]
fn whoever_is_killed_what_was_acknowledged_goes_on_and_nothing_leaks() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_pattern(&[]);
    let mut random = Random::start("faults");
    let mut known =
        Known { sandboxes: BTreeSet::new(), snapshots: BTreeSet::from([pattern::TAG.to_owned()]) };
    let mut struck = BTreeMap::new();
    let rounds = rounds(8);
    for round in 0..rounds {
        while known.sandboxes.len() < 3 {
            let tags: Vec<&String> = known.snapshots.iter().collect();
            let tag = tags[random.below(tags.len() as u64) as usize].clone();
            known.sandboxes.insert(forked(&daemon, &tag));
        }
        let all = [Victim::Daemon, Victim::Template, Victim::Sandbox, Victim::Saver];
        // Each at least once, then at random.
        let victim = all[if round < 4 { round } else { random.below(4) as usize }];
        let fallen = strike(&mut daemon, victim, &mut random, &mut known);
        *struck.entry(victim).or_insert(0) += 1;
        holds(&daemon, &mut known, fallen);
        while known.snapshots.len() > 4 {
            let tag = known.snapshots.iter().find(|tag| *tag != pattern::TAG).unwrap().clone();
            // With all that is built on it.
            delete_all(&daemon, std::slice::from_ref(&tag));
            let left = pattern::tags(&daemon);
            known.snapshots.retain(|tag| left.contains(tag));
        }
    }
    println!("campaign: | any of them | {rounds} | {struck:?}: all that was acknowledged went on |");
    daemon.delete(&known.sandboxes.into_iter().collect::<Vec<_>>());
    nobody_is_unknown(&daemon);
}

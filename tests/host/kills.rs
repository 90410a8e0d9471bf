//! The saver and the daemon killed at random moments while branches are on their way to the disk: whatever
//! was acknowledged is whole, and of everything else nothing is left. A few times here; the campaign is
//! `FORKD_BRANCH_ROUNDS=1000 scripts/soak.sh`, and `power` pulls the plug of a whole machine.

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use forkd_tests::daemon::{Daemon, is_monitor};
use forkd_tests::eventually;
use forkd_tests::random::{Random, rounds};
use forkd_tests::test_name;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::json;

use crate::fanout::can_run;
use crate::pattern::{self, check, child, daemon_with_pattern, delete_all, find, store_is_tidy};

/// Processes that templates forked and that are no sandboxes.
pub(crate) fn savers(daemon: &Daemon) -> Vec<i32> {
    let (templates, sandboxes) = (daemon.templates(), daemon.monitors());
    let processes = std::fs::read_dir("/proc").unwrap().flatten();
    let pids = processes.filter_map(|entry| entry.file_name().to_string_lossy().parse::<u32>().ok());
    let forked = pids.filter(|pid| {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
        let parent = stat.rsplit_once(") ").and_then(|(_, rest)| rest.split(' ').nth(1)?.parse::<u32>().ok());
        parent.is_some_and(|parent| templates.contains(&parent))
            && is_monitor(*pid)
            && !sandboxes.contains(pid)
    });
    forked.map(|pid| pid as i32).collect()
}

/// Kills up to `most` savers, each a random time after it was seen, until `over`.
fn hunt(daemon: &Daemon, random: &mut Random, most: u64, over: impl Fn() -> bool) -> u64 {
    let mut killed = BTreeSet::new();
    while !over() && (killed.len() as u64) < most {
        for pid in savers(daemon) {
            if !killed.contains(&pid) {
                std::thread::sleep(random.time(Duration::from_millis(40)));
                if kill_process(Pid::from_raw(pid).unwrap(), Signal::KILL).is_ok() {
                    killed.insert(pid);
                }
            }
        }
    }
    killed.len() as u64
}

#[test]
fn a_branch_whose_saver_is_killed_is_whole_or_gone_and_says_so() {
    if !can_run(test_name!()) {
        return;
    }
    let daemon = daemon_with_pattern(&[]);
    let mut random = Random::start("savers");
    let source = child(&daemon, pattern::TAG);
    let mut ends = BTreeMap::new();
    for round in 0..rounds(8) {
        let tag = format!("b{round}");
        let wait = random.below(2) == 0;
        let most = random.below(4);
        let body = json!({"tag": tag, "mode": "live", "wait": wait});
        let response = std::thread::scope(|scope| {
            let asking = scope.spawn(|| daemon.try_branch(&source, body));
            let written =
                || asking.is_finished() && find(&daemon, &tag).is_none_or(|info| info["status"] != "writing");
            hunt(&daemon, &mut random, most, written);
            asking.join().unwrap()
        });
        let end = match response.status {
            201 => "ready",
            202 => {
                // Its template is there, whatever became of the saver.
                check(&daemon, &tag);
                let info = daemon.when_written(&tag);
                let failed = info["status"] == "failed";
                assert_eq!(failed, info["error"].is_string(), "it says why, if and only if: {info}");
                if failed { "failed" } else { "ready" }
            }
            500 => {
                assert!(wait && most > 1, "{response:?}");
                assert!(find(&daemon, &tag).is_none(), "{tag} is there though it failed");
                "gone"
            }
            _ => panic!("{response:?}\n{}", daemon.log()),
        };
        assert!(end != "failed" || most > 1, "one kill is tried again:\n{}", daemon.log());
        if end == "ready" {
            daemon.unload(&tag);
            check(&daemon, &tag);
        }
        if end != "gone" {
            assert_eq!(daemon.delete_snapshot(&tag, "").status, 204);
        }
        *ends.entry(end).or_insert(0) += 1;
    }
    println!("campaign: | saver | {} | {ends:?}, each as it must be |", rounds(8));
    // Nothing of it is the source's business.
    daemon.branch(&source, json!({"tag": "last", "mode": "live"}));
    check(&daemon, "last");
    daemon.delete(&[source]);
    store_is_tidy(&daemon);
}

#[test]
fn killed_with_nine_while_branches_are_made_the_daemon_keeps_what_it_acknowledged() {
    if !can_run(test_name!()) {
        return;
    }
    let mut daemon = daemon_with_pattern(&[]);
    let mut random = Random::start("daemon");
    let sources = [child(&daemon, pattern::TAG), child(&daemon, pattern::TAG)];
    let (mut kept, mut others) = (0, 0);
    for round in 0..rounds(5) {
        let mut acknowledged = BTreeSet::new();
        let requests: Vec<_> = (0..3)
            .map(|index| {
                let tag = format!("r{round}-{index}");
                let mode = ["live", "live", "diff", "full"][random.below(4) as usize];
                let wait = mode != "live" || random.below(2) == 0;
                let delay = random.time(Duration::from_millis(60));
                (tag.clone(), delay, json!({"tag": tag, "mode": mode, "wait": wait}))
            })
            .collect();
        let delay = random.time(Duration::from_millis(600));
        std::thread::scope(|scope| {
            let asked: Vec<_> = requests
                .iter()
                .enumerate()
                .map(|(index, (tag, delay, body))| {
                    let path = format!("/v1/sandboxes/{}/branch", sources[index % 2]);
                    let daemon = &daemon;
                    scope.spawn(move || {
                        std::thread::sleep(*delay);
                        let response = daemon.try_request("POST", &path, Some(body.clone())).ok()?;
                        let done = response.status == 201 && response.json()["status"] == "ready";
                        done.then(|| tag.clone())
                    })
                })
                .collect();
            let until = Instant::now() + delay;
            while Instant::now() < until {
                std::thread::sleep(Duration::from_millis(5));
                let Ok(list) = daemon.try_request("GET", "/v1/snapshots", None) else { continue };
                let list = list.json();
                let ready = list.as_array().unwrap().iter().filter(|info| info["status"] == "ready");
                acknowledged.extend(ready.map(|info| info["tag"].as_str().unwrap().to_owned()));
            }
            kill_process(Pid::from_raw(daemon.pid() as i32).unwrap(), Signal::KILL).unwrap();
            acknowledged.extend(asked.into_iter().filter_map(|asked| asked.join().unwrap()));
        });
        daemon.restart();
        let tags: Vec<String> = requests.into_iter().map(|(tag, ..)| tag).collect();
        for tag in &tags {
            if find(&daemon, tag).is_none() {
                assert!(!acknowledged.contains(tag), "{tag} is lost:\n{}", daemon.log());
                continue;
            }
            // What was half-way is written again, and children of it are whole meanwhile.
            check(&daemon, tag);
            daemon.when_ready(tag);
            daemon.unload(tag);
            check(&daemon, tag);
        }
        for id in &sources {
            assert_eq!(daemon.sandbox(id)["state"], "running", "{}", daemon.log());
        }
        let acknowledged = tags.iter().filter(|tag| acknowledged.contains(*tag)).count();
        kept += acknowledged;
        others += tags.len() - acknowledged;
        delete_all(&daemon, &tags);
        store_is_tidy(&daemon);
    }
    println!(
        "campaign: | daemon | {} | {kept} acknowledged, none lost; {others} others, whole or gone |",
        rounds(5)
    );
    // Both sources go on, and no unknown process is left.
    for (index, id) in sources.iter().enumerate() {
        daemon.branch(id, json!({"tag": format!("last-{index}"), "mode": "live"}));
        check(&daemon, &format!("last-{index}"));
    }
    daemon.delete(&sources);
    delete_all(&daemon, &["last-0".into(), "last-1".into()]);
    let run_dir = daemon.run_dir();
    let folders = |kind: &str| std::fs::read_dir(run_dir.join(kind)).map_or(0, |entries| entries.count());
    eventually("all but the pattern's template to go", || {
        (daemon.monitors().is_empty() && folders("sandboxes") == 0 && folders("templates") <= 1).then_some(())
    });
}

//! What a branch of a running guest holds: two processes write a known pattern to memory and to a disk, each
//! on a vCPU of its own, while branches are taken (`writers.py`). Every byte of every branch must be of the
//! instant it was taken.

use std::sync::OnceLock;

use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use forkd_tests::random::rounds;
use serde_json::{Value, json};

use crate::parent;

/// The snapshot all tests here start from: two vCPUs, two ranges of memory, taken while both write.
const WIDE: &str = "wide";

fn daemon() -> &'static Daemon {
    static MADE: OnceLock<()> = OnceLock::new();
    MADE.get_or_init(|| {
        let program = json!(include_str!("writers.py"));
        let warm = format!(
            "with open('/root/writers.py', 'w') as file:\n    file.write({program})\n\
             import sys\nsys.path.insert(0, '/root')\nfrom writers import *\nstart()"
        );
        let body =
            json!({"tag": WIDE, "image": "python", "vcpus": 2, "mem_size_mib": 3200, "warm_python": warm});
        parent::shared().snapshot(body);
    });
    parent::shared()
}

/// How far the two writers of a sandbox are.
type Progress = [u64; 2];

fn progress(id: &str, code: &str) -> Progress {
    let answer = daemon().eval(id, code);
    let (one, two) = answer.trim_matches(['(', ')']).split_once(", ").unwrap();
    [one.parse().unwrap(), two.parse().unwrap()]
}

/// Looks at every byte both writers of a sandbox wrote, once they have stopped; how far they were.
fn check(id: &str) -> Progress {
    let reached = progress(id, "check()");
    let errors = daemon().sh(id, "dmesg | grep -ciE 'ext4-fs (error|warning)|i/o error' || true");
    assert_eq!(errors.trim(), "0", "{}", daemon().sh(id, "dmesg | tail -n 30"));
    reached
}

/// A branch, and what is known of the instant it was taken.
struct Taken {
    tag: String,
    before: Progress,
    after: Progress,
    /// Whether user processes stood still. Else they ran on in its children until those had a name.
    quiesced: bool,
    /// How far the writers of its children were, once one was looked at.
    reached: Option<Progress>,
}

impl Taken {
    /// Takes a branch of a sandbox whose writers write.
    fn from(id: &str, tag: &str, mode: Value) -> Taken {
        let before = progress(id, "progress()");
        let mut body = mode;
        body["tag"] = json!(tag);
        let info = daemon().branch(id, body);
        assert_eq!((&info["tag"], &info["branched_from"]), (&json!(tag), &json!(id)), "{info}");
        let quiesced = info["quiesced"].as_bool().unwrap_or_else(|| panic!("{info}"));
        let taken =
            Taken { tag: tag.into(), before, after: progress(id, "progress()"), quiesced, reached: None };
        // The source did not notice.
        eventually("the writers of the source to go on", || {
            let now = progress(id, "progress()");
            (now[0] > taken.after[0] && now[1] > taken.after[1]).then_some(())
        });
        taken
    }

    /// Forks a child and looks at all of it.
    fn child(&mut self) -> String {
        let child = daemon().fork(&self.tag, 1).remove(0);
        let reached = check(&child);
        let about = format!(
            "{}: {reached:?}, before {:?}, after {:?}, other children {:?}, quiesced {}",
            self.tag, self.before, self.after, self.reached, self.quiesced
        );
        for writer in [0, 1] {
            assert!(reached[writer] >= self.before[writer], "older than the branch: {about}");
            if self.quiesced {
                // It finishes the record it was at, no more.
                assert!(reached[writer] <= self.after[writer] + 1, "younger than the branch: {about}");
            }
        }
        if self.quiesced {
            let same = self.reached.is_none_or(|others| others == reached);
            assert!(same, "children of one instant differ: {about}");
        }
        self.reached = Some(reached);
        child
    }

    fn check_child(&mut self) {
        let child = self.child();
        daemon().delete(&[child]);
    }
}

#[test]
fn two_vcpus_and_two_memory_ranges_are_forked_whole_while_both_write() {
    let daemon = daemon();
    for round in ["from memory", "from disk"] {
        let child = daemon.fork(WIDE, 1).remove(0);
        check(&child);
        assert_eq!(daemon.sh(&child, "nproc"), "2\n", "{round}");
        let kib: u64 = daemon.sh(&child, "awk '/MemTotal/ {print $2}' /proc/meminfo").trim().parse().unwrap();
        assert!(kib > 2900 << 10, "{kib} KiB {round}");
        // Processes of the parent go on.
        daemon.eval(&child, "go()");
        daemon.delete(&[child]);
        daemon.unload(WIDE);
    }
}

#[test]
fn every_byte_of_every_branch_is_of_the_instant_it_was_taken() {
    let daemon = daemon();
    let source = daemon.fork(WIDE, 1).remove(0);
    daemon.leave_time_for_savers(&source);
    daemon.eval(&source, "go()");
    let live = json!({"mode": "live", "wait": false});
    let mut branches = Vec::new();
    for (tag, mode) in
        [("w-live", live.clone()), ("w-diff", json!({"mode": "diff"})), ("w-full", json!({"mode": "full"}))]
    {
        branches.push(Taken::from(&source, tag, mode));
    }
    daemon.eval(&source, "halt()");
    check(&source);
    daemon.delete(&[source]);
    // A branch of a branch of a branch, whether or not those below it are on disk yet.
    let child = branches[0].child();
    daemon.leave_time_for_savers(&child);
    daemon.eval(&child, "go()");
    branches.push(Taken::from(&child, "w-live-2", live.clone()));
    daemon.delete(&[child]);
    let grandchild = branches[3].child();
    daemon.leave_time_for_savers(&grandchild);
    daemon.eval(&grandchild, "go()");
    branches.push(Taken::from(&grandchild, "w-live-3", live));
    daemon.delete(&[grandchild]);
    branches[4].check_child();

    // And the same again from disk.
    for (taken, depth) in branches.iter_mut().zip([1, 1, 0, 2, 3]) {
        let info = daemon.when_ready(&taken.tag);
        assert_eq!(info["chain_depth"], depth, "{info}");
        daemon.unload(&taken.tag);
        taken.check_child();
    }
    let tags = branches.iter().rev().map(|taken| taken.tag.as_str());
    tags.for_each(|tag| assert_eq!(daemon.delete_snapshot(tag, "").status, 204, "{tag}"));
}

#[test]
fn ten_branches_in_a_row_of_a_guest_that_writes_are_whole_and_so_is_the_guest() {
    let daemon = daemon();
    let source = daemon.fork(WIDE, 1).remove(0);
    daemon.leave_time_for_savers(&source);
    daemon.eval(&source, "go()");
    let count = rounds(10);
    let mut branches = Vec::new();
    for index in 0..count {
        branches.push(Taken::from(&source, &format!("row-{index}"), json!({"mode": "live", "wait": false})));
    }
    assert_eq!(daemon.sandbox(&source)["branch_count"], count);
    daemon.eval(&source, "halt()");
    check(&source);
    daemon.delete(&[source]);
    // The last one from memory and from disk, with one of those before its layers were merged.
    branches[count - 1].check_child();
    for index in [count / 2, count - 1] {
        daemon.when_ready(&branches[index].tag);
        daemon.unload(&branches[index].tag);
        branches[index].check_child();
    }
    for taken in &branches {
        daemon.when_ready(&taken.tag);
        assert_eq!(daemon.delete_snapshot(&taken.tag, "").status, 204, "{}", taken.tag);
    }
}

#[test]
fn what_is_in_flight_when_nothing_can_be_frozen_is_neither_lost_nor_done_twice() {
    let daemon = daemon();
    let source = daemon.fork(WIDE, 1).remove(0);
    daemon.leave_time_for_savers(&source);
    // Processes out of the agent's reach: they write on until the vCPUs stand still, and in a child from
    // its first instruction on.
    daemon.eval(&source, "escape(); go()");
    for index in 0..2 {
        let mut taken =
            Taken::from(&source, &format!("loose-{index}"), json!({"mode": "live", "wait": false}));
        taken.quiesced = false;
        taken.check_child();
        if index == 0 {
            daemon.when_ready(&taken.tag);
            daemon.unload(&taken.tag);
            taken.check_child();
        }
    }
    daemon.eval(&source, "halt()");
    check(&source);
    daemon.delete(&[source]);
    for index in 0..2 {
        daemon.when_ready(&format!("loose-{index}"));
        assert_eq!(daemon.delete_snapshot(&format!("loose-{index}"), "").status, 204);
    }
}

//! What every child must have of its own: each test forks several and compares them.

use std::collections::BTreeSet;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use serde_json::json;

use crate::parent::{self, daemon, fork};

/// The answer of each of `ids` to `ask`; all differ.
fn all_differ(ids: &[String], what: &str, ask: impl Fn(&Daemon, &str) -> String) -> Vec<String> {
    let answers: Vec<String> = ids.iter().map(|id| ask(daemon(), id)).collect();
    let distinct: BTreeSet<_> = answers.iter().collect();
    assert_eq!(distinct.len(), ids.len(), "{what}: {answers:?}");
    answers
}

/// The kernel's boot id.
const BOOT_ID: &str = "/proc/sys/kernel/random/boot_id";

#[test]
fn random_numbers_differ_in_every_child_whoever_makes_them() {
    let children = fork(3);
    for code in [
        "os.urandom(16).hex()",
        "random.random()",
        "numpy.random.rand()",
        "str(uuid.uuid4())",
        "str(uuid.uuid1())",
        "uuid.getnode()",
        "__import__('secrets').token_hex(8)",
        "__import__('tempfile').mktemp()",
    ] {
        all_differ(&children, code, |daemon, id| daemon.eval(id, code));
    }
    for script in ["head -c 16 /dev/urandom | od -An -tx1", "cat /proc/sys/kernel/random/uuid"] {
        all_differ(&children, script, |daemon, id| daemon.sh(id, script));
    }
    // A generator the parent's code made and seeded itself stays what it is: that is what a seed is for.
    for id in &children {
        let same = daemon().eval(id, "random.Random(42).random() == random.Random(42).random()");
        assert_eq!(same, "True");
    }
    daemon().delete(&children);
}

#[test]
fn identity_is_the_childs_own_in_every_place_it_is_kept() {
    let children = fork(3);
    let machine_ids = all_differ(&children, "machine-id", |daemon, id| daemon.sh(id, "cat /etc/machine-id"));
    for machine_id in machine_ids {
        let id = machine_id.trim();
        assert!(id.len() == 32 && id.bytes().all(|b| b.is_ascii_hexdigit()), "{id}");
    }
    let boot_ids = all_differ(&children, "boot id", |daemon, id| daemon.sh(id, &format!("cat {BOOT_ID}")));
    for (id, boot_id) in children.iter().zip(&boot_ids) {
        let written = format!("str(uuid.UUID(open('{BOOT_ID}').read().strip())) + chr(10)");
        assert_eq!(daemon().eval(id, &format!("{written} == open('{BOOT_ID}').read()")), "True", "{boot_id}");
        // It stays when the sandbox stands still for a while.
        daemon().tell(id, "pause", json!({}));
        daemon().tell(id, "resume", json!({}));
        assert_eq!(daemon().sh(id, &format!("cat {BOOT_ID}")), *boot_id);
    }
    // What is mounted over it keeps no user from having a `/proc` in a namespace of its own.
    let own_proc = format!("setpriv --reuid 1000 --clear-groups unshare -Urpf --mount-proc cat {BOOT_ID}");
    assert_eq!(daemon().sh(&children[0], &own_proc).len(), 37);
    for id in &children {
        assert_eq!(daemon().sh(id, "hostname; cat /etc/hostname"), format!("{id}\n{id}\n"));
        assert_eq!(daemon().sh(id, "cat /run/forkd/sandbox-id").trim(), id);
        assert_eq!(daemon().sh(id, "echo $FORKD_SANDBOX_ID").trim(), id);
    }
    daemon().delete(&children);
}

/// Hooks that note whether user processes stand still, and an SSH server with a key, as seen from a child.
const HOOKS: &str = r#"
set -e
mkdir -p /etc/forkd/forked.d/after /etc/ssh
program() { cat > $1; chmod 755 $1; }
note() { echo "cat /sys/fs/cgroup/user/commands/cgroup.events > /root/$1.noted"; }
(echo '#!/bin/sh'; note before) | program /etc/forkd/forked.d/10-note
(echo '#!/bin/sh'; note after) | program /etc/forkd/forked.d/after/10-note
program /usr/sbin/sshd < /dev/null
program /usr/bin/ssh-keygen << 'END'
#!/bin/sh
for file; do :; done
od -An -N8 -tx1 /dev/urandom > $file
echo > $file.pub
END
echo old > /etc/ssh/ssh_host_ed25519_key
"#;

/// A child of `tag` whose hooks and functions had their time. On a busy computer they may not, and the daemon
/// reports that.
fn fork_in_time(tag: &str) -> String {
    eventually("a child whose hooks are in time", || {
        let id = daemon().fork(tag, 1).remove(0);
        let is_late = |line: &str| {
            line.contains(&id) && (line.contains("all hooks") || line.contains("on_fork functions"))
        };
        if daemon().log().lines().any(is_late) {
            daemon().delete(&[id]);
            return None;
        }
        Some(id)
    })
}

#[test]
fn hooks_and_functions_run_while_user_processes_are_frozen_and_ssh_keys_are_new() {
    let source = fork(1);
    daemon().sh(&source[0], HOOKS);
    let noted =
        "open('/root/python.noted', 'w').write(open('/sys/fs/cgroup/user/commands/cgroup.events').read())";
    daemon().eval(&source[0], &format!("import forkd_guest; forkd_guest.on_fork(lambda: {noted})"));
    daemon().branch(&source[0], json!({"tag": "hooked", "mode": "live", "wait": false}));
    let children = [fork_in_time("hooked"), fork_in_time("hooked")].to_vec();
    let expected = "after.noted:frozen 0\nbefore.noted:frozen 1\npython.noted:frozen 1\n";
    for id in &children {
        let noted = daemon().sh(id, "cd /root && grep -H frozen *.noted");
        assert_eq!(noted, expected, "{}", daemon().log());
    }
    let key = |daemon: &Daemon, id: &str| daemon.sh(id, "cat /etc/ssh/ssh_host_ed25519_key");
    let keys = all_differ(&children, "SSH host key", key);
    assert!(keys.iter().all(|key| key.len() > 20), "{keys:?}");
    assert_eq!(key(daemon(), &source[0]), "old\n", "a source keeps its own");
    daemon().delete(&[source, children].concat());
    assert_eq!(daemon().delete_snapshot("hooked", "").status, 204);
}

#[test]
fn secrets_given_to_one_child_are_not_in_its_siblings() {
    let spawn = |envs| daemon().spawn(json!({"snapshot_tag": parent::TAG, "n": 1, "envs": envs}));
    let secret = spawn(json!({"API_KEY": "hunter2"}));
    let plain = spawn(json!({}));
    let ids = [&secret, &plain].map(|children| children[0]["id"].as_str().unwrap().to_owned());
    assert_eq!(daemon().sh(&ids[0], "echo \"$API_KEY\""), "hunter2\n");
    assert_eq!(daemon().sh(&ids[1], "echo \"$API_KEY\"; env | grep -c hunter2 || true"), "\n0\n");
    daemon().delete(&ids);
}

fn unix_now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap().as_secs_f64()
}

/// The wall clock of this computer, put forward; put back when dropped.
struct Future(Duration);

impl Future {
    fn by(time: Duration) -> Future {
        shift_clock(time.as_secs() as i64);
        Future(time)
    }
}

impl Drop for Future {
    fn drop(&mut self) {
        shift_clock(-(self.0.as_secs() as i64));
    }
}

fn shift_clock(seconds: i64) {
    use rustix::time::{ClockId, clock_gettime, clock_settime};
    let mut now = clock_gettime(ClockId::Realtime);
    now.tv_sec += seconds;
    clock_settime(ClockId::Realtime, now).unwrap();
}

/// Asks a child for its clocks: how far its wall clock is off at most, and its monotonic clock since the
/// parent was frozen.
fn clocks(id: &str) -> (f64, f64) {
    let asked = unix_now();
    let answer = daemon().eval(id, "(time.time(), time.monotonic() - frozen_at[1])");
    let answered = unix_now();
    let (wall, monotonic) = answer.trim_matches(['(', ')']).split_once(", ").unwrap();
    let wall: f64 = wall.parse().unwrap();
    let off = (asked - wall).max(wall - answered).max(0.0);
    (off, monotonic.parse().unwrap())
}

#[test]
fn clocks_are_right_after_a_fork_however_old_the_snapshot_is() {
    let fresh = fork(2);
    let hour = Duration::from_secs(3600);
    let (old, reports) = {
        let _future = Future::by(hour);
        let old = fork(2);
        let reports: Vec<_> = old.iter().map(|id| clocks(id)).collect();
        (old, reports)
    };
    let reports: Vec<_> = fresh.iter().map(|id| clocks(id)).chain(reports).collect();
    for (off, monotonic) in &reports {
        // The wall clock, to within what a message may take on a busy computer, and far from the hour that
        // one of them slept; and the other clock never jumps.
        assert!(*off < 20.0, "off by {off} s: {reports:?}");
        assert!((0.0..600.0).contains(monotonic), "{monotonic} s since the freeze: {reports:?}");
    }
    // The daemon's own measure, taken at the child's first answer, has no Python in between.
    for id in &old {
        let before = daemon().eval(id, "time.monotonic()").parse::<f64>().unwrap();
        let after = daemon().eval(id, "time.monotonic()").parse::<f64>().unwrap();
        assert!(after > before);
    }
    daemon().delete(&[fresh, old].concat());
}

#[test]
fn a_write_to_the_disk_of_one_child_is_seen_by_nobody_else() {
    let first = fork(2);
    for id in &first {
        // What the parent wrote and never synced is there, and belongs to what is on the disk.
        assert_eq!(daemon().sh(id, "cat /root/parent.txt"), "of the parent");
        daemon().sh(id, &format!("echo {id} > /root/mine; rm /root/parent.txt; echo {id} > /etc/motd; sync"));
        daemon().sh(id, "echo 3 > /proc/sys/vm/drop_caches");
    }
    let later = fork(1);
    for id in &first {
        assert_eq!(daemon().sh(id, "cat /root/mine /etc/motd"), format!("{id}\n{id}\n"));
        assert!(daemon().sh(id, "ls /root/parent.txt 2>&1 || true").contains("No such file"));
    }
    assert_eq!(daemon().sh(&later[0], "cat /root/parent.txt; ls /root"), "of the parentparent.txt\n");
    for id in first.iter().chain(&later) {
        let errors = daemon().sh(id, "dmesg | grep -ciE 'ext4-fs (error|warning)|i/o error' || true");
        assert_eq!(errors.trim(), "0", "{}", daemon().sh(id, "dmesg | tail -n 30"));
    }
    daemon().delete(&[first, later].concat());
}

#[test]
fn memory_is_the_childs_own_page_by_page_under_write_load() {
    let children = fork(3);
    let digest = "hashlib.sha256(pattern).hexdigest()";
    let original = daemon().eval(&children[0], digest);
    // Each writes its own pattern over every second page, all at once, several times.
    std::thread::scope(|scope| {
        for (index, id) in children.iter().enumerate().skip(1) {
            let code = format!(
                "for _ in range(3):\n    for at in range(0, len(pattern), 8192):\n        \
                 pattern[at:at + 4096] = bytes([{index}]) * 4096"
            );
            scope.spawn(move || daemon().eval(id, &code));
        }
    });
    assert_eq!(daemon().eval(&children[0], digest), original, "a child saw what another wrote");
    for (index, id) in children.iter().enumerate().skip(1) {
        let code = format!(
            "all(pattern[at:at + 4096] == bytes([{index}]) * 4096 for at in range(0, len(pattern), 8192)) \
             and all(pattern[at:at + 4096] == hashlib.sha256(b'parent').digest() * 128 \
             for at in range(4096, len(pattern), 8192))"
        );
        assert_eq!(daemon().eval(id, &code), "True", "child {index}");
    }
    let later = fork(1);
    assert_eq!(daemon().eval(&later[0], digest), original, "the parent saw what a child wrote");
    daemon().delete(&[children, later].concat());
}

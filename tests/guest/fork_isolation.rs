//! Between the fork and the moment a child is its own: no user process may run, or siblings would draw
//! the same random numbers. Played without a daemon, which would close the window at once.

use std::time::Duration;

use forkd_protocol::agent::BecomeRequest;
use forkd_tests::eventually;
use forkd_tests::monitor::{Guest, Monitor};
use serde_json::{Value, json};

use crate::assets::assets;

fn call(monitor: &Monitor, method: &str, body: &Value) -> Value {
    let headers = [("content-type", "application/json")];
    let body = body.to_string();
    let response =
        monitor.agent("POST", &format!("/forkd.Agent/{method}"), &headers, body.as_bytes()).unwrap();
    assert_eq!(response.status, 200, "{method}: {response:?}");
    response.json()
}

/// Lines of sixteen hexadecimal digits the guest's program wrote to its console.
fn ticks(monitor: &Monitor) -> Vec<String> {
    let console = monitor.console();
    let words = console.lines().map(|line| line.replace(' ', "").trim().to_owned());
    words.filter(|word| word.len() == 16 && word.bytes().all(|byte| byte.is_ascii_hexdigit())).collect()
}

#[test]
fn no_user_process_runs_in_a_child_before_it_is_its_own() {
    let assets = assets();
    let mut parent = Monitor::start();
    parent.boot_to_agent(Guest { vcpus: 2, disks: vec![(&assets.disk, true)], ..assets.guest() });
    parent.start_in_background("while :; do head -c 8 /dev/urandom | od -An -tx1 > /dev/console; done");
    eventually("the program's first words", || (ticks(&parent).len() > 2).then_some(()));
    assert_eq!(call(&parent, "Freeze", &json!({"timeoutMs": 120_000}))["frozen"], true);
    parent.freeze();

    let children = [parent.fork("one"), parent.fork("two")];
    std::thread::sleep(Duration::from_secs(3));
    for child in &children {
        assert_eq!(ticks(child), [""; 0], "a program ran before the child was its own");
    }
    for (index, child) in children.iter().enumerate() {
        let request = BecomeRequest {
            sandbox_id: format!("sbchild{index}"),
            hostname: format!("sbchild{index}"),
            machine_id: format!("{index:032x}"),
            unix_nanos: 1_800_000_000_000_000_000,
            entropy: Some(vec![index as u8; 64]),
            envs: Default::default(),
        };
        call(child, "Become", &serde_json::to_value(request).unwrap());
        eventually("the program to go on", || (ticks(child).len() > 2).then_some(()));
        // Set from the request, not guessed from the snapshot.
        assert!(child.sh("date +%s").starts_with("18000000"), "{}", child.sh("date +%s"));
    }
    // The first word may have been drawn before the freeze, and be on its way through the pipe since.
    let [one, two] = [0, 1].map(|index: usize| ticks(&children[index]).split_off(1));
    assert!(one.iter().all(|word| !two.contains(word)), "{one:?} {two:?}");
}

#[test]
fn a_source_that_is_thawed_again_goes_on_where_it_was() {
    let assets = assets();
    let mut guest = Monitor::start();
    guest.boot_to_agent(Guest { disks: vec![(&assets.disk, true)], ..assets.guest() });
    guest.start_in_background("i=0; while :; do i=$((i + 1)); echo $i >> /run/count; sleep 0.05; done");
    // Read by the agent itself: a command would be a user process, and frozen like the others.
    let count = || {
        let file = guest.agent("GET", "/files?path=/run/count", &[], b"").unwrap();
        Some(String::from_utf8_lossy(&file.body).lines().count())
    };
    eventually("the program to count", || count().filter(|count| *count > 3));
    assert_eq!(call(&guest, "Freeze", &json!({"timeoutMs": 120_000}))["frozen"], true);
    let frozen = eventually("a number", count);
    std::thread::sleep(Duration::from_millis(500));
    assert_eq!(count(), Some(frozen), "a frozen program counted");
    call(&guest, "Thaw", &json!({}));
    eventually("the program to go on", || count().filter(|count| *count > frozen));
}

//! A guest of a few instructions whose children know whether their memory is of one instant, and what the
//! tests of branches natively share.

use std::collections::BTreeSet;
use std::time::{Duration, Instant};

use forkd_tests::daemon::Daemon;
use forkd_tests::eventually;
use forkd_tests::http::Response;
use serde_json::{Value, json};

use crate::fanout::no_library;

forkd_vmm::guest_code! {
    /// Writes the number of the round and of the page at both ends of each of 4096 pages, over and over, and
    /// reports ready after the first round. When its generation id changes, which makes it a child, it checks
    /// all of them: those before the page it is at are of this round, all others of the one before. Only if
    /// that holds does it report ready and go on writing.
    pub(crate) fn writes_pages,
    "mov rbx, qword ptr [0xe8000]",
    "mov rcx, qword ptr [0xe8008]",
    "mov r8, 0x1000000",
    "mov r9, 4096",
    "mov r10, 1",
    "xor r11, r11",
    "xor r12, r12",
    "2: mov rax, r10",
    "shl rax, 20",
    "or rax, r11",
    "mov rdi, r11",
    "shl rdi, 12",
    "add rdi, r8",
    "mov qword ptr [rdi], rax",
    "mov qword ptr [rdi + 4088], rax",
    "inc r11",
    "cmp r11, r9",
    "jb 3f",
    "xor r11, r11",
    "inc r10",
    "test r12, r12",
    "jnz 3f",
    "inc r12",
    "mov dx, 0x602",
    "out dx, al",
    "3: cmp rbx, qword ptr [0xe8000]",
    "jne 4f",
    "cmp rcx, qword ptr [0xe8008]",
    "je 2b",
    "4: mov rbx, qword ptr [0xe8000]",
    "mov rcx, qword ptr [0xe8008]",
    "xor rsi, rsi",
    "5: mov rax, r10",
    "cmp rsi, r11",
    "jb 6f",
    "dec rax",
    "6: shl rax, 20",
    "or rax, rsi",
    "mov rdi, rsi",
    "shl rdi, 12",
    "add rdi, r8",
    "cmp qword ptr [rdi], rax",
    "jne 7f",
    "cmp qword ptr [rdi + 4088], rax",
    "jne 7f",
    "inc rsi",
    "cmp rsi, r9",
    "jb 5b",
    "mov dx, 0x602",
    "out dx, al",
    "jmp 2b",
    "7: mov al, 'X'",
    "mov dx, 0x3f8",
    "out dx, al",
    "8: hlt",
    "jmp 8b",
}

/// The tag of its snapshot.
pub(crate) const TAG: &str = "pattern";
/// Its memory. Little: all of it is read whenever the snapshot comes from disk.
pub(crate) const MEM_MIB: u64 = 64;

/// A daemon with a snapshot of the guest.
pub(crate) fn daemon_with_pattern(serve: &[&str]) -> Daemon {
    let daemon = Daemon::start_with(serve, &[], no_library());
    make_pattern(&daemon);
    daemon
}

/// Makes a snapshot of the guest.
pub(crate) fn make_pattern(daemon: &Daemon) {
    let kernel = daemon.data_dir().join("pattern.elf");
    std::fs::write(&kernel, forkd_vmm::asm_guest::elf_kernel(writes_pages())).unwrap();
    let body = json!({"tag": TAG, "kernel": kernel, "network": false, "mem_size_mib": MEM_MIB});
    assert_eq!(daemon.snapshot(body)["status"], "ready");
}

/// Forks a child, which has found its memory to be of one instant when this returns.
pub(crate) fn child(daemon: &Daemon, tag: &str) -> String {
    let children = daemon.spawn(json!({"snapshot_tag": tag, "network": false}));
    let id = children[0]["id"].as_str().unwrap().to_owned();
    daemon.leave_time_for_savers(&id);
    id
}

/// Forks a child and lets it go again.
pub(crate) fn check(daemon: &Daemon, tag: &str) {
    let child = child(daemon, tag);
    daemon.delete(&[child]);
}

/// What is known of a tag, if anything is.
pub(crate) fn find(daemon: &Daemon, tag: &str) -> Option<Value> {
    let response = daemon.request("GET", &format!("/v1/snapshots/{tag}"), None);
    assert!([200, 404].contains(&response.status), "{tag}: {response:?}");
    (response.status == 200).then(|| response.json())
}

/// All tags.
pub(crate) fn tags(daemon: &Daemon) -> BTreeSet<String> {
    let list = daemon.request("GET", "/v1/snapshots", None).json();
    list.as_array().unwrap().iter().map(|info| info["tag"].as_str().unwrap().to_owned()).collect()
}

/// Deletes snapshots, dependents before those they depend on, whatever the order they are named in.
pub(crate) fn delete_all(daemon: &Daemon, tags: &[String]) {
    for tag in tags {
        let response = daemon.delete_snapshot(tag, "?cascade=true");
        assert!([204, 404].contains(&response.status), "{tag}: {response:?}");
    }
}

/// The word of an answer that is an error.
pub(crate) fn error(response: &Response) -> String {
    response.json()["error"].as_str().unwrap_or_else(|| panic!("{response:?}")).to_owned()
}

/// Waits until what is on the disk is what snapshots refer to: no layer too many or too few, no draft.
pub(crate) fn store_is_tidy(daemon: &Daemon) {
    let folder = daemon.data_dir().join("snapshots");
    let names = |folder: &std::path::Path| -> BTreeSet<String> {
        let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
        entries.map(|entry| entry.file_name().to_string_lossy().into_owned()).collect()
    };
    let tidy = || {
        let tags = tags(daemon);
        let layers =
            tags.iter().flat_map(|tag| daemon.snapshot_info(tag)["layers"].as_array().unwrap().clone());
        let needed: BTreeSet<String> =
            layers.map(|layer| layer["digest"].as_str().unwrap().to_owned()).collect();
        let there = names(&folder.join(".layers"));
        let folders =
            names(&folder).into_iter().filter(|name| folder.join(name).is_dir() && name != ".layers");
        let folders: BTreeSet<String> = folders.collect();
        let seen = format!("tags {tags:?}, folders {folders:?}, layers {needed:?}, on disk {there:?}");
        (needed == there && folders == tags, seen)
    };
    let until = Instant::now() + Duration::from_secs(60);
    eventually("the store to be tidy", || {
        let (tidy, seen) = tidy();
        assert!(tidy || Instant::now() < until, "{seen}\n{}", daemon.log());
        tidy.then_some(())
    });
}

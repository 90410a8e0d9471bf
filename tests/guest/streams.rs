//! Commands with streams, and files, in guests: `forkd shell`, `forkd exec -it`, `forkd cp`.

use std::io::{BufRead, BufReader, Read, Write};
use std::os::fd::OwnedFd;
use std::path::Path;
use std::process::{Child, Stdio};

use forkd_tests::eventually;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::pty::{OpenptFlags, grantpt, openpt, ptsname, unlockpt};
use rustix::termios::Winsize;

use crate::parent::{daemon, fork};

fn data(len: u32) -> Vec<u8> {
    (0..len).map(|n| (n.wrapping_mul(2_654_435_761) >> 24) as u8).collect()
}

/// A terminal as a user has one: its controlling side, and the other for a program.
fn terminal() -> (std::fs::File, OwnedFd) {
    let control = openpt(OpenptFlags::RDWR | OpenptFlags::NOCTTY).unwrap();
    grantpt(&control).unwrap();
    unlockpt(&control).unwrap();
    let name = ptsname(&control, Vec::new()).unwrap();
    let flags = rustix::fs::OFlags::RDWR | rustix::fs::OFlags::NOCTTY;
    let user = rustix::fs::open(name.as_c_str(), flags, rustix::fs::Mode::empty()).unwrap();
    (control.into(), user)
}

fn size(control: &std::fs::File, cols: u16, rows: u16) {
    let size = Winsize { ws_row: rows, ws_col: cols, ws_xpixel: 0, ws_ypixel: 0 };
    rustix::termios::tcsetwinsize(control, size).unwrap();
}

/// Reads until `text` has come.
fn expect(control: &mut std::fs::File, text: &str) {
    let mut seen = Vec::new();
    let mut piece = [0; 4096];
    while !String::from_utf8_lossy(&seen).contains(text) {
        let mut waiting = [PollFd::new(control, PollFlags::IN)];
        let ready = poll(&mut waiting, Some(&Timespec { tv_sec: 300, tv_nsec: 0 })).unwrap();
        assert!(ready > 0, "no {text:?} in {}", String::from_utf8_lossy(&seen));
        let count = control.read(&mut piece).unwrap_or(0);
        assert!(count > 0, "no {text:?} in {}", String::from_utf8_lossy(&seen));
        seen.extend_from_slice(&piece[..count]);
    }
}

/// How a program ends.
fn status(child: &mut Child) -> Option<i32> {
    eventually("a program to end", || child.try_wait().unwrap()).code()
}

fn signal(child: &Child, signal: rustix::process::Signal) {
    rustix::process::kill_process(rustix::process::Pid::from_child(child), signal).unwrap();
}

/// How many processes in the guest have `word` in their command line.
fn processes(id: &str, word: &str) -> usize {
    // Not a word of the command that looks for it.
    let (first, rest) = word.split_at(1);
    let script = format!("cat /proc/[0-9]*/cmdline | tr '\\0' ' ' | grep -o '[{first}]{rest}' | wc -l");
    let output = daemon().forkd_output(&["exec", id, "--", "sh", "-c", &script], b"");
    String::from_utf8_lossy(&output.stdout).trim().parse().unwrap()
}

#[test]
fn a_shell_has_a_terminal_its_size_its_keys_and_its_status() {
    let id = fork(1).remove(0);
    let (mut control, user) = terminal();
    size(&control, 91, 33);
    let before = rustix::termios::tcgetattr(&user).unwrap();
    let stream = || Stdio::from(user.try_clone().unwrap());
    let mut shell =
        daemon().forkd(&["shell", &id]).stdin(stream()).stdout(stream()).stderr(stream()).spawn().unwrap();
    expect(&mut control, "# ");
    control.write_all(b"stty size\r").unwrap();
    expect(&mut control, "33 91");
    size(&control, 60, 20);
    // It is not this process's terminal, so the kernel sends no signal by itself.
    signal(&shell, rustix::process::Signal::WINCH);
    control.write_all(b"while [ \"$(stty size)\" != '20 60' ]; do sleep 0.1; done; echo si''zed\r").unwrap();
    expect(&mut control, "sized");
    // A key that stops what runs, and not the shell. The program itself reports that it runs: by then the
    // shell has started it.
    control.write_all(b"sh -c 'echo sta\"\"rted; exec sleep 600'\r").unwrap();
    expect(&mut control, "started");
    control.write_all(b"\x03").unwrap();
    control.write_all(b"echo sto''pped $?\r").unwrap();
    expect(&mut control, "stopped 130");
    control.write_all(b"exit 7\r").unwrap();
    assert_eq!(status(&mut shell), Some(7));
    let after = rustix::termios::tcgetattr(&user).unwrap();
    assert_eq!((before.local_modes, before.input_modes), (after.local_modes, after.input_modes));

    // One that is asked to leave takes its shell along, and puts the terminal back, too.
    let mut shell = daemon()
        .forkd(&["exec", "-it", &id, "--", "sh", "-c", "echo rea''dy; sleep 4321"])
        .stdin(stream())
        .stdout(stream())
        .stderr(stream())
        .spawn()
        .unwrap();
    expect(&mut control, "ready");
    signal(&shell, rustix::process::Signal::TERM);
    assert_eq!(status(&mut shell), Some(128 + 15));
    let after = rustix::termios::tcgetattr(&user).unwrap();
    assert_eq!(before.local_modes, after.local_modes);
    eventually("its processes to go", || (processes(&id, "sleep 4321") == 0).then_some(()));
    daemon().forkd_output(&["kill", &id], b"");
}

#[test]
fn input_of_megabytes_passes_a_killed_client_ends_its_command_and_a_sandbox_that_ends_says_so() {
    let id = fork(1).remove(0);
    let data = data(5 << 20);
    let output = daemon().forkd_output(&["exec", "-i", &id, "--", "cat"], &data);
    assert!(output.status.success() && output.stdout == data, "{} bytes", output.stdout.len());
    let output = daemon().forkd_output(&["shell", &id, "--user", "nobody"], b"id -un; exit 5\n");
    assert_eq!((output.status.code(), &output.stdout[..]), (Some(5), &b"nobody\n"[..]), "{output:?}");

    let begin = |script: &str| {
        let args = ["exec", "-i", &id, "--", "sh", "-c", script];
        let mut child = daemon()
            .forkd(&args)
            .stdin(Stdio::piped())
            .stdout(Stdio::piped())
            .stderr(Stdio::piped())
            .spawn()
            .unwrap();
        let mut line = String::new();
        BufReader::new(child.stdout.take().unwrap()).read_line(&mut line).unwrap();
        assert_eq!(line, "ready\n");
        child
    };
    let mut client = begin("echo ready; sleep 1234; :");
    assert!(processes(&id, "sleep 1234") > 0);
    client.kill().unwrap();
    client.wait().unwrap();
    eventually("the command to go with its client", || (processes(&id, "sleep 1234") == 0).then_some(()));

    let mut paused = begin("echo ready; sleep 2345; :");
    assert!(daemon().forkd_output(&["pause", &id], b"").status.success());
    let mut why = String::new();
    paused.stderr.take().unwrap().read_to_string(&mut why).unwrap();
    assert!(why.contains("was paused"), "{why}");
    assert_eq!(paused.wait().unwrap().code(), Some(125));
    let output = daemon().forkd_output(&["cp", &format!("{id}:/etc/passwd"), "-"], b"");
    assert_eq!(output.status.code(), Some(1));
    assert!(String::from_utf8_lossy(&output.stderr).contains("is paused"), "{output:?}");
    assert!(daemon().forkd_output(&["resume", &id], b"").status.success());
    eventually("what nobody hears to be ended", || (processes(&id, "sleep 2345") == 0).then_some(()));

    let mut ended = begin("echo ready; sleep 3456");
    assert!(daemon().forkd_output(&["kill", &id], b"").status.success());
    let mut why = String::new();
    ended.stderr.take().unwrap().read_to_string(&mut why).unwrap();
    assert!(why.contains("has ended") && why.contains("deleted"), "{why}");
    assert_eq!(ended.wait().unwrap().code(), Some(125));
}

#[test]
fn files_and_folders_go_in_and_come_out_as_they_are_and_nothing_hostile_gets_out() {
    let id = fork(1).remove(0);
    let here = tempfile::tempdir().unwrap();
    let path = |name: &str| here.path().join(name).to_str().unwrap().to_owned();
    let there = |path: &str| format!("{id}:{path}");
    let cp = |args: &[&str], stdin: &[u8]| daemon().forkd_output(&[&["cp"], args].concat(), stdin);
    let sh = |script: &str| {
        let output = daemon().forkd_output(&["exec", &id, "--", "sh", "-c", script], b"");
        assert!(output.status.success(), "{output:?}");
        String::from_utf8(output.stdout).unwrap()
    };
    let data = data(6 << 20);
    std::fs::create_dir_all(path("tree/inner/empty")).unwrap();
    std::fs::write(path("tree/large"), &data).unwrap();
    std::fs::write(path("tree/inner/a b"), "small").unwrap();
    let executable = std::os::unix::fs::PermissionsExt::from_mode(0o755);
    std::fs::set_permissions(path("tree/inner/a b"), executable).unwrap();
    std::os::unix::fs::symlink("/etc/passwd", path("tree/link")).unwrap();
    assert_eq!(cp(&[&path("tree"), &there("/srv/")], b"").status.code(), Some(2), "a folder needs -r");
    let output = cp(&["-r", "--json", &path("tree"), &there("/srv")], b"");
    assert_eq!(output.status.code(), Some(1), "a link is left out: {output:?}");
    let told: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&told["files"], &told["folders"]), (&2.into(), &3.into()), "{told}");
    assert_eq!(told["skipped"][0]["reason"], "a link");
    let sum =
        sh("cd /srv/tree; sha256sum < large; stat -c %a 'inner/a b'; ls -A inner; test -e link || echo none");
    std::fs::write(path("sum"), &data).unwrap();
    let ours =
        std::process::Command::new("sha256sum").stdin(std::fs::File::open(path("sum")).unwrap()).output();
    let ours = String::from_utf8(ours.unwrap().stdout).unwrap();
    assert_eq!(sum, format!("{ours}755\na b\nempty\nnone\n"));

    // Attacks of a guest on a client that copies out of it.
    sh("cd /srv/tree; ln -s / up; ln -s /etc/shadow secret; mkfifo pipe; mkdir ..evil; touch '..evil/-rf'");
    std::fs::create_dir(path("out")).unwrap();
    let output = cp(&["-r", &there("/srv/tree"), &path("out")], b"");
    assert_eq!(output.status.code(), Some(1));
    let why = String::from_utf8_lossy(&output.stderr).into_owned();
    for left_out in ["tree/up: a link", "tree/secret: a link", "tree/pipe: neither file nor folder"] {
        assert!(why.contains(left_out), "{why}");
    }
    assert!(std::fs::read(path("out/tree/large")).unwrap() == data);
    assert!(
        Path::new(&path("out/tree/..evil/-rf")).exists() && Path::new(&path("out/tree/inner/empty")).exists()
    );
    assert!(["up", "secret", "pipe"].iter().all(|name| !Path::new(&path("out/tree")).join(name).exists()));

    // Standard streams, and what cannot be.
    assert!(cp(&["-", &there("/srv/new/place")], b"from a pipe").status.success());
    assert_eq!(cp(&[&there("/srv/new/place"), "-"], b"").stdout, b"from a pipe");
    assert!(cp(&[&there("/proc/version"), &path("version")], b"").status.success());
    assert!(std::fs::read_to_string(path("version")).unwrap().starts_with("Linux version"));
    for (args, why) in [
        ([there("/srv/none"), path("x")], "there is no /srv/none"),
        ([path("sum"), there("relative")], "not absolute"),
        ([path("sum"), there("/proc/nothing")], "/proc/nothing"),
    ] {
        let output = cp(&[&args[0], &args[1]], b"");
        assert_eq!(output.status.code(), Some(1), "{output:?}");
        assert!(String::from_utf8_lossy(&output.stderr).contains(why), "{output:?}");
    }
    sh("mount -t tmpfs -o size=1m none /mnt");
    let full = cp(&[&path("sum"), &there("/mnt/large")], b"");
    assert!(String::from_utf8_lossy(&full.stderr).contains("disk is full"), "{full:?}");
    assert_eq!(sh("ls -A /mnt"), "", "nothing is left of it");
    let nobody = cp(&["--user", "nobody", &path("sum"), &there("/srv/mine")], b"");
    assert!(
        String::from_utf8_lossy(&nobody.stderr).to_lowercase().contains("permission denied"),
        "{nobody:?}"
    );
    daemon().forkd_output(&["kill", &id], b"");
}

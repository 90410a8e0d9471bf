//! What needs no guest: doctor, images, wrong usage.

use std::fs;
use std::process::{Command, Output};

use forkd_tests::binary;
use serde_json::Value;

pub(crate) fn forkd(data_dir: Option<&std::path::Path>, args: &[&str]) -> Output {
    let mut command = Command::new(binary("forkd"));
    command.args(args).stdin(std::process::Stdio::null());
    if let Some(folder) = data_dir {
        // A machine of the test's own is given up sooner than one that others may be loading.
        command.env("FORKD_DATA_DIR", folder).env("FORKD_MACHINE_WATCHDOG_SECS", "30");
    }
    command.output().unwrap()
}

pub(crate) fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

#[test]
fn doctor_names_every_check_with_a_verdict_and_a_fix() {
    let output = forkd(None, &["doctor", "--json"]);
    let report: Value = serde_json::from_slice(&output.stdout).unwrap();
    let checks = report["checks"].as_array().unwrap();
    for check in checks {
        let status = check["status"].as_str().unwrap();
        assert!(["pass", "warn", "fail", "skip"].contains(&status), "{check}");
        assert!(!check["detail"].as_str().unwrap().is_empty(), "{check}");
        assert!(
            ["pass", "skip"].contains(&status) || !check["fix"].as_str().unwrap_or_default().is_empty(),
            "no fix: {check}"
        );
    }
    let names: Vec<&str> = checks.iter().map(|check| check["name"].as_str().unwrap()).collect();
    for name in ["platform", "kvm", "machine", "cgroups", "nftables", "data-dir", "binaries", "daemon"] {
        assert!(names.contains(&name), "{name} is not among {names:?}");
    }
    let kvm = checks.iter().find(|check| check["name"] == "kvm").unwrap();
    match report["will_use"].as_str().unwrap() {
        "kvm" => assert_eq!(kvm["status"], "pass", "{kvm}"),
        "machine" => {
            assert_ne!(kvm["status"], "pass", "{kvm}");
            assert!(kvm.to_string().contains("emulated machine"), "{kvm}");
        }
        other => panic!("will use {other}?"),
    }
    let plain = text(&forkd(None, &["doctor"]).stdout);
    assert!(names.iter().all(|name| plain.contains(name)), "{plain}");
}

#[test]
fn images_are_built_from_folders_and_tars_listed_and_removed() {
    let data = tempfile::tempdir().unwrap();
    let source = tempfile::tempdir().unwrap();
    fs::create_dir_all(source.path().join("usr/bin")).unwrap();
    fs::copy("/bin/sh", source.path().join("usr/bin/sh")).unwrap();
    std::os::unix::fs::symlink("usr/bin", source.path().join("bin")).unwrap();
    let tar = data.path().join("root.tar");
    let made =
        Command::new("tar").arg("-C").arg(source.path()).arg("-cf").arg(&tar).arg(".").status().unwrap();
    assert!(made.success());

    for (name, kind, path) in [("one", "--folder", source.path()), ("two", "--tar", tar.as_path())] {
        let args = ["image", "build", name, kind, path.to_str().unwrap(), "--size-mib", "64"];
        let output = forkd(Some(data.path()), &args);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let disk = data.path().join("images").join(name).join("disk.ext4");
        let check = Command::new("e2fsck").args(["-f", "-n"]).arg(&disk).output().unwrap();
        assert!(check.status.success(), "{}", text(&check.stdout));
    }
    let list: Value =
        serde_json::from_slice(&forkd(Some(data.path()), &["image", "ls", "--json"]).stdout).unwrap();
    let names: Vec<&str> = list.as_array().unwrap().iter().map(|i| i["name"].as_str().unwrap()).collect();
    assert_eq!(names, ["one", "two"]);
    let again =
        forkd(Some(data.path()), &["image", "build", "one", "--folder", source.path().to_str().unwrap()]);
    assert!(!again.status.success() && text(&again.stderr).contains("--force"), "{}", text(&again.stderr));
    assert!(forkd(Some(data.path()), &["image", "rm", "one", "two"]).status.success());
    assert!(!forkd(Some(data.path()), &["image", "rm", "one"]).status.success());
}

#[test]
fn an_image_that_cannot_work_is_refused_with_the_reason() {
    let data = tempfile::tempdir().unwrap();
    let empty = tempfile::tempdir().unwrap();
    fs::write(empty.path().join("readme"), "no shell here").unwrap();
    let output =
        forkd(Some(data.path()), &["image", "build", "x", "--folder", empty.path().to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("/bin/sh"), "{}", text(&output.stderr));

    let broken = data.path().join("broken.tar");
    fs::write(&broken, vec![7u8; 3000]).unwrap();
    let output = forkd(Some(data.path()), &["image", "build", "x", "--tar", broken.to_str().unwrap()]);
    assert_eq!(output.status.code(), Some(1));
    assert!(text(&output.stderr).contains("broken.tar"), "{}", text(&output.stderr));
    let output = forkd(Some(data.path()), &["image", "build", "../x", "--tar", "y"]);
    assert_eq!(output.status.code(), Some(2));
    let list: Value =
        serde_json::from_slice(&forkd(Some(data.path()), &["image", "ls", "--json"]).stdout).unwrap();
    assert_eq!(list.as_array().unwrap().len(), 0);
}

#[test]
fn every_command_explains_itself_with_an_example() {
    for args in [
        &["--help"][..],
        &["run", "--help"],
        &["serve", "--help"],
        &["doctor", "--help"],
        &["token", "print", "--help"],
        &["image", "build", "--help"],
        &["machine", "shell", "--help"],
    ] {
        let output = forkd(None, args);
        assert!(output.status.success(), "{args:?}");
        let help = text(&output.stdout);
        assert!(help.contains("Example") || help.contains("Exit status"), "{args:?}: {help}");
    }
}

//! What the tests of several clients share: the SDKs' packages, the daemon, and one warmed snapshot.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::OnceLock;

use forkd_tests::binary;
use serde_json::Value;

use crate::cli::{forkd, text};
use crate::pip::must;

/// The snapshot that all sandboxes of these tests are forked from. It stays for the next run.
pub(crate) const TAG: &str = "sdk";

/// Address, token and snapshot, as the drives read them. The snapshot is made if it is missing.
pub(crate) fn settings() -> [(&'static str, String); 3] {
    // This starts the daemon if none runs.
    let found = must(forkd(None, &["token", "print", "--json"]), "forkd token print");
    let found: Value = serde_json::from_slice(&found.stdout).unwrap();
    let listed = must(forkd(None, &["images", "--json"]), "forkd images");
    let listed: Value = serde_json::from_slice(&listed.stdout).unwrap();
    let ready = |it: &Value| it["tag"] == TAG && it["status"] == "ready";
    if !listed.as_array().unwrap().iter().any(ready) {
        // One that an earlier run left unfinished.
        forkd(None, &["rmi", "--cascade", TAG]);
        let args = ["snapshot", "--tag", TAG, "--image", "python", "--warm-python", "import json"];
        must(forkd(None, &args), "forkd snapshot");
    }
    let field = |name: &str| found[name].as_str().unwrap().to_owned();
    [("FORKD_URL", field("url")), ("FORKD_TOKEN", field("token")), ("DRIVE_TAG", TAG.into())]
}

/// The package whose name ends so, as `make dist` builds it: `scripts/dist-sdks.sh` runs once for all tests.
pub(crate) fn package(ending: &str) -> PathBuf {
    static BUILT: OnceLock<PathBuf> = OnceLock::new();
    let folder = BUILT.get_or_init(|| {
        let folder = binary("forkd").with_file_name("sdk-packages");
        let script = Path::new(env!("CARGO_MANIFEST_DIR")).join("../scripts/dist-sdks.sh");
        must(Command::new(script).arg(&folder).output().unwrap(), "scripts/dist-sdks.sh");
        folder
    });
    let mut files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    files.find(|path| path.to_str().unwrap().ends_with(ending)).unwrap()
}

#[test]
fn the_packages_of_the_sdks_have_the_license_and_the_notice() {
    for (ending, list) in [
        (".whl", &["python3", "-m", "zipfile", "-l"][..]),
        (".tar.gz", &["tar", "-tzf"][..]),
        (".tgz", &["tar", "-tzf"][..]),
    ] {
        let listed = Command::new(list[0]).args(&list[1..]).arg(package(ending)).output().unwrap();
        let names = text(&must(listed, "the files of the package").stdout);
        let has = |name: &str| names.split_whitespace().any(|path| path.ends_with(&format!("/{name}")));
        assert!(has("LICENSE") && has("NOTICE"), "{ending}: {names}");
    }
}

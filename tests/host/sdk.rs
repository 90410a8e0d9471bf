//! What the tests of several clients share: the daemon, and one warmed snapshot.

use serde_json::Value;

use crate::cli::forkd;
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

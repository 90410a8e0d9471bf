//! The Python SDK: its wheel, as `make dist` builds it, installed into an environment of its own; its unit tests, its
//! types, and all that it can do against the daemon that everything here uses.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Output, Stdio};
use std::sync::OnceLock;

use forkd_tests::binary;
use serde_json::Value;

use crate::cli::{forkd, text};
use crate::pip::{environment, must};
use crate::sdk;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");
/// The snapshot that all sandboxes here are forked from: the drive makes it if it is missing, and leaves it.
pub(crate) const TAG: &str = "sdk-python";

/// The programs of the environment with the wheel, and the wheel's own Python.
pub(crate) struct Sdk {
    python: PathBuf,
    folder: PathBuf,
}

impl Sdk {
    /// Installs the wheel of a release, once: the tests see what a user gets, and not the tree.
    pub(crate) fn install() -> &'static Sdk {
        static INSTALLED: OnceLock<Sdk> = OnceLock::new();
        INSTALLED.get_or_init(Sdk::build)
    }

    fn build() -> Sdk {
        let folder = Path::new(SOURCES).join("sdk/python").canonicalize().unwrap();
        let programs =
            environment("sdk-python", &folder.join("tests/requirements.txt"), &["--require-hashes"]);
        let python = programs.join("python");
        let mut pip = Command::new(&python);
        pip.args(["-m", "pip", "--disable-pip-version-check", "install", "--quiet", "--no-deps"]);
        pip.arg("--force-reinstall").arg(sdk::package(".whl"));
        must(pip.output().unwrap(), "pip");
        Sdk { python, folder }
    }

    /// A Python of the environment, in a folder from which the tree's own package is not found.
    pub(crate) fn python(&self) -> Command {
        let mut command = Command::new(&self.python);
        command.current_dir(self.folder.join("tests")).env("FORKD_SOURCES", SOURCES);
        command.env("PYTHONDONTWRITEBYTECODE", "1").stdout(Stdio::piped()).stderr(Stdio::piped());
        command
    }
}

fn finished(child: Child, what: &str) -> String {
    let output: Output = child.wait_with_output().unwrap();
    text(&must(output, what).stdout)
}

#[test]
fn the_wheel_of_the_python_sdk_does_all_that_it_offers() {
    let sdk = Sdk::install();
    // There is a daemon from here on.
    let found: Value = serde_json::from_slice(&forkd(None, &["token", "print", "--json"]).stdout).unwrap();
    // The machine is one CPU; what needs no guest runs on another one meanwhile.
    let unit = sdk.python().args(["-m", "pytest", "-q", "-p", "no:cacheprovider", "."]).spawn().unwrap();
    let path = format!("{}:{}", binary("forkd").parent().unwrap().display(), std::env::var("PATH").unwrap());
    let drive = sdk
        .python()
        .arg("drive.py")
        .args(["docs/PYTHON.md", "README.md"].map(|page| sdk.folder.join("../..").join(page)))
        .env("PATH", path)
        .env("FORKD_URL", found["url"].as_str().unwrap())
        .env("FORKD_TOKEN", found["token"].as_str().unwrap())
        .env("DRIVE_TAG", TAG)
        .spawn()
        .unwrap();
    let passed = finished(unit, "the unit tests of the Python SDK");
    assert!(passed.contains(" passed") && !passed.contains("skipped"), "{passed}");
    let printed = finished(drive, "the drive of the Python SDK");
    assert!(printed.contains("the Python SDK works"), "{printed}");
    println!("{printed}");
}

#[test]
fn the_python_sdk_is_typed_strictly_for_python_3_9() {
    let sdk = Sdk::install();
    let mut pyright = sdk.python();
    pyright.args(["-m", "pyright", "--project"]).arg(&sdk.folder).arg("--pythonpath").arg(&sdk.python);
    let printed = text(&must(pyright.output().unwrap(), "pyright").stdout);
    assert!(printed.contains("0 errors"), "{printed}");
}

#[test]
fn beside_the_distribution_of_the_reference_the_python_sdk_says_so() {
    let sdk = Sdk::install();
    let beside = sdk.python.parent().unwrap().with_file_name("beside");
    let metadata = beside.join("forkd-0.5.3.dist-info");
    std::fs::create_dir_all(&metadata).unwrap();
    std::fs::write(metadata.join("METADATA"), "Metadata-Version: 2.1\nName: forkd\nVersion: 0.5.3\n")
        .unwrap();
    let ran =
        sdk.python().args(["-c", "import forkd"]).env("PYTHONPATH", &beside).stdout(Stdio::null()).output();
    let ran = ran.unwrap();
    let printed = text(&ran.stderr);
    assert!(
        !ran.status.success() && printed.contains("two distributions have the module `forkd`"),
        "{printed}"
    );
    let import = sdk.python().args(["-c", "import forkd"]).output().unwrap();
    must(import, "import forkd");
}

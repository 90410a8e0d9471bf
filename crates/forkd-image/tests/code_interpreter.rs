//! The Python programs of the code interpreter, tested by Python: with a kernel that is a coroutine of the test.

use std::path::Path;
use std::process::Command;

#[test]
fn the_code_interpreter_passes_its_own_tests() {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/code_interpreter");
    let mut command = Command::new("python3");
    command.args(["-m", "unittest", "discover"]).arg(folder).env("PYTHONDONTWRITEBYTECODE", "1");
    let Ok(output) = command.output() else {
        println!("NOT RUN: the code interpreter's tests (there is no python3; scripts/setup.sh installs it)");
        return;
    };
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    if text.contains("skipped") {
        println!(
            "NOT RUN: charts and tables of the code interpreter (matplotlib and pandas are not installed)"
        );
    }
}

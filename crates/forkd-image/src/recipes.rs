//! The images that forkd builds by itself.

use crate::additions::{Additions, PlacedFile, USER_ID};
use crate::build::{ImageSource, ImageSpec};

/// Names of the images forkd knows how to build by itself.
pub const PREDEFINED: &[&str] = &["python", "base", "code-interpreter-v1"];

/// Packages that `base` has, and every image for programs that use the E2B API.
const BASE: &str = "bash coreutils python3 python3-pip git curl ca-certificates procps iproute2 sudo";
/// Packages that the code interpreter needs besides those.
const INTERPRETER: &str = "python3-ipykernel python3-jupyter-client python3-numpy python3-pandas python3-matplotlib \
                           python3-pexpect python3-filetype nodejs";
/// Kernels that the distribution lacks. All they depend on is in [`INTERPRETER`].
const KERNELS_OF_PIP: &[&str] = &["bash_kernel==0.10.0", "deno==2.9.8"];
/// The JavaScript kernel. It brings the native part for the distribution's Node.js, and compiles nothing.
const KERNELS_OF_NPM: &[&str] = &["ijavascript@5.2.1"];
/// What packages of [`INTERPRETER`] bring for compilers and debuggers: about 230 MiB.
const LEFT_OUT: &[&str] =
    &["/usr/include/boost/*", "/usr/lib/x86_64-linux-gnu/openblas-pthread/*.a", "/usr/share/unicode/*"];

/// The program that a warm-up starts.
const PROGRAM: &str = "/usr/local/bin/forkd-code-interpreter";
/// In a sandbox `pip install` is right: there is no other user, and the system ends with the sandbox.
const PIP_CONFIG: &str = "[global]\nbreak-system-packages = true\n";

macro_rules! module {
    ($name:literal) => {
        PlacedFile::text(
            concat!("usr/lib/python3/dist-packages/forkd_code_interpreter/", $name),
            0o644,
            include_str!(concat!("code_interpreter/forkd_code_interpreter/", $name)),
        )
    };
}

/// The files of the code interpreter.
fn interpreter_files() -> Vec<PlacedFile> {
    vec![
        PlacedFile::text(&PROGRAM[1..], 0o755, include_str!("code_interpreter/forkd-code-interpreter")),
        PlacedFile::text(
            "etc/forkd/forked.d/50-code-interpreter",
            0o755,
            include_str!("code_interpreter/fork-hook"),
        ),
        module!("__init__.py"),
        module!("__main__.py"),
        module!("charts.py"),
        module!("contexts.py"),
        module!("events.py"),
        module!("guest.py"),
        module!("http.py"),
        module!("kernel.py"),
        module!("kernels.py"),
        module!("languages.py"),
        module!("server.py"),
    ]
}

/// The recipe for `name`, if there is one.
pub(crate) fn find(name: &str) -> Option<ImageSpec> {
    match name {
        "python" => {
            let mut spec = from_packages(
                name,
                &["bash coreutils python3 python3-numpy ca-certificates procps iproute2"],
            );
            spec.warm.python = Some("import numpy".into());
            Some(spec)
        }
        "base" => {
            let mut spec = from_packages(name, &[BASE]);
            spec.additions = for_users();
            Some(spec)
        }
        "code-interpreter-v1" => {
            let mut spec = from_packages(name, &[BASE, INTERPRETER]);
            spec.additions = for_users();
            spec.additions.files.extend(interpreter_files());
            spec.additions.pip = KERNELS_OF_PIP.iter().map(|&name| name.into()).collect();
            spec.additions.pip_without_dependencies = true;
            spec.additions.npm = KERNELS_OF_NPM.iter().map(|&name| name.into()).collect();
            spec.additions.left_out = LEFT_OUT.iter().map(|&path| path.into()).collect();
            spec.warm.command = vec![PROGRAM.into()];
            Some(spec)
        }
        _ => None,
    }
}

fn from_packages(name: &str, lists: &[&str]) -> ImageSpec {
    let packages = lists.iter().flat_map(|list| list.split_whitespace()).map(str::to_owned).collect();
    ImageSpec::new(name, ImageSource::Packages { suite: None, packages })
}

/// A user that may do everything, and a pip that installs.
fn for_users() -> Additions {
    Additions {
        sudo: true,
        files: vec![
            PlacedFile::text("etc/pip.conf", 0o644, PIP_CONFIG),
            // Python only looks there if the folder exists when it starts, and pip makes it later.
            PlacedFile::folder("home/user/.local/lib/{python}/site-packages", USER_ID),
            // The agent makes files with the rights of their user. Some frameworks work here unless they are configured
            // otherwise.
            PlacedFile::folder("workspace", USER_ID),
        ],
        ..Additions::default()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_predefined_name_has_a_recipe_with_a_definition_of_its_own() {
        let definitions: std::collections::BTreeSet<String> =
            PREDEFINED.iter().map(|name| find(name).unwrap().definition().unwrap()).collect();
        assert_eq!(definitions.len(), PREDEFINED.len());
        assert!(find("other").is_none());
    }

    #[test]
    fn the_code_interpreter_is_installed_as_a_whole_and_warmed() {
        let spec = find("code-interpreter-v1").unwrap();
        assert_eq!(spec.warm.command, [PROGRAM]);
        let folder = std::path::Path::new(env!("CARGO_MANIFEST_DIR"))
            .join("src/code_interpreter/forkd_code_interpreter");
        for entry in std::fs::read_dir(folder).unwrap() {
            let name = entry.unwrap().file_name().into_string().unwrap();
            let is_there = spec.additions.files.iter().any(|file| file.path.ends_with(&format!("/{name}")));
            assert!(is_there || !name.ends_with(".py"), "{name} is not in the image");
        }
    }
}

//! The user `user` with sudo.

use std::fs::File;
use std::io::Read;

use rustix::fs::OFlags;

use crate::additions::{Layer, USER_ID};
use crate::error::{Error, Result};
use crate::tree::Tree;

const NAME: &str = "user";
const SUDOERS: &str = "etc/sudoers.d/user";
const RULE: &str = "user ALL=(ALL:ALL) NOPASSWD: ALL\n";
/// The most that is read of a list of users.
const MAX_LIST: u64 = 1 << 20;

/// Adds the user if the image lacks one of that name, and lets it do everything.
pub(crate) fn add_user(tree: &Tree, layer: &mut Layer) -> Result<()> {
    if !tree.is_program("usr/bin/sudo") && !tree.is_program("usr/local/bin/sudo") {
        return Err(Error::Invalid(
            "the image has no sudo; add the package: `--extra sudo`, or an image that has it".into(),
        ));
    }
    let users = read(tree, "etc/passwd")?;
    if entry(&users, NAME).is_none() {
        if users.lines().any(|line| line.split(':').nth(2) == Some("1000")) {
            return Err(Error::Invalid(
                "the image has another user with the uid 1000, which the user `user` has; use another image, or \
                 rename that user"
                    .into(),
            ));
        }
        let shell = if tree.is_program("bin/bash") { "/bin/bash" } else { "/bin/sh" };
        append(layer, "etc/passwd", 0o644, &users, &format!("{NAME}:x:1000:1000::/home/{NAME}:{shell}"))?;
        let groups = read(tree, "etc/group")?;
        if entry(&groups, NAME).is_none() {
            append(layer, "etc/group", 0o644, &groups, &format!("{NAME}:x:1000:"))?;
        }
        let shadow = read(tree, "etc/shadow")?;
        if !shadow.is_empty() && entry(&shadow, NAME).is_none() {
            append(layer, "etc/shadow", 0o600, &shadow, &format!("{NAME}:!:19000:0:99999:7:::"))?;
        }
        layer.folder("home/user", 0o755, USER_ID)?;
    }
    layer.file(SUDOERS, 0o440, 0, RULE.as_bytes())
}

fn entry<'t>(list: &'t str, name: &str) -> Option<&'t str> {
    list.lines().find(|line| line.split(':').next() == Some(name))
}

fn append(layer: &mut Layer, path: &str, mode: u32, list: &str, line: &str) -> Result<()> {
    let separator = if list.is_empty() || list.ends_with('\n') { "" } else { "\n" };
    layer.file(path, mode, 0, format!("{list}{separator}{line}\n").as_bytes())
}

/// A file of the image as text; empty if there is none.
fn read(tree: &Tree, path: &str) -> Result<String> {
    let Ok(file) = tree.open(path.as_bytes(), OFlags::RDONLY | OFlags::NONBLOCK) else {
        return Ok(String::new());
    };
    let mut text = String::new();
    File::from(file)
        .take(MAX_LIST)
        .read_to_string(&mut text)
        .map_err(|error| Error::Invalid(format!("/{path} of the image cannot be read: {error}")))?;
    Ok(text)
}

//! `forkd from-image` and `forkd parent build`: images under the names older scripts use.

use anyhow::{Result, bail};
use forkd_protocol::names;
use serde_json::json;

use super::{Context, WrongUsage, snapshot};
use crate::args::{DaemonArgs, ExtraArgs, FromImageArgs, ParentBuildArgs};
use crate::images;
use crate::ui;

/// Builds the image if it is missing, warms it and saves it as a snapshot.
pub(crate) fn from_image(context: &Context, args: &FromImageArgs) -> Result<u8> {
    let daemon = &args.answer.daemon;
    let image = resolve(context, &args.image, None, &args.extras, Some(daemon))?;
    let body = json!({ "tag": args.tag, "image": image, "mem_size_mib": args.mem_size_mib });
    snapshot::warm(context, Some(&image), &args.tag, &body, &args.answer)
}

/// Builds the image if it is missing.
pub(crate) fn parent(context: &Context, args: &ParentBuildArgs) -> Result<u8> {
    let image = resolve(context, &args.image, args.output.as_deref(), &args.extras, None)?;
    images::ensure_image(&context.data, &image, context.ui)?;
    images::ensure_guest_kernel(&context.data, context.ui)?;
    if args.json.json {
        let images = images::list(&context.data)?;
        ui::print_json(&images.iter().find(|one| one.name == image))?;
    } else {
        ui::print(&image)?;
    }
    Ok(0)
}

/// The image to use: the named one, or one derived from it with the additions.
fn resolve(
    context: &Context,
    image: &str,
    output: Option<&str>,
    extras: &ExtraArgs,
    daemon: Option<&DaemonArgs>,
) -> Result<String> {
    if !names::is_valid_name(image) {
        return Err(WrongUsage::new(elsewhere(image)).into());
    }
    if output.is_none() && extras.extra.is_empty() && extras.size_mib.is_none() {
        return Ok(image.to_owned());
    }
    if daemon.is_some_and(|daemon| daemon.daemon_url.is_some()) {
        bail!(
            "--extra and --size-mib build an image, but the daemon at --daemon-url has its own images: build it there"
        );
    }
    let name = output.map_or_else(|| derived_name(image, extras), str::to_owned);
    images::derive(&context.data, image, &name, &extras.extra, extras.size_mib, context.ui)?;
    Ok(name)
}

/// The error for an image of a registry.
fn elsewhere(image: &str) -> String {
    let name: String =
        image.rsplit('/').next().unwrap_or_default().split([':', '@']).next().unwrap_or_default().into();
    let name = if names::is_valid_name(&name) { name } else { "mine".to_owned() };
    format!(
        "`{image}` is not the name of a local image, and forkd does not fetch images of registries: export it with \
         `docker export $(docker create {image}) > {name}.tar`, then `forkd image build {name} --tar {name}.tar`"
    )
}

/// The name of the derived image. The order of the packages does not change it, so that it is built once.
fn derived_name(image: &str, extras: &ExtraArgs) -> String {
    let mut parts = extras.extra.clone();
    parts.sort();
    parts.dedup();
    parts.extend(extras.size_mib.map(|size| format!("{size}m")));
    let suffix: String =
        parts.join("-").chars().map(|c| if c.is_ascii_alphanumeric() { c } else { '-' }).collect();
    let full = format!("{image}-{suffix}");
    if names::is_valid_name(&full) {
        return full;
    }
    // Too long for a name: its digest is as unique.
    let digest = <sha2::Sha256 as sha2::Digest>::digest(full.as_bytes());
    let base: String = image.chars().take(40).collect();
    format!("{base}-{}", crate::host::files::hex(&digest[..8]))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn extras(packages: &[&str]) -> ExtraArgs {
        ExtraArgs { extra: packages.iter().map(|name| (*name).to_owned()).collect(), size_mib: None }
    }

    #[test]
    fn the_same_packages_make_the_same_name_and_every_name_is_one() {
        assert_eq!(derived_name("python", &extras(&["jq", "git"])), "python-git-jq");
        assert_eq!(derived_name("python", &extras(&["git", "jq", "git"])), "python-git-jq");
        assert_eq!(derived_name("python", &extras(&["libstdc++6"])), "python-libstdc--6");
        let many: Vec<String> = (0..50).map(|number| format!("package{number}")).collect();
        let many: Vec<&str> = many.iter().map(String::as_str).collect();
        let name = derived_name("python", &extras(&many));
        assert!(names::is_valid_name(&name) && name.starts_with("python-"), "{name}");
    }

    #[test]
    fn a_registrys_name_is_answered_with_the_way_that_works() {
        let text = elsewhere("docker.io/library/node:22");
        assert!(text.contains("forkd image build node --tar node.tar"), "{text}");
        assert!(elsewhere("python:3.12-slim").contains("docker create python:3.12-slim"));
    }
}

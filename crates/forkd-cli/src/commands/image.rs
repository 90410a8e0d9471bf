//! `forkd image`.

use anyhow::Result;

use super::{Context, report};
use crate::args::{ImageBuildArgs, ImageRmArgs, JsonArgs};
use crate::images;
use crate::ui;

/// Builds an image on this host.
pub(crate) fn build(context: &Context, args: ImageBuildArgs) -> Result<()> {
    let json = args.json;
    let image = images::build(&context.data, args, context.ui)?;
    if json { ui::print_json(&image) } else { Ok(()) }
}

/// Lists images.
pub(crate) fn list(context: &Context, args: &JsonArgs) -> Result<()> {
    let images = images::list(&context.data)?;
    if args.json {
        return ui::print_json(&images);
    }
    let row = |image: &images::ImageRow| {
        vec![
            image.name.clone(),
            ui::bytes(image.disk_bytes),
            ui::bytes(image.used_bytes),
            image.problem.as_ref().map_or_else(|| image.source.clone(), |why| format!("damaged: {why}")),
        ]
    };
    ui::print(&ui::table(&["NAME", "DISK", "USED", "SOURCE"], &images.iter().map(row).collect::<Vec<_>>()))
}

/// Removes images; a failure does not stop the others.
pub(crate) fn remove(context: &Context, args: &ImageRmArgs) -> Result<u8> {
    let remove = |name: &String| images::remove(&context.data, name);
    let results = args.names.iter().map(|name| (name.as_str(), remove(name))).collect();
    report(context.ui, args.json, results, "removed")
}

//! The cgroup of a branch's template.

use std::sync::Arc;

use crate::error::Error;
use crate::host::cgroup::CgroupLimits;
use crate::snapshot::template::Template;
use crate::util::task::blocking;

/// Moves a branch from its source's cgroup, which ends with the source, to its own. Returns whether that succeeded.
pub(crate) async fn move_to_own_cgroup(template: &Arc<Template>) -> bool {
    let (lineage, id, pid) = (template.lineage.clone(), template.id.clone(), template.pid);
    let limits = CgroupLimits::of_template(template.about.guest.mem_size_mib);
    let moved = blocking("moving a branch", move || {
        let Some(cgroup) = &lineage.cgroup else { return Ok(()) };
        let own = cgroup.existing(&id).or_else(|_| cgroup.leaf(&id, &limits));
        let moved = own.and_then(|leaf| leaf.admit(pid));
        moved.map_err(|error| Error::host("cannot move a branch to its own cgroup", error))
    });
    let moved = moved.await;
    if let Err(error) = &moved {
        tracing::warn!(template = template.id, %error, "branch stays in the cgroup of its source");
    }
    moved.is_ok()
}

//! The last steps of becoming a child: which code of the user's runs in it, and in which order.
//!
//! Programs that know how to make others different come first, while those still stand still. A child
//! without such programs is thawed by one write.

use std::time::Duration;

use forkd_protocol::{
    agent::{FORK_HOOKS, FORK_HOOKS_AFTER},
    connect::Error,
};

use super::{
    Checked, Forking, cannot,
    hooks::{self, Runner},
};

/// How long all hooks may take together.
const HOOK_TIME: Duration = Duration::from_secs(10);

impl Forking {
    /// Lets the user's code run in a child that is its own. Processes are `frozen` until then.
    pub(super) fn wake(
        &self,
        request: &Checked,
        frozen: bool,
        warnings: &mut Vec<String>,
    ) -> Result<(), Error> {
        let cgroups = &self.processes.cgroups;
        let mut runner = Runner::new(&self.processes, HOOK_TIME);
        let hooks = hooks::find(&self.under_root(FORK_HOOKS));
        // Before any thaw, so that it is the first thing an interpreter does.
        if let Err(error) = self.python.forked(&request.variables) {
            warnings.push(format!("the Python interpreter could not be told that it was forked: {error}"));
        }
        if frozen
            && !hooks.is_empty()
            && let Err(error) = cgroups.hold()
        {
            warnings.push(format!("user processes run before hooks are done: {error}"));
            cgroups.thaw().map_err(cannot("let the user processes run"))?;
        }
        runner.run_all(&hooks, warnings);
        cgroups.thaw().map_err(cannot("let the user processes run"))?;
        runner.run_all(&hooks::find(&self.under_root(FORK_HOOKS_AFTER)), warnings);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

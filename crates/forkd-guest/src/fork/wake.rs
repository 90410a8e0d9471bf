//! The last steps of becoming a child: which code of the user's runs in it, and in which order.
//!
//! Programs that know how to make others different come first, while those still stand still; the
//! warmed interpreter is next if code in it waits for the news; then everything runs. A child in which
//! there is nothing of that kind is thawed by one write, and wakes no process for the news.

use std::time::Duration;

use forkd_protocol::{
    agent::{FORK_HOOKS, FORK_HOOKS_AFTER},
    connect::Error,
};

use super::{
    CheckedBecome, ForkService, cannot,
    hooks::{self, Runner},
};

/// How long all hooks may take together.
const HOOK_TIME: Duration = Duration::from_secs(10);
/// How long other processes wait for the interpreter to take the news in.
const NEWS_TIME: Duration = Duration::from_secs(5);

impl ForkService {
    /// Lets the user's code run in a child that is its own. Processes are `frozen` until then.
    pub(super) fn wake(
        &self,
        request: &CheckedBecome,
        frozen: bool,
        warnings: &mut Vec<String>,
    ) -> Result<(), Error> {
        let cgroups = &self.processes.cgroups;
        let mut runner = Runner::new(&self.processes, HOOK_TIME);
        let keys = self.host_keys();
        let due = keys.due(&request.sandbox_id);
        let hooks = hooks::find(&self.under_root(FORK_HOOKS));
        // Before any thaw, so that it is the first thing an interpreter does.
        let listener = self.python.forked(&request.variables).unwrap_or_else(|error| {
            warnings.push(format!("the Python interpreter could not be notified of the fork: {error}"));
            None
        });

        let mut held = false;
        if frozen && (!due.is_empty() || !hooks.is_empty() || listener.is_some()) {
            match cgroups.hold() {
                Ok(()) => held = true,
                Err(error) => {
                    warnings.push(format!("user processes run before hooks are done: {error}"));
                    cgroups.thaw().map_err(cannot("let the user processes run"))?;
                }
            }
        }
        if !due.is_empty() {
            keys.renew(&due, &request.sandbox_id, &mut runner, warnings);
        }
        runner.run_all(&hooks, warnings);
        if let Some(listener) = listener {
            let runs = match held {
                true => cgroups.thaw_alone(listener.pid()),
                false => Ok(true),
            };
            match runs {
                Ok(true) if listener.has_heard_within(NEWS_TIME) => {}
                Ok(true) => warnings.push(format!(
                    "the Python interpreter did not reseed and run its on_fork functions within \
                     {NEWS_TIME:?}: other processes run already"
                )),
                Ok(false) => warnings.push("the Python interpreter is not in its cgroup".into()),
                Err(error) => warnings.push(format!("the Python interpreter could not run first: {error}")),
            }
        }
        cgroups.thaw().map_err(cannot("let the user processes run"))?;
        runner.run_all(&hooks::find(&self.under_root(FORK_HOOKS_AFTER)), warnings);
        Ok(())
    }
}

#[cfg(test)]
mod tests;

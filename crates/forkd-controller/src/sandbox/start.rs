//! The start of a sandbox: a boot from an image, or a fork up to the agent's first answer.

use std::collections::BTreeMap;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::time::Instant;

use forkd_protocol::agent::{Pong, WarmRequest};

use crate::agent::bringup;
use crate::config::{Config, Timing};
use crate::error::Error;
use crate::host::disk_layer;
use crate::host::images::BootSource;
use crate::host::process::ProcessId;
use crate::monitor::{Launch, Monitor, MonitorEnd, boot_files, console, control_socket};
use crate::sandbox::lifetime::deadline;
use crate::sandbox::supervisor::{Outcome, PendingFork};
use crate::sandbox::{End, Sandbox};
use crate::snapshot::template::lost;

/// Why a guest did not come up.
enum Failure {
    /// The start was cancelled. A half-made sandbox is not left to the next daemon either.
    NoLongerDesired,
    /// The host's side failed: another attempt would fail too.
    Host(Error),
    /// The guest's side failed: the description, and the last lines of its console if the monitor sent them.
    Guest(String, Option<String>),
}

impl Sandbox {
    pub(super) async fn boot(
        &self,
        assets: &BootSource,
        warm: Option<&WarmRequest>,
        envs: &BTreeMap<String, String>,
        config: &Config,
    ) -> Result<Monitor, Outcome> {
        let mut retried = false;
        loop {
            let (failure, ended) = match self.attempt(assets, warm, envs, config).await {
                Ok(monitor) => return Ok(monitor),
                Err(failed) => failed,
            };
            let process = ended.as_ref().map(MonitorEnd::account).unwrap_or_default();
            let (detail, console_tail) = match failure {
                Failure::NoLongerDesired => return Err(Outcome::Ended(self.end_reason())),
                Failure::Host(error) => {
                    tracing::warn!(sandbox = self.id, %error, process, "boot failed");
                    let end = End::failed("boot_failed", &error, self.tail().await);
                    return Err(Outcome::Ended(end));
                }
                Failure::Guest(detail, console_tail) => (detail, console_tail),
            };
            let console_tail = match console_tail {
                Some(tail) => tail,
                None => self.tail().await,
            };
            // Under nested virtualization some boots end before the kernel's first output. Nothing of the guest
            // has run by then, so a second attempt does no harm.
            if console_tail.trim().is_empty() && !retried {
                tracing::warn!(
                    sandbox = self.id,
                    detail,
                    "the boot ended with an empty console; trying once more"
                );
                retried = true;
                continue;
            }
            tracing::warn!(sandbox = self.id, detail, process, "boot failed");
            let cause = ended.and_then(|ended| ended.cause());
            return Err(Outcome::Ended(End { cause, ..End::new("boot_failed", detail, console_tail) }));
        }
    }

    /// One boot. On failure the process is gone, and the error includes how it ended.
    async fn attempt(
        &self,
        assets: &BootSource,
        warm: Option<&WarmRequest>,
        envs: &BTreeMap<String, String>,
        config: &Config,
    ) -> Result<Monitor, (Failure, Option<MonitorEnd>)> {
        let begun = Instant::now();
        let host = |error| (Failure::Host(error), None);
        let launch = self.launch(config).map_err(host)?;
        let mut monitor = Monitor::launch(launch, config.timing.call).await.map_err(host)?;
        self.update_runtime(|runtime| runtime.pid = u32::try_from(monitor.pid()).ok());
        let outcome = tokio::select! {
            biased;
            _ = self.desired_changed() => Err(Failure::NoLongerDesired),
            up = self.bring_up(&mut monitor, assets, warm, envs, config) => up,
        };
        match outcome {
            Ok(pong) => {
                self.heard();
                let boot_ms = begun.elapsed().as_millis() as u64;
                self.update_runtime(|runtime| {
                    runtime.saved.deadline_unix =
                        runtime.time_to_live.map(deadline).or(runtime.saved.deadline_unix);
                    runtime.boot_ms = Some(boot_ms);
                    runtime.saved.python = Some(pong.python);
                });
                Ok(monitor)
            }
            Err(failure) => Err((failure, Some(monitor.end().await))),
        }
    }

    fn launch(&self, config: &Config) -> crate::error::Result<Launch> {
        let resources = self.resources();
        let procs_fd = resources.leaf.as_ref().map(|leaf| leaf.procs_fd()).transpose();
        Ok(Launch {
            id: self.id.clone(),
            folder: self.folder.clone(),
            vmm: config.vmm.clone(),
            uid: resources.lineage.as_ref().and_then(|lineage| lineage.uid()),
            procs_fd: procs_fd.map_err(|error| Error::host("cannot use a cgroup", error))?.map(Arc::new),
        })
    }

    /// An empty disk layer for the monitor to write to.
    fn layer(&self, config: &Config) -> crate::error::Result<OwnedFd> {
        match &self.resources().lineage {
            Some(lineage) => lineage.layer(&config.data_dir),
            None => disk_layer::layer(&config.data_dir),
        }
    }

    async fn bring_up(
        &self,
        monitor: &mut Monitor,
        assets: &BootSource,
        warm: Option<&WarmRequest>,
        envs: &BTreeMap<String, String>,
        config: &Config,
    ) -> Result<Pong, Failure> {
        let tap = self.resources().slot.as_mut().map(|slot| slot.take_tap()).transpose();
        let tap = tap.map_err(|error| Failure::Host(Error::host("cannot use a network slot", error)))?;
        let plan = boot_files::BootPlan {
            folder: self.folder.clone(),
            vcpus: self.spec.vcpus,
            mem_mib: self.spec.mem_mib,
            console_limit: config.limits.console_limit,
            tap,
            layer: Some(self.layer(config).map_err(Failure::Host)?),
        };
        let assets = assets.clone();
        let prepared = tokio::task::spawn_blocking(move || boot_files::prepare(plan, &assets)).await;
        let prepared = prepared.unwrap_or_else(|error| Err(Error::host("preparing a boot", error)));
        let (boot, fds) = prepared.map_err(Failure::Host)?;
        monitor.boot(boot, &fds, config.timing.boot).await.map_err(Failure::Host)?;
        drop(fds);
        let up = async {
            let pong = bringup::up(&self.agent, &config.timing).await?;
            // The sandbox runs without its name too, as with older agents.
            if let Err(error) = self.agent.name(&self.id, envs).await {
                if !envs.is_empty() {
                    return Err(format!("the guest did not take its variables: {}", error.public()));
                }
                tracing::debug!(sandbox = self.id, %error, "sandbox id not set in the guest");
            }
            match warm {
                // The sandbox is of use without it: its files are there, and commands run.
                Some(start) if start.until_usable => {
                    if let Err(error) = bringup::warm_up(&self.agent, start, &config.timing).await {
                        tracing::warn!(
                            sandbox = self.id,
                            error,
                            "command of the image not usable after a boot"
                        );
                    }
                }
                Some(warm) => bringup::warm_up(&self.agent, warm, &config.timing).await?,
                None => {}
            }
            Ok(pong)
        };
        tokio::select! {
            biased;
            end = monitor.wait() => {
                let console_tail = end.vm.as_ref().map(|vm| console::printable(vm.console_tail.as_bytes()));
                Err(Failure::Guest(end.describe(), console_tail))
            }
            up = up => up.map_err(|detail| Failure::Guest(detail, None)),
        }
    }

    /// Completes a fork: waits for the template's answer and for the child's first, and records the process.
    pub(crate) async fn finish_fork(&self, fork: PendingFork, timing: &Timing) -> Result<Monitor, Outcome> {
        let PendingFork { pending, control, arrived, envs } = fork;
        let forked = tokio::select! {
            biased;
            forked = pending.forked => forked.unwrap_or_else(|_| Err(lost())),
            _ = self.desired_changed() => {
                control_socket::stop_unseen(control);
                return Err(Outcome::Ended(self.end_reason()));
            }
        };
        let forked = match forked {
            Ok(forked) => forked,
            Err(error) => {
                // A template that was killed may have forked the child before.
                control_socket::stop_unseen(control);
                return Err(Outcome::Ended(self.fork_failed(&error)));
            }
        };
        self.telemetry.metrics.spawn_fork.observe(arrived.elapsed().as_secs_f64());
        let pid = forked.pid;
        let monitor = Monitor::forked(self.id.clone(), self.folder.clone(), forked, control, pending.ended);
        let monitor =
            monitor.map_err(|error| self.fork_failed(&Error::host("cannot watch its process", error)));
        let mut monitor = monitor.map_err(Outcome::Ended)?;
        self.update_runtime(|runtime| runtime.pid = u32::try_from(pid).ok());

        let answered = tokio::select! {
            biased;
            answered = self.first_answer(&mut monitor, &envs, timing) => answered,
            _ = self.desired_changed() => Err(Failure::NoLongerDesired),
        };
        let took = arrived.elapsed();
        // The sandbox is half-made until here: with the process record the next daemon adopts it.
        let recorded = answered.and_then(|python| {
            let template = self.resources().template.as_ref().map_or(0, |template| template.pid);
            let identity = ProcessId::of_child(pid, template);
            let written =
                identity.and_then(|identity| self.write_if_not_deleted(|folder| identity.write(folder)));
            written.map_err(|error| Failure::Host(Error::host("cannot record its process", error)))?;
            Ok(python)
        });
        match recorded {
            Ok(python) => {
                self.telemetry.metrics.spawn_ready.observe(took.as_secs_f64());
                self.update_runtime(|runtime| {
                    runtime.ready_ms = Some(took.as_secs_f64() * 1e3);
                    runtime.saved.python = python.or(runtime.saved.python);
                });
                Ok(monitor)
            }
            Err(failure) => {
                let process = monitor.end().await;
                Err(match failure {
                    Failure::NoLongerDesired => Outcome::Ended(self.end_reason()),
                    Failure::Host(error) => Outcome::Ended(self.fork_failed(&error)),
                    Failure::Guest(detail, console_tail) => {
                        let detail = self.out_of_memory(process.status).unwrap_or(detail);
                        let tail = match console_tail {
                            Some(tail) => tail,
                            None => self.tail().await,
                        };
                        Outcome::Ended(End {
                            cause: process.cause(),
                            ..End::new("fork_failed", detail, tail)
                        })
                    }
                })
            }
        }
    }

    /// Waits until a forked guest runs with its own identity. Returns whether it has a Python, if the agent tells.
    async fn first_answer(
        &self,
        monitor: &mut Monitor,
        envs: &BTreeMap<String, String>,
        timing: &Timing,
    ) -> Result<Option<bool>, Failure> {
        let failed = |end: MonitorEnd| {
            let tail = end.vm.as_ref().map(|vm| console::printable(vm.console_tail.as_bytes()));
            Failure::Guest(end.describe(), tail)
        };
        if self.spec.is_bare() {
            return match tokio::time::timeout(timing.boot, monitor.ready()).await {
                Ok(ready) => ready.map(|()| None).map_err(failed),
                Err(_) => {
                    let text = format!("the guest was not ready after {} s", timing.boot.as_secs());
                    Err(Failure::Guest(text, None))
                }
            };
        }
        tokio::select! {
            biased;
            end = monitor.wait() => Err(failed(end)),
            became = bringup::become_sandbox(&self.agent, &self.id, envs, timing) => {
                let became = became.map_err(|detail| Failure::Guest(detail, None))?;
                for warning in &became.warnings {
                    let warning = console::printable(warning.as_bytes());
                    tracing::warn!(sandbox = self.id, warning, "guest reports a warning after its fork");
                }
                self.heard();
                Ok(Some(became.python))
            }
        }
    }

    pub(super) fn fork_failed(&self, error: &Error) -> End {
        tracing::warn!(sandbox = self.id, %error, "fork failed");
        End::failed("fork_failed", error, String::new())
    }
}

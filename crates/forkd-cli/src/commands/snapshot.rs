//! `forkd snapshot`: requests a snapshot, shows its progress, and cancels it on ^C.

use std::path::PathBuf;
use std::time::{Duration, Instant};

use anyhow::{Context as _, Result, bail};
use hyper::Method;
use serde_json::{Value, json};

use super::branch::{self, WantedBranch};
use super::{Context, WrongUsage, prepare_image, with_daemon};
use forkd_api::{Code, SnapshotRequest, SnapshotStatus};

use crate::args::{AnswerArgs, BranchMode, SnapshotArgs};
use crate::client::types::{self, Snapshot};
use crate::client::{Daemon, Refused};
use crate::stream::signals::{Caught, Forwarded};
use crate::ui::{self, Ui};

/// The interval of requests for the progress.
const POLL_INTERVAL: Duration = Duration::from_millis(200);

/// Creates a snapshot and returns the exit status.
pub(crate) fn snapshot(context: &Context, args: &SnapshotArgs) -> Result<u8> {
    if let Some(id) = &args.from_sandbox {
        let mode = match (args.mode, args.diff, args.live) {
            (Some(mode), ..) => mode,
            (None, true, _) => BranchMode::Diff,
            (None, _, true) => BranchMode::Live,
            _ => BranchMode::Full,
        };
        if args.no_wait && mode != BranchMode::Live {
            return Err(WrongUsage::new(
                "--no-wait needs --mode live: other modes end when the branch is on disk",
            )
            .into());
        }
        let wanted = WantedBranch { id, tag: Some(&args.tag), mode, wait: !args.no_wait };
        return branch::keep(context, &wanted, &args.answer);
    }
    warm(context, args.image.as_deref(), &args.tag, &request(args)?, &args.answer)
}

/// Boots and warms the guest that `body` describes, and saves it under the tag.
pub(super) fn warm(
    context: &Context,
    image: Option<&str>,
    tag: &str,
    body: &Value,
    answer: &AnswerArgs,
) -> Result<u8> {
    if let Some(image) = image {
        prepare_image(context, &answer.daemon, image)?;
    }
    with_daemon(context, &answer.daemon, async |daemon| {
        let begun = Instant::now();
        let made = make(&daemon, tag, body, context.ui).await?;
        match made {
            CreateResult::Ready(made) if answer.json => ui::print_json(&made)?,
            CreateResult::Ready(answer) => ui::print(&describe(&types::read(&answer)?, begun.elapsed()))?,
            CreateResult::Cancelled(caught) => return Ok(caught.status()),
        }
        Ok(0)
    })
}

/// The request's body; the daemon chooses a default for each absent field.
fn request(args: &SnapshotArgs) -> Result<Value> {
    // The daemon has another working directory.
    let absolute = |name: &str, file: &Option<PathBuf>| {
        let Some(file) = file else { return Ok(None) };
        let path = std::path::absolute(file).with_context(|| format!("--{name}"))?;
        Ok::<_, anyhow::Error>(Some(
            path.to_str().with_context(|| format!("--{name}: the path is not text"))?.into(),
        ))
    };
    Ok(json!(SnapshotRequest {
        tag: args.tag.clone(),
        image: args.image.clone(),
        rootfs: absolute("rootfs", &args.rootfs)?,
        kernel: absolute("kernel", &args.kernel)?,
        vcpus: Some(args.guest.vcpus),
        mem_size_mib: Some(args.guest.mem_size_mib),
        warm_command: args.warm.iter().flat_map(|line| ["sh".into(), "-c".into(), line.clone()]).collect(),
        warm_python: args.warm_python.clone(),
        network: args.guest.no_network.then_some(false),
        ..SnapshotRequest::default()
    }))
}

/// The result of a request for a snapshot.
pub(super) enum CreateResult {
    /// It is ready; this is the daemon's description.
    Ready(Value),
    /// The user cancelled it.
    Cancelled(Caught),
}

/// Requests a snapshot and waits until it is ready, has failed or is cancelled.
pub(super) async fn make(daemon: &Daemon, tag: &str, body: &Value, ui: Ui) -> Result<CreateResult> {
    let mut signals = Forwarded::listen()?;
    // Wait for the reply also after a signal. Only an accepted request may be cancelled, because a
    // snapshot of that tag may be another user's.
    let asked = daemon.ask(Method::POST, "/v1/snapshots?wait=false", Some(body));
    let mut answer = match signals.finish(asked).await {
        Ok((answer, None)) => answer?,
        Ok((answer, Some(caught))) => {
            answer?;
            return cancel(daemon, tag, caught, &mut signals, ui).await;
        }
        Err(caught) => {
            ui.warn(format!(
                "interrupted before the daemon answered; `forkd rmi {tag}` cancels the snapshot"
            ));
            return Ok(CreateResult::Cancelled(caught));
        }
    };
    let progress = ui.progress(format!("snapshot {tag}"));
    let mut phases = PhaseTimes::new(Instant::now());
    loop {
        let snapshot: Snapshot = types::read(&answer)?;
        match snapshot.status {
            SnapshotStatus::Ready => {
                progress.done(&format!("snapshot {tag}: ready"));
                if let Some(warning) = &snapshot.warning {
                    ui.warn(format!("snapshot {tag}: {warning}"));
                }
                return Ok(CreateResult::Ready(answer));
            }
            SnapshotStatus::Failed | SnapshotStatus::Unknown => {
                let why = snapshot.error.as_deref().unwrap_or("the daemon gives no reason; see its log");
                bail!("snapshot {tag} could not be created: {why}");
            }
            SnapshotStatus::Writing => {
                if let Some(phase) = &snapshot.phase {
                    progress.update(&phases.see(phase, Instant::now()));
                }
            }
        }
        let polled = async {
            tokio::time::sleep(POLL_INTERVAL).await;
            daemon.ask(Method::GET, &types::snapshot_path(tag), None).await
        };
        let polled = tokio::select! {
            polled = polled => polled,
            caught = signals.next() => {
                drop(progress);
                return cancel(daemon, tag, caught, &mut signals, ui).await;
            }
        };
        answer = match polled {
            Err(error) if Refused::is(&error, Code::SnapshotNotFound) => {
                bail!("snapshot {tag} was removed during its creation, perhaps by `forkd rmi`")
            }
            other => other.with_context(|| format!("snapshot {tag}: `forkd images` shows its state"))?,
        };
    }
}

/// Cancels the request.
async fn cancel(
    daemon: &Daemon,
    tag: &str,
    caught: Caught,
    signals: &mut Forwarded,
    ui: Ui,
) -> Result<CreateResult> {
    let path = types::snapshot_path(tag);
    match signals.finish_save(daemon.ask(Method::DELETE, &path, None)).await {
        Ok((Err(error), _)) if !Refused::is(&error, Code::SnapshotNotFound) => {
            return Err(error)
                .with_context(|| format!("snapshot {tag} could not be cancelled: try `forkd rmi {tag}`"));
        }
        Ok(_) => ui.warn(format!("cancelled: snapshot {tag} is not created")),
        Err(_) => {
            ui.warn(format!("interrupted before the cancellation; `forkd rmi {tag}` cancels the snapshot"))
        }
    }
    Ok(CreateResult::Cancelled(caught))
}

/// The phases a snapshot goes through, with the time each took.
struct PhaseTimes {
    current: Option<String>,
    since: Instant,
    /// The last phase that has ended.
    past: String,
}

impl PhaseTimes {
    fn new(now: Instant) -> Self {
        PhaseTimes { current: None, since: now, past: String::new() }
    }

    /// Records the present phase; returns its line, which is the same until the phase changes.
    fn see(&mut self, phase: &str, now: Instant) -> String {
        if self.current.as_deref() != Some(phase) {
            if let Some(over) = self.current.replace(phase.to_owned()) {
                let took = now.saturating_duration_since(self.since).as_secs_f64();
                self.past = format!(" ({over} took {took:.1} s)");
            }
            self.since = now;
        }
        format!("{phase}{}", self.past)
    }
}

fn describe(snapshot: &Snapshot, took: Duration) -> String {
    format!(
        "{}: ready after {:.1} s, {} on disk; fork it with `forkd fork --tag {} -n 10`",
        snapshot.tag,
        took.as_secs_f64(),
        ui::bytes(snapshot.size()),
        snapshot.tag
    )
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::args::{Cli, Command};
    use clap::Parser;

    #[test]
    fn a_warm_up_is_a_shell_command_line_and_defaults_are_left_to_the_daemon() {
        let line = ["forkd", "snapshot", "--tag", "t", "--image", "python", "--warm", "a && b"];
        let Command::Snapshot(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        let body = request(&args).unwrap();
        assert_eq!(body["warm_command"], json!(["sh", "-c", "a && b"]));
        assert_eq!((&body["network"], &body["warm_python"]), (&Value::Null, &Value::Null));
        let line = [&line[..6], &["--no-network", "--warm-python", "import numpy"]].concat();
        let Command::Snapshot(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        let body = request(&args).unwrap();
        assert_eq!(body["network"], json!(false));
        assert_eq!(body["warm_python"], json!("import numpy"));
        assert_eq!(body["warm_command"], Value::Null);
    }

    #[test]
    fn a_disk_and_a_kernel_are_named_by_whole_paths_and_instead_of_an_image() {
        let line = ["forkd", "snapshot", "--tag", "t", "--kernel", "/srv/vmlinux", "--rootfs", "root.ext4"];
        let Command::Snapshot(args) = Cli::try_parse_from(line).unwrap().command else { panic!() };
        let body = request(&args).unwrap();
        let rootfs = std::env::current_dir().unwrap().join("root.ext4");
        assert_eq!((&body["kernel"], &body["rootfs"]), (&json!("/srv/vmlinux"), &json!(rootfs)));
        assert_eq!(body["image"], Value::Null);
        for wrong in [&line[..4], &[&line[..], &["--image", "python"]].concat()] {
            assert!(Cli::try_parse_from(wrong).is_err(), "{wrong:?}");
        }
    }

    #[test]
    fn each_phase_is_said_once_with_the_time_the_last_one_took() {
        let start = Instant::now();
        let mut phases = PhaseTimes::new(start);
        let at = |seconds| start + Duration::from_secs(seconds);
        assert_eq!(phases.see("booting", at(0)), "booting");
        assert_eq!(phases.see("booting", at(3)), "booting");
        assert_eq!(phases.see("warming", at(4)), "warming (booting took 4.0 s)");
        assert_eq!(phases.see("warming", at(5)), "warming (booting took 4.0 s)");
        assert_eq!(phases.see("saving", at(9)), "saving (warming took 5.0 s)");
    }
}

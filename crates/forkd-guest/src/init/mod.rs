//! PID 1: brings the guest up until it serves its host.
//!
//! The plan is in `/forkd/init.json` ([`InitPlan`]); the same binary starts a guest and the emulated machine.
//! Any failure is one line on the console and, if the guest cannot be used without that step, ends the guest:
//! a host that waits for the agent must not wait in vain.

mod limits;
mod modules;
mod mounts;
mod network;
mod shutdown;

use std::{
    fs, io,
    net::{Ipv4Addr, TcpListener},
    os::fd::OwnedFd,
    panic::catch_unwind,
    path::{Path, PathBuf},
    sync::Arc,
    thread,
    time::{Duration, Instant},
};

use forkd_protocol::agent::FORWARD_PORT;
use forkd_protocol::init::{InitPlan, InterfacePlan, ListenPlan};

use crate::{
    agent::{Agent, Config},
    fork::{self, BootId, System},
    forward, log,
    process::reaper,
    sys,
};

/// The plan, in the initramfs.
const PLAN: &str = "/forkd/init.json";
/// The agent's own folder.
const RUN_DIR: &str = "/run/forkd";
/// How long devices may take to appear.
const DEVICE_TIME: Duration = Duration::from_secs(10);
/// How often to look for them.
const DEVICE_TICK: Duration = Duration::from_millis(5);
/// For a thread that only accepts.
const LINES_STACK: usize = 256 << 10;

/// Something without which the guest cannot be used.
#[derive(Debug, thiserror::Error)]
#[error("{what}: {cause}")]
pub(crate) struct Fatal {
    what: String,
    cause: io::Error,
}

/// Adds the attempted step to an error.
fn attempt<T, E: Into<io::Error>>(result: Result<T, E>, what: impl FnOnce() -> String) -> Result<T, Fatal> {
    result.map_err(|cause| Fatal { what: what(), cause: cause.into() })
}

/// Runs as PID 1 of a guest, for ever.
pub fn run() -> ! {
    std::panic::set_hook(Box::new(|panic| log::error!("{panic}")));
    let fatal = match catch_unwind(start) {
        Ok(Ok(never)) => match never {},
        Ok(Err(fatal)) => fatal.to_string(),
        Err(_) => "the agent failed".into(),
    };
    log::error!("{fatal}");
    shutdown::power_off()
}

/// Brings the guest up and serves it.
fn start() -> Result<std::convert::Infallible, Fatal> {
    mounts::mount_early()?;
    log::use_kernel_log();
    limits::protect_agent();
    let plan = read_plan()?;
    modules::load_all(&plan.modules);
    mounts::mount_root(&plan.root)?;
    // The modules are in the kernel now; here they only take memory.
    let _ = fs::remove_dir_all("/forkd");
    mounts::switch_root()?;
    mounts::mount_rest(&plan.mounts)?;
    let cgroup = limits::make_user_cgroup();
    if !plan.hostname.is_empty()
        && let Err(errno) = rustix::system::sethostname(plan.hostname.as_bytes())
    {
        log::error!("cannot set the host name {:?}: {errno}", plan.hostname);
    }
    name_things(&plan);
    let boot_id = BootId::take_over(Path::new(RUN_DIR))
        .inspect_err(|error| log::error!("children have the same boot id: {error}"))
        .ok();
    network::configure(&plan.network);
    reaper::start();

    let forwards = matches!(plan.listen, ListenPlan::Vsock { .. });
    let (listener, token) = listen(plan.listen)?;
    let config = Config {
        default_user: plan.default_user,
        token,
        cgroup,
        run_dir: PathBuf::from(RUN_DIR),
        system: System { boot_id, ..System::guest() },
        shut_down: shutdown::shut_down,
    };
    let agent = Agent::new(config);
    let line_port = serve_lines(&agent, plan.line_port, &plan.network);
    if forwards {
        serve_forward(line_port);
    }
    log::info!("ready after {} ms", sys::uptime_ms());
    let cause = agent.serve(&listener);
    Err(Fatal { what: "cannot accept connections".into(), cause })
}

/// Writes the files that name this machine and those that know other names. A root that cannot be
/// written to keeps its own.
fn name_things(plan: &InitPlan) {
    let names = fork::IdentityFiles { root: Path::new("/"), run_dir: Path::new(RUN_DIR) };
    if let Err(error) = names.complete(&plan.hostname) {
        log::info!("the image keeps its names: {error}");
    }
    if !plan.name_servers.is_empty()
        && let Err(error) = fork::write_resolv_conf(Path::new("/"), &plan.name_servers)
    {
        log::error!("cannot write /etc/resolv.conf: {error}");
    }
}

fn read_plan() -> Result<InitPlan, Fatal> {
    let text = attempt(fs::read(PLAN), || format!("cannot read {PLAN} in the initramfs"))?;
    attempt(serde_json::from_slice(&text), || format!("{PLAN} in the initramfs is not a plan"))
}

fn listen(plan: ListenPlan) -> Result<(OwnedFd, Option<String>), Fatal> {
    match plan {
        ListenPlan::Vsock { port } => {
            let listener = attempt(sys::listen_vsock(port), || {
                format!("cannot listen on vsock port {port} (are the vsock modules in the initramfs?)")
            })?;
            Ok((listener, None))
        }
        ListenPlan::Tcp { port, token } => {
            let listener = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port));
            Ok((attempt(listener, || format!("cannot listen on TCP port {port}"))?.into(), Some(token)))
        }
    }
}

/// Serves the JSON-lines protocol on the side, and returns its port. An image whose guests cannot have it works
/// without.
fn serve_lines(agent: &Arc<Agent>, port: Option<u16>, network: &[InterfacePlan]) -> Option<u16> {
    let port = port?;
    let gateway = network.iter().find_map(|interface| interface.gateway.as_ref()?.parse().ok());
    let serving = TcpListener::bind((Ipv4Addr::UNSPECIFIED, port)).and_then(|listener| {
        let (agent, listener) = (agent.clone(), OwnedFd::from(listener));
        thread::Builder::new().name("lines".into()).stack_size(LINES_STACK).spawn(move || {
            log::error!("the JSON-lines protocol has ended: {}", agent.serve_lines(&listener, gateway));
        })
    });
    match serving {
        Ok(_) => Some(port),
        Err(error) => {
            log::error!("no JSON-lines protocol on TCP port {port}: {error}");
            None
        }
    }
}

/// Forwards connections of the host to TCP ports of the guest. A guest works without.
fn serve_forward(line_port: Option<u16>) {
    let serving = sys::listen_vsock(FORWARD_PORT).and_then(|listener| {
        thread::Builder::new().name("forwards".into()).stack_size(LINES_STACK).spawn(move || {
            log::error!("forwarding to TCP ports has ended: {}", forward::serve(&listener, line_port));
        })
    });
    if let Err(error) = serving {
        log::error!("no forwarding to TCP ports: {error}");
    }
}

/// Waits until `path` is there; `false` if it does not come.
fn wait_for(path: &Path, limit: Duration) -> bool {
    let until = Instant::now() + limit;
    while !path.exists() {
        if Instant::now() >= until {
            return false;
        }
        thread::sleep(DEVICE_TICK);
    }
    true
}

//! `forkd serve`: the daemon, in the foreground.

use std::time::Duration;

use anyhow::{Context as _, Result};
use forkd_controller::{Config, Timing, TlsFiles};
use forkd_net::FlowLimits;
use tokio::net::{TcpListener, TcpStream};
use tracing_subscriber::EnvFilter;

use super::Context;
use crate::args::{LogFormat, ServeArgs};
use crate::host::paths::Binaries;
use crate::log_format::Json;
use crate::machine::qemu;
use crate::stream::signals;

/// What is logged by default. The library of the Model Context Protocol logs ids of sessions.
const DEFAULT_FILTER: &str = "info,rmcp=warn";
/// How long threads may run on after the daemon has stopped.
const LAST_THREADS: Duration = Duration::from_secs(10);

/// Runs the daemon until a signal stops it.
pub(crate) fn serve(context: &Context, args: ServeArgs) -> Result<()> {
    let filter = EnvFilter::try_from_default_env().unwrap_or_else(|_| EnvFilter::new(DEFAULT_FILTER));
    let log = tracing_subscriber::fmt()
        .with_env_filter(filter)
        .with_writer(std::io::stderr)
        .with_ansi(false)
        // The report of a line that is not written would go to the same place, and panic there: a disk that is full of
        // logs must end no sandbox.
        .log_internal_errors(false);
    match args.log_format {
        LogFormat::Text => log.init(),
        LogFormat::Json => log.fmt_fields(Json).event_format(Json).init(),
    }
    let from_machine = args.in_machine;
    let config = configuration(context, args)?;
    let runtime = tokio::runtime::Builder::new_multi_thread().enable_all().build()?;
    signals::drain()?;
    let served = runtime.block_on(async {
        if from_machine {
            relay(config.bind).await?;
        }
        forkd_controller::serve(config, |_| {}).await?;
        Ok(())
    });
    // The next start finishes longer work, such as removing files.
    runtime.shutdown_timeout(LAST_THREADS);
    served
}

fn configuration(context: &Context, args: ServeArgs) -> Result<Config> {
    let binaries = Binaries::find()?;
    let mut config = Config::new(context.data.root());
    config.socket = args.socket.unwrap_or_else(|| context.data.socket());
    config.bind = args.bind;
    config.audit_log = args.audit_log;
    config.otlp_endpoint = args.otlp_endpoint;
    config.vmm = binaries.vmm;
    config.guest = binaries.guest;
    config.kernel = args.kernel;
    config.timing = Timing::new(args.boot_timeout_secs, args.unresponsive_secs);
    config.network_pool = args.network_pool as usize;
    config.egress_private = args.egress_private;
    config.slot_flows = FlowLimits {
        at_once: args.slot_max_flows,
        per_sec: args.slot_new_flows_per_sec,
        burst: args.slot_new_flows_burst,
    };
    config.agent_ports = args.agent_ports;
    config.limits.branch_max_age = args.branch_max_age.map(Duration::from_secs);
    config.limits.branch_max_count = args.branch_max_count;
    let unload_after = (args.branch_unload_secs > 0).then_some(args.branch_unload_secs);
    config.limits.branch_unload_after = unload_after.map(Duration::from_secs);
    config.limits.min_free_mib = args.min_free_mib;
    if let Some(most) = args.branch_concurrency {
        config.limits.max_branches = most as usize;
    }
    config.limits.rate_limit = args.rate_limit;
    config.insecure_loopback = args.insecure_loopback;
    config.tls = args.tls_cert.zip(args.tls_key).map(|(cert, key)| TlsFiles { cert, key });
    for folder in args.allow_paths {
        let folder =
            std::path::absolute(&folder).with_context(|| format!("cannot use {}", folder.display()))?;
        config.allow_paths.push(folder);
    }
    if let Some(library) = args.library {
        config.library_dir = library;
    }
    if let Some(file) = args.token_file {
        config.token_file = file;
    }
    Ok(config)
}

/// In the emulated machine, connections that QEMU forwards from the host's loopback arrive at the machine's
/// own address. This passes them on to the daemon, which serves loopback only, and refuses all others.
async fn relay(daemon: std::net::SocketAddr) -> Result<()> {
    let listener = TcpListener::bind((qemu::ADDRESS, qemu::REST_PORT))
        .await
        .with_context(|| format!("cannot listen on {}, the machine's own address", qemu::ADDRESS))?;
    tokio::spawn(async move {
        loop {
            match listener.accept().await {
                Ok((stream, peer)) if peer.ip() == qemu::GATEWAY => {
                    tokio::spawn(pass_on(stream, daemon));
                }
                Ok((_, peer)) => tracing::warn!(%peer, "refused a connection that QEMU did not forward"),
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection");
                    tokio::time::sleep(Duration::from_millis(100)).await;
                }
            }
        }
    });
    Ok(())
}

async fn pass_on(mut outside: TcpStream, daemon: std::net::SocketAddr) {
    let Ok(mut inside) = TcpStream::connect(daemon).await else { return };
    let _ = (outside.set_nodelay(true), inside.set_nodelay(true));
    // It ends when either side closes; no error needs a report.
    let _ = tokio::io::copy_bidirectional(&mut outside, &mut inside).await;
}

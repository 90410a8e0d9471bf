//! The daemon's start, its listeners and connections, and its orderly stop.

mod background;
pub(crate) mod bad_request_body;
pub(crate) mod lock;
pub(crate) mod reload;
pub(crate) mod stall_timeout;
pub(crate) mod tls;

use std::net::SocketAddr;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use axum::Router;
use axum::http::StatusCode;
use axum::response::Response;
use forkd_mcp::{HttpOptions, HttpServer};
use forkd_store::Database;
use hyper::server::conn::http1;
use hyper_util::rt::{TokioIo, TokioTimer};
use hyper_util::service::TowerToHyperService;
use tokio::io::{AsyncRead, AsyncWrite};
use tokio::net::{TcpListener, TcpStream, UnixListener, UnixStream};
use tokio::signal::unix::{SignalKind, signal};
use tokio::sync::Semaphore;
use tokio::task::JoinHandle;
use tokio_util::sync::CancellationToken;
use tokio_util::task::TaskTracker;
use tower::ServiceExt;

use crate::api::middleware::authenticate::Authenticator;
use crate::api::middleware::idempotency::IdempotencyStore;
use crate::api::{self, ApiContext};
use crate::auth::peer::Peer;
use crate::auth::rate_limit::Rates;
use crate::auth::tokens::Tokens;
use crate::branch::suspend;
use crate::compat::json_lines::ports::Ports;
use crate::config::Config;
use crate::daemon::bad_request_body::{RejectionBodyStream, RequestSeen};
use crate::daemon::lock::DataLock;
use crate::daemon::stall_timeout::{ClientStream, StallTimeout};
use crate::daemon::tls::Tls;
use crate::error::{Error, Result};
use crate::host::{Host, fd_limit, oom, run_dir, unix_socket};
use crate::sandbox::adopt;
use crate::sandbox::registry::Registry;
use crate::snapshot::registry::SnapshotRegistry;
use crate::telemetry::Telemetry;
use crate::util::fs::make_private_dir;
use crate::util::task::{self, Task, Vital, blocking};
use crate::workspace::Workspaces;

/// Idle time after which the kernel probes whether a TCP client still exists.
const KEEP_ALIVE: Duration = Duration::from_secs(60);
/// Timeout for the head of a request.
const HEADER_WAIT: Duration = Duration::from_secs(30);
/// Timeout for the end of all sandboxes at a stop. The next start removes the rest.
const CLOSE_WAIT: Duration = Duration::from_secs(30);
/// Pause after a failed `accept`, whose usual cause is a lack of descriptors.
const ACCEPT_PAUSE: Duration = Duration::from_millis(100);
/// File name of the database in the data directory.
const DATABASE: &str = "forkd.db";
/// The longest path a unix socket can have.
const SOCKET_PATH_MAX: usize = 107;
/// The longest suffix that a sandbox's socket adds to the path of the data directory.
const SOCKET_PATH_TAIL: usize = "/sandboxes/sb0123456789abcdef/next/control.sock".len();

/// The addresses of a running daemon.
#[derive(Debug, Clone)]
pub struct Ready {
    /// The TCP address, with the actual port.
    pub address: SocketAddr,
    /// The unix socket.
    pub socket: PathBuf,
    /// The file with the token for TCP.
    pub token_file: PathBuf,
}

/// Runs a daemon until SIGTERM or SIGINT. Calls `ready` when clients can connect. On return, sandboxes that are bound to
/// a connection have ended; all others, and the templates, keep running for the next daemon.
pub async fn serve(config: Config, ready: impl FnOnce(&Ready)) -> Result<()> {
    let caught = |error| Error::host("cannot catch signals", error);
    let mut terminate = signal(SignalKind::terminate()).map_err(caught)?;
    let mut interrupt = signal(SignalKind::interrupt()).map_err(caught)?;
    let stop = async move {
        tokio::select! {
            _ = terminate.recv() => {}
            _ = interrupt.recv() => {}
        }
    };
    serve_until(config, ready, stop).await
}

/// Runs a daemon until `stop` returns. See [`serve`].
pub async fn serve_until(
    mut config: Config,
    ready: impl FnOnce(&Ready),
    stop: impl Future<Output = ()>,
) -> Result<()> {
    check(&config)?;
    fd_limit::raise_limit();
    let made = |path: &Path| {
        make_private_dir(path).map_err(|e| Error::host(format!("cannot make {}", path.display()), e))
    };
    made(&config.data_dir)?;
    let _lock = DataLock::take(&config.data_dir)?;
    oom::spare_daemon();
    config.run_dir = run_dir::open(&config.data_dir)?;
    let left = [run_dir::sandboxes(&config.run_dir), run_dir::templates(&config.run_dir)];
    fd_limit::check_for_all_in(&left)?;
    let tls = config.tls.clone().map(Tls::open).transpose()?.map(Arc::new);
    let socket = config.socket.clone();
    let (_named, unix) = blocking("making the socket", move || unix_socket::listen(&socket)).await?;
    let listening = |error: std::io::Error| {
        let fix = match error.kind() {
            std::io::ErrorKind::AddrInUse => {
                "; stop the process that uses it, or choose another with --bind or FORKD_BIND"
            }
            _ => "",
        };
        Error::host(format!("cannot listen on {}", config.bind), format!("{error}{fix}"))
    };
    let unix = UnixListener::from_std(unix).map_err(listening)?;
    let tcp = TcpListener::bind(config.bind).await.map_err(listening)?;
    let address = tcp.local_addr().map_err(listening)?;

    let config = Arc::new(config);
    let stopping = CancellationToken::new();
    // Also when this returns early: what it began ends with it.
    let _stop = stopping.clone().drop_guard();
    let (path, token_file) = (config.data_dir.join(DATABASE), config.token_file.clone());
    let opened = blocking("opening the database", move || {
        let database = Arc::new(Database::open(&path)?);
        Ok((database.clone(), Arc::new(Tokens::open(database, token_file)?)))
    });
    let (database, tokens) = opened.await?;
    let telemetry = Telemetry::open(&config)?;
    let host = Host::new(config.clone(), database, telemetry.clone());
    let (registry, snapshots, workspaces) = take_over(&host).await?;
    let lines = Ports::new(registry.clone());
    lines.reopen();
    let app = ApiContext {
        registry,
        snapshots,
        workspaces,
        lines,
        tokens: tokens.clone(),
        config: config.clone(),
        stopping: stopping.clone(),
        address,
        answers: IdempotencyStore::new(host.database.clone(), config.limits.max_body),
        sessions: task::tracker(),
        mcp: HttpServer::new(HttpOptions::default(), stopping.clone()),
    };
    let mcp_sessions = background::start(&app, &stopping);
    let connections = Connections {
        stopping: stopping.clone(),
        count: task::tracker(),
        max: config.limits.max_connections,
        stall: config.timing.stall,
    };
    let authenticator = Authenticator {
        tokens: tokens.clone(),
        rates: Arc::new(Rates::new(config.limits.rate_limit)),
        failures: Arc::default(),
        remote: !config.bind.ip().is_loopback(),
        insecure: config.insecure_loopback,
    };
    let routers = (api::for_tcp(app.clone(), authenticator), api::for_unix(app.clone()));
    let certificate = tls.clone();
    let fresh =
        task::keep_running(Task::Refresh, move || reload::keep_fresh(tokens.clone(), certificate.clone()));
    // A daemon that no client can reach must end, so that its supervisor starts another one.
    let (vital, mut failed) = Vital::new();
    vital.spawn(Task::Accept, connections.clone().accept(tcp, routers.0, tls));
    vital.spawn(Task::Accept, connections.clone().accept(unix, routers.1, None));

    tracing::info!(%address, socket = %config.socket.display(), data = %config.data_dir.display(), "forkd is ready");
    ready(&Ready { address, socket: config.socket.clone(), token_file: config.token_file.clone() });

    let failure = tokio::select! {
        () = stop => None,
        error = failed.next() => Some(error),
    };
    stopping.cancel();
    close(&app, &host, &config, &connections, mcp_sessions).await;
    fresh.abort();
    telemetry.close().await;
    run_dir::close(&config.data_dir, &config.run_dir);
    tracing::info!("stopped");
    failure.map_or(Ok(()), Err)
}

/// Takes over the snapshots, templates, sandboxes and workspaces that an earlier daemon left.
async fn take_over(host: &Arc<Host>) -> Result<(Arc<Registry>, Arc<SnapshotRegistry>, Arc<Workspaces>)> {
    let (snapshots, leftovers) = SnapshotRegistry::open(host.clone()).await?;
    let registry = Registry::new(host.clone())?;
    let taken_over = async {
        adopt::adopt(&registry, leftovers).await?;
        let workspaces = Workspaces::open(registry.clone(), snapshots.clone()).await?;
        suspend::undo_unfinished(&registry, &snapshots, |name| workspaces.is_broken(name)).await;
        Ok(workspaces)
    };
    match taken_over.await {
        Ok(workspaces) => Ok((registry, snapshots, workspaces)),
        Err(error) => {
            // The next daemon adopts the sandboxes and templates, once its start succeeds.
            registry.close().await;
            snapshots.close().await;
            Err(error)
        }
    }
}

/// Waits for the requests that run, then ends the sandboxes that no daemon takes over, and the network slots.
async fn close(
    app: &ApiContext,
    host: &Arc<Host>,
    config: &Config,
    connections: &Connections,
    mcp_sessions: JoinHandle<()>,
) {
    tracing::info!("stopping");
    let drained = async {
        connections.count.wait().await;
        app.sessions.wait().await;
        // They end what they made.
        let _ = mcp_sessions.await;
    };
    if tokio::time::timeout(config.timing.drain, drained).await.is_err() {
        tracing::warn!("requests still running after the drain timeout; ending their sandboxes");
    }
    let closed = async {
        app.registry.close().await;
        app.snapshots.close().await;
        let slots = host.clone();
        host.cleanup_queue.run(move || slots.slots.close()).await;
    };
    if tokio::time::timeout(CLOSE_WAIT, closed).await.is_err() {
        tracing::error!("sandboxes still ending after the close timeout; the next start removes them");
    }
    // Clients that waited for a sandbox have an error now: leave time to send it.
    let _ = tokio::time::timeout(Duration::from_secs(1), connections.count.wait()).await;
}

fn check(config: &Config) -> Result<()> {
    let (bind, port) = (config.bind, config.bind.port());
    if !bind.ip().is_loopback() && config.insecure_loopback {
        let text =
            format!("refusing to listen on {bind} without a token: --insecure-loopback is for loopback only");
        return Err(Error::invalid(text));
    }
    if !bind.ip().is_loopback() && config.tls.is_none() {
        let text = format!(
            "refusing to listen on {bind} without TLS: give --tls-cert and --tls-key; or serve loopback only, and \
             reach it from elsewhere through an SSH tunnel (ssh -L {port}:127.0.0.1:{port} HOST)"
        );
        return Err(Error::invalid(text));
    }
    let room = SOCKET_PATH_MAX - SOCKET_PATH_TAIL;
    if config.data_dir.as_os_str().len() > room {
        let text = format!(
            "the data directory's path is too long for the sockets in it; use one of at most {room} bytes: {}",
            config.data_dir.display()
        );
        return Err(Error::invalid(text));
    }
    let slots = u32::try_from(config.limits.max_sandboxes).unwrap_or(u32::MAX);
    // The highest number is not a user id: the kernel reads it as "no change".
    if config.jail_uid_base == 0 || config.jail_uid_base.checked_add(slots).is_none_or(|end| end == u32::MAX)
    {
        return Err(Error::invalid(
            "the user ids for sandboxes must be above 0 and fit into 32 bits; choose another first user id",
        ));
    }
    Ok(())
}

/// A listener.
trait Accept: Send + 'static {
    type Stream: AsyncRead + AsyncWrite + Send + Unpin + 'static;
    fn next(&self) -> impl Future<Output = std::io::Result<(Self::Stream, Peer)>> + Send;
}

impl Accept for TcpListener {
    type Stream = TcpStream;
    async fn next(&self) -> std::io::Result<(TcpStream, Peer)> {
        let (stream, address) = self.accept().await?;
        #[cfg(test)]
        assert!(!tests::breaks(self), "a test asked for this");
        stream.set_nodelay(true)?;
        // A client whose computer is off sends no FIN. Keep-alive probes find such connections.
        rustix::net::sockopt::set_socket_keepalive(&stream, true)?;
        rustix::net::sockopt::set_tcp_keepidle(&stream, KEEP_ALIVE)?;
        Ok((stream, Peer::Tcp(address)))
    }
}

impl Accept for UnixListener {
    type Stream = UnixStream;
    async fn next(&self) -> std::io::Result<(UnixStream, Peer)> {
        let (stream, _) = self.accept().await?;
        let uid = stream.peer_cred()?.uid();
        Ok((stream, Peer::Unix { uid }))
    }
}

/// Settings and state that all connections share.
#[derive(Clone)]
struct Connections {
    stopping: CancellationToken,
    count: TaskTracker,
    /// At a time, on each listener: strangers on TCP must not crowd out the unix socket.
    max: usize,
    /// How long a client may take nothing of its reply.
    stall: Duration,
}

impl Connections {
    async fn accept<L: Accept>(self, listener: L, router: Router, tls: Option<Arc<Tls>>) {
        let stopping = &self.stopping;
        let room = Arc::new(Semaphore::new(self.max));
        loop {
            let Ok(room) = room.clone().acquire_owned().await else { return };
            let accepted = tokio::select! {
                accepted = listener.next() => accepted,
                () = stopping.cancelled() => return,
            };
            match accepted {
                Ok((stream, peer)) => {
                    let (router, stopping, counted) =
                        (router.clone(), self.stopping.clone(), self.count.token());
                    let tls = tls.clone();
                    let stream = ClientStream::new(stream, self.stall, Some(room));
                    let stall_timeout = stream.stall_timeout();
                    task::spawn(Task::Connection, async move {
                        match tls {
                            None => connection(stream, stall_timeout, peer, router, stopping).await,
                            Some(tls) => {
                                let shaken = tokio::select! {
                                    shaken = tls.shake(stream) => shaken,
                                    () = stopping.cancelled() => None,
                                };
                                if let Some(stream) = shaken {
                                    connection(stream, stall_timeout, peer, router, stopping).await;
                                }
                            }
                        }
                        drop(counted);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "connection not accepted");
                    tokio::time::sleep(ACCEPT_PAUSE).await;
                }
            }
        }
    }
}

/// Serves one connection until it closes.
pub(crate) async fn connection<S>(
    stream: S,
    stall_timeout: StallTimeout,
    peer: Peer,
    router: Router,
    stopping: CancellationToken,
) where
    S: AsyncRead + AsyncWrite + Send + Unpin + 'static,
{
    let seen = RequestSeen::default();
    let stream = RejectionBodyStream::new(stream, seen.clone());
    let service = router
        .map_request(move |mut request: hyper::Request<hyper::body::Incoming>| {
            seen.note();
            request.extensions_mut().insert(peer);
            request
        })
        .map_response(move |response: Response| {
            if response.status() == StatusCode::SWITCHING_PROTOCOLS {
                stall_timeout.disable();
            }
            response
        });
    let serving = http1::Builder::new()
        .timer(TokioTimer::new())
        .header_read_timeout(HEADER_WAIT)
        .serve_connection(TokioIo::new(stream), TowerToHyperService::new(service))
        .with_upgrades();
    let mut serving = std::pin::pin!(serving);
    let served = tokio::select! {
        served = serving.as_mut() => served,
        () = stopping.cancelled() => {
            serving.as_mut().graceful_shutdown();
            serving.await
        }
    };
    if let Err(error) = served {
        tracing::debug!(%error, "connection failed");
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use parking_lot::Mutex;

    /// Addresses whose listeners panic at the next connection.
    static BROKEN: Mutex<Vec<SocketAddr>> = Mutex::new(Vec::new());

    pub(super) fn breaks(listener: &TcpListener) -> bool {
        let broken = BROKEN.lock();
        listener.local_addr().is_ok_and(|address| broken.contains(&address))
    }

    /// A daemon that can be reached no more would look alive for ever.
    #[tokio::test]
    async fn a_daemon_whose_listener_panics_ends_with_an_error() {
        let folder = tempfile::tempdir().unwrap();
        let mut config = Config::new(folder.path());
        config.bind.set_port(0);
        let ready = |ready: &Ready| {
            BROKEN.lock().push(ready.address);
            drop(std::net::TcpStream::connect(ready.address).unwrap());
        };
        let error = serve_until(config, ready, std::future::pending()).await.unwrap_err();
        assert_eq!(error.code(), forkd_api::Code::Internal);
        assert!(error.to_string().contains("accept"), "{error}");
        assert!(!folder.path().join("forkd.sock").exists(), "it stopped in order");
    }
}

//! Loopback ports for sandboxes. The published `Sandbox` class of the reference connects to them.
//!
//! The JSON-lines protocol has no tokens, so [`peer_check`](crate::compat::json_lines::peer_check) checks the user
//! that connects. Web pages cannot use a port: browsers send HTTP, which is rejected at its first byte. A sandbox has
//! a port if a client asked for it, as `forkd fork` does; with `--agent-ports`, all sandboxes have one.
//!
//! A sandbox keeps its port over rollbacks and restarts of the daemon. The number is in the sandbox's record, and the
//! next daemon takes it again if it is still free.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use forkd_protocol::json_lines::{Failure, Reply};
use parking_lot::Mutex;
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore};
use tokio::task::AbortHandle;

use crate::auth::principal::LOCAL;
use crate::compat::json_lines::{answer, converse, peer_check, say};
use crate::error::{Error, Result};
use crate::sandbox::registry::Registry;
use crate::sandbox::{DesiredState, Sandbox};
use crate::telemetry::audit::AuditRecord;
use crate::util::random::request_id;
use crate::util::task::{self, Task};

/// Connections to one sandbox's port at a time: those of known users, and those whose user is not known yet.
const MAX_CONNECTIONS: usize = 64;
const MAX_UNKNOWN: usize = 64;
/// Pause after a failed `accept`, and while a rollback replaces the sandbox.
const PAUSE: Duration = Duration::from_millis(50);

/// All open ports.
#[derive(Debug)]
pub(crate) struct Ports {
    registry: Arc<Registry>,
    open: Mutex<HashMap<String, Port>>,
}

/// An open port with its server task.
#[derive(Debug)]
struct Port {
    address: SocketAddr,
    server: AbortHandle,
}

impl Drop for Port {
    fn drop(&mut self) {
        self.server.abort();
    }
}

impl Ports {
    pub(crate) fn new(registry: Arc<Registry>) -> Arc<Self> {
        Arc::new(Ports { registry, open: Mutex::default() })
    }

    /// Opens the ports that sandboxes had under an earlier daemon.
    pub(crate) fn reopen(self: &Arc<Self>) {
        for sandbox in self.registry.list() {
            if sandbox.runtime().saved.history.line_port.is_some()
                && let Err(error) = self.open(&sandbox)
            {
                tracing::warn!(sandbox = sandbox.id, %error, "JSON-lines port not reopened");
            }
        }
    }

    /// Returns the sandbox's port and opens it if necessary. Must be called in a runtime.
    pub(crate) fn open(self: &Arc<Self>, sandbox: &Sandbox) -> Result<SocketAddr> {
        let mut open = self.open.lock();
        if let Some(port) = open.get(&sandbox.id) {
            return Ok(port.address);
        }
        let listener = listen(sandbox.runtime().saved.history.line_port)
            .map_err(|error| Error::host("cannot open a port of loopback", error))?;
        let address = listener.local_addr().map_err(|error| Error::host("a port without a number", error))?;
        let serving = self.clone().serve(sandbox.id.clone(), listener);
        let (ports, id) = (self.clone(), sandbox.id.clone());
        // It can be opened again.
        let server = task::spawn_or(Task::AgentPort, serving, move |_| drop(ports.open.lock().remove(&id)));
        let server = server.abort_handle();
        open.insert(sandbox.id.clone(), Port { address, server });
        sandbox.update_history(|history| history.line_port = Some(address.port()));
        Ok(address)
    }

    /// Closes the sandbox's port, if it has one.
    pub(crate) fn close(&self, sandbox: &Sandbox) {
        self.open.lock().remove(&sandbox.id);
        if sandbox.runtime().saved.history.line_port.is_some() {
            sandbox.update_history(|history| history.line_port = None);
        }
    }

    /// Serves the port until the sandbox is deleted.
    async fn serve(self: Arc<Self>, id: String, listener: TcpListener) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        let unknown_permits = Arc::new(Semaphore::new(MAX_UNKNOWN));
        // The registry is asked each time, because a rollback replaces the sandbox.
        while let Ok(sandbox) = self.registry.get(&id) {
            let Ok(unknown) = unknown_permits.clone().acquire_owned().await else { break };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                desired = sandbox.desired_changed() => {
                    if desired != DesiredState::Replace {
                        break;
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            match accepted {
                Ok((stream, from)) => {
                    let (ports, room) = (self.clone(), room.clone());
                    let talk = async move { ports.talk(&sandbox, stream, from, unknown, &room).await };
                    task::spawn(Task::JsonLinesConnection, talk);
                }
                Err(error) => {
                    tracing::warn!(%error, "JSON-lines connection not accepted");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        self.open.lock().remove(&id);
    }

    /// Serves one connection, from the check of its user to the audit record.
    async fn talk(
        &self,
        sandbox: &Sandbox,
        mut stream: TcpStream,
        from: SocketAddr,
        unknown: OwnedSemaphorePermit,
        room: &Semaphore,
    ) {
        let (begun, host) = (Instant::now(), &self.registry.host);
        let _ = stream.set_nodelay(true);
        let user = peer_check::who(&stream).await;
        let peer = match &user {
            Ok(Some(uid)) => format!("{from} uid={uid}"),
            _ => from.to_string(),
        };
        let admitted = peer_check::admit(user, &host.config).await;
        // A rejected connection must not keep others waiting.
        drop(unknown);
        let identity = admitted.is_ok().then(|| LOCAL.to_owned());
        let outcome = match admitted {
            Ok(()) => {
                let _place = room.acquire().await;
                match converse(stream, async |request| answer(sandbox, &host.config, request).await).await {
                    Ok(true) => "ok",
                    Ok(false) => "failed",
                    Err(_) => "abandoned",
                }
            }
            Err(why) => {
                // A rejected client may disconnect before it has read the reason.
                let _ = say(&mut stream, &Reply::Failed(Failure::new(why))).await;
                "refused"
            }
        };
        host.telemetry.audit.write(AuditRecord {
            ts: AuditRecord::now(),
            request_id: request_id(),
            owner: identity.clone(),
            identity,
            peer: Some(peer),
            method: "JSON-LINES".into(),
            path: format!("/v1/sandboxes/{}/json-lines", sandbox.id),
            route: Some("/v1/sandboxes/{id}/json-lines".into()),
            target: Some(sandbox.id.clone()),
            status: None,
            outcome,
            latency_us: u64::try_from(begun.elapsed().as_micros()).unwrap_or(u64::MAX),
            ua: None,
        });
    }
}

/// Listens on loopback: on the wanted port if it is free, otherwise on any.
fn listen(wanted: Option<u16>) -> std::io::Result<TcpListener> {
    let bind = |port: u16| std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let listener = match wanted {
        Some(port) => bind(port).or_else(|_| bind(0))?,
        None => bind(0)?,
    };
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

//! A port of loopback for each sandbox that is to have one: what the published `Sandbox` class of the
//! reference connects to.
//!
//! Whoever may connect to loopback may use such a port: there is no token in the line protocol. So there
//! is one only where somebody asked for it, of a sandbox or, with `--line-ports`, of all. Pages in a
//! browser cannot: what they send is HTTP, which is refused at its first byte.
//!
//! A port stays the sandbox's through rollbacks, and through restarts of the daemon: its number is in the
//! sandbox's record, and taken again if nobody else has it by then.

use std::collections::HashMap;
use std::net::{Ipv4Addr, SocketAddr};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use tokio::net::TcpListener;
use tokio::sync::Semaphore;
use tokio::task::AbortHandle;

use super::{answer, converse};
use crate::error::{Error, Result};
use crate::registry::Registry;
use crate::sandbox::Sandbox;
use crate::sandbox::Wish;

/// Connections at a time, to one sandbox's port.
const MAX_CONNECTIONS: usize = 64;
/// After a failed `accept`, and while a sandbox gives way to its successor.
const PAUSE: Duration = Duration::from_millis(50);

/// The ports of a daemon.
#[derive(Debug)]
pub(crate) struct Ports {
    registry: Arc<Registry>,
    open: Mutex<HashMap<String, Port>>,
}

/// A port that is being served.
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

    fn lock(&self) -> MutexGuard<'_, HashMap<String, Port>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Opens the ports that sandboxes had under an earlier daemon.
    pub(crate) fn reopen(self: &Arc<Self>) {
        for sandbox in self.registry.list() {
            if sandbox.facts().history.line_port.is_some()
                && let Err(error) = self.open(&sandbox)
            {
                tracing::warn!(sandbox = sandbox.id, %error, "its line port could not be opened again");
            }
        }
    }

    /// The sandbox's port, opened if it is not. Must be called in a runtime.
    pub(crate) fn open(self: &Arc<Self>, sandbox: &Sandbox) -> Result<SocketAddr> {
        let mut open = self.lock();
        if let Some(port) = open.get(&sandbox.id) {
            return Ok(port.address);
        }
        let listener = listen(sandbox.facts().history.line_port)
            .map_err(|error| Error::host("cannot open a port of loopback", error))?;
        let address = listener.local_addr().map_err(|error| Error::host("a port without a number", error))?;
        let serving = self.clone().serve(sandbox.id.clone(), listener);
        let server = tokio::spawn(serving).abort_handle();
        open.insert(sandbox.id.clone(), Port { address, server });
        sandbox.remember(|history| history.line_port = Some(address.port()));
        Ok(address)
    }

    /// Closes the sandbox's port, if it has one.
    pub(crate) fn close(&self, sandbox: &Sandbox) {
        self.lock().remove(&sandbox.id);
        if sandbox.facts().history.line_port.is_some() {
            sandbox.remember(|history| history.line_port = None);
        }
    }

    /// Serves the port until the sandbox is deleted.
    async fn serve(self: Arc<Self>, id: String, listener: TcpListener) {
        let room = Arc::new(Semaphore::new(MAX_CONNECTIONS));
        // Looked up each time: a rollback puts another one in its place.
        while let Ok(sandbox) = self.registry.get(&id) {
            let Ok(place) = room.clone().acquire_owned().await else { break };
            let accepted = tokio::select! {
                accepted = listener.accept() => accepted,
                wish = sandbox.dismissed() => {
                    if wish != Wish::GiveWay {
                        break;
                    }
                    tokio::time::sleep(PAUSE).await;
                    continue;
                }
            };
            match accepted {
                Ok((stream, _)) => {
                    let config = self.registry.host.config.clone();
                    tokio::spawn(async move {
                        let _ = stream.set_nodelay(true);
                        let conversation =
                            converse(stream, async |request| answer(&sandbox, &config, request).await);
                        if let Err(error) = conversation.await {
                            tracing::debug!(sandbox = sandbox.id, %error, "a line was left without its answer");
                        }
                        drop(place);
                    });
                }
                Err(error) => {
                    tracing::warn!(%error, "cannot accept a connection to a line port");
                    tokio::time::sleep(PAUSE).await;
                }
            }
        }
        self.lock().remove(&id);
    }
}

/// Listens on a port of loopback: on the one wanted, if nobody has it, else on any.
fn listen(wanted: Option<u16>) -> std::io::Result<TcpListener> {
    let bind = |port: u16| std::net::TcpListener::bind((Ipv4Addr::LOCALHOST, port));
    let listener = match wanted {
        Some(port) => bind(port).or_else(|_| bind(0))?,
        None => bind(0)?,
    };
    listener.set_nonblocking(true)?;
    TcpListener::from_std(listener)
}

//! Authorizes connections to JSON-lines ports: the users that may use the daemon's unix socket.
//!
//! The protocol has no tokens. But a loopback connection comes from a user of this host, and the kernel knows which.

use std::os::fd::AsFd;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::config::Config;
use crate::host::unix_socket;

/// Admits a user; the error is the text for the client.
pub(crate) async fn admit(user: std::io::Result<Option<u32>>, config: &Config) -> Result<(), String> {
    let uid = match user {
        Ok(Some(uid)) => uid,
        Ok(None) => return Err("the other end of this connection is closed; connect again".into()),
        Err(error) => return Err(format!("cannot read the user of this connection: {error}; connect again")),
    };
    let us = rustix::process::geteuid().as_raw();
    if uid == 0 || uid == us || config.insecure_loopback {
        return Ok(());
    }
    let group = unix_socket::GROUP;
    match is_member(uid).await {
        Ok(true) => return Ok(()),
        Ok(false) => {}
        Err(error) => {
            return Err(format!("cannot look up whether user {uid} is in group {group}: {error}; try again"));
        }
    }
    Err(format!(
        "user {uid} may not use this port: join the group {group} (sudo usermod -aG {group} USER), or open a port of \
         your own with `forkd agent-port SANDBOX` and a token"
    ))
}

/// Whether a user is in the group of the unix socket. At most 4 look-ups run at a time: each may ask a server.
async fn is_member(uid: u32) -> std::io::Result<bool> {
    static LOOKS: Semaphore = Semaphore::const_new(4);
    let _look = LOOKS.acquire().await.map_err(std::io::Error::other)?;
    tokio::task::spawn_blocking(move || unix_socket::has_member(uid)).await?
}

/// The user of the other end; `None` if no process has it open. At most 4 look-ups run at a time: each reads the list
/// of all connections, and every user can connect.
pub(crate) async fn who(stream: &TcpStream) -> std::io::Result<Option<u32>> {
    static LOOKS: Semaphore = Semaphore::const_new(4);
    let stream = stream.as_fd().try_clone_to_owned()?;
    let look = LOOKS.acquire().await.map_err(std::io::Error::other)?;
    let user = tokio::task::spawn_blocking(move || forkd_net::connected_user(stream)).await?;
    drop(look);
    user
}

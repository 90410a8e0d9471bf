//! Who may use a line port: whoever may use the daemon's unix socket.
//!
//! The line protocol knows no tokens. But what comes over loopback comes from a user of this host, and the
//! kernel knows from which.

use std::os::fd::AsFd;

use tokio::net::TcpStream;
use tokio::sync::Semaphore;

use crate::config::Config;
use crate::host::unix_socket;

/// Lets a user enter; else it is what to tell them.
pub(crate) async fn admit(user: std::io::Result<Option<u32>>, config: &Config) -> Result<(), String> {
    let uid = match user {
        Ok(Some(uid)) => uid,
        Ok(None) => return Err("nobody is at the other end of this connection any more".into()),
        Err(error) => return Err(format!("cannot find out who connected: {error}")),
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
        "user {uid} may not use this port: join the group {group} (sudo usermod -aG {group} USER), or have a port of \
         your own with `forkd line SANDBOX` and a token"
    ))
}

/// Whether a user is in the group of the unix socket. A few look-ups run at a time: each may ask a server.
async fn is_member(uid: u32) -> std::io::Result<bool> {
    static LOOKS: Semaphore = Semaphore::const_new(4);
    let _look = LOOKS.acquire().await.map_err(std::io::Error::other)?;
    tokio::task::spawn_blocking(move || unix_socket::has_member(uid)).await?
}

/// Whose the other end is; `None` if nobody has it open. A few are looked for at a time: it means reading the
/// list of all connections, and everybody can connect.
pub(crate) async fn who(stream: &TcpStream) -> std::io::Result<Option<u32>> {
    static LOOKS: Semaphore = Semaphore::const_new(4);
    let stream = stream.as_fd().try_clone_to_owned()?;
    let look = LOOKS.acquire().await.map_err(std::io::Error::other)?;
    let user = tokio::task::spawn_blocking(move || forkd_net::connected_user(stream)).await?;
    drop(look);
    user
}

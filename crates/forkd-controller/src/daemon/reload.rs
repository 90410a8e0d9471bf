//! Reloads the token file, the certificate and its key while the daemon runs: within a second after a change, and on
//! SIGHUP in any case.

use std::sync::Arc;
use std::time::Duration;

use tokio::signal::unix::{SignalKind, signal};

use crate::auth::tokens::Tokens;
use crate::daemon::tls::Tls;
use crate::error::Result;
use crate::util::task::blocking;

/// How often the daemon checks for changed files.
const EVERY: Duration = Duration::from_secs(1);

/// Checks and reloads the files until the daemon stops.
pub(crate) async fn keep_fresh(tokens: Arc<Tokens>, tls: Option<Arc<Tls>>) {
    let mut hangups = match signal(SignalKind::hangup()) {
        Ok(hangups) => Some(hangups),
        Err(error) => {
            tracing::warn!(%error, "SIGHUP handler not installed; the daemon still finds changed files");
            None
        }
    };
    loop {
        let hangup = async {
            match &mut hangups {
                Some(hangups) => hangups.recv().await,
                None => std::future::pending().await,
            }
        };
        let requested = tokio::select! {
            () = tokio::time::sleep(EVERY) => false,
            _ = hangup => true,
        };
        let (tokens, tls) = (tokens.clone(), tls.clone());
        let looked = blocking("looking for changed files", move || {
            log_failure("the token file", tokens.refresh());
            if let Some(tls) = tls {
                let fresh = tls.refresh(requested);
                if matches!(fresh, Ok(true)) {
                    tracing::info!("TLS certificate reloaded");
                }
                log_failure("the certificate; the old one stays", fresh.map(drop));
            }
            Ok(())
        });
        log_failure("changed files", looked.await);
    }
}

fn log_failure(what: &str, done: Result<()>) {
    if let Err(error) = done {
        tracing::error!(%error, "cannot use {what}");
    }
}

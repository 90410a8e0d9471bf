//! TLS for the TCP listener. The daemon reloads the certificate and its key when their files change, and on SIGHUP.
//! It logs a bad pair and keeps the old one.

use std::path::PathBuf;
use std::sync::Arc;
use std::time::Duration;

use parking_lot::{Mutex, RwLock};
use tokio::io::{AsyncRead, AsyncWrite};
use tokio_rustls::TlsAcceptor;
use tokio_rustls::rustls::ServerConfig;
use tokio_rustls::rustls::crypto::ring;
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, PrivateKeyDer};
use tokio_rustls::server::TlsStream;

use crate::config::TlsFiles;
use crate::error::{Error, Result};
use crate::util::fs::{Stamp, stamp};

/// Timeout for the TLS handshake.
const HANDSHAKE_WAIT: Duration = Duration::from_secs(10);
/// The most bytes read of a file: certificates have a few KiB.
const MAX_FILE: u64 = 1 << 20;

/// The certificate and key for TCP connections.
#[derive(Debug)]
pub(crate) struct Tls {
    files: TlsFiles,
    current: RwLock<Arc<ServerConfig>>,
    /// Stamps of the files at the last load.
    stamps: Mutex<Stamps>,
}

type Stamps = [Option<Stamp>; 2];

impl Tls {
    pub(crate) fn open(files: TlsFiles) -> Result<Self> {
        let stamps = Mutex::new(look(&files));
        let current = RwLock::new(Arc::new(load(&files)?));
        Ok(Tls { files, current, stamps })
    }

    /// Reloads the files if they have changed, or if `anyway` is set. After a failure the old pair stays in use.
    pub(crate) fn refresh(&self, anyway: bool) -> Result<bool> {
        let now = look(&self.files);
        let mut stamps = self.stamps.lock();
        if *stamps == now && !anyway {
            return Ok(false);
        }
        // Set before the load: a bad pair is logged once, and tried again only after another change.
        *stamps = now;
        let loaded = load(&self.files)?;
        *self.current.write() = Arc::new(loaded);
        Ok(true)
    }

    /// Performs the handshake; `None` if it fails.
    pub(crate) async fn shake<S: AsyncRead + AsyncWrite + Unpin>(&self, stream: S) -> Option<TlsStream<S>> {
        let config = self.current.read().clone();
        match tokio::time::timeout(HANDSHAKE_WAIT, TlsAcceptor::from(config).accept(stream)).await {
            Ok(Ok(stream)) => Some(stream),
            Ok(Err(error)) => {
                tracing::debug!(%error, "TLS handshake failed");
                None
            }
            Err(_) => {
                tracing::debug!("TLS handshake timed out");
                None
            }
        }
    }
}

fn look(files: &TlsFiles) -> Stamps {
    [&files.cert, &files.key].map(|path| std::fs::metadata(path).ok().as_ref().map(stamp))
}

fn load(files: &TlsFiles) -> Result<ServerConfig> {
    let bad = |path: &PathBuf, why: &dyn std::fmt::Display| {
        Error::invalid(format!("{} cannot be used for TLS: {why}; give a PEM file", path.display()))
    };
    let (cert, key) = (read(&files.cert)?, read(&files.key)?);
    let chain: std::result::Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&cert).collect();
    let chain = chain.map_err(|error| bad(&files.cert, &error))?;
    if chain.is_empty() {
        return Err(bad(&files.cert, &"it holds no certificate"));
    }
    let key = PrivateKeyDer::from_pem_slice(&key).map_err(|error| bad(&files.key, &error))?;
    let versions = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
        .with_safe_default_protocol_versions()
        .map_err(|error| Error::host("cannot set TLS up", error))?;
    let with_cert = versions.with_no_client_auth().with_single_cert(chain, key);
    let mut config = with_cert.map_err(|error| {
        let (cert, key) = (files.cert.display(), files.key.display());
        Error::invalid(format!("{cert} and {key} cannot be used for TLS: {error}; give a pair that fits"))
    })?;
    config.alpn_protocols = vec![b"http/1.1".to_vec()];
    Ok(config)
}

fn read(path: &PathBuf) -> Result<Vec<u8>> {
    let failed = |error: std::io::Error| Error::host(format!("cannot read {}", path.display()), error);
    let file = std::fs::File::open(path).map_err(failed)?;
    let mut bytes = Vec::new();
    std::io::Read::read_to_end(&mut std::io::Read::take(file, MAX_FILE), &mut bytes).map_err(failed)?;
    Ok(bytes)
}

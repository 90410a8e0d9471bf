//! TLS to a daemon on another host: which certificates to trust.
//!
//! A certificate is trusted if an authority of this system or of the user's file signed it. It is also
//! trusted if it is in that file itself: `openssl req -x509` makes a certificate that is its own authority,
//! and no verifier accepts such a one as a server's certificate.

use std::path::{Path, PathBuf};
use std::sync::Arc;

use anyhow::{Context, Result, bail};
use tokio::net::TcpStream;
use tokio_rustls::TlsConnector;
use tokio_rustls::client::TlsStream;
use tokio_rustls::rustls::client::danger::{HandshakeSignatureValid, ServerCertVerified, ServerCertVerifier};
use tokio_rustls::rustls::client::{WebPkiServerVerifier, verify_server_name};
use tokio_rustls::rustls::crypto::{CryptoProvider, ring};
use tokio_rustls::rustls::pki_types::pem::PemObject;
use tokio_rustls::rustls::pki_types::{CertificateDer, ServerName, UnixTime};
use tokio_rustls::rustls::server::ParsedCertificate;
use tokio_rustls::rustls::{ClientConfig, DigitallySignedStruct, Error, RootCertStore, SignatureScheme};

/// Files with a system's trusted authorities; the first that exists is used.
const SYSTEM: [&str; 3] =
    ["/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/etc/ssl/cert.pem"];

/// The certificates that a connection trusts.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub(crate) struct Trust {
    /// A PEM file with more certificates, for `--cacert`.
    pub(crate) file: Option<PathBuf>,
}

impl Trust {
    /// Does the TLS handshake with `host`.
    pub(crate) async fn shake(&self, host: &str, stream: TcpStream) -> Result<TlsStream<TcpStream>> {
        let name = ServerName::try_from(host.trim_matches(['[', ']']).to_owned())
            .with_context(|| format!("`{host}` is not a name that a certificate can have"))?;
        let connector = TlsConnector::from(Arc::new(self.config()?));
        connector.connect(name, stream).await.context(
            "its certificate is not trusted (give it, or the certificate of its authority, with --cacert or \
             FORKD_CACERT), or it does not speak TLS",
        )
    }

    fn config(&self) -> Result<ClientConfig> {
        let provider = Arc::new(ring::default_provider());
        let given = self.file.as_deref().map(read).transpose()?.unwrap_or_default();
        let mut roots = RootCertStore::empty();
        if let Some(system) = SYSTEM.iter().map(Path::new).find(|path| path.exists()) {
            roots.add_parsable_certificates(read(system)?);
        }
        roots.add_parsable_certificates(given.iter().cloned());
        if roots.is_empty() {
            bail!(
                "this system has no trusted authorities (package ca-certificates): give a file with --cacert"
            );
        }
        let inner = WebPkiServerVerifier::builder_with_provider(Arc::new(roots), provider.clone())
            .build()
            .context("cannot set TLS up")?;
        let believer = Arc::new(PinnedVerifier { inner, given, provider: provider.clone() });
        let mut config = ClientConfig::builder_with_provider(provider)
            .with_safe_default_protocol_versions()
            .context("cannot set TLS up")?
            .dangerous()
            .with_custom_certificate_verifier(believer)
            .with_no_client_auth();
        config.alpn_protocols = vec![b"http/1.1".to_vec()];
        Ok(config)
    }
}

fn read(path: &Path) -> Result<Vec<CertificateDer<'static>>> {
    let bytes = std::fs::read(path).with_context(|| format!("cannot read {}", path.display()))?;
    let all: Result<Vec<_>, _> = CertificateDer::pem_slice_iter(&bytes).collect();
    let all = all.with_context(|| format!("{} is not a PEM file", path.display()))?;
    if all.is_empty() {
        bail!("{} holds no certificate; give a PEM file", path.display());
    }
    Ok(all)
}

/// Trusts what the verifier of rustls trusts, and exactly the certificates in the user's file.
#[derive(Debug)]
struct PinnedVerifier {
    inner: Arc<WebPkiServerVerifier>,
    given: Vec<CertificateDer<'static>>,
    provider: Arc<CryptoProvider>,
}

impl ServerCertVerifier for PinnedVerifier {
    fn verify_server_cert(
        &self,
        shown: &CertificateDer<'_>,
        intermediates: &[CertificateDer<'_>],
        name: &ServerName<'_>,
        ocsp: &[u8],
        now: UnixTime,
    ) -> Result<ServerCertVerified, Error> {
        // The signatures below prove that the peer has the key of the certificate. The certificate must also
        // name this host: the key of one daemon does not prove another daemon. Its age does not matter then.
        if self.given.iter().any(|given| given == shown) {
            verify_server_name(&ParsedCertificate::try_from(shown)?, name)?;
            return Ok(ServerCertVerified::assertion());
        }
        self.inner.verify_server_cert(shown, intermediates, name, ocsp, now)
    }

    fn verify_tls12_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls12_signature(message, shown, signed)
    }

    fn verify_tls13_signature(
        &self,
        message: &[u8],
        shown: &CertificateDer<'_>,
        signed: &DigitallySignedStruct,
    ) -> Result<HandshakeSignatureValid, Error> {
        self.inner.verify_tls13_signature(message, shown, signed)
    }

    fn supported_verify_schemes(&self) -> Vec<SignatureScheme> {
        self.provider.signature_verification_algorithms.supported_schemes()
    }
}

#[cfg(test)]
mod tests {
    use tokio::net::TcpListener;
    use tokio_rustls::TlsAcceptor;
    use tokio_rustls::rustls::ServerConfig;
    use tokio_rustls::rustls::pki_types::PrivateKeyDer;

    use super::*;

    /// A certificate for `localhost` that is its own authority, and its key.
    fn certificate(folder: &Path, name: &str) -> [PathBuf; 2] {
        let [cert, key] = ["cert", "key"].map(|what| folder.join(format!("{name}-{what}.pem")));
        let made = std::process::Command::new("openssl")
            .args("req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 2".split(' '))
            .args(["-subj", "/CN=localhost", "-addext", "subjectAltName=DNS:localhost", "-keyout"])
            .arg(&key)
            .arg("-out")
            .arg(&cert)
            .output()
            .unwrap();
        assert!(made.status.success(), "{made:?}");
        [cert, key]
    }

    /// Serves TLS with that certificate, on the port it returns.
    async fn serve([cert, key]: &[PathBuf; 2]) -> u16 {
        let key = PrivateKeyDer::from_pem_file(key).unwrap();
        let config = ServerConfig::builder_with_provider(Arc::new(ring::default_provider()))
            .with_safe_default_protocol_versions()
            .unwrap()
            .with_no_client_auth()
            .with_single_cert(read(cert).unwrap(), key)
            .unwrap();
        let listener = TcpListener::bind("127.0.0.1:0").await.unwrap();
        let port = listener.local_addr().unwrap().port();
        tokio::spawn(async move {
            loop {
                let (stream, _) = listener.accept().await.unwrap();
                let _ = TlsAcceptor::from(Arc::new(config.clone())).accept(stream).await;
            }
        });
        port
    }

    #[tokio::test]
    async fn only_who_shows_a_certificate_that_is_believed_is_talked_to() {
        let folder = tempfile::tempdir().unwrap();
        let (own, other) = (certificate(folder.path(), "own"), certificate(folder.path(), "other"));
        let port = serve(&own).await;
        let shake_as = async |name: &str, file: Option<&PathBuf>| {
            let stream = TcpStream::connect(("127.0.0.1", port)).await.unwrap();
            Trust { file: file.cloned() }.shake(name, stream).await.map(|_| ())
        };
        let shake = async |file: Option<&PathBuf>| shake_as("localhost", file).await;
        shake(Some(&own[0])).await.unwrap();
        shake_as("another", Some(&own[0])).await.expect_err("it is of another host");
        for believed in [None, Some(&other[0])] {
            let error = shake(believed).await.unwrap_err();
            assert!(error.to_string().contains("--cacert"), "{error:#}");
        }
        // A key is no certificate, and nothing is nothing.
        for bad in [&own[1], &folder.path().join("none")] {
            let error = shake(Some(bad)).await.unwrap_err();
            assert!(error.to_string().contains(bad.to_str().unwrap()), "{error:#}");
        }
    }
}

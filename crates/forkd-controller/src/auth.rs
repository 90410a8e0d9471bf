//! Who may talk to the daemon.
//!
//! - Over the unix socket: whoever may open it. File permissions are the check.
//! - Over TCP: whoever shows the token. Because a browser on the same machine can be made to send
//!   requests to loopback by any web page, a request must also *name* loopback in `Host` (a page
//!   that re-bound its own name to 127.0.0.1 names itself there) and, if it comes from a page at
//!   all, that page's `Origin` must be loopback too.

use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::fs::{OpenOptionsExt, PermissionsExt};
use std::path::Path;

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN};
use axum::http::{HeaderMap, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};
use rustix::rand::{GetRandomFlags, getrandom};
use subtle::ConstantTimeEq;

use crate::error::{Error, Kind, Result};

/// The longest token file accepted.
const MAX_TOKEN: usize = 4096;
/// A shorter token could be guessed.
const MIN_TOKEN: usize = 16;

/// The secret TCP clients show.
#[derive(Clone)]
pub(crate) struct Token(String);

impl Token {
    /// The token in `path`; made there if there is none.
    pub(crate) fn load_or_make(path: &Path) -> Result<Self> {
        let made = match Token::load(path)? {
            Some(token) => return Ok(token),
            None => Token::make(path),
        };
        made.map_err(|error| Error::host(format!("cannot make the token file {}", path.display()), error))?;
        // Read back: another process may have been first.
        Token::load(path)?.ok_or_else(|| Error::host(path.display(), "the token file vanished"))
    }

    fn load(path: &Path) -> Result<Option<Self>> {
        let failed =
            |error: io::Error| Error::host(format!("cannot read the token file {}", path.display()), error);
        let file = match File::open(path) {
            Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
            other => other.map_err(failed)?,
        };
        if file.metadata().map_err(failed)?.permissions().mode() & 0o077 != 0 {
            tracing::warn!(path = %path.display(), "others may read the token file; `chmod 600` it");
        }
        let mut text = String::new();
        io::Read::read_to_string(&mut io::Read::take(file, MAX_TOKEN as u64), &mut text).map_err(failed)?;
        let token = text.trim();
        if token.len() < MIN_TOKEN || !token.bytes().all(|byte| byte.is_ascii_graphic()) {
            let fix = format!("remove {} and start again to get a new one", path.display());
            return Err(Error::invalid(format!("the token file holds no usable token; {fix}")));
        }
        Ok(Some(Token(token.to_owned())))
    }

    /// Writes a fresh token. The file appears whole or not at all, and never replaces another.
    fn make(path: &Path) -> io::Result<()> {
        let mut random = [0u8; 32];
        fill_random(&mut random).map_err(io::Error::other)?;
        let text: String = random.iter().map(|byte| format!("{byte:02x}")).collect();
        let temporary = path.with_extension(format!("new-{}", std::process::id()));
        let mut file =
            OpenOptions::new().write(true).create(true).truncate(true).mode(0o600).open(&temporary)?;
        let written = writeln!(file, "{text}").and_then(|()| file.sync_all());
        let linked = written.and_then(|()| std::fs::hard_link(&temporary, path));
        std::fs::remove_file(&temporary)?;
        match linked {
            Err(error) if error.kind() == io::ErrorKind::AlreadyExists => Ok(()),
            other => other,
        }
    }

    fn matches(&self, shown: &str) -> bool {
        self.0.as_bytes().ct_eq(shown.as_bytes()).into()
    }
}

impl std::fmt::Debug for Token {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Token(…)")
    }
}

/// Fills `bytes` with the kernel's random numbers.
pub(crate) fn fill_random(bytes: &mut [u8]) -> Result<()> {
    let mut filled = 0;
    while filled < bytes.len() {
        match getrandom(&mut bytes[filled..], GetRandomFlags::empty()) {
            Ok(count) => filled += count,
            Err(rustix::io::Errno::INTR) => {}
            Err(error) => return Err(Error::host("no random numbers", error)),
        }
    }
    Ok(())
}

/// Middleware for TCP: lets a request pass, or answers it with the reason why not.
pub(crate) async fn check(State(token): State<Token>, request: Request, next: Next) -> Response {
    let open = request.uri().path() == "/healthz";
    let checked = check_source(request.headers(), request.uri())
        .and_then(|()| if open { Ok(()) } else { check_token(&token, request.headers()) });
    match checked {
        Ok(()) => next.run(request).await,
        Err(error) => error.into_response(),
    }
}

fn check_source(headers: &HeaderMap, uri: &Uri) -> Result<()> {
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next().and_then(|value| value.to_str().ok());
    if hosts.next().is_some() || !host.is_some_and(is_loopback) {
        let text = "the Host header must be localhost, 127.0.0.1 or [::1]; use one of them in the URL";
        return Err(Error::new(Kind::Forbidden, text));
    }
    // A request line may hold a whole URL, which then counts instead of the header.
    if uri.authority().is_some_and(|authority| !is_loopback(authority.as_str())) {
        return Err(Error::new(Kind::Forbidden, "the request names another host"));
    }
    for origin in headers.get_all(ORIGIN) {
        let origin = origin.to_str().unwrap_or_default();
        let host = origin.strip_prefix("http://").or_else(|| origin.strip_prefix("https://"));
        if !host.is_some_and(is_loopback) {
            return Err(Error::new(Kind::Forbidden, "requests from web pages elsewhere are not served"));
        }
    }
    Ok(())
}

/// Whether a `host` or `host:port` names this machine.
fn is_loopback(authority: &str) -> bool {
    let host = match authority.rsplit_once(':') {
        Some((host, port)) if port.bytes().all(|byte| byte.is_ascii_digit()) => host,
        _ => authority,
    };
    host.eq_ignore_ascii_case("localhost") || host == "127.0.0.1" || host == "[::1]"
}

fn check_token(token: &Token, headers: &HeaderMap) -> Result<()> {
    let shown = headers.get(AUTHORIZATION).and_then(|value| value.to_str().ok());
    let shown = shown.and_then(|value| value.split_once(' '));
    match shown {
        Some((scheme, shown)) if scheme.eq_ignore_ascii_case("bearer") && token.matches(shown.trim()) => {
            Ok(())
        }
        Some(_) => {
            Err(Error::new(Kind::Unauthorized, "the token is wrong; `forkd token print` shows the right one"))
        }
        None => {
            let text = "a token is needed: `Authorization: Bearer TOKEN`; `forkd token print` shows it";
            Err(Error::new(Kind::Unauthorized, text))
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_loopback_names_are_loopback() {
        for good in
            ["localhost", "localhost:8889", "LOCALHOST", "127.0.0.1", "127.0.0.1:1", "[::1]", "[::1]:80"]
        {
            assert!(is_loopback(good), "{good}");
        }
        for bad in [
            "",
            "example.com",
            "localhost.example.com",
            "127.0.0.1.example.com:80",
            "127.0.0.2",
            "::1",
            "0.0.0.0",
            "localhost:x",
            "evil@localhost",
            "localhost/",
            "[::2]:80",
            "user:pw@127.0.0.1:80",
        ] {
            assert!(!is_loopback(bad), "{bad}");
        }
    }

    #[test]
    fn a_token_is_made_once_for_its_owner_alone_and_then_kept() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        let first = Token::load_or_make(&path).unwrap();
        assert_eq!(first.0.len(), 64);
        assert_eq!(std::fs::metadata(&path).unwrap().permissions().mode() & 0o777, 0o600);
        assert!(Token::load_or_make(&path).unwrap().matches(&first.0));
        assert_eq!(std::fs::read_dir(dir.path()).unwrap().count(), 1, "no temporary file is left");
        assert!(!format!("{first:?}").contains(&first.0));
    }

    #[test]
    fn an_unusable_token_file_is_refused_with_the_fix() {
        let dir = tempfile::tempdir().unwrap();
        let path = dir.path().join("token");
        for bad in ["", "short", "with spaces in the middle of it"] {
            std::fs::write(&path, bad).unwrap();
            let error = Token::load_or_make(&path).unwrap_err();
            assert!(error.message.contains("remove"), "{error}");
        }
    }
}

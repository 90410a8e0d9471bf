//! Authenticates clients.
//!
//! - Over the unix socket: every process that can open it. The file permissions are the check.
//! - Over TCP: every client with a token (`tokens`). Any web page can make a browser on the same machine send
//!   requests to loopback. So the `Host` header must name loopback: a page that re-binds its own name to 127.0.0.1
//!   sends that name. If there is an `Origin` header, it must name loopback too. A daemon that other hosts can reach
//!   has TLS, and no page can have its name; there the `Origin` must be the daemon itself.
//!
//! `authorize` checks what a principal may do.

use std::net::{IpAddr, Ipv4Addr};
use std::sync::Arc;
use std::time::{Duration, Instant};

use axum::extract::{Request, State};
use axum::http::header::{AUTHORIZATION, HOST, ORIGIN, RETRY_AFTER};
use axum::http::{HeaderMap, HeaderValue, Uri};
use axum::middleware::Next;
use axum::response::{IntoResponse, Response};

use crate::auth::peer::Peer;
use crate::auth::policy;
use crate::auth::principal::Principal;
use crate::auth::rate_limit::{Failures, Rates};
use crate::auth::tokens::{TokenError, Tokens};
use crate::compat::e2b;
use crate::compat::e2b::E2bContext;
use crate::compat::e2b::access::turn_away;
use crate::compat::e2b::target::Target;
use crate::error::{Code, Error, Result};

/// Decides which TCP clients are admitted.
#[derive(Debug, Clone)]
pub(crate) struct Authenticator {
    pub(crate) tokens: Arc<Tokens>,
    pub(crate) rates: Arc<Rates>,
    pub(crate) failures: Arc<Failures>,
    /// Whether clients on other hosts are served, too.
    pub(crate) remote: bool,
    /// Whether clients without a token have full access to the host.
    pub(crate) insecure: bool,
}

/// Middleware for TCP: passes a request on, or replies with the reason for its rejection.
pub(crate) async fn check(State(gate): State<Authenticator>, mut request: Request, next: Next) -> Response {
    let open = policy::is_open(request.uri().path());
    if let Err(error) = check_source(request.headers(), request.uri(), gate.remote) {
        return error.into_response();
    }
    if !open {
        let who = match gate.authenticate(request.headers()) {
            Ok(who) => who,
            Err(error) => return gate.refuse(&request, error),
        };
        // The rate limit does not apply to admins.
        if !who.is_admin()
            && let Err(wait) = gate.rates.take(&who.name, Instant::now())
        {
            let text =
                "too many requests with this token; wait for the seconds in Retry-After, or send fewer";
            let mut response = too_many(text, wait);
            // For the audit log; the client does not see extensions.
            response.extensions_mut().insert(who);
            return response;
        }
        request.extensions_mut().insert(who);
    }
    next.run(request).await
}

/// Middleware for TCP, before [`check`]: answers sandbox requests of the E2B API, which have tokens of their own.
pub(crate) async fn forward(
    State((gate, e2b)): State<(Authenticator, E2bContext)>,
    request: Request,
    next: Next,
) -> Response {
    let Some(target) = Target::of(request.method(), request.uri(), request.headers()) else {
        return next.run(request).await;
    };
    // A host's name that carries a sandbox's id is none that a page could have by chance.
    if !target.is_in_host
        && let Err(error) = check_source(request.headers(), request.uri(), gate.remote)
    {
        return turn_away(&target, &error);
    }
    let address = peer_address(&request);
    let (response, guessed) = e2b.forward(target.clone(), request).await;
    match guessed.then(|| gate.failures.count(address, Instant::now())) {
        Some(Err(wait)) => {
            let text = "too many requests without a good token; wait for the seconds in Retry-After";
            after(turn_away(&target, &Error::new(Code::RateLimited, text)), wait)
        }
        _ => response,
    }
}

/// Middleware for the unix socket: the same.
pub(crate) async fn forward_unix(State(e2b): State<E2bContext>, request: Request, next: Next) -> Response {
    match Target::of(request.method(), request.uri(), request.headers()) {
        Some(target) => e2b.forward(target, request).await.0,
        None => next.run(request).await,
    }
}

fn peer_address(request: &Request) -> IpAddr {
    match request.extensions().get() {
        Some(Peer::Tcp(address)) => address.ip(),
        _ => Ipv4Addr::UNSPECIFIED.into(),
    }
}

impl Authenticator {
    fn authenticate(&self, headers: &HeaderMap) -> Result<Principal> {
        let unauthorized = |text| Err(Error::new(Code::Unauthorized, text));
        let mut all = headers.get_all(AUTHORIZATION).iter();
        let Some(header) = all.next() else {
            if let Some(key) = e2b::key::token(headers) {
                return self.tokens.find(key, crate::util::time::now_unix()).or_else(
                    |refusal| match refusal {
                        // Clients of the E2B API always send a key.
                        TokenError::Unknown if self.insecure => Ok(Principal::local()),
                        TokenError::Unknown => unauthorized(
                            "the API key is no token of this daemon; `forkd token print` shows one",
                        ),
                        TokenError::Expired => Err(Error::new(
                            Code::TokenExpired,
                            "the API key has expired; ask the operator of the daemon for another",
                        )),
                    },
                );
            }
            if self.insecure {
                return Ok(Principal::local());
            }
            let text = "a token is needed: `Authorization: Bearer TOKEN`; `forkd token print` shows it";
            return unauthorized(text);
        };
        if all.next().is_some() {
            return unauthorized("there are several Authorization headers; send one");
        }
        let shown = header.to_str().ok().and_then(|value| value.split_once(' '));
        let found = match shown {
            Some((scheme, shown)) if scheme.eq_ignore_ascii_case("bearer") => {
                self.tokens.find(shown.trim(), crate::util::time::now_unix())
            }
            Some(_) => Err(TokenError::Unknown),
            None => {
                let text = "a token is needed: `Authorization: Bearer TOKEN`; `forkd token print` shows it";
                return unauthorized(text);
            }
        };
        match found {
            Ok(who) => Ok(who),
            Err(TokenError::Unknown) => {
                unauthorized("the token is wrong; `forkd token print` shows the right one")
            }
            Err(TokenError::Expired) => {
                let text = "the token has expired; ask the operator of the daemon for another";
                Err(Error::new(Code::TokenExpired, text))
            }
        }
    }

    /// Replies to a request without a good token. Bad tokens do not slow down a client with a good token at the same
    /// address: several clients may share it.
    fn refuse(&self, request: &Request, error: Error) -> Response {
        match self.failures.count(peer_address(request), Instant::now()) {
            Ok(()) => error.into_response(),
            Err(wait) => too_many(
                "too many requests without a good token; wait for the seconds in Retry-After, and send a good one",
                wait,
            ),
        }
    }
}

/// A 429 with the seconds to wait.
fn too_many(text: &str, wait: Duration) -> Response {
    after(Error::new(Code::RateLimited, text).into_response(), wait)
}

/// A response with the time after which the client may try again.
fn after(mut response: Response, wait: Duration) -> Response {
    let secs = wait.as_secs().saturating_add(1);
    response.headers_mut().insert(RETRY_AFTER, HeaderValue::from(secs));
    response
}

/// Middleware for the unix socket: its clients are admins.
pub(crate) async fn trust_unix_peer(mut request: Request, next: Next) -> Response {
    request.extensions_mut().insert(Principal::local());
    next.run(request).await
}

fn check_source(headers: &HeaderMap, uri: &Uri, remote: bool) -> Result<()> {
    let forbidden = |text: &str| Err(Error::new(Code::OriginForbidden, text));
    let mut hosts = headers.get_all(HOST).iter();
    let host = hosts.next().and_then(|value| value.to_str().ok());
    let Some(host) = host.filter(|_| hosts.next().is_none()) else {
        return forbidden("there must be one Host header, with the daemon's name");
    };
    if !remote && !is_loopback(host) {
        return forbidden(
            "the Host header must be localhost, 127.0.0.1 or [::1]; use one of them in the URL",
        );
    }
    // The request line may contain a whole URL, whose host has priority over the header.
    let named = |name: &str| if remote { name.eq_ignore_ascii_case(host) } else { is_loopback(name) };
    if uri.authority().is_some_and(|authority| !named(authority.as_str())) {
        return forbidden("the URL's host is not the Host header's; use the same in both");
    }
    for origin in headers.get_all(ORIGIN) {
        let origin = origin.to_str().unwrap_or_default();
        let host = match origin.strip_prefix("http://") {
            Some(host) => (!remote).then_some(host),
            None => origin.strip_prefix("https://"),
        };
        if !host.is_some_and(named) {
            return forbidden(
                "requests from web pages of other origins are not served; call the API from the daemon's own origin",
            );
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
    fn where_others_can_reach_the_daemon_a_page_must_be_its_own() {
        let check = |head: &[(&'static str, &str)], uri: &str| {
            let pairs = head.iter().map(|(name, value)| {
                (axum::http::HeaderName::from_static(name), HeaderValue::from_str(value).unwrap())
            });
            check_source(&pairs.collect(), &uri.parse().unwrap(), true).is_ok()
        };
        assert!(check(&[("host", "forkd.example:8889")], "/version"));
        assert!(check(&[("host", "forkd.example")], "https://FORKD.example/version"));
        assert!(check(&[("host", "forkd.example"), ("origin", "https://forkd.example")], "/version"));
        for bad in ["https://evil.example", "http://forkd.example", "null", "", "https://forkd.example:1"] {
            assert!(!check(&[("host", "forkd.example"), ("origin", bad)], "/version"), "{bad}");
        }
        assert!(!check(&[("host", "forkd.example")], "http://evil.example/version"));
        assert!(!check(&[], "/version"));
    }
}

//! Request heads: the request line and the headers.

use std::time::Instant;

use base64::{Engine, prelude::BASE64_STANDARD};

use super::MAX_HEADERS;

/// Status and message for a peer whose request cannot be read.
pub(crate) type BadRequest = (u16, String);

/// A parsed request head. Header names are in lower case.
#[derive(Debug)]
pub(crate) struct Head {
    pub(crate) method: String,
    /// Percent-decoded, without the query.
    pub(crate) path: String,
    query: Vec<(String, String)>,
    headers: Vec<(String, String)>,
    pub(super) http_1_0: bool,
    pub(super) keep_alive: bool,
    /// When its first byte was read.
    pub(crate) received: Instant,
}

impl Head {
    /// Parses the head at the start of `input`: `None` if it is not all there yet, else the head and
    /// its length.
    pub(super) fn parse(input: &[u8], received: Instant) -> Result<Option<(Head, usize)>, BadRequest> {
        let mut headers = [httparse::EMPTY_HEADER; MAX_HEADERS];
        let mut request = httparse::Request::new(&mut headers);
        let len = match request.parse(input) {
            Ok(httparse::Status::Complete(len)) => len,
            Ok(httparse::Status::Partial) => return Ok(None),
            Err(httparse::Error::TooManyHeaders) => {
                return Err((431, format!("more than {MAX_HEADERS} header lines")));
            }
            Err(httparse::Error::Version) => return Err((505, "only HTTP/1.0 and HTTP/1.1".into())),
            Err(error) => return Err((400, format!("not an HTTP request: {error}"))),
        };
        let (Some(method), Some(target)) = (request.method, request.path) else {
            return Err((400, "not an HTTP request".into()));
        };
        // Some clients send the absolute form; the host in it does not matter to us.
        let target = match target.split_once("://") {
            Some((_, rest)) if !target.starts_with('/') => rest.find('/').map_or("/", |at| &rest[at..]),
            _ => target,
        };
        let (path, query) = target.split_once('?').unwrap_or((target, ""));
        let path = percent_decode(path, false).ok_or((400, "the path is not valid UTF-8".into()))?;
        let headers: Vec<(String, String)> = request
            .headers
            .iter()
            .map(|h| (h.name.to_ascii_lowercase(), String::from_utf8_lossy(h.value).trim().to_string()))
            .collect();
        let http_1_0 = request.version == Some(0);
        let mut head = Head {
            method: method.to_string(),
            path,
            query: parse_query(query),
            headers,
            http_1_0,
            keep_alive: !http_1_0,
            received,
        };
        head.keep_alive = match head.header("connection").map(str::to_ascii_lowercase) {
            Some(value) if value.split(',').any(|v| v.trim() == "close") => false,
            Some(value) if value.split(',').any(|v| v.trim() == "keep-alive") => true,
            _ => !http_1_0,
        };
        Ok(Some((head, len)))
    }

    /// The first header of that (lower-case) name.
    pub(crate) fn header(&self, name: &str) -> Option<&str> {
        self.headers.iter().find(|(known, _)| known == name).map(|(_, value)| value.as_str())
    }

    /// All headers of that (lower-case) name.
    pub(super) fn all<'h>(&'h self, name: &'h str) -> impl Iterator<Item = &'h str> {
        self.headers.iter().filter(move |(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The headers whose (lower-case) names begin with `prefix`, without it.
    pub(crate) fn with_prefix<'h>(&'h self, prefix: &'h str) -> impl Iterator<Item = (&'h str, &'h str)> {
        self.headers
            .iter()
            .filter_map(move |(name, value)| Some((name.strip_prefix(prefix)?, value.as_str())))
    }

    /// The first value of a query parameter.
    pub(crate) fn query(&self, name: &str) -> Option<&str> {
        self.query.iter().find(|(n, _)| n == name).map(|(_, value)| value.as_str())
    }

    /// The media type of the body, without parameters.
    pub(crate) fn content_type(&self) -> Option<&str> {
        self.header("content-type").map(|value| value.split(';').next().unwrap_or_default().trim())
    }

    /// The user named by `Authorization: Basic`; the password does not matter: a caller that reaches the
    /// agent may act as any user.
    pub(crate) fn basic_user(&self) -> Option<String> {
        let (scheme, rest) = self.header("authorization")?.split_once(' ')?;
        if !scheme.eq_ignore_ascii_case("basic") {
            return None;
        }
        let pair = String::from_utf8(BASE64_STANDARD.decode(rest.trim()).ok()?).ok()?;
        let user = pair.split(':').next().unwrap_or_default();
        (!user.is_empty()).then(|| user.to_string())
    }

    pub(super) fn expects_continue(&self) -> bool {
        !self.http_1_0 && self.header("expect").is_some_and(|v| v.eq_ignore_ascii_case("100-continue"))
    }
}

fn parse_query(query: &str) -> Vec<(String, String)> {
    query
        .split('&')
        .filter(|pair| !pair.is_empty())
        .filter_map(|pair| {
            let (name, value) = pair.split_once('=').unwrap_or((pair, ""));
            Some((percent_decode(name, true)?, percent_decode(value, true)?))
        })
        .collect()
}

/// Decodes `%41`, and `+` in a query; an invalid escape stays as it is. `None` if the result is not UTF-8.
fn percent_decode(text: &str, plus: bool) -> Option<String> {
    let mut out = Vec::with_capacity(text.len());
    let mut rest = text.as_bytes();
    while let Some((&byte, tail)) = rest.split_first() {
        rest = tail;
        match byte {
            b'+' if plus => out.push(b' '),
            b'%' => match tail.first_chunk::<2>().and_then(|[a, b]| Some((hex(*a)?, hex(*b)?))) {
                Some((high, low)) => {
                    out.push(high << 4 | low);
                    rest = &tail[2..];
                }
                None => out.push(b'%'),
            },
            _ => out.push(byte),
        }
    }
    String::from_utf8(out).ok()
}

fn hex(digit: u8) -> Option<u8> {
    char::from(digit).to_digit(16).and_then(|value| u8::try_from(value).ok())
}

//! API keys: tokens of this daemon, with or without E2B's prefix.

use axum::http::HeaderMap;

/// The header with the key.
pub(super) const HEADER: &str = "x-api-key";
/// The prefix of E2B's own keys: some programs insist on it.
const PREFIX: &str = "e2b_";

/// The token in the request's key, if there is exactly one key.
pub(crate) fn token(headers: &HeaderMap) -> Option<&str> {
    let mut keys = headers.get_all(HEADER).iter();
    let key = keys.next()?.to_str().ok()?.trim();
    keys.next().is_none().then(|| without_prefix(key))
}

/// The token in a key.
pub(super) fn without_prefix(key: &str) -> &str {
    key.strip_prefix(PREFIX).unwrap_or(key)
}

#[cfg(test)]
mod tests {
    use axum::http::HeaderValue;

    use super::*;

    #[test]
    fn a_key_is_a_token_with_or_without_the_prefix() {
        let of = |keys: &[&'static str]| {
            let mut headers = HeaderMap::new();
            for key in keys {
                headers.append(HEADER, HeaderValue::from_static(key));
            }
            token(&headers).map(str::to_owned)
        };
        assert_eq!(of(&["fk_abc"]).as_deref(), Some("fk_abc"));
        assert_eq!(of(&["e2b_fk_abc"]).as_deref(), Some("fk_abc"));
        assert_eq!(of(&[]), None);
        assert_eq!(of(&["fk_a", "fk_b"]), None, "which of them is meant?");
    }
}

//! Signed addresses of files: a client may hand one to a program that has no token.
//!
//! The signature names the path, the operation, the user and perhaps a time, but no sandbox: the sandbox is the one
//! with whose token the signature was made.

use std::collections::BTreeSet;

use base64::Engine;
use base64::prelude::BASE64_STANDARD_NO_PAD;
use forkd_protocol::names::percent;
use sha2::{Digest, Sha256};
use subtle::ConstantTimeEq;

/// The longest time in a signed request: the digits of a 64-bit number.
const MAX_TIME: usize = 20;

/// A signed request for a file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Signed {
    pub(super) path: String,
    pub(super) user: String,
    /// Whether it writes the file.
    pub(super) writes: bool,
    pub(super) signature: String,
    /// The time from which it is no longer good, in seconds since 1970, as the client wrote it.
    pub(super) expires: Option<String>,
}

impl Signed {
    /// The signed request in a query; none if there is no signature. A query with a field twice, or with a field that the
    /// signature does not cover, is not signed: another reader might take the other field. Nor is one with a time that is
    /// too long for a time.
    pub(super) fn of(query: &str, writes: bool) -> Option<Self> {
        let mut seen = BTreeSet::new();
        let mut signed = Signed {
            path: String::new(),
            user: String::new(),
            writes,
            signature: String::new(),
            expires: None,
        };
        for (name, value) in form_urlencoded::parse(query.as_bytes()) {
            if !seen.insert(name.clone()) {
                return None;
            }
            match name.as_ref() {
                "path" => signed.path = value.into_owned(),
                "username" => signed.user = value.into_owned(),
                "signature" => signed.signature = value.into_owned(),
                "signature_expiration" if value.len() > MAX_TIME => return None,
                "signature_expiration" => signed.expires = Some(value.into_owned()),
                _ => return None,
            }
        }
        (!signed.signature.is_empty()).then_some(signed)
    }

    /// The query for the guest: what was signed, and nothing else.
    pub(super) fn query(&self) -> String {
        let user =
            if self.user.is_empty() { String::new() } else { format!("&username={}", percent(&self.user)) };
        format!("path={}{user}", percent(&self.path))
    }

    /// Whether the signature was made with `token`.
    pub(super) fn is_by(&self, token: &str) -> bool {
        self.by_token()(token)
    }

    /// As [`is_by`](Signed::is_by), for many tokens. The path, which may be long and comes from any client, is digested
    /// once for all of them.
    pub(super) fn by_token(&self) -> impl Fn(&str) -> bool {
        let operation = if self.writes { "write" } else { "read" };
        let before = Sha256::new_with_prefix(format!("{}:{operation}:{}:", self.path, self.user));
        let after = self.expires.as_ref().map(|expires| format!(":{expires}")).unwrap_or_default();
        move |token| {
            let digest = before.clone().chain_update(token).chain_update(&after).finalize();
            let wanted = format!("v1_{}", BASE64_STANDARD_NO_PAD.encode(digest));
            wanted.as_bytes().ct_eq(self.signature.as_bytes()).into()
        }
    }

    /// Whether its time is over, or is not a time.
    pub(super) fn has_expired(&self, now_unix: u64) -> bool {
        self.expires
            .as_ref()
            .is_some_and(|at| at.parse().is_ok_and(|at: u64| at <= now_unix) || at.parse::<u64>().is_err())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_signature_is_good_for_its_file_its_operation_and_its_time() {
        // Made by the Python client: get_signature("/home/user/a.txt", "read", "user", "token", 60) without a time.
        let text = "/home/user/a b.txt:read:user:secret:2000000000";
        let signature = format!("v1_{}", BASE64_STANDARD_NO_PAD.encode(Sha256::digest(text)));
        let encoded: String = form_urlencoded::Serializer::new(String::new())
            .extend_pairs([
                ("path", "/home/user/a b.txt"),
                ("username", "user"),
                ("signature", &signature),
                ("signature_expiration", "2000000000"),
            ])
            .finish();
        let signed = Signed::of(&encoded, false).unwrap();
        assert!(signed.is_by("secret"));
        assert!(!signed.is_by("other"));
        assert!(!Signed::of(&encoded, true).unwrap().is_by("secret"), "it is for reading");
        assert!(!Signed { path: "/etc/shadow".into(), ..signed.clone() }.is_by("secret"));
        assert!(!Signed { expires: None, ..signed.clone() }.is_by("secret"), "its time is a part of it");
        assert!(!signed.has_expired(1_999_999_999));
        assert!(signed.has_expired(2_000_000_000));
        assert!(Signed { expires: Some("soon".into()), ..signed }.has_expired(0));
        assert_eq!(Signed::of("path=/a&username=user", false), None);
        let long = "path=/a&signature=x&signature_expiration=000002000000000000000";
        assert_eq!(Signed::of(long, false), None, "each sandbox's token would be tried with it");
        for more in ["path=/etc/shadow", "username=root", "mode=4755", "whole=false", "signature=x"] {
            assert_eq!(Signed::of(&format!("{more}&{encoded}"), false), None, "{more}");
            assert_eq!(Signed::of(&format!("{encoded}&{more}"), false), None, "{more}");
        }
        let signed = Signed::of(&encoded, false).unwrap();
        assert_eq!(signed.query(), format!("path={}&username=user", percent("/home/user/a b.txt")));
    }
}

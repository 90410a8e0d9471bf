//! Who sent a request, and what they may do.
//!
//! `auth` finds out and puts an [`Principal`] into the request's extensions; whoever needs it takes it
//! from there.

use forkd_store::{Quota, TokenHash};

pub(crate) use forkd_store::Scope;

/// Whoever owns the host, and everything that nobody else owns.
pub(crate) const LOCAL: &str = "local";
/// The owner of a snapshot that all may use, and only admins may change.
pub(crate) const SHARED: &str = "*";

/// Who sent a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Principal {
    /// The name of the token; `local` for the unix socket.
    pub(crate) name: String,
    /// Whose what they make is.
    pub(crate) owner: String,
    pub(crate) scope: Scope,
    /// The most their owner may have.
    pub(crate) quota: Quota,
    /// What they showed to be let in; none if nothing had to be.
    pub(crate) proof: Option<Proof>,
}

/// The hash of a token somebody showed.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Proof(pub(crate) TokenHash);

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a token")
    }
}

impl Principal {
    /// Whoever may open the unix socket, and the daemon itself.
    pub(crate) fn local() -> Self {
        let (name, owner) = (LOCAL.into(), LOCAL.into());
        Principal { name, owner, scope: Scope::Admin, quota: Quota::default(), proof: None }
    }

    /// Whoever shows the token the daemon made itself.
    pub(crate) fn first_token() -> Self {
        Principal { name: FIRST_TOKEN.into(), ..Principal::local() }
    }

    pub(crate) fn is_admin(&self) -> bool {
        self.scope == Scope::Admin
    }

    /// Whether what `owner` has is theirs to see and to change.
    pub(crate) fn owns(&self, owner: &str) -> bool {
        self.is_admin() || self.owner == owner
    }

    /// Whether what `owner` has is theirs to look at and to fork from.
    pub(crate) fn may_use(&self, owner: &str) -> bool {
        self.owns(owner) || owner == SHARED
    }
}

/// The name of the token the daemon made itself.
pub(crate) const FIRST_TOKEN: &str = "default";

/// For what was written down before there were owners.
pub(crate) fn local_owner() -> String {
    LOCAL.into()
}

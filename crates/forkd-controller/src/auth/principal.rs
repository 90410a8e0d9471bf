//! The principal: the identity behind a request, its scope and its quota.
//!
//! The authentication layer of the API puts a [`Principal`] into the request's extensions; handlers take it from
//! there.

use forkd_store::{Quota, TokenHash};

pub(crate) use forkd_store::Scope;

/// The name of the host owner, which owns the host and everything without another owner.
pub(crate) const LOCAL: &str = "local";
/// The owner of a shared snapshot: all principals may use it, and only admins may change it.
pub(crate) const SHARED: &str = "*";

/// The identity that sent a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Principal {
    /// The name of the token; `local` for the unix socket.
    pub(crate) name: String,
    /// The owner of what the principal makes.
    pub(crate) owner: String,
    pub(crate) scope: Scope,
    /// The most that the owner may have.
    pub(crate) quota: Quota,
    /// The proof of identity; none if the connection needed none.
    pub(crate) proof: Option<Proof>,
}

/// The hash of the token in a request.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Proof(pub(crate) TokenHash);

impl std::fmt::Debug for Proof {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("a token")
    }
}

impl Principal {
    /// The principal of the unix socket, and of the daemon's own actions.
    pub(crate) fn local() -> Self {
        let (name, owner) = (LOCAL.into(), LOCAL.into());
        Principal { name, owner, scope: Scope::Admin, quota: Quota::default(), proof: None }
    }

    /// The principal of the token `default`, the first one, which the daemon made itself.
    pub(crate) fn default_token() -> Self {
        Principal { name: FIRST_TOKEN.into(), ..Principal::local() }
    }

    pub(crate) fn is_admin(&self) -> bool {
        self.scope == Scope::Admin
    }

    /// Whether the principal may see and change objects of `owner`.
    pub(crate) fn owns(&self, owner: &str) -> bool {
        self.is_admin() || self.owner == owner
    }

    /// Whether the principal may look at objects of `owner` and fork from them.
    pub(crate) fn may_use(&self, owner: &str) -> bool {
        self.owns(owner) || owner == SHARED
    }
}

/// The name of the token the daemon made itself.
pub(crate) const FIRST_TOKEN: &str = "default";

/// The owner in records that were written before there were owners.
pub(crate) fn local_owner() -> String {
    LOCAL.into()
}

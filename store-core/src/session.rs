//! Sessions: what the master knows of one connection.

use crate::tenant::TenantNo;

/// Where a connection comes from, as far as that says what it may.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// This host: a Unix socket, or the loopback address.
    Local,
    /// Anywhere else.
    Remote,
}

/// What the master knows of one connection: whose objects its requests are about, and what else it may.
///
/// One for each connection, from its beginning to its end. `Hello` fills it in; before that, requests are about the default
/// tenant's objects if the master has no other ([`MasterConfig::multi_tenants`](crate::MasterConfig::multi_tenants)), and are
/// refused otherwise.
#[derive(Debug)]
pub struct Session {
    pub(crate) peer: Peer,
    /// The tenant, and which of those that had the number.
    pub(crate) tenant: Option<(TenantNo, u32)>,
    /// It said `Hello`, and was let in.
    pub(crate) greeted: bool,
    /// It said the admin's secret.
    pub(crate) admin: bool,
}

impl Session {
    /// Of a connection that has said nothing yet.
    #[must_use]
    pub const fn new(peer: Peer) -> Self {
        Self { peer, tenant: None, greeted: false, admin: false }
    }

    /// Of the process that owns the master, which needs to prove nothing: it may whatever an admin may.
    #[must_use]
    pub const fn owner() -> Self {
        Self { peer: Peer::Local, tenant: None, greeted: true, admin: true }
    }
}

/// Of a process with itself.
impl Default for Session {
    fn default() -> Self {
        Self::new(Peer::Local)
    }
}

//! Sessions: what the master knows of one connection.

use alloc::collections::VecDeque;

use te_core::Instant;

use crate::proof::CHALLENGE_BYTES;
use crate::tenant::TenantNo;

/// Most leases that a connection can give back; older ones run out.
const LEASES_MAX: usize = 1_024;

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
/// One for each connection, from its beginning to its end, which is told to the master with
/// [`Master::session_ended`](crate::Master::session_ended). `Hello` fills it in; before that, requests are about the default
/// tenant's objects if the master has no other ([`MasterConfig::multi_tenants`](crate::MasterConfig::multi_tenants)), and are
/// refused otherwise.
#[derive(Debug)]
pub struct Session {
    pub(crate) peer: Peer,
    /// What the next proofs have to be made with.
    pub(crate) challenge: [u8; CHALLENGE_BYTES],
    /// The tenant, and which of those that had the number.
    pub(crate) tenant: Option<(TenantNo, u32)>,
    /// It said `Hello`, and was let in.
    pub(crate) greeted: bool,
    /// It proved the admin's secret.
    pub(crate) admin: bool,
    /// It proved the cluster's secret.
    pub(crate) cluster: bool,
    pub(crate) proofs_failed: u32,
    /// It spoke for a node and knew its key.
    pub(crate) node: bool,
    /// Its number, once the master has to tell it from others; 0: not yet.
    pub(crate) no: u64,
    /// Puts that it began and that are not finished.
    pub(crate) puts: u32,
    /// Who writes for it, by what it said last; 0: unknown.
    pub(crate) writer: u64,
    pub(crate) leases: Leases,
}

impl Session {
    /// Of a connection that has said nothing yet. The challenge is 32 random bytes, other ones for each connection.
    #[must_use]
    pub const fn new(peer: Peer, challenge: [u8; CHALLENGE_BYTES]) -> Self {
        Self {
            peer,
            challenge,
            tenant: None,
            greeted: false,
            admin: false,
            cluster: false,
            proofs_failed: 0,
            node: false,
            no: 0,
            puts: 0,
            writer: 0,
            leases: Leases::new(),
        }
    }

    /// Of the process that owns the master, which needs to prove nothing: it may whatever an admin may.
    #[must_use]
    pub const fn owner() -> Self {
        let mut owner = Self::new(Peer::Local, [0; CHALLENGE_BYTES]);
        (owner.greeted, owner.admin) = (true, true);
        owner
    }

    /// Whether it proved the admin's secret, or is the owner.
    #[must_use]
    pub const fn is_admin(&self) -> bool {
        self.admin
    }

    /// Whether it has spoken for a node, and knew its key.
    #[must_use]
    pub const fn is_node(&self) -> bool {
        self.node
    }

    /// Whether a put of it is unfinished, or it may still give leases back.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.puts > 0 || !self.leases.list.is_empty()
    }

    /// Proofs on this connection that proved nothing.
    #[must_use]
    pub const fn proofs_failed(&self) -> u32 {
        self.proofs_failed
    }
}

/// Of a process with itself.
impl Default for Session {
    fn default() -> Self {
        Self::new(Peer::Local, [0; CHALLENGE_BYTES])
    }
}

/// A lease that was granted and can be given back, once.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Granted {
    pub(crate) index: u32,
    pub(crate) generation: u64,
    /// It runs out by itself.
    pub(crate) until: Instant,
    returned: bool,
}

/// The latest leases of a connection, by the numbers they were granted under.
#[derive(Debug)]
pub(crate) struct Leases {
    /// In the order of their numbers, and so of their ends.
    list: VecDeque<Granted>,
    /// The number of the next.
    next: u64,
}

impl Leases {
    const fn new() -> Self {
        Self { list: VecDeque::new(), next: 1 }
    }

    /// The number that the next one will have.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// Memory that it takes, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        self.list.capacity() * size_of::<Granted>()
    }

    /// Notes one. What has run out, or is more than can be remembered, is forgotten.
    pub(crate) fn note(&mut self, now: Instant, index: u32, generation: u64, until: Instant) {
        while self.list.front().is_some_and(|oldest| oldest.returned || oldest.until <= now)
            || self.list.len() >= LEASES_MAX
        {
            self.list.pop_front();
        }
        self.list.push_back(Granted { index, generation, until, returned: false });
        self.next += 1;
    }

    /// Takes back those of a range that can be given back still, and tells `each` of them.
    pub(crate) fn take(&mut self, now: Instant, first: u64, count: u32, mut each: impl FnMut(Granted)) {
        let oldest = self.next - self.list.len() as u64;
        let end = first.saturating_add(count.into()).min(self.next);
        let start = first.max(oldest);
        for no in start..end {
            let granted = &mut self.list[(no - oldest) as usize];
            if !granted.returned && granted.until > now {
                granted.returned = true;
                each(*granted);
            }
        }
        while self.list.front().is_some_and(|oldest| oldest.returned || oldest.until <= now) {
            self.list.pop_front();
        }
    }
}

//! Sessions: the master's state per connection.

use alloc::collections::VecDeque;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::TenantNo;
use crate::proof::CHALLENGE_BYTES;

/// Most leases that a connection can return; older ones end by time.
const LEASES_MAX: usize = 1_024;

/// Where a connection comes from. Decides on some of its rights.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Peer {
    /// This host: a Unix socket, or the loopback address.
    Local,
    /// Anywhere else.
    Remote,
}

/// The master's state of one connection: the tenant that its requests act for, and its rights.
///
/// There is one per connection, from its beginning to its end, which is reported to the master with
/// [`Master::session_ended`](crate::Master::session_ended). `Hello` fills it in. Before that, requests act
/// for the default tenant if the master has no other
/// ([`MasterConfig::multi_tenants`](crate::MasterConfig::multi_tenants)), and are refused otherwise.
#[derive(Debug)]
pub struct Session {
    pub(crate) peer: Peer,
    /// The challenge that the next proofs have to be made with.
    pub(crate) challenge: [u8; CHALLENGE_BYTES],
    /// The tenant's number, and how often that number had been given before.
    pub(crate) tenant: Option<(TenantNo, u32)>,
    /// `Hello` succeeded.
    pub(crate) greeted: bool,
    /// The peer proved that it knows the admin secret.
    pub(crate) admin: bool,
    /// The peer proved that it knows the cluster secret.
    pub(crate) cluster: bool,
    pub(crate) proofs_failed: u32,
    /// The peer proved that it is a node, with the node's key.
    pub(crate) node: bool,
    /// The connection's number in the command log; 0: the log has not named it yet.
    pub(crate) slot: u32,
    /// The connection's number, once the master has to distinguish it from others; 0: it has none yet.
    pub(crate) no: u64,
    /// Number of its unfinished puts.
    pub(crate) puts: u32,
    /// The writer of its latest put; 0: unknown.
    pub(crate) writer: u64,
    pub(crate) leases: Leases,
}

impl Session {
    /// The state of a new connection. The challenge is 32 random bytes, different ones per connection.
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
            slot: 0,
            no: 0,
            puts: 0,
            writer: 0,
            leases: Leases::new(),
        }
    }

    /// The state of the process that runs the master: it has the rights of an admin without a proof.
    #[must_use]
    pub const fn owner() -> Self {
        let mut owner = Self::new(Peer::Local, [0; CHALLENGE_BYTES]);
        (owner.greeted, owner.admin) = (true, true);
        owner
    }

    /// Whether it has the rights of an admin.
    #[must_use]
    pub const fn is_admin(&self) -> bool {
        self.admin
    }

    /// Whether it proved that it is a node.
    #[must_use]
    pub const fn is_node(&self) -> bool {
        self.node
    }

    /// Whether it has an unfinished put or leases that it can return.
    #[must_use]
    pub fn holds(&self) -> bool {
        self.puts > 0 || !self.leases.list.is_empty()
    }

    /// Number of wrong proofs on this connection.
    #[must_use]
    pub const fn proofs_failed(&self) -> u32 {
        self.proofs_failed
    }
}

/// As [`Session::owner`].
impl Default for Session {
    fn default() -> Self {
        Self::new(Peer::Local, [0; CHALLENGE_BYTES])
    }
}

/// A lease that was granted and can be returned, once.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Granted {
    pub(crate) index: u32,
    pub(crate) generation: u64,
    /// The end of the lease.
    pub(crate) until: Instant,
    returned: bool,
}

/// The latest leases of a connection, by the numbers under which they were granted.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Leases {
    /// In the order of their numbers, which is the order of their ends.
    list: VecDeque<Granted>,
    /// The number of the next lease.
    next: u64,
    /// The longest that the list has been: what its memory is counted by, so that it is the same on a
    /// standby.
    longest: usize,
}

impl Leases {
    const fn new() -> Self {
        Self { list: VecDeque::new(), next: 1, longest: 0 }
    }

    /// The number that the next lease will have.
    pub(crate) const fn next(&self) -> u64 {
        self.next
    }

    /// Memory of the list, bytes.
    pub(crate) fn memory_bytes(&self) -> usize {
        match self.longest {
            0 => 0,
            longest => longest.next_power_of_two() * size_of::<Granted>(),
        }
    }

    /// Adds a lease. Leases that have ended, or are more than can be remembered, are forgotten.
    pub(crate) fn note(&mut self, now: Instant, index: u32, generation: u64, until: Instant) {
        while self.list.front().is_some_and(|oldest| oldest.returned || oldest.until <= now)
            || self.list.len() >= LEASES_MAX
        {
            self.list.pop_front();
        }
        self.list.push_back(Granted { index, generation, until, returned: false });
        self.longest = self.longest.max(self.list.len());
        self.next += 1;
    }

    /// Removes the leases of a range that can still be returned, and calls `each` with each of them.
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

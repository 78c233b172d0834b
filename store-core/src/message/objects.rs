//! Messages about objects: how they are put, read and removed.

use serde::{Deserialize, Serialize};

use super::{REPLICAS_MAX, SegmentNo};
use crate::Placement;
use crate::codec::{Key, Short};

/// How to place new objects, and how long to keep them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutOptions {
    /// Replicas wanted; at least one is had, each on a segment of its own.
    pub replicas: u8,
    /// Where they may go, and where they should.
    pub placement: Placement,
    /// How long to keep them.
    pub retention: Retention,
}

impl PutOptions {
    /// One replica, anywhere, kept as long as there is room and somebody reads it.
    pub const DEFAULT: Self = Self { replicas: 1, placement: Placement::ANY, retention: Retention::DEFAULT };
}

impl Default for PutOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What is said once of new objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutAsk {
    /// A random number of this put. A request that comes again, because its answer was lost, carries the same one: the space
    /// that an unfinished put of the same key, length, writer and nonce was given is given again, instead of being in the way.
    /// 0: it will not come again.
    pub nonce: u32,
    /// Where, how often, for how long.
    pub options: PutOptions,
    /// The identity of the writer's transfer engine, so that nodes can cut it off if it is lost in the middle; 0: unknown.
    pub writer: u64,
}

impl PutAsk {
    /// A put whose start is not repeated.
    #[must_use]
    pub const fn once(options: PutOptions) -> Self {
        Self { nonce: 0, options, writer: 0 }
    }

    /// For the item number `at` of a batch: a key that a batch has twice is taken, the second time.
    #[must_use]
    pub const fn item(&self, at: usize) -> Self {
        match self.nonce {
            0 => *self,
            nonce => Self { nonce: nonce.wrapping_add(at as u32), ..*self },
        }
    }
}

/// How long to keep an object, if not as long as any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// Whether eviction spares it.
    pub pin: Pin,
    /// It is gone this long after it was committed, pinned or not, milliseconds; not 0. Readers that have a lease by then
    /// finish. None: never.
    pub ttl_ms: Option<u32>,
    /// A number that its group chose, for instance the hash of a name. Objects of one group are evicted together or not at
    /// all: not while one of them is leased, pinned or being written. A group has 4,096 members at most.
    pub group: Option<u64>,
}

impl Retention {
    /// As any other.
    pub const DEFAULT: Self = Self { pin: Pin::None, ttl_ms: None, group: None };
}

/// How far eviction spares an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Pin {
    /// Not at all.
    #[default]
    None,
    /// As long as there is anything else to evict. A pin that nobody renews by reading runs out after
    /// [`MasterConfig::soft_pin_ttl_ms`](crate::MasterConfig::soft_pin_ttl_ms), and a later read renews it still.
    Soft,
    /// For good: until it is removed or its time to live is over.
    Hard,
}

/// An object to be.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewObject<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes of data; not 0. The space has room for the trailer, too: [`stored_len`](crate::blocks::stored_len).
    pub len: u64,
}

/// For how long a writer may write.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutWindow {
    /// From the moment the request was *first* sent. Later, another writer may take the key over.
    pub window_ms: u32,
}

/// One copy of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// Where.
    pub segment: SegmentNo,
    /// The first byte's address in the segment's export: its base plus the offset.
    pub addr: u64,
}

/// The copies of an object.
pub type Replicas = Short<Replica, REPLICAS_MAX>;

/// Space to write an object to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Names this put; [`Commit`] and [`Revocation`] carry it. Never given twice.
    pub generation: u64,
    /// Shows that whoever commits or revokes the put is who started it. Cannot be guessed from others.
    #[serde(with = "crate::codec::fixed")]
    pub handle: u64,
    /// Write all of them.
    pub replicas: Replicas,
}

/// A put that is finished.
///
/// Whoever sends it vouches that every replica was written and that no write of this put is still on its way.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// As given at its start.
    pub generation: u64,
    /// As given at its start.
    #[serde(with = "crate::codec::fixed")]
    pub handle: u64,
    /// CRC-32C of all data, [`bound`](crate::bound) to the key and the generation.
    pub checksum: u32,
}

/// A put that is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// As given at its start.
    pub generation: u64,
    /// As given at its start.
    #[serde(with = "crate::codec::fixed")]
    pub handle: u64,
    /// The writer vouches that no write of this put can land any more: none was sent, all are known to have ended, or the
    /// targets were fenced. Without it the space is held back until the nodes say that the writer is gone.
    pub quiet: bool,
}

/// For how long what a get returned may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// From the moment the request was *sent*, on the reader's own clock.
    pub lease_ms: u32,
    /// The number, in this connection, of the first lease that the answer grants. Each item that was found has the next
    /// one. A reader that is done gives them back: [`ReturnLeases`](super::ReturnLeases).
    pub first: u64,
}

/// Leases that one answer granted, by their numbers in the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRange {
    /// The first.
    pub first: u64,
    /// How many.
    pub count: u32,
}

/// A readable object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Bytes of data. The trailer follows them: [`crate::blocks`].
    pub len: u64,
    /// CRC-32C of all data, [`bound`](crate::bound) to the key and the generation; what was read counts only if it agrees.
    pub checksum: u32,
    /// Which put it is from.
    pub generation: u64,
    /// Any one of them has all bytes.
    pub replicas: Replicas,
}

/// An object to forget.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Even under a lease, even while it is written. (Its space is still held back until the lease or the writer is over.)
    pub force: bool,
}

//! Messages about objects: putting, reading and removing them.

use serde::{Deserialize, Serialize};

use super::REPLICAS_MAX;
use crate::codec::{Key, Short};
use crate::{Placement, SegmentNo};

/// How new objects are placed, and how long they are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutOptions {
    /// Number of replicas wanted, each on a segment of its own; at least one is made.
    pub replicas: u8,
    /// Where replicas may be placed, and where they should be.
    pub placement: Placement,
    /// How long the objects are kept.
    pub retention: Retention,
    /// What happens to an object that has the key already.
    pub existing: Existing,
}

impl PutOptions {
    /// One replica, anywhere, kept as long as there is room for it; an object that exists stays.
    pub const DEFAULT: Self = Self {
        replicas: 1,
        placement: Placement::ANY,
        retention: Retention::DEFAULT,
        existing: Existing::Keep,
    };
}

impl Default for PutOptions {
    fn default() -> Self {
        Self::DEFAULT
    }
}

/// What a put does when there is an object with its key.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Existing {
    /// The put ends with `ObjectAlreadyExists`, and the object stays.
    #[default]
    Keep,
    /// The put is an *upsert*: when it is committed, it replaces the object. Until then the object is served
    /// as before. A put that fails or is revoked leaves it as it is, and so does one that finds no room: the
    /// object itself is not evicted for the put that is to replace it.
    ///
    /// Any number of upserts of one key may be in progress. Each of them takes effect when it is committed,
    /// so the one that is committed last remains. An unfinished put of the key that is no upsert is over
    /// then.
    Replace(Inherit),
}

impl Existing {
    /// An upsert that inherits nothing.
    pub const REPLACE: Self = Self::Replace(Inherit::NOTHING);
}

/// What an upsert takes over from the object that is there when the upsert begins. Without such an object,
/// and where nothing is taken over, [`PutOptions::retention`] applies.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Inherit {
    /// Whether the object's pin is taken over.
    pub pin: InheritPin,
    /// The object's group, unless the upsert names another one.
    pub group: bool,
}

impl Inherit {
    /// Nothing.
    pub const NOTHING: Self = Self { pin: InheritPin::No, group: false };
}

/// Whether an upsert takes over the pin of the object that it replaces.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum InheritPin {
    /// No: the pin is the one that the upsert asks for.
    #[default]
    No,
    /// A hard pin only; an object without one gets the pin that the upsert asks for.
    Hard,
    /// The stronger one of the object's pin and the one that the upsert asks for. A soft pin that has run out
    /// is none.
    Stronger,
}

/// The common part of a batch of new objects.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutRequest {
    /// A random number of this put. A request that is repeated because its response was lost carries the same
    /// one: an unfinished put of the same key, length, writer and nonce gets the same space again, instead of
    /// blocking the new one. 0: the request is not repeated.
    pub nonce: u32,
    /// Replicas, placement and retention.
    pub options: PutOptions,
    /// The identity of the writer's transfer engine, so that nodes can cut it off if it disappears; 0:
    /// unknown, which is refused over a connection.
    pub writer: u64,
}

impl PutRequest {
    /// A put that is not repeated.
    #[must_use]
    pub const fn once(options: PutOptions) -> Self {
        Self { nonce: 0, options, writer: 0 }
    }

    /// The request for item number `at` of a batch. The nonces differ, so that a key that occurs twice in a
    /// batch is taken at its second occurrence.
    #[must_use]
    pub const fn item(&self, at: usize) -> Self {
        match self.nonce {
            0 => *self,
            nonce => Self { nonce: nonce.wrapping_add(at as u32), ..*self },
        }
    }
}

/// How long an object is kept, if not as long as any other.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Retention {
    /// How far eviction spares the object.
    pub pin: Pin,
    /// With [`Pin::Soft`]: how long the pin is valid after the object was last read or written, milliseconds,
    /// 1 to [`SOFT_PIN_TTL_MS_MAX`]. `None`:
    /// [`MasterConfig::soft_pin_ttl_ms`](crate::MasterConfig::soft_pin_ttl_ms).
    pub soft_pin_ttl_ms: Option<u32>,
    /// The object is removed this long after it was committed, pinned or not, milliseconds; not 0. Readers
    /// with a lease at that time finish. `None`: never.
    pub ttl_ms: Option<u32>,
    /// A number that the members of a group have in common, for instance the hash of a name. Objects of one
    /// group are evicted together or not at all: not while one of them is leased, pinned or being written. A
    /// group has at most 4,096 members.
    pub group: Option<u64>,
    /// Whether the object is copied to a disk of a node that has it in memory.
    pub disk: DiskCopy,
}

/// Whether and when an object is copied to a disk. An object with a pin, a time to live or a group, one
/// shorter than 4 KiB, and one of a tenant whose quota of disk bytes is used up have no copy.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum DiskCopy {
    /// Before it is evicted, if there is time.
    #[default]
    Auto,
    /// Never: its eviction removes it.
    Never,
    /// As soon as it is committed, or like `Auto` if no disk takes objects then. The put does not wait for
    /// the copy; the object has a replica on a disk when it is there.
    Now,
}

impl Retention {
    /// No pin, no time to live, no group.
    pub const DEFAULT: Self =
        Self { pin: Pin::None, soft_pin_ttl_ms: None, ttl_ms: None, group: None, disk: DiskCopy::Auto };

    /// Whether the times are within their limits and belong to what the object has, and it can have the copy
    /// on a disk that it is to have.
    #[must_use]
    pub(crate) const fn is_valid(&self) -> bool {
        let kept = !matches!(self.pin, Pin::None) || self.ttl_ms.is_some() || self.group.is_some();
        !matches!(self.ttl_ms, Some(0))
            && is_soft_pin_ttl(self.pin, self.soft_pin_ttl_ms)
            && !(kept && matches!(self.disk, DiskCopy::Now))
    }
}

/// Whether an object with this pin may have this validity of a soft pin.
pub(crate) const fn is_soft_pin_ttl(pin: Pin, ttl_ms: Option<u32>) -> bool {
    match ttl_ms {
        None => true,
        Some(ttl_ms) => matches!(pin, Pin::Soft) && ttl_ms > 0 && ttl_ms <= SOFT_PIN_TTL_MS_MAX,
    }
}

/// Longest validity of a soft pin that an object can have of its own: 30 days, milliseconds.
pub const SOFT_PIN_TTL_MS_MAX: u32 = 30 * 86_400_000;

/// How the retention of an object changes after its put. The default changes nothing. An object's group does
/// not change.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct RetentionChange {
    /// The new pin; a soft pin is renewed. `None`: as it is.
    pub pin: Option<Pin>,
    /// The new validity of the soft pin that the object then has, as [`Retention::soft_pin_ttl_ms`]; the
    /// pin is renewed. `None`: as it is, or for a new soft pin
    /// [`MasterConfig::soft_pin_ttl_ms`](crate::MasterConfig::soft_pin_ttl_ms).
    pub soft_pin_ttl_ms: Option<u32>,
    /// The new time to live.
    pub ttl: TtlChange,
}

/// How the time to live of an object changes.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum TtlChange {
    /// Not at all.
    #[default]
    Keep,
    /// The object has none any more.
    Never,
    /// The object is removed this long after the change, milliseconds; not 0. Readers with a lease at that
    /// time finish.
    After(u32),
}

/// How far eviction spares an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, PartialOrd, Ord, Serialize, Deserialize)]
pub enum Pin {
    /// Not at all.
    #[default]
    None,
    /// As long as there is anything else to evict. A pin that is not renewed by reads runs out after
    /// [`Retention::soft_pin_ttl_ms`], and a later read renews it still.
    Soft,
    /// For good: until the object is removed or its time to live is over.
    Hard,
}

/// The object that a put creates.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NewObject<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes of data; not 0. The space includes the trailer: [`stored_len`](crate::chunks::stored_len).
    pub len: u64,
}

/// The time limit of a writer.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct PutWindow {
    /// Milliseconds from the moment that the request was *first* sent. After it, another writer may take over
    /// the key of a put that is no upsert.
    pub window_ms: u32,
}

/// One replica of an object.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Replica {
    /// The segment that it is on.
    pub segment: SegmentNo,
    /// The first byte's address in the segment's export: its base plus the offset.
    pub addr: u64,
}

/// The replicas of an object.
pub type Replicas = Short<Replica, REPLICAS_MAX>;

/// Space for an object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Allocation {
    /// Identifies this put; [`Commit`] and [`Revocation`] carry it. Never used twice.
    pub generation: u64,
    /// Proves that a commit or revocation comes from the process that started the put. Cannot be guessed from
    /// other handles.
    #[serde(with = "crate::codec::fixed")]
    pub handle: u64,
    /// The replicas to write, all of them.
    pub replicas: Replicas,
}

/// A put that is finished.
///
/// The sender vouches that every replica was written and that no write of this put can still land.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Commit<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// [`Allocation::generation`] of the put.
    pub generation: u64,
    /// [`Allocation::handle`] of the put.
    #[serde(with = "crate::codec::fixed")]
    pub handle: u64,
    /// CRC-32C of all data, [`bound`](crate::bound) to the key and the generation.
    pub checksum: u32,
}

/// A put that is given up.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Revocation<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// [`Allocation::generation`] of the put.
    pub generation: u64,
    /// [`Allocation::handle`] of the put.
    #[serde(with = "crate::codec::fixed")]
    pub handle: u64,
    /// The writer vouches that no write of this put can land any more: none was sent, all are known to have
    /// ended, or the targets were fenced. Otherwise the space is pending release until the nodes report that
    /// the writer is cut off.
    pub quiet: bool,
}

/// Where an object is that is to be in memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Prefetched {
    /// Nowhere: it does not exist, or its node is out of reach.
    Absent,
    /// On a disk alone. It is being copied into memory, or will be; or there is no room for it.
    Coming,
    /// In memory, and leased.
    InMemory,
}

/// How long a reader needs the leases of a get.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum LeaseWanted {
    /// For the time of a short read. A master whose commands are confirmed by others, or by a journal,
    /// answers before they have the lease, and grants at most
    /// [`QUICK_LEASE_MS`](crate::QUICK_LEASE_MS): the next leader waits so long before it reuses any
    /// space.
    #[default]
    Quick,
    /// For the configured time. The answer waits until the lease is confirmed.
    Lasting,
}

/// How long the objects that a get returned may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// Milliseconds from the moment that the request was *sent*, on the reader's own clock.
    pub lease_ms: u32,
    /// The number, within this connection, of the first lease that the response grants. Each item that was
    /// found has the next one. A reader that is done returns them: [`ReturnLeases`](super::ReturnLeases).
    pub first: u64,
}

/// Leases that one response granted, by their numbers within the connection.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeaseRange {
    /// The number of the first lease.
    pub first: u64,
    /// The number of leases.
    pub count: u32,
}

/// A readable object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Bytes of data. The trailer follows them: [`crate::chunks`].
    pub len: u64,
    /// CRC-32C of all data, [`bound`](crate::bound) to the key and the generation; what was read counts only
    /// if it matches.
    pub checksum: u32,
    /// The put that stored the object.
    pub generation: u64,
    /// The replicas; each has all bytes.
    pub replicas: Replicas,
}

/// An object to remove.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Removal<'a> {
    /// The object's key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Remove it even under a lease, and even while it is being written. (Its space is still pending release
    /// until the lease or the writer is over.)
    pub force: bool,
}

/// Which objects a removal removes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum RemoveMode {
    /// Objects that are neither leased nor being written.
    IfUnused,
    /// All objects, even under a lease, and even while they are being written.
    Force,
}

impl RemoveMode {
    /// The mode that [`Removal::force`] stands for.
    #[must_use]
    pub const fn of(force: bool) -> Self {
        if force { Self::Force } else { Self::IfUnused }
    }
}

/// What a writer vouches for when it gives up a put.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriterState {
    /// Nothing: writes of the put may still land.
    MayWrite,
    /// No write of the put can land any more.
    Quiet,
}

impl WriterState {
    /// The state that [`Revocation::quiet`] stands for.
    #[must_use]
    pub const fn of(quiet: bool) -> Self {
        if quiet { Self::Quiet } else { Self::MayWrite }
    }
}

//! Messages: what is asked and what is answered, operation by operation.
//!
//! Every operation is a batch: a head said once, then one item for each key; one key is a batch of one. Answers have one
//! item for each item asked, in the same order. Nothing is allocated to decode one.
//!
//! | Kind | head asked, items asked | head answered, items answered | again |
//! |---|---|---|---|
//! | [`Hello`] | [`Greeting`] · – | [`Welcome`] · – | changes nothing |
//! | [`Mount`] | [`MountSegment`] · – | [`Mounted`] · – | the same incarnation mounts the same: the same number |
//! | [`Unmount`] | [`UnmountSegment`] · – | – · – | `SegmentNotFound`: what is gone stays gone, numbers are never used twice |
//! | [`Beat`] | [`Heartbeat`] · – | [`NodeStatus`] · – | lives, still |
//! | [`PutStart`] | [`PutAsk`] · [`NewObject`]s | [`PutWindow`] · [`Allocation`] or error | the same space, by its nonce, while the put is unfinished; then `ObjectAlreadyExists` |
//! | [`PutEnd`] | – · [`Commit`]s | – · `()` or error | committed, by its generation |
//! | [`PutRevoke`] | – · [`Revocation`]s | – · `()` or error | `ObjectNotFound`, by its generation: as wanted |
//! | [`Get`] | – · [`Key`]s | [`Lease`] · [`Object`] or error | a lease that ends later |
//! | [`Exists`] | – · [`Key`]s | – · `bool` | changes nothing |
//! | [`Remove`] | – · [`Removal`]s | – · `()` or error | `ObjectNotFound`; what was put in between goes, too, as eviction might have done |
//! | [`List`] | [`ListQuery`] · – | [`ListPosition`] · [`Listed`] | changes nothing |
//! | [`Segments`] | – · segment ids, none for all | – · [`SegmentInfo`] or error | changes nothing |
//! | [`ReadStats`] | – · – | [`Stats`] · – | changes nothing |
//! | [`ExplainEviction`] | how many at most · – | [`EvictionReport`] · [`NextVictim`]s | changes nothing |
//! | [`ReadConfig`] | – · – | [`MasterConfig`] · – | changes nothing |
//! | [`EvictNow`] | [`Evict`] · – | [`Evicted`] · – | nothing to evict: what is asked for is what to leave |
//! | [`ListNodes`] | – · – | – · [`NodeInfo`] | changes nothing |
//! | [`WhyKept`] | – · [`Key`]s | – · [`Kept`] or none, or error | changes nothing |
//! | [`ReportReplicas`] | who · [`BadReplica`]s | – · [`Verdict`] or error | a reporter counts once; what is dropped already is `ReplicaNotFound` |
//! | [`FindReplicas`] | – · [`Key`]s | – · [`ReplicaInfos`] or error | changes nothing |
//! | [`CreateTasks`] | – · [`NewTask`]s | – · [`TaskId`] or error | the same task while it is unfinished; then, if a source or target was named, `ReplicaNotFound` or `ReplicaAlreadyExists`; else one more |
//! | [`QueryTasks`] | – · task ids | – · [`TaskInfo`] or error | changes nothing |
//! | [`ListTasks`] | [`TaskQuery`] · – | [`ListPosition`] · [`TaskInfo`]s | changes nothing |
//! | [`CancelTasks`] | – · task ids | – · [`TaskInfo`] or error | is canceled, still |
//! | [`RetryTasks`] | – · task ids | – · [`TaskInfo`] or error | is pending or processing, still |
//! | [`FetchTasks`] | [`FetchAsk`] · – | [`Lease`] · [`TaskOrder`]s | the same orders, with the same attempts, and more if there is room |
//! | [`EndTasks`] | which node · [`TaskEnd`]s | – · `()` or error | has ended, by its attempt |
//! | [`OrderSegments`] | – · [`SegmentOrder`]s | – · [`DrainInfo`] or error | is in that state, still |
//! | [`DrainStatus`] | – · segment ids, none for all that are not active | – · [`DrainInfo`] or error | changes nothing |
//! | [`ReadTaskReport`] | – · – | [`TaskReport`] · – | changes nothing |
//!
//! Every operation may be sent again when its answer was lost: the last column says what the second one does.
//!
//! ```
//! use store_core::{Frame, Key, message::{Get, Operation}};
//!
//! let mut out = Vec::new();
//! Get::encode_request(&mut out, 7, &(), [b"a".as_slice(), b"bc"].map(Key).into_iter())?;
//! let (frame, len) = Frame::parse(&out)?.expect("complete");
//! assert_eq!(len, out.len());
//! let ((), keys) = Get::decode_request(frame.body)?;
//! assert_eq!(keys.map(|key| key.0.len()).collect::<Vec<_>>(), [1, 2]);
//! # Ok::<(), store_core::WireError>(())
//! ```

mod tasks;

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::codec::{self, Items, Key, Short};
use crate::tenant::DEFAULT_TENANT;
use crate::wire::{Frame, FrameWriter, Header, KEYS_PER_BATCH_MAX, VERSION, WireError};
use crate::{ErrorCode, EvictionPolicy, MasterConfig, Placement, Stats};

pub use tasks::*;

/// Most replicas that an object can have.
pub const REPLICAS_MAX: usize = 8;
/// Longest name and longest endpoint of a segment, bytes.
pub const NAME_BYTES_MAX: usize = 256;

/// The number of a segment in its master's life: counted up, never used twice.
pub type SegmentNo = u32;

/// One operation: its number on the wire and the types of its messages.
pub trait Operation {
    /// Its number.
    const KIND: Kind;
    /// Said once in the request.
    type Ask<'a>: Serialize + Deserialize<'a>;
    /// Said for each key in the request.
    type AskItem<'a>: Serialize + Deserialize<'a>;
    /// Said once in the response.
    type Answer<'a>: Serialize + Deserialize<'a>;
    /// Said for each key in the response.
    type AnswerItem<'a>: Serialize + Deserialize<'a>;

    /// Appends a request frame.
    ///
    /// # Errors
    /// `TooManyKeys`, `TooLong`; `out` is as it was.
    fn encode_request<'a>(
        out: &mut Vec<u8>,
        request_id: u64,
        ask: &Self::Ask<'_>,
        items: impl ExactSizeIterator<Item = Self::AskItem<'a>>,
    ) -> Result<(), WireError> {
        let header = Header { kind: Self::KIND as u8, response: false, request_id, status: 0 };
        encode(out, &header, ask, items)
    }

    /// Reads the body of a request.
    ///
    /// # Errors
    /// `Body`, `TooManyKeys`.
    fn decode_request(body: &[u8]) -> Result<(Self::Ask<'_>, Items<'_, Self::AskItem<'_>>), WireError> {
        let (ask, rest) = codec::take(body)?;
        Ok((ask, Items::parse(rest)?))
    }

    /// Appends a response frame. A server that answers as it goes wants [`Answer`] instead.
    ///
    /// # Errors
    /// `TooManyKeys`, `TooLong`; `out` is as it was.
    fn encode_response<'a>(
        out: &mut Vec<u8>,
        request_id: u64,
        answer: &Self::Answer<'_>,
        items: impl ExactSizeIterator<Item = Self::AnswerItem<'a>>,
    ) -> Result<(), WireError> {
        let header = Header { kind: Self::KIND as u8, response: true, request_id, status: 0 };
        encode(out, &header, answer, items)
    }

    /// Reads a response: its body, or why the request failed as a whole.
    ///
    /// # Errors
    /// The status of the response; `InternalError` for one that does not decode or is not of this operation.
    fn decode_response<'a>(
        frame: &Frame<'a>,
    ) -> Result<(Self::Answer<'a>, Items<'a, Self::AnswerItem<'a>>), ErrorCode> {
        frame.header.result()?;
        if frame.header.kind != Self::KIND as u8 || !frame.header.response {
            return Err(ErrorCode::InternalError);
        }
        let (answer, rest) = codec::take(frame.body).map_err(|_| ErrorCode::InternalError)?;
        Ok((answer, Items::parse(rest).map_err(|_| ErrorCode::InternalError)?))
    }
}

/// A response whose items are appended one by one; the count is known before.
#[derive(Debug)]
pub struct Answer<'v> {
    frame: FrameWriter<'v>,
}

impl<'v> Answer<'v> {
    /// Appends header, head and count.
    ///
    /// # Errors
    /// `Body` when the head does not serialise.
    pub fn begin<O: Operation>(
        out: &'v mut Vec<u8>,
        request_id: u64,
        answer: &O::Answer<'_>,
        count: usize,
    ) -> Result<Self, WireError> {
        let header = Header { kind: O::KIND as u8, response: true, request_id, status: 0 };
        let mut frame = FrameWriter::begin(out, &header);
        codec::put(frame.body(), answer)?;
        codec::put(frame.body(), &(count as u32))?;
        Ok(Self { frame })
    }

    /// Appends one item.
    ///
    /// # Errors
    /// `Body` when it does not serialise.
    pub fn item<T: Serialize>(&mut self, item: &T) -> Result<(), WireError> {
        codec::put(self.frame.body(), item)
    }

    /// Fills in the length.
    ///
    /// # Errors
    /// `TooLong`; the buffer is as it was before.
    pub fn finish(self) -> Result<(), WireError> {
        self.frame.finish()
    }
}

/// Appends a response to a request that failed as a whole.
pub fn encode_failure(out: &mut Vec<u8>, kind: u8, request_id: u64, error: ErrorCode) {
    let header = Header { kind, response: true, request_id, status: error.code() };
    // An empty body is never too long.
    let _ = FrameWriter::begin(out, &header).finish();
}

fn encode<T: Serialize, H: Serialize>(
    out: &mut Vec<u8>,
    header: &Header,
    head: &H,
    items: impl ExactSizeIterator<Item = T>,
) -> Result<(), WireError> {
    let keys = items.len();
    if keys > KEYS_PER_BATCH_MAX {
        return Err(WireError::TooManyKeys { keys });
    }
    let mut frame = FrameWriter::begin(out, header);
    codec::put(frame.body(), head)?;
    codec::put(frame.body(), &(keys as u32))?;
    for item in items {
        codec::put(frame.body(), &item)?;
    }
    frame.finish()
}

macro_rules! operations {
    ($($(#[$doc:meta])* $name:ident = $number:literal, ($ask:ty, $ask_item:ty) -> ($answer:ty, $answer_item:ty);)*) => {
        /// The number of an operation in a frame's header.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Kind {
            $($(#[$doc])* $name = $number,)*
        }

        impl Kind {
            /// Every operation of this release.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The operation with this number.
            #[must_use]
            pub const fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Its name, for logs and metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($name),)*
                }
            }
        }

        $(
            $(#[$doc])*
            #[derive(Clone, Copy, Debug)]
            pub enum $name {}

            impl Operation for $name {
                const KIND: Kind = Kind::$name;
                type Ask<'a> = $ask;
                type AskItem<'a> = $ask_item;
                type Answer<'a> = $answer;
                type AnswerItem<'a> = $answer_item;
            }
        )*
    };
}

operations! {
    /// First on every connection: versions and limits.
    Hello = 1, (Greeting<'a>, ()) -> (Welcome, ());
    /// A node contributes memory.
    Mount = 2, (MountSegment<'a>, ()) -> (Mounted, ());
    /// A node takes it back.
    Unmount = 3, (UnmountSegment, ()) -> ((), ());
    /// A node says that it lives.
    Beat = 4, (Heartbeat, ()) -> (NodeStatus, ());
    /// Space for new objects. They are not readable yet.
    PutStart = 5, (PutAsk, NewObject<'a>) -> (PutWindow, Result<Allocation, ErrorCode>);
    /// The bytes are in place, all of them: readable from here.
    PutEnd = 6, ((), Commit<'a>) -> ((), Result<(), ErrorCode>);
    /// The writer gives up.
    PutRevoke = 7, ((), Revocation<'a>) -> ((), Result<(), ErrorCode>);
    /// Where objects are, with a lease to read them.
    Get = 8, ((), Key<'a>) -> (Lease, Result<Object, ErrorCode>);
    /// Whether they are readable. Neither leases nor counts as a use.
    Exists = 9, ((), Key<'a>) -> ((), bool);
    /// Forget objects.
    Remove = 10, ((), Removal<'a>) -> ((), Result<(), ErrorCode>);
    /// Keys, a page at a time.
    List = 11, (ListQuery<'a>, ()) -> (ListPosition, Listed<'a>);
    /// What segments are and where.
    Segments = 12, ((), SegmentNo) -> ((), Result<SegmentInfo<'a>, ErrorCode>);
    /// Counters and gauges.
    ReadStats = 13, ((), ()) -> (Stats, ());
    /// What eviction did, what keeps objects from it, and what goes next.
    ExplainEviction = 21, (u32, ()) -> (EvictionReport, NextVictim<'a>);
    /// The settings that the master runs with, secrets left out. For admins.
    ReadConfig = 80, ((), ()) -> (MasterConfig, ());
    /// Evict now. For admins.
    EvictNow = 81, (Evict, ()) -> (Evicted, ());
    /// Who the nodes are. For admins.
    ListNodes = 82, ((), ()) -> ((), NodeInfo);
    /// Why objects cannot be evicted now; none if they can.
    WhyKept = 22, ((), Key<'a>) -> ((), Result<Option<Kept>, ErrorCode>);
    /// A reader, which names itself by a random number, found replicas with other bytes than were committed.
    ReportReplicas = 40, (u64, BadReplica<'a>) -> ((), Result<Verdict, ErrorCode>);
    /// Where objects are, readable or not. Neither leases nor counts as a use.
    FindReplicas = 41, ((), Key<'a>) -> ((), Result<ReplicaInfos, ErrorCode>);
    /// Copy or move replicas.
    CreateTasks = 42, ((), NewTask<'a>) -> ((), Result<TaskId, ErrorCode>);
    /// How far tasks are.
    QueryTasks = 43, ((), TaskId) -> ((), Result<TaskInfo<'a>, ErrorCode>);
    /// Tasks, a page at a time.
    ListTasks = 44, (TaskQuery, ()) -> (ListPosition, TaskInfo<'a>);
    /// Give tasks up.
    CancelTasks = 45, ((), TaskId) -> ((), Result<TaskInfo<'a>, ErrorCode>);
    /// Try tasks again that were given up.
    RetryTasks = 46, ((), TaskId) -> ((), Result<TaskInfo<'a>, ErrorCode>);
    /// A node asks for its work.
    FetchTasks = 47, (FetchAsk, ()) -> (Lease, TaskOrder<'a>);
    /// A node has done it, or not.
    EndTasks = 48, (u64, TaskEnd) -> ((), Result<(), ErrorCode>);
    /// Drain segments, spare them, or take them back into use.
    OrderSegments = 49, ((), SegmentOrder) -> ((), Result<DrainInfo, ErrorCode>);
    /// How far segments are drained; none for all that are not active.
    DrainStatus = 50, ((), SegmentNo) -> ((), Result<DrainInfo, ErrorCode>);
    /// Counters and gauges of tasks, drains, heat and reports.
    ReadTaskReport = 51, ((), ()) -> (TaskReport, ());
}

/// A client or a node introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Greeting<'a> {
    /// The protocol's version there.
    pub version: u16,
    /// Whose objects the connection is about, 1 to 64 bytes; empty: nobody's, as a node's.
    pub tenant: &'a str,
    /// The tenant's secret, if it has one; 256 bytes at most.
    #[serde(borrow)]
    pub secret: Key<'a>,
    /// The admin's secret, of those who may say it; 256 bytes at most.
    #[serde(borrow)]
    pub admin: Key<'a>,
}

/// A client of the default tenant, of this release.
impl Default for Greeting<'_> {
    fn default() -> Self {
        Self { version: VERSION, tenant: DEFAULT_TENANT, secret: Key(&[]), admin: Key(&[]) }
    }
}

/// The master introduces itself.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Welcome {
    /// The protocol's version here.
    pub version: u16,
    /// Which life of the master this is. When it changes, forget every segment, lease and generation of the former one.
    pub epoch: u64,
    /// Most keys in a request.
    pub keys_per_batch_max: u32,
    /// Longest key, bytes.
    pub key_bytes_max: u32,
    /// Most replicas of an object.
    pub replicas_max: u8,
    /// How long a read may take.
    pub lease_ms: u32,
    /// A node that is silent for longer is given up.
    pub node_ttl_ms: u32,
}

/// A piece of a node's memory.
///
/// `incarnation` belongs to the node's *export*. A node that restarts, that is told [`NodeStatus::NeedRemount`] or
/// `IllegalClient`, or that meets a master of another [`Welcome::epoch`] than the one it exported for, first tears down what
/// it exported, so that nobody who holds the old export can still write there; then it exports afresh and mounts under a
/// higher incarnation. Nanoseconds of wall time at the export are a good one. A mount that got no answer is repeated as it
/// was, as long as the master is the same.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct MountSegment<'a> {
    /// Which node; chosen by it, unique in the cluster (a random number will do).
    pub node: u64,
    /// Which life of the node's exports. Later is higher.
    pub incarnation: u64,
    /// The segment's name, unique in the cluster. Mounting it with a higher incarnation replaces the old one.
    pub name: &'a str,
    /// Where the transfer engine finds it, `host:port`.
    pub endpoint: &'a str,
    /// Added to every offset in it to make a replica's address; 0 for engines that address exports by offset.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Which of the engine's exports it is.
    pub export: Export,
    /// The master's [`Welcome::epoch`] when the memory was exported. A master of another life refuses the mount with
    /// `IllegalClient`, because whoever acts on the word of the former one could still write there.
    pub epoch: u64,
}

/// Tells an export from others that had, or will have, the same endpoint and the same addresses.
///
/// The master passes it on. A client that opened the endpoint compares before it moves a byte.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub struct Export {
    /// Which life of the engine.
    pub engine: u64,
    /// Which of its regions; never used twice in one life.
    pub region: u64,
}

/// A mounted segment.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Mounted {
    /// Its number.
    pub segment: SegmentNo,
    /// Send a heartbeat at least this often; a third of it is good.
    pub node_ttl_ms: u32,
}

/// A node takes a segment back.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct UnmountSegment {
    /// Whose.
    pub node: u64,
    /// Which life of the node's exports it was mounted for.
    pub incarnation: u64,
    /// Which.
    pub segment: SegmentNo,
}

/// A node says that it lives.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Heartbeat {
    /// Which node.
    pub node: u64,
    /// Which life of it.
    pub incarnation: u64,
}

/// What the master knows about a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum NodeStatus {
    /// Its segments are mounted.
    Ok,
    /// They are, and there are tasks for it: [`FetchTasks`].
    Work,
    /// It has none here (never had, or was given up): export afresh and mount under a higher incarnation.
    NeedRemount,
}

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
    /// that an unfinished put of the same key, length and nonce was given is given again, instead of being in the way. 0: it
    /// will not come again.
    pub nonce: u32,
    /// Where, how often, for how long.
    pub options: PutOptions,
}

impl PutAsk {
    /// A put whose start is not repeated.
    #[must_use]
    pub const fn once(options: PutOptions) -> Self {
        Self { nonce: 0, options }
    }

    /// For the item number `at` of a batch: a key that a batch has twice is taken, the second time.
    #[must_use]
    pub const fn item(&self, at: usize) -> Self {
        match self.nonce {
            0 => *self,
            nonce => Self { nonce: nonce.wrapping_add(at as u32), options: self.options },
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
    /// CRC-32C of all data.
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
    /// The writer vouches that no write of this put can land any more: none was sent, all are known to have ended, or the
    /// targets were fenced. Without it the space is held back until the release timeout.
    pub quiet: bool,
}

/// For how long what a get returned may be read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Lease {
    /// From the moment the request was *sent*, on the reader's own clock.
    pub lease_ms: u32,
}

/// A readable object.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Object {
    /// Bytes of data. The trailer follows them: [`crate::blocks`].
    pub len: u64,
    /// CRC-32C of all data; what was read counts only if it agrees.
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

/// Which keys to list.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListQuery<'a> {
    /// Keys that begin so; empty for all.
    #[serde(borrow)]
    pub prefix: Key<'a>,
    /// 0 to begin; then what the answer before gave.
    pub cursor: u64,
    /// Most keys in the answer; at most `KEYS_PER_BATCH_MAX`.
    pub limit: u32,
}

/// Where the next page begins.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct ListPosition {
    /// 0: that was all. A page may be short or empty and still not be the last.
    pub cursor: u64,
}

/// One key of a listing.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Listed<'a> {
    /// The key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes.
    pub len: u64,
    /// Copies.
    pub replicas: u8,
    /// Readable; else it is being written.
    pub complete: bool,
    /// Readers hold a lease.
    pub leased: bool,
}

/// What a segment is and where.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct SegmentInfo<'a> {
    /// Its number.
    pub segment: SegmentNo,
    /// Whose.
    pub node: u64,
    /// Which life of that node's exports.
    pub incarnation: u64,
    /// Its name.
    pub name: &'a str,
    /// Where the transfer engine finds it, `host:port`.
    pub endpoint: &'a str,
    /// Added to offsets to make addresses.
    pub base: u64,
    /// Bytes.
    pub len: u64,
    /// Which of the engine's exports it is.
    pub export: Export,
    /// Bytes that are allocated or held back.
    pub used: u64,
    /// Longest object for which there is room without eviction, bytes; a little more may fit.
    pub free_bytes_largest: u64,
}

/// What keeps an object from eviction.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum Kept {
    /// Readers hold a lease to it, or to another of its group.
    Leased,
    /// It is being written.
    Unfinished,
    /// Pinned as long as there is anything else to evict.
    SoftPinned,
    /// Pinned for good.
    HardPinned,
    /// Another member of its group is pinned or being written.
    Group,
}

/// Eviction: gauges (now) and counters (since the master was created). A counter ends in `_total`.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct EvictionReport {
    /// How the object to evict is chosen.
    pub policy: EvictionPolicy,
    /// Objects and groups to choose from. Some may be leased: that shows when their turn comes.
    pub candidates: u64,
    /// Objects and groups whose turn came while they were leased, and that wait for the end of the lease.
    pub kept_leased: u64,
    /// Objects that a soft pin spares.
    pub kept_soft_pinned: u64,
    /// Objects that a hard pin spares.
    pub kept_hard_pinned: u64,
    /// Objects that are kept because another of their group is pinned or being written.
    pub kept_by_group: u64,
    /// Objects that are being written.
    pub kept_unfinished: u64,
    /// Bytes that are pinned for good, each object counted once.
    pub hard_pinned_bytes: u64,
    /// Groups with a member.
    pub groups: u64,
    /// Bytes of all segments that are allocated or held back.
    pub used_bytes: u64,
    /// Eviction begins above this.
    pub high_mark_bytes: u64,
    /// It ends here.
    pub low_mark_bytes: u64,
    /// Objects evicted.
    pub evictions_total: u64,
    /// Bytes of them, each object counted once.
    pub evicted_bytes_total: u64,
    /// Of the objects evicted, those that made room for a put that found none; the rest went at the watermark.
    pub evicted_for_room_total: u64,
    /// Times that eviction was wanted and nothing could go.
    pub starved_total: u64,
    /// Candidates looked at: the work of it all.
    pub looks_total: u64,
    /// Times that a turn came and there was a lease.
    pub kept_leased_total: u64,
    /// Times that a softly pinned object was wanted, and a lease or another of its group kept it.
    pub kept_soft_pinned_total: u64,
    /// Soft pins that ran out.
    pub soft_pins_decayed_total: u64,
    /// Soft pins that a read renewed after they had run out.
    pub soft_pins_revived_total: u64,
    /// Softly pinned objects, or groups with one, that went because there was nothing else.
    pub soft_pinned_evicted_total: u64,
    /// Groups of several that were evicted.
    pub groups_evicted_total: u64,
    /// Objects whose time to live was over.
    pub expired_total: u64,
    /// Keys that were put again soon after they had been evicted, or that preceded such a key in their batch.
    pub returned_total: u64,
}

/// One that would be evicted soon.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NextVictim<'a> {
    /// Its key.
    #[serde(borrow)]
    pub key: Key<'a>,
    /// Bytes.
    pub len: u64,
    /// Objects that go with it, itself included.
    pub company: u32,
    /// Readers hold a lease: it will be set aside until that is over.
    pub leased: bool,
}

/// How much to leave: objects go until neither bound is passed. What to leave rather than what to take, so that asking twice
/// is asking once.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evict {
    /// Objects, those being written not counted.
    pub objects_max: u64,
    /// Bytes of all segments that are allocated or held back.
    pub used_bytes_max: u64,
}

/// What was evicted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    /// Objects.
    pub objects: u64,
    /// Bytes of them, each counted once.
    pub bytes: u64,
    /// A bound is still passed and there may be more to evict: ask again.
    pub more: bool,
}

/// A node that has memory in the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct NodeInfo {
    /// Which.
    pub node: u64,
    /// Which life of its exports.
    pub incarnation: u64,
    /// Segments that it has mounted.
    pub segments: u32,
    /// Bytes of them.
    pub capacity: u64,
    /// Bytes of them that are allocated or held back.
    pub used: u64,
    /// How long it has not been heard of, ms.
    pub silent_ms: u64,
}

//! Messages: what is asked and what is answered, operation by operation.
//!
//! Every operation is a batch: a head said once, then one item for each key; one key is a batch of one. Answers have one
//! item for each item asked, in the same order. Nothing is allocated to decode one.
//!
//! | Kind | head asked, items asked | head answered, items answered | again |
//! |---|---|---|---|
//! | [`Hello`] | [`Greeting`] · – | [`Welcome`] · – | changes nothing |
//! | [`Mount`] | [`MountSegment`] · – | [`MountAnswer`] · – | the same incarnation mounts the same: the same number |
//! | [`Unmount`] | [`UnmountSegment`] · – | – · – | `SegmentNotFound`: what is gone stays gone, numbers are never used twice |
//! | [`Beat`] | [`Heartbeat`] · – | [`NodeStatus`] · – | lives, still |
//! | [`PutStart`] | [`PutAsk`] · [`NewObject`]s | [`PutWindow`] · [`Allocation`] or error | the same space, by its writer and nonce, while the put is unfinished; then `ObjectAlreadyExists` |
//! | [`PutEnd`] | – · [`Commit`]s | – · `()` or error | committed, by its generation |
//! | [`PutRevoke`] | – · [`Revocation`]s | – · `()` or error | `PutIsOver`, by its generation: as wanted |
//! | [`Get`] | – · [`Key`]s | [`Lease`] · [`Object`] or error | a lease that ends later |
//! | [`Exists`] | – · [`Key`]s | – · `bool` | changes nothing |
//! | [`ReturnLeases`] | – · [`LeaseRange`]s | never answered | changes nothing: each lease is given back once |
//! | [`ReportSegments`] | – · segment ids | – · `()` or error | is marked, still |
//! | [`FetchExpulsions`] | [`FetchAsk`] · – | – · [`Expulsion`]s | the same orders |
//! | [`EndExpulsions`] | [`NodeProof`] · [`ExpulsionEnd`]s | – · `()` or error | has ended, by its ticket |
//! | [`Remove`] | – · [`Removal`]s | – · `()` or error | `KeyNotFound`; what was put in between goes, too, as eviction might have done |
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
//! | [`EndTasks`] | [`NodeProof`] · [`TaskEnd`]s | – · `()` or error | has ended, by its attempt |
//! | [`OrderSegments`] | – · [`SegmentOrder`]s | – · [`DrainInfo`] or error | is in that state, still |
//! | [`DrainStatus`] | – · segment ids, none for all that are not active | – · [`DrainInfo`] or error | changes nothing |
//! | [`ReadTaskReport`] | – · – | [`TaskReport`] · – | changes nothing |
//! | [`TenantList`] | – · names, none for all | – · [`TenantUsage`] or error | changes nothing |
//! | [`TenantSet`] | [`TenantSetting`] · – | – · – | sets the same |
//! | [`TenantRemove`] | name · – | – · – | `TenantNotRegistered`: as wanted |
//! | [`Find`] | [`FindQuery`] · – | [`ListPosition`] · [`Listed`] | changes nothing |
//! | [`RemoveMany`] | [`RemoveQuery`] · – | [`RemovedPage`] · – | finds less |
//! | [`QueryHosts`] | – · [`Whereabouts`] | – · [`Hosts`] or error | changes nothing |
//! | [`ClearReplicas`] | segment, or none for all · [`Key`]s | – · `()` or error | `KeyNotFound` or `ReplicaNotFound`: as wanted |
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

mod eviction;
mod nodes;
mod objects;
mod queries;
mod tasks;

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::codec::{self, Items, Key};
use crate::wire::{Frame, FrameWriter, Header, KEYS_PER_BATCH_MAX, WireError};
use crate::{ErrorCode, MasterConfig, Stats};

pub use eviction::*;
pub use nodes::*;
pub use objects::*;
pub use queries::*;
pub use tasks::*;

/// Most replicas that an object can have.
pub const REPLICAS_MAX: usize = 8;
/// Longest name and longest endpoint of a segment, bytes.
pub const NAME_BYTES_MAX: usize = 256;

/// Most hosts of a node in an answer.
pub const HOSTS_MAX: usize = 8;

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
    Mount = 2, (MountSegment<'a>, ()) -> (MountAnswer<'a>, ());
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
    /// The reader is done with these: eviction need not wait for the leases to run out. Never answered.
    ReturnLeases = 14, ((), LeaseRange) -> ((), ());
    /// Segments that a client could not reach.
    ReportSegments = 15, ((), SegmentNo) -> ((), Result<(), ErrorCode>);
    /// A node asks which writers it is to cut off.
    FetchExpulsions = 16, (FetchAsk, ()) -> ((), Expulsion);
    /// A node has cut writers off, or left them alone.
    EndExpulsions = 17, (NodeProof, ExpulsionEnd) -> ((), Result<(), ErrorCode>);
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
    EndTasks = 48, (NodeProof, TaskEnd) -> ((), Result<(), ErrorCode>);
    /// Drain segments, spare them, or take them back into use.
    OrderSegments = 49, ((), SegmentOrder) -> ((), Result<DrainInfo, ErrorCode>);
    /// How far segments are drained; none for all that are not active.
    DrainStatus = 50, ((), SegmentNo) -> ((), Result<DrainInfo, ErrorCode>);
    /// Counters and gauges of tasks, drains, heat and reports.
    ReadTaskReport = 51, ((), ()) -> (TaskReport, ());
    /// What tenants use and may: these, or all for none. Whoever is no admin learns of no other than its own.
    TenantList = 60, ((), &'a str) -> ((), Result<TenantUsage<'a>, ErrorCode>);
    /// Adds or changes a tenant. For admins.
    TenantSet = 61, (TenantSetting<'a>, ()) -> ((), ());
    /// Forgets a tenant that has no objects. For admins.
    TenantRemove = 62, (&'a str, ()) -> ((), ());
    /// Keys that a regular expression matches, a page at a time.
    Find = 70, (FindQuery<'a>, ()) -> (ListPosition, Listed<'a>);
    /// Forgets all objects of a tenant, or those whose key a regular expression matches, a page at a time.
    RemoveMany = 71, (RemoveQuery<'a>, ()) -> (RemovedPage, ());
    /// The hosts that nodes or segments are on.
    QueryHosts = 72, ((), Whereabouts) -> ((), Result<Hosts<'a>, ErrorCode>);
    /// Drops the replicas of objects on a segment; none: on all of them. What has none left is gone. What somebody reads or
    /// writes is left alone.
    ClearReplicas = 73, (Option<SegmentNo>, Key<'a>) -> ((), Result<(), ErrorCode>);
}

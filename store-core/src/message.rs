//! Messages: the requests and responses of every operation.
//!
//! Every operation is a batch: a head, sent once, then one item per key; a single key is a batch of one. A
//! response has one item per item of the request, in the same order. Decoding allocates nothing.
//!
//! | Kind | Head of the request · items | Head of the response · items | Effect of a repetition |
//! |---|---|---|---|
//! | [`Hello`] | [`Greeting`] · – | [`Welcome`] · – | changes nothing |
//! | [`Mount`] | [`MountSegment`] · – | [`MountResponse`] · – | the same incarnation mounts the same: the same number |
//! | [`Unmount`] | [`UnmountSegment`] · – | – · – | `SegmentNotFound`: what is gone stays gone, numbers are never used twice |
//! | [`Beat`] | [`Heartbeat`] · – | [`NodeStatus`] · – | is alive, still |
//! | [`PutStart`] | [`PutRequest`] · [`NewObject`]s | [`PutWindow`] · [`Allocation`] or error | the same space, by its writer and nonce, while the put is unfinished; then `ObjectAlreadyExists`, or for an upsert `PutIsOver` |
//! | [`PutEnd`] | – · [`Commit`]s | – · `()` or error | committed, by its generation |
//! | [`PutRevoke`] | – · [`Revocation`]s | – · `()` or error | `PutIsOver`, by its generation: as wanted |
//! | [`Get`] | [`LeaseWanted`] · [`Key`]s | [`Lease`] · [`Object`] or error | a lease that ends later |
//! | [`Exists`] | – · [`Key`]s | – · `bool` | changes nothing |
//! | [`ExistsLeased`] | – · [`Key`]s | [`Lease`] · `bool` | a lease that ends later |
//! | [`Prefetch`] | – · [`Key`]s | [`Lease`] · [`Prefetched`] | the same, once it has been carried out |
//! | [`ChangeRetention`] | [`RetentionChange`] · [`Key`]s | – · `()` or error | the same, measured from the second request |
//! | [`ReturnLeases`] | – · [`LeaseRange`]s | no response | changes nothing: each lease is returned once |
//! | [`ReportSegments`] | – · [`SegmentNo`]s | – · `()` or error | is marked, still |
//! | [`FetchExpulsions`] | [`FetchRequest`] · – | – · [`Expulsion`]s | the same orders |
//! | [`EndExpulsions`] | [`NodeProof`] · [`ExpulsionEnd`]s | – · `()` or error | has ended, by its ticket |
//! | [`Remove`] | – · [`Removal`]s | – · `()` or error | `KeyNotFound`; an object put in between is removed, too, as eviction might have done |
//! | [`List`] | [`ListQuery`] · – | [`ListPosition`] · [`Listed`] | changes nothing |
//! | [`Segments`] | – · [`SegmentNo`]s; no item: all | – · [`SegmentInfo`] or error | changes nothing |
//! | [`ReadStats`] | – · – | [`Stats`] · – | changes nothing |
//! | [`ExplainEviction`] | most victims to list · – | [`EvictionReport`] · [`NextVictim`]s | changes nothing |
//! | [`ReadConfig`] | – · – | [`MasterConfig`] · – | changes nothing |
//! | [`ChangeConfig`] | [`ConfigChange`] · – | [`ConfigChanges`]: all that is set · – | sets the same |
//! | [`EvictNow`] | [`Evict`] · – | [`Evicted`] · – | evicts nothing: the request says how much to leave |
//! | [`ListNodes`] | – · – | – · [`NodeInfo`] | changes nothing |
//! | [`WhyKept`] | – · [`Key`]s | – · optional [`Kept`], or error | changes nothing |
//! | [`ReportReplicas`] | the reporter's random number · [`BadReplica`]s | – · [`Verdict`] or error | a reporter counts once; a dropped replica is `ReplicaNotFound` |
//! | [`FindReplicas`] | – · [`Key`]s | – · [`ReplicaInfos`] or error | changes nothing |
//! | [`CreateTasks`] | – · [`NewTask`]s | – · [`TaskId`] or error | the same task while it is unfinished; then, if a source or target was named, `ReplicaNotFound` or `ReplicaAlreadyExists`; else one more |
//! | [`QueryTasks`] | – · [`TaskId`]s | – · [`TaskInfo`] or error | changes nothing |
//! | [`ListTasks`] | [`TaskQuery`] · – | [`ListPosition`] · [`TaskInfo`]s | changes nothing |
//! | [`CancelTasks`] | – · [`TaskId`]s | – · [`TaskInfo`] or error | is canceled, still |
//! | [`RetryTasks`] | – · [`TaskId`]s | – · [`TaskInfo`] or error | is pending or processing, still |
//! | [`FetchTasks`] | [`FetchRequest`] · – | [`Lease`] · [`TaskOrder`]s | the same orders, with the same attempts, and more if there is room |
//! | [`EndTasks`] | [`NodeProof`] · [`TaskEnd`]s | – · `()` or error | has ended, by its attempt |
//! | [`OrderSegments`] | – · [`SegmentOrder`]s | – · [`DrainInfo`] or error | is in that state, still |
//! | [`DrainStatus`] | – · [`SegmentNo`]s; no item: all that are not active | – · [`DrainInfo`] or error | changes nothing |
//! | [`ReadTaskReport`] | – · – | [`TaskReport`] · – | changes nothing |
//! | [`TenantList`] | – · names; no item: all | – · [`TenantUsage`] or error | changes nothing |
//! | [`TenantSet`] | [`TenantSetting`] · – | – · – | sets the same |
//! | [`TenantRemove`] | name · – | – · – | `TenantNotRegistered`: as wanted |
//! | [`Find`] | [`FindQuery`] · – | [`ListPosition`] · [`Listed`] | changes nothing |
//! | [`RemoveMany`] | [`RemoveQuery`] · – | [`RemovedPage`] · – | finds fewer objects |
//! | [`QueryHosts`] | – · [`HostQuery`] | – · [`Hosts`] or error | changes nothing |
//! | [`MountDisks`] | – · [`MountDisk`]s | – · [`MountedDisk`] or error | the same incarnation mounts the same: the same number |
//! | [`AdoptObjects`] | [`DiskProof`] · [`FoundObject`]s | – · [`Adoption`] | the same |
//! | [`DiskReady`] | [`DiskProof`] · – | – · – | is ready, still |
//! | [`FetchDiskOrders`] | [`FetchDisk`] · – | [`Lease`] · [`DiskOrder`]s | the same orders, and more if there is room |
//! | [`EndDiskOrders`] | [`DiskProof`] · [`DiskEnd`]s | – · `()` or error | has ended, by generation or ticket |
//! | [`ReclaimExtents`] | [`DiskProof`] · sequences | – · `()` | nothing is in them, still |
//! | [`Stage`] | [`StageRequest`] · [`StageItem`]s | [`StageWindow`] · [`Staged`] or error | reads again, into other memory. For nodes: a master does not serve it |
//! | [`ReleaseStaged`] | – · tickets | – · – | changes nothing. For nodes |
//! | [`LocateExtents`] | [`SegmentNo`] · sequences | [`ExportedDisk`] · positions or error | changes nothing. For nodes |
//! | [`ClaimExtents`] | [`ExtentsWanted`] · – | [`ExtentsGiven`] · – | the same process and incarnation has the same extents: the same epoch |
//! | [`ReleaseExtents`] | [`ExtentsReleased`] · – | – · – | `SegmentNotFound`: no claim has them, or another one |
//! | [`TakePage`] | [`PageWanted`] · [`PageFound`]s | [`PageGiven`] · – | the same page, by the identity |
//! | [`FreePage`] | [`PageFreed`] · – | – · – | is free, still; `KeyNotFound`: it was given since |
//! | [`ListPools`] | – · – | – · [`PoolEntry`]s | changes nothing |
//! | [`ClearReplicas`] | optional [`SegmentNo`]; none: all · [`Key`]s | – · `()` or error | `KeyNotFound` or `ReplicaNotFound`: as wanted |
//!
//! Every operation may be repeated when its response was lost: the last column says what the second request
//! does. It may be repeated at another leader of the same [lineage](Welcome::lineage), too, which has carried
//! out whatever its predecessor has answered.
//!
//! A master that does not lead answers every request with [`NotLeader`].
//!
//! ```
//! use store_core::{Frame, Key, message::{Get, LeaseWanted, Operation}};
//!
//! let mut out = Vec::new();
//! Get::encode_request(&mut out, 7, &LeaseWanted::Quick, [b"a".as_slice(), b"bc"].map(Key).into_iter())?;
//! let (frame, len) = Frame::parse(&out)?.expect("complete");
//! assert_eq!(len, out.len());
//! let (_, keys) = Get::decode_request(frame.body)?;
//! assert_eq!(keys.map(|key| key.0.len()).collect::<Vec<_>>(), [1, 2]);
//! # Ok::<(), store_core::WireError>(())
//! ```

mod disks;
mod eviction;
mod masters;
mod nodes;
mod objects;
mod pools;
mod queries;
mod tasks;

use alloc::vec::Vec;

use serde::{Deserialize, Serialize};

use crate::codec::{self, Items, Key};
use crate::wire::{Frame, FrameWriter, Header, KEYS_PER_BATCH_MAX, WireError};
use crate::{ConfigChange, ConfigChanges, ErrorCode, MasterConfig, SegmentNo, Stats, TaskId};

pub use disks::*;
pub use eviction::*;
pub use masters::*;
pub use nodes::*;
pub use objects::*;
pub use pools::*;
pub use queries::*;
pub use tasks::*;

/// Most replicas per object.
pub const REPLICAS_MAX: usize = 8;
/// Length limit of a segment's name, and of its endpoint, bytes.
pub const NAME_BYTES_MAX: usize = 256;

/// Most hosts of a node in a response.
pub const HOSTS_MAX: usize = 8;

/// One operation: its number on the wire and the types of its messages.
pub trait Operation {
    /// The operation's number.
    const KIND: Kind;
    /// The head of a request.
    type Request<'a>: Serialize + Deserialize<'a>;
    /// An item of a request, usually one per key.
    type RequestItem<'a>: Serialize + Deserialize<'a>;
    /// The head of a response.
    type Response<'a>: Serialize + Deserialize<'a>;
    /// An item of a response, one per item of the request.
    type ResponseItem<'a>: Serialize + Deserialize<'a>;

    /// Appends a request frame.
    ///
    /// # Errors
    /// `TooManyKeys`, `TooLong`; `out` is as it was before.
    fn encode_request<'a>(
        out: &mut Vec<u8>,
        request_id: u64,
        head: &Self::Request<'_>,
        items: impl ExactSizeIterator<Item = Self::RequestItem<'a>>,
    ) -> Result<(), WireError> {
        let header = Header { kind: Self::KIND as u8, response: false, request_id, status: 0 };
        encode(out, &header, head, items)
    }

    /// Decodes the body of a request.
    ///
    /// # Errors
    /// `Body`, `TooManyKeys`.
    fn decode_request(
        body: &[u8],
    ) -> Result<(Self::Request<'_>, Items<'_, Self::RequestItem<'_>>), WireError> {
        let (head, rest) = codec::take(body)?;
        Ok((head, Items::parse(rest)?))
    }

    /// Appends a response frame. A server that produces its items one by one uses [`ResponseWriter`] instead.
    ///
    /// # Errors
    /// `TooManyKeys`, `TooLong`; `out` is as it was before.
    fn encode_response<'a>(
        out: &mut Vec<u8>,
        request_id: u64,
        head: &Self::Response<'_>,
        items: impl ExactSizeIterator<Item = Self::ResponseItem<'a>>,
    ) -> Result<(), WireError> {
        let header = Header { kind: Self::KIND as u8, response: true, request_id, status: 0 };
        encode(out, &header, head, items)
    }

    /// Decodes a response: its body, or the error of a request that failed as a whole.
    ///
    /// # Errors
    /// The status of the response; `InternalError` for a response that does not decode or belongs to another
    /// operation.
    fn decode_response<'a>(
        frame: &Frame<'a>,
    ) -> Result<(Self::Response<'a>, Items<'a, Self::ResponseItem<'a>>), ErrorCode> {
        frame.header.result()?;
        if frame.header.kind != Self::KIND as u8 || !frame.header.response {
            return Err(ErrorCode::InternalError);
        }
        let (head, rest) = codec::take(frame.body).map_err(|_| ErrorCode::InternalError)?;
        Ok((head, Items::parse(rest).map_err(|_| ErrorCode::InternalError)?))
    }
}

/// A response whose items are appended one by one. Their number is known before.
#[derive(Debug)]
pub struct ResponseWriter<'v> {
    frame: FrameWriter<'v>,
}

impl<'v> ResponseWriter<'v> {
    /// Appends header, head and number of items.
    ///
    /// # Errors
    /// `Body` when the head cannot be encoded.
    pub fn begin<O: Operation>(
        out: &'v mut Vec<u8>,
        request_id: u64,
        head: &O::Response<'_>,
        count: usize,
    ) -> Result<Self, WireError> {
        let header = Header { kind: O::KIND as u8, response: true, request_id, status: 0 };
        let mut frame = FrameWriter::begin(out, &header);
        codec::put(frame.body(), head)?;
        codec::put(frame.body(), &(count as u32))?;
        Ok(Self { frame })
    }

    /// Appends one item.
    ///
    /// # Errors
    /// `Body` when it cannot be encoded.
    pub fn item<T: Serialize>(&mut self, item: &T) -> Result<(), WireError> {
        codec::put(self.frame.body(), item)
    }

    /// Writes the body's length into the header.
    ///
    /// # Errors
    /// `TooLong`; the buffer is as it was before.
    pub fn finish(self) -> Result<(), WireError> {
        self.frame.finish()
    }
}

/// Appends the response to a request that failed as a whole.
pub fn encode_failure(out: &mut Vec<u8>, kind: u8, request_id: u64, error: ErrorCode) {
    let header = Header { kind, response: true, request_id, status: error.code() };
    // An empty body is within every limit.
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
    ($($(#[$doc:meta])* $name:ident = $number:literal, ($request:ty, $request_item:ty) -> ($response:ty, $response_item:ty);)*) => {
        /// The number of an operation in a frame's header.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
        #[non_exhaustive]
        #[repr(u8)]
        pub enum Kind {
            $($(#[$doc])* $name = $number,)*
        }

        impl Kind {
            /// All operations of this release.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The operation with this number.
            #[must_use]
            pub const fn from_byte(byte: u8) -> Option<Self> {
                match byte {
                    $($number => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// The operation's name, for logs and metrics.
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
                type Request<'a> = $request;
                type RequestItem<'a> = $request_item;
                type Response<'a> = $response;
                type ResponseItem<'a> = $response_item;
            }
        )*
    };
}

operations! {
    /// The first request on every connection: exchanges versions and limits, proves secrets.
    Hello = 1, (Greeting<'a>, ()) -> (Welcome, ());
    /// A node contributes memory.
    Mount = 2, (MountSegment<'a>, ()) -> (MountResponse<'a>, ());
    /// A node takes a segment back.
    Unmount = 3, (UnmountSegment, ()) -> ((), ());
    /// A node reports that it is alive.
    Beat = 4, (Heartbeat, ()) -> (NodeStatus, ());
    /// Reserves space for new objects. They are not readable yet.
    PutStart = 5, (PutRequest, NewObject<'a>) -> (PutWindow, Result<Allocation, ErrorCode>);
    /// Commits objects whose bytes are in place: they are readable from here.
    PutEnd = 6, ((), Commit<'a>) -> ((), Result<(), ErrorCode>);
    /// Gives puts up.
    PutRevoke = 7, ((), Revocation<'a>) -> ((), Result<(), ErrorCode>);
    /// Looks up where objects are, and leases them for reading.
    Get = 8, (LeaseWanted, Key<'a>) -> (Lease, Result<Object, ErrorCode>);
    /// Whether objects are readable. Neither leases them nor counts as a use.
    Exists = 9, ((), Key<'a>) -> ((), bool);
    /// Whether objects are readable, which leases those that are. Does not count as a use.
    ExistsLeased = 18, ((), Key<'a>) -> (Lease, bool);
    /// Promotes objects that are on disks alone: they get a replica in memory, if there is something that can
    /// be evicted for it without loss. Objects in memory are leased. Does not count as a use.
    Prefetch = 20, ((), Key<'a>) -> (Lease, Prefetched);
    /// Changes how long objects are kept.
    ChangeRetention = 19, (RetentionChange, Key<'a>) -> ((), Result<(), ErrorCode>);
    /// Returns leases before their end, so that eviction need not wait. Has no response.
    ReturnLeases = 14, ((), LeaseRange) -> ((), ());
    /// Reports segments that a client could not reach.
    ReportSegments = 15, ((), SegmentNo) -> ((), Result<(), ErrorCode>);
    /// Returns the orders to a node to cut off writers.
    FetchExpulsions = 16, (FetchRequest, ()) -> ((), Expulsion);
    /// Reports that a node has cut off writers, or has left them alone.
    EndExpulsions = 17, (NodeProof, ExpulsionEnd) -> ((), Result<(), ErrorCode>);
    /// Removes objects.
    Remove = 10, ((), Removal<'a>) -> ((), Result<(), ErrorCode>);
    /// Lists keys, by pages.
    List = 11, (ListQuery<'a>, ()) -> (ListPosition, Listed<'a>);
    /// What segments are and where.
    Segments = 12, ((), SegmentNo) -> ((), Result<SegmentInfo<'a>, ErrorCode>);
    /// Returns gauges and counters.
    ReadStats = 13, ((), ()) -> (Stats, ());
    /// What eviction did, what keeps objects from it, and what is evicted next.
    ExplainEviction = 21, (u32, ()) -> (EvictionReport, NextVictim<'a>);
    /// The settings that the master runs with, without secrets. For admins.
    ReadConfig = 80, ((), ()) -> (MasterConfig, ());
    /// Changes settings while the master serves. For admins.
    ChangeConfig = 83, (ConfigChange, ()) -> (ConfigChanges, ());
    /// Evicts now. For admins.
    EvictNow = 81, (Evict, ()) -> (Evicted, ());
    /// Lists the nodes. For admins.
    ListNodes = 82, ((), ()) -> ((), NodeInfo);
    /// Why objects cannot be evicted now; none if they can.
    WhyKept = 22, ((), Key<'a>) -> ((), Result<Option<Kept>, ErrorCode>);
    /// Reports replicas whose bytes were not the committed ones. The reader identifies itself by a random
    /// number.
    ReportReplicas = 40, (u64, BadReplica<'a>) -> ((), Result<Verdict, ErrorCode>);
    /// Where objects are, readable or not. Neither leases them nor counts as a use.
    FindReplicas = 41, ((), Key<'a>) -> ((), Result<ReplicaInfos, ErrorCode>);
    /// Creates tasks that copy or move replicas.
    CreateTasks = 42, ((), NewTask<'a>) -> ((), Result<TaskId, ErrorCode>);
    /// Returns the state of tasks.
    QueryTasks = 43, ((), TaskId) -> ((), Result<TaskInfo<'a>, ErrorCode>);
    /// Lists tasks, by pages.
    ListTasks = 44, (TaskQuery, ()) -> (ListPosition, TaskInfo<'a>);
    /// Cancels tasks.
    CancelTasks = 45, ((), TaskId) -> ((), Result<TaskInfo<'a>, ErrorCode>);
    /// Retries tasks that failed or were canceled.
    RetryTasks = 46, ((), TaskId) -> ((), Result<TaskInfo<'a>, ErrorCode>);
    /// Returns the tasks of a node.
    FetchTasks = 47, (FetchRequest, ()) -> (Lease, TaskOrder<'a>);
    /// Reports how attempts of a node ended.
    EndTasks = 48, (NodeProof, TaskEnd) -> ((), Result<(), ErrorCode>);
    /// Puts segments into a state: draining, maintenance, active.
    OrderSegments = 49, ((), SegmentOrder) -> ((), Result<DrainInfo, ErrorCode>);
    /// Returns the progress of draining; no item: of all segments that are not active.
    DrainStatus = 50, ((), SegmentNo) -> ((), Result<DrainInfo, ErrorCode>);
    /// Returns gauges and counters of tasks, drains, hot objects and reports.
    ReadTaskReport = 51, ((), ()) -> (TaskReport, ());
    /// Returns the usage and the limits of tenants; no item: of all. A connection without the rights of an
    /// admin sees its own tenant only.
    TenantList = 60, ((), &'a str) -> ((), Result<TenantUsage<'a>, ErrorCode>);
    /// Adds or changes a tenant. For admins.
    TenantSet = 61, (TenantSetting<'a>, ()) -> ((), ());
    /// Removes a tenant that has no objects. For admins.
    TenantRemove = 62, (&'a str, ()) -> ((), ());
    /// Lists keys that a regular expression matches, by pages.
    Find = 70, (FindQuery<'a>, ()) -> (ListPosition, Listed<'a>);
    /// Removes all objects of a tenant, or those whose keys a regular expression matches, by pages.
    RemoveMany = 71, (RemoveQuery<'a>, ()) -> (RemovedPage, ());
    /// Returns the hosts of nodes or segments.
    QueryHosts = 72, ((), HostQuery) -> ((), Result<Hosts<'a>, ErrorCode>);
    /// Drops the replicas of objects on a segment; no segment: on all of them. An object without replicas is
    /// removed. Objects that are leased or being written are left alone.
    ClearReplicas = 73, (Option<SegmentNo>, Key<'a>) -> ((), Result<(), ErrorCode>);
    /// A node contributes disks.
    MountDisks = 90, ((), MountDisk<'a>) -> ((), Result<MountedDisk, ErrorCode>);
    /// A node announces the objects that recovery has found on a disk.
    AdoptObjects = 91, (DiskProof, FoundObject<'a>) -> ((), Adoption);
    /// Every object on a disk was announced, and objects can be written to it.
    DiskReady = 92, (DiskProof, ()) -> ((), ());
    /// Returns the orders for a disk.
    FetchDiskOrders = 93, (FetchDisk, ()) -> (Lease, DiskOrder<'a>);
    /// Reports how orders for a disk ended, and what else happened to its objects.
    EndDiskOrders = 94, (DiskProof, DiskEnd<'a>) -> ((), Result<(), ErrorCode>);
    /// A disk gives extents up, named by their sequences: the places in them are dropped.
    ReclaimExtents = 95, (DiskProof, u64) -> ((), ());
    /// Asks a node, not the master, to read objects of its disks into memory that it exports.
    Stage = 100, (StageRequest, StageItem) -> (StageWindow, Result<Staged, ErrorCode>);
    /// A reader is done with staged objects, named by their tickets. For nodes, not for the master.
    ReleaseStaged = 101, ((), u64) -> ((), ());
    /// Asks a node, not the master, where its disk is exported, and where extents, named by their sequences,
    /// begin on it, bytes. `NotSupported`: the disk is not exported.
    LocateExtents = 102, (SegmentNo, u64) -> (ExportedDisk<'a>, Result<u64, ErrorCode>);
    /// A node wants to own extents of a pool of CXL memory.
    ClaimExtents = 110, (ExtentsWanted<'a>, ()) -> (ExtentsGiven<'a>, ());
    /// A node gives extents back.
    ReleaseExtents = 111, (ExtentsReleased, ()) -> ((), ());
    /// A process wants a page of a pool, so that it can reach memory in it.
    TakePage = 112, (PageWanted, PageFound) -> (PageGiven, ());
    /// The process that had a page of a pool has ended. For admins.
    FreePage = 113, (PageFreed, ()) -> ((), ());
    /// Lists who has which extents and pages of pools. For admins.
    ListPools = 114, ((), ()) -> ((), PoolEntry<'a>);
}

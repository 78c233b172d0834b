//! The error codes of all operations of the store, with Mooncake's numbers.

use core::fmt;

use serde::{Deserialize, Deserializer, Serialize, Serializer};

macro_rules! error_codes {
    ($($(#[$doc:meta])* $name:ident = $code:literal, $text:literal, $advice:literal;)*) => {
        /// Why an operation, or one key of a batch, did not succeed.
        ///
        /// Names and numbers are those of Mooncake's `ErrorCode`, even where this project would use other
        /// words (`NoAvailableHandle`, `KeysUltraLimit`): the master is going to serve Mooncake's clients
        /// over their own protocol, which carries these numbers, and logs and dashboards of both stores
        /// agree. Codes that Mooncake does not have are marked as additions and use numbers that are free
        /// there.
        #[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        #[repr(i32)]
        pub enum ErrorCode {
            $($(#[$doc])* $name = $code,)*
        }

        impl ErrorCode {
            /// Every code that this release can return.
            pub const ALL: &'static [Self] = &[$(Self::$name,)*];

            /// The code with this number; `None` for 0 (success) and for numbers of other releases.
            #[must_use]
            pub const fn from_code(code: i32) -> Option<Self> {
                match code {
                    $($code => Some(Self::$name),)*
                    _ => None,
                }
            }

            /// Mooncake's name of the code, for logs and metrics.
            #[must_use]
            pub const fn name(self) -> &'static str {
                match self {
                    $(Self::$name => $text,)*
                }
            }

            const fn advice(self) -> &'static str {
                match self {
                    $(Self::$name => $advice,)*
                }
            }
        }
    };
}

error_codes! {
    /// An internal error, or a code that this release does not know.
    InternalError = -1, "INTERNAL_ERROR", "report it with the master's log, and run the same release on both sides";
    /// The object is longer than the buffer it should be read into.
    BufferOverflow = -10, "BUFFER_OVERFLOW", "the object is longer than the buffer: ask for its size, then pass a larger one";
    /// No segment has this number, or it was unmounted.
    SegmentNotFound = -101, "SEGMENT_NOT_FOUND", "the segment was unmounted or its node is gone: look the key up again";
    /// The name is mounted by a node whose incarnation is not older.
    SegmentAlreadyExists = -102, "SEGMENT_ALREADY_EXISTS", "another node has mounted this name: choose another, or restart with a newer incarnation";
    /// The master does not know this node.
    ClientNotFound = -103, "CLIENT_NOT_FOUND", "the node is unknown or expired: mount its segments again";
    /// There is no room for now, and nothing that could be evicted for the object.
    NoAvailableHandle = -200, "NO_AVAILABLE_HANDLE", "no room for now: everything is leased, pinned or pending release: try again after the lease time, unpin objects, or add capacity";
    /// No segment is mounted. An addition, as the codes to -207.
    NoSegment = -201, "NO_SEGMENT", "no segment is mounted: start a node";
    /// No segment is as long as the object.
    ObjectTooLarge = -202, "OBJECT_TOO_LARGE", "the object is larger than every segment, its checksums included: split it, or mount larger segments";
    /// The request itself excludes every segment that could take the object.
    SegmentsExcluded = -203, "SEGMENTS_EXCLUDED", "the request excludes every segment that could take the object: exclude fewer";
    /// No segment that could take the object accepts new ones.
    SegmentsClosed = -204, "SEGMENTS_CLOSED", "every segment that could take the object is being drained or in maintenance: add nodes, or put a segment back into use";
    /// No more bytes may be pinned for good.
    PinnedShareReached = -205, "PINNED_SHARE_REACHED", "too many bytes are pinned for good: remove pinned objects, pin softly, or raise hard_pin_share_max";
    /// The memory limit of the master is reached.
    MetadataFull = -206, "METADATA_FULL", "the master has no memory for more objects or puts: remove objects, use fewer and larger ones, or raise metadata_bytes_max";
    /// The connection, or its tenant, has too many unfinished puts.
    TooManyPuts = -207, "TOO_MANY_PUTS", "too many puts are unfinished: commit or revoke some of them first";
    /// The peer speaks another version of the protocol.
    InvalidVersion = -300, "INVALID_VERSION", "run the same release on both sides";
    /// The key is empty or too long.
    InvalidKey = -400, "INVALID_KEY", "keys have 1 to key_bytes_max bytes";
    /// A length, count or flag is invalid.
    InvalidParams = -600, "INVALID_PARAMS", "check lengths (1 byte at least), replica counts and batch sizes";
    /// A node that was replaced or has expired still uses its old incarnation.
    IllegalClient = -601, "ILLEGAL_CLIENT", "this incarnation of the node is over: export its memory afresh and mount with a newer one";
    /// The node's incarnation, which is its clock in ns since 1970, is more than an hour ahead of the
    /// master's clock: one of the two clocks is wrong. The master's
    /// [`Event::IncarnationTooHigh`](crate::Event::IncarnationTooHigh) has both. An addition, as the next
    /// three codes.
    IncarnationTooHigh = -602, "INCARNATION_TOO_HIGH", "the node's clock is more than an hour ahead of the master's, and one of them is wrong (the master's log has both): if the master's is behind, correct it, and the node mounts by itself; if the node's is ahead, correct it and restart the node";
    /// The text is not a regular expression that can be searched for: it does not parse, compiles to too
    /// much, or turned out to be too costly to search with.
    InvalidPattern = -605, "INVALID_PATTERN", "the pattern is empty, is not a regular expression (without look-around, back-references and Unicode classes), or would take too long to search with: choose a simpler one, anchored with ^ if possible";
    /// The limit on segments or nodes is reached.
    TooManySegments = -603, "TOO_MANY_SEGMENTS", "the limit on mounted segments or nodes is reached: raise segments_max or nodes_max";
    /// The server's limit on connections is reached.
    TooManyConnections = -604, "TOO_MANY_CONNECTIONS", "the server's limit on connections is reached: close some, or raise the limit";
    /// The put is already committed; it cannot be revoked, or committed with another checksum.
    InvalidWrite = -700, "INVALID_WRITE", "the object is committed already: remove it instead";
    /// The object exists, but is still being written.
    ReplicaIsNotReady = -703, "REPLICA_IS_NOT_READY", "the object is being written: try again when its writer has finished";
    /// There is no such object, or not any more.
    ObjectNotFound = -704, "OBJECT_NOT_FOUND", "not cached: compute the object and put it";
    /// The key is taken: the object is committed, or its writer's time is not over.
    ObjectAlreadyExists = -705, "OBJECT_ALREADY_EXISTS", "the key is stored or being stored: get it, or remove it first";
    /// A reader may still be copying the object.
    ObjectHasLease = -706, "OBJECT_HAS_LEASE", "readers hold a lease: try again after the lease time, or force";
    /// The copy took longer than the lease; what was read does not count.
    LeaseExpired = -707, "LEASE_EXPIRED", "the read outlived its lease: read again, or raise lease_ttl_ms";
    /// There is another task for the same object and segment.
    ObjectHasReplicationTask = -708, "OBJECT_HAS_REPLICATION_TASK", "another task has the same replica: wait for it, or cancel it";
    /// The object has no replica on that segment.
    ReplicaNotFound = -710, "REPLICA_NOT_FOUND", "the object has no replica on that segment, or not any more: look the key up again";
    /// The object already has a replica on that segment.
    ReplicaAlreadyExists = -711, "REPLICA_ALREADY_EXISTS", "the object already has a replica on that segment: nothing is left to do";
    /// The put that is to be committed or revoked is over. An addition, as the next code.
    PutIsOver = -720, "PUT_IS_OVER", "the put was removed, revoked or displaced meanwhile, or its segment is gone: put the object again";
    /// There is no object to remove.
    KeyNotFound = -721, "KEY_NOT_FOUND", "no such key: nothing was removed";
    /// The fabric could not move the bytes.
    TransferFail = -800, "TRANSFER_FAIL", "no replica could be moved: check the nodes and their fabric";
    /// The bytes are not those that were committed.
    ChecksumMismatch = -801, "CHECKSUM_MISMATCH", "the stored bytes are damaged: treated as a miss, put the object again";
    /// The call to the master failed; whether it was carried out is unknown.
    RpcFail = -900, "RPC_FAIL", "the master did not respond: check that it runs and is reachable";
    /// No response in time; whether the call was carried out is unknown.
    RpcTimeout = -901, "RPC_TIMEOUT", "the master did not respond in time: check its load, or raise the timeout";
    /// The master is stopping or not ready; or a fabric may still write to the caller's buffer.
    UnavailableInCurrentStatus = -1010, "UNAVAILABLE_IN_CURRENT_STATUS", "the server is starting or stopping, or a transfer that was given up still holds the buffer: try again, or use another buffer";
    /// The master does not lead: another one of the same store does. The response says which, as far as it is
    /// known: [`NotLeader`](crate::message::NotLeader). An addition.
    NotLeader = -1092, "NOT_LEADER", "this master does not lead: give the client the addresses of all masters, separated by commas, or etcd://, and try again";
    /// The process was forked; its connections and memory belong to its parent. An addition, and never sent
    /// by a master, as the next code.
    Forked = -1090, "FORKED", "this process was forked: create a new client in the child";
    /// Nodes have cut the process off, because it was stopped for too long.
    Expelled = -1091, "EXPELLED", "this process was cut off because it was stopped for longer than its peers wait: create a new client";
    /// This release has no such operation.
    NotSupported = -1012, "NOT_SUPPORTED", "this release does not offer the operation: run the same release on both sides";
    /// A limit on the number of objects, or of keys in a batch, is reached.
    KeysUltraLimit = -1203, "KEYS_ULTRA_LIMIT", "a limit on keys is reached: smaller batches, or raise objects_max";
    /// There is no such task, or it finished long ago, or that attempt of it is over.
    TaskNotFound = -1400, "TASK_NOT_FOUND", "no such task, or it finished long ago, or that attempt of it is over: list the tasks";
    /// Too many tasks are pending or processing.
    TaskPendingLimitExceeded = -1401, "TASK_PENDING_LIMIT_EXCEEDED", "too many tasks are pending or processing: wait for some to finish, or raise tasks.unfinished_max";
    /// The tenant's objects would be more, or take more bytes, than it may have, and no more of them can be
    /// evicted.
    TenantQuotaExceeded = -1700, "TENANT_QUOTA_EXCEEDED", "the tenant's quota is used up: remove or unpin objects, wait for leases to end, or raise the quota";
    /// There is no such tenant, or its secret was not proved.
    TenantNotRegistered = -1701, "TENANT_NOT_REGISTERED", "the master knows no such tenant, or the secret is not the tenant's: check the tenant's name and secret, or add it to the master's tenants";
    /// The tenant still has objects, or space that is pending release.
    TenantNotEmpty = -1702, "TENANT_NOT_EMPTY", "the tenant still has objects, or space that is pending release: remove all of them first, then try again";
    /// The connection lacks the rights of an admin or of a node. An addition.
    PermissionDenied = -1790, "PERMISSION_DENIED", "only an admin or a node may do that: give the admin secret or the cluster secret of the master";
}

impl ErrorCode {
    /// Whether a put found no place, for any reason.
    #[must_use]
    pub const fn is_no_room(self) -> bool {
        matches!(
            self,
            Self::NoAvailableHandle
                | Self::NoSegment
                | Self::ObjectTooLarge
                | Self::SegmentsExcluded
                | Self::SegmentsClosed
                | Self::PinnedShareReached
        )
    }

    /// The number on the wire.
    #[must_use]
    pub const fn code(self) -> i32 {
        self as i32
    }
}

impl fmt::Display for ErrorCode {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} ({})", self.name(), self.advice(), self.code())
    }
}

impl core::error::Error for ErrorCode {}

impl Serialize for ErrorCode {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.serialize_i32(self.code())
    }
}

impl<'de> Deserialize<'de> for ErrorCode {
    fn deserialize<D: Deserializer<'de>>(deserializer: D) -> Result<Self, D::Error> {
        i32::deserialize(deserializer).map(|code| Self::from_code(code).unwrap_or(Self::InternalError))
    }
}

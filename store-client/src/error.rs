//! Error types, one per area: the connection to the master, operations of any client, start-up.

use std::error::Error as StdError;
use std::fmt;
use std::io;
use std::path::PathBuf;
use std::sync::Arc;

use store_core::chunks::CHUNK_BYTES;
use store_core::ha::Reign;
use store_core::wire::VERSION;
use store_core::{ErrorCode, Trace, WireError};
use te_core::Location;
use te_engine::{RegisterError, StartError};

use crate::disk::DiskError;
use crate::item::PARTS_MAX;
use crate::local::LocalError;
use crate::rpc::LeaderHint;
use crate::stage::StageError;

/// Why a request to the master has no usable answer.
#[derive(Debug)]
#[non_exhaustive]
pub enum RpcError {
    /// The text is not an address.
    Address {
        /// The text as it was given.
        text: String,
    },
    /// Nothing accepts connections at the master's address.
    Connect {
        /// The address.
        address: String,
        /// The error of the operating system.
        source: io::Error,
    },
    /// The connection broke; whether the master carried out the request is not known.
    Lost {
        /// The error of the operating system.
        source: io::Error,
    },
    /// There is no connection; the request was not sent.
    Disconnected,
    /// No answer arrived in time; whether the master carried out the request is not known.
    TimedOut {
        /// How long the caller waited, milliseconds.
        call_ms_max: u32,
        /// The operation's number, as it appears in the master's log.
        trace: Trace,
    },
    /// The master speaks another version of the protocol.
    Version {
        /// The master's version.
        theirs: u16,
    },
    /// The request could not be encoded, or the answer could not be decoded.
    Wire(WireError),
    /// The master does not know the tenant, or the tenant's secret is wrong.
    Tenant {
        /// Name of the tenant.
        tenant: String,
    },
    /// The master refused the cluster secret or the admin secret.
    Secret,
    /// The master refused the request.
    Refused(ErrorCode),
    /// The master does not lead.
    NotLeader {
        /// What it says of the leader.
        hint: Box<LeaderHint>,
    },
    /// The master led once, and was replaced; or its clock was set back before it was started.
    Outdated {
        /// Its reign.
        theirs: Reign,
        /// The latest reign that this process has met.
        latest: Reign,
    },
    /// The master does not answer, and another one leads by now.
    Superseded,
    /// None of several masters leads, or the one that leads could not be reached.
    NoLeader {
        /// Where masters were looked for.
        masters: String,
        /// The latest failure.
        last: Box<RpcError>,
    },
    /// etcd does not say where the masters are.
    Directory {
        /// The servers of etcd.
        servers: String,
        /// What is wrong.
        reason: String,
    },
    /// The masters are to be looked up in etcd, which this build lacks.
    NoEtcd,
    /// This process is a fork of the process that connected.
    Forked,
}

/// The message for a child process that uses a connection, client or node that its parent made.
pub(crate) const FORKED: &str = "this process was forked: connect anew in the child";

/// Why an operation failed: the error of every client, for single items and for batches. A miss is not an
/// error.
///
/// Cheap to clone: an error of a whole request becomes the result of each of its items.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum StoreError {
    /// The master refused the request, or the operation failed with one of the store's error codes.
    Refused(ErrorCode),
    /// The master could not be reached or did not answer.
    Rpc(Arc<RpcError>),
    /// The node on this machine could not be reached or did not answer.
    Local(Arc<LocalError>),
    /// Memory could not be registered or allocated.
    Memory(RegisterError),
    /// Memory of a device cannot be used.
    DeviceMemory(DeviceError),
    /// The object, or the requested part, is longer than its sink.
    TooLong {
        /// Bytes that fit the sink.
        room: u64,
    },
    /// The object ends before the requested part does.
    BeyondEnd {
        /// Length that the object would need for the request to succeed, bytes.
        end: u64,
    },
    /// The requested part has no bytes or ends beyond the largest possible offset; or a range was given
    /// together with [`Sink::Fragments`](crate::Sink::Fragments), which carry their own ranges.
    BadRange {
        /// Offset of the part in the object, bytes.
        start: u64,
        /// Length of the part, bytes.
        len: u64,
    },
    /// The item has more parts than [`PARTS_MAX`].
    TooManyParts {
        /// Number of parts that were given.
        parts: usize,
    },
    /// The range does not lie inside memory that is registered with this client, or not inside its buffer.
    Unregistered {
        /// Offset of the range in its region or buffer, bytes.
        offset: u64,
        /// Length of the range, bytes.
        len: u64,
    },
    /// The memory belongs to another client, or to a connection that has been lost.
    ForeignMemory,
    /// No put, or no get, of this key was started by this client, or it has ended.
    NotStarted,
    /// The range of an open put has no bytes, is not inside the object, or has a byte that was written
    /// before.
    BadWrite {
        /// Offset of the range in the object, bytes.
        start: u64,
        /// Length of the range, bytes.
        len: u64,
    },
    /// A put cannot be committed, because some of its bytes were not written.
    Incomplete {
        /// Number of bytes that are missing.
        missing: u64,
    },
    /// A transfer that was given up may still write the memory, or a node may still store its contents.
    Held,
    /// The arena of a local client has no free part that is long enough.
    ArenaFull {
        /// Bytes requested.
        wanted: u64,
        /// Length of the longest free part, bytes.
        largest_free: u64,
        /// Length of the arena, bytes.
        arena_bytes: u64,
    },
    /// The thread of the [`AsyncClient`](crate::AsyncClient) has ended; whether the operation was carried out
    /// is not known.
    Stopped,
    /// This process is a fork of the process that connected. Operations that were under way belong to the
    /// parent.
    Forked,
    /// Nodes cut this client off, because it made no progress for longer than they tolerate. The space that
    /// it was writing may have been given to others.
    Expelled,
}

/// Why memory of a device was not registered, or its bytes were not moved.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum DeviceError {
    /// This build knows no such devices, or the process has no driver for them.
    Unknown {
        /// Where the memory is said to be.
        location: Location,
    },
    /// The bytes do not lie in one allocation of device memory.
    OutOfRange {
        /// Address of the first byte.
        addr: u64,
        /// Number of bytes.
        len: u64,
    },
    /// The memory was freed, or freed and allocated again, since it was registered.
    Stale {
        /// Where the memory was.
        location: Location,
        /// Address of the first byte.
        addr: u64,
    },
    /// The destinations of the parts of one object are memory of several devices.
    SeveralDevices,
    /// The slots through which device memory is copied hold no checksum chunk.
    ShortSlots {
        /// Length of a slot, bytes.
        slot_bytes: u32,
    },
    /// The client of a node on this machine was given memory of a device.
    NoEngine,
    /// The device has no memory or no way for staging.
    NoStager {
        /// The device.
        location: Location,
        /// The driver's reason.
        error: te_core::Error,
    },
    /// Bytes could not be copied from or to the device.
    Failed {
        /// The device.
        location: Location,
        /// The driver's reason.
        error: te_core::Error,
    },
}

/// Why a client or a node did not start.
#[derive(Debug)]
#[non_exhaustive]
pub enum ConnectError {
    /// A field of the configuration has an invalid value.
    Config {
        /// Name of the field.
        field: &'static str,
        /// The values that the field may have.
        need: &'static str,
    },
    /// The master could not be reached, or refused the connection.
    Rpc(RpcError),
    /// This process is a fork of the process that started the node.
    Forked,
    /// Another node that is alive has the name.
    Held {
        /// The name.
        name: String,
        /// Address of the node that has the name.
        endpoint: String,
        /// Time since the master last heard from that node, milliseconds.
        silent_ms: u64,
    },
    /// Another process has extents of a CXL pool, and it is not proved that it has ended.
    ExtentsHeld {
        /// The pool.
        pool: PathBuf,
        /// The first extent of its claim.
        first: u32,
        /// The number of extents of its claim.
        count: u32,
        /// The name of its node; empty if the master does not know it.
        node: String,
        /// Whether the master counts that node as alive.
        alive: bool,
        /// It is a process of this host, and runs.
        here: bool,
    },
    /// The CXL pool of the node cannot be used.
    Pool {
        /// The pool.
        path: PathBuf,
        /// What is wrong.
        why: String,
        /// A peer is in the middle of a copy: waiting may help.
        busy: bool,
    },
    /// The storage of the node cannot be used.
    Storage {
        /// The namespace, as the settings name it.
        namespace: String,
        /// What is wrong, and what to do.
        why: String,
        /// Another node has the name of this one: waiting may help.
        busy: bool,
    },
    /// The transfer engine did not start.
    Engine(StartError),
    /// The node's memory could not be allocated or registered.
    Memory(RegisterError),
    /// The operating system did not create a thread.
    System(io::Error),
    /// A disk of the node cannot be used.
    Disk(DiskError),
    /// The service that reads objects from the node's disks cannot be started.
    Stage(StageError),
}

impl RpcError {
    /// The store's error code for this error.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(code) => *code,
            Self::NotLeader { .. } | Self::Outdated { .. } => ErrorCode::NotLeader,
            Self::NoLeader { last, .. } => last.code(),
            Self::NoEtcd => ErrorCode::NotSupported,
            Self::Superseded | Self::Directory { .. } => ErrorCode::RpcFail,
            Self::Tenant { .. } => ErrorCode::TenantNotRegistered,
            Self::Secret => ErrorCode::PermissionDenied,
            Self::TimedOut { .. } => ErrorCode::RpcTimeout,
            Self::Version { .. } => ErrorCode::InvalidVersion,
            Self::Wire(error) => error.code(),
            Self::Forked => ErrorCode::Forked,
            Self::Address { .. } | Self::Connect { .. } | Self::Lost { .. } | Self::Disconnected => {
                ErrorCode::RpcFail
            }
        }
    }

    /// Whether waiting may help: the master cannot be reached yet, or is starting.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        matches!(
            self,
            Self::Connect { .. }
                | Self::Lost { .. }
                | Self::Disconnected
                | Self::TimedOut { .. }
                | Self::NotLeader { .. }
                | Self::Outdated { .. }
                | Self::Superseded
                | Self::NoLeader { .. }
                | Self::Directory { .. }
                | Self::Refused(ErrorCode::UnavailableInCurrentStatus)
        )
    }

    /// Whether neither waiting nor another try changes it.
    pub(crate) const fn is_final(&self) -> bool {
        matches!(
            self,
            Self::Version { .. }
                | Self::Address { .. }
                | Self::Tenant { .. }
                | Self::Secret
                | Self::NoEtcd
                | Self::Forked
        )
    }

    /// Whether this connection is unusable and a new one may work.
    #[must_use]
    pub const fn is_lost(&self) -> bool {
        matches!(
            self,
            Self::Lost { .. }
                | Self::Disconnected
                | Self::Connect { .. }
                | Self::NotLeader { .. }
                | Self::Outdated { .. }
                | Self::Superseded
        )
    }
}

impl ConnectError {
    /// Whether waiting may help: the master cannot be reached yet, or is starting.
    #[must_use]
    pub const fn is_transient(&self) -> bool {
        match self {
            Self::Rpc(error) => error.is_transient(),
            Self::Pool { busy, .. } | Self::Storage { busy, .. } => *busy,
            _ => false,
        }
    }
}

impl StoreError {
    /// The store's error code for this error, with Mooncake's number.
    #[must_use]
    pub fn code(&self) -> ErrorCode {
        match self {
            Self::Refused(code) => *code,
            Self::Rpc(error) => error.code(),
            Self::Local(error) => error.code(),
            Self::DeviceMemory(DeviceError::Failed { .. }) => ErrorCode::TransferFail,
            Self::TooLong { .. } | Self::ArenaFull { .. } => ErrorCode::BufferOverflow,
            Self::Memory(_)
            | Self::DeviceMemory(_)
            | Self::BeyondEnd { .. }
            | Self::BadRange { .. }
            | Self::TooManyParts { .. }
            | Self::Unregistered { .. }
            | Self::NotStarted
            | Self::BadWrite { .. }
            | Self::Incomplete { .. }
            | Self::ForeignMemory => ErrorCode::InvalidParams,
            Self::Forked => ErrorCode::Forked,
            Self::Expelled => ErrorCode::Expelled,
            Self::Held | Self::Stopped => ErrorCode::UnavailableInCurrentStatus,
        }
    }
}

impl fmt::Display for RpcError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Address { text } => {
                write!(
                    f,
                    "`{text}` is not an address: write host:port or unix:/path, several of them separated by commas, \
                     or etcd://host:port/CLUSTER"
                )
            }
            Self::Connect { address, source } => {
                write!(f, "no master at {address}: {source}: check that it runs, and the address")
            }
            Self::Lost { source } => write!(f, "the connection to the master broke: {source}: try again"),
            Self::Disconnected => f.write_str("not connected to the master: try again"),
            Self::TimedOut { call_ms_max, trace } => {
                write!(
                    f,
                    "the master did not answer operation {trace} within {call_ms_max} ms: check its load, or raise \
                     `call_ms_max`"
                )
            }
            Self::Version { theirs } => write!(
                f,
                "the master speaks protocol version {theirs}, this client version {VERSION}: run the same release on \
                 both sides"
            ),
            Self::Wire(error) => error.fmt(f),
            Self::Tenant { tenant } => write!(
                f,
                "the master refused tenant `{}`: check the tenant's name and secret, or add the tenant to the \
                 master's settings",
                tenant.escape_debug()
            ),
            Self::Secret => f.write_str(
                "the master refused a secret: compare the cluster secret and the admin secret with the master's settings",
            ),
            Self::Refused(code) => code.fmt(f),
            Self::NotLeader { hint } => match &hint.leader {
                Some(leader) => write!(f, "the master does not lead, {leader} does: use that one, or list all masters"),
                None => f.write_str("the master does not lead, and knows of none that does: try again"),
            },
            Self::Outdated { theirs, latest } => write!(
                f,
                "the master leads lineage {}, term {}, and this process has met lineage {}, term {}: it was replaced, \
                 or its clock was set back before it was started: stop it, or restart this process to use it",
                theirs.lineage, theirs.term, latest.lineage, latest.term
            ),
            Self::Superseded => f.write_str("the master does not answer, and another one leads by now: try again"),
            Self::NoLeader { masters, last } => {
                write!(f, "none of the masters at {masters} leads, or it cannot be reached: {last}")
            }
            Self::Directory { servers, reason } => {
                write!(f, "etcd at {servers} does not say where the masters are: {reason}")
            }
            Self::NoEtcd => f.write_str(
                "this build cannot look masters up in etcd: build it with the feature `etcd`, or list their addresses",
            ),
            Self::Forked => f.write_str(FORKED),
        }
    }
}

impl StdError for RpcError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Connect { source, .. } | Self::Lost { source } => Some(source),
            Self::Wire(error) => Some(error),
            Self::Refused(code) => Some(code),
            Self::NoLeader { last, .. } => Some(&**last),
            _ => None,
        }
    }
}

impl fmt::Display for StoreError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Refused(code) => code.fmt(f),
            Self::Rpc(error) => error.fmt(f),
            Self::Local(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::DeviceMemory(error) => error.fmt(f),
            Self::TooLong { room } => write!(
                f,
                "the object or the requested part is longer than the {room} bytes of its destination: look up the \
                 object's size, then pass a larger buffer or read a part"
            ),
            Self::BeyondEnd { end } => write!(
                f,
                "the object ends before byte {end}: look up its size and read a part that lies inside it"
            ),
            Self::BadRange { start, len } => write!(
                f,
                "a part of {len} bytes at offset {start} cannot be read: use at least one byte and an end below \
                 2^64, and no range together with fragments"
            ),
            Self::TooManyParts { parts } => {
                write!(f, "the item has {parts} parts: pass {PARTS_MAX} at most, or split the item")
            }
            Self::Unregistered { offset, len } => write!(
                f,
                "{len} bytes at offset {offset} do not lie inside registered memory: check offset and length, and \
                 that the memory is still registered with this client"
            ),
            Self::ForeignMemory => f.write_str(
                "the buffer belongs to another client or to a connection that has been lost: allocate a new buffer \
                 with this client and fill it again",
            ),
            Self::NotStarted => f.write_str(
                "no put or get of this key is started in this client, or it has ended: start one first",
            ),
            Self::BadWrite { start, len } => write!(
                f,
                "{len} bytes at offset {start} cannot be written: use at least one byte, stay inside the length that \
                 the put was started with, and write each byte once"
            ),
            Self::Incomplete { missing } => write!(
                f,
                "{missing} bytes of the object were not written: write them before the put is ended, or revoke it"
            ),
            Self::Held => f.write_str(
                "a transfer that was given up may still use the buffer: try again later, or use another buffer",
            ),
            Self::ArenaFull { wanted, largest_free, arena_bytes } => write!(
                f,
                "{wanted} bytes do not fit the arena of {arena_bytes} bytes, whose longest free part has \
                 {largest_free}: drop buffers, or configure a larger arena (`arena_bytes`)"
            ),
            Self::Stopped => f.write_str("the client was stopped, or its thread has failed: start a new client"),
            Self::Forked => f.write_str(FORKED),
            Self::Expelled => f.write_str(
                "nodes cut this client off, because it made no progress for longer than they tolerate: connect a new \
                 client and register its memory there",
            ),
        }
    }
}

impl fmt::Display for DeviceError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Unknown { location } => write!(
                f,
                "memory of {location} cannot be used: this build knows no such devices (features `cuda` and `hip`), or \
                 there is no driver for them: use such a build on a host with the device, or copy to host memory"
            ),
            Self::OutOfRange { addr, len } => write!(
                f,
                "{len} bytes at {addr:#x} do not lie in one allocation of device memory: check address and length"
            ),
            Self::Stale { location, addr } => write!(
                f,
                "the memory of {location} at {addr:#x} was freed after it was registered: keep registered memory, \
                 or unregister it before it is freed"
            ),
            Self::SeveralDevices => f.write_str(
                "parts of one object go to memory of several devices: read them with one item for each device",
            ),
            Self::ShortSlots { slot_bytes } => write!(
                f,
                "slots of {slot_bytes} bytes hold no checksum chunk of {CHUNK_BYTES} bytes: set `gpu.slot_bytes` of \
                 the engine to {CHUNK_BYTES} at least"
            ),
            Self::NoEngine => f.write_str(
                "the client of a node on this machine moves host memory alone: connect a client of the cluster for \
                 device memory, or copy to host memory",
            ),
            Self::NoStager { location, error } => write!(
                f,
                "no copies from and to {location} are possible: {error}: see `snowskin doctor`"
            ),
            Self::Failed { location, error } => write!(
                f,
                "bytes were not copied between host memory and {location}: {error}: check the device, and restart \
                 the process if its context has failed"
            ),
        }
    }
}

impl StdError for DeviceError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::NoStager { error, .. } | Self::Failed { error, .. } => Some(error),
            _ => None,
        }
    }
}

impl StdError for StoreError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Refused(code) => Some(code),
            Self::Rpc(error) => Some(&**error),
            Self::Local(error) => Some(&**error),
            Self::Memory(error) => Some(error),
            Self::DeviceMemory(error) => Some(error),
            _ => None,
        }
    }
}

impl From<ErrorCode> for StoreError {
    fn from(code: ErrorCode) -> Self {
        match code {
            ErrorCode::Forked => Self::Forked,
            ErrorCode::Expelled => Self::Expelled,
            code => Self::Refused(code),
        }
    }
}

impl From<RpcError> for StoreError {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Refused(code) => Self::Refused(code),
            RpcError::Forked => Self::Forked,
            error => Self::Rpc(Arc::new(error)),
        }
    }
}

impl From<LocalError> for StoreError {
    fn from(error: LocalError) -> Self {
        match error {
            LocalError::Forked => Self::Forked,
            error => Self::Local(Arc::new(error)),
        }
    }
}

impl From<RegisterError> for StoreError {
    fn from(error: RegisterError) -> Self {
        match error {
            RegisterError::Forked => Self::Forked,
            error => Self::Memory(error),
        }
    }
}

impl fmt::Display for ConnectError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Config { field, need } => write!(f, "configuration: {field} {need}"),
            Self::Rpc(error) => error.fmt(f),
            Self::Forked => f.write_str(FORKED),
            Self::Held { name, endpoint, silent_ms } => write!(
                f,
                "the node at {} has the name `{}`; the master last heard from it {silent_ms} ms ago: stop that node, \
                 choose another name, or take the name over (`takeover`)",
                endpoint.escape_debug(),
                name.escape_debug()
            ),
            Self::ExtentsHeld { pool, first, count, node, alive, here } => {
                let last = u64::from(*first) + u64::from(*count).saturating_sub(1);
                write!(f, "extents {first} to {last} of {} belong to ", pool.display())?;
                match (node.as_str(), here) {
                    ("", false) => f.write_str("a process that the master does not know")?,
                    ("", true) => f.write_str("another process of this host")?,
                    (node, _) => write!(f, "the node `{}`", node.escape_debug())?,
                }
                f.write_str(match (here, alive) {
                    (true, _) => ", which runs on this host: stop it, or choose other extents (`cxl.first`)",
                    (_, true) => ", which is alive: stop it, or choose other extents (`cxl.first`)",
                    (_, false) => {
                        ", of another host or boot, and nothing proves that it has ended: choose other extents, or set \
                         `takeover` if that process, or its host, can write the pool no more"
                    }
                })
            }
            Self::Pool { path, why, .. } => write!(f, "the pool {}: {why}", path.display()),
            Self::Storage { namespace, why, .. } => write!(f, "the namespace {namespace}: {why}"),
            Self::Engine(error) => error.fmt(f),
            Self::Memory(error) => error.fmt(f),
            Self::System(error) => write!(f, "the operating system did not create a thread: {error}"),
            Self::Disk(error) => error.fmt(f),
            Self::Stage(error) => error.fmt(f),
        }
    }
}

impl StdError for ConnectError {
    fn source(&self) -> Option<&(dyn StdError + 'static)> {
        match self {
            Self::Config { .. }
            | Self::Held { .. }
            | Self::ExtentsHeld { .. }
            | Self::Pool { .. }
            | Self::Storage { .. }
            | Self::Forked => None,
            Self::Rpc(error) => Some(error),
            Self::Engine(error) => Some(error),
            Self::Memory(error) => Some(error),
            Self::System(error) => Some(error),
            Self::Disk(error) => Some(error),
            Self::Stage(error) => Some(error),
        }
    }
}

impl From<RpcError> for ConnectError {
    fn from(error: RpcError) -> Self {
        match error {
            RpcError::Forked => Self::Forked,
            error => Self::Rpc(error),
        }
    }
}

impl From<StartError> for ConnectError {
    fn from(error: StartError) -> Self {
        Self::Engine(error)
    }
}

impl From<RegisterError> for ConnectError {
    fn from(error: RegisterError) -> Self {
        Self::Memory(error)
    }
}

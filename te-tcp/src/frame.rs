//! The wire protocol: pure functions that parse bytes into frames and write frames as bytes. They use no
//! sockets, keep no state, and touch only the caller's memory.
//!
//! All integers are little-endian. A connection is opened by the *initiator*, which reads and writes remote
//! memory, towards the *target*, which exported the memory. The roles of a connection never change.
//!
//! ```text
//!  initiator                                              target
//!     │ HELLO 48 B ───────────────────────────────────────▶ │  once, first
//!     │ ◀──────────────────────────────────── WELCOME 32 B  │  once, first; then a close unless status 0
//!     │ READ, WRITE+payloads, FENCE, PING ────────────────▶ │  frames: header, `count` entries, payloads
//!     │ ◀──────────── DATA+payloads, ACK, FENCE_ACK, PONG   │  in the order of the requests
//!     │ ◀──────────────────────────────── GO_AWAY, ERROR    │  last on a connection that the target ends
//! ```
//!
//! Nothing follows a HELLO until its WELCOME has arrived. A connection that still waits in the target's
//! accept queue therefore holds no WRITE, so a fence needs to look at accepted connections only.
//!
//! **HELLO**, 48 bytes
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `snowskin` |
//! | 8 | 2 | protocol version, now 2. Magic and version stay here in every version |
//! | 10 | 2 | connection number within the session |
//! | 12 | 4 | connection generation: grows with each connection that the session opens to this target |
//! | 16 | 8 | session: random, one for each initiating transport |
//! | 24 | 8 | initiator's incarnation |
//! | 32 | 8 | incarnation that the target must have |
//! | 40 | 8 | initiator's identity: one for all transports of a process's engine, never 0 |
//!
//! **WELCOME**, 32 bytes
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `snowskin` |
//! | 8 | 2 | the target's protocol version |
//! | 10 | 2 | zero |
//! | 12 | 4 | [`Status`]; other than 0: refused, the target closes |
//! | 16 | 8 | the target's incarnation; 0 when refused, because knowing it is what gets a HELLO admitted |
//! | 24 | 8 | longest operation that the target accepts, bytes |
//!
//! **Header**, 16 bytes, opens every later frame
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 1 | kind: 1 READ, 2 WRITE, 3 FENCE, 4 PING · 129 DATA, 130 ACK, 131 FENCE_ACK, 132 PONG, 133 GO_AWAY, 255 ERROR |
//! | 1 | 1 | flags: 1 = checksums are set (WRITE, DATA) or wanted (READ) |
//! | 2 | 2 | count of entries that follow |
//! | 4 | 4 | zero |
//! | 8 | 8 | READ, WRITE, DATA, ACK: sequence number of the first operation, counted from 0 on each connection · FENCE, PING and their answers: id · GO_AWAY: the first operation that was not accepted · ERROR: status |
//!
//! **READ** and **WRITE** carry 1 to 64 operations of 40 bytes each. The entries of a WRITE are followed by
//! the payloads of all its operations without gaps, including those of operations that will be refused; the
//! target discards these.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | region index |
//! | 4 | 4 | region generation |
//! | 8 | 8 | key of the export |
//! | 16 | 8 | offset into the region |
//! | 24 | 8 | length; 0 is refused |
//! | 32 | 4 | WRITE with checksums: CRC32C of the payload |
//! | 36 | 4 | zero |
//!
//! A READ with checksums may request 4 MiB in all; its operations beyond that are refused.
//!
//! **DATA** answers READs: 1 to 64 entries of 16 bytes, followed by the payloads of the operations with
//! status 0, without gaps.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 4 | [`Status`] |
//! | 4 | 4 | with checksums: CRC32C of the payload |
//! | 8 | 8 | payload bytes: the length asked for, or 0 when refused |
//!
//! **ACK** answers WRITEs: 1 to 64 statuses of 4 bytes. Status 0 means that the last byte is in place.
//!
//! **FENCE** lists the connections that the initiator still uses, 1 to 64 entries of 8 bytes: connection
//! number (2), zero (2), connection generation (4). The target closes every other connection of that session,
//! with whatever is unread in it, and then answers. Requests that came before the FENCE on its own connection
//! have been applied by then, because a connection is served in order.
//!
//! **GO_AWAY** (target to initiator) is the last frame of a connection that the target closes because it is
//! idle and the connection is needed for another peer, or because it has never carried anything. Every
//! operation before the number in it has been answered. That operation and all later ones were not accepted
//! and never will be: the initiator sends them again on another connection, and its caller sees nothing of
//! this.
//!
//! **ERROR** (target to initiator) is the last frame of a connection whose initiator broke the protocol.
//!
//! Version 2 added the identity, GO_AWAY and the status Expelled. Versions are not mixed: each side refuses
//! the other's.

pub use te_fabric::export::{EXPORT_ADDRESSES_MAX, EXPORT_BYTES_MAX, Export, ExportFormat};
use te_fabric::handshake::Protocol;
pub use te_fabric::handshake::{FrameError, Step, Welcome};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The protocol version of this release.
pub const VERSION: u16 = 2;
/// The first bytes of HELLO and WELCOME in every version.
pub const MAGIC: [u8; 8] = *b"snowskin";
/// Magic and version, as the handshake needs them.
pub const PROTOCOL: Protocol = Protocol { magic: MAGIC, version: VERSION };
/// Operations, statuses or connections that one frame may carry.
pub const ENTRIES_MAX: usize = 64;
/// The longest head (header and entries) of any frame, bytes.
pub const HEAD_BYTES_MAX: usize = size_of::<Header>() + ENTRIES_MAX * size_of::<Operation>();
/// Bytes that all operations of one READ with checksums may request together: the target computes the
/// checksums before it answers. The operations beyond that are refused with [`Status::TooLong`].
pub const CHECKSUM_BYTES_MAX: u32 = 4 << 20;
/// Header flag: the frame has checksums (WRITE, DATA), or the answer is to have them (READ).
pub const FLAG_CHECKSUM: u8 = 1;
/// Marks exports of this fabric. Version 3 carries the location of the memory.
pub const EXPORT_FORMAT: ExportFormat = ExportFormat { magic: *b"stcp", version: 3 };

/// The values of the kind byte in a [`Header`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[non_exhaustive]
pub enum Kind {
    /// Requests bytes of the target's memory.
    Read = 1,
    /// Carries bytes for the target's memory.
    Write = 2,
    /// Requests confirmation that nothing older will land.
    Fence = 3,
    /// Requests a sign of life.
    Ping = 4,
    /// Answers READs.
    Data = 129,
    /// Answers WRITEs.
    Ack = 130,
    /// Answers a FENCE.
    FenceAck = 131,
    /// Answers a PING.
    Pong = 132,
    /// Closes an idle connection.
    GoAway = 133,
    /// Closes a connection whose initiator broke the protocol.
    Error = 255,
}

te_fabric::statuses! {
    /// Result of an operation or a handshake at the target.
    pub enum Status {
        /// The length is zero.
        Empty = 1 => InvalidArgument,
        /// The operation is longer than the target accepts.
        TooLong = 2 => InvalidArgument,
        /// There is no such region.
        NotFound = 3 => NotFound,
        /// The region has another generation, or is being withdrawn.
        Stale = 4 => Stale,
        /// The range is not inside the region.
        OutOfRange = 5 => OutOfRange,
        /// The key is wrong, or the export does not grant this access.
        AccessDenied = 6 => AccessDenied,
        /// The payload does not match the checksum that came with it.
        Corrupt = 7 => Corrupt,
        /// The target has another incarnation than the initiator expects.
        Restarted = 8 => PeerRestarted,
        /// The target uses another protocol version.
        Version = 9 => Protocol,
        /// The connection did not begin with the magic.
        Magic = 10 => Protocol,
        /// The target has as many connections as its settings allow.
        Full = 11 => Full,
        /// A frame broke the protocol.
        Protocol = 12 => Protocol,
        /// The region was withdrawn while a payload was being moved; some of its bytes may be in place.
        Withdrawn = 13 => Stale,
        /// The target has expelled this initiator for good.
        Expelled = 14 => Expelled,
    }
}

/// First frame of a connection, from initiator to target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// Number of the connection within the session.
    pub connection: U16,
    /// Counts the connections of the session; a number that is used again gets another generation.
    pub connection_generation: U32,
    /// Random, one for each initiating transport.
    pub session: U64,
    /// The initiator's incarnation.
    pub initiator: U64,
    /// The incarnation that the target must have.
    pub target: U64,
    /// Random, one for each initiating engine, never 0. Targets expel by it.
    pub identity: U64,
}

/// The beginning of every frame after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    /// A [`Kind`].
    pub kind: u8,
    /// [`FLAG_CHECKSUM`] or 0.
    pub flags: u8,
    /// Number of entries that follow.
    pub count: U16,
    /// Zero.
    pub reserved: U32,
    /// Sequence number, id or status; see the module's documentation.
    pub seq: U64,
}

impl Header {
    /// A header of `kind` with `count` entries.
    #[must_use]
    pub const fn new(kind: Kind, flags: u8, count: u16, seq: u64) -> Self {
        Self { kind: kind as u8, flags, count: U16::new(count), reserved: U32::new(0), seq: U64::new(seq) }
    }
}

/// Entry of READ and WRITE: one contiguous range of an exported region.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Operation {
    /// Region index at the target.
    pub region: U32,
    /// Region generation at the target.
    pub generation: U32,
    /// Key of the export.
    pub key: U64,
    /// Offset into the region, bytes.
    pub offset: U64,
    /// Length, bytes.
    pub len: U64,
    /// CRC32C of the payload when the frame has [`FLAG_CHECKSUM`].
    pub crc: U32,
    /// Zero.
    pub reserved: U32,
}

/// Position of the length in an [`Operation`], bytes. A sender that cancels an operation before it is sent
/// sets the length to 0.
pub const OPERATION_LEN_AT: usize = 24;

/// Entry of DATA.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct DataEntry {
    /// A [`Status`].
    pub status: U32,
    /// CRC32C of the payload when the frame has [`FLAG_CHECKSUM`].
    pub crc: U32,
    /// Payload bytes.
    pub len: U64,
}

/// Entry of FENCE: a connection that the initiator still uses.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnectionEntry {
    /// Connection number.
    pub connection: U16,
    /// Zero.
    pub reserved: U16,
    /// Connection generation.
    pub generation: U32,
}

impl ConnectionEntry {
    /// The entry of this connection.
    #[must_use]
    pub const fn new(connection: u16, generation: u32) -> Self {
        Self { connection: U16::new(connection), reserved: U16::new(0), generation: U32::new(generation) }
    }
}

/// A frame that a target may receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Request<'a> {
    /// Requests bytes.
    Read {
        /// Sequence number of the first operation.
        seq: u64,
        /// The answer is to have checksums.
        checksum: bool,
        /// The ranges to read.
        operations: &'a [Operation],
    },
    /// Carries bytes; the payloads follow.
    Write {
        /// Sequence number of the first operation.
        seq: u64,
        /// The operations have checksums.
        checksum: bool,
        /// The ranges to write.
        operations: &'a [Operation],
    },
    /// Requests that every other connection of the session is closed, and an answer after that.
    Fence {
        /// Repeated in the answer.
        id: u64,
        /// Connections that the initiator still uses.
        connections: &'a [ConnectionEntry],
    },
    /// Requests a sign of life.
    Ping {
        /// Repeated in the answer.
        id: u64,
    },
}

/// A frame that an initiator may receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Response<'a> {
    /// Answers READs; the payloads follow.
    Data {
        /// Sequence number of the first operation.
        seq: u64,
        /// The entries have checksums.
        checksum: bool,
        /// One entry for each operation.
        entries: &'a [DataEntry],
    },
    /// Answers WRITEs.
    Ack {
        /// Sequence number of the first operation.
        seq: u64,
        /// One [`Status`] for each operation.
        statuses: &'a [U32],
    },
    /// Answers a FENCE: nothing older will land.
    FenceAck {
        /// Id of the FENCE.
        id: u64,
    },
    /// Answers a PING.
    Pong {
        /// Id of the PING.
        id: u64,
    },
    /// Closes the connection; operations that were not accepted have to be sent on another one.
    GoAway {
        /// Sequence number of the first operation that was not accepted.
        next: u64,
    },
    /// Closes the connection: its initiator broke the protocol.
    Error {
        /// How the protocol was broken.
        status: Status,
    },
}

/// Parses the first frame that a target receives. A wrong magic or version is reported as soon as its bytes
/// are there.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_hello(bytes: &[u8]) -> Result<Step<Hello>, FrameError> {
    PROTOCOL.parse_hello(bytes, |hello: &Hello| match hello.identity.get() {
        0 => Err(FrameError::Identity),
        _ => Ok(()),
    })
}

/// Parses the first frame that an initiator receives. Its detail is the longest operation that the target
/// accepts, bytes. Another version is not an error in a refusal, whose status gives the reason.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_welcome(bytes: &[u8]) -> Result<Step<Welcome>, FrameError> {
    PROTOCOL.parse_welcome(bytes)
}

/// Parses the head of the next frame that a target receives.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_request(bytes: &[u8]) -> Result<Step<Request<'_>>, FrameError> {
    let Some((header, rest)) = split_header(bytes)? else { return Ok(Step::Need(size_of::<Header>())) };
    let (seq, checksum) = (header.seq.get(), header.flags & FLAG_CHECKSUM != 0);
    match header.kind {
        k if k == Kind::Read as u8 => {
            step_entries(header, rest, |operations| Request::Read { seq, checksum, operations })
        }
        k if k == Kind::Write as u8 => {
            step_entries(header, rest, |operations| Request::Write { seq, checksum, operations })
        }
        k if k == Kind::Fence as u8 => {
            step_entries(header, rest, |connections| Request::Fence { id: seq, connections })
        }
        k if k == Kind::Ping as u8 => step_bare(header, Request::Ping { id: seq }),
        k => Err(FrameError::Kind(k)),
    }
}

/// Parses the head of the next frame that an initiator receives.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_response(bytes: &[u8]) -> Result<Step<Response<'_>>, FrameError> {
    let Some((header, rest)) = split_header(bytes)? else { return Ok(Step::Need(size_of::<Header>())) };
    let (seq, checksum) = (header.seq.get(), header.flags & FLAG_CHECKSUM != 0);
    match header.kind {
        k if k == Kind::Data as u8 => {
            step_entries(header, rest, |entries| Response::Data { seq, checksum, entries })
        }
        k if k == Kind::Ack as u8 => step_entries(header, rest, |statuses| Response::Ack { seq, statuses }),
        k if k == Kind::FenceAck as u8 => step_bare(header, Response::FenceAck { id: seq }),
        k if k == Kind::Pong as u8 => step_bare(header, Response::Pong { id: seq }),
        k if k == Kind::GoAway as u8 => step_bare(header, Response::GoAway { next: seq }),
        k if k == Kind::Error as u8 => {
            let status = Status::from_wire(u32::try_from(seq).unwrap_or(u32::MAX));
            step_bare(header, Response::Error { status })
        }
        k => Err(FrameError::Kind(k)),
    }
}

/// Parses an export.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_export(bytes: &[u8]) -> Result<Export, FrameError> {
    Export::parse(EXPORT_FORMAT, bytes)
}

/// The header and the bytes after it; `None` when the header is not complete.
fn split_header(bytes: &[u8]) -> Result<Option<(Header, &[u8])>, FrameError> {
    let Ok((header, rest)) = Header::read_from_prefix(bytes) else { return Ok(None) };
    if header.reserved.get() != 0 {
        return Err(FrameError::Reserved);
    }
    if header.flags & !FLAG_CHECKSUM != 0 {
        return Err(FrameError::Flags(header.flags));
    }
    Ok(Some((header, rest)))
}

fn step_entries<'a, E, T>(
    header: Header,
    rest: &'a [u8],
    make: impl FnOnce(&'a [E]) -> T,
) -> Result<Step<T>, FrameError>
where
    E: FromBytes + KnownLayout + Immutable + Unaligned + 'a,
{
    let count = usize::from(header.count.get());
    if count == 0 || count > ENTRIES_MAX {
        return Err(FrameError::Count(header.count.get()));
    }
    let bytes = count * size_of::<E>();
    let total = size_of::<Header>() + bytes;
    let Some(body) = rest.get(..bytes) else { return Ok(Step::Need(total)) };
    match <[E]>::ref_from_bytes(body) {
        Ok(entries) => Ok(Step::Frame(make(entries), total)),
        Err(_) => Err(FrameError::Length),
    }
}

fn step_bare<T>(header: Header, value: T) -> Result<Step<T>, FrameError> {
    if header.count.get() != 0 {
        return Err(FrameError::Count(header.count.get()));
    }
    Ok(Step::Frame(value, size_of::<Header>()))
}

//! The protocol of control connections, and exports: pure functions from bytes to frames and back, without
//! sockets, state or allocations.
//!
//! All integers are little-endian. A control connection is one TCP connection. The *initiator*, which reads
//! and writes memory, opens it to the *target*, which exports memory, and the roles do not change. It carries
//! no payload: it connects queue pairs, sends remote keys to peers that have the key of the export, and
//! carries fences.
//!
//! ```text
//!  initiator                                              target
//!     │ HELLO 48 B ───────────────────────────────────────▶ │  once, first
//!     │ ◀──────────────────────────────────── WELCOME 32 B  │  once, first; a status other than 0 is followed by a close
//!     │ CONNECT, RESOLVE, FENCE ──────────────────────────▶ │  frames: 16 B header, a fixed body, `count` entries
//!     │ ◀────────────── ACCEPT, RESOLVED, FENCED, REFUSED   │  each with the id of what it answers
//!     │ ◀──────────────────────────────────── WITHDRAWN     │  at any time
//! ```
//!
//! **HELLO**, 48 bytes
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `snowrdma` |
//! | 8 | 2 | protocol version, now 2. Magic and version stay here in every version |
//! | 10 | 2 | zero |
//! | 12 | 4 | number of the connection among those of the session: larger than that of every earlier one |
//! | 16 | 8 | session: a random number per pair of initiating transport and target, which only these two know |
//! | 24 | 8 | incarnation that the target must have |
//! | 32 | 8 | initiator's identity: the same for all transports of an engine, never 0 |
//! | 40 | 8 | zero |
//!
//! Version 2 added the identity and the status Expelled. Either side refuses any other version.
//!
//! A session has one connection. When the target welcomes a newer one, it has destroyed the queue pairs of
//! the older one.
//!
//! **WELCOME**, 32 bytes
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic `snowrdma` |
//! | 8 | 2 | the target's protocol version |
//! | 10 | 2 | zero |
//! | 12 | 4 | [`Status`]; other than 0: refused, the target closes |
//! | 16 | 8 | the target's incarnation; 0 when refused |
//! | 24 | 8 | zero |
//!
//! **Header**, 16 bytes, at the beginning of every later frame
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 1 | kind: 1 CONNECT, 2 RESOLVE, 3 FENCE · 129 ACCEPT, 130 RESOLVED, 131 FENCED, 132 REFUSED, 133 WITHDRAWN, 255 ERROR |
//! | 1 | 1 | zero |
//! | 2 | 2 | count of entries that follow the body |
//! | 4 | 4 | zero |
//! | 8 | 8 | id: chosen by the initiator, repeated in the answer; 0 in frames without one |
//!
//! Answers come in the order of the requests; WITHDRAWN may come between.
//!
//! **CONNECT** and **ACCEPT**: a body of 32 bytes with the address of the port, then 1 to 16 entries of 16
//! bytes, one per queue pair. ACCEPT has the entries of the CONNECT that it answers, in the same order, with
//! the target's numbers. A CONNECT is refused until a RESOLVE on the same connection has succeeded: a peer
//! without an export gets no queue pair.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 16 | GID, in network order |
//! | 16 | 2 | local identifier (InfiniBand) |
//! | 18 | 1 | kind of the GID: 0 InfiniBand, 1 RoCE v1, 2 RoCE v2 |
//! | 19 | 1 | the most READs in flight on one queue pair |
//! | 20 | 4 | MTU, bytes |
//! | 24 | 8 | zero |
//! | +0 | 4 | entry: generation, the initiator's name for the two connected queue pairs, never used twice |
//! | +4 | 4 | entry: number of the queue pair, 24 bits |
//! | +8 | 4 | entry: first packet number that it sends, 24 bits |
//! | +12 | 4 | entry: zero |
//!
//! **RESOLVE** requests remote keys, 24 bytes and no entries: region index (4), region generation (4), key of
//! the export (8), first chunk requested (4), zero (4).
//!
//! **RESOLVED**: a body of 40 bytes, then 1 to 256 entries of 4 bytes, the remote keys of the chunks from
//! `first` on. A region is cut into chunks where its addresses are multiples of the chunk length; its first
//! and last chunk may be shorter.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | address of the region's first byte |
//! | 8 | 8 | length of the region, bytes |
//! | 16 | 8 | chunk length, bytes, a power of two |
//! | 24 | 4 | number of chunks |
//! | 28 | 4 | number of the first chunk here |
//! | 32 | 1 | rights: 4 = read, 8 = write |
//! | 33 | 7 | zero |
//!
//! **FENCE** lists the generations of the queue pairs that the initiator still uses, 0 to 64 entries of 4
//! bytes. The target destroys every other queue pair of the session and then answers **FENCED**. **REFUSED**
//! answers CONNECT or RESOLVE: status (4), zero (4). **WITHDRAWN** reports that a region was deregistered:
//! index (4), generation (4). Its keys are invalid already, so nothing depends on this frame. **ERROR**
//! (target to initiator) is the last frame on a connection of which the initiator broke the protocol: status
//! (4), zero (4).

mod chunking;

pub use te_fabric::export::{EXPORT_ADDRESSES_MAX, EXPORT_BYTES_MAX, Export, ExportFormat};
use te_fabric::handshake::Protocol;
pub use te_fabric::handshake::{FrameError, Step, Welcome};
use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

pub use chunking::Chunking;

/// The protocol version of this release.
pub const VERSION: u16 = 2;
/// First bytes of HELLO and WELCOME, in every version.
pub const MAGIC: [u8; 8] = *b"snowrdma";
/// Magic and version.
pub const PROTOCOL: Protocol = Protocol { magic: MAGIC, version: VERSION };
/// Magic and version of this fabric's exports.
pub const EXPORT_FORMAT: ExportFormat = ExportFormat { magic: *b"srdm", version: 3 };
/// The most queue pairs in one CONNECT.
pub const QPS_MAX: usize = 16;
/// The most remote keys in one RESOLVED.
pub const KEYS_MAX: usize = 256;
/// [`PortBody::gid_kind`] is less than this.
pub const GID_KINDS: u8 = 3;
/// The most generations in one FENCE.
pub const LIVE_MAX: usize = 64;
/// The longest frame, bytes.
pub const FRAME_BYTES_MAX: usize = size_of::<Header>() + size_of::<Resolved>() + KEYS_MAX * size_of::<U32>();

/// The kinds of frames: values of [`Header::kind`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
pub enum Kind {
    /// Offers queue pairs.
    Connect = 1,
    /// Requests remote keys.
    Resolve = 2,
    /// Requests that no older write can land any more.
    Fence = 3,
    /// Answers a CONNECT with the target's queue pairs.
    Accept = 129,
    /// Answers a RESOLVE with remote keys.
    Resolved = 130,
    /// Confirms a FENCE.
    Fenced = 131,
    /// Refuses a CONNECT or a RESOLVE.
    Refused = 132,
    /// A region was deregistered.
    Withdrawn = 133,
    /// Ends a connection of which the initiator broke the protocol.
    Error = 255,
}

te_fabric::statuses! {
    /// The result of a handshake or a request at the target.
    pub enum Status {
        /// There is no such region.
        NotFound = 1 => NotFound,
        /// The region has another generation, or is being deregistered.
        Stale = 2 => Stale,
        /// Wrong key, or a region without remote rights.
        AccessDenied = 3 => AccessDenied,
        /// A chunk that the region does not have.
        OutOfRange = 4 => OutOfRange,
        /// The target has another incarnation than the initiator expects.
        Restarted = 5 => PeerRestarted,
        /// The target speaks another protocol version.
        Version = 6 => Protocol,
        /// The connection did not begin with the magic.
        Magic = 7 => Protocol,
        /// The target has as many connections or queue pairs as it allows.
        Full = 8 => Unreachable,
        /// A malformed or unexpected frame.
        Protocol = 9 => Protocol,
        /// The target has no GID of this kind and address family.
        Family = 10 => Unreachable,
        /// The target's device failed to make, connect or destroy queue pairs.
        Device = 11 => Rail,
        /// The session has a newer connection already.
        Superseded = 12 => Protocol,
        /// The target has expelled this initiator.
        Expelled = 13 => Expelled,
    }
}

/// First frame, initiator to target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Hello {
    /// [`MAGIC`].
    pub magic: [u8; 8],
    /// [`VERSION`].
    pub version: U16,
    /// Zero.
    pub reserved: U16,
    /// Number of the connection among those of the session.
    pub connection: U32,
    /// A random number per pair of initiating transport and target.
    pub session: U64,
    /// The incarnation that the target must have.
    pub target: U64,
    /// A random number per initiating engine, never 0. Targets expel initiators by it.
    pub identity: U64,
    /// Zero.
    pub reserved_end: U64,
}

/// The beginning of every frame after the handshake.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Header {
    /// A [`Kind`].
    pub kind: u8,
    /// Zero.
    pub flags: u8,
    /// Number of entries after the body.
    pub count: U16,
    /// Zero.
    pub reserved: U32,
    /// Chosen by the initiator, repeated in the answer.
    pub id: U64,
}

impl Header {
    /// A header of `kind` with `count` entries.
    #[must_use]
    pub const fn new(kind: Kind, count: u16, id: u64) -> Self {
        Self { kind: kind as u8, flags: 0, count: U16::new(count), reserved: U32::new(0), id: U64::new(id) }
    }
}

/// Body of CONNECT and ACCEPT: the address of a port.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct PortBody {
    /// GID, in network order.
    pub gid: [u8; 16],
    /// InfiniBand local identifier.
    pub lid: U16,
    /// 0 InfiniBand, 1 RoCE v1, 2 RoCE v2.
    pub gid_kind: u8,
    /// The most READs in flight on one queue pair.
    pub reads: u8,
    /// MTU, bytes.
    pub mtu: U32,
    /// Zero.
    pub reserved: U64,
}

/// Entry of CONNECT and ACCEPT.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct QpEntry {
    /// The initiator's name for the two connected queue pairs.
    pub generation: U32,
    /// Number of the queue pair, 24 bits.
    pub number: U32,
    /// First packet number that it sends, 24 bits.
    pub psn: U32,
    /// Zero.
    pub reserved: U32,
}

/// Body of RESOLVE.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Resolve {
    /// Region index at the target.
    pub region: U32,
    /// Region generation at the target.
    pub generation: U32,
    /// Key of the export.
    pub key: U64,
    /// First chunk requested.
    pub first: U32,
    /// Zero.
    pub reserved: U32,
}

/// Body of RESOLVED.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Resolved {
    /// Address of the region's first byte.
    pub base: U64,
    /// Length of the region, bytes.
    pub len: U64,
    /// Length of a chunk, bytes, a power of two.
    pub chunk_bytes: U64,
    /// Number of chunks of the region.
    pub chunks: U32,
    /// Number of the first chunk in this frame.
    pub first: U32,
    /// The remote rights, as bits of [`te_core::Access`].
    pub rights: u8,
    /// Zero.
    pub reserved: [u8; 7],
}

/// Body of WITHDRAWN.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Withdrawn {
    /// Region index at the target.
    pub region: U32,
    /// Region generation at the target.
    pub generation: U32,
}

/// Body of REFUSED and ERROR.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Refusal {
    /// A [`Status`].
    pub status: U32,
    /// Zero.
    pub reserved: U32,
}

impl Refusal {
    /// The body that carries `status`.
    #[must_use]
    pub const fn new(status: Status) -> Self {
        Self { status: U32::new(status as u32), reserved: U32::new(0) }
    }
}

/// A frame that a target receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Request<'a> {
    /// Make queue pairs and connect them to these.
    Connect {
        /// Repeated in the answer.
        id: u64,
        /// The initiator's port.
        port: PortBody,
        /// The initiator's queue pairs.
        qps: &'a [QpEntry],
    },
    /// Send the remote keys of a region.
    Resolve {
        /// Repeated in the answer.
        id: u64,
        /// The region, its key, and the first chunk.
        of: Resolve,
    },
    /// Destroy every queue pair of this session that is not listed, then confirm.
    Fence {
        /// Repeated in the answer.
        id: u64,
        /// Generations of the queue pairs in use.
        live: &'a [U32],
    },
}

/// A frame that an initiator receives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Response<'a> {
    /// The target's queue pairs.
    Accept {
        /// The id of the request.
        id: u64,
        /// The target's port.
        port: PortBody,
        /// In the order of the request.
        qps: &'a [QpEntry],
    },
    /// Remote keys.
    Resolved {
        /// The id of the request.
        id: u64,
        /// The region and its chunks.
        of: Resolved,
        /// The remote keys of the chunks from `of.first` on.
        keys: &'a [U32],
    },
    /// No older write can land any more.
    Fenced {
        /// The id of the request.
        id: u64,
    },
    /// The request is refused.
    Refused {
        /// The id of the request.
        id: u64,
        /// The reason.
        status: Status,
    },
    /// A region was deregistered.
    Withdrawn {
        /// Its index and generation.
        region: Withdrawn,
    },
    /// The initiator broke the protocol, and the connection ends.
    Error {
        /// The reason.
        status: Status,
    },
}

/// Parses the first frame that a target receives. Magic and version are checked as soon as they have arrived.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_hello(bytes: &[u8]) -> Result<Step<Hello>, FrameError> {
    PROTOCOL.parse_hello(bytes, |hello: &Hello| match hello.identity.get() {
        _ if hello.reserved.get() != 0 || hello.reserved_end.get() != 0 => Err(FrameError::Reserved),
        0 => Err(FrameError::Identity),
        _ => Ok(()),
    })
}

/// Parses the first frame that an initiator receives. In a refusal another version is not an error: its
/// status is the reason.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_welcome(bytes: &[u8]) -> Result<Step<Welcome>, FrameError> {
    PROTOCOL.parse_welcome(bytes)
}

/// Parses the next frame that a target receives.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_request(bytes: &[u8]) -> Result<Step<Request<'_>>, FrameError> {
    let Some((header, rest)) = split_header(bytes)? else { return Ok(Step::Need(size_of::<Header>())) };
    let id = header.id.get();
    match header.kind {
        k if k == Kind::Connect as u8 => body_and_entries(header, rest, 1..=QPS_MAX, |port, qps| {
            check_port(&port, qps)?;
            Ok(Request::Connect { id, port, qps })
        }),
        k if k == Kind::Resolve as u8 => body(header, rest, |of: Resolve| match of.reserved.get() {
            0 => Ok(Request::Resolve { id, of }),
            _ => Err(FrameError::Reserved),
        }),
        k if k == Kind::Fence as u8 => {
            body_and_entries(header, rest, 0..=LIVE_MAX, |(): (), live| Ok(Request::Fence { id, live }))
        }
        k => Err(FrameError::Kind(k)),
    }
}

/// Parses the next frame that an initiator receives.
///
/// # Errors
/// See [`FrameError`].
pub fn parse_response(bytes: &[u8]) -> Result<Step<Response<'_>>, FrameError> {
    let Some((header, rest)) = split_header(bytes)? else { return Ok(Step::Need(size_of::<Header>())) };
    let id = header.id.get();
    match header.kind {
        k if k == Kind::Accept as u8 => body_and_entries(header, rest, 1..=QPS_MAX, |port, qps| {
            check_port(&port, qps)?;
            Ok(Response::Accept { id, port, qps })
        }),
        k if k == Kind::Resolved as u8 => body_and_entries(header, rest, 1..=KEYS_MAX, |of, keys| {
            check_resolved(&of, keys.len())?;
            Ok(Response::Resolved { id, of, keys })
        }),
        k if k == Kind::Fenced as u8 => body(header, rest, |(): ()| Ok(Response::Fenced { id })),
        k if k == Kind::Refused as u8 => {
            body(header, rest, |of| refusal(of).map(|status| Response::Refused { id, status }))
        }
        k if k == Kind::Withdrawn as u8 => body(header, rest, |region| Ok(Response::Withdrawn { region })),
        k if k == Kind::Error as u8 => {
            body(header, rest, |of| refusal(of).map(|status| Response::Error { status }))
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

fn check_port(port: &PortBody, qps: &[QpEntry]) -> Result<(), FrameError> {
    if port.reserved.get() != 0 || qps.iter().any(|qp| qp.reserved.get() != 0) {
        return Err(FrameError::Reserved);
    }
    let mtu = port.mtu.get();
    let sane = port.gid_kind < GID_KINDS && mtu.is_power_of_two() && (256..=4_096).contains(&mtu);
    let numbers = qps.iter().all(|qp| qp.number.get() < 1 << 24 && qp.psn.get() < 1 << 24);
    if sane && numbers { Ok(()) } else { Err(FrameError::Range) }
}

fn check_resolved(of: &Resolved, keys: usize) -> Result<(), FrameError> {
    if of.reserved != [0; 7] {
        return Err(FrameError::Reserved);
    }
    let chunking =
        Chunking::new(of.base.get(), of.len.get(), of.chunk_bytes.get()).ok_or(FrameError::Range)?;
    let chunks = u64::from(of.chunks.get());
    let fits = u64::from(of.first.get()) + keys as u64 <= chunks;
    if chunking.count() == chunks && fits { Ok(()) } else { Err(FrameError::Range) }
}

fn refusal(of: Refusal) -> Result<Status, FrameError> {
    match (of.reserved.get(), Status::from_wire(of.status.get())) {
        (0, Status::Ok) => Err(FrameError::Range),
        (0, status) => Ok(status),
        _ => Err(FrameError::Reserved),
    }
}

/// The header and the bytes after it; `None`: the header has not arrived completely.
fn split_header(bytes: &[u8]) -> Result<Option<(Header, &[u8])>, FrameError> {
    let Ok((header, rest)) = Header::read_from_prefix(bytes) else { return Ok(None) };
    if header.reserved.get() != 0 || header.flags != 0 {
        return Err(FrameError::Reserved);
    }
    Ok(Some((header, rest)))
}

fn body<B: FromBytes + Unaligned, T>(
    header: Header,
    rest: &[u8],
    make: impl FnOnce(B) -> Result<T, FrameError>,
) -> Result<Step<T>, FrameError> {
    if header.count.get() != 0 {
        return Err(FrameError::Count(header.count.get()));
    }
    let total = size_of::<Header>() + size_of::<B>();
    match B::read_from_prefix(rest) {
        Ok((body, _)) => Ok(Step::Frame(make(body)?, total)),
        Err(_) => Ok(Step::Need(total)),
    }
}

fn body_and_entries<'a, B, E, T>(
    header: Header,
    rest: &'a [u8],
    allowed: core::ops::RangeInclusive<usize>,
    make: impl FnOnce(B, &'a [E]) -> Result<T, FrameError>,
) -> Result<Step<T>, FrameError>
where
    B: FromBytes + Unaligned,
    E: FromBytes + KnownLayout + Immutable + Unaligned + 'a,
{
    let count = usize::from(header.count.get());
    if !allowed.contains(&count) {
        return Err(FrameError::Count(header.count.get()));
    }
    let bytes = size_of::<B>() + count * size_of::<E>();
    let total = size_of::<Header>() + bytes;
    let Some(rest) = rest.get(..bytes) else { return Ok(Step::Need(total)) };
    let Ok((body, entries)) = B::read_from_prefix(rest) else { return Ok(Step::Need(total)) };
    match <[E]>::ref_from_bytes(entries) {
        Ok(entries) => Ok(Step::Frame(make(body, entries)?, total)),
        Err(_) => Err(FrameError::Length),
    }
}

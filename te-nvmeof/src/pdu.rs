//! The PDUs of NVMe/TCP, byte by byte, and their parser. No I/O.
//!
//! Sections and figures are those of the *NVM Express NVMe over TCP Transport Specification, revision 1.0*.
//! All numbers are little-endian (1.4.2).
//!
//! ```text
//!   ┌────┬─────┬────┬───┬────┬──────────────┬───────┬─────┬──────────┬───────┐
//!   │TYPE│FLAGS│HLEN│PDO│PLEN│ rest of HLEN │ HDGST │ pad │ data     │ DDGST │
//!   └────┴─────┴────┴───┴────┴──────────────┴───────┴─────┴──────────┴───────┘
//!     1    1     1    1   4                   0 or 4  ▲ to PDO         0 or 4
//! ```
//!
//! | type | PDU | HLEN | data | section |
//! |---|---|---|---|---|
//! | 00h | ICReq | 128 | – | 3.6.2.2 |
//! | 01h | ICResp | 128 | – | 3.6.2.3 |
//! | 02h | H2CTermReq | 24 | header in error | 3.6.2.4 |
//! | 03h | C2HTermReq | 24 | header in error | 3.6.2.5 |
//! | 04h | CapsuleCmd | 72 | in-capsule data | 3.6.2.6 |
//! | 05h | CapsuleResp | 24 | – | 3.6.2.7 |
//! | 06h | H2CData | 24 | yes | 3.6.2.8 |
//! | 07h | C2HData | 24 | yes | 3.6.2.9 |
//! | 09h | R2T | 24 | – | 3.6.2.10 |
//!
//! [`parse`] takes a PDU up to the beginning of its data, and refuses everything that the specification does
//! not allow at that place: another type, length, offset or digest flag than the connection has agreed on.

use core::fmt;

pub use te_fabric::Step;
use te_fabric::handshake::FrameError;
use zerocopy::little_endian::{U16, U32};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::command::{Cqe, Sqe};

/// The length of the common header (3.6.1), in bytes.
pub const COMMON_BYTES: usize = 8;
/// The length of a digest (3.3.1), in bytes.
pub const DIGEST_BYTES: usize = 4;
/// The length of the longest header up to the data, in bytes: PDO is one byte.
pub const HEAD_BYTES_MAX: usize = 255;
/// The length of the longest TermReq PDU (3.6.2.4), in bytes.
pub const TERM_BYTES_MAX: usize = 152;

/// FLAGS: a header digest follows the header.
pub const FLAG_HEADER_DIGEST: u8 = 1;
/// FLAGS: a data digest follows the data.
pub const FLAG_DATA_DIGEST: u8 = 1 << 1;
/// FLAGS of data PDUs: the last one of the transfer.
pub const FLAG_LAST: u8 = 1 << 2;
/// FLAGS of C2HData: the command has succeeded, and no response follows.
pub const FLAG_SUCCESS: u8 = 1 << 3;

/// The types of PDUs (3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u8)]
#[allow(missing_docs, reason = "the table of the module describes them")]
pub enum Kind {
    IcReq = 0x00,
    IcResp = 0x01,
    H2cTermReq = 0x02,
    C2hTermReq = 0x03,
    CapsuleCmd = 0x04,
    CapsuleResp = 0x05,
    H2cData = 0x06,
    C2hData = 0x07,
    R2t = 0x09,
}

impl Kind {
    const ALL: [Self; 9] = [
        Self::IcReq,
        Self::IcResp,
        Self::H2cTermReq,
        Self::C2hTermReq,
        Self::CapsuleCmd,
        Self::CapsuleResp,
        Self::H2cData,
        Self::C2hData,
        Self::R2t,
    ];

    fn of(number: u8) -> Option<Self> {
        Self::ALL.into_iter().find(|kind| *kind as u8 == number)
    }

    const fn header_bytes(self) -> usize {
        match self {
            Self::IcReq | Self::IcResp => 128,
            Self::CapsuleCmd => 72,
            _ => 24,
        }
    }

    /// Whether this end sends PDUs of this type.
    const fn is_from(self, end: End) -> bool {
        match self {
            Self::IcReq | Self::H2cTermReq | Self::CapsuleCmd | Self::H2cData => matches!(end, End::Host),
            _ => matches!(end, End::Controller),
        }
    }

    const fn may_have_data(self) -> bool {
        matches!(self, Self::CapsuleCmd | Self::H2cData | Self::C2hData)
    }

    const fn must_have_data(self) -> bool {
        matches!(self, Self::H2cData | Self::C2hData)
    }

    /// The flags, other than those of digests, that a PDU of this type may have.
    const fn flags(self) -> u8 {
        match self {
            Self::H2cData => FLAG_LAST,
            Self::C2hData => FLAG_LAST | FLAG_SUCCESS,
            _ => 0,
        }
    }
}

/// The two ends of a connection.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum End {
    /// The initiator.
    Host,
    /// The target.
    Controller,
}

/// PDU common header (3.6.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Common {
    /// TYPE.
    pub kind: u8,
    /// FLAGS.
    pub flags: u8,
    /// HLEN: the length of the header, without digest.
    pub hlen: u8,
    /// PDO: the offset of the data; without meaning where there is none.
    pub pdo: u8,
    /// PLEN: the length of the PDU with its digests.
    pub plen: U32,
}

/// ICReq and ICResp (3.6.2.2, 3.6.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Initialize {
    /// The common header.
    pub common: Common,
    /// PFV: the version of the format, 0.
    pub format: U16,
    /// HPDA or CPDA: the alignment of data that this end receives, in dwords, 0's based.
    pub alignment: u8,
    /// DGST: bit 0 header digests, bit 1 data digests.
    pub digests: u8,
    /// MAXR2T (request, 0's based) or MAXH2CDATA (response).
    pub limit: U32,
    /// Zero.
    pub reserved: [u8; 112],
}

/// H2CTermReq and C2HTermReq (3.6.2.4, 3.6.2.5). The header in error follows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct TermReq {
    /// The common header.
    pub common: Common,
    /// FES: the fatal error.
    pub status: U16,
    /// FEI: the offset of the field in error, for an error of a header.
    pub information: U32,
    /// Zero.
    pub reserved: [u8; 10],
}

/// CapsuleCmd (3.6.2.6).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CapsuleCmd {
    /// The common header.
    pub common: Common,
    /// The submission queue entry.
    pub sqe: Sqe,
}

/// CapsuleResp (3.6.2.7).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct CapsuleResp {
    /// The common header.
    pub common: Common,
    /// The completion queue entry.
    pub cqe: Cqe,
}

/// H2CData, C2HData and R2T (3.6.2.8, 3.6.2.9, 3.6.2.10).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Transfer {
    /// The common header.
    pub common: Common,
    /// CCCID: the command.
    pub cid: U16,
    /// TTAG: the target's name for the transfer; zero in C2HData.
    pub ttag: U16,
    /// DATAO or R2TO: where the bytes begin in the command's data.
    pub offset: U32,
    /// DATAL or R2TL: the number of bytes.
    pub len: U32,
    /// Zero.
    pub reserved: U32,
}

const _: () = assert!(size_of::<Initialize>() == 128 && size_of::<TermReq>() == 24);
const _: () = assert!(size_of::<CapsuleCmd>() == 72 && size_of::<CapsuleResp>() == 24);
const _: () = assert!(size_of::<Transfer>() == 24);

/// What the two ends of a connection have agreed on, as far as PDUs depend on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Agreed {
    /// Every header has a digest.
    pub header_digest: bool,
    /// All data has a digest.
    pub data_digest: bool,
    /// Data of the host begins at multiples of this, in dwords, 0's based (CPDA).
    pub alignment: u8,
}

/// The data that follows a header.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Data {
    /// Length, bytes, without digest.
    pub len: u32,
    /// Whether a digest follows.
    pub digest: bool,
}

/// A PDU up to its data.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Pdu {
    /// The host opens the connection.
    IcReq(Initialize),
    /// The controller answers.
    IcResp(Initialize),
    /// The peer ends the connection because of this error.
    TermReq(Fatal),
    /// A command, and its in-capsule data.
    Command(Sqe, Data),
    /// The completion of a command.
    Response(Cqe),
    /// Data of the host, for a transfer of the controller's choice.
    H2cData(Transfer, Data),
    /// Data of the controller.
    C2hData(Transfer, Data),
    /// The controller wants data.
    R2t(Transfer),
}

/// The errors that end a connection: FES (3.5.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Fatal {
    /// 01h: a field of the header is wrong; holds the offset of the field.
    Field(u32),
    /// 02h: a PDU that is not expected now.
    Sequence,
    /// 03h: the digest of a header does not match.
    HeaderDigest,
    /// 04h: data outside of what the command has or the R2T wants; holds the offset of the field.
    OutOfRange(u32),
    /// 05h: more R2Ts, or more data in one PDU, than agreed on.
    Limit,
    /// 06h: a parameter that this end does not support; holds the offset of the field.
    Unsupported(u32),
    /// A number that this release does not know.
    Other(u16),
}

impl Fatal {
    /// FES and FEI.
    #[must_use]
    pub const fn to_wire(self) -> (u16, u32) {
        match self {
            Self::Field(at) => (1, at),
            Self::Sequence => (2, 0),
            Self::HeaderDigest => (3, 0),
            Self::OutOfRange(at) => (4, at),
            Self::Limit => (5, 0),
            Self::Unsupported(at) => (6, at),
            Self::Other(number) => (number, 0),
        }
    }

    const fn from_wire(status: u16, information: u32) -> Self {
        match status {
            1 => Self::Field(information),
            2 => Self::Sequence,
            3 => Self::HeaderDigest,
            4 => Self::OutOfRange(information),
            5 => Self::Limit,
            6 => Self::Unsupported(information),
            other => Self::Other(other),
        }
    }
}

impl fmt::Display for Fatal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Field(at) => write!(f, "the header of a PDU is wrong at byte {at}"),
            Self::Sequence => f.write_str("a PDU came that is not expected at this point"),
            Self::HeaderDigest => f.write_str("the digest of a header does not match: check the link"),
            Self::OutOfRange(at) => {
                write!(f, "data of a PDU lies outside of its command (field at byte {at})")
            }
            Self::Limit => f.write_str("more R2Ts or more data at once than was agreed on"),
            Self::Unsupported(at) => {
                write!(f, "a parameter of the connection is not supported (field at byte {at})")
            }
            Self::Other(number) => write!(f, "fatal error {number:#x}, which this release does not know"),
        }
    }
}

impl core::error::Error for Fatal {}

impl From<FrameError> for Fatal {
    fn from(_: FrameError) -> Self {
        Self::Field(0)
    }
}

/// Offsets of the fields of the common header, for [`Fatal::Field`].
const TYPE_AT: u32 = 0;
const FLAGS_AT: u32 = 1;
const HLEN_AT: u32 = 2;
const PDO_AT: u32 = 3;
const PLEN_AT: u32 = 4;
/// The offset of DATAL and R2TL.
pub(crate) const LEN_AT: u32 = 16;
/// The offset of DATAO and R2TO.
pub(crate) const OFFSET_AT: u32 = 12;

/// Parses the PDU at the beginning of `bytes`, which `from` has sent, up to its data. `Frame` counts the
/// bytes up to the data; a TermReq is counted whole.
///
/// Data longer than `data_bytes_max` is refused.
///
/// # Errors
/// The error to report in a TermReq.
pub fn parse(bytes: &[u8], from: End, agreed: Agreed, data_bytes_max: u32) -> Result<Step<Pdu>, Fatal> {
    let Ok((common, _)) = Common::read_from_prefix(bytes) else { return Ok(Step::Need(COMMON_BYTES)) };
    let kind = Kind::of(common.kind).filter(|kind| kind.is_from(from)).ok_or(Fatal::Field(TYPE_AT))?;
    let header = kind.header_bytes();
    if usize::from(common.hlen) != header {
        return Err(Fatal::Field(HLEN_AT));
    }
    if matches!(kind, Kind::H2cTermReq | Kind::C2hTermReq) {
        return parse_term(bytes, common);
    }
    if matches!(kind, Kind::IcReq | Kind::IcResp) {
        return parse_initialize(bytes, kind, common);
    }
    let head = header + if agreed.header_digest { DIGEST_BYTES } else { 0 };
    let data = data_of(kind, common, head, agreed, data_bytes_max)?;
    let needed = if data.len > 0 { usize::from(common.pdo) } else { head };
    if bytes.len() < needed {
        return Ok(Step::Need(needed));
    }
    if agreed.header_digest && crc32c::crc32c(&bytes[..header]).to_le_bytes() != bytes[header..head] {
        return Err(Fatal::HeaderDigest);
    }
    Ok(Step::Frame(pdu_of(kind, bytes, data)?, needed))
}

/// What follows the header according to the common header.
fn data_of(kind: Kind, common: Common, head: usize, agreed: Agreed, max: u32) -> Result<Data, Fatal> {
    let plen = common.plen.get();
    if (plen as usize) < head {
        return Err(Fatal::Field(PLEN_AT));
    }
    let has_data = plen as usize > head;
    let mut flags = if agreed.header_digest { FLAG_HEADER_DIGEST } else { 0 };
    if has_data && agreed.data_digest {
        flags |= FLAG_DATA_DIGEST;
    }
    if common.flags & !kind.flags() != flags {
        return Err(Fatal::Field(FLAGS_AT));
    }
    if !has_data {
        return if kind.must_have_data() { Err(Fatal::Field(PLEN_AT)) } else { Ok(Data::default()) };
    }
    if !kind.may_have_data() {
        return Err(Fatal::Field(PLEN_AT));
    }
    let pdo = u32::from(common.pdo);
    let unit = if kind == Kind::C2hData { 4 } else { 4 * (u32::from(agreed.alignment) + 1) };
    if (pdo as usize) < head || !pdo.is_multiple_of(unit) {
        return Err(Fatal::Field(PDO_AT));
    }
    let digest = if agreed.data_digest { DIGEST_BYTES as u32 } else { 0 };
    let len = plen.checked_sub(pdo + digest).filter(|len| *len > 0).ok_or(Fatal::Field(PLEN_AT))?;
    if len > max {
        return Err(Fatal::Limit);
    }
    Ok(Data { len, digest: agreed.data_digest })
}

fn pdu_of(kind: Kind, bytes: &[u8], data: Data) -> Result<Pdu, Fatal> {
    let short = |_| Fatal::Field(HLEN_AT);
    if kind == Kind::CapsuleCmd {
        let (capsule, _) = CapsuleCmd::read_from_prefix(bytes).map_err(|_| Fatal::Field(HLEN_AT))?;
        return Ok(Pdu::Command(capsule.sqe, data));
    }
    if kind == Kind::CapsuleResp {
        let (capsule, _) = CapsuleResp::read_from_prefix(bytes).map_err(|_| Fatal::Field(HLEN_AT))?;
        return Ok(Pdu::Response(capsule.cqe));
    }
    let (transfer, _) = Transfer::read_from_prefix(bytes).map_err(|_| ()).map_err(short)?;
    if kind == Kind::R2t {
        return Ok(Pdu::R2t(transfer));
    }
    if transfer.len.get() != data.len {
        return Err(Fatal::Field(LEN_AT));
    }
    let (last, success) = (transfer.common.flags & FLAG_LAST != 0, transfer.common.flags & FLAG_SUCCESS != 0);
    if success && !last {
        return Err(Fatal::Field(FLAGS_AT));
    }
    Ok(if kind == Kind::H2cData { Pdu::H2cData(transfer, data) } else { Pdu::C2hData(transfer, data) })
}

fn parse_initialize(bytes: &[u8], kind: Kind, common: Common) -> Result<Step<Pdu>, Fatal> {
    if common.plen.get() as usize != size_of::<Initialize>() {
        return Err(Fatal::Field(PLEN_AT));
    }
    if common.flags != 0 {
        return Err(Fatal::Field(FLAGS_AT));
    }
    let Ok((initialize, _)) = Initialize::read_from_prefix(bytes) else {
        return Ok(Step::Need(size_of::<Initialize>()));
    };
    if initialize.format.get() != 0 {
        return Err(Fatal::Unsupported(8));
    }
    if initialize.alignment > 31 {
        return Err(Fatal::Field(10));
    }
    if initialize.digests & !3 != 0 {
        return Err(Fatal::Field(11));
    }
    let pdu = if kind == Kind::IcReq { Pdu::IcReq(initialize) } else { Pdu::IcResp(initialize) };
    Ok(Step::Frame(pdu, size_of::<Initialize>()))
}

fn parse_term(bytes: &[u8], common: Common) -> Result<Step<Pdu>, Fatal> {
    let plen = common.plen.get() as usize;
    if !(size_of::<TermReq>()..=TERM_BYTES_MAX).contains(&plen) {
        return Err(Fatal::Field(PLEN_AT));
    }
    if bytes.len() < plen {
        return Ok(Step::Need(plen));
    }
    let (term, _) = TermReq::read_from_prefix(bytes).map_err(|_| Fatal::Field(HLEN_AT))?;
    Ok(Step::Frame(Pdu::TermReq(Fatal::from_wire(term.status.get(), term.information.get())), plen))
}

/// Bytes of a head: header, digest and pad up to the data.
#[derive(Clone, Copy)]
pub struct Head {
    bytes: [u8; HEAD_BYTES_MAX],
    len: usize,
}

impl Head {
    /// The bytes to send.
    #[must_use]
    pub fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }
}

impl fmt::Debug for Head {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Head").field(&self.bytes()).finish()
    }
}

/// Where the data of a PDU begins whose header has `header` bytes.
const fn data_at(header: usize, agreed: Agreed, aligned: bool) -> usize {
    let head = header + if agreed.header_digest { DIGEST_BYTES } else { 0 };
    let unit = if aligned { 4 * (agreed.alignment as usize + 1) } else { 4 };
    head.next_multiple_of(unit)
}

/// The common header of a PDU with `data` bytes of data.
fn common_of(kind: Kind, flags: u8, data: u32, agreed: Agreed) -> Common {
    let header = kind.header_bytes();
    let mut common = Common {
        kind: kind as u8,
        flags: flags | if agreed.header_digest { FLAG_HEADER_DIGEST } else { 0 },
        hlen: header as u8,
        pdo: 0,
        plen: U32::new((header + if agreed.header_digest { DIGEST_BYTES } else { 0 }) as u32),
    };
    if data > 0 {
        let at = data_at(header, agreed, kind != Kind::C2hData);
        let digest = if agreed.data_digest { DIGEST_BYTES } else { 0 };
        if agreed.data_digest {
            common.flags |= FLAG_DATA_DIGEST;
        }
        common.pdo = at as u8;
        common.plen = U32::new((at + digest) as u32 + data);
    }
    common
}

fn head_of(header: &[u8], agreed: Agreed, pdo: u8) -> Head {
    let mut head = Head { bytes: [0; HEAD_BYTES_MAX], len: header.len() };
    head.bytes[..header.len()].copy_from_slice(header);
    if agreed.header_digest {
        let digest = crc32c::crc32c(header).to_le_bytes();
        head.bytes[head.len..head.len + DIGEST_BYTES].copy_from_slice(&digest);
        head.len += DIGEST_BYTES;
    }
    head.len = head.len.max(usize::from(pdo));
    head
}

/// The head of a command with `data` bytes of in-capsule data.
#[must_use]
pub fn command(sqe: Sqe, data: u32, agreed: Agreed) -> Head {
    let common = common_of(Kind::CapsuleCmd, 0, data, agreed);
    head_of(CapsuleCmd { common, sqe }.as_bytes(), agreed, common.pdo)
}

/// A response.
#[must_use]
pub fn response(cqe: Cqe, agreed: Agreed) -> Head {
    let common = common_of(Kind::CapsuleResp, 0, 0, agreed);
    head_of(CapsuleResp { common, cqe }.as_bytes(), agreed, 0)
}

/// The head of an H2CData, C2HData or R2T PDU. The data of an R2T is what it asks for.
#[must_use]
pub fn transfer(kind: Kind, flags: u8, cid: u16, ttag: u16, range: (u32, u32), agreed: Agreed) -> Head {
    let data = if kind == Kind::R2t { 0 } else { range.1 };
    let common = common_of(kind, flags, data, agreed);
    let transfer = Transfer {
        common,
        cid: U16::new(cid),
        ttag: U16::new(ttag),
        offset: U32::new(range.0),
        len: U32::new(range.1),
        reserved: U32::ZERO,
    };
    head_of(transfer.as_bytes(), agreed, common.pdo)
}

/// An ICReq or ICResp with these parameters.
#[must_use]
pub fn initialize(kind: Kind, alignment: u8, digests: (bool, bool), limit: u32) -> Initialize {
    Initialize {
        common: common_of(kind, 0, 0, Agreed::default()),
        format: U16::ZERO,
        alignment,
        digests: u8::from(digests.0) | u8::from(digests.1) << 1,
        limit: U32::new(limit),
        reserved: [0; 112],
    }
}

/// A TermReq with this error and the header in error, of which as much is kept as fits.
#[must_use]
pub fn term_req(from: End, error: Fatal, header: &[u8]) -> Vec<u8> {
    let kind = if from == End::Host { Kind::H2cTermReq } else { Kind::C2hTermReq };
    let header = &header[..header.len().min(TERM_BYTES_MAX - size_of::<TermReq>())];
    let (status, information) = error.to_wire();
    let mut common = common_of(kind, 0, 0, Agreed::default());
    common.plen = U32::new((size_of::<TermReq>() + header.len()) as u32);
    let (status, information) = (U16::new(status), U32::new(information));
    let mut bytes = TermReq { common, status, information, reserved: [0; 10] }.as_bytes().to_vec();
    bytes.extend_from_slice(header);
    bytes
}

//! Commands, completions and statuses. No I/O.
//!
//! Figures are those of the *NVM Express Base Specification, revision 2.1* (queue entries 3.3.3, statuses
//! 4.2.3, admin commands 5, Fabrics commands 6, I/O commands 7) and the *NVM Command Set Specification,
//! revision 1.1* (Read, Write); Cross-Controller Reset is that of TP8028, which revision 2.3 contains.

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The first two bits of a command's flags: data is described by an SGL (3.3.3.1), as Fabrics demand.
const PSDT_SGL: u8 = 0x40;
/// SGL Data Block descriptor with an offset into the capsule (4.3.2).
const SGL_IN_CAPSULE: u8 = 0x01;
/// Transport SGL Data Block descriptor: the data travels in PDUs of its own.
const SGL_TRANSPORT: u8 = 0x5a;

/// Opcodes of admin commands (5, figure 87), without Fabrics.
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod admin {
    pub const GET_LOG_PAGE: u8 = 0x02;
    pub const IDENTIFY: u8 = 0x06;
    pub const ABORT: u8 = 0x08;
    pub const SET_FEATURES: u8 = 0x09;
    pub const GET_FEATURES: u8 = 0x0a;
    pub const ASYNC_EVENT: u8 = 0x0c;
    pub const KEEP_ALIVE: u8 = 0x18;
    /// TP8028.
    pub const CROSS_CONTROLLER_RESET: u8 = 0x38;
    pub const FABRICS: u8 = 0x7f;
    /// Vendor specific, without data: the host states the key of a namespace (see `lib.rs`).
    pub const PRESENT_KEY: u8 = 0xc0;
}

/// Opcodes of I/O commands (7, and NVM Command Set 3).
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod io {
    pub const FLUSH: u8 = 0x00;
    pub const WRITE: u8 = 0x01;
    pub const READ: u8 = 0x02;
    pub const RESERVATION_REGISTER: u8 = 0x0d;
    pub const RESERVATION_REPORT: u8 = 0x0e;
    pub const RESERVATION_ACQUIRE: u8 = 0x11;
    pub const RESERVATION_RELEASE: u8 = 0x15;
}

/// Types of Fabrics commands (6, figure 541).
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod fabrics {
    pub const PROPERTY_SET: u8 = 0x00;
    pub const CONNECT: u8 = 0x01;
    pub const PROPERTY_GET: u8 = 0x04;
    pub const DISCONNECT: u8 = 0x08;
}

/// Offsets of properties (3.1.4).
#[allow(missing_docs, reason = "the names are those of the specification")]
pub mod property {
    pub const CAP: u32 = 0x00;
    pub const VS: u32 = 0x08;
    pub const CC: u32 = 0x14;
    pub const CSTS: u32 = 0x1c;
}

/// CC.EN (3.1.4.5).
pub const CC_ENABLE: u32 = 1;
/// What a host writes to CC: enabled, entries of 64 and 16 bytes.
pub const CC_ENABLED: u32 = CC_ENABLE | 6 << 16 | 4 << 20;
/// CC.SHN.
pub const CC_SHUTDOWN: u32 = 3 << 14;
/// CSTS.RDY (3.1.4.6).
pub const CSTS_READY: u32 = 1;
/// CSTS.SHST: shutdown has completed.
pub const CSTS_SHUT_DOWN: u32 = 2 << 2;
/// The log page of the discovery service (5.1.12.3.1).
pub const LOG_DISCOVERY: u8 = 0x70;
/// Feature 07h: the number of queues (5.1.25.1.5).
pub const FEATURE_QUEUES: u8 = 0x07;
/// Feature 0Bh: which asynchronous events are reported.
pub const FEATURE_EVENTS: u8 = 0x0b;
/// Feature 0Fh: the keep-alive timeout.
pub const FEATURE_KEEP_ALIVE: u8 = 0x0f;
/// CATTR of Connect: the submission queue has no flow control (6.3).
pub const CONNECT_NO_FLOW_CONTROL: u8 = 1 << 2;
/// SQHD of the response to Connect when flow control is off.
pub const NO_FLOW_CONTROL: u16 = 0xffff;
/// CNTLID of Connect that asks for a new controller.
pub const CONTROLLER_ANY: u16 = 0xffff;
/// The NQN of the discovery service (4.5).
pub const DISCOVERY_NQN: &str = "nqn.2014-08.org.nvmexpress.discovery";
/// IATTR and IPO of a refused Connect: the subsystem in the data is not there.
pub const AT_SUBSYSTEM: u64 = 1 << 16 | 256;
/// Dword 0 of the response to Cross-Controller Reset: the impacted controller has been reset.
pub const RESET_AT_ONCE: u32 = 1;

/// Submission queue entry (3.3.3.1).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sqe {
    /// The opcode.
    pub opcode: u8,
    /// Fused operation, and PSDT.
    pub flags: u8,
    /// The command identifier.
    pub cid: U16,
    /// The namespace. The first byte is the type of a Fabrics command.
    pub nsid: U32,
    /// Command dwords 2 and 3.
    pub cdw2: [U32; 2],
    /// The metadata pointer, not used.
    pub metadata: U64,
    /// The SGL descriptor: address, length, zero, type.
    pub sgl: Sgl,
    /// Command dwords 10 to 15.
    pub cdw10: [U32; 6],
}

/// An SGL descriptor (4.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Sgl {
    /// The address, or an offset into the capsule.
    pub address: U64,
    /// Length, bytes.
    pub len: U32,
    /// Zero.
    pub reserved: [u8; 3],
    /// Type and subtype.
    pub kind: u8,
}

/// Completion queue entry (3.3.3.2).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Cqe {
    /// Dwords 0 and 1, which depend on the command.
    pub result: U64,
    /// The head of the submission queue.
    pub sqhd: U16,
    /// Zero in Fabrics.
    pub sqid: U16,
    /// The command identifier.
    pub cid: U16,
    /// Bit 0 zero, then the status code, its type, and retry information.
    pub status: U16,
}

const _: () = assert!(size_of::<Sqe>() == 64 && size_of::<Cqe>() == 16);

/// The data of a Connect command (6.3, figure 548).
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct ConnectData {
    /// The host's identifier.
    pub host_id: [u8; 16],
    /// The controller; [`CONTROLLER_ANY`] for a new one.
    pub controller: U16,
    /// Zero.
    pub reserved: [u8; 238],
    /// The NQN of the subsystem, padded with zeros.
    pub subsystem: [u8; 256],
    /// The NQN of the host, padded with zeros.
    pub host: [u8; 256],
    /// Zero.
    pub reserved_end: [u8; 256],
}

const _: () = assert!(size_of::<ConnectData>() == 1024);

/// Where the data of a command is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Place {
    /// None.
    Nowhere,
    /// In the capsule, this many bytes.
    InCapsule(u32),
    /// In PDUs of its own, this many bytes.
    Transport(u32),
}

impl Sqe {
    /// A command without data.
    #[must_use]
    pub fn new(opcode: u8, cid: u16, nsid: u32) -> Self {
        Self {
            opcode,
            flags: PSDT_SGL,
            cid: U16::new(cid),
            nsid: U32::new(nsid),
            cdw2: [U32::ZERO; 2],
            metadata: U64::ZERO,
            sgl: Sgl { address: U64::ZERO, len: U32::ZERO, reserved: [0; 3], kind: SGL_TRANSPORT },
            cdw10: [U32::ZERO; 6],
        }
    }

    /// The same with its data at `place`.
    #[must_use]
    pub fn with_data(mut self, place: Place) -> Self {
        (self.sgl.kind, self.sgl.len) = match place {
            Place::Nowhere => (SGL_TRANSPORT, U32::ZERO),
            Place::InCapsule(len) => (SGL_IN_CAPSULE, U32::new(len)),
            Place::Transport(len) => (SGL_TRANSPORT, U32::new(len)),
        };
        self
    }

    /// The same with these command dwords from dword 10 on.
    #[must_use]
    pub fn with_dwords(mut self, dwords: &[u32]) -> Self {
        for (to, from) in self.cdw10.iter_mut().zip(dwords) {
            to.set(*from);
        }
        self
    }

    /// Where its data is; `None` when the descriptor is not one that NVMe/TCP allows.
    #[must_use]
    pub fn place(&self) -> Option<Place> {
        let len = self.sgl.len.get();
        match self.sgl.kind {
            _ if self.flags & 0xc0 != PSDT_SGL || self.sgl.reserved != [0; 3] => None,
            SGL_IN_CAPSULE if self.sgl.address.get() == 0 => Some(Place::InCapsule(len)),
            SGL_TRANSPORT if len == 0 => Some(Place::Nowhere),
            SGL_TRANSPORT => Some(Place::Transport(len)),
            _ => None,
        }
    }

    /// Command dword `number`, 10 to 15.
    #[must_use]
    pub fn dword(&self, number: usize) -> u32 {
        number.checked_sub(10).and_then(|at| self.cdw10.get(at)).map_or(0, |dword| dword.get())
    }

    /// Command dwords `number` and `number + 1` as one number.
    #[must_use]
    pub fn qword(&self, number: usize) -> u64 {
        u64::from(self.dword(number)) | u64::from(self.dword(number + 1)) << 32
    }

    /// Read or Write of `blocks` blocks, at least one, from block `lba` on (NVM Command Set 3.2.4, 3.2.6).
    #[must_use]
    pub fn blocks(opcode: u8, cid: u16, nsid: u32, lba: u64, blocks: u32) -> Self {
        Self::new(opcode, cid, nsid).with_dwords(&[lba as u32, (lba >> 32) as u32, blocks.saturating_sub(1)])
    }

    /// Connect (6.3): queue `qid` with `entries` entries, and the keep-alive timeout of queue 0.
    #[must_use]
    pub fn connect(cid: u16, qid: u16, entries: u16, keep_alive_ms: u32) -> Self {
        let attributes = u32::from(CONNECT_NO_FLOW_CONTROL);
        Self::new(admin::FABRICS, cid, u32::from(fabrics::CONNECT))
            .with_data(Place::InCapsule(size_of::<ConnectData>() as u32))
            .with_dwords(&[
                u32::from(qid) << 16,
                u32::from(entries.saturating_sub(1)) | attributes << 16,
                keep_alive_ms,
            ])
    }

    /// Property Get (6.4) of a property of 4 or 8 bytes.
    #[must_use]
    pub fn property_get(cid: u16, offset: u32) -> Self {
        let size = u32::from(offset == property::CAP);
        Self::new(admin::FABRICS, cid, u32::from(fabrics::PROPERTY_GET)).with_dwords(&[size, offset])
    }

    /// Property Set (6.6) of a property of 4 bytes.
    #[must_use]
    pub fn property_set(cid: u16, offset: u32, value: u32) -> Self {
        Self::new(admin::FABRICS, cid, u32::from(fabrics::PROPERTY_SET)).with_dwords(&[0, offset, value, 0])
    }

    /// The type of a Fabrics command.
    #[must_use]
    pub fn fabrics_type(&self) -> u8 {
        self.nsid.get() as u8
    }
}

/// The data of a Connect.
#[must_use]
pub fn connect_data(host_id: [u8; 16], controller: u16, subsystem: &str, host: &str) -> ConnectData {
    let padded = |name: &str| {
        let mut bytes = [0; 256];
        let len = name.len().min(NQN_BYTES_MAX);
        bytes[..len].copy_from_slice(&name.as_bytes()[..len]);
        bytes
    };
    ConnectData {
        host_id,
        controller: U16::new(controller),
        reserved: [0; 238],
        subsystem: padded(subsystem),
        host: padded(host),
        reserved_end: [0; 256],
    }
}

/// The length of the longest NQN (4.5), in bytes.
pub const NQN_BYTES_MAX: usize = 223;

/// The text of an NQN that is padded with zeros; `None` when it is none: empty, too long, or not printable.
/// Names that do not begin with `nqn.` are taken as well: the kernel's target has subsystems of any name.
#[must_use]
pub fn nqn_of(padded: &[u8]) -> Option<&str> {
    let len = padded.iter().position(|byte| *byte == 0).unwrap_or(padded.len());
    let text = core::str::from_utf8(&padded[..len]).ok()?;
    let valid = (1..=NQN_BYTES_MAX).contains(&len) && text.bytes().all(|byte| byte.is_ascii_graphic());
    valid.then_some(text)
}

impl Cqe {
    /// The completion of command `cid`.
    #[must_use]
    pub fn new(cid: u16, status: Status, sqhd: u16, result: u64) -> Self {
        Self {
            result: U64::new(result),
            sqhd: U16::new(sqhd),
            sqid: U16::ZERO,
            cid: U16::new(cid),
            status: U16::new(status.0 << 1),
        }
    }

    /// The status, without retry information.
    #[must_use]
    pub fn status(&self) -> Status {
        Status(self.status.get() >> 1 & 0x7ff)
    }
}

/// A status: its type in bits 8 to 10, its code in bits 0 to 7 (4.2.3).
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Status(pub u16);

#[allow(missing_docs, reason = "the names are those of the specification")]
impl Status {
    pub const SUCCESS: Self = Self(0);
    pub const INVALID_OPCODE: Self = Self(0x001);
    pub const INVALID_FIELD: Self = Self(0x002);
    pub const ID_CONFLICT: Self = Self(0x003);
    pub const DATA_TRANSFER: Self = Self(0x004);
    pub const INTERNAL: Self = Self(0x006);
    pub const ABORTED: Self = Self(0x007);
    pub const INVALID_NAMESPACE: Self = Self(0x00b);
    pub const SEQUENCE: Self = Self(0x00c);
    pub const SGL_LENGTH: Self = Self(0x00f);
    pub const SGL_TYPE: Self = Self(0x011);
    pub const HOST_ID_INCONSISTENT: Self = Self(0x018);
    pub const PREEMPTED: Self = Self(0x01b);
    /// The kernel's target answers so while a namespace is disabled.
    pub const INTERNAL_PATH: Self = Self(0x300);
    pub const WRITE_PROTECTED: Self = Self(0x020);
    pub const TRANSIENT_TRANSPORT: Self = Self(0x022);
    pub const LBA_OUT_OF_RANGE: Self = Self(0x080);
    pub const RESERVATION_CONFLICT: Self = Self(0x083);
    pub const INVALID_LOG_PAGE: Self = Self(0x109);
    pub const EVENT_LIMIT: Self = Self(0x105);
    pub const CONNECT_FORMAT: Self = Self(0x180);
    pub const CONNECT_BUSY: Self = Self(0x181);
    pub const CONNECT_PARAMETERS: Self = Self(0x182);
    pub const CONNECT_HOST: Self = Self(0x184);
    pub const ACCESS_DENIED: Self = Self(0x286);
    /// Vendor specific: another incarnation is meant.
    pub const OTHER_INCARNATION: Self = Self(0x7c0);

    /// Whether a WRITE that ended with this status has changed no byte and will change none. Only statuses
    /// that are determined before the first byte is taken count.
    #[must_use]
    pub const fn is_before_data(self) -> bool {
        matches!(
            self,
            Self::INVALID_OPCODE
                | Self::INVALID_FIELD
                | Self::INVALID_NAMESPACE
                | Self::SGL_LENGTH
                | Self::SGL_TYPE
                | Self::WRITE_PROTECTED
                | Self::LBA_OUT_OF_RANGE
                | Self::RESERVATION_CONFLICT
                | Self::ACCESS_DENIED
        )
    }

    /// The error that a caller gets; `None` for success.
    #[must_use]
    pub const fn error(self) -> Option<te_core::Error> {
        use te_core::ErrorKind as Kind;
        let kind = match self {
            Self::SUCCESS => return None,
            Self::INVALID_NAMESPACE => Kind::NotFound,
            Self::LBA_OUT_OF_RANGE => Kind::OutOfRange,
            Self::WRITE_PROTECTED | Self::ACCESS_DENIED | Self::RESERVATION_CONFLICT => Kind::AccessDenied,
            Self::TRANSIENT_TRANSPORT => Kind::Corrupt,
            Self::OTHER_INCARNATION => Kind::PeerRestarted,
            // The kernel's target answers with INTERNAL when its device has failed.
            Self::ABORTED | Self::PREEMPTED | Self::INTERNAL => Kind::Rail,
            Self::CONNECT_HOST => Kind::AccessDenied,
            Self::CONNECT_BUSY => Kind::PeerDead,
            Self(number) if number >> 8 == 2 => Kind::Rail,
            Self(number) if number >> 8 == 3 => Kind::PeerDead,
            _ => Kind::Protocol,
        };
        Some(te_core::Error::with_code(kind, self.0 as i32))
    }
}

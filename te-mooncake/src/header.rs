//! The data port: requests of 24 bytes, and the status of 8 bytes with which version 2 answers.
//!
//! | at | bytes | field of a request |
//! |---|---|---|
//! | 0 | 8 | length of the range, little endian |
//! | 8 | 8 | address of the range in the target's address space, little endian |
//! | 16 | 1 | bit 7: version 2; the other bits: 1 = WRITE, anything else = READ |
//! | 17 | 7 | not used; a Mooncake initiator sends zeros |
//!
//! | | version 1 | version 2 |
//! |---|---|---|
//! | READ | the bytes | status, then the bytes |
//! | WRITE | bytes follow the request; no answer | bytes follow the request; status when the last is in place |
//! | refused | the target closes | status, then the target closes |
//!
//! A status is `0x4D43545600000000 | code`, little endian: code 0 is success, 1 a range that the target does
//! not serve. Requests on one connection follow each other; the next one begins when the answer to the last
//! is complete. (Source: python.md 6.4; `tcp_transport_session_impl.h`, lines 45 to 112.)
//!
//! ```
//! use te_core::Op;
//! use te_mooncake::header::{Request, Status, Version};
//!
//! let request = Request { op: Op::Write, version: Version::V2, addr: 0x7000_0000_1388, len: 77 };
//! let bytes = request.to_bytes();
//! assert_eq!((bytes[0], bytes[8], bytes[16]), (77, 0x88, 0x81));
//! assert_eq!(Request::parse(&bytes), request);
//! assert_eq!(Status::parse(&Status::Rejected.to_bytes()), Some(Status::Rejected));
//! ```

use te_core::Op;
use zerocopy::little_endian::U64;
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The number of bytes of a request.
pub const REQUEST_BYTES: usize = 24;
/// The number of bytes of a status.
pub const STATUS_BYTES: usize = 8;

/// The upper half of a status: `MCTV`.
const STATUS_MAGIC: u64 = 0x4D43_5456 << 32;
/// The bit of the opcode that asks for a status.
const VERSION_2: u8 = 0x80;
const WRITE: u8 = 1;

/// The version of the data port's protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Version {
    /// Nothing is acknowledged.
    V1,
    /// Each operation has a status.
    V2,
}

/// One operation on a range of the target's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The direction.
    pub op: Op,
    /// Whether the initiator expects a status.
    pub version: Version,
    /// The first address, in the target's address space.
    pub addr: u64,
    /// The length, in bytes. Any number: a target refuses what it does not serve.
    pub len: u64,
}

#[derive(FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct Wire {
    len: U64,
    addr: U64,
    opcode: u8,
    padding: [u8; 7],
}

const _: () = assert!(size_of::<Wire>() == REQUEST_BYTES);

impl Request {
    /// The request in these bytes. Every value of every byte is some request.
    #[must_use]
    pub fn parse(bytes: &[u8; REQUEST_BYTES]) -> Self {
        let wire: Wire = zerocopy::transmute!(*bytes);
        let op = if wire.opcode & !VERSION_2 == WRITE { Op::Write } else { Op::Read };
        let version = if wire.opcode & VERSION_2 == 0 { Version::V1 } else { Version::V2 };
        Self { op, version, addr: wire.addr.get(), len: wire.len.get() }
    }

    /// The bytes of the request.
    #[must_use]
    pub fn to_bytes(self) -> [u8; REQUEST_BYTES] {
        let flag = if self.version == Version::V2 { VERSION_2 } else { 0 };
        let opcode = flag | if self.op == Op::Write { WRITE } else { 0 };
        let wire = Wire { len: U64::new(self.len), addr: U64::new(self.addr), opcode, padding: [0; 7] };
        zerocopy::transmute!(wire)
    }
}

/// The answer of version 2.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Status {
    /// READ: the bytes follow. WRITE: the last byte is in place.
    Done,
    /// The target does not serve the range; no byte was or will be moved.
    Rejected,
    /// A code that this release does not know.
    Other(u32),
}

impl Status {
    /// The status in these bytes; `None` when they do not have the magic: the peer speaks version 1, and they
    /// are the beginning of the range that it reads.
    #[must_use]
    pub const fn parse(bytes: &[u8; STATUS_BYTES]) -> Option<Self> {
        let word = u64::from_le_bytes(*bytes);
        match (word & !0xffff_ffff, word as u32) {
            (STATUS_MAGIC, 0) => Some(Self::Done),
            (STATUS_MAGIC, 1) => Some(Self::Rejected),
            (STATUS_MAGIC, code) => Some(Self::Other(code)),
            _ => None,
        }
    }

    /// The bytes of the status.
    #[must_use]
    pub const fn to_bytes(self) -> [u8; STATUS_BYTES] {
        let code = match self {
            Self::Done => 0,
            Self::Rejected => 1,
            Self::Other(code) => code,
        };
        (STATUS_MAGIC | code as u64).to_le_bytes()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn statuses_have_the_bytes_of_a_live_peer() {
        assert_eq!(Status::Done.to_bytes(), [0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
        assert_eq!(Status::Rejected.to_bytes(), [1, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]);
        assert_eq!(Status::parse(&[9, 0, 0, 0, 0x56, 0x54, 0x43, 0x4d]), Some(Status::Other(9)));
        assert_eq!(Status::parse(&[0, 0, 0, 0, 0x56, 0x54, 0x43, 0x4c]), None);
        assert_eq!(Status::parse(&[0; 8]), None);
    }

    #[test]
    fn requests_have_the_bytes_of_a_live_peer() {
        let bytes = |op, version| Request { op, version, addr: 0x0102_0304_0506_0708, len: 0x10 }.to_bytes();
        let expected =
            |opcode: u8| [&[0x10, 0, 0, 0, 0, 0, 0, 0, 8, 7, 6, 5, 4, 3, 2, 1, opcode][..], &[0; 7]].concat();
        for (op, version, opcode) in [
            (Op::Read, Version::V1, 0x00),
            (Op::Write, Version::V1, 0x01),
            (Op::Read, Version::V2, 0x80),
            (Op::Write, Version::V2, 0x81),
        ] {
            assert_eq!(bytes(op, version), expected(opcode)[..], "{op:?} {version:?}");
        }
    }

    #[test]
    fn an_opcode_other_than_write_reads_and_padding_is_ignored() {
        for opcode in 0..=u8::MAX {
            let mut bytes = [0xaa; REQUEST_BYTES];
            bytes[16] = opcode;
            let request = Request::parse(&bytes);
            assert_eq!(request.op == Op::Write, matches!(opcode, 0x01 | 0x81), "{opcode:#x}");
            assert_eq!(request.version == Version::V2, opcode >= 0x80, "{opcode:#x}");
        }
    }

    proptest! {
        #[test]
        fn a_request_comes_back(write: bool, v2: bool, addr: u64, len: u64) {
            let op = if write { Op::Write } else { Op::Read };
            let version = if v2 { Version::V2 } else { Version::V1 };
            let request = Request { op, version, addr, len };
            prop_assert_eq!(Request::parse(&request.to_bytes()), request);
        }

        #[test]
        fn a_status_comes_back(bytes: [u8; STATUS_BYTES], code: u32) {
            if let Some(status) = Status::parse(&bytes) {
                prop_assert_eq!(status.to_bytes(), bytes);
            }
            prop_assert!(Status::parse(&Status::Other(code).to_bytes()).is_some());
        }
    }
}

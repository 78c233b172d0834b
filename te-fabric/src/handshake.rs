//! What the wire protocols of fabrics share: the steps of a parser, the errors of a parser, the opening of a
//! connection and the response to it, and tables of statuses.
//!
//! In every version of every protocol, HELLO and WELCOME begin with a magic of 8 bytes and a version of 2
//! bytes.
//!
//! **WELCOME**, 32 bytes, is the same in all protocols:
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | magic |
//! | 8 | 2 | the target's protocol version |
//! | 10 | 2 | zero |
//! | 12 | 4 | status; other than 0: refused, the target closes |
//! | 16 | 8 | the target's incarnation; 0 when refused |
//! | 24 | 8 | a value that each protocol defines |

use core::fmt;

use zerocopy::little_endian::{U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

/// The result of a parser.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Step<T> {
    /// There are too few bytes: call again when there are at least this many.
    Need(usize),
    /// A frame, and the number of its bytes.
    Frame(T, usize),
}

/// Why a parser refused bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// They begin with another magic.
    Magic,
    /// They are of another version of the protocol or of the layout, which is given here.
    Version(u16),
    /// They are a frame of a kind that this end does not expect.
    Kind(u8),
    /// The frame has fewer or more entries than a frame of its kind may have.
    Count(u16),
    /// Bytes that must be zero are not.
    Reserved,
    /// A flag that this version does not know.
    Flags(u8),
    /// A number that is out of its range.
    Range,
    /// The operations of the frame are not numbered consecutively.
    Sequence,
    /// The identity in a HELLO is 0.
    Identity,
    /// An export is too short or too long, or has no address.
    Length,
    /// An export is of memory of a kind that this release does not know; this is the number of the kind.
    Location(u8),
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Magic => f.write_str("not a connection or export of this fabric: check the port"),
            Self::Version(v) => {
                write!(
                    f,
                    "version {v} of the protocol or of the export is not supported here: run the same release on both hosts"
                )
            }
            Self::Kind(k) => write!(f, "frame kind {k} is not expected here"),
            Self::Count(n) => write!(f, "a frame of this kind cannot have {n} entries"),
            Self::Reserved => f.write_str("bytes that must be zero are not"),
            Self::Flags(flags) => write!(f, "unknown flags {flags:#x}"),
            Self::Range => f.write_str("a number in the frame is out of its range"),
            Self::Sequence => f.write_str("operations are not numbered consecutively"),
            Self::Identity => f.write_str("the initiator stated the identity 0: an identity is never 0"),
            Self::Length => {
                f.write_str("the length of the export is wrong: it was cut off, or bytes were appended")
            }
            Self::Location(kind) => write!(
                f,
                "the export is of memory of kind {kind}, which is unknown here: run the same release on both hosts"
            ),
        }
    }
}

impl core::error::Error for FrameError {}

/// The magic and the version of one protocol, with which each connection opens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Protocol {
    /// The first bytes of HELLO and WELCOME.
    pub magic: [u8; 8],
    /// The version that this end supports.
    pub version: u16,
}

impl Protocol {
    /// Parses a HELLO of type `H`. Checks magic and version as soon as they have arrived, and the rest with
    /// `check`.
    ///
    /// # Errors
    /// `Magic`, `Version`, and the error of `check`.
    pub fn parse_hello<H: FromBytes + Unaligned>(
        self,
        bytes: &[u8],
        check: impl FnOnce(&H) -> Result<(), FrameError>,
    ) -> Result<Step<H>, FrameError> {
        self.check_magic(bytes)?;
        if let Some(&[low, high]) = bytes.get(8..10) {
            self.check_version(u16::from_le_bytes([low, high]))?;
        }
        let Ok((hello, _)) = H::read_from_prefix(bytes) else { return Ok(Step::Need(size_of::<H>())) };
        check(&hello)?;
        Ok(Step::Frame(hello, size_of::<H>()))
    }

    /// Parses a WELCOME. Another version is not an error in a refusal: the status states the reason.
    ///
    /// # Errors
    /// `Magic`, `Version`.
    pub fn parse_welcome(self, bytes: &[u8]) -> Result<Step<Welcome>, FrameError> {
        self.check_magic(bytes)?;
        let Ok((welcome, _)) = Welcome::read_from_prefix(bytes) else {
            return Ok(Step::Need(size_of::<Welcome>()));
        };
        if welcome.status.get() == 0 {
            self.check_version(welcome.version.get())?;
        }
        Ok(Step::Frame(welcome, size_of::<Welcome>()))
    }

    /// A WELCOME with this status. A refusal does not contain the incarnation: an initiator that does not
    /// know it must not learn it by asking.
    #[must_use]
    pub fn welcome(self, status: u32, incarnation: u64, detail: u64) -> Welcome {
        Welcome {
            magic: self.magic,
            version: U16::new(self.version),
            reserved: U16::ZERO,
            status: U32::new(status),
            incarnation: U64::new(if status == 0 { incarnation } else { 0 }),
            detail: U64::new(detail),
        }
    }

    fn check_magic(self, bytes: &[u8]) -> Result<(), FrameError> {
        let seen = bytes.len().min(self.magic.len());
        if bytes[..seen] == self.magic[..seen] { Ok(()) } else { Err(FrameError::Magic) }
    }

    const fn check_version(self, version: u16) -> Result<(), FrameError> {
        if version == self.version { Ok(()) } else { Err(FrameError::Version(version)) }
    }
}

/// The target's response to a HELLO.
#[derive(Clone, Copy, Debug, PartialEq, Eq, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
pub struct Welcome {
    /// The protocol's magic.
    pub magic: [u8; 8],
    /// The version that the target supports.
    pub version: U16,
    /// Always 0.
    pub reserved: U16,
    /// The status, from the protocol's table; 0 means welcome.
    pub status: U32,
    /// The target's incarnation; 0 when refused.
    pub incarnation: U64,
    /// A value that each protocol defines.
    pub detail: U64,
}

/// Declares a protocol's statuses as a table: name, number on the wire, and the [`te_core::ErrorKind`] that a
/// caller gets.
///
/// Every table has `Ok = 0`, which is not an error, and needs rows for the errors of a parser: `Magic`,
/// `Version` and `Protocol`. Unknown numbers are read as `Protocol`.
///
/// ```
/// te_fabric::statuses! {
///     /// The result of a request at the target.
///     pub enum Status {
///         /// The region is not registered.
///         NotFound = 1 => NotFound,
///         /// The connection did not open with the magic.
///         Magic = 7 => Protocol,
///         /// The target supports another version.
///         Version = 8 => Protocol,
///         /// A frame that makes no sense.
///         Protocol = 9 => Protocol,
///     }
/// }
/// assert_eq!(Status::from_wire(1), Status::NotFound);
/// assert_eq!(Status::from_wire(77), Status::Protocol);
/// assert_eq!(Status::from(te_fabric::FrameError::Version(3)), Status::Version);
/// assert_eq!(Status::from(te_fabric::FrameError::Reserved), Status::Protocol);
/// assert_eq!(Status::Ok.error(), None);
/// assert_eq!(Status::NotFound.error(), Some(te_core::Error::with_code(te_core::ErrorKind::NotFound, 1)));
/// ```
#[macro_export]
macro_rules! statuses {
    (
        $(#[$doc:meta])*
        pub enum $name:ident {
            $($(#[$row_doc:meta])* $row:ident = $number:literal => $kind:ident,)+
        }
    ) => {
        $(#[$doc])*
        #[derive(Clone, Copy, Debug, PartialEq, Eq)]
        #[repr(u32)]
        #[non_exhaustive]
        pub enum $name {
            /// Success.
            Ok = 0,
            $($(#[$row_doc])* $row = $number,)+
        }

        impl $name {
            /// The status with this number on the wire; an unknown number is read as `Protocol`.
            #[must_use]
            pub const fn from_wire(number: u32) -> Self {
                match number {
                    0 => Self::Ok,
                    $($number => Self::$row,)+
                    _ => Self::Protocol,
                }
            }

            /// The error that a caller gets for it; `None` for `Ok`.
            #[must_use]
            pub const fn error(self) -> Option<$crate::te_core::Error> {
                let kind = match self {
                    Self::Ok => return None,
                    $(Self::$row => $crate::te_core::ErrorKind::$kind,)+
                };
                Some($crate::te_core::Error::with_code(kind, self as i32))
            }
        }

        impl From<$crate::FrameError> for $name {
            /// The status that the target reports to the initiator.
            fn from(error: $crate::FrameError) -> Self {
                match error {
                    $crate::FrameError::Magic => Self::Magic,
                    $crate::FrameError::Version(_) => Self::Version,
                    _ => Self::Protocol,
                }
            }
        }
    };
}

#[cfg(test)]
mod tests {
    use super::*;

    const PROTOCOL: Protocol = Protocol { magic: *b"magical!", version: 3 };

    fn opening(version: u16) -> Vec<u8> {
        let mut bytes = PROTOCOL.magic.to_vec();
        bytes.extend_from_slice(&version.to_le_bytes());
        bytes.resize(16, 7);
        bytes
    }

    fn parse(bytes: &[u8]) -> Result<Step<[u8; 16]>, FrameError> {
        PROTOCOL.parse_hello(
            bytes,
            |hello: &[u8; 16]| if hello[15] == 0 { Err(FrameError::Identity) } else { Ok(()) },
        )
    }

    #[test]
    fn a_hello_is_refused_at_the_first_byte_that_is_wrong() {
        let good = opening(3);
        for cut in 0..16 {
            assert_eq!(parse(&good[..cut]), Ok(Step::Need(16)), "{cut} bytes");
        }
        assert!(matches!(parse(&good), Ok(Step::Frame(_, 16))));
        assert_eq!(parse(b"magicians"), Err(FrameError::Magic));
        assert_eq!(parse(&opening(4)[..10]), Err(FrameError::Version(4)));
        let mut nameless = good;
        nameless[15] = 0;
        assert_eq!(parse(&nameless), Err(FrameError::Identity));
    }

    #[test]
    fn a_refusal_may_be_of_another_version_and_names_no_incarnation() {
        let welcome = PROTOCOL.welcome(0, 42, 1);
        assert_eq!(PROTOCOL.parse_welcome(welcome.as_bytes()), Ok(Step::Frame(welcome, 32)));
        assert_eq!(PROTOCOL.parse_welcome(&welcome.as_bytes()[..31]), Ok(Step::Need(32)));
        let newer = Protocol { version: 4, ..PROTOCOL };
        assert_eq!(PROTOCOL.parse_welcome(newer.welcome(0, 42, 1).as_bytes()), Err(FrameError::Version(4)));
        let refusal = newer.welcome(9, 42, 1);
        assert_eq!((refusal.incarnation.get(), refusal.status.get()), (0, 9));
        assert_eq!(PROTOCOL.parse_welcome(refusal.as_bytes()), Ok(Step::Frame(refusal, 32)));
        assert_eq!(PROTOCOL.parse_welcome(b"magicians"), Err(FrameError::Magic));
    }
}

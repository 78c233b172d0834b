//! Frames of the handshake port: a length, a type, and JSON. One request and one answer per connection.
//!
//! | at | bytes | field |
//! |---|---|---|
//! | 0 | 8 | length of what follows, little endian: 1 + bytes of JSON |
//! | 8 | 1 | type: 0 Connection, 1 Metadata, 2 Notify, 3 Probe |
//! | 9 | | JSON, UTF-8; a newline may follow it |
//!
//! Releases of Mooncake before the type byte wrote the JSON directly behind the length. A first byte from 4
//! to 127 is therefore not a type but the beginning of such a frame, which is a Connection and is answered in
//! the same form. (Source: python.md 6.1; `mooncake-transfer-engine/include/common.h`, lines 412 to 505.)
//!
//! ```
//! use te_fabric::Step;
//! use te_mooncake::frame::{self, Kind};
//!
//! let bytes = frame::write(Kind::Probe, b"{}");
//! assert_eq!(bytes, [3, 0, 0, 0, 0, 0, 0, 0, 3, b'{', b'}']);
//! let Step::Frame(parsed, 11) = frame::parse(&bytes, 1 << 20)? else { panic!("it is whole") };
//! assert_eq!((parsed.kind, parsed.body), (Kind::Probe, &b"{}"[..]));
//! assert_eq!(frame::parse(&bytes[..9], 1 << 20)?, Step::Need(11));
//! # Ok::<(), te_mooncake::frame::FrameError>(())
//! ```

use core::fmt;

use te_fabric::Step;

/// The number of bytes of the length.
pub const LENGTH_BYTES: usize = 8;
/// The length of a frame that a Mooncake peer accepts unless `MC_HANDSHAKE_MAX_LENGTH` is set there, bytes.
pub const FRAME_BYTES_DEFAULT: u32 = 1 << 20;
/// The largest length that can be configured, here and at a Mooncake peer, bytes.
pub const FRAME_BYTES_LIMIT: u32 = 128 << 20;

/// What a frame is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Kind {
    /// The exchange of RDMA queue pairs.
    Connection,
    /// The request for a segment descriptor.
    Metadata,
    /// A notification.
    Notify,
    /// The question whether the peer is alive.
    Probe,
    /// A Connection of a release before the type byte; its frames have none.
    Untyped,
}

impl Kind {
    /// The type byte, if frames of this kind have one.
    #[must_use]
    pub const fn byte(self) -> Option<u8> {
        match self {
            Self::Connection => Some(0),
            Self::Metadata => Some(1),
            Self::Notify => Some(2),
            Self::Probe => Some(3),
            Self::Untyped => None,
        }
    }
}

/// A frame, borrowed from the bytes that were received.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// What it is about.
    pub kind: Kind,
    /// The JSON; not checked.
    pub body: &'a [u8],
}

/// Why bytes are not a frame. A Mooncake peer closes the connection in each case.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum FrameError {
    /// The length is 0.
    Empty,
    /// The length is above the limit.
    TooLong {
        /// The length.
        bytes: u64,
        /// The limit.
        bytes_max: u32,
    },
    /// The first byte is neither a type nor the beginning of JSON.
    Type(u8),
}

impl fmt::Display for FrameError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Empty => f.write_str("a handshake frame of 0 bytes: this is not a Mooncake peer"),
            Self::TooLong { bytes, bytes_max } => write!(
                f,
                "a handshake frame of {bytes} bytes, where {bytes_max} are allowed: raise frame_bytes_max, or this is not a \
                 Mooncake peer"
            ),
            Self::Type(byte) => write!(f, "a handshake frame of type {byte}: types are 0 to 3"),
        }
    }
}

impl std::error::Error for FrameError {}

/// Parses the frame at the beginning of `bytes`, whose length field may be up to `bytes_max`.
///
/// # Errors
/// What is wrong with the length or the type; it is known as soon as the bytes of the field are there.
pub fn parse(bytes: &[u8], bytes_max: u32) -> Result<Step<Frame<'_>>, FrameError> {
    let Some((length, rest)) = bytes.split_first_chunk::<LENGTH_BYTES>() else {
        return Ok(Step::Need(LENGTH_BYTES));
    };
    let length = u64::from_le_bytes(*length);
    if length == 0 {
        return Err(FrameError::Empty);
    }
    if length > u64::from(bytes_max) {
        return Err(FrameError::TooLong { bytes: length, bytes_max });
    }
    // A `u32` at most, as just checked.
    let length = length as usize;
    let kind = match rest.first() {
        None => return Ok(Step::Need(LENGTH_BYTES + length)),
        Some(0) => Kind::Connection,
        Some(1) => Kind::Metadata,
        Some(2) => Kind::Notify,
        Some(3) => Kind::Probe,
        Some(4..0x80) => Kind::Untyped,
        Some(&byte) => return Err(FrameError::Type(byte)),
    };
    let Some(frame) = rest.get(..length) else { return Ok(Step::Need(LENGTH_BYTES + length)) };
    let body = if kind == Kind::Untyped { frame } else { &frame[1..] };
    Ok(Step::Frame(Frame { kind, body }, LENGTH_BYTES + length))
}

/// The bytes of a frame.
#[must_use]
pub fn write(kind: Kind, body: &[u8]) -> Vec<u8> {
    let byte = kind.byte();
    let length = body.len() + usize::from(byte.is_some());
    let mut bytes = Vec::with_capacity(LENGTH_BYTES + length);
    bytes.extend_from_slice(&(length as u64).to_le_bytes());
    bytes.extend(byte);
    bytes.extend_from_slice(body);
    bytes
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// The answer of a live peer (0.3.13.post1) to a Probe.
    const PROBE_ANSWER: &[u8] = b"\x16\0\0\0\0\0\0\0\x03{\"status\":\"success\"}\n";

    #[test]
    fn the_frame_of_a_live_peer_is_parsed_and_written() {
        let Ok(Step::Frame(frame, bytes)) = parse(PROBE_ANSWER, FRAME_BYTES_DEFAULT) else { panic!("whole") };
        assert_eq!((frame.kind, bytes), (Kind::Probe, PROBE_ANSWER.len()));
        assert_eq!(frame.body, b"{\"status\":\"success\"}\n");
        assert_eq!(write(frame.kind, frame.body), PROBE_ANSWER);
    }

    #[test]
    fn every_prefix_asks_for_the_rest() {
        for len in 0..PROBE_ANSWER.len() {
            let needed = if len < LENGTH_BYTES { LENGTH_BYTES } else { PROBE_ANSWER.len() };
            assert_eq!(parse(&PROBE_ANSWER[..len], FRAME_BYTES_DEFAULT), Ok(Step::Need(needed)), "{len}");
        }
    }

    #[test]
    fn impossible_lengths_and_types_are_refused_as_soon_as_they_are_there() {
        let with = |length: u64, rest: &[u8]| [&length.to_le_bytes()[..], rest].concat();
        assert_eq!(parse(&with(0, b""), 10), Err(FrameError::Empty));
        assert_eq!(parse(&with(11, b""), 10), Err(FrameError::TooLong { bytes: 11, bytes_max: 10 }));
        let longest = with(u64::MAX, b"");
        let refused = parse(&longest, FRAME_BYTES_LIMIT);
        assert_eq!(refused, Err(FrameError::TooLong { bytes: u64::MAX, bytes_max: FRAME_BYTES_LIMIT }));
        for byte in 0x80..=0xff {
            assert_eq!(parse(&with(10, &[byte]), 10), Err(FrameError::Type(byte)));
        }
        assert_eq!(parse(&with(1, &[1]), 10), Ok(Step::Frame(Frame { kind: Kind::Metadata, body: b"" }, 9)));
    }

    #[test]
    fn a_first_byte_that_is_no_type_begins_the_json_of_an_old_release() {
        for (first, kind) in [(b'{', Kind::Untyped), (9, Kind::Untyped), (3, Kind::Probe), (4, Kind::Untyped)]
        {
            let bytes = [&3_u64.to_le_bytes()[..], &[first, b'{', b'}']].concat();
            let Ok(Step::Frame(frame, 11)) = parse(&bytes, 10) else { panic!("whole") };
            let body = if kind == Kind::Untyped { &bytes[8..] } else { &bytes[9..] };
            assert_eq!((frame.kind, frame.body), (kind, body));
            assert_eq!(write(frame.kind, frame.body), bytes);
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_a_part_of_one_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(Step::Frame(frame, len)) = parse(&bytes, 64) {
                prop_assert_eq!(write(frame.kind, frame.body), &bytes[..len]);
            }
        }
    }
}

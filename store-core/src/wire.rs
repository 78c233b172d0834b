//! Frames: how requests and responses are delimited in a byte stream.
//!
//! Every message is one frame: a fixed header of 24 bytes, then `body_len` bytes of body. All integers are
//! little-endian.
//!
//! ```text
//!  offset  size  field
//!       0     4  magic        "SNWS"
//!       4     2  version      2 bytes, this release speaks 4
//!       6     1  kind         which operation, see [`Kind`](crate::message::Kind)
//!       7     1  flags        bit 0: response. All other bits are 0
//!       8     8  request_id   chosen by the requester, repeated in the response; responses may come in any order. The
//!                             upper 48 bits are the number of the client's operation, see [`Trace`](crate::Trace)
//!      16     4  status       0, or the negative error code of a request that failed as a whole. 0 in requests
//!      20     4  body_len     bytes that follow; at most FRAME_BYTES_MAX - 24
//!      24     …  body         postcard, see `message`
//! ```
//!
//! A stream that violates any of this cannot be resynchronised: close the connection. The one exception is
//! `version`: the header has the same shape in every version, so a server responds to a frame of another
//! version with status `INVALID_VERSION` before it closes.

use alloc::vec::Vec;
use core::fmt;

use zerocopy::byteorder::little_endian::{I32, U16, U32, U64};
use zerocopy::{FromBytes, Immutable, IntoBytes, KnownLayout, Unaligned};

use crate::ErrorCode;

/// The first bytes of every frame.
pub const MAGIC: [u8; 4] = *b"SNWS";
/// The version of the protocol that this release uses.
pub const VERSION: u16 = 8;
/// Length of a header, bytes.
pub const HEADER_BYTES: usize = size_of::<RawHeader>();
/// Length limit of a frame, header included, bytes.
pub const FRAME_BYTES_MAX: usize = 4 << 20;
/// Limit on the number of keys in one request.
pub const KEYS_PER_BATCH_MAX: usize = 4096;
/// Length limit of a key, bytes.
pub const KEY_BYTES_MAX: usize = 1024;

const FLAG_RESPONSE: u8 = 1;

/// The header as it is encoded on the wire.
#[derive(Clone, Copy, FromBytes, IntoBytes, KnownLayout, Immutable, Unaligned)]
#[repr(C)]
struct RawHeader {
    magic: [u8; 4],
    version: U16,
    kind: u8,
    flags: u8,
    request_id: U64,
    status: I32,
    body_len: U32,
}

const _: () = assert!(HEADER_BYTES == 24);

/// A decoded and validated header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// The operation. A byte and not a [`Kind`](crate::message::Kind), because a newer peer may know more
    /// operations than this release.
    pub kind: u8,
    /// True for a response, false for a request.
    pub response: bool,
    /// Pairs a response with its request.
    pub request_id: u64,
    /// 0, or the error code of a request that failed as a whole. Always 0 in requests.
    pub status: i32,
}

impl Header {
    /// `Ok` when the status is 0.
    ///
    /// # Errors
    /// The error of a request that failed as a whole.
    pub fn result(&self) -> Result<(), ErrorCode> {
        match self.status {
            0 => Ok(()),
            code => Err(ErrorCode::from_code(code).unwrap_or(ErrorCode::InternalError)),
        }
    }
}

/// One frame, borrowed from the buffer that it was received into.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Frame<'a> {
    /// The operation and the request that the frame belongs to.
    pub header: Header,
    /// The encoded message.
    pub body: &'a [u8],
}

impl<'a> Frame<'a> {
    /// Splits the first frame off `bytes`; returns it and its length. `None`: the frame is not complete yet,
    /// read more.
    ///
    /// # Errors
    /// The stream is damaged, or of another version; see [`WireError`].
    pub fn parse(bytes: &'a [u8]) -> Result<Option<(Self, usize)>, WireError> {
        let Ok((raw, rest)) = RawHeader::ref_from_prefix(bytes) else {
            // Bytes of another protocol are recognised before a whole header has arrived.
            let seen = bytes.len().min(MAGIC.len());
            return if bytes[..seen] == MAGIC[..seen] { Ok(None) } else { Err(WireError::Magic) };
        };
        if raw.magic != MAGIC {
            return Err(WireError::Magic);
        }
        if raw.version.get() != VERSION {
            return Err(WireError::Version {
                theirs: raw.version.get(),
                request_id: raw.request_id.get(),
                kind: raw.kind,
            });
        }
        if raw.flags & !FLAG_RESPONSE != 0 {
            return Err(WireError::Flags(raw.flags));
        }
        let body_len = raw.body_len.get() as usize;
        if body_len > FRAME_BYTES_MAX - HEADER_BYTES {
            return Err(WireError::TooLong { bytes: body_len });
        }
        let Some(body) = rest.get(..body_len) else { return Ok(None) };
        let header = Header {
            kind: raw.kind,
            response: raw.flags & FLAG_RESPONSE != 0,
            request_id: raw.request_id.get(),
            status: raw.status.get(),
        };
        Ok(Some((Self { header, body }, HEADER_BYTES + body_len)))
    }
}

/// A frame under construction at the end of a caller's buffer. Dropping it before [`Self::finish`] removes it
/// from the buffer.
#[derive(Debug)]
pub struct FrameWriter<'v> {
    out: &'v mut Vec<u8>,
    start: usize,
    finished: bool,
}

impl<'v> FrameWriter<'v> {
    /// Appends the header. The caller appends the body to [`Self::body`].
    #[must_use]
    pub fn begin(out: &'v mut Vec<u8>, header: &Header) -> Self {
        let start = out.len();
        let raw = RawHeader {
            magic: MAGIC,
            version: U16::new(VERSION),
            kind: header.kind,
            flags: if header.response { FLAG_RESPONSE } else { 0 },
            request_id: U64::new(header.request_id),
            status: I32::new(header.status),
            body_len: U32::new(0),
        };
        out.extend_from_slice(raw.as_bytes());
        Self { out, start, finished: false }
    }

    /// The buffer to which the body is appended.
    pub fn body(&mut self) -> &mut Vec<u8> {
        self.out
    }

    /// Bytes of the body so far.
    #[must_use]
    pub fn body_len(&self) -> usize {
        self.out.len() - self.start - HEADER_BYTES
    }

    /// Writes the body's length into the header.
    ///
    /// # Errors
    /// `TooLong` when the body is over the limit; the buffer is as it was before.
    pub fn finish(mut self) -> Result<(), WireError> {
        let body_len = self.body_len();
        if body_len > FRAME_BYTES_MAX - HEADER_BYTES {
            return Err(WireError::TooLong { bytes: body_len });
        }
        let at = self.start + HEADER_BYTES - size_of::<U32>();
        self.out[at..at + size_of::<U32>()].copy_from_slice(U32::new(body_len as u32).as_bytes());
        self.finished = true;
        Ok(())
    }
}

impl Drop for FrameWriter<'_> {
    fn drop(&mut self) {
        if !self.finished {
            self.out.truncate(self.start);
        }
    }
}

/// Collects the bytes of one connection as they arrive and returns complete frames.
///
/// Read into [`Self::spare_mut`] and call [`Self::filled`] with the number of bytes, or copy with
/// [`Self::extend`]; then call [`Self::next_frame`] until it returns `None`. Memory is bounded by one longest
/// frame plus one read.
#[derive(Debug, Default)]
pub struct FrameBuffer {
    bytes: Vec<u8>,
    start: usize,
    end: usize,
}

impl FrameBuffer {
    /// An empty buffer.
    #[must_use]
    pub const fn new() -> Self {
        Self { bytes: Vec::new(), start: 0, end: 0 }
    }

    /// At least `bytes_min` writable bytes behind what has arrived. Moves what is unread to the front when
    /// that makes room.
    pub fn spare_mut(&mut self, bytes_min: usize) -> &mut [u8] {
        if self.start == self.end {
            (self.start, self.end) = (0, 0);
        }
        if self.bytes.len() - self.end < bytes_min && self.start > 0 {
            self.bytes.copy_within(self.start..self.end, 0);
            (self.start, self.end) = (0, self.end - self.start);
        }
        if self.bytes.len() - self.end < bytes_min {
            self.bytes.resize(self.end + bytes_min, 0);
        }
        &mut self.bytes[self.end..]
    }

    /// The first `len` bytes of [`Self::spare_mut`] now hold data.
    pub fn filled(&mut self, len: usize) {
        self.end = (self.end + len).min(self.bytes.len());
    }

    /// Appends a copy of `bytes`.
    pub fn extend(&mut self, bytes: &[u8]) {
        self.spare_mut(bytes.len())[..bytes.len()].copy_from_slice(bytes);
        self.filled(bytes.len());
    }

    /// Memory of the buffer, bytes.
    #[must_use]
    pub fn memory_bytes(&self) -> usize {
        self.bytes.len()
    }

    /// Bytes that have arrived and are not yet part of a frame that was returned.
    #[must_use]
    pub const fn pending_bytes(&self) -> usize {
        self.end - self.start
    }

    /// Returns the next complete frame and consumes it. `None`: read more.
    ///
    /// # Errors
    /// As [`Frame::parse`]; the stream is unusable from then on.
    pub fn next_frame(&mut self) -> Result<Option<Frame<'_>>, WireError> {
        match Frame::parse(&self.bytes[self.start..self.end])? {
            Some((frame, len)) => {
                self.start += len;
                Ok(Some(frame))
            }
            None => Ok(None),
        }
    }

    /// Returns the next complete frame and its length without consuming it. `None`: read more.
    ///
    /// # Errors
    /// As [`Frame::parse`]; the stream is unusable from then on.
    pub fn peek_frame(&self) -> Result<Option<(Frame<'_>, usize)>, WireError> {
        Frame::parse(&self.bytes[self.start..self.end])
    }

    /// Consumes `bytes`, or as many as have arrived. For frames that [`Self::peek_frame`] returned.
    pub fn consume(&mut self, bytes: usize) {
        self.start = self.start.saturating_add(bytes).min(self.end);
    }
}

/// Why a stream or a body is not of this protocol.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum WireError {
    /// The bytes do not begin with [`MAGIC`].
    Magic,
    /// The frame has another version of the protocol. The other fields of the header are the same in every
    /// version.
    Version {
        /// The peer's version.
        theirs: u16,
        /// The request to respond to.
        request_id: u64,
        /// The operation to respond to.
        kind: u8,
    },
    /// Reserved flags are set. Contains all flags.
    Flags(u8),
    /// The body is longer than the limit.
    TooLong {
        /// Length as announced by the peer, or as encoded here.
        bytes: usize,
    },
    /// This release knows no operation with this number.
    Kind(u8),
    /// The batch has more keys than the limit.
    TooManyKeys {
        /// Number of keys as announced by the peer, or as passed by the caller.
        keys: usize,
    },
    /// The body ends early, has bytes left over, or does not decode.
    Body,
}

impl WireError {
    /// The error code with which a server responds.
    #[must_use]
    pub const fn code(self) -> ErrorCode {
        match self {
            Self::Version { .. } => ErrorCode::InvalidVersion,
            Self::Kind(_) => ErrorCode::NotSupported,
            Self::TooManyKeys { .. } => ErrorCode::KeysUltraLimit,
            Self::Magic | Self::Flags(_) | Self::TooLong { .. } | Self::Body => ErrorCode::InvalidParams,
        }
    }
}

impl fmt::Display for WireError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match *self {
            Self::Magic => f.write_str("the peer is not a Snowskin store: check the address and the port"),
            Self::Version { theirs, .. } => {
                write!(
                    f,
                    "the peer uses protocol version {theirs}, this side uses {VERSION}: run the same release on both sides"
                )
            }
            Self::Flags(flags) => write!(
                f,
                "reserved flags are set ({flags:#04x}): the stream is damaged or of another release"
            ),
            Self::TooLong { bytes } => {
                write!(
                    f,
                    "the body has {bytes} bytes and may have {} at most: send smaller batches",
                    FRAME_BYTES_MAX - HEADER_BYTES
                )
            }
            Self::Kind(kind) => {
                write!(f, "this release knows no operation {kind}: run the same release on both sides")
            }
            Self::TooManyKeys { keys } => {
                write!(
                    f,
                    "the request has {keys} keys and may have {KEYS_PER_BATCH_MAX} at most: send smaller batches"
                )
            }
            Self::Body => f.write_str("the message does not decode: run the same release on both sides"),
        }
    }
}

impl core::error::Error for WireError {}

/// The error code with which a server responds, as [`WireError::code`].
impl From<WireError> for ErrorCode {
    fn from(error: WireError) -> Self {
        error.code()
    }
}

#[cfg(test)]
mod tests {
    use alloc::vec;

    use super::*;

    fn frame(kind: u8, id: u64, body: &[u8]) -> Vec<u8> {
        let mut out = Vec::new();
        let mut writer =
            FrameWriter::begin(&mut out, &Header { kind, response: false, request_id: id, status: 0 });
        writer.body().extend_from_slice(body);
        writer.finish().unwrap();
        out
    }

    #[test]
    fn frames_survive_any_cut_of_the_stream() {
        let mut stream = frame(3, 7, b"hello");
        stream.extend(frame(4, 8, b""));
        stream.extend(frame(5, u64::MAX, &[9; 300]));
        for step in 1..40 {
            let mut buffer = FrameBuffer::new();
            let mut seen = vec![];
            for piece in stream.chunks(step) {
                buffer.extend(piece);
                while let Some(frame) = buffer.next_frame().unwrap() {
                    seen.push((frame.header.kind, frame.header.request_id, frame.body.len()));
                }
            }
            assert_eq!(seen, [(3, 7, 5), (4, 8, 0), (5, u64::MAX, 300)]);
            assert_eq!(buffer.pending_bytes(), 0);
        }
    }

    #[test]
    fn a_broken_header_is_refused_with_its_reason() {
        let good = frame(1, 1, b"x");
        let mutate = |at: usize, byte: u8| {
            let mut bytes = good.clone();
            bytes[at] = byte;
            bytes
        };
        assert_eq!(Frame::parse(&mutate(0, b'X')), Err(WireError::Magic));
        assert_eq!(Frame::parse(b"G"), Err(WireError::Magic));
        assert_eq!(Frame::parse(b"SN"), Ok(None));
        assert_eq!(Frame::parse(b""), Ok(None));
        assert_eq!(
            Frame::parse(&mutate(4, 9)),
            Err(WireError::Version { theirs: 9, request_id: 1, kind: 1 })
        );
        assert_eq!(Frame::parse(&mutate(7, 0x82)), Err(WireError::Flags(0x82)));
        assert!(matches!(Frame::parse(&mutate(23, 0x7f)), Err(WireError::TooLong { .. })));
        assert_eq!(Frame::parse(&good[..good.len() - 1]), Ok(None));
    }

    #[test]
    fn an_overlong_body_leaves_the_buffer_as_it_was() {
        let mut out = vec![1, 2, 3];
        let mut writer =
            FrameWriter::begin(&mut out, &Header { kind: 1, response: true, request_id: 1, status: 0 });
        // The buffer held three bytes before; the body is one byte too long.
        writer.body().resize(3 + FRAME_BYTES_MAX + 1, 0);
        assert!(matches!(writer.finish(), Err(WireError::TooLong { .. })));
        assert_eq!(out, [1, 2, 3]);
    }
}

//! The protocol between a local client and a node over their Unix socket.
//!
//! Frames are those of the store's RPC ([`store_core::wire`]) with a kind and a shorter limit of their own;
//! bodies are postcard. Requests are answered in the order in which they were sent. Values are not
//! transferred here: requests name ranges of the connection's arena by offset and length, and cannot name
//! another arena.
//!
//! | Request | Answer |
//! |---|---|
//! | `Hello`: version, tenant, bytes of arena requested; first, and once | `Welcome`, with the arena's file descriptor, or `Refused` |
//! | `Put`: options; key and range of each | for each `()` or error |
//! | `Get`: key of each, range, and which part of the object, or all | for each [`Got`] |
//! | `Exists`: whether to lease what exists; keys | for each `bool` |
//! | `Prefetch`: keys | for each where it is |
//! | `Retain`: change of the retention; keys. `Remove`: keys | for each `()` or error |
//! | `Settled`: ranges that a fabric might still be writing | for each whether nothing writes it any more |
//!
//! A frame that does not decode, or is out of order, ends the connection. A first frame of another version is
//! answered with `Refused`: the client finds the node's version in the header of the answer.

use std::fmt;

use serde::{Deserialize, Serialize};
use store_core::message::{Prefetched, PutOptions, RetentionChange};
use store_core::wire::{HEADER_BYTES, KEY_BYTES_MAX};
use store_core::{ErrorCode, Frame, FrameWriter, Header, Key, WireError};

use crate::item::Part;

/// Version of the protocol. A peer with another version is refused.
pub(super) const VERSION: u16 = 3;
/// Kind of all frames of this protocol. The master's RPC does not use it, so neither protocol accepts frames
/// of the other.
pub(super) const KIND: u8 = 90;
/// Longest frame, header included, bytes.
pub(super) const FRAME_BYTES_MAX: usize = 1 << 20;
/// Most keys in one request.
pub(super) const KEYS_PER_REQUEST_MAX: usize = 1024;
/// Most bytes of keys in one request: with the other fields of 1,024 keys, well below the longest frame.
pub(super) const KEY_BYTES_PER_REQUEST_MAX: usize = 512 << 10;
/// Longest name of a tenant, bytes.
const TENANT_BYTES_MAX: usize = 64;

/// A request of a client.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Request<'a> {
    Hello {
        version: u16,
        tenant: &'a str,
        arena_bytes: u64,
    },
    Put {
        options: PutOptions,
        #[serde(borrow)]
        items: Vec<Item<'a>>,
    },
    Get {
        #[serde(borrow)]
        items: Vec<Wanted<'a>>,
    },
    Exists {
        /// Whether objects that exist are leased.
        leased: bool,
        #[serde(borrow)]
        keys: Vec<Key<'a>>,
    },
    /// Changes how long objects are kept.
    Retain {
        change: RetentionChange,
        #[serde(borrow)]
        keys: Vec<Key<'a>>,
    },
    Remove {
        force: bool,
        #[serde(borrow)]
        keys: Vec<Key<'a>>,
    },
    Settled {
        ranges: Vec<Span>,
    },
    /// Promotes objects that are on disks alone.
    Prefetch {
        #[serde(borrow)]
        keys: Vec<Key<'a>>,
    },
}

/// A key, and the range that its bytes come from.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Item<'a> {
    #[serde(borrow)]
    pub(super) key: Key<'a>,
    pub(super) span: Span,
}

/// A key, the requested part, and the range that its bytes go to.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Wanted<'a> {
    #[serde(borrow)]
    pub(super) key: Key<'a>,
    pub(super) span: Span,
    /// Offset of the part, and its length; `None` as length: to the end of the object. `None`: the whole
    /// object.
    pub(super) part: Option<Part>,
}

/// A range of the arena.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Span {
    pub(super) offset: u64,
    pub(super) len: u64,
}

/// An answer of the node.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Answer {
    /// The client is accepted; the file descriptor of the arena comes with this answer.
    Welcome { arena_bytes: u64 },
    /// The client is refused, and the connection is closed.
    Refused(Refusal),
    /// Answer to `Put`, `Retain` and `Remove`.
    Done(Vec<Result<(), ErrorCode>>),
    /// Answer to `Get`.
    Got(Vec<Got>),
    /// Answer to `Exists` and `Settled`.
    Whether(Vec<bool>),
    /// The request failed as a whole.
    Failed(ErrorCode),
    /// Answer to `Prefetch`.
    Prefetched(Vec<Prefetched>),
}

/// Result of one key of a get.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) enum Got {
    /// This many bytes are in the range, and their checksum is the committed one.
    Read(u64),
    /// Not found, or not found intact and in time.
    Miss,
    /// The object, or its requested part, has this many bytes: more than the range.
    TooLong(u64),
    /// A fabric may still write the range.
    Held,
    Failed(ErrorCode),
}

/// Why a node refuses a client.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Refusal {
    /// The node speaks another version of the local protocol, or of its frames. A client whose frames have
    /// another version reads that in the header of this answer, and not the answer itself.
    Version {
        /// The client's version.
        theirs: u16,
    },
    /// The user is neither the node's own, nor root, nor in `allowed_uids`.
    User {
        /// User id of the client.
        uid: u32,
    },
    /// The node serves another tenant.
    Tenant,
    /// The node has reached its limit of clients.
    Clients {
        /// The limit.
        clients_max: u32,
    },
    /// The node has reached its limit of memory for arenas.
    Memory {
        /// Bytes that are still available.
        bytes_left: u64,
    },
    /// The node itself cannot use the store at present.
    Store(ErrorCode),
}

impl Request<'_> {
    /// Decodes a request.
    ///
    /// # Errors
    /// `Kind`, `Body`, `TooManyKeys`: the connection cannot continue.
    pub(super) fn decode<'a>(frame: &Frame<'a>) -> Result<Request<'a>, WireError> {
        if frame.header.kind != KIND || frame.header.response {
            return Err(WireError::Kind(frame.header.kind));
        }
        let request: Request<'a> = decode(frame.body)?;
        request.check()?;
        Ok(request)
    }

    fn check(&self) -> Result<(), WireError> {
        let (count, long) = match self {
            Request::Hello { tenant, .. } => (0, tenant.len() > TENANT_BYTES_MAX),
            Request::Put { items, .. } => {
                (items.len(), items.iter().any(|item| item.key.0.len() > KEY_BYTES_MAX))
            }
            Request::Get { items } => {
                (items.len(), items.iter().any(|item| item.key.0.len() > KEY_BYTES_MAX))
            }
            Request::Exists { keys, .. }
            | Request::Prefetch { keys }
            | Request::Retain { keys, .. }
            | Request::Remove { keys, .. } => {
                (keys.len(), keys.iter().any(|key| key.0.len() > KEY_BYTES_MAX))
            }
            Request::Settled { ranges } => (ranges.len(), false),
        };
        if count > KEYS_PER_REQUEST_MAX {
            return Err(WireError::TooManyKeys { keys: count });
        }
        if long { Err(WireError::Body) } else { Ok(()) }
    }
}

impl Answer {
    /// Decodes an answer.
    ///
    /// # Errors
    /// `Kind`, `Body`.
    pub(super) fn decode(frame: &Frame<'_>) -> Result<Self, WireError> {
        if frame.header.kind != KIND || !frame.header.response {
            return Err(WireError::Kind(frame.header.kind));
        }
        decode(frame.body)
    }
}

/// Appends a frame.
///
/// # Errors
/// `TooLong`; `out` is unchanged then.
pub(super) fn encode<T: Serialize>(
    out: &mut Vec<u8>,
    request_id: u64,
    response: bool,
    message: &T,
) -> Result<(), WireError> {
    let header = Header { kind: KIND, response, request_id, status: 0 };
    let mut frame = FrameWriter::begin(out, &header);
    let body = std::mem::take(frame.body());
    *frame.body() = postcard::to_extend(message, body).map_err(|_| WireError::Body)?;
    let bytes = frame.body_len();
    if bytes > FRAME_BYTES_MAX - HEADER_BYTES {
        return Err(WireError::TooLong { bytes });
    }
    frame.finish()
}

fn decode<'a, T: Deserialize<'a>>(body: &'a [u8]) -> Result<T, WireError> {
    match postcard::take_from_bytes(body) {
        Ok((message, [])) => Ok(message),
        _ => Err(WireError::Body),
    }
}

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Version { theirs } => write!(
                f,
                "the node does not speak version {theirs} of the local protocol, as the client does: run the same \
                 release on both sides"
            ),
            Self::User { uid } => write!(
                f,
                "user {uid} may not use this node: run as the node's user, or, in a program that embeds the server, \
                 add {uid} to `LocalServerConfig::allowed_uids`"
            ),
            Self::Tenant => f.write_str("the node serves another tenant: use that tenant, or another node"),
            Self::Clients { clients_max } => write!(
                f,
                "the node has {clients_max} local clients, which is its limit: close some, or raise `clients_max`"
            ),
            Self::Memory { bytes_left } => write!(
                f,
                "the node has {bytes_left} bytes left for arenas: request a smaller arena, close other clients, or \
                 raise `arenas_bytes_max`"
            ),
            Self::Store(code) => write!(f, "the node cannot use the store: {code}"),
        }
    }
}

/// Decodes `bytes` as a request and as an answer. A decoded message must encode and decode to the same
/// message.
#[cfg(any(test, fuzzing))]
pub(crate) fn round_trip(bytes: &[u8]) {
    fn again<T: Serialize>(message: &T, response: bool) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&mut out, 7, response, message).expect("it fitted a frame before");
        out
    }
    for response in [false, true] {
        let header = Header { kind: KIND, response, request_id: 7, status: 0 };
        let frame = Frame { header, body: &bytes[..bytes.len().min(FRAME_BYTES_MAX / 4)] };
        if let Ok(request) = Request::decode(&frame) {
            let out = again(&request, false);
            let frame = Frame::parse(&out).expect("our own frame").expect("complete").0;
            assert_eq!(Request::decode(&frame).expect("our own request"), request);
        }
        if let Ok(answer) = Answer::decode(&frame) {
            let out = again(&answer, true);
            let frame = Frame::parse(&out).expect("our own frame").expect("complete").0;
            assert_eq!(Answer::decode(&frame).expect("our own answer"), answer);
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use store_core::message::Retention;

    use super::*;

    fn sent(request: &Request<'_>) -> Vec<u8> {
        let mut out = Vec::new();
        encode(&mut out, 9, false, request).unwrap();
        out
    }

    #[test]
    fn requests_survive_the_wire_and_no_prefix_is_one() {
        let span = Span { offset: 1 << 40, len: 4096 };
        let items = vec![Item { key: Key(b"a"), span }, Item { key: Key(&[0xff; 1024]), span }];
        let wanted = [None, Some((1 << 40, None)), Some((65_536, Some(u64::MAX)))]
            .map(|part| Wanted { key: Key(b"a"), span, part })
            .to_vec();
        let retention = Retention { ttl_ms: Some(5), ..Retention::DEFAULT };
        let options = PutOptions { retention, ..PutOptions::DEFAULT };
        let requests = [
            Request::Hello { version: VERSION, tenant: "default", arena_bytes: 1 << 26 },
            Request::Put { options, items },
            Request::Get { items: wanted },
            Request::Exists { leased: true, keys: vec![Key(b"a"), Key(b"b")] },
            Request::Prefetch { keys: vec![Key(b"a")] },
            Request::Retain { change: RetentionChange::default(), keys: vec![Key(b"a")] },
            Request::Remove { force: true, keys: vec![Key(b"a")] },
            Request::Settled { ranges: vec![span] },
        ];
        for request in requests {
            let out = sent(&request);
            let (frame, len) = Frame::parse(&out).unwrap().unwrap();
            assert_eq!((len, frame.header.request_id), (out.len(), 9));
            assert_eq!(Request::decode(&frame).unwrap(), request);
            for len in 0..frame.body.len() {
                let part = Frame { body: &frame.body[..len], ..frame };
                assert_eq!(Request::decode(&part), Err(WireError::Body), "{request:?} cut at {len}");
            }
            let answer = Frame { header: Header { response: true, ..frame.header }, ..frame };
            assert_eq!(Request::decode(&answer), Err(WireError::Kind(KIND)), "an answer is not a request");
        }
    }

    #[test]
    fn limits_hold_before_anything_is_done() {
        let too_many = Request::Exists { leased: false, keys: vec![Key(b"k"); KEYS_PER_REQUEST_MAX + 1] };
        let out = sent(&too_many);
        let frame = Frame::parse(&out).unwrap().unwrap().0;
        assert_eq!(Request::decode(&frame), Err(WireError::TooManyKeys { keys: KEYS_PER_REQUEST_MAX + 1 }));
        for request in [
            Request::Exists { leased: false, keys: vec![Key(&[0; KEY_BYTES_MAX + 1])] },
            Request::Hello { version: 1, tenant: &"t".repeat(65), arena_bytes: 1 },
        ] {
            let out = sent(&request);
            assert_eq!(Request::decode(&Frame::parse(&out).unwrap().unwrap().0), Err(WireError::Body));
        }
        let long = Request::Exists { leased: false, keys: vec![Key(&[0; 1024]); 1024] };
        let mut out = vec![1, 2, 3];
        assert!(matches!(encode(&mut out, 1, false, &long), Err(WireError::TooLong { .. })));
        assert_eq!(out, [1, 2, 3], "the buffer is unchanged");
        // A count that no frame could hold must not cause a large allocation.
        round_trip(&[3, 0xff, 0xff, 0xff, 0xff, 0x0f]);
    }

    #[test]
    fn a_frame_of_the_masters_rpc_is_not_taken_for_ours() {
        use store_core::message::{Operation as _, ReadStats};
        let mut out = Vec::new();
        ReadStats::encode_request(&mut out, 1, &(), std::iter::empty()).unwrap();
        let frame = Frame::parse(&out).unwrap().unwrap().0;
        assert!(matches!(Request::decode(&frame), Err(WireError::Kind(_))));
    }

    #[test]
    fn any_bytes_are_a_message_or_an_error() {
        let mut state = 1u64;
        for _ in 0..20_000 {
            let mut bytes = Vec::new();
            for _ in 0..state % 40 {
                state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
                // Small numbers are likely to be valid variants and counts.
                bytes.push((state >> 60) as u8 * u8::from(state & 7 != 0));
            }
            state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            round_trip(&bytes);
        }
    }
}

//! The control port: descriptors, probes and notifications between engines. It is not on the data path.
//!
//! On a connection, each request is followed by one answer, any number of times. A frame is
//!
//! ```text
//!   magic 4 = "SNWK" | version u16 = 2 | zero u16 | body length u32 | body (postcard)
//! ```
//!
//! with little-endian integers. An engine with a cluster secret answers only probes until the peer proves
//! that it knows the secret, see [`proof`]. Requests are [`Request`], answers [`Answer`]. The server reads at
//! most the longest request that it allows. It closes a connection that stops in the middle of a frame, and
//! one that sends an invalid frame.

mod client;
mod inbox;
mod proof;
mod server;

use std::string::String;
use std::vec::Vec;

use serde::{Deserialize, Serialize};

pub(crate) use client::{Requester, call};
pub(crate) use inbox::Inbox;
pub(crate) use server::Server;

const MAGIC: [u8; 4] = *b"SNWK";
const VERSION: u16 = 2;
const HEADER_BYTES: usize = 12;

/// A request of one engine to another.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Fetch the descriptor.
    Descriptor,
    /// Check that the engine is alive, and fetch its incarnation.
    Probe,
    /// Put a message into the queue of the engine, if this is its incarnation.
    Notify { incarnation: u64, name: String, message: Vec<u8> },
    /// Fetch a challenge for a proof.
    Challenge,
    /// Prove that the sender knows the secret, and make `request`: another request, encoded.
    Proven { nonce: [u8; 32], request: Vec<u8>, proof: [u8; 32] },
}

/// The answer to a request.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// `Descriptor::to_bytes`.
    Descriptor(Vec<u8>),
    /// The engine is alive.
    Alive { incarnation: u64 },
    /// The message is in the queue.
    Taken,
    /// The message is for another incarnation; this is the engine's.
    Restarted { found: u64 },
    /// The message is longer than the engine's `notification_bytes_max`.
    TooLong { bytes_max: u32 },
    /// The queue is full.
    InboxFull,
    /// The engine's `notifications_max` is 0.
    TakesNone,
    /// A challenge for one proof.
    Challenge([u8; 32]),
    /// Proves that the answering engine knows the secret. `answer` is another answer, encoded.
    Proven { answer: Vec<u8>, proof: [u8; 32] },
    /// The request needs a proof of the secret.
    NeedsProof,
    /// The proof was wrong, or the request in it was invalid.
    WrongProof,
}

/// Why bytes are not a frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Malformed {
    Magic,
    Version,
    TooLong,
    Body,
}

impl Malformed {
    fn what(self) -> &'static str {
        match self {
            Self::Magic => "what answers is not a transfer engine",
            Self::Version => "it uses another version of the control protocol",
            Self::TooLong => "its answer is longer than control.frame_bytes_max",
            Self::Body => "its answer does not parse",
        }
    }
}

fn frame(body: &impl Serialize) -> Vec<u8> {
    // Serialising these types into memory cannot fail.
    let body = postcard::to_allocvec(body).unwrap_or_default();
    let mut frame = Vec::with_capacity(HEADER_BYTES + body.len());
    frame.extend_from_slice(&MAGIC);
    frame.extend_from_slice(&VERSION.to_le_bytes());
    frame.extend_from_slice(&[0, 0]);
    frame.extend_from_slice(&(body.len() as u32).to_le_bytes());
    frame.extend_from_slice(&body);
    frame
}

/// Length of the body that follows a header.
fn body_len(header: &[u8; HEADER_BYTES], bytes_max: usize) -> Result<usize, Malformed> {
    if header[..4] != MAGIC {
        return Err(Malformed::Magic);
    }
    if header[4..6] != VERSION.to_le_bytes() || header[6..8] != [0, 0] {
        return Err(Malformed::Version);
    }
    let len = u32::from_le_bytes([header[8], header[9], header[10], header[11]]) as usize;
    if len > bytes_max { Err(Malformed::TooLong) } else { Ok(len) }
}

fn body<'a, T: Deserialize<'a>>(bytes: &'a [u8]) -> Result<T, Malformed> {
    match postcard::take_from_bytes(bytes) {
        Ok((body, [])) => Ok(body),
        _ => Err(Malformed::Body),
    }
}

/// Parses `bytes` as a frame. What parses is the same after it was encoded and parsed again.
#[cfg(fuzzing)]
pub(crate) fn fuzz_frame(bytes: &[u8]) {
    fn round<T: Serialize + serde::de::DeserializeOwned + PartialEq + std::fmt::Debug>(bytes: &[u8]) {
        let Ok(understood) = body::<T>(bytes) else { return };
        let frame = frame(&understood);
        let header = frame.first_chunk().expect("a frame has a header");
        assert_eq!(body_len(header, frame.len()), Ok(frame.len() - HEADER_BYTES));
        assert_eq!(body::<T>(&frame[HEADER_BYTES..]), Ok(understood));
    }
    let Some((header, rest)) = bytes.split_first_chunk::<HEADER_BYTES>() else { return };
    // With an invalid header, the rest is still parsed as a body.
    let len = body_len(header, rest.len()).unwrap_or(rest.len());
    round::<Request>(&rest[..len]);
    round::<Answer>(&rest[..len]);
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let request = Request::Notify { incarnation: 7, name: "done".into(), message: vec![1, 2, 3] };
        let bytes = frame(&request);
        let header = bytes[..HEADER_BYTES].try_into().unwrap();
        let len = body_len(header, 100).unwrap();
        assert_eq!(bytes.len(), HEADER_BYTES + len);
        assert_eq!(body::<Request>(&bytes[HEADER_BYTES..]), Ok(request));
        assert_eq!(body::<Request>(&bytes[HEADER_BYTES..bytes.len() - 1]), Err(Malformed::Body));
        assert_eq!(body_len(header, len - 1), Err(Malformed::TooLong));
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 12..256)) {
            let _ = body_len(bytes[..HEADER_BYTES].try_into().unwrap(), 1 << 20);
            let _ = body::<Request>(&bytes);
            let _ = body::<Answer>(&bytes);
        }
    }
}

//! The control port: how engines find out about each other. Nothing of it is on the data path.
//!
//! One request, one answer, any number of times on a connection. A frame is
//!
//! ```text
//!   magic 4 = "SNWK" | version u16 = 2 | zero u16 | body length u32 | body (postcard)
//! ```
//!
//! with little-endian integers. An engine with a cluster secret answers nothing but probes to who does not prove that it knows
//! it, see [`proof`]. Requests are [`Request`], answers [`Answer`]. The server reads no more than the longest
//! request that it allows, closes connections that stop in the middle of a frame, and answers nothing to a frame that it
//! does not understand but closing the connection.

mod client;
mod inbox;
mod proof;
mod server;

use std::string::String;
use std::vec::Vec;

use serde::{Deserialize, Serialize};

pub(crate) use client::{Asker, call};
pub(crate) use inbox::Inbox;
pub(crate) use server::Server;

const MAGIC: [u8; 4] = *b"SNWK";
const VERSION: u16 = 2;
const HEADER_BYTES: usize = 12;

/// What an engine asks another one.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Request {
    /// Your descriptor?
    Descriptor,
    /// Are you there, and who are you?
    Probe,
    /// Take this message, if you are who I think.
    Notify { incarnation: u64, name: String, message: Vec<u8> },
    /// What am I to prove?
    Challenge,
    /// I know the secret, and ask what `request` says: another request, encoded.
    Proven { nonce: [u8; 32], request: Vec<u8>, proof: [u8; 32] },
}

/// What it hears.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum Answer {
    /// `Descriptor::to_bytes`.
    Descriptor(Vec<u8>),
    /// I am there.
    Alive { incarnation: u64 },
    /// The message is taken.
    Taken,
    /// I am somebody else: this is my incarnation.
    Restarted { found: u64 },
    /// The message is too long, by `notification_bytes_max` of the one who answers.
    TooLong { bytes_max: u32 },
    /// Too many messages wait.
    InboxFull,
    /// I take no messages.
    TakesNone,
    /// Prove this, once.
    Challenge([u8; 32]),
    /// I know the secret, too, and answer what `answer` says: another answer, encoded.
    Proven { answer: Vec<u8>, proof: [u8; 32] },
    /// I answer that only to who proves to know the secret.
    NeedsProof,
    /// That was no proof of it.
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
            Self::Version => "it speaks another version of the control protocol",
            Self::TooLong => "its answer is longer than control.frame_bytes_max",
            Self::Body => "its answer does not parse",
        }
    }
}

fn frame(body: &impl Serialize) -> Vec<u8> {
    // Into memory, of types without maps or floats: there is nothing that could fail.
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

/// Takes `bytes` for a frame: what is understood comes back the same.
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
    // A header that makes no sense must not keep the bodies from being tried.
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

//! What members send to each other, and how it is encoded.
//!
//! ```text
//!   1 byte   which message
//!   …        its fields in postcard
//!   …        commands or a chunk: the rest
//! ```

use alloc::sync::Arc;
use alloc::vec::Vec;
use core::fmt;

use serde::{Deserialize, Serialize};

use super::{Limits, Reign};
use crate::command_log::{COMMAND_BYTES_MAX, Lsn};
use crate::snapshot::CHUNK_BYTES_MAX;

/// The version of the encoding. Members with different ones do not talk to each other.
pub const MESSAGES_VERSION: u16 = 1;

/// Length limit of an encoded message, bytes: commands that end with one of the greatest length, or a chunk.
pub const MESSAGE_BYTES_MAX: usize = 2 * COMMAND_BYTES_MAX + CHUNK_BYTES_MAX;

/// What members send to each other. Messages may be lost, repeated and reordered.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Message {
    /// A member without state asks the leader for it, and those that the record names whether they have any.
    Join {
        /// A number that is another one each time that a member has lost its state.
        life: u64,
        /// The version of the record that names them.
        version: u64,
    },
    /// The answer to [`Self::Join`] of a member that has no state either.
    Empty {
        /// As it was asked.
        version: u64,
    },
    /// The leader gives a member a part of its state.
    Chunk {
        /// The reign.
        reign: Reign,
        /// The life of the member that it is for: one of an earlier life ignores it.
        life: u64,
        /// The position of the snapshot.
        lsn: Lsn,
        /// The number of the chunk, from 0 on.
        number: u32,
        /// Number of chunks of the snapshot.
        chunks: u32,
        /// The chunk.
        bytes: Arc<[u8]>,
    },
    /// A member has these chunks of a snapshot.
    Taken {
        /// The reign.
        reign: Reign,
        /// The member's life.
        life: u64,
        /// The position of the snapshot.
        lsn: Lsn,
        /// Every chunk before this one.
        chunks: u32,
    },
    /// Commands of the leader; without commands, a beat.
    Append {
        /// The reign.
        reign: Reign,
        /// The position of the last command before these.
        after: Lsn,
        /// The commands, as [`Recorder::take`](crate::command_log::Recorder::take) returns them.
        commands: Vec<u8>,
        /// The number of the beat.
        beat: u64,
        /// A position, and what the [digest](crate::Master::digest) is there, if it is to be compared.
        digest: Option<(Lsn, u64)>,
    },
    /// A follower has every command up to `lsn`.
    Ack {
        /// The reign.
        reign: Reign,
        /// The follower's life.
        life: u64,
        /// The position of its last command.
        lsn: Lsn,
        /// The latest beat that it has heard.
        beat: u64,
        /// It was sent commands that follow others which it has not got.
        gap: bool,
    },
    /// The leader asks a follower that has every command to take over at once.
    TakeOver {
        /// The reign.
        reign: Reign,
        /// The position of the last command.
        lsn: Lsn,
        /// The latest beat that was sent.
        beat: u64,
    },
    /// A member knows a later reign than that of a message, or has promised to take one.
    Nack {
        /// The reign.
        reign: Reign,
    },
}

/// The message without its bytes.
#[derive(Serialize, Deserialize)]
enum Head {
    Join { life: u64, version: u64 },
    Empty { version: u64 },
    Chunk { reign: Reign, life: u64, lsn: Lsn, number: u32, chunks: u32 },
    Taken { reign: Reign, life: u64, lsn: Lsn, chunks: u32 },
    Append { reign: Reign, after: Lsn, beat: u64, digest: Option<(Lsn, u64)> },
    Ack { reign: Reign, life: u64, lsn: Lsn, beat: u64, gap: bool },
    TakeOver { reign: Reign, lsn: Lsn, beat: u64 },
    Nack { reign: Reign },
}

/// Bytes that are no message.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct MessageError;

impl fmt::Display for MessageError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("another member has sent what is no message: use the same release on all masters")
    }
}

impl core::error::Error for MessageError {}

impl Message {
    /// Appends the encoded message.
    pub fn encode(&self, out: &mut Vec<u8>) {
        let (head, bytes): (_, &[u8]) = match self {
            Self::Join { life, version } => (Head::Join { life: *life, version: *version }, &[]),
            Self::Empty { version } => (Head::Empty { version: *version }, &[]),
            Self::Chunk { reign, life, lsn, number, chunks, bytes } => {
                let (reign, life, lsn, number, chunks) = (*reign, *life, *lsn, *number, *chunks);
                (Head::Chunk { reign, life, lsn, number, chunks }, bytes)
            }
            Self::Taken { reign, life, lsn, chunks } => {
                (Head::Taken { reign: *reign, life: *life, lsn: *lsn, chunks: *chunks }, &[])
            }
            Self::Append { reign, after, commands, beat, digest } => {
                let (reign, after, beat, digest) = (*reign, *after, *beat, *digest);
                (Head::Append { reign, after, beat, digest }, commands)
            }
            Self::Ack { reign, life, lsn, beat, gap } => {
                (Head::Ack { reign: *reign, life: *life, lsn: *lsn, beat: *beat, gap: *gap }, &[])
            }
            Self::TakeOver { reign, lsn, beat } => {
                (Head::TakeOver { reign: *reign, lsn: *lsn, beat: *beat }, &[])
            }
            Self::Nack { reign } => (Head::Nack { reign: *reign }, &[]),
        };
        let mut small = [0; 128];
        if let Ok(head) = postcard::to_slice(&head, &mut small) {
            out.extend_from_slice(head);
        }
        out.extend_from_slice(bytes);
    }

    /// Decodes a message.
    ///
    /// # Errors
    /// The bytes are no message, or have more than it.
    pub fn decode(bytes: &[u8]) -> Result<Self, MessageError> {
        let (head, rest) = postcard::take_from_bytes::<Head>(bytes).map_err(|_| MessageError)?;
        if !rest.is_empty() && !matches!(head, Head::Chunk { .. } | Head::Append { .. }) {
            return Err(MessageError);
        }
        Ok(match head {
            Head::Join { life, version } => Self::Join { life, version },
            Head::Empty { version } => Self::Empty { version },
            Head::Chunk { reign, life, lsn, number, chunks } => {
                if rest.len() > CHUNK_BYTES_MAX || number >= chunks {
                    return Err(MessageError);
                }
                Self::Chunk { reign, life, lsn, number, chunks, bytes: rest.into() }
            }
            Head::Taken { reign, life, lsn, chunks } => Self::Taken { reign, life, lsn, chunks },
            Head::Append { reign, after, beat, digest } => {
                Self::Append { reign, after, commands: rest.to_vec(), beat, digest }
            }
            Head::Ack { reign, life, lsn, beat, gap } => Self::Ack { reign, life, lsn, beat, gap },
            Head::TakeOver { reign, lsn, beat } => Self::TakeOver { reign, lsn, beat },
            Head::Nack { reign } => Self::Nack { reign },
        })
    }
}

const _: () = assert!(MESSAGE_BYTES_MAX < u32::MAX as usize);

impl Limits {
    /// The most chunks of a snapshot that a member takes.
    pub(super) fn chunks(&self) -> u64 {
        self.snapshot_bytes / CHUNK_BYTES_MAX as u64 + 1
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "tests")]
mod tests {
    use super::*;

    fn messages() -> [Message; 8] {
        let (reign, life, lsn) = (Reign { lineage: 300, term: 2 }, 1 << 40, 77);
        [
            Message::Join { life, version: 9 },
            Message::Empty { version: 9 },
            Message::Chunk { reign, life, lsn, number: 3, chunks: 4, bytes: [1, 2, 3].into() },
            Message::Taken { reign, life, lsn, chunks: 4 },
            Message::Append {
                reign,
                after: lsn,
                commands: alloc::vec![5, 6],
                beat: 12,
                digest: Some((79, u64::MAX)),
            },
            Message::Ack { reign, life, lsn, beat: 12, gap: true },
            Message::TakeOver { reign, lsn, beat: 12 },
            Message::Nack { reign },
        ]
    }

    #[test]
    fn what_is_encoded_is_decoded_and_the_bytes_are_those_of_this_version() {
        let mut all = Vec::new();
        for message in messages() {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            assert_eq!(Message::decode(&bytes).as_ref(), Ok(&message));
            all.extend_from_slice(&bytes);
        }
        // Another sum: raise `MESSAGES_VERSION`.
        let sum = all.iter().fold(0_u32, |sum, byte| sum.wrapping_mul(31).wrapping_add(u32::from(*byte)));
        assert_eq!((MESSAGES_VERSION, all.len(), sum), (1, 81, 3_663_508_606));
    }

    #[test]
    fn what_is_no_message_is_refused() {
        assert_eq!(Message::decode(&[]), Err(MessageError));
        assert_eq!(Message::decode(&[99]), Err(MessageError));
        for message in messages() {
            let mut bytes = Vec::new();
            message.encode(&mut bytes);
            let has_rest = matches!(message, Message::Chunk { .. } | Message::Append { .. });
            bytes.push(1);
            assert_eq!(Message::decode(&bytes).is_ok(), has_rest, "{message:?}");
            let short = if has_rest { 4 } else { bytes.len() - 2 };
            assert_eq!(Message::decode(&bytes[..short]), Err(MessageError), "{message:?}");
        }
        let (reign, lsn) = (Reign::default(), 1);
        let mut bytes = Vec::new();
        let long = alloc::vec![0; CHUNK_BYTES_MAX + 1].into();
        Message::Chunk { reign, life: 1, lsn, number: 0, chunks: 1, bytes: long }.encode(&mut bytes);
        assert_eq!(Message::decode(&bytes), Err(MessageError));
    }
}

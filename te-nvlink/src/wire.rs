//! The frames of the control connection: within a host, one per message of a `SOCK_SEQPACKET` socket; between
//! hosts, over TCP, each behind a byte with its length. All integers are little-endian.
//!
//! | first byte | frame | from | with a file descriptor |
//! |---|---|---|---|
//! | 0 | a message of [`te_core::grant`] | both | `Welcome`: the ledger |
//! | 1 | `part`: kind u8, bytes u64, offset u64, len u64, handle 64 | owner, before its `Grant` | kinds 1 and 4 |
//! | 2 | `open`: version u8, the owner's name 16 | peer, first of all, over TCP alone | |
//!
//! The parts of a grant come before it, in their order, so that a peer has all handles when the grant
//! arrives. Between hosts all parts are of kind 2, a `Welcome` brings no ledger, and the owner expels a peer
//! by the message alone. An `open` with another name or version, as of an owner that has ended, ends the
//! connection.

use te_core::grant::{MESSAGE_BYTES_MAX, Message};
use te_core::{Error, ErrorKind};

/// The version in an `open`.
pub const VERSION: u8 = 1;
/// The length of the longest frame, bytes.
pub const FRAME_BYTES_MAX: usize = 90;
const _: () = assert!(MESSAGE_BYTES_MAX < FRAME_BYTES_MAX);

/// How a peer maps a part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Means {
    /// By the file descriptor of device memory that comes with the frame.
    Fd,
    /// By a fabric handle.
    Fabric([u8; 64]),
    /// By an IPC handle of a whole allocation.
    Ipc([u8; 64]),
    /// By the memory file of the host that comes with the frame.
    File,
}

/// A part of a region.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// How a peer maps it.
    pub means: Means,
    /// The length of the memory that the handle is of, bytes.
    pub bytes: u64,
    /// Where the part begins in that memory, bytes.
    pub offset: u64,
    /// The length of the part, bytes.
    pub len: u64,
}

/// One frame.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Frame {
    /// A message of the grant protocol.
    Grant(Message),
    /// A part of the region that the next grant is of.
    Part(Part),
    /// The peer of another host wants the owner with this name, which is in its exports.
    Open([u8; 16]),
}

impl Frame {
    /// Writes the frame to `out`; returns its length, bytes.
    #[must_use]
    pub fn encode(self, out: &mut [u8; FRAME_BYTES_MAX]) -> usize {
        match self {
            Self::Grant(message) => {
                let mut bytes = [0; MESSAGE_BYTES_MAX];
                let len = message.encode(&mut bytes);
                out[0] = 0;
                out[1..=len].copy_from_slice(&bytes[..len]);
                len + 1
            }
            Self::Part(Part { means, bytes, offset, len }) => {
                let (kind, handle) = match means {
                    Means::Fd => (1, [0; 64]),
                    Means::Fabric(handle) => (2, handle),
                    Means::Ipc(handle) => (3, handle),
                    Means::File => (4, [0; 64]),
                };
                (out[0], out[1]) = (1, kind);
                for (at, number) in [(2, bytes), (10, offset), (18, len)] {
                    out[at..at + 8].copy_from_slice(&number.to_le_bytes());
                }
                out[26..90].copy_from_slice(&handle);
                90
            }
            Self::Open(name) => {
                (out[0], out[1]) = (2, VERSION);
                out[2..18].copy_from_slice(&name);
                18
            }
        }
    }

    /// Parses a frame.
    ///
    /// # Errors
    /// `Protocol` for a kind or version that does not exist, `InvalidArgument` for fields that are too short,
    /// too long, or not valid.
    pub fn decode(frame: &[u8]) -> Result<Self, Error> {
        let invalid = Error::new(ErrorKind::InvalidArgument);
        let (kind, rest) = frame.split_first().ok_or(invalid)?;
        match kind {
            0 => Message::decode(rest).map(Self::Grant),
            1 => {
                let rest: &[u8; 89] = rest.try_into().map_err(|_| invalid)?;
                let number = |at: usize| u64::from_le_bytes(std::array::from_fn(|nth| rest[at + nth]));
                let handle: [u8; 64] = std::array::from_fn(|nth| rest[25 + nth]);
                let means = match rest[0] {
                    1 if handle == [0; 64] => Means::Fd,
                    2 => Means::Fabric(handle),
                    3 => Means::Ipc(handle),
                    4 if handle == [0; 64] => Means::File,
                    _ => return Err(invalid),
                };
                Ok(Self::Part(Part { means, bytes: number(1), offset: number(9), len: number(17) }))
            }
            2 => match rest.split_first() {
                Some((&VERSION, name)) => Ok(Self::Open(name.try_into().map_err(|_| invalid)?)),
                Some(_) => Err(ErrorKind::Protocol.into()),
                None => Err(invalid),
            },
            _ => Err(ErrorKind::Protocol.into()),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn frames_survive_the_wire() {
        let part = |means| Frame::Part(Part { means, bytes: 1 << 40, offset: 3, len: u64::MAX });
        for frame in [
            Frame::Grant(Message::Welcome),
            Frame::Grant(Message::Release { row: 7 }),
            part(Means::Fd),
            part(Means::Fabric([9; 64])),
            part(Means::Ipc([8; 64])),
            part(Means::File),
            Frame::Open([5; 16]),
        ] {
            let mut bytes = [0; FRAME_BYTES_MAX];
            let len = frame.encode(&mut bytes);
            assert_eq!(Frame::decode(&bytes[..len]), Ok(frame));
            assert!((0..len).all(|len| Frame::decode(&bytes[..len]).is_err()), "truncated: {frame:?}");
            assert!(Frame::decode(&[&bytes[..len], &[0]].concat()).is_err(), "too long: {frame:?}");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_frame_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..100)) {
            if let Ok(frame) = Frame::decode(&bytes) {
                let mut out = [0; FRAME_BYTES_MAX];
                let len = frame.encode(&mut out);
                prop_assert_eq!(Frame::decode(&out[..len]), Ok(frame));
            }
        }
    }
}

//! What owner and peer say to each other: one message a packet, at most 48 bytes, a kind byte and fixed
//! fields.

use te_core::{Access, Error, ErrorKind, RegionId};

use crate::keys::{remote_access, remote_bits};

/// Spoken by both sides; a peer with another one is refused.
pub(super) const PROTOCOL: u32 = 2;
/// Longest message, bytes.
pub(super) const MESSAGE_BYTES_MAX: usize = 48;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Message {
    /// Peer, first of all: the protocol it speaks, and its engine's identity.
    Hello { protocol: u32, identity: u64 },
    /// Owner, in answer; the ledger's file comes with it.
    Welcome,
    /// Peer: wants a region.
    Ask { request: u32, region: RegionId, key: [u8; 16] },
    /// Owner: may have it, under this row of the ledger; the memory's file comes with it.
    Grant { request: u32, row: u32, offset: u64, len: u64, access: Access },
    /// Owner: may not.
    Refuse { request: u32, stale: bool },
    /// Owner: the row is revoked; unmap it.
    Revoked { row: u32 },
    /// Peer: has unmapped it, the row is free.
    Release { row: u32 },
    /// Owner: you are cut off.
    Expelled,
}

impl Message {
    pub(super) fn encode(self, out: &mut [u8; 128]) -> usize {
        match self {
            Self::Hello { protocol, identity } => {
                put(out, &[&[1], &protocol.to_le_bytes(), &identity.to_le_bytes()])
            }
            Self::Welcome => put(out, &[&[2]]),
            Self::Ask { request, region, key } => {
                put(out, &[&[3], &request.to_le_bytes(), &region.to_bits().to_le_bytes(), &key])
            }
            Self::Grant { request, row, offset, len, access } => {
                let (offset, len, access) = (offset.to_le_bytes(), len.to_le_bytes(), [remote_bits(access)]);
                put(out, &[&[4], &request.to_le_bytes(), &row.to_le_bytes(), &offset, &len, &access])
            }
            Self::Refuse { request, stale } => put(out, &[&[5], &request.to_le_bytes(), &[u8::from(stale)]]),
            Self::Revoked { row } => put(out, &[&[6], &row.to_le_bytes()]),
            Self::Release { row } => put(out, &[&[7], &row.to_le_bytes()]),
            Self::Expelled => put(out, &[&[8]]),
        }
    }

    pub(super) fn decode(bytes: &[u8]) -> Result<Self, Error> {
        let mut fields = Fields(bytes);
        let message = match fields.u8()? {
            1 => Self::Hello { protocol: fields.u32()?, identity: fields.u64()? },
            2 => Self::Welcome,
            3 => Self::Ask {
                request: fields.u32()?,
                region: RegionId::from_bits(fields.u64()?),
                key: fields.bytes()?,
            },
            4 => Self::Grant {
                request: fields.u32()?,
                row: fields.u32()?,
                offset: fields.u64()?,
                len: fields.u64()?,
                access: remote_access(fields.u8()?)?,
            },
            5 => Self::Refuse { request: fields.u32()?, stale: fields.u8()? != 0 },
            6 => Self::Revoked { row: fields.u32()? },
            7 => Self::Release { row: fields.u32()? },
            8 => Self::Expelled,
            _ => return Err(Error::new(ErrorKind::Protocol)),
        };
        fields.end()?;
        Ok(message)
    }
}

/// Takes fields off the front of bytes that a peer wrote. All integers are little-endian.
struct Fields<'a>(&'a [u8]);

impl Fields<'_> {
    fn bytes<const N: usize>(&mut self) -> Result<[u8; N], Error> {
        let (head, tail) = self.0.split_first_chunk().ok_or(Error::new(ErrorKind::InvalidArgument))?;
        self.0 = tail;
        Ok(*head)
    }

    fn u8(&mut self) -> Result<u8, Error> {
        self.bytes::<1>().map(|[byte]| byte)
    }

    fn u32(&mut self) -> Result<u32, Error> {
        self.bytes().map(u32::from_le_bytes)
    }

    fn u64(&mut self) -> Result<u64, Error> {
        self.bytes().map(u64::from_le_bytes)
    }

    /// Nothing is left.
    fn end(&self) -> Result<(), Error> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::new(ErrorKind::InvalidArgument)) }
    }
}

/// Puts fields one after the other; gives the length.
fn put(out: &mut [u8; 128], fields: &[&[u8]]) -> usize {
    let mut at = 0;
    for field in fields {
        out[at..at + field.len()].copy_from_slice(field);
        at += field.len();
    }
    at
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn messages_survive_the_wire() {
        let access = Access::REMOTE_READ | Access::REMOTE_WRITE;
        for message in [
            Message::Hello { protocol: PROTOCOL, identity: 77 },
            Message::Welcome,
            Message::Ask { request: 7, region: RegionId::new(3, 9), key: [5; 16] },
            Message::Grant { request: 7, row: 1, offset: 4096, len: 1 << 40, access },
            Message::Refuse { request: 7, stale: true },
            Message::Revoked { row: 1023 },
            Message::Release { row: 0 },
            Message::Expelled,
        ] {
            let mut bytes = [0; 128];
            let len = message.encode(&mut bytes);
            assert!(len <= MESSAGE_BYTES_MAX);
            assert_eq!(Message::decode(&bytes[..len]), Ok(message));
            assert!(Message::decode(&bytes[..len - 1]).is_err(), "truncated");
            assert!(Message::decode(&bytes[..=len]).is_err(), "too long");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            let _ = Message::decode(&bytes);
        }
    }
}

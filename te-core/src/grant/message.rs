//! The messages between owner and peer: a kind byte and fixed fields, at most 48 bytes. All integers are
//! little-endian.

use crate::{Access, Error, ErrorKind, RegionId};

/// The version of the protocol. An owner refuses a peer with another version.
pub const PROTOCOL: u32 = 2;
/// The length of the longest message, in bytes.
pub const MESSAGE_BYTES_MAX: usize = 48;

/// One message. The messages of one connection arrive in order, or not at all.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Message {
    /// From the peer, as its first message.
    Hello {
        /// The peer's version of the protocol.
        protocol: u32,
        /// The identity by which the owner may expel the peer; not 0.
        identity: u64,
    },
    /// From the owner, in response. The fabric hands over access to the [`Rows`](super::Rows) with it.
    Welcome,
    /// From the peer: requests a region.
    Ask {
        /// The number of the request.
        request: u32,
        /// The region, by the owner's id.
        region: RegionId,
        /// The key in the region's export.
        key: [u8; 16],
    },
    /// From the owner: the peer may use the region until the row is revoked. The fabric hands over the memory
    /// with it.
    Grant {
        /// The number of the request.
        request: u32,
        /// The row of the grant.
        row: u32,
        /// Where the region begins in the memory that is handed over, in bytes.
        offset: u64,
        /// The length of the region, in bytes.
        len: u64,
        /// The peer's rights.
        access: Access,
    },
    /// From the owner: the peer may not use the region.
    Refuse {
        /// The number of the request.
        request: u32,
        /// Whether the region does not exist any more. Otherwise the key is wrong, or there is no room.
        stale: bool,
    },
    /// From the owner: the row is revoked; the peer must unmap the memory.
    Revoked {
        /// The row.
        row: u32,
    },
    /// From the peer: it has unmapped the memory, and the row is free.
    Release {
        /// The row.
        row: u32,
    },
    /// From the owner: the peer is expelled.
    Expelled,
}

impl Message {
    /// Writes the message to `out`; returns its length, in bytes.
    pub fn encode(self, out: &mut [u8; MESSAGE_BYTES_MAX]) -> usize {
        match self {
            Self::Hello { protocol, identity } => {
                put(out, &[&[1], &protocol.to_le_bytes(), &identity.to_le_bytes()])
            }
            Self::Welcome => put(out, &[&[2]]),
            Self::Ask { request, region, key } => {
                put(out, &[&[3], &request.to_le_bytes(), &region.to_bits().to_le_bytes(), &key])
            }
            Self::Grant { request, row, offset, len, access } => {
                let (offset, len) = (offset.to_le_bytes(), len.to_le_bytes());
                let access = [access.intersection(REMOTE).bits()];
                put(out, &[&[4], &request.to_le_bytes(), &row.to_le_bytes(), &offset, &len, &access])
            }
            Self::Refuse { request, stale } => put(out, &[&[5], &request.to_le_bytes(), &[u8::from(stale)]]),
            Self::Revoked { row } => put(out, &[&[6], &row.to_le_bytes()]),
            Self::Release { row } => put(out, &[&[7], &row.to_le_bytes()]),
            Self::Expelled => put(out, &[&[8]]),
        }
    }

    /// Parses a message.
    ///
    /// # Errors
    /// `Protocol` for a kind that does not exist, `InvalidArgument` for fields that are too short, too long,
    /// or not valid.
    pub fn decode(bytes: &[u8]) -> Result<Self, Error> {
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
                access: fields.remote_access()?,
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

const REMOTE: Access = Access::REMOTE_READ.union(Access::REMOTE_WRITE);

/// Takes fields from the front of bytes that the other end wrote.
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

    /// The rights of a peer: remote ones only, at least one.
    fn remote_access(&mut self) -> Result<Access, Error> {
        let access = Access::from_bits(self.u8()?);
        let granted = access.filter(|access| access.is_remote() && REMOTE.contains(*access));
        granted.ok_or(Error::new(ErrorKind::InvalidArgument))
    }

    /// All bytes were used.
    fn end(&self) -> Result<(), Error> {
        if self.0.is_empty() { Ok(()) } else { Err(Error::new(ErrorKind::InvalidArgument)) }
    }
}

/// Appends fields to a buffer, and returns the length.
fn put(out: &mut [u8; MESSAGE_BYTES_MAX], fields: &[&[u8]]) -> usize {
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
            let mut bytes = [0; MESSAGE_BYTES_MAX];
            let len = message.encode(&mut bytes);
            assert_eq!(Message::decode(&bytes[..len]), Ok(message));
            assert!(Message::decode(&bytes[..len - 1]).is_err(), "truncated");
            assert!(Message::decode(&bytes[..=len]).is_err(), "too long");
        }
    }

    proptest! {
        #[test]
        fn any_bytes_are_a_message_or_an_error(bytes in proptest::collection::vec(any::<u8>(), 0..64)) {
            if let Ok(understood) = Message::decode(&bytes) {
                let mut out = [0; MESSAGE_BYTES_MAX];
                let len = understood.encode(&mut out);
                prop_assert_eq!(Message::decode(&out[..len]), Ok(understood));
            }
        }
    }
}

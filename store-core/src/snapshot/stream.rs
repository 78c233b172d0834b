//! The stream of a snapshot: chunks with numbers and checksums, which carry one sequence of values.

use alloc::vec::Vec;

use foldhash::quality::FixedState;
use serde::Serialize;
use serde::de::DeserializeOwned;

use super::Damage;
use core::hash::{BuildHasher, Hasher};

/// Length limit of a chunk, bytes, its head included.
pub const CHUNK_BYTES_MAX: usize = 1 << 20;
/// A chunk's head: the length of the rest, the chunk's number, and the CRC-32C of both and of the rest.
const HEAD_BYTES: usize = 12;

/// A function that computes the CRC-32C of bytes: the caller's, because the fast ones need the standard
/// library.
pub type Crc32c = fn(&[u8]) -> u32;

/// Writes values into chunks, and chunks to `sink`.
pub(super) struct Output<'a, E> {
    chunk: Vec<u8>,
    number: u32,
    bytes: u64,
    digest: u64,
    crc32c: Crc32c,
    sink: &'a mut dyn FnMut(&[u8]) -> Result<(), E>,
    failed: Option<E>,
}

/// The writer has failed; it keeps the reason.
pub(crate) struct Failed;

/// Something that values are written to.
pub(crate) trait Put {
    fn put(&mut self, value: &impl Serialize) -> Result<(), Failed>;
}

impl<'a, E> Output<'a, E> {
    pub(super) fn new(crc32c: Crc32c, sink: &'a mut dyn FnMut(&[u8]) -> Result<(), E>) -> Self {
        let mut chunk = Vec::with_capacity(CHUNK_BYTES_MAX);
        chunk.resize(HEAD_BYTES, 0);
        Self { chunk, number: 0, bytes: 0, digest: 0, crc32c, sink, failed: None }
    }

    /// Writes bytes as they are.
    pub(super) fn raw(&mut self, mut bytes: &[u8]) -> Result<(), Failed> {
        while !bytes.is_empty() {
            let room = CHUNK_BYTES_MAX - self.chunk.len();
            let (now, later) = bytes.split_at(room.min(bytes.len()));
            self.chunk.extend_from_slice(now);
            bytes = later;
            if self.chunk.len() == CHUNK_BYTES_MAX {
                self.end_chunk()?;
            }
        }
        Ok(())
    }

    /// Bytes so far, and a digest of them.
    pub(super) fn sum(&mut self) -> Result<(u64, u64), Failed> {
        self.end_chunk()?;
        Ok((self.bytes, self.digest))
    }

    /// Ends the chunk that is being filled, if there is one.
    pub(super) fn end_chunk(&mut self) -> Result<(), Failed> {
        let Self { chunk, number, bytes, digest, crc32c, sink, failed } = self;
        let len = chunk.len() - HEAD_BYTES;
        if failed.is_some() {
            return Err(Failed);
        }
        if len == 0 {
            return Ok(());
        }
        chunk[..4].copy_from_slice(&(len as u32).to_le_bytes());
        chunk[4..8].copy_from_slice(&number.to_le_bytes());
        let crc = sum_of(*crc32c, *number, &chunk[HEAD_BYTES..]);
        chunk[8..HEAD_BYTES].copy_from_slice(&crc.to_le_bytes());
        if let Err(error) = sink(chunk) {
            *failed = Some(error);
            return Err(Failed);
        }
        *digest = joined(*digest, crc);
        *bytes += chunk.len() as u64;
        *number += 1;
        chunk.truncate(HEAD_BYTES);
        Ok(())
    }

    /// Why writing has failed.
    pub(super) fn failure(self) -> Option<E> {
        self.failed
    }
}

/// The checksum of a chunk: of its bytes, and so that it is wrong in another place of the stream.
fn sum_of(crc32c: Crc32c, number: u32, bytes: &[u8]) -> u32 {
    let place = (number ^ bytes.len() as u32).wrapping_mul(0x9e37_79b9);
    crc32c(bytes) ^ place
}

/// A digest of a sequence of checksums.
fn joined(digest: u64, crc: u32) -> u64 {
    let mut hasher = FixedState::with_seed(digest).build_hasher();
    hasher.write_u32(crc);
    hasher.finish()
}

impl<E> Put for Output<'_, E> {
    fn put(&mut self, value: &impl Serialize) -> Result<(), Failed> {
        postcard::serialize_with_flavor(value, Via(self)).map_err(|_| Failed)
    }
}

struct Via<'a, 'b, E>(&'a mut Output<'b, E>);

impl<E> postcard::ser_flavors::Flavor for Via<'_, '_, E> {
    type Output = ();

    fn try_extend(&mut self, bytes: &[u8]) -> postcard::Result<()> {
        self.0.raw(bytes).map_err(|Failed| postcard::Error::SerializeBufferFull)
    }

    fn try_push(&mut self, byte: u8) -> postcard::Result<()> {
        self.try_extend(&[byte])
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

/// Reads chunks from `source`, and values from chunks.
pub(super) struct Input<'a, E> {
    chunk: Vec<u8>,
    at: usize,
    /// The number of the next chunk.
    number: u32,
    bytes: u64,
    digest: u64,
    crc32c: Crc32c,
    source: &'a mut dyn FnMut(&mut [u8]) -> Result<usize, E>,
    /// A byte string that lies in several chunks.
    long: Vec<u8>,
    failed: Option<Damage<E>>,
}

/// Something that values are read from.
pub(crate) trait Take {
    fn take<T: DeserializeOwned>(&mut self) -> Result<T, Failed>;
}

impl<'a, E> Input<'a, E> {
    pub(super) fn new(crc32c: Crc32c, source: &'a mut dyn FnMut(&mut [u8]) -> Result<usize, E>) -> Self {
        let (chunk, long) = (Vec::new(), Vec::new());
        Self { chunk, at: 0, number: 0, bytes: 0, digest: 0, crc32c, source, long, failed: None }
    }

    /// Bytes of the chunks that were read, and a digest of them. The last one has to be used up.
    pub(super) fn sum(&mut self) -> Result<(u64, u64), Failed> {
        if self.at < self.chunk.len() { self.damaged() } else { Ok((self.bytes, self.digest)) }
    }

    /// Whether nothing follows.
    pub(super) fn is_at_end(&mut self) -> Result<bool, Failed> {
        Ok(self.at == self.chunk.len() && !self.next_chunk()?)
    }

    /// Why reading has failed.
    pub(super) fn failure(self) -> Option<Damage<E>> {
        self.failed
    }

    /// Fills `to` with the next bytes.
    pub(super) fn raw(&mut self, to: &mut [u8]) -> Result<(), Failed> {
        let mut filled = 0;
        while filled < to.len() {
            let part = self.some(to.len() - filled)?;
            let part = &self.chunk[part.0..part.1];
            to[filled..filled + part.len()].copy_from_slice(part);
            filled += part.len();
        }
        Ok(())
    }

    /// Takes at least one byte, and at most `most`; returns where they lie in the chunk.
    fn some(&mut self, most: usize) -> Result<(usize, usize), Failed> {
        if self.at == self.chunk.len() && !self.next_chunk()? {
            return self.fail(Damage::CutShort);
        }
        let from = self.at;
        self.at = self.chunk.len().min(from.saturating_add(most));
        Ok((from, self.at))
    }

    /// Takes the next `len` bytes.
    fn next(&mut self, len: usize) -> Result<&[u8], Failed> {
        if len <= self.chunk.len() - self.at {
            self.at += len;
            return Ok(&self.chunk[self.at - len..self.at]);
        }
        // The length is not trusted: the copy grows with what is there.
        self.long.clear();
        while self.long.len() < len {
            let (from, to) = self.some(len - self.long.len())?;
            self.long.extend_from_slice(&self.chunk[from..to]);
        }
        Ok(&self.long)
    }

    /// Reads the next chunk. `false`: there is none.
    fn next_chunk(&mut self) -> Result<bool, Failed> {
        if self.failed.is_some() {
            return Err(Failed);
        }
        let mut head = [0; HEAD_BYTES];
        match self.fill(&mut head)? {
            0 => return Ok(false),
            HEAD_BYTES => {}
            _ => return self.fail(Damage::CutShort),
        }
        let [a, b, c, d, e, f, g, h, i, j, k, l] = head;
        let (len, number) = (u32::from_le_bytes([a, b, c, d]) as usize, u32::from_le_bytes([e, f, g, h]));
        let crc = u32::from_le_bytes([i, j, k, l]);
        if number != self.number || len == 0 || len > CHUNK_BYTES_MAX - HEAD_BYTES {
            return self.damaged();
        }
        let mut chunk = core::mem::take(&mut self.chunk);
        chunk.resize(len, 0);
        let filled = self.fill(&mut chunk)?;
        (self.chunk, self.at) = (chunk, 0);
        if filled < len {
            return self.fail(Damage::CutShort);
        }
        if sum_of(self.crc32c, number, &self.chunk) != crc {
            return self.damaged();
        }
        self.digest = joined(self.digest, crc);
        self.bytes += (HEAD_BYTES + len) as u64;
        self.number += 1;
        Ok(true)
    }

    /// Reads until `to` is full or nothing is left; returns how much was read.
    fn fill(&mut self, to: &mut [u8]) -> Result<usize, Failed> {
        let mut filled = 0;
        while filled < to.len() {
            match (self.source)(&mut to[filled..]) {
                Ok(0) => break,
                Ok(len) => filled += len,
                Err(error) => return self.fail(Damage::Read(error)),
            }
        }
        Ok(filled)
    }

    /// The chunk that is being read is not as it was written.
    pub(super) fn damaged<T>(&mut self) -> Result<T, Failed> {
        let chunk = self.number;
        self.fail(Damage::Chunk { chunk })
    }

    pub(super) fn fail<T>(&mut self, why: Damage<E>) -> Result<T, Failed> {
        self.failed.get_or_insert(why);
        Err(Failed)
    }
}

impl<E> Take for Input<'_, E> {
    fn take<T: DeserializeOwned>(&mut self) -> Result<T, Failed> {
        let mut from = postcard::Deserializer::from_flavor(From(&mut *self));
        match T::deserialize(&mut from) {
            Ok(value) => Ok(value),
            Err(_) => self.damaged(),
        }
    }
}

struct From<'a, 'b, E>(&'a mut Input<'b, E>);

impl<'de, E> postcard::de_flavors::Flavor<'de> for From<'de, '_, E>
where
    Self: 'de,
{
    type Remainder = ();
    type Source = ();

    fn pop(&mut self) -> postcard::Result<u8> {
        let end = |Failed| postcard::Error::DeserializeUnexpectedEnd;
        let (at, _) = self.0.some(1).map_err(end)?;
        Ok(self.0.chunk[at])
    }

    /// Nothing borrows from a stream.
    fn try_take_n(&mut self, _: usize) -> postcard::Result<&'de [u8]> {
        Err(postcard::Error::WontImplement)
    }

    fn try_take_n_temp<'a>(&'a mut self, len: usize) -> postcard::Result<&'a [u8]>
    where
        'de: 'a,
    {
        self.0.next(len).map_err(|Failed| postcard::Error::DeserializeUnexpectedEnd)
    }

    fn finalize(self) -> postcard::Result<()> {
        Ok(())
    }
}

//! What is allowed: objects as they were put, and when their bytes may be overwritten.

use std::collections::BTreeMap;
use std::ops::Range;

use store_core::bound;
use store_core::chunks::{CHUNK_BYTES, ChunkSums};
use te_core::testkit::Rng;

/// What must never happen.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A reader accepted bytes that are not those of the object.
    WrongBytes(String),
    /// A disk that keeps what it has synced returned bytes that do not verify.
    Rubbish(String),
    /// The same for an object that was announced after a recovery.
    AnnouncedRubbish(String),
    /// A removed object was announced, and the master has no reason to expect that.
    Resurrected(String),
    /// An object was announced during the recovery.
    AnnouncedEarly(String),
    /// Bytes were overwritten that a reader may still use.
    Overwritten(String),
    /// A request was answered twice, or not at all.
    Answers(String),
    /// The disk does not come to rest, or does not do anything.
    Stuck(String),
    /// Nothing was announced after a recovery, although nothing was damaged.
    Distrusted(String),
    /// Something is where the disk had said that nothing is, or ever will be.
    CameBack(String),
    /// More memory than promised.
    Memory(String),
}

impl std::fmt::Display for Violation {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{self:?}")
    }
}

/// An object as it was put. Its generation is its only one.
#[derive(Clone, Debug)]
pub(crate) struct Object {
    pub(crate) tenant: u64,
    pub(crate) key: Vec<u8>,
    pub(crate) generation: u64,
    pub(crate) len: u64,
    pub(crate) crc32c: u32,
    pub(crate) removed: bool,
}

impl Object {
    pub(crate) fn new(tenant: u64, key: Vec<u8>, generation: u64, len: u64) -> Self {
        let image = image(generation, len);
        let crc32c = crc32c::crc32c(&image[..len as usize]);
        Self { tenant, key, generation, len, crc32c, removed: false }
    }

    /// What a reader does: the checksum that the master keeps holds for this key and generation only.
    pub(crate) fn verifies(&self, read: &[u8]) -> bool {
        let sums = sums(&read[..self.len as usize]);
        let committed = bound(self.crc32c, &self.key, self.generation);
        let trailer = sums.trailer();
        bound(sums.whole(), &self.key, self.generation) == committed
            && read[self.len as usize..][..trailer.len()] == *trailer
    }

    pub(crate) fn is(&self, read: &[u8]) -> bool {
        let image = image(self.generation, self.len);
        read[..image.len()] == image
    }
}

fn sums(data: &[u8]) -> ChunkSums {
    let mut sums = ChunkSums::default();
    data.chunks(CHUNK_BYTES as usize).for_each(|chunk| sums.push(crc32c::crc32c(chunk), chunk.len() as u64));
    sums
}

/// Data and trailer.
pub(crate) fn image(generation: u64, len: u64) -> Vec<u8> {
    let mut data = vec![0; len as usize];
    Rng::new(generation).fill(&mut data);
    let trailer = sums(&data).trailer().to_vec();
    data.extend_from_slice(&trailer);
    data
}

/// Images that the master may send readers to, until it has answered that their extent may be reused.
#[derive(Debug, Default)]
pub(crate) struct Held {
    by_sequence: BTreeMap<u64, Vec<Range<u64>>>,
}

impl Held {
    /// `at` is where the image is on the disk.
    pub(crate) fn add(&mut self, sequence: u64, at: u64, bytes: u64) {
        self.by_sequence.entry(sequence).or_default().push(at..at + bytes);
    }

    pub(crate) fn answered(&mut self, sequence: u64) {
        self.by_sequence.remove(&sequence);
    }

    pub(crate) fn clear(&mut self) {
        self.by_sequence.clear();
    }

    pub(crate) fn written(&self, range: Range<u64>) -> Result<(), Violation> {
        let overlaps = |held: &&Range<u64>| held.start < range.end && range.start < held.end;
        match self.by_sequence.values().flatten().find(overlaps) {
            Some(held) => Err(Violation::Overwritten(format!("{held:?} by {range:?}"))),
            None => Ok(()),
        }
    }
}

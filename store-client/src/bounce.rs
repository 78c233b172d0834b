//! The bounce buffer: registered memory through which plain memory is copied that is not registered itself.
//!
//! It has two halves, each filled from front to back. When one is full, the other is used as soon as nothing
//! in it is in use: one half can be under way while the other is filled.

use te_engine::SharedRegion;

/// A piece of the bounce buffer, in bytes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

pub(crate) struct Bounce {
    region: SharedRegion,
    half_bytes: u64,
    /// Bytes handed out of each half since it was last empty.
    used: [u64; 2],
    /// Number of pieces in use, per half.
    pieces: [u32; 2],
    current: usize,
}

/// Offsets of pieces are multiples of this, bytes.
const ALIGN: u64 = 64;

impl Bounce {
    pub(crate) fn new(region: SharedRegion) -> Self {
        let half_bytes = region.len() as u64 / 2 / ALIGN * ALIGN;
        Self { region, half_bytes, used: [0; 2], pieces: [0; 2], current: 0 }
    }

    pub(crate) fn region(&self) -> &SharedRegion {
        &self.region
    }

    /// Longest possible piece, bytes.
    pub(crate) fn piece_bytes_max(&self) -> u64 {
        self.half_bytes
    }

    /// Takes a piece of `wanted` bytes, limited to `piece_bytes_max` and to half of the buffer; `None` while
    /// there is no room.
    pub(crate) fn take(&mut self, wanted: u64, piece_bytes_max: u64) -> Option<Piece> {
        let len = wanted.min(piece_bytes_max).min(self.half_bytes);
        for _ in 0..2 {
            let half = self.current;
            if self.pieces[half] == 0 {
                self.used[half] = 0;
            }
            if self.half_bytes - self.used[half] >= len {
                let offset = half as u64 * self.half_bytes + self.used[half];
                self.used[half] = (self.used[half] + len).next_multiple_of(ALIGN).min(self.half_bytes);
                self.pieces[half] += 1;
                return Some(Piece { offset, len });
            }
            self.current = 1 - half;
        }
        None
    }

    /// Marks all pieces as free except these.
    pub(crate) fn reclaim(&mut self, held: impl Iterator<Item = Piece>) {
        self.pieces = [0; 2];
        for piece in held {
            self.pieces[self.half_of(piece)] += 1;
        }
    }

    /// Gives a piece back. A quarantined piece that is never given back keeps its half from being reused.
    pub(crate) fn give(&mut self, piece: Piece) {
        let half = self.half_of(piece);
        self.pieces[half] = self.pieces[half].saturating_sub(1);
    }

    fn half_of(&self, piece: Piece) -> usize {
        usize::from(piece.offset >= self.half_bytes)
    }
}

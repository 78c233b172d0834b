//! Registered memory through which plain bytes pass that are not lent to the rails where they are.
//!
//! Two halves, each filled from front to back. When one is full, the other is taken, as soon as nothing in it is in use: so
//! one half can be on its way while the other is filled.

use te_engine::SharedRegion;

/// Where a piece lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Piece {
    pub(crate) offset: u64,
    pub(crate) len: u64,
}

pub(crate) struct Bounce {
    region: SharedRegion,
    half_bytes: u64,
    /// Bytes given out of each half since it was last empty.
    used: [u64; 2],
    /// Pieces of each half in use.
    pieces: [u32; 2],
    current: usize,
}

/// Pieces begin at multiples of this.
const ALIGN: u64 = 64;

impl Bounce {
    pub(crate) fn new(region: SharedRegion) -> Self {
        let half_bytes = region.len() as u64 / 2 / ALIGN * ALIGN;
        Self { region, half_bytes, used: [0; 2], pieces: [0; 2], current: 0 }
    }

    pub(crate) fn region(&self) -> &SharedRegion {
        &self.region
    }

    /// The longest piece that there can be.
    pub(crate) fn piece_bytes_max(&self) -> u64 {
        self.half_bytes
    }

    /// Room for up to `wanted` bytes, at most `piece_bytes_max` at a time; `None` while everything is in use.
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

    /// Nothing is in use any more but these pieces.
    pub(crate) fn reclaim(&mut self, held: impl Iterator<Item = Piece>) {
        self.pieces = [0; 2];
        for piece in held {
            self.pieces[self.half_of(piece)] += 1;
        }
    }

    /// Gives a piece back. One that is never given back (quarantined) keeps its half from being used again.
    pub(crate) fn give(&mut self, piece: Piece) {
        let half = self.half_of(piece);
        self.pieces[half] = self.pieces[half].saturating_sub(1);
    }

    fn half_of(&self, piece: Piece) -> usize {
        usize::from(piece.offset >= self.half_bytes)
    }
}

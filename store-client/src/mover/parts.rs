//! Reading parts of an object: the trailer, and the blocks that cover what is wanted, each checked by itself.

use std::ops::Range;

use store_core::blocks::{self, Cover, trailer_len};
use store_core::client::Transfer;

use super::{Buffers, Flying, Place};
use crate::bounce::Bounce;
use crate::checksum::Checksum;
use crate::memory::{BufferRange, Memory};

/// What one read of parts has to read, and what it knows by now. The trailer comes first, then the blocks in their order.
pub(super) struct Parts {
    cover: Cover,
    /// As far as it has landed.
    trailer: Vec<u8>,
    /// What is wanted, by where it begins, and its number in the caller's list.
    wanted: Vec<(Range<u64>, u32)>,
    /// Wanted parts before this one end before anything that has not landed.
    passed: usize,
    damaged: bool,
}

/// The next bytes to read.
pub(super) enum Next {
    /// By way of the bounce buffer, this many at most, and if less, whole blocks of them if they are blocks.
    Bounced { offset: u64, len: u64, blocks: bool },
    /// Straight to their place.
    Straight { offset: u64, place: BufferRange },
}

impl Parts {
    /// `None`: the operation reads whole objects. Parts that are not inside the object are not read; callers refuse them.
    pub(super) fn new(transfer: &Transfer, buffers: &Buffers<'_>) -> Option<Box<Self>> {
        let item = transfer.item as usize;
        let len = transfer.len;
        let inside = |start: u64, count: u64| {
            let end = start.checked_add(count).filter(|end| *end <= len && count > 0)?;
            Some(start..end)
        };
        let mut wanted: Vec<(Range<u64>, u32)> = match buffers {
            Buffers::Fragments(items) => (0..)
                .zip(items[item].1)
                .filter_map(|(index, part)| Some((inside(part.offset, part.into.len)?, index)))
                .collect(),
            Buffers::Part(parts, _) => {
                let (start, count) = parts[item];
                let count = count.unwrap_or(len.saturating_sub(start));
                inside(start, count).map(|part| (part, 0)).into_iter().collect()
            }
            _ => return None,
        };
        wanted.sort_unstable_by_key(|(part, _)| part.start);
        let cover = Cover::new(len, wanted.iter().map(|(part, _)| part.clone()));
        Some(Box::new(Self { cover, trailer: Vec::new(), wanted, passed: 0, damaged: false }))
    }

    /// Bytes to read.
    pub(super) fn total(&self, len: u64) -> u64 {
        trailer_len(len) + self.cover.bytes()
    }

    pub(super) const fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// What to read at byte `at` of all that is read.
    pub(super) fn next(&self, transfer: &Transfer, at: u64, buffers: &Buffers<'_>) -> Option<Next> {
        let trailer = trailer_len(transfer.len);
        if at < trailer {
            return Some(Next::Bounced { offset: transfer.len + at, len: trailer - at, blocks: false });
        }
        let at = at - trailer;
        let run = self.cover.run_at(at)?;
        let (offset, len) = (run.offset + (at - run.at), run.len - (at - run.at));
        if let (Some(only), Buffers::Fragments(items)) = (run.only, buffers) {
            let (part, index) = &self.wanted[only as usize];
            let into = items[transfer.item as usize].1[*index as usize].into;
            let place = BufferRange { offset: into.offset + (offset - part.start), len, ..into };
            return Some(Next::Straight { offset, place });
        }
        Some(Next::Bounced { offset, len, blocks: true })
    }

    /// A piece has landed; pieces land in the order of [`Self::next`]. Gives the checksum of the object by what is known,
    /// once it is.
    pub(super) fn land(
        &mut self,
        transfer: &Transfer,
        piece: &Flying,
        crc32c: Option<u32>,
        bounce: &Bounce,
        memory: &Memory,
        buffers: &mut Buffers<'_>,
    ) -> Option<u32> {
        let len = transfer.len;
        if let (Place::Bounced(at), true) = (piece.place, piece.offset >= len) {
            let start = self.trailer.len();
            self.trailer.resize(start + piece.len as usize, 0);
            // It lies inside the region, so this does not fail; if it did, the checksum would tell.
            let _ = bounce.region().read(at.offset, &mut self.trailer[start..]);
            return blocks::expected(&self.trailer, len, 0, len);
        }
        let sum = crc32c.unwrap_or_else(|| {
            let mut sum = Checksum::default();
            match piece.place {
                Place::Bounced(at) => sum.update_span(bounce.region().span(), at.offset, piece.len),
                Place::Straight(range) => memory.checksum(range, &mut sum),
            }
            sum.finish()
        });
        // The only block of an object is the object.
        let whole = (trailer_len(len) == 0).then_some(sum);
        if whole.is_none() && blocks::expected(&self.trailer, len, piece.offset, piece.len) != Some(sum) {
            self.damaged = true;
        } else if let Place::Bounced(at) = piece.place {
            self.scatter(transfer, piece, at.offset, bounce, memory, buffers);
        }
        whole
    }

    /// Copies what is wanted of a piece out of the bounce buffer.
    fn scatter(
        &mut self,
        transfer: &Transfer,
        piece: &Flying,
        at: u64,
        bounce: &Bounce,
        memory: &Memory,
        buffers: &mut Buffers<'_>,
    ) {
        let (start, end) = (piece.offset, piece.offset + piece.len);
        while self.wanted.get(self.passed).is_some_and(|(part, _)| part.end <= start) {
            self.passed += 1;
        }
        let item = transfer.item as usize;
        for (part, index) in self.wanted[self.passed..].iter().take_while(|(part, _)| part.start < end) {
            let (from, to) = (part.start.max(start), part.end.min(end));
            if from >= to {
                continue;
            }
            let (source, len, skip) = (at + (from - start), to - from, from - part.start);
            match buffers {
                Buffers::Fragments(items) => {
                    let into = items[item].1[*index as usize].into;
                    let into = BufferRange { offset: into.offset + skip, len, ..into };
                    memory.copy_in(bounce.region().span(), source, into);
                }
                Buffers::Part(_, sinks) => {
                    let sink = sinks[item].get_or_insert_with(|| vec![0; (part.end - part.start) as usize]);
                    // As above.
                    let _ = bounce.region().read(source, &mut sink[skip as usize..][..len as usize]);
                }
                _ => {}
            }
        }
    }
}

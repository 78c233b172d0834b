//! Reads of parts of an object: the trailer, and the checksum chunks that cover the requested parts, each
//! verified by itself.

use std::ops::Range;

use store_core::chunks::{self, Cover, trailer_len};
use store_core::client::Transfer;

use te_core::{MemSpan, RegionId};

use super::land::Landing;
use super::{Buffers, Flying, Place};
use crate::checksum::Checksum;
use crate::item::Sink;
use crate::memory::{BufferRange, is_device};
use crate::sys;

/// The state of one read of parts. The trailer is read first, then the chunks in increasing order.
pub(super) struct Parts {
    cover: Cover,
    /// The bytes of the trailer that have landed.
    trailer: Vec<u8>,
    /// The requested parts, sorted by their start.
    wanted: Vec<Wanted>,
    /// Number of requested parts, from the first on, that end before the next chunk to land.
    passed: usize,
    damaged: bool,
    /// A region of device memory that receives a part. Chunks then pass through its slots.
    device: Option<RegionId>,
    /// Hops that were started since they were last [taken](Self::take_hops).
    hops: u32,
}

struct Wanted {
    /// Range of the object, bytes.
    part: Range<u64>,
    /// The registered memory that the part goes to, of the same length; `None`: the plain memory of the item.
    place: Option<BufferRange>,
}

/// The next bytes to read.
pub(super) enum Next {
    /// Through the bounce buffer, at most `len` bytes. If `chunks` is set, a shorter piece consists of whole
    /// chunks.
    Bounced { offset: u64, len: u64, chunks: bool },
    /// Directly to their destination.
    Straight { offset: u64, place: BufferRange },
}

impl Parts {
    /// The state for an item; `None`: the whole object is read. Parts that are not inside the object are not
    /// read; the state machine of gets has refused them.
    pub(super) fn new(transfer: &Transfer, buffers: &Buffers<'_, '_>) -> Option<Box<Self>> {
        let get = buffers.get(transfer.item as usize)?;
        let len = transfer.len;
        let inside = |start: u64, count: u64| {
            let end = start.checked_add(count).filter(|end| *end <= len && count > 0)?;
            Some(start..end)
        };
        let mut wanted: Vec<Wanted> = match (&get.sink, get.part) {
            (Sink::Fragments(parts), _) => parts
                .iter()
                .filter_map(|part| {
                    Some(Wanted { part: inside(part.offset, part.into.len)?, place: Some(part.into) })
                })
                .collect(),
            (sink, Some((start, count))) => {
                let part = inside(start, count.unwrap_or(len.saturating_sub(start)));
                match (part, sink.ranges()) {
                    (Some(part), Some(ranges)) => dealt_out(part, ranges).collect(),
                    (part, _) => part.map(|part| Wanted { part, place: None }).into_iter().collect(),
                }
            }
            (_, None) => return None,
        };
        wanted.sort_unstable_by_key(|wanted| wanted.part.start);
        let mut places = wanted.iter().filter_map(|wanted| wanted.place);
        let device = places.find_map(|place| is_device(place.region).then_some(place.region));
        let cover = Cover::new(len, wanted.iter().map(|wanted| wanted.part.clone()));
        Some(Box::new(Self {
            cover,
            trailer: Vec::new(),
            wanted,
            passed: 0,
            damaged: false,
            device,
            hops: 0,
        }))
    }

    /// Number of bytes to read.
    pub(super) fn total(&self, len: u64) -> u64 {
        trailer_len(len) + self.cover.bytes()
    }

    pub(super) const fn device(&self) -> Option<RegionId> {
        self.device
    }

    /// Number of hops to devices that landing pieces have started since the last call.
    pub(super) const fn take_hops(&mut self) -> u32 {
        std::mem::replace(&mut self.hops, 0)
    }

    pub(super) const fn is_damaged(&self) -> bool {
        self.damaged
    }

    /// What to read at byte `at` of all bytes to read.
    pub(super) fn next(&self, transfer: &Transfer, at: u64) -> Option<Next> {
        let trailer = trailer_len(transfer.len);
        if at < trailer {
            return Some(Next::Bounced { offset: transfer.len + at, len: trailer - at, chunks: false });
        }
        let at = at - trailer;
        let run = self.cover.run_at(at)?;
        let (offset, len) = (run.offset + (at - run.at), run.len - (at - run.at));
        if let Some(only) = run.only
            && let Wanted { part, place: Some(into) } = &self.wanted[only as usize]
        {
            let place = BufferRange { offset: into.offset + (offset - part.start), len, ..*into };
            return Some(Next::Straight { offset, place });
        }
        Some(Next::Bounced { offset, len, chunks: true })
    }

    /// Handles a piece that has landed; pieces land in the order of [`Self::next`]. Returns the checksum of
    /// the whole object when it becomes known.
    pub(super) fn land(
        &mut self,
        transfer: &Transfer,
        piece: &Flying,
        crc32c: Option<u32>,
        landing: &mut Landing<'_, '_, '_>,
    ) -> Option<u32> {
        let len = transfer.len;
        if let (Place::Bounced(at), true) = (piece.place, piece.offset >= len) {
            let start = self.trailer.len();
            self.trailer.resize(start + piece.len as usize, 0);
            // The piece lies inside the region, so this cannot fail. If it did, the checksum would not match.
            let _ = landing.bounce.region().read(at.offset, &mut self.trailer[start..]);
            return chunks::expected(&self.trailer, len, 0, len);
        }
        // Where the bytes are, unless it is their destination.
        let passed = match piece.place {
            Place::Bounced(at) => Some((landing.bounce.region().span(), at.offset)),
            Place::InSlot(at, _) => Some(landing.hops.memory(at)),
            Place::Straight(_) => None,
        };
        let sum = crc32c.unwrap_or_else(|| {
            let mut sum = Checksum::default();
            match (passed, piece.place) {
                (Some((span, at)), _) => sum.update_span(span, at, piece.len),
                (None, Place::Straight(range)) => landing.memory.checksum(range, &mut sum),
                (None, _) => {}
            }
            sum.finish()
        });
        // An object of a single chunk has no trailer: the chunk's checksum is that of the object.
        let whole = (trailer_len(len) == 0).then_some(sum);
        if whole.is_none() && chunks::expected(&self.trailer, len, piece.offset, piece.len) != Some(sum) {
            self.damaged = true;
        } else if let Place::InSlot(at, Some(range)) = piece.place {
            self.hops += landing.hops.sink(piece.job, at, 0, range, landing.memory);
        } else if let Some(from) = passed {
            self.scatter(transfer.item as usize, piece, from, landing);
        }
        whole
    }

    /// Copies the requested parts of a piece out of the bounce buffer or slot.
    fn scatter(
        &mut self,
        item: usize,
        piece: &Flying,
        (from, at): (MemSpan, u64),
        landing: &mut Landing<'_, '_, '_>,
    ) {
        let Landing { hops, memory, buffers, .. } = landing;
        let (start, end) = (piece.offset, piece.offset + piece.len);
        while self.wanted.get(self.passed).is_some_and(|wanted| wanted.part.end <= start) {
            self.passed += 1;
        }
        for Wanted { part, place } in
            self.wanted[self.passed..].iter().take_while(|wanted| wanted.part.start < end)
        {
            let (first, last) = (part.start.max(start), part.end.min(end));
            if first >= last {
                continue;
            }
            let (source, len, skip) = (at + (first - start), last - first, first - part.start);
            match (place, piece.place) {
                (Some(into), Place::InSlot(slot, _)) if is_device(into.region) => {
                    let into = BufferRange { offset: into.offset + skip, len, ..*into };
                    self.hops += hops.sink(piece.job, slot, first - start, into, memory);
                }
                (Some(into), _) => {
                    memory.copy_in(from, source, BufferRange { offset: into.offset + skip, len, ..*into });
                }
                (None, _) => buffers.fill(item, part.end - part.start, skip, len, |skip, place| {
                    sys::read_span(from, source + skip, place);
                }),
            }
        }
    }
}

/// Splits a part among ranges of registered memory that are filled in order, as far as they have room.
fn dealt_out(part: Range<u64>, ranges: &[BufferRange]) -> impl Iterator<Item = Wanted> {
    let mut at = part.start;
    ranges.iter().filter_map(move |range| {
        let len = range.len.min(part.end - at);
        let start = at;
        at += len;
        (len > 0).then_some(Wanted { part: start..at, place: Some(BufferRange { len, ..*range }) })
    })
}

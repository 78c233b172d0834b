//! Landing: what happens to a piece when its bytes have arrived.

use super::buffers::Cursor;
use super::granules::each_range;
use super::{Buffers, Flying, Hops, Job, Place};
use crate::bounce::Bounce;
use crate::checksum::Checksum;
use crate::memory::Memory;

/// What a piece needs that lands.
pub(super) struct Landing<'l, 'i, 'a> {
    pub(super) bounce: &'l Bounce,
    pub(super) hops: &'l mut Hops,
    pub(super) memory: &'l Memory,
    pub(super) buffers: &'l mut Buffers<'i, 'a>,
}

/// Handles a piece that has landed: adds it to the checksum and, if it passed through the bounce buffer,
/// copies it to its destination. A checksum that the rail computed is used for bytes that were read directly
/// into registered memory or a slot; bytes that passed through the bounce buffer are checksummed after the
/// copy. The hop that takes bytes of a slot to their device is started here, and is not over yet.
pub(super) fn land(
    job: &mut Job,
    piece: &Flying,
    crc32c: Option<u32>,
    bounce: &Bounce,
    hops: &mut Hops,
    memory: &Memory,
    buffers: &mut Buffers<'_, '_>,
) {
    if let Some(parts) = &mut job.parts {
        if let Some(whole) =
            parts.land(&job.transfer, piece, crc32c, &mut Landing { bounce, hops, memory, buffers })
        {
            job.checksum = Checksum::of(whole);
        }
        job.hops += parts.take_hops();
        return;
    }
    match piece.place {
        // Granules of storage that are in several ranges, or end in one.
        Place::Bounced(at) if let Some(ranges) = buffers.ranges(job.transfer.item as usize) => {
            let span = bounce.region().span();
            job.checksum.update_span(span, at.offset, piece.len);
            let end = piece.offset + piece.len;
            each_range(&mut Cursor::default(), ranges, (piece.offset, end), |skip, range| {
                memory.copy_in(span, at.offset + skip, range);
            });
        }
        Place::Bounced(at) => {
            let (item, len) = (job.transfer.item as usize, job.transfer.len);
            // An object that is longer than its sink is not read. If it were, the checksum would not match.
            buffers.fill(item, len, piece.offset, piece.len, |skip, place| {
                // The piece lies inside the region, so this cannot fail. If it did, the checksum would not
                // match.
                let _ = bounce.region().read(at.offset + skip, place);
                job.checksum.update(place);
            });
        }
        Place::Straight(range) => match crc32c {
            Some(crc32c) => job.checksum.update_summed(crc32c, piece.len),
            None => memory.checksum(range, &mut job.checksum),
        },
        Place::InSlot(at, range) => {
            let (slot, offset) = hops.memory(at);
            match crc32c {
                Some(crc32c) => job.checksum.update_summed(crc32c, piece.len),
                None => job.checksum.update_span(slot, offset, piece.len),
            }
            job.hops += range.map_or(0, |range| hops.sink(piece.job, at, 0, range, memory));
        }
    }
}

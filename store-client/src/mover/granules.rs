//! Transfers to and from storage, whose remote offsets and lengths are multiples of a granule.
//!
//! ```text
//!   the object  ├────────────── whole granules ──────────────┼─ the rest ─┼─ trailer ─┼─ zeros ─┤
//!   moves       directly, as far as each lies in one range   └──── through the bounce buffer ───┘
//! ```
//!
//! An object begins at a granule, and no other object has bytes in its last one: the master rounds what it
//! allocates. A granule that lies in several ranges of registered memory passes through the bounce buffer,
//! too. Nothing is read to be written again.
//!
//! Memory of devices passes through slots, which hold bytes of the device alone. So an object that is put
//! from there has a length that is a multiple of the granule, as blocks of a KV cache do. So have the ranges
//! of an open put, and the offsets at which they begin: their neighbours are written at other times.

use store_core::chunks::CHUNK_BYTES;
use te_core::Op;

use super::buffers::Cursor;
use super::{Buffers, Cut, Flying, Job, Mover, PIECE_BYTES, Place, TAIL_BYTES};
use crate::bounce::Piece;
use crate::memory::{self, BufferRange, Memory};

impl Mover {
    /// Cuts the next piece of a whole object, or of a range or the trailer of an open put.
    pub(super) fn cut_granules(&mut self, index: usize, memory: &Memory, buffers: &Buffers<'_, '_>) -> Cut {
        let job = &mut self.jobs[index];
        let (transfer, at, granule) = (job.transfer, job.sent, job.granule);
        let item = transfer.item as usize;
        let is_odd = |bytes: u64| !bytes.is_multiple_of(granule);
        if is_odd(transfer.addr) || matches!(buffers, Buffers::Write(_)) && is_odd(transfer.len) {
            return Cut::Never;
        }
        let lent = self.lent[item];
        let ranges = lent.as_ref().map(std::slice::from_ref).or_else(|| buffers.ranges(item));
        let ranges = ranges.filter(|_| at < transfer.len);
        let mut most = PIECE_BYTES;
        if let Some(ranges) = ranges {
            let Some((part, skip)) = job.cursor.seek(ranges, at, |range| range.len) else {
                return Cut::Never;
            };
            let range = ranges[part];
            // The rest of the last granule could not be written from a slot.
            if transfer.op == Op::Write && memory::is_device(range.region) && is_odd(transfer.len) {
                return Cut::Never;
            }
            let left = (range.len - skip).min(transfer.len - at);
            let whole = left - left % granule;
            let is_device = memory::is_device(range.region);
            // A slot has room for the rest of the last granule that is read.
            let is_last = is_device && transfer.op == Op::Read && left == transfer.len - at;
            if whole > 0 || is_last {
                let len = if whole > 0 { whole } else { left };
                let range = BufferRange { offset: range.offset + skip, len, ..range };
                return self.cut_straight(index, at, range, memory);
            }
            let Some(run) = run_of_short(&ranges[part..], at - skip, at, granule) else { return Cut::Never };
            most = run.min(PIECE_BYTES);
        }
        let left = self.jobs[index].total - at;
        if transfer.op == Op::Read {
            return self.cut_bounced(index, at, at, left.min(most));
        }
        if !self.sums[item].reaches(at.min(transfer.len)) {
            return Cut::Later;
        }
        let ends = at + most >= transfer.len && left <= PIECE_BYTES + TAIL_BYTES;
        let cut = self.cut_bounced(index, at, at, if ends { left } else { left.min(most) });
        if let Cut::Piece(Flying { len, place: Place::Bounced(piece), .. }) = &cut {
            match ranges {
                Some(ranges) => self.fill_from_ranges(index, (at, *len), *piece, ranges, memory),
                None => self.fill(index, at, *len, *piece, buffers),
            }
        }
        cut
    }

    /// Cuts a piece of a part that is read directly to its destination. Of storage, the last chunk of an
    /// object passes through the bounce buffer if it does not end with a granule.
    pub(super) fn cut_part(
        &mut self,
        index: usize,
        offset: u64,
        place: BufferRange,
        granule: u64,
        memory: &Memory,
    ) -> Cut {
        let at = self.jobs[index].sent;
        let whole = place.len - place.len % CHUNK_BYTES;
        if memory::is_device(place.region) {
            // Whole chunks, as they are verified, whatever the length of a slot.
            let slot = self.hops.slot_bytes(memory, place.region);
            let len = place.len.min(slot - slot % CHUNK_BYTES);
            self.cut_straight(index, offset, BufferRange { len, ..place }, memory)
        } else if place.len.is_multiple_of(granule) {
            self.cut_straight(index, offset, place, memory)
        } else if whole > 0 {
            self.cut_straight(index, offset, BufferRange { len: whole, ..place }, memory)
        } else {
            self.cut_bounced(index, at, offset, place.len)
        }
    }

    /// Copies the bytes `at..at + len` of a put from ranges of registered memory to the bounce buffer, as far
    /// as the object has them, and the trailer behind them.
    fn fill_from_ranges(
        &mut self,
        index: usize,
        (at, len): (u64, u64),
        piece: Piece,
        ranges: &[BufferRange],
        memory: &Memory,
    ) {
        let Job { transfer, cursor, .. } = &mut self.jobs[index];
        let (len_whole, item) = (transfer.len, transfer.item as usize);
        let bounce = self.bounce.region().span();
        let data_end = (at + len).min(len_whole);
        each_range(cursor, ranges, (at, data_end), |skip, range| {
            memory.copy_out(range, bounce, piece.offset + skip);
        });
        self.sums[item].update(len_whole, at, data_end - at, |sum, from, count| {
            sum.update_span(bounce, piece.offset + from, count);
        });
        self.fill_trailer(index, (at, data_end, at + len), piece);
    }
}

/// Calls `each` for the parts of ranges that hold the bytes `at..end` of an object, with the distance of each
/// from `at`.
pub(super) fn each_range(
    cursor: &mut Cursor,
    ranges: &[BufferRange],
    (at, end): (u64, u64),
    mut each: impl FnMut(u64, BufferRange),
) {
    let mut from = at;
    while from < end {
        let Some((part, skip)) = cursor.seek(ranges, from, |range| range.len) else { return };
        let range = ranges[part];
        let len = (range.len - skip).min(end - from);
        each(from - at, BufferRange { offset: range.offset + skip, len, ..range });
        from += len;
    }
}

/// How many bytes from `at` on pass through the bounce buffer: up to the first granule that begins in a range
/// of a chunk or more. `first` is where the first range begins. `None`: one of the ranges is memory of a
/// device.
fn run_of_short(ranges: &[BufferRange], first: u64, at: u64, granule: u64) -> Option<u64> {
    let mut start = first;
    for range in ranges {
        if start > at && range.len >= CHUNK_BYTES {
            break;
        }
        if memory::is_device(range.region) {
            return None;
        }
        start += range.len;
    }
    Some((start - at).next_multiple_of(granule))
}

#[cfg(test)]
mod tests {
    use te_core::RegionId;

    use super::*;

    #[test]
    fn short_ranges_are_copied_up_to_the_granule_in_which_a_long_one_begins() {
        let range = |len| BufferRange { region: RegionId::new(1, 1), offset: 0, len };
        let ranges = [range(5_000), range(100), range(65_536), range(70_000)];
        assert_eq!(run_of_short(&ranges, 0, 4_096, 4_096), Some(4_096), "904 + 100 bytes");
        assert_eq!(run_of_short(&ranges[2..], 5_100, 69_632, 4_096), Some(4_096), "1,004 bytes");
        assert_eq!(run_of_short(&ranges[..2], 0, 4_096, 512), Some(1_024), "to the end");
        let many = vec![range(100); 1_000];
        assert_eq!(run_of_short(&many, 0, 0, 4_096), Some(102_400));
    }
}

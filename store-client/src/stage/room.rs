//! The staging memory: which parts of it are free.

use std::collections::BTreeMap;

use super::STAGE_ALIGNMENT;

/// A part of the staging memory. Both numbers are multiples of [`STAGE_ALIGNMENT`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Place {
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Free parts by their offset; two that touch are one.
#[derive(Debug)]
pub(super) struct Room {
    free: BTreeMap<u64, u64>,
    free_bytes: u64,
    bytes: u64,
}

impl Room {
    pub(super) fn new(bytes: u64) -> Self {
        let bytes = bytes / STAGE_ALIGNMENT * STAGE_ALIGNMENT;
        Self { free: BTreeMap::from([(0, bytes)]), free_bytes: bytes, bytes }
    }

    /// Length of the memory.
    pub(super) const fn bytes(&self) -> u64 {
        self.bytes
    }

    pub(super) const fn used_bytes(&self) -> u64 {
        self.bytes - self.free_bytes
    }

    /// Takes the first part that is free and long enough for this many bytes.
    pub(super) fn take(&mut self, bytes: u64) -> Option<Place> {
        let bytes = padded(bytes)?;
        let (&offset, &room) = self.free.iter().find(|&(_, &room)| room >= bytes)?;
        self.free.remove(&offset);
        if room > bytes {
            self.free.insert(offset + bytes, room - bytes);
        }
        self.free_bytes -= bytes;
        Some(Place { offset, bytes })
    }

    /// Frees a place that was [taken](Self::take).
    pub(super) fn give(&mut self, place: Place) {
        let Place { mut offset, mut bytes } = place;
        self.free_bytes += bytes;
        if let Some(after) = self.free.remove(&(offset + bytes)) {
            bytes += after;
        }
        if let Some((&before, &room)) = self.free.range(..offset).next_back()
            && before + room == offset
        {
            self.free.remove(&before);
            (offset, bytes) = (before, bytes + room);
        }
        self.free.insert(offset, bytes);
    }
}

/// A length, rounded up to what a buffer needs; `None` for 0 and for lengths that no buffer has.
pub(super) fn padded(bytes: u64) -> Option<u64> {
    bytes.checked_next_multiple_of(STAGE_ALIGNMENT).filter(|padded| *padded > 0)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn places_do_not_overlap_and_free_ones_are_joined() {
        let mut room = Room::new(64 * 4096 + 17);
        assert_eq!(room.bytes(), 64 * 4096);
        let mut taken: Vec<Place> = Vec::new();
        let mut seed = 1_u64;
        for _ in 0..20_000 {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let draw = seed >> 33;
            if draw.is_multiple_of(2) && !taken.is_empty() {
                let index = (draw / 2) as usize % taken.len();
                room.give(taken.swap_remove(index));
            } else if let Some(place) = room.take(1 + draw % 40_000) {
                assert!(place.offset.is_multiple_of(4096) && place.bytes.is_multiple_of(4096));
                assert!(place.offset + place.bytes <= room.bytes());
                let apart = |other: &Place| {
                    place.offset + place.bytes <= other.offset || other.offset + other.bytes <= place.offset
                };
                assert!(taken.iter().all(apart));
                taken.push(place);
            }
            assert_eq!(room.used_bytes(), taken.iter().map(|place| place.bytes).sum::<u64>());
        }
        taken.drain(..).for_each(|place| room.give(place));
        assert_eq!(room.take(64 * 4096), Some(Place { offset: 0, bytes: 64 * 4096 }), "one piece again");
        assert_eq!(room.take(1), None);
    }

    #[test]
    fn lengths_that_no_buffer_has_get_no_place() {
        let mut room = Room::new(1 << 20);
        assert_eq!((room.take(0), room.take(u64::MAX), room.take((1 << 20) + 1)), (None, None, None));
        assert_eq!(room.used_bytes(), 0);
    }
}

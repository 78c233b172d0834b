//! What is counted about a disk.

use std::time::Duration;

use store_core::disk::format::{DiskUuid, Geometry};
use store_core::disk::{Counters, State};

/// Upper bounds of the classes of [`Times`] are powers of two of a microsecond; the last class has no bound.
pub const CLASSES: usize = 24;

/// How long operations of one kind took, from their order to their end: queueing included.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// Operations that ended.
    pub count: u64,
    /// Their time together.
    pub total: Duration,
    /// Operations that took less than 2^n µs and not less than 2^(n-1), by n.
    pub classes: [u64; CLASSES],
}

impl Times {
    pub(super) fn add(&mut self, time: Duration) {
        self.count += 1;
        self.total += time;
        let micros = u64::try_from(time.as_micros()).unwrap_or(u64::MAX);
        let class = (u64::BITS - micros.leading_zeros()) as usize;
        self.classes[class.min(CLASSES - 1)] += 1;
    }
}

/// A snapshot of a disk, for metrics. The counters count from the opening of the disk.
#[derive(Clone, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub struct DiskStats {
    /// `disk_driver`: what carries out the operations.
    pub driver: &'static str,
    /// What the disk can do.
    pub state: State,
    /// The name of the disk; zeros until the superblock was read.
    pub uuid: DiskUuid,
    /// The size of the disk (`disk_capacity_bytes`), of its extents and blocks.
    pub geometry: Geometry,
    /// Counters of the core: `disk_written_bytes_total{class}`, `disk_errors_total{kind}`,
    /// `disk_reclaimed_extents_total`, `disk_adopted_total`.
    pub counters: Counters,
    /// Bytes written in all its time, until the last superblock.
    pub written_bytes: u64,
    /// Objects that readers can find.
    pub objects: u64,
    /// Extents that are free. `disk_extents{state="free"}`.
    pub free_extents: u64,
    /// Extents that are not used any more because of errors. `disk_extents{state="bad"}`.
    pub bad_extents: u64,
    /// `disk_tombstones`.
    pub tombstones: u64,
    /// Bytes of memory for extents and objects.
    pub memory_bytes: u64,
    /// Operations that were ordered and have not ended.
    pub in_flight: u64,
    /// Bytes of demotions and reads that were accepted and not answered. `disk_queue_bytes`.
    pub queue_bytes: u64,
    /// Bytes of buffers that readers have lent. `disk_staging_bytes`.
    pub staging_bytes: u64,
    /// Requests that were refused because the queue of commands was full: part of
    /// `disk_queue_refused_total`, with [`Counters::busy_total`].
    pub unsent_total: u64,
    /// `disk_io_seconds{kind="read"}`.
    pub reads: Times,
    /// `disk_io_seconds{kind="write"}`.
    pub writes: Times,
    /// `disk_io_seconds{kind="sync"}`.
    pub syncs: Times,
    /// From the start of the thread to [`Ready`](super::DiskEvent::Ready). `disk_recovery_seconds`.
    pub recovery: Option<Duration>,
}

impl DiskStats {
    /// Bytes that were written for each byte of objects; 0.0 before the first.
    #[must_use]
    pub fn write_amplification(&self) -> f64 {
        let Counters { object_bytes_total, pad_bytes_total, header_bytes_total, .. } = self.counters;
        if object_bytes_total == 0 {
            return 0.0;
        }
        (object_bytes_total + pad_bytes_total + header_bytes_total) as f64 / object_bytes_total as f64
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn times_fall_into_classes_of_powers_of_two() {
        let mut times = Times::default();
        for micros in [0, 1, 2, 3, 4, 1 << 40] {
            times.add(Duration::from_micros(micros));
        }
        assert_eq!((times.count, &times.classes[..4]), (6, &[1, 1, 2, 1][..]));
        assert_eq!(times.classes[CLASSES - 1], 1);
    }
}

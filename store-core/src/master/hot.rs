//! Further replicas of objects that are read very often. They are dropped before anything is evicted.

use alloc::collections::VecDeque;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use super::Master;
use super::tasks::Wish;
use crate::SegmentNo;
use crate::message::TaskCause;
use crate::read_rates::{ReadRates, ReplicationConfig, ReplicationMode};
use crate::segments::{Placed, Segments};

/// Limit on the extra replicas that are remembered; at the limit no further ones are made.
const EXTRAS_MAX: usize = 1 << 16;
/// Extra replicas that are examined to find one that is not leased.
const LOOKS_MAX: usize = 8;

/// Read rates, and the extra replicas.
#[derive(Debug, Serialize, Deserialize)]
pub(super) struct Hot {
    /// `None`: hot objects are not wanted.
    rates: Option<ReadRates>,
    /// Object, its generation, and the segment of its extra replica; oldest first. May name replicas that are
    /// gone.
    extras: VecDeque<(u32, u64, SegmentNo)>,
    /// The current second, and the number of replicas begun in it.
    begun: (u64, u32),
}

impl Hot {
    pub(super) fn new(config: &ReplicationConfig) -> Self {
        let counts = config.mode != ReplicationMode::Off;
        let rates = counts.then(|| ReadRates::new(config.window_ms, config.gets_per_s_min));
        Self { rates, extras: VecDeque::new(), begun: (0, 0) }
    }

    pub(super) const fn is_on(&self) -> bool {
        self.rates.is_some()
    }

    pub(super) fn extras(&self) -> u64 {
        self.extras.len() as u64
    }

    pub(super) fn note_extra(&mut self, index: u32, generation: u64, segment: SegmentNo) {
        self.extras.push_back((index, generation, segment));
    }

    pub(super) fn memory_bytes(&self) -> usize {
        self.rates.as_ref().map_or(0, ReadRates::memory_bytes)
            + self.extras.capacity() * size_of::<(u32, u64, SegmentNo)>()
    }

    /// Whether one more replica may be begun in this second; if so, counts it.
    fn admit(&mut self, now: Instant, per_s_max: u32) -> bool {
        let second = now.as_nanos() / 1_000_000_000;
        if self.begun.0 != second {
            self.begun = (second, 0);
        }
        let admitted = self.begun.1 < per_s_max && self.extras.len() < EXTRAS_MAX;
        self.begun.1 += u32::from(admitted);
        admitted
    }
}

impl Master {
    /// Counts a read of an object. If it is hot, it gets a further replica.
    pub(super) fn count_read(&mut self, now: Instant, index: u32) {
        let entry = self.objects.entry(index);
        let (generation, replicas) = (entry.generation, entry.replicas.as_slice().len());
        if !self.hot.rates.as_mut().is_some_and(|rates| rates.read(now, generation)) {
            return;
        }
        self.task_report.hot_gets_total += 1;
        for _ in 0..LOOKS_MAX {
            // Replicas that are gone are forgotten from the front, a few at a time.
            let Some((at, named, segment)) = self.hot.extras.pop_front() else { break };
            let entry = self.objects.entry(at);
            let mut replicas = entry.replicas.as_slice().iter();
            if entry.generation == named && replicas.any(|placed| placed.segment == segment) {
                self.hot.extras.push_back((at, named, segment));
                break;
            }
        }
        let config = self.config.replication;
        if config.mode != ReplicationMode::Enforce
            || replicas >= usize::from(config.replicas_max)
            || self.tasks.of_object(generation).next().is_some()
            || !self.hot.admit(now, config.tasks_per_s_max)
        {
            return;
        }
        // Nothing is evicted for an extra replica: without room there is none.
        let _ = self.add_task(now, Wish { index, source: None, target: None, cause: TaskCause::Hot });
    }

    /// Drops an extra replica that is not leased, of those whose place is useful; returns where it was, and
    /// its object's length.
    pub(super) fn shed_extra(
        &mut self,
        now: Instant,
        of_use: impl Fn(&Segments, &Placed) -> bool,
    ) -> Option<(Placed, u64)> {
        if self.has_unknown_leases(now) {
            return None;
        }
        for _ in 0..self.hot.extras.len().min(LOOKS_MAX) {
            let (index, generation, segment) = self.hot.extras.pop_front()?;
            let entry = self.objects.entry(index);
            let replicas = entry.replicas.as_slice();
            let extra = replicas.iter().find(|placed| placed.segment == segment);
            let Some(extra) =
                extra.filter(|_| entry.generation == generation && entry.is_complete() && replicas.len() > 1)
            else {
                continue;
            };
            if entry.is_leased(now) || !of_use(&self.segments, extra) {
                self.hot.extras.push_back((index, generation, segment));
                continue;
            }
            let len = entry.len;
            if let Some(placed) = self.objects.take_replica(index, segment) {
                self.segments.free(&placed);
                self.task_report.extras_shed_total += 1;
                return Some((placed, len));
            }
        }
        None
    }
}

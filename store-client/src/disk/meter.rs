//! Counts what the core does not count, and makes snapshots.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use store_core::disk::{Disk, Work};

use super::held::LentMemory;
use super::stats::{DiskStats, Times};

/// How often a snapshot is made: parts of it take time in proportion to the disk.
const STATS_EVERY: Duration = Duration::from_millis(100);

/// The kinds of operations.
#[derive(Clone, Copy)]
pub(super) enum OpKind {
    Read,
    Write,
    Sync,
}

impl OpKind {
    pub(super) const fn of(work: &Work) -> Self {
        match work {
            Work::Write(_) => Self::Write,
            Work::Read { .. } => Self::Read,
            Work::Sync => Self::Sync,
        }
    }
}

/// Figures that are not the core's.
pub(super) struct Meter {
    started: Instant,
    measured: Option<Instant>,
    /// Something has changed since the last snapshot.
    pub(super) dirty: bool,
    ordered: HashMap<u64, (OpKind, Instant)>,
    reads: Times,
    writes: Times,
    syncs: Times,
    recovery: Option<Duration>,
}

impl Meter {
    pub(super) fn new(started: Instant) -> Self {
        Self {
            started,
            measured: None,
            dirty: true,
            ordered: HashMap::new(),
            reads: Times::default(),
            writes: Times::default(),
            syncs: Times::default(),
            recovery: None,
        }
    }

    pub(super) fn begin(&mut self, op: u64, kind: OpKind) {
        self.ordered.insert(op, (kind, Instant::now()));
    }

    pub(super) fn end(&mut self, op: u64) {
        let Some((kind, at)) = self.ordered.remove(&op) else { return };
        let times = match kind {
            OpKind::Read => &mut self.reads,
            OpKind::Write => &mut self.writes,
            OpKind::Sync => &mut self.syncs,
        };
        times.add(at.elapsed());
    }

    pub(super) fn recovered(&mut self) {
        self.recovery.get_or_insert(self.started.elapsed());
    }

    pub(super) fn is_due(&self) -> bool {
        self.due_in() == Some(Duration::ZERO)
    }

    /// When the next snapshot is due; `None`: nothing has changed.
    pub(super) fn due_in(&self) -> Option<Duration> {
        let age = self.measured.map_or(STATS_EVERY, |at| at.elapsed());
        self.dirty.then(|| STATS_EVERY.saturating_sub(age))
    }

    pub(super) fn measure(&mut self, disk: &Disk, driver: &'static str, lent: &LentMemory) -> DiskStats {
        self.measured = Some(Instant::now());
        self.dirty = false;
        DiskStats {
            driver,
            state: disk.state(),
            uuid: *disk.uuid(),
            geometry: *disk.geometry(),
            counters: disk.counters(),
            written_bytes: disk.superblock().written_bytes,
            objects: disk.objects(),
            free_extents: disk.free_extents() as u64,
            bad_extents: disk.superblock().bad.len() as u64,
            tombstones: disk.tombstones() as u64,
            memory_bytes: disk.memory_bytes() as u64,
            in_flight: self.ordered.len() as u64,
            queue_bytes: lent.queue_bytes,
            staging_bytes: lent.staging_bytes,
            unsent_total: 0,
            reads: self.reads,
            writes: self.writes,
            syncs: self.syncs,
            recovery: self.recovery,
        }
    }
}

//! The parameters of a run, the rules that are broken on purpose, and what a run saw.

use store_core::disk::DiskConfig;
use te_core::testkit::Rng;

/// Rules that a party breaks on purpose: the simulation must notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lies(u32);

impl Lies {
    pub(crate) const NONE: Self = Self(0);
    /// The reader accepts what it read without looking at the checksum.
    pub(crate) const CHECKSUM: Self = Self(1);
    /// The master adopts what it is offered, whatever it knows about the key and the generation.
    pub(crate) const GENERATION: Self = Self(2);
    /// The driver completes writes of batches before a sync could make them durable: footers come first.
    pub(crate) const FOOTER: Self = Self(4);
    /// The driver answers for the master that an extent may be reused.
    pub(crate) const RECLAIM: Self = Self(8);
    /// The driver confirms a removal before the disk does.
    pub(crate) const TOMBSTONE: Self = Self(16);
    /// The driver announces what headers say before recovery has ended.
    pub(crate) const ADOPT: Self = Self(32);
    /// The driver takes a failed sync for a successful one.
    pub(crate) const SYNC: Self = Self(64);
    /// The driver takes a short write for a whole one.
    pub(crate) const SHORT: Self = Self(128);

    pub(crate) const fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }
}

/// The parameters of one run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) lies: Lies,
    /// Failed reads, failed writes, writes without space, per million.
    pub(crate) errors_ppm: [u32; 3],
    /// Failed syncs, per million.
    pub(crate) sync_errors_ppm: u32,
    /// Orders that do less than they should, that take long, and that take longer than any limit, per
    /// million.
    pub(crate) short_ppm: u32,
    pub(crate) slow_ppm: u32,
    pub(crate) stalled_ppm: u32,
    /// What a disk does not report, per million: syncs that do nothing, reads and writes at another place,
    /// and bits that flip while nothing is done to them.
    pub(crate) lost_syncs_ppm: u32,
    pub(crate) misdirected_ppm: u32,
    pub(crate) rot_ppm: u32,
    pub(crate) crashes: bool,
    pub(crate) ticks: u64,
}

impl Scenario {
    /// Everything that a disk may do which reports its errors and keeps what it has synced.
    pub(crate) const fn honest() -> Self {
        Self {
            lies: Lies::NONE,
            errors_ppm: [2_000, 1_500, 500],
            sync_errors_ppm: 4_000,
            short_ppm: 30_000,
            slow_ppm: 20_000,
            stalled_ppm: 500,
            lost_syncs_ppm: 0,
            misdirected_ppm: 0,
            rot_ppm: 0,
            crashes: true,
            ticks: 600,
        }
    }

    /// Everything that a disk may do.
    pub(crate) const fn lying() -> Self {
        Self { lost_syncs_ppm: 50_000, misdirected_ppm: 10_000, rot_ppm: 60_000, ..Self::honest() }
    }

    /// No faults.
    pub(crate) const fn calm() -> Self {
        Self {
            errors_ppm: [0; 3],
            sync_errors_ppm: 0,
            short_ppm: 0,
            slow_ppm: 0,
            stalled_ppm: 0,
            crashes: false,
            ..Self::honest()
        }
    }

    pub(crate) const fn with(self, lies: Lies) -> Self {
        Self { lies, ..self }
    }

    /// Whether the disk reports its errors and keeps what it has synced.
    pub(crate) const fn is_honest(&self) -> bool {
        self.lost_syncs_ppm == 0 && self.misdirected_ppm == 0 && self.rot_ppm == 0
    }

    /// The settings differ from one opening to the next, except for the limit of tombstones.
    pub(crate) fn config(rng: &mut Rng, few_tombstones: bool) -> DiskConfig {
        DiskConfig {
            batch_bytes: 16 << 10 << rng.below(3),
            batch_wait_ms: 3,
            batches_max: 1 + rng.below(3) as u32,
            queue_objects_max: 32,
            queue_bytes_max: 400 << 10,
            reads_max: 16,
            read_bytes_max: 1 << 20,
            sync_bytes: 200 << 10,
            sync_wait_ms: 20,
            free_extents: 2 + rng.below(2) as u32,
            tombstone_bytes_max: if few_tombstones { 500 } else { 64 << 10 },
            errors_max: 8,
            stall_ms: 60,
            ..DiskConfig::default()
        }
    }
}

/// What a run saw. Sums show that a suite of runs was not vacuous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) puts: u64,
    pub(crate) removes: u64,
    pub(crate) demoted: u64,
    pub(crate) demote_failed: u64,
    pub(crate) hits: u64,
    pub(crate) gone: u64,
    pub(crate) busy: u64,
    pub(crate) expired: u64,
    pub(crate) read_failed: u64,
    /// Bytes that did not verify.
    pub(crate) mismatches: u64,
    pub(crate) crashes: u64,
    pub(crate) power_losses: u64,
    pub(crate) adopted: u64,
    pub(crate) refused: u64,
    pub(crate) torn: u64,
    pub(crate) reclaimed: u64,
    pub(crate) forgotten: u64,
    pub(crate) dropped: u64,
    pub(crate) cleared: u64,
    pub(crate) distrusted: u64,
    pub(crate) read_only: u64,
    pub(crate) failed: u64,
    pub(crate) shorts: u64,
    pub(crate) stalls: u64,
    pub(crate) sync_errors: u64,
    pub(crate) syncs: u64,
    pub(crate) bad_extents: u64,
}

impl Report {
    pub(crate) fn plus(self, other: Self) -> Self {
        macro_rules! sum {
            ($($field:ident)*) => { Self { $($field: self.$field + other.$field),* } };
        }
        sum!(puts removes demoted demote_failed hits gone busy expired read_failed mismatches crashes
             power_losses adopted refused torn reclaimed forgotten dropped cleared distrusted read_only
             failed shorts stalls sync_errors syncs bad_extents)
    }
}

//! The parameters of a run, the faults that are injected on purpose, and what the run saw.

use std::time::Duration;

use store_core::chunks::{CHUNK_BYTES, stored_len};
use store_core::message::{EvictionReport, TaskReport};
use store_core::{
    AllocationStrategy, AllocatorKind, EvictionPolicy, MasterConfig, ReplicationConfig, ReplicationMode,
    Stats, TaskConfig, TenantConfig,
};
use te_core::sim::LinkConfig;
use te_core::testkit::Rng;

pub(crate) const NODES: usize = 3;
/// The last one is [`CHILD`].
pub(crate) const CLIENTS: usize = 6;
/// A client that exists only for a while: forked from one of the others.
pub(crate) const CHILD: usize = CLIENTS - 1;
/// All have the same keys. The first has a quota, the second a guarantee, the third takes what is left.
pub(crate) const TENANTS: [&str; 3] = ["a", "b", "c"];
/// The tenant of each client. Those of the first tenant fork.
const TENANT_OF: [usize; CLIENTS] = [0, 0, 1, 1, 2, 0];
/// Longest time after which a write with an unknown outcome may land, and a little more.
pub(crate) const LATE_MAX: Duration = Duration::from_secs(61);
pub(crate) const CALL_TIMEOUT: Duration = Duration::from_millis(800);
pub(crate) const OPERATION_MAX: Duration = Duration::from_secs(30);
/// Objects of one chunk are shorter than this.
const SMALL_BYTES_MAX: u64 = 3_000;

/// Rules that a party breaks on purpose: the simulation must notice.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Lies(u64);

impl Lies {
    pub(crate) const NONE: Self = Self(0);
    /// Reports the committed checksum for every read.
    pub(crate) const CHECKSUM: Self = Self(1);
    /// Never reads the clock again after a request.
    pub(crate) const CLOCK: Self = Self(2);
    /// Reports that fences held without requesting any.
    pub(crate) const FENCE: Self = Self(4);
    /// Treats a write that may still land as one that was applied.
    pub(crate) const OUTCOME: Self = Self(8);
    /// Reports that a put or a remove was done when it got no response, or failed.
    pub(crate) const ANSWER: Self = Self(16);
    /// Returns what it has read before without another request.
    pub(crate) const CACHE: Self = Self(32);
    /// Some clients greet the master as another tenant.
    pub(crate) const TENANT: Self = Self(64);
    /// Accepts the chunks of a part without comparing them with the trailer.
    pub(crate) const TRAILER: Self = Self(128);
    /// A node reports the committed checksum for its copy without verifying it.
    pub(crate) const VERIFY: Self = Self(256);
    /// A node reports a place as quiet into which its read may still write.
    pub(crate) const QUIET: Self = Self(512);
    /// A node reads again into a place whose end it has reported, because the response was lost.
    pub(crate) const AGAIN: Self = Self(1024);
    /// A node reports that it has cut off a writer, and has not.
    pub(crate) const EXPEL: Self = Self(1 << 11);
    /// The driver of the master reports in the nodes' name that writers are cut off: they have had time
    /// enough.
    pub(crate) const TIME: Self = Self(1 << 12);
    /// A forked process continues with its parent's connection and engine.
    pub(crate) const TWIN: Self = Self(1 << 13);
    /// Intruders know the handles of puts.
    pub(crate) const HANDLE: Self = Self(1 << 14);
    /// Intruders know the keys of nodes.
    pub(crate) const KEY: Self = Self(1 << 15);
    /// A node uses its wall clock alone, whatever the master responds about incarnations.
    pub(crate) const WALL: Self = Self(1 << 16);
    /// Room is made for an impossible put.
    pub(crate) const WISH: Self = Self(1 << 17);
    /// The master's clock counts the time in which it was stopped.
    pub(crate) const PAUSE: Self = Self(1 << 18);
    /// Takes the first page of a listing for all of it.
    pub(crate) const PAGE: Self = Self(1 << 19);
    /// Shows the keys of the previous listing in the next one as well.
    pub(crate) const FORMER: Self = Self(1 << 20);
    /// Reports that many objects were removed when it got no response.
    pub(crate) const SWEEP: Self = Self(1 << 21);
    /// The driver of the master removes another object as well when many objects are removed.
    pub(crate) const BROOM: Self = Self(1 << 22);
    /// The driver of the master passes removals of many on with force.
    pub(crate) const SPARE: Self = Self(1 << 25);
    /// The driver of the master clears another replica besides the requested one.
    pub(crate) const CLEAR: Self = Self(1 << 23);
    /// The operator sets the limits of a tenant, and takes them back.
    pub(crate) const QUOTA: Self = Self(1 << 24);
    /// The driver of the master removes an object when an upsert of it begins: its space could be used.
    pub(crate) const IN_PLACE: Self = Self(1 << 26);
    /// The driver of the master removes an object when an upsert of it is revoked.
    pub(crate) const UNDONE: Self = Self(1 << 27);
    /// The driver of the master returns the leases of all readers when an upsert is committed: what they read
    /// is old.
    pub(crate) const RECALL: Self = Self(1 << 28);
    /// The driver of the master returns the lease of a client that wanted to know whether an object
    /// exists: it does not read.
    pub(crate) const GLANCE: Self = Self(1 << 29);
    /// The driver of the master changes nothing when an object is to be pinned for good.
    pub(crate) const UNPINNED: Self = Self(1 << 30);
    /// Leaves ranges of an open put out, and commits it as if they were written.
    pub(crate) const HOLE: Self = Self(1 << 31);
    /// Does not write into the command log which objects were leased.
    pub(crate) const UNTOUCHED: Self = Self(1 << 32);
    /// Does not write into the command log when timeouts were handled.
    pub(crate) const UNTIMED: Self = Self(1 << 33);
    /// Does not write into the command log that connections have ended.
    pub(crate) const UNENDED: Self = Self(1 << 34);

    pub(crate) fn contains(self, other: Self) -> bool {
        self.0 & other.0 == other.0
    }

    pub(crate) fn and(self, other: Self) -> Self {
        Self(self.0 | other.0)
    }
}

/// The parameters of one run.
#[derive(Clone, Debug)]
pub(crate) struct Scenario {
    pub(crate) master: MasterConfig,
    pub(crate) link: LinkConfig,
    /// Crashes, partitions, stops and silences.
    pub(crate) faults: bool,
    /// Messages lost, doubled and slow, per million; how slow, ms.
    pub(crate) calls: (u32, u32, u32, u64),
    pub(crate) segment_bytes: u64,
    pub(crate) object_bytes_max: u64,
    pub(crate) keys: u64,
    /// Of a hundred puts, how many replace.
    pub(crate) upserts_pct: u64,
    /// Of a hundred puts, how many are written range by range.
    pub(crate) sessions_pct: u64,
    pub(crate) busy: Duration,
    pub(crate) lies: Lies,
    /// Judge only what readers see, not which ranges are allocated.
    pub(crate) blind: bool,
    /// Objects have pins, groups and times to live.
    pub(crate) retention: bool,
    /// Every process has its own clock, which drifts and jumps.
    pub(crate) clocks: bool,
    /// Largest jump of the master's clock, ms. Not more than the lease's guard covers.
    pub(crate) jump_ms: u64,
    /// Replicas are copied and moved, and segments drained.
    pub(crate) tasks: bool,
    /// Bytes of committed replicas flip in a node's memory.
    pub(crate) flips: bool,
    /// The seed chooses quotas, replication, limits, and whether objects are long.
    pub(crate) variety: bool,
    /// Intruders guess handles, take names and request the impossible, as often as there are faults.
    pub(crate) intruders: bool,
    /// The limits of tenants are changed while they use the store.
    pub(crate) settings: bool,
    /// All processes are stopped from time to time, and continue in any order: the longest time between two
    /// of them.
    pub(crate) standstills: Option<Duration>,
    /// Writes during which a writer is stopped, per million.
    pub(crate) stops_ppm: u32,
    /// Length of the interval in the middle of the run in which no party begins anything; writers that were
    /// stopped before continue after it.
    pub(crate) night: Option<Duration>,
}

impl Scenario {
    /// All faults.
    pub(crate) fn stormy() -> Self {
        Self {
            master: MasterConfig {
                lease_ttl_ms: 200,
                lease_guard_ms: 10,
                put_start_discard_timeout_ms: 2_000,
                put_start_release_timeout_ms: 70_000,
                node_ttl_ms: 2_000,
                eviction_high_watermark: 0.9,
                eviction_ratio: 0.1,
                soft_pin_ttl_ms: 3_000,
                hard_pin_share_max: 0.2,
                multi_tenants: true,
                tenants: TENANTS.map(|name| TenantConfig { name: name.into(), ..Default::default() }).into(),
                tasks: TaskConfig {
                    pending_timeout_ms: 8_000,
                    processing_timeout_ms: 3_000,
                    drain_moves_max: 6,
                    per_node_max: 4,
                    finished_max: 256,
                    ..TaskConfig::default()
                },
                ..MasterConfig::default()
            },
            link: LinkConfig::STORMY,
            faults: true,
            calls: (50_000, 50_000, 30_000, 3_000),
            segment_bytes: 40 * 1024,
            object_bytes_max: SMALL_BYTES_MAX,
            keys: 64,
            upserts_pct: 25,
            sessions_pct: 8,
            busy: Duration::from_secs(44),
            lies: Lies::NONE,
            blind: false,
            retention: true,
            clocks: true,
            jump_ms: 5,
            tasks: true,
            flips: true,
            variety: true,
            intruders: true,
            settings: true,
            standstills: None,
            stops_ppm: 8_000,
            night: None,
        }
    }

    /// No faults, and room for everything.
    pub(crate) fn calm() -> Self {
        let stormy = Self::stormy();
        Self {
            link: LinkConfig::CALM,
            faults: false,
            calls: (0, 0, 0, 0),
            segment_bytes: 4 << 20,
            busy: Duration::from_secs(10),
            retention: false,
            clocks: false,
            flips: false,
            variety: false,
            intruders: false,
            settings: false,
            ..stormy
        }
    }

    /// No faults, except that all processes are stopped from time to time, longer than a node may be silent.
    pub(crate) fn standing_still() -> Self {
        let calm = Self::calm();
        Self {
            // The process that continues last is heard of in time.
            master: MasterConfig { node_ttl_ms: 5_000, ..calm.master },
            standstills: Some(Duration::from_secs(1)),
            busy: Duration::from_secs(60),
            clocks: true,
            ..calm
        }
    }

    /// Writers are stopped, and continue when every timeout has passed.
    pub(crate) fn nightly(night: Duration) -> Self {
        Self { night: Some(night), stops_ppm: 40_000, busy: Duration::from_secs(30), ..Self::stormy() }
    }

    /// No bytes flip, and objects are short.
    pub(crate) fn without_flips(self) -> Self {
        Self { flips: false, ..self }
    }

    /// What the seed decides.
    pub(crate) fn vary(&mut self, seed: u64) {
        let config = &mut self.master;
        config.hash_seed = seed;
        config.handle_key = [seed.wrapping_mul(0x9e37_79b9_7f4a_7c15), !seed];
        config.eviction = EvictionPolicy::ALL[seed as usize % EvictionPolicy::ALL.len()];
        config.allocator = AllocatorKind::ALL[seed as usize / 4 % 2];
        config.allocation_strategy = AllocationStrategy::ALL[seed as usize / 8 % 2];
        if !self.variety {
            return;
        }
        let mut rng = Rng::new(seed ^ 0x7a51);
        let one_in = |rng: &mut Rng, n: u64| rng.below(n) == 0;
        if one_in(&mut rng, 4) {
            self.long_objects();
        }
        if one_in(&mut rng, 8) && self.night.is_none() {
            self.night = Some(Duration::from_secs(80 + rng.below(60)));
        }
        let config = &mut self.master;
        config.tasks.bad_reports_min = 1 + rng.below(2) as u32;
        config.replicas_max = 2 + rng.below(2) as u8;
        if one_in(&mut rng, 2) {
            let mode = if one_in(&mut rng, 4) { ReplicationMode::Observe } else { ReplicationMode::Enforce };
            config.replication = ReplicationConfig {
                mode,
                gets_per_s_min: 3.0,
                window_ms: 1_000,
                replicas_max: 3,
                tasks_per_s_max: 4,
            };
        }
        if !one_in(&mut rng, 4) {
            let all = self.segment_bytes * NODES as u64;
            config.tenants[0].quota_bytes = Some(all / 4);
            config.tenants[0].quota_objects = one_in(&mut rng, 2).then_some(20);
            config.tenants[1].guaranteed_bytes = all / 4;
        }
    }

    /// Objects of several chunks, which have a trailer.
    pub(crate) fn long_objects(&mut self) {
        self.object_bytes_max = 3 * CHUNK_BYTES;
        self.segment_bytes = 16 * CHUNK_BYTES;
    }

    /// The length of a new object.
    pub(crate) fn random_len(&self, rng: &mut Rng) -> u64 {
        if self.object_bytes_max > SMALL_BYTES_MAX && rng.below(2) == 0 {
            CHUNK_BYTES / 2 + rng.below(self.object_bytes_max - CHUNK_BYTES / 2) + 1
        } else {
            1 + rng.below(SMALL_BYTES_MAX)
        }
    }

    /// Bytes that the longest object takes.
    pub(crate) fn slot_bytes(&self) -> u64 {
        stored_len(self.object_bytes_max)
    }
}

/// The tenant of a client, as an index of [`TENANTS`].
pub(crate) const fn tenant_of(client: usize) -> usize {
    TENANT_OF[client]
}

/// A key with its tenant.
pub(crate) fn full_key(tenant: usize, key: &[u8]) -> Vec<u8> {
    [TENANTS[tenant].as_bytes(), b"/", key].concat()
}

/// The tenant of a key, and the key.
pub(crate) fn split_key(key: &[u8]) -> (usize, &[u8]) {
    let tenant = TENANTS.iter().position(|name| key.starts_with(name.as_bytes())).unwrap_or(0);
    (tenant, &key[TENANTS[tenant].len() + 1..])
}

/// What a run saw. Sums show that a suite of runs was not vacuous.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    /// Objects put with a pin, a time to live or a group.
    pub(crate) retained: u64,
    pub(crate) eviction: EvictionReport,
    pub(crate) gets: u64,
    pub(crate) hits: u64,
    /// Of these, parts of objects; and of those, parts of objects of several chunks.
    pub(crate) parts: u64,
    pub(crate) parts_of_many: u64,
    pub(crate) failed_reads: u64,
    pub(crate) lease_expired: u64,
    pub(crate) mismatches: u64,
    /// Bytes flipped, and reports of bad replicas.
    pub(crate) flips: u64,
    pub(crate) reported_bad: u64,
    pub(crate) puts: u64,
    /// Of these, upserts.
    pub(crate) upserts: u64,
    /// Of these, those that were written range by range.
    pub(crate) sessions: u64,
    /// Puts that were opened to be written range by range.
    pub(crate) opened: u64,
    pub(crate) failed_puts: u64,
    pub(crate) removes: u64,
    pub(crate) unknown_writes: u64,
    pub(crate) landed_late: u64,
    pub(crate) fences: u64,
    pub(crate) crashes: u64,
    /// Writers that nodes cut off, and how often one that continues was told.
    pub(crate) expelled: u64,
    pub(crate) turned_away: u64,
    /// Processes that were forked; writers that were stopped during a write, and of these through a night.
    pub(crate) forks: u64,
    pub(crate) paused: u64,
    pub(crate) slept: u64,
    /// Times that all processes were stopped, the master included.
    pub(crate) standstills: u64,
    /// Guessed handles of unfinished puts; tries to take names of live nodes, and of others; impossible puts
    /// while there was something to evict.
    pub(crate) guesses: u64,
    pub(crate) thefts: u64,
    pub(crate) successions: u64,
    pub(crate) wishes: u64,
    /// Clocks that were set back over a restart, and mounts that were refused because of them.
    pub(crate) set_back: u64,
    pub(crate) stale: u64,
    pub(crate) master_restarts: u64,
    /// How often all state of the standby was compared with that of the master.
    pub(crate) compared: u64,
    /// How often it was replaced by one that was restored from a snapshot.
    pub(crate) snapshots: u64,
    /// Bytes of the command log.
    pub(crate) log_bytes: u64,
    pub(crate) remounts: u64,
    /// Processes stopped for a while, partitions in one direction, and clocks that jumped.
    pub(crate) stops: u64,
    pub(crate) partitions: u64,
    pub(crate) jumps: u64,
    /// Operations whose history was checked, and objects that the store lost by itself.
    pub(crate) recorded: u64,
    pub(crate) losses: u64,
    /// Orders that nodes were given, replicas that were made, moves among them, reads that were given up
    /// while they could still write, orders that were repeated after their end was reported, and nodes that
    /// died during a copy.
    pub(crate) orders: u64,
    pub(crate) copies: u64,
    pub(crate) moves: u64,
    pub(crate) given_up: u64,
    pub(crate) reported_again: u64,
    pub(crate) died_copying: u64,
    /// Segments that were to be drained, that were drained, and that were unmounted after that.
    pub(crate) drains: u64,
    pub(crate) drained: u64,
    pub(crate) left: u64,
    /// Recounts.
    pub(crate) audits: u64,
    /// Puts that a quota refused, and requests about tasks of other tenants.
    pub(crate) refused: u64,
    pub(crate) foreign: u64,
    /// Listings, and readable keys that they showed; successful removals of many, and objects that they
    /// removed.
    pub(crate) listings: u64,
    pub(crate) listed: u64,
    pub(crate) sweeps: u64,
    pub(crate) swept: u64,
    /// Objects that removals of many left because they were leased.
    pub(crate) spared: u64,
    /// Objects that were said to exist with a lease.
    pub(crate) promised: u64,
    /// Objects that were pinned for good after their put.
    pub(crate) pinned: u64,
    /// Replicas that were cleared, and objects without another one.
    pub(crate) cleared: u64,
    pub(crate) cleared_last: u64,
    /// Changes of tenants' limits, and of these, to less than the tenant had.
    pub(crate) settings: u64,
    pub(crate) lowered: u64,
    pub(crate) stats: Stats,
    pub(crate) tasks: TaskReport,
}

impl Report {
    /// The sum of two reports; of the master's counters only what the suite checks.
    pub(crate) fn plus(mut self, other: &Self) -> Self {
        macro_rules! add {
            ($($($field:ident).+),* $(,)?) => { $(self.$($field).+ += other.$($field).+;)* };
        }
        add!(gets, hits, parts, parts_of_many, failed_reads, lease_expired, mismatches, flips, reported_bad);
        add!(
            puts,
            upserts,
            sessions,
            opened,
            failed_puts,
            removes,
            unknown_writes,
            landed_late,
            fences,
            crashes,
            master_restarts,
            compared,
            snapshots,
            log_bytes
        );
        add!(remounts, stops, partitions, jumps, recorded, losses, retained);
        add!(orders, copies, moves, given_up, reported_again, died_copying, drains, drained, left);
        add!(audits, refused, foreign, expelled, stats.leases_returned_total);
        add!(turned_away, forks, paused, slept, standstills, guesses, thefts, successions, wishes);
        add!(set_back, stale);
        add!(
            listings,
            listed,
            sweeps,
            swept,
            spared,
            cleared,
            cleared_last,
            settings,
            lowered,
            promised,
            pinned
        );
        add!(eviction.groups_evicted_total, eviction.expired_total, eviction.soft_pins_decayed_total);
        add!(eviction.kept_leased_total);
        add!(stats.puts_abandoned_total, stats.evictions_total, stats.nodes_expired_total);
        add!(stats.objects_replaced_total);
        add!(tasks.created_total, tasks.done_total, tasks.failed_total, tasks.canceled_total);
        add!(tasks.retried_total, tasks.extras_shed_total, tasks.bad_reports_total, tasks.bad_dropped_total);
        add!(tasks.hot_gets_total);
        self
    }
}

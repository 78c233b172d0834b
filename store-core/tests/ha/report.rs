//! Rules that are broken on purpose, what must not be seen, and what was seen.

/// A rule that is broken on purpose.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Lies(u8);

impl Lies {
    pub(crate) const NONE: Self = Self(0);
    /// Members acknowledge what they do not have.
    pub(crate) const ACKED_BEFORE: Self = Self(1);
    /// A leader that asks for a smaller record is told that it has it.
    pub(crate) const DROPPED_BEFORE: Self = Self(2);
    /// Each member reads a record that names it alone as in sync.
    pub(crate) const TRUSTED: Self = Self(3);
    /// The leader hears of beats that no member has acknowledged.
    pub(crate) const LEASED: Self = Self(4);
    /// A swap whose answer is lost counts as done.
    pub(crate) const SWAP_WON: Self = Self(5);
    /// What a member has acknowledged last is acknowledged once more after it has promised.
    pub(crate) const PROMISE: Self = Self(6);
    /// A member acknowledges commands of an earlier reign than the one that it follows.
    pub(crate) const TERM: Self = Self(7);
    /// Followers are sent other gets than there were.
    pub(crate) const UNTOUCHED: Self = Self(9);
    /// A leader that takes over does not know which removals the nodes have not confirmed.
    pub(crate) const TOMBSTONES: Self = Self(10);
    /// Nodes give extents up, and write others there, before the leader knows.
    pub(crate) const REUSED: Self = Self(11);
    /// Processes of different hosts state the same lock domain.
    pub(crate) const ONE_DOMAIN: Self = Self(12);
    /// Processes do not tell the master what they find in a pool.
    pub(crate) const UNTOLD: Self = Self(13);
}

#[derive(Debug)]
#[allow(dead_code, reason = "printed")]
pub(crate) enum Violation {
    /// Nothing explains a response.
    NotLinearizable(String),
    /// An earlier reign answered after a later one.
    TwoReigns(String),
    /// A follower is not as its leader.
    Diverged(String),
    /// A follower outside of the store was told something else than what is there.
    Told(String),
    /// Space was given out that a reader may read.
    GivenWhileLeased(String),
    /// A member has given up state that the record names.
    GivenUp(String),
    /// The node was told to mount again, though the lineage is the same.
    Forgotten(String),
    /// A disk has other bytes than the leader says.
    OtherBytes(String),
    /// A disk has an object that the leader does not find.
    NotFound(String),
    /// A process was given what another one can write.
    PoolShared(String),
    /// More is kept than may be.
    Unbounded(String),
    /// The end is not as it must be.
    NotHealed(String),
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub(crate) struct Report {
    pub(crate) puts: u64,
    pub(crate) hits: u64,
    pub(crate) misses: u64,
    pub(crate) removes: u64,
    pub(crate) repeated: u64,
    pub(crate) crashes: u64,
    pub(crate) stops: u64,
    pub(crate) cuts: u64,
    pub(crate) takeovers: u64,
    pub(crate) lineages: u64,
    pub(crate) deposed: u64,
    pub(crate) joins: u64,
    pub(crate) swaps: u64,
    pub(crate) unknown_swaps: u64,
    pub(crate) compared: u64,
    /// Events that followers outside of the store were told.
    pub(crate) told: u64,
    pub(crate) snapshots: u64,
    pub(crate) loaded: u64,
    pub(crate) diverged: u64,
    pub(crate) chunks_lost: u64,
    pub(crate) behind: u64,
    pub(crate) switchovers: u64,
    pub(crate) switched: u64,
    pub(crate) disk_hits: u64,
    pub(crate) demoted: u64,
    pub(crate) adopted: u64,
    pub(crate) reclaimed: u64,
    pub(crate) forgotten: u64,
    pub(crate) cleared: u64,
    pub(crate) promoted: u64,
    pub(crate) node_crashes: u64,
    pub(crate) found: u64,
    pub(crate) prefetches: u64,
    pub(crate) pool_pages: u64,
    pub(crate) pool_extents: u64,
    pub(crate) pool_deaths: u64,
    pub(crate) pool_held: u64,
    pub(crate) pool_full: u64,
    pub(crate) pool_contested: u64,
    /// Requests about a pool with what was read under another lineage.
    pub(crate) pool_refused: u64,
}

impl Report {
    pub(crate) fn add(&mut self, other: &Self) {
        macro_rules! add {
            ($($field:ident),* $(,)?) => { $(self.$field += other.$field;)* };
        }
        add!(
            puts, hits, misses, removes, repeated, crashes, stops, cuts, takeovers, lineages, deposed, joins
        );
        add!(swaps, unknown_swaps, compared, told, snapshots, loaded, diverged, chunks_lost, behind);
        add!(switchovers, switched, disk_hits, demoted, adopted, reclaimed, forgotten, cleared);
        add!(promoted, node_crashes, found, prefetches);
        add!(pool_pages, pool_extents, pool_deaths, pool_held, pool_full, pool_contested, pool_refused);
    }
}

//! KV events: which objects a reader finds, told to followers outside of the store (routers, schedulers).
//!
//! ```text
//!   Master ── keys whose objects changed ──▶ KvEvents ── what is different from what was told ──▶ follower
//!      │                                        ▲  tells: hash of the key ─▶ tiers
//!      └───────── every object, in pages ───────┘  (the beginning, and followers that come late)
//! ```
//!
//! The master notes the key of every object whose answer to a get may have changed. [`KvEvents`] compares
//! where the object is now with what was told of it before, and tells the difference. Nothing depends on
//! which request caused a change, so no path through the master can be forgotten, and an object that changed
//! there and back is not told at all.
//!
//! One value is one *epoch*: what a master that has become leader, or that was restarted, has told. A
//! follower of a new epoch forgets everything, and is told everything ([`KvEvents::scan`]).

use core::fmt;

use foldhash::quality::FixedState;
use hashbrown::HashMap;

use crate::master::Master;

/// A tier of the store.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub enum KvTier {
    /// Memory of a node.
    Memory,
    /// A disk of a node, or a shared bucket.
    Disk,
}

/// What a follower is told.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvEvent<'a> {
    /// The name of the tenant that the object belongs to.
    pub tenant: &'a str,
    /// The object's key.
    pub key: &'a [u8],
    /// The tier.
    pub tier: KvTier,
    /// Whether a reader finds the object there from now on; else it does not find it there any more.
    pub stored: bool,
}

/// Changes were lost: a tenant was removed, or too many objects changed at once. The epoch has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct KvEventsLost;

impl fmt::Display for KvEventsLost {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("changes of objects were lost: begin a new epoch, and tell every object")
    }
}

impl core::error::Error for KvEventsLost {}

/// The tiers on which an object is found.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Tiers {
    pub(crate) memory: bool,
    pub(crate) disk: bool,
}

impl Tiers {
    const NONE: Self = Self { memory: false, disk: false };

    const fn has(self, tier: KvTier) -> bool {
        match tier {
            KvTier::Memory => self.memory,
            KvTier::Disk => self.disk,
        }
    }
}

/// What was told in this epoch. About 20 bytes per object.
pub struct KvEvents {
    told: HashMap<u64, Tiers, FixedState>,
}

impl KvEvents {
    /// Begins an epoch: nothing was told yet. From here on the master notes which objects change; what
    /// another value has not taken yet is forgotten.
    #[must_use]
    pub fn new(master: &mut Master) -> Self {
        master.note_changed_keys();
        Self { told: HashMap::with_hasher(FixedState::default()) }
    }

    /// Number of objects of which the last that was told is that they are found.
    #[must_use]
    pub fn len(&self) -> usize {
        self.told.len()
    }

    /// Whether no object is found, as far as was told.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.told.is_empty()
    }

    /// Calls `each` with what has changed since the last call. Call it after each turn of the master: the
    /// keys that changed wait for it, up to 64 MiB.
    ///
    /// # Errors
    /// The epoch has ended. `each` was not called.
    pub fn drain(
        &mut self,
        master: &mut Master,
        mut each: impl FnMut(KvEvent<'_>),
    ) -> Result<(), KvEventsLost> {
        let Some(keys) = master.take_changed_keys().filter(|keys| !keys.is_lost()) else {
            return Err(KvEventsLost);
        };
        for key in keys.iter() {
            let now = master.tiers_of(key);
            let hash = master.hash_of(key);
            let before =
                if now == Tiers::NONE { self.told.remove(&hash) } else { self.told.insert(hash, now) };
            let before = before.unwrap_or(Tiers::NONE);
            if before == now {
                continue;
            }
            let Some(tenant) = master.tenant_name(key.tenant) else { return Err(KvEventsLost) };
            for tier in [KvTier::Memory, KvTier::Disk] {
                if before.has(tier) != now.has(tier) {
                    each(KvEvent { tenant, key: key.key, tier, stored: now.has(tier) });
                }
            }
        }
        master.give_back_changed_keys(keys);
        Ok(())
    }

    /// Calls `each` with every object of a page; returns the cursor of the next page, 0 at the end. Begin
    /// with 0. A page looks at a limited number of objects and may be empty. Objects that change between two
    /// pages are told by [`Self::drain`].
    pub fn scan(&mut self, master: &Master, cursor: u64, mut each: impl FnMut(KvEvent<'_>)) -> u64 {
        master.scan_keys(cursor, |key| {
            let (now, tenant) = (master.tiers_of(key), master.tenant_name(key.tenant));
            let Some(tenant) = tenant.filter(|_| now != Tiers::NONE) else { return };
            self.told.insert(master.hash_of(key), now);
            for tier in [KvTier::Memory, KvTier::Disk].into_iter().filter(|tier| now.has(*tier)) {
                each(KvEvent { tenant, key: key.key, tier, stored: true });
            }
        })
    }
}

impl fmt::Debug for KvEvents {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("KvEvents").field("told", &self.told.len()).finish()
    }
}

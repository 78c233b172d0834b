//! Pools of CXL memory: which process owns which extents, and which page each peer writes.
//!
//! A process that has extents or a page can write the pool, and no order of the master stops it: a store of
//! a CPU cannot be fenced, and time proves nothing. So what a process had is given to another one only with a
//! proof that it has ended:
//!
//! ```text
//!   it said so             ReleaseExtents
//!   the kernel says so     the other process has the same lock domain, and holds the lock that it held
//!   an operator says so    `takeover`, FreePage
//! ```
//!
//! The lock is the process' own matter: the master compares lock domains and believes what it is told, as it
//! believes a node's exports. Epochs grow over all extents and pages of a pool. A master that has lost its
//! state is told the epochs that are in the pool, and which pages have a record there: a page whose record
//! says that its process uses it no more is free, and so is one whose record names the lock domain of the
//! process that asks, if no process holds the lock on it. What a process found
//! there counts for the lineage of the master under which it looked: another lineage may have given the same
//! to another process since.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, BTreeSet};
use alloc::vec::Vec;
use core::time::Duration;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::message::{
    ExtentsReleased, ExtentsWanted, POOL_EPOCHS_AHEAD, POOL_PAGES_MAX, PageFound, PageFreed, PageWanted,
};
use crate::{ErrorCode, NodeId, TenantNo};

/// Limit on pools.
const POOLS_MAX: usize = 64;
/// Limit on ranges of extents of one pool.
const RANGES_MAX: usize = 4_096;
/// A page that was given in this time is not offered to another process of the same lock domain, unless there
/// is no other: the process may be about to lock it.
const SETTLES: Duration = Duration::from_secs(5);

/// The name of a pool.
pub(crate) type PoolName = [u8; 16];

/// Extents of one process.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Range {
    pub(crate) first: u32,
    pub(crate) count: u32,
    pub(crate) node: NodeId,
    pub(crate) key: u64,
    pub(crate) name: Box<str>,
    incarnation: u64,
    domain: u64,
    pub(crate) epoch: u64,
    /// The highest epoch that the pool had when it was asked for.
    above: u64,
}

impl Range {
    const fn end(&self) -> u64 {
        self.first as u64 + self.count as u64
    }

    /// Whether what the asker, whose range it is, has found in the pool shows no owner since. A later epoch
    /// is one that another lineage of the master has given. So is one of which this master was not told,
    /// unless it is that of the range: it was written late.
    const fn is_latest(&self, wanted: &ExtentsWanted<'_>) -> bool {
        let known = wanted.above <= self.above || wanted.above == self.epoch;
        self.epoch >= wanted.above && (known || !wanted.owned_elsewhere || wanted.takeover)
    }

    /// The part from `first` to `end`, if it is not empty.
    fn part(&self, first: u64, end: u64) -> Option<Self> {
        let (first, end) = (first.max(self.first.into()), end.min(self.end()));
        let count = end.checked_sub(first).filter(|count| *count > 0)?;
        Some(Self { first: first as u32, count: count as u32, ..self.clone() })
    }
}

/// A page that a process has, or had.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Page {
    /// 0: unknown.
    pub(crate) identity: u64,
    domain: u64,
    pub(crate) epoch: u64,
    given: Instant,
    /// Its process has given it back, or an operator says that the process has ended.
    pub(crate) free: bool,
    by: Taker,
}

/// Over which connection a page was given: limits of the master count by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Taker {
    /// The tenant; `None`: a node, or unknown.
    pub(crate) tenant: Option<TenantNo>,
    /// The number of the connection; 0: unknown.
    pub(crate) session: u64,
}

/// Most pages of one pool.
#[derive(Clone, Copy, Debug)]
pub(crate) struct PageLimits {
    pub(crate) of_session: u32,
    pub(crate) of_tenant: u32,
}

/// Why no page was given.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum NoPage {
    /// With the number of pages that belong to other lock domains.
    Full(u32),
    /// The connection, or its tenant, has as many as it may have.
    Limited { of_connection: bool, pages_max: u32 },
}

/// One pool.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Pool {
    /// The highest epoch that was given, or was found in the pool.
    epoch: u64,
    /// Sorted, without overlaps.
    pub(crate) ranges: Vec<Range>,
    pub(crate) pages: BTreeMap<u32, Page>,
}

/// What became of a wish for extents.
#[derive(Debug)]
pub(crate) enum Claimed {
    /// With the processes that have lost extents.
    Given { epoch: u64, losers: Vec<(NodeId, u64)> },
    /// By this range; `None`: by a process that is unknown here.
    Held(Option<Range>),
}

/// All pools that were named.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Pools {
    pub(crate) map: BTreeMap<PoolName, Pool>,
    /// The highest epoch of the pools that were forgotten: what was given may not be in the pool yet.
    floor: u64,
}

impl Pools {
    /// The pool with this name, which is new if it was not named before. Epochs begin after that of the
    /// master, `epoch`, and after those of pools that were forgotten. For a new one, a pool without owners is
    /// forgotten if there are too many: what is known of its pages is in its records as well.
    ///
    /// # Errors
    /// `KeysUltraLimit`.
    fn named(&mut self, name: PoolName, epoch: u32) -> Result<&mut Pool, ErrorCode> {
        if self.map.len() >= POOLS_MAX && !self.map.contains_key(&name) {
            let unowned = self.map.iter().find(|(_, pool)| pool.ranges.is_empty()).map(|(name, _)| *name);
            let forgotten = self.map.remove(&unowned.ok_or(ErrorCode::KeysUltraLimit)?);
            self.floor = self.floor.max(forgotten.map_or(0, |pool| pool.epoch));
        }
        let epoch = self.floor.max(u64::from(epoch) << 31);
        Ok(self.map.entry(name).or_insert_with(|| Pool { epoch, ..Pool::default() }))
    }

    /// The highest epoch that a request may state: what was given by this master, or what one could have
    /// given whose epoch was ahead of this one's for the clocks' sake. So no request uses up the epochs.
    fn stated_max(&self, name: PoolName, epoch: u32) -> u64 {
        let known = self.map.get(&name).map_or(self.floor, |pool| pool.epoch);
        known.max((u64::from(epoch) + POOL_EPOCHS_AHEAD) << 31)
    }

    /// Gives extents to a node, or says who has them.
    ///
    /// # Errors
    /// `InvalidParams`, `KeysUltraLimit`.
    pub(crate) fn claim(&mut self, wanted: &ExtentsWanted<'_>, epoch: u32) -> Result<Claimed, ErrorCode> {
        let ExtentsWanted { pool, first, count, above, .. } = *wanted;
        if count == 0 || first.checked_add(count).is_none() || above > self.stated_max(pool, epoch) {
            return Err(ErrorCode::InvalidParams);
        }
        self.named(pool, epoch)?.claim(wanted)
    }

    /// Takes extents back from a node.
    ///
    /// # Errors
    /// `SegmentNotFound`: they are not the node's, in this epoch.
    pub(crate) fn release(&mut self, released: &ExtentsReleased) -> Result<(), ErrorCode> {
        let ExtentsReleased { node, key, pool, first, count, epoch } = *released;
        let pool = self.map.get_mut(&pool).ok_or(ErrorCode::SegmentNotFound)?;
        let is_it = |range: &Range| {
            (range.node, range.key, range.first, range.count, range.epoch) == (node, key, first, count, epoch)
        };
        let at = pool.ranges.iter().position(is_it).ok_or(ErrorCode::SegmentNotFound)?;
        pool.ranges.remove(at);
        Ok(())
    }

    /// Gives a page to a process.
    ///
    /// # Errors
    /// `InvalidParams`, `KeysUltraLimit`.
    pub(crate) fn take_page(
        &mut self,
        now: Instant,
        wanted: &PageWanted,
        found: impl Iterator<Item = PageFound>,
        epoch: u32,
        (by, limits): (Taker, PageLimits),
    ) -> Result<Result<(u32, u64), NoPage>, ErrorCode> {
        let PageWanted { pool, pages, identity, .. } = *wanted;
        let found: Vec<_> = found.take(POOL_PAGES_MAX as usize + 1).collect();
        let stated_max = self.stated_max(pool, epoch);
        let fits = |page: &PageFound| page.slot < pages && page.epoch <= stated_max;
        if identity == 0
            || !(1..=POOL_PAGES_MAX).contains(&pages)
            || found.len() > pages as usize
            || !found.iter().all(fits)
        {
            return Err(ErrorCode::InvalidParams);
        }
        self.named(pool, epoch)?.take_page(now, wanted, &found, (by, limits))
    }

    /// The number of a tenant that was removed will be another one's.
    pub(crate) fn forget_tenant(&mut self, tenant: TenantNo) {
        let pages = self.map.values_mut().flat_map(|pool| pool.pages.values_mut());
        for page in pages.filter(|page| page.by.tenant == Some(tenant)) {
            page.by.tenant = None;
        }
    }

    /// An operator says that the process that was given a page in an epoch has ended.
    ///
    /// # Errors
    /// `KeyNotFound`: there is no such page, or it was given to another process since.
    pub(crate) fn free_page(&mut self, freed: &PageFreed) -> Result<(), ErrorCode> {
        let PageFreed { pool, slot, epoch } = *freed;
        let page = self.map.get_mut(&pool).and_then(|pool| pool.pages.get_mut(&slot));
        page.filter(|page| page.epoch == epoch).ok_or(ErrorCode::KeyNotFound)?.free = true;
        Ok(())
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        // A tree's nodes are at least half full.
        let of = |pool: &Pool| {
            let names: usize = pool.ranges.iter().map(|range| range.name.len()).sum();
            names
                + pool.ranges.capacity() * size_of::<Range>()
                + 2 * pool.pages.len() * size_of::<(u32, Page)>()
        };
        self.map.values().map(|pool| 2 * size_of::<(PoolName, Pool)>() + of(pool)).sum()
    }
}

impl Pool {
    /// # Errors
    /// `KeysUltraLimit`: there is none.
    fn next_epoch(&mut self) -> Result<u64, ErrorCode> {
        self.epoch = self.epoch.checked_add(1).ok_or(ErrorCode::KeysUltraLimit)?;
        Ok(self.epoch)
    }

    fn claim(&mut self, wanted: &ExtentsWanted<'_>) -> Result<Claimed, ErrorCode> {
        let ExtentsWanted { node, key, first, count, incarnation, domain, .. } = *wanted;
        let end = u64::from(first) + u64::from(count);
        let same = |range: &&Range| {
            (range.node, range.key, range.incarnation) == (node, key, incarnation)
                && (range.first, range.count) == (first, count)
        };
        // An answer that was lost.
        if let Some(range) = self.ranges.iter().find(same).filter(|range| range.is_latest(wanted)) {
            return Ok(Claimed::Given { epoch: range.epoch, losers: Vec::new() });
        }
        let overlaps = |range: &&Range| range.end() > first.into() && end > range.first.into();
        let ours = |range: &Range| (range.node, range.key) == (node, key);
        let proved = |range: &Range| {
            wanted.takeover || ours(range) || (wanted.locked && domain != 0 && range.domain == domain)
        };
        let overlapping: Vec<Range> = self.ranges.iter().filter(overlaps).cloned().collect();
        if let Some(held) = overlapping.iter().find(|range| !proved(range)) {
            return Ok(Claimed::Held(Some(held.clone())));
        }
        // Another lineage of the master may have given what is not in a range here.
        let latest = |range: &&Range| ours(range) && range.is_latest(wanted);
        let parts = overlapping.iter().filter(latest).filter_map(|range| range.part(first.into(), end));
        let known: u64 = parts.map(|part| u64::from(part.count)).sum();
        let unknown = wanted.owned_elsewhere && known < u64::from(count);
        if (unknown && !wanted.takeover) || !wanted.locked {
            return Ok(Claimed::Held(None));
        }
        if self.ranges.len() + 2 > RANGES_MAX {
            return Err(ErrorCode::KeysUltraLimit);
        }
        self.epoch = self.epoch.max(wanted.above);
        let epoch = self.next_epoch()?;
        let mut kept = Vec::with_capacity(self.ranges.len() + 2);
        for range in self.ranges.drain(..) {
            // What is left of a process' extents stays its own: the proof was about those that were locked.
            kept.extend(range.part(0, first.into()));
            kept.extend(range.part(end, u64::from(u32::MAX) * 2));
        }
        let (name, above) = (wanted.name.into(), wanted.above);
        kept.push(Range { first, count, node, key, name, incarnation, domain, epoch, above });
        kept.sort_unstable_by_key(|range| range.first);
        self.ranges = kept;
        let losers = overlapping.iter().filter(|range| !ours(range)).map(|range| (range.node, range.key));
        Ok(Claimed::Given { epoch, losers: losers.collect() })
    }

    /// Notes what a process found in the pages of the pool. Returns those that other processes have locked.
    fn note(&mut self, now: Instant, wanted: &PageWanted, found: &[PageFound], by: Taker) -> BTreeSet<u32> {
        let PageWanted { identity, domain, .. } = *wanted;
        let mut locked = BTreeSet::new();
        for page in found {
            self.epoch = self.epoch.max(page.epoch);
            let own = page.identity == identity;
            let known = self.pages.get_mut(&page.slot);
            // Another lineage of the master has given it; or it was offered to another process of this domain
            // before this one had locked it.
            let later = known.as_ref().is_none_or(|known| page.epoch > known.epoch) && page.epoch > 0;
            if later || (own && domain != 0 && known.as_ref().is_some_and(|known| known.domain == domain)) {
                let PageFound { slot, epoch, identity, left, .. } = *page;
                let (domain, by) = if own { (domain, by) } else { (page.domain, Taker::default()) };
                let free = left && !own;
                self.pages.insert(slot, Page { identity, domain, epoch, given: now, free, by });
            } else if let Some(known) = known
                && (page.left, page.epoch, page.identity) == (true, known.epoch, known.identity)
            {
                known.free = true;
            }
            if page.locked {
                locked.insert(page.slot);
            }
        }
        for slot in &locked {
            // It was given to this process, and another one of its domain was faster.
            if let Some(page) = self.pages.get_mut(slot).filter(|page| page.identity == identity) {
                page.identity = 0;
            }
        }
        locked
    }

    fn take_page(
        &mut self,
        now: Instant,
        wanted: &PageWanted,
        found: &[PageFound],
        (by, limits): (Taker, PageLimits),
    ) -> Result<Result<(u32, u64), NoPage>, ErrorCode> {
        let PageWanted { pages, identity, domain, .. } = *wanted;
        let locked = self.note(now, wanted, found, by);
        let own = self.pages.iter_mut().find(|(slot, page)| page.identity == identity && **slot < pages);
        if let Some((slot, page)) = own {
            // It has not ended, whatever an operator has said.
            (page.free, page.by) = (false, by);
            return Ok(Ok((*slot, page.epoch)));
        }
        let may = |slot: &u32| {
            let page = self.pages.get(slot);
            !locked.contains(slot)
                && page.is_none_or(|page| page.free || (domain != 0 && page.domain == domain))
        };
        // At a limit, a page may only take the place of another one that counts.
        let counts = |page: &Page, of_session: bool| match of_session {
            true => !page.free && by.session != 0 && page.by.session == by.session,
            false => !page.free && by.tenant.is_some() && page.by.tenant == by.tenant,
        };
        let is_full = |of_session, most: u32| {
            self.pages.values().filter(|page| counts(page, of_session)).count() >= most as usize
        };
        let full = (is_full(true, limits.of_session), is_full(false, limits.of_tenant));
        let within = |slot: &u32| {
            let in_place = |of_session| self.pages.get(slot).is_some_and(|page| counts(page, of_session));
            (!full.0 || in_place(true)) && (!full.1 || in_place(false))
        };
        let settled = |slot: &u32| self.pages.get(slot).is_some_and(|page| now >= page.given + SETTLES);
        let unused = |slot: &u32| !self.pages.contains_key(slot);
        let all = || (0..pages).filter(may).filter(within);
        // A page of a process that has ended first: owners may be waiting for it to be taken.
        let chosen = all().find(settled).or_else(|| all().find(unused)).or_else(|| all().next());
        let Some(slot) = chosen else {
            let pages_max = if full.0 { limits.of_session } else { limits.of_tenant };
            if full.0 || full.1 {
                return Ok(Err(NoPage::Limited { of_connection: full.0, pages_max }));
            }
            let elsewhere = self.pages.values().filter(|page| page.domain != domain || domain == 0);
            return Ok(Err(NoPage::Full(elsewhere.count() as u32)));
        };
        let epoch = self.next_epoch()?;
        self.pages.insert(slot, Page { identity, domain, epoch, given: now, free: false, by });
        Ok(Ok((slot, epoch)))
    }
}

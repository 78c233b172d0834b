//! Pools of CXL memory: see [`crate::pools`].

use alloc::vec::Vec;

use te_core::Instant;

use super::{Master, millis};
use crate::event::Event;
use crate::message::{
    ExtentsGiven, ExtentsReleased, ExtentsWanted, NAME_BYTES_MAX, PageFound, PageFreed, PageGiven,
    PageWanted, PoolEntry,
};
use crate::pools::{Claimed, NoPage, PageLimits, Range, Taker};
use crate::{ErrorCode, NodeId};

impl Master {
    /// Gives extents of a pool to a node. What another process has mounted there is gone: it is dropped with
    /// all of that process' memory.
    ///
    /// # Errors
    /// `IllegalClient` when the records of the pool were read under another lineage of the master;
    /// `InvalidParams`; `KeysUltraLimit`: too many pools, or ranges of this one.
    pub fn claim_extents(
        &mut self,
        now: Instant,
        wanted: &ExtentsWanted<'_>,
    ) -> Result<ExtentsGiven<'_>, ErrorCode> {
        if !(1..=NAME_BYTES_MAX).contains(&wanted.name.len()) {
            return Err(ErrorCode::InvalidParams);
        }
        self.check_lineage(wanted.lineage)?;
        let ExtentsWanted { node, pool, first, count, .. } = *wanted;
        match self.pools.claim(wanted, self.config.epoch)? {
            Claimed::Given { epoch, losers } => {
                for (loser, key) in losers {
                    let lost = self.nodes.get(loser).filter(|known| known.key == key);
                    for no in lost.map(|known| known.segments.clone()).unwrap_or_default() {
                        self.drop_segment(now, no);
                    }
                }
                self.emit(|| Event::ExtentsGiven { node, pool, first, count, epoch });
                Ok(ExtentsGiven::Given { epoch })
            }
            Claimed::Held(None) => Ok(ExtentsGiven::Held { first, count, name: "", alive: false }),
            Claimed::Held(Some(held)) => {
                let alive = self.lives(now, held.node, held.key);
                let ranges = self.pools.map.get(&pool).map_or(&[][..], |pool| &pool.ranges);
                let name = ranges.iter().find(|range| range.first == held.first);
                let name = name.map_or("", |range| &range.name);
                Ok(ExtentsGiven::Held { first: held.first, count: held.count, name, alive })
            }
        }
    }

    /// A node gives extents back.
    ///
    /// # Errors
    /// `SegmentNotFound`: they are not the node's, in this epoch.
    pub fn release_extents(&mut self, released: &ExtentsReleased) -> Result<(), ErrorCode> {
        self.pools.release(released)
    }

    /// Gives a page of a pool to a process, whose connection is not known and has no limits. A repetition
    /// gives the same one.
    ///
    /// # Errors
    /// `IllegalClient` when the records of the pool were read under another lineage of the master;
    /// `InvalidParams`; `KeysUltraLimit`: too many pools.
    pub fn take_page(
        &mut self,
        now: Instant,
        wanted: &PageWanted,
        found: impl Iterator<Item = PageFound>,
    ) -> Result<PageGiven, ErrorCode> {
        self.take_page_over(now, wanted, found, Taker::default())
    }

    /// As [`take_page`](Self::take_page), for a process of this connection.
    pub(crate) fn take_page_over(
        &mut self,
        now: Instant,
        wanted: &PageWanted,
        found: impl Iterator<Item = PageFound>,
        by: Taker,
    ) -> Result<PageGiven, ErrorCode> {
        self.check_lineage(wanted.lineage)?;
        let limits = PageLimits {
            of_session: self.config.session_pool_pages_max,
            of_tenant: self.config.tenant_pool_pages_max,
        };
        Ok(match self.pools.take_page(now, wanted, found, self.config.epoch, (by, limits))? {
            Ok((slot, epoch)) => PageGiven::Given { slot, epoch },
            Err(NoPage::Full(elsewhere)) => PageGiven::Full { elsewhere },
            Err(NoPage::Limited { of_connection, pages_max }) => {
                PageGiven::Limited { of_connection, pages_max }
            }
        })
    }

    /// An operator knows that the process which had a page can write the pool no more.
    ///
    /// # Errors
    /// `KeyNotFound`: the master knows no such page, or it was given to another process since.
    pub fn free_page(&mut self, freed: &PageFreed) -> Result<(), ErrorCode> {
        self.pools.free_page(freed)
    }

    /// What is known of all pools: extents, then pages of each.
    #[must_use]
    pub fn pools(&self, now: Instant) -> Vec<PoolEntry<'_>> {
        let mut all = Vec::new();
        for (&pool, known) in &self.pools.map {
            let extents = |range: &'_ Range| {
                let Range { first, count, node, key, epoch, .. } = *range;
                (first, count, node, epoch, self.lives(now, node, key))
            };
            for range in &known.ranges {
                let (first, count, node, epoch, alive) = extents(range);
                all.push(PoolEntry::Extents { pool, first, count, node, name: &range.name, epoch, alive });
            }
            for (&slot, page) in &known.pages {
                let crate::pools::Page { identity, epoch, free, .. } = *page;
                all.push(PoolEntry::Page { pool, slot, identity, epoch, free });
            }
        }
        all
    }

    /// Refuses evidence that was read under another lineage: extents and pages may have been given since.
    fn check_lineage(&self, lineage: u64) -> Result<(), ErrorCode> {
        if lineage == u64::from(self.config.epoch) { Ok(()) } else { Err(ErrorCode::IllegalClient) }
    }

    fn lives(&self, now: Instant, node: NodeId, key: u64) -> bool {
        let known = self.nodes.get(node).filter(|known| known.key == key);
        known.is_some_and(|known| known.seen + millis(self.config.node_ttl_ms) > now)
    }
}

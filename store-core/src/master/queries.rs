//! Queries over many objects, and bulk removal. Each call examines a bounded part and returns where to
//! continue, so that no other request waits long.

use te_core::Instant;

use super::shelf::{listing_of, on_disk_alone};
use super::{Master, listing, millis};
use crate::message::{FindQuery, HostQuery, Hosts, ListQuery, Listed, RemoveMode, RemoveQuery, RemovedPage};
use crate::pattern::{Budget, Pattern};
use crate::shelf::Record;
use crate::{ErrorCode, FullKey, SegmentNo, TenantNo};

/// Objects in one page of a response. With the next two limits, and those of [`crate::pattern`], a call takes
/// a fifth of a millisecond: all other requests wait for it.
pub(crate) const PAGE_ITEMS_MAX: u32 = 512;
/// Slots of the table that one call examines.
const SCAN_MAX: u32 = 8_192;
/// Objects that one call of [`Master::remove_many`] removes.
const REMOVALS_PER_CALL_MAX: u32 = 256;
/// Cursors from here on are slots of the shelf: the objects that are on disks alone follow those in memory.
const ON_DISKS: u64 = 1 << 32;
/// Segments of a node that are examined for its hosts.
const NODE_SEGMENTS_MAX: usize = 32;

impl Master {
    /// Calls `each` with a page of a tenant's keys; returns the cursor of the next page, 0 at the end. `each`
    /// returns false to stop early. A page may be empty and still not be the last. Objects that are added or
    /// removed between pages may be listed or not; all others are listed once.
    pub fn list_of<'a>(
        &'a self,
        now: Instant,
        tenant: TenantNo,
        query: &ListQuery<'_>,
        mut each: impl FnMut(Listed<'a>) -> bool,
    ) -> u64 {
        let limit = query.limit.clamp(1, PAGE_ITEMS_MAX);
        if query.cursor >= ON_DISKS {
            return self.list_on_disks(tenant, query, limit, each);
        }
        let (start, end) = self.scan(query.cursor);
        let mut listed = 0;
        for index in start..end {
            let entry = self.objects.entry(index);
            if !entry.has_key() || entry.tenant != tenant || !entry.key.as_slice().starts_with(query.prefix.0)
            {
                continue;
            }
            if listed == limit || !each(listing(entry, now)) {
                return u64::from(index) + 1;
            }
            listed += 1;
        }
        self.next_page(end)
    }

    /// Calls `each` with a page of a tenant's keys that match a regular expression; returns the cursor of the
    /// next page, 0 at the end. Pages are those of [`Self::list_of`].
    ///
    /// # Errors
    /// `InvalidPattern`.
    pub fn find<'a>(
        &'a mut self,
        now: Instant,
        tenant: TenantNo,
        query: &FindQuery<'_>,
        mut each: impl FnMut(Listed<'a>) -> bool,
    ) -> Result<u64, ErrorCode> {
        let mut budget = self.prepare(query.pattern)?;
        let limit = query.limit.clamp(1, PAGE_ITEMS_MAX);
        if query.cursor >= ON_DISKS {
            return self.find_on_disks(tenant, query.cursor, limit, &mut budget, each);
        }
        let (start, end) = self.scan(query.cursor);
        let next_page = self.next_page(end);
        let (objects, Some(pattern)) = (&self.objects, &mut self.pattern) else {
            return Err(ErrorCode::InternalError);
        };
        let mut found = 0;
        for index in start..end {
            let entry = objects.entry(index);
            if !entry.has_key() || entry.tenant != tenant {
                continue;
            }
            match pattern.matches(entry.key.as_slice(), &mut budget)? {
                None => return Ok(u64::from(index) + 1),
                Some(false) => {}
                Some(true) if found == limit || !each(listing(entry, now)) => {
                    return Ok(u64::from(index) + 1);
                }
                Some(true) => found += 1,
            }
        }
        Ok(next_page)
    }

    /// Removes a page of a tenant's objects, as [`Self::remove`] does. Objects that are put meanwhile may
    /// stay. An empty pattern is refused and does not stand for all objects: no pattern does.
    ///
    /// # Errors
    /// `InvalidPattern`. Objects that were removed by the previous pages, and by this one up to a key that is
    /// too costly, are gone.
    pub fn remove_many(
        &mut self,
        now: Instant,
        tenant: TenantNo,
        query: &RemoveQuery<'_>,
    ) -> Result<RemovedPage, ErrorCode> {
        let mut budget = match query.pattern {
            Some(text) => Some(self.prepare(text)?),
            None => None,
        };
        if query.cursor >= ON_DISKS {
            return self.remove_on_disks(tenant, query.cursor, budget);
        }
        let (start, end) = self.scan(query.cursor);
        let mut page = RemovedPage::default();
        for index in start..end {
            let entry = self.objects.entry(index);
            if !entry.has_key() || entry.tenant != tenant {
                continue;
            }
            page.cursor = u64::from(index) + 1;
            if page.removed == REMOVALS_PER_CALL_MAX {
                return Ok(page);
            }
            if let (Some(pattern), Some(budget)) = (&mut self.pattern, &mut budget) {
                match pattern.matches(entry.key.as_slice(), budget)? {
                    None => return Ok(page),
                    Some(false) => continue,
                    Some(true) => {}
                }
            }
            match self.remove_at(now, index, RemoveMode::of(query.force)) {
                Ok(()) => page.removed += 1,
                Err(ErrorCode::ReplicaIsNotReady) => page.unfinished += 1,
                Err(_) => page.leased += 1,
            }
        }
        page.cursor = self.next_page(end);
        Ok(page)
    }

    /// The unfinished upserts of a tenant, which have no key yet and are not listed by [`Self::list_of`]. For
    /// tools that recount space.
    pub fn unfinished_upserts(&self, now: Instant, tenant: TenantNo) -> impl Iterator<Item = Listed<'_>> {
        let upserts = self.objects.upserts().filter(move |entry| entry.tenant == tenant);
        upserts.map(move |entry| listing(entry, now))
    }

    /// The hosts of a node or a segment.
    ///
    /// # Errors
    /// `ClientNotFound`, `SegmentNotFound`.
    pub fn hosts(&self, of: HostQuery) -> Result<Hosts<'_>, ErrorCode> {
        let numbers = match &of {
            HostQuery::Segment(no) => core::slice::from_ref(no),
            HostQuery::Node(node) => &self.nodes.get(*node).ok_or(ErrorCode::ClientNotFound)?.segments,
        };
        let mut hosts = Hosts::new();
        for no in numbers.iter().take(NODE_SEGMENTS_MAX) {
            let host = host_of(&self.segments.get(*no).ok_or(ErrorCode::SegmentNotFound)?.endpoint);
            if !hosts.contains(&host) {
                // Hosts beyond the limit are left out.
                let _ = hosts.push(host);
            }
        }
        Ok(hosts)
    }

    /// Drops an object's replica on a segment, or all of them. An object without replicas is removed. For
    /// half of the lease's time after its commit, and after the end or return of its last lease, an
    /// object counts as leased here: what was just written or read is not cleared. [`Self::remove`] knows
    /// no such delay.
    ///
    /// # Errors
    /// `KeyNotFound`, `ObjectHasLease` (also as above), `ReplicaIsNotReady` while it is being written,
    /// `ReplicaNotFound` when it has none there.
    pub fn clear_replica<'k>(
        &mut self,
        now: Instant,
        key: impl Into<FullKey<'k>>,
        segment: Option<SegmentNo>,
    ) -> Result<(), ErrorCode> {
        let key = key.into();
        if let Some(no) = segment
            && self.disks.get(no).is_some()
        {
            let cleared = self.unshelve(key, |record| record.disk == no);
            return if cleared { Ok(()) } else { Err(ErrorCode::ReplicaNotFound) };
        }
        let Some(index) = self.objects.find(key) else {
            let cleared = self.unshelve(key, |_| segment.is_none());
            return if cleared { Ok(()) } else { Err(ErrorCode::KeyNotFound) };
        };
        let entry = self.objects.entry(index);
        let Some(no) = segment else { return self.clear_last(now, index) };
        let Some(placed) = entry.replicas.as_slice().iter().find(|placed| placed.segment == no).copied()
        else {
            return Err(ErrorCode::ReplicaNotFound);
        };
        if entry.replicas.as_slice().len() == 1 {
            if self.is_shelved(index) {
                self.check_clearable(now, index)?;
                self.drop_from_memory(index, self.holds(now, index));
                return Ok(());
            }
            return self.clear_last(now, index);
        }
        self.check_clearable(now, index)?;
        self.objects.drop_segment(index, no);
        self.segments.free(&placed);
        Ok(())
    }

    fn clear_last(&mut self, now: Instant, index: u32) -> Result<(), ErrorCode> {
        self.check_clearable(now, index)?;
        self.remove_at(now, index, RemoveMode::IfUnused)
    }

    /// Whether the object can be removed, and was not just written or read.
    fn check_clearable(&self, now: Instant, index: u32) -> Result<(), ErrorCode> {
        self.check_removable(now, index)?;
        if self.has_unknown_leases(now) {
            return Err(ErrorCode::ObjectHasLease);
        }
        let rested = self.objects.entry(index).time + millis(self.config.lease_ttl_ms) / 2;
        if now < rested { Err(ErrorCode::ObjectHasLease) } else { Ok(()) }
    }

    /// Whether the object is neither leased nor being written.
    fn check_removable(&self, now: Instant, index: u32) -> Result<(), ErrorCode> {
        let entry = self.objects.entry(index);
        match entry.is_complete() {
            false => Err(ErrorCode::ReplicaIsNotReady),
            true if entry.is_leased(now) => Err(ErrorCode::ObjectHasLease),
            true => Ok(()),
        }
    }

    /// Removes an object; see [`Self::remove`].
    pub(super) fn remove_at(&mut self, now: Instant, index: u32, mode: RemoveMode) -> Result<(), ErrorCode> {
        if mode == RemoveMode::IfUnused {
            self.check_removable(now, index)?;
        }
        // While an object is being put, a disk that is away may have an older one.
        self.unshelve_older(index);
        self.drop_object(index, self.holds(now, index));
        self.stats.removes_total += 1;
        Ok(())
    }

    /// The slots that a call with this cursor examines. A cursor is the next slot plus one, because 0 means
    /// the beginning, and the end.
    fn scan(&self, cursor: u64) -> (u32, u32) {
        let start = u32::try_from(cursor.saturating_sub(1)).unwrap_or(u32::MAX);
        (start, self.objects.slots().min(start.saturating_add(SCAN_MAX)))
    }

    fn next_page(&self, end: u32) -> u64 {
        match end < self.objects.slots() {
            true => u64::from(end) + 1,
            false if self.shelf.is_empty() => 0,
            false => ON_DISKS,
        }
    }

    /// The slots of the shelf that a call with this cursor examines, and the cursor of the next call.
    fn scan_shelf(&self, cursor: u64) -> (u32, u32, u64) {
        let start = u32::try_from(cursor - ON_DISKS).unwrap_or(u32::MAX);
        let end = self.shelf.slots().min(start.saturating_add(SCAN_MAX));
        let next = if end < self.shelf.slots() { ON_DISKS + u64::from(end) } else { 0 };
        (start, end, next)
    }

    /// As [`Self::list_of`], for the objects that are on disks alone.
    fn list_on_disks<'a>(
        &'a self,
        tenant: TenantNo,
        query: &ListQuery<'_>,
        limit: u32,
        mut each: impl FnMut(Listed<'a>) -> bool,
    ) -> u64 {
        let (start, end, next) = self.scan_shelf(query.cursor);
        let mut listed = 0;
        for index in start..end {
            let wanted = |record: &&Record| {
                record.tenant == tenant && record.key.as_slice().starts_with(query.prefix.0)
            };
            let record = on_disk_alone(&self.objects, &self.shelf, index).filter(wanted);
            let Some(record) = record else { continue };
            if listed == limit || !each(listing_of(record)) {
                return ON_DISKS + u64::from(index);
            }
            listed += 1;
        }
        next
    }

    /// As [`Self::find`], for the objects that are on disks alone.
    fn find_on_disks<'a>(
        &'a mut self,
        tenant: TenantNo,
        cursor: u64,
        limit: u32,
        budget: &mut Budget,
        mut each: impl FnMut(Listed<'a>) -> bool,
    ) -> Result<u64, ErrorCode> {
        let (start, end, next) = self.scan_shelf(cursor);
        let (objects, shelf, Some(pattern)) = (&self.objects, &self.shelf, &mut self.pattern) else {
            return Err(ErrorCode::InternalError);
        };
        let mut found = 0;
        for index in start..end {
            let record = on_disk_alone(objects, shelf, index).filter(|record| record.tenant == tenant);
            let Some(record) = record else { continue };
            match pattern.matches(record.key.as_slice(), budget)? {
                Some(false) => {}
                Some(true) if found < limit && each(listing_of(record)) => found += 1,
                _ => return Ok(ON_DISKS + u64::from(index)),
            }
        }
        Ok(next)
    }

    /// As [`Self::remove_many`], for the objects that are on disks alone.
    fn remove_on_disks(
        &mut self,
        tenant: TenantNo,
        cursor: u64,
        mut budget: Option<Budget>,
    ) -> Result<RemovedPage, ErrorCode> {
        let (start, end, next) = self.scan_shelf(cursor);
        let mut page = RemovedPage::default();
        for index in start..end {
            let record = on_disk_alone(&self.objects, &self.shelf, index);
            let record = record.filter(|record| record.tenant == tenant);
            let matches = match (record, &mut self.pattern, &mut budget) {
                (None, ..) => Some(false),
                (Some(record), Some(pattern), Some(budget)) => {
                    pattern.matches(record.key.as_slice(), budget)?
                }
                _ => Some(true),
            };
            page.cursor = ON_DISKS + u64::from(index);
            match matches {
                None => return Ok(page),
                Some(false) => {}
                Some(true) if page.removed == REMOVALS_PER_CALL_MAX => return Ok(page),
                Some(true) => {
                    self.drop_record(index, true);
                    self.stats.removes_total += 1;
                    page.removed += 1;
                }
            }
        }
        page.cursor = next;
        Ok(page)
    }

    /// Compiles a pattern, unless it is the one of the previous page. Returns the call's budget.
    fn prepare(&mut self, text: &str) -> Result<Budget, ErrorCode> {
        let known = self.pattern.take().filter(|pattern| pattern.text() == text);
        let pattern = match known {
            Some(pattern) => pattern,
            None => Pattern::new(text)?,
        };
        Ok(self.pattern.insert(pattern).budget())
    }
}

/// The part before the port; an address in brackets without the brackets.
fn host_of(endpoint: &str) -> &str {
    let host = endpoint.rsplit_once(':').map_or(endpoint, |(host, _)| host);
    host.strip_prefix('[').and_then(|host| host.strip_suffix(']')).unwrap_or(host)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_what_stands_before_the_port() {
        let hosts = ["n1:9000", "10.0.0.1:1", "[fe80::1%eth0]:9000", "bare"].map(host_of);
        assert_eq!(hosts, ["n1", "10.0.0.1", "fe80::1%eth0", "bare"]);
    }
}

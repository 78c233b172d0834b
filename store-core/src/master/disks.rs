//! The master's part in disks: which objects are copied to them before they are evicted, which objects are
//! known to be on them, and which removals their nodes have to learn of.
//!
//! ```text
//!              the policy's next choices            FetchDiskOrders            EndDiskOrders
//!   candidate ─────────────────────────▶ leaving ──────────────────▶ writing ───────────────▶ on the shelf
//!                                           │                           │                         │
//!                                           │ evicted before            │ evicted or removed      │ removed
//!                                           ▼                           ▼ meanwhile               ▼
//!                                         gone                       tombstone ◀──────────────────┘
//! ```
//!
//! An object that is being written to a disk is not held in memory: eviction never waits for a disk. What was
//! written counts only if the object is still where it was read from when the node reports the end; its bytes
//! have not changed meanwhile then.
//!
//! A generation whose image is, or may be, on a disk has a record, an entry in [`Disk::writing`] or a
//! tombstone. So what was removed is not adopted when the disk is mounted again. A disk that is away for too
//! long is forgotten with all of that, and nothing that it contains counts any more: it is cleared when it
//! returns.

use alloc::vec::Vec;
use core::time::Duration;

use te_core::Instant;

use super::{Master, millis};
use crate::chunks::stored_len;
use crate::disks::{Disk, DiskState, NewDisk, QUEUE_MAX, Queued, TOMBSTONES_MAX, Tombstone, Writing};
use crate::eviction::Standing;
use crate::message::{
    Adoption, DiskEnd, DiskOrder, DiskProof, FetchDisk, FoundObject, MountDisk, MountedDisk, NAME_BYTES_MAX,
    SegmentInfo,
};
use crate::objects::KeyBytes;
use crate::shelf::Record;
use crate::{ErrorCode, FullKey, Key, NodeId, SegmentNo, TenantNo, bound, unbound};

/// Shorter objects are not copied to disks: they would cost more writes than they are worth.
const BYTES_MIN: u64 = 4_096;
/// Longest path of a directory of packs.
const PATH_BYTES_MAX: usize = 1_024;
/// Objects that one request chooses to leave.
const CHOICES_MAX: u32 = 1_024;
/// Candidates examined for one choice.
const LOOKS_MAX: u32 = 64;
/// Removals in one response.
const FORGETS_MAX: usize = 512;
/// Bytes of objects that may wait for one disk.
const QUEUE_BYTES_MAX: u64 = 1 << 30;
/// What tenants may still have on disks. Those without a limit are not in it.
struct Rooms(Vec<(TenantNo, u64)>);

impl Rooms {
    /// Takes so many bytes, if the tenant may have them.
    fn take(&mut self, tenant: TenantNo, bytes: u64) -> bool {
        let Some((_, room)) = self.0.iter_mut().find(|(of, _)| *of == tenant) else { return true };
        let left = room.checked_sub(bytes);
        *room = left.unwrap_or(*room);
        left.is_some()
    }
}

/// Longest object that a record describes.
const LEN_MAX: u64 = u32::MAX as u64;

impl Master {
    /// Mounts a disk of a node.
    ///
    /// # Errors
    /// `InvalidParams`; `IllegalClient` when the disk was opened for another lineage of the master, or the
    /// key is wrong; `ClientNotFound` when the node has not mounted memory under this incarnation;
    /// `SegmentAlreadyExists` when another node that is alive has the disk; `TooManySegments`.
    pub fn mount_disk(&mut self, now: Instant, mount: &MountDisk<'_>) -> Result<MountedDisk, ErrorCode> {
        let named = |text: &str| (1..=NAME_BYTES_MAX).contains(&text.len());
        let placed = mount.shared.len() <= PATH_BYTES_MAX;
        let sized = mount.extent_bytes > 0 && mount.bytes > 0;
        if !named(mount.endpoint) || !named(mount.stage) || !placed || !sized {
            return Err(ErrorCode::InvalidParams);
        }
        if mount.lineage != u64::from(self.config.epoch) {
            return Err(ErrorCode::IllegalClient);
        }
        self.check_node(mount.node, mount.key)?;
        if self.nodes.get(mount.node).is_none_or(|node| node.incarnation != mount.incarnation) {
            return Err(ErrorCode::ClientNotFound);
        }
        let mut before = Vec::new();
        if let Some(known) = self.disks.named(&mount.uuid) {
            if known.is_here() && (known.node, known.incarnation) == (mount.node, mount.incarnation) {
                return Ok(MountedDisk { disk: known.no });
            }
            if known.is_here() && known.node != mount.node {
                return Err(ErrorCode::SegmentAlreadyExists);
            }
            before.push(known.no);
            before.extend(&known.before);
        }
        if self.disks.len() >= self.config.segments_max as usize {
            return Err(ErrorCode::TooManySegments);
        }
        let no = self.segments.take_no().ok_or(ErrorCode::TooManySegments)?;
        let last = before.first().copied();
        let mut disk = Disk::new(NewDisk { no, mount, before });
        if let Some(old) = last.and_then(|last| self.disks.get_mut(last)) {
            // What was removed, or may have been written, is still to be settled with the same bytes.
            disk.tombstones = core::mem::take(&mut old.tombstones);
            disk.writing = core::mem::take(&mut old.writing);
            (old.state, old.writing_bytes) = (DiskState::Away(now), 0);
            let queue = core::mem::take(&mut old.queue);
            queue
                .iter()
                .for_each(|queued| self.objects.await_copy_of(queued.index, queued.generation, false));
        }
        self.disks.add(disk);
        if let Some(last) = last {
            self.note_disk(last);
            self.promotions_lost_disk(now, last);
        }
        if self.disks.floor(&mount.uuid) > 0 {
            self.clear_disk(no);
        }
        Ok(MountedDisk { disk: no })
    }

    /// A node announces an object that recovery has found on its disk.
    ///
    /// # Errors
    /// As [`Self::check_disk`].
    pub(crate) fn adopt(
        &mut self,
        proof: &DiskProof,
        found: &FoundObject<'_>,
    ) -> Result<Adoption, ErrorCode> {
        self.check_disk(proof)?;
        let adoption = self.look_at(proof, found)?;
        if adoption == Adoption::Forget {
            // The node may lose what it is told here before it is durable: the order is repeated until then.
            let (key, locator) = (found.key.0.into(), Some(found.locator));
            self.add_tombstone(
                proof.disk,
                found.generation,
                Tombstone { tenant: found.tenant, key, locator },
            );
        }
        Ok(adoption)
    }

    fn look_at(&mut self, proof: &DiskProof, found: &FoundObject<'_>) -> Result<Adoption, ErrorCode> {
        let Some(disk) = self.disks.get(proof.disk) else { return Err(ErrorCode::SegmentNotFound) };
        let FoundObject { generation, len, locator, .. } = *found;
        let key = found.key.0;
        if key.is_empty() || key.len() > self.config.key_bytes_max as usize || len == 0 || len > LEN_MAX {
            return Ok(Adoption::Refused(ErrorCode::InvalidParams));
        }
        if disk.clearing.is_some() || generation <= self.disks.floor(&disk.uuid) {
            return Ok(Adoption::Refused(ErrorCode::ObjectNotFound));
        }
        if disk.tombstones.contains_key(&generation) {
            return Ok(Adoption::Forget);
        }
        let Some(tenant) = self.tenants.tagged(found.tenant) else {
            return Ok(Adoption::Refused(ErrorCode::TenantNotRegistered));
        };
        let full = FullKey { tenant, key };
        let checksum = bound(found.crc32c, key, generation);
        let entry = self.objects.find(full).map(|index| self.objects.entry(index));
        let same = |entry: &crate::objects::Entry| {
            entry.is_complete()
                && (entry.generation, entry.len, entry.checksum) == (generation, len, checksum)
        };
        // The end of its writing was not reported: only an object that is still there is known not to have
        // been removed since.
        if disk.writing.contains_key(&generation) && !entry.is_some_and(same) {
            return Ok(Adoption::Forget);
        }
        if entry.is_some_and(|entry| entry.is_complete() && !same(entry)) {
            return Ok(Adoption::Forget);
        }
        if entry.is_none() && self.is_metadata_full() {
            return Ok(Adoption::Refused(ErrorCode::MetadataFull));
        }
        let (no, uuid) = (disk.no, disk.uuid);
        if let Some(known) = self.shelf.find(full) {
            let record = self.shelf.record(known);
            let of_this = self.disks.get(record.disk).is_some_and(|disk| disk.uuid == uuid);
            match record.generation.cmp(&generation) {
                core::cmp::Ordering::Less => self.drop_record(known, true),
                core::cmp::Ordering::Greater => return Ok(Adoption::Forget),
                core::cmp::Ordering::Equal if !of_this => return Ok(Adoption::Forget),
                // A generation may have two images on one disk.
                core::cmp::Ordering::Equal if record.disk == no => return Ok(Adoption::Adopted),
                core::cmp::Ordering::Equal => {
                    self.move_record(known, no, locator);
                    return Ok(Adoption::Adopted);
                }
            }
        }
        self.generation = self.generation.max(generation);
        self.shelve(Record {
            key: KeyBytes::new(key),
            generation,
            locator,
            len: len as u32,
            checksum,
            disk: no,
            tenant,
            hits: 0,
        });
        self.stats.disk_adopted_total += 1;
        Ok(Adoption::Adopted)
    }

    /// Every object on a disk was announced. What was known to be on it and was not announced is gone.
    pub(crate) fn disk_ready(&mut self, proof: &DiskProof) -> Result<(), ErrorCode> {
        self.check_disk(proof)?;
        let Some(disk) = self.disks.get_mut(proof.disk) else { return Err(ErrorCode::SegmentNotFound) };
        if disk.state == DiskState::Ready {
            return Ok(());
        }
        disk.state = DiskState::Ready;
        disk.writing.clear();
        for old in core::mem::take(&mut disk.before) {
            self.drop_disk(old);
        }
        Ok(())
    }

    /// The work for a disk: the orders that its node has already and has not reported, and further ones.
    pub(crate) fn fetch_disk(
        &mut self,
        now: Instant,
        request: &FetchDisk,
    ) -> Result<Vec<DiskOrder<'_>>, ErrorCode> {
        self.check_incarnation(&request.fetch)?;
        let (no, node) = (request.disk, request.fetch.node);
        let of_node = |disk: &&Disk| disk.node == node && disk.is_here();
        let disk = self.disks.get(no).filter(of_node).ok_or(ErrorCode::SegmentNotFound)?;
        let opening = disk.state != DiskState::Ready || disk.clearing.is_some();
        let most = request.fetch.count_max as usize;
        if !opening {
            self.close_disk(no, request.bytes_max == 0);
        }
        if request.bytes_max > 0 && !opening {
            self.choose_ahead(now);
            self.begin_writing(no, most, request.bytes_max);
        }
        let Some(disk) = self.disks.get(no) else { return Err(ErrorCode::SegmentNotFound) };
        let mut orders = Vec::new();
        orders.extend(disk.clearing.map(|ticket| DiskOrder::Clear { ticket }));
        let forgets = disk.tombstones.iter().take(FORGETS_MAX.min(most));
        orders.extend(forgets.map(|(generation, tombstone)| DiskOrder::Forget {
            tenant: tombstone.tenant,
            key: Key(&tombstone.key),
            generation: *generation,
            locator: tombstone.locator,
        }));
        // Before the disk is ready, its writing is that of an earlier mount.
        let writing = disk.writing.iter().filter(|_| !opening).take(most);
        orders.extend(writing.map(|(generation, writing)| DiskOrder::Demote {
            tenant: writing.tenant,
            key: Key(&writing.key),
            generation: *generation,
            len: writing.len,
            crc32c: writing.crc32c,
            segment: writing.segment,
            addr: writing.addr,
            proven: writing.proven,
        }));
        Ok(orders)
    }

    /// A node reports the end of an order, or what else happened to an object on its disk. A repetition has
    /// no effect.
    ///
    /// # Errors
    /// As [`Self::check_disk`]; `TaskNotFound`: nothing of that kind is expected.
    pub(crate) fn end_disk(&mut self, proof: &DiskProof, end: &DiskEnd<'_>) -> Result<(), ErrorCode> {
        self.check_disk(proof)?;
        let no = proof.disk;
        let Some(disk) = self.disks.get_mut(no) else { return Err(ErrorCode::SegmentNotFound) };
        match *end {
            DiskEnd::Demoted { generation, result } => return self.end_writing(no, generation, result),
            DiskEnd::Forgotten { generation } => {
                disk.tombstones.remove(&generation).ok_or(ErrorCode::TaskNotFound)?;
            }
            DiskEnd::Cleared { ticket } => {
                disk.clearing.take_if(|clearing| *clearing == ticket).ok_or(ErrorCode::TaskNotFound)?;
                let uuid = disk.uuid;
                self.disks.cleared(&uuid);
            }
            DiskEnd::Lost { tenant, key, generation } => {
                let tenant = self.tenants.tagged(tenant).ok_or(ErrorCode::TenantNotRegistered)?;
                let full = FullKey { tenant, key: key.0 };
                let record = self.shelf.find_generation(full, generation);
                let record = record.filter(|index| self.shelf.record(*index).disk == no);
                self.lose_record(record.ok_or(ErrorCode::ObjectNotFound)?);
            }
            DiskEnd::Dropped { from, to } => {
                for index in disk.members(from, to) {
                    let record = self.shelf.record(index);
                    if record.disk == no && (from..to).contains(&record.locator) {
                        self.lose_record(index);
                    }
                }
            }
        }
        Ok(())
    }

    /// A disk gives an extent up: what is in it is gone.
    pub(crate) fn reclaim(&mut self, proof: &DiskProof, sequence: u64) -> Result<(), ErrorCode> {
        self.check_disk(proof)?;
        let Some(disk) = self.disks.get_mut(proof.disk) else { return Err(ErrorCode::SegmentNotFound) };
        let members = disk.take_extent(sequence);
        let mut tombstones = core::mem::take(&mut disk.tombstones);
        tombstones.retain(|_, tombstone| {
            tombstone.locator.is_none_or(|locator| disk.extent_of(locator) != sequence)
        });
        disk.tombstones = tombstones;
        for index in members {
            let record = self.shelf.record(index);
            let here = record.disk == proof.disk
                && self.disks.get(proof.disk).is_some_and(|disk| disk.extent_of(record.locator) == sequence);
            if here {
                self.remove_record(index);
                self.stats.disk_reclaimed_total += 1;
            }
        }
        Ok(())
    }

    /// A node is gone, and its disks with it.
    pub(super) fn disks_away(&mut self, now: Instant, node: NodeId) {
        let mut gone = Vec::new();
        for disk in self.disks.iter_mut().filter(|disk| disk.node == node && disk.is_here()) {
            disk.state = DiskState::Away(now);
            gone.push(disk.no);
            (disk.queue_bytes, disk.writing_bytes) = (0, 0);
            for queued in core::mem::take(&mut disk.queue) {
                self.objects.await_copy_of(queued.index, queued.generation, false);
            }
            for (generation, writing) in &disk.writing {
                self.objects.await_copy_of(writing.index, *generation, false);
            }
        }
        for no in gone {
            self.note_disk(no);
            self.promotions_lost_disk(now, no);
        }
    }

    /// Forgets disks that have been away for too long.
    pub(super) fn disks_timeout(&mut self, now: Instant) {
        let away = millis(self.config.disk_away_ms);
        while let Some(no) = self.disks_due(away).filter(|(at, _)| *at <= now).map(|(_, no)| no) {
            let Some(disk) = self.disks.get(no) else { return };
            let (uuid, latest) = (disk.uuid, self.disks.named(&disk.uuid).map(|disk| disk.no));
            self.drop_disk(no);
            if latest == Some(no) {
                self.disks.forget(uuid, self.generation);
            }
        }
    }

    /// The disk that is forgotten next, and when. What a mounted disk was before is settled when it is ready.
    fn disks_due(&self, away: Duration) -> Option<(Instant, SegmentNo)> {
        let is_before = |no| self.disks.iter().any(|disk| disk.before.contains(&no));
        let due = self.disks.iter().filter_map(|disk| match disk.state {
            DiskState::Away(since) if !is_before(disk.no) => Some((since + away, disk.no)),
            _ => None,
        });
        due.min()
    }

    /// When [`Self::disks_timeout`] has something to do.
    pub(super) fn disks_due_at(&self) -> Option<Instant> {
        if self.disks.is_empty() {
            return None;
        }
        self.disks_due(millis(self.config.disk_away_ms)).map(|(at, _)| at)
    }

    /// What a disk is and where.
    pub(super) fn disk_info(&self, no: SegmentNo) -> Option<SegmentInfo<'_>> {
        let disk = self.disks.get(no).filter(|disk| disk.is_readable())?;
        Some(SegmentInfo {
            shared: &disk.shared,
            extent_bytes: disk.extent_bytes,
            segment: no,
            node: disk.node,
            incarnation: disk.incarnation,
            name: &disk.stage,
            endpoint: &disk.endpoint,
            base: disk.staging.base,
            len: disk.staging.len,
            location: disk.staging.location,
            export: disk.staging.export,
            // No node serves the packs of an owner that is gone.
            stage: if disk.is_here() { &disk.stage } else { "" },
            used: 0,
            free_bytes_largest: 0,
        })
    }

    /// The disks that can be read, for lists: named by their address or directory, with the bytes of the
    /// disk.
    pub(crate) fn disk_list(&self) -> impl Iterator<Item = SegmentInfo<'_>> {
        let named = |disk: &Disk| {
            let info = self.disk_info(disk.no)?;
            let name = if info.shared.is_empty() { info.name } else { info.shared };
            Some(SegmentInfo { name, len: disk.bytes, ..info })
        };
        self.disks.iter().filter_map(named)
    }

    /// The record of a key whose disk can be read.
    pub(super) fn readable_record(&self, key: FullKey<'_>) -> Option<u32> {
        let index = self.shelf.find(key)?;
        let here = self.disks.get(self.shelf.record(index).disk).is_some_and(Disk::is_readable);
        here.then_some(index)
    }

    /// Removes what a key has on a disk: the object was removed, or replaced by another generation.
    pub(super) fn unshelve(&mut self, key: FullKey<'_>, is: impl Fn(&Record) -> bool) -> bool {
        let found = self.shelf.find(key).filter(|index| is(self.shelf.record(*index)));
        found.map(|index| self.drop_record(index, true)).is_some()
    }

    /// Removes a record. `forget`: its bytes are still on the disk, and must not be adopted again.
    pub(super) fn drop_record(&mut self, index: u32, forget: bool) {
        let record = self.remove_record(index);
        if forget {
            let tenant = self.tenants.tag(record.tenant);
            let tombstone =
                Tombstone { tenant, key: record.key.as_slice().into(), locator: Some(record.locator) };
            self.add_tombstone(record.disk, record.generation, tombstone);
        }
    }

    fn check_disk(&self, proof: &DiskProof) -> Result<(), ErrorCode> {
        self.check_node(proof.node.node, proof.node.key)?;
        let disk = self.disks.get(proof.disk).ok_or(ErrorCode::SegmentNotFound)?;
        let latest = self.nodes.get(disk.node).is_some_and(|node| node.incarnation == disk.incarnation);
        if disk.node == proof.node.node && disk.is_here() && latest {
            Ok(())
        } else {
            Err(ErrorCode::SegmentNotFound)
        }
    }

    /// Chooses objects to leave, as long as too few do, and the disks that they are copied to.
    fn choose_ahead(&mut self, now: Instant) {
        let wanted = self.wanted_ahead();
        for _ in 0..CHOICES_MAX {
            let room = self.disks.iter().any(accepts);
            if self.objects.leaving_bytes() >= wanted || !room {
                return;
            }
            let tenant = if self.objects.is_single() {
                Some(TenantNo::DEFAULT)
            } else {
                self.objects.furthest_over(now)
            };
            let Some(tenant) = tenant else { return };
            let Some((index, standing)) = self.objects.leave_next(now, tenant, LOOKS_MAX) else { return };
            if standing != Standing::End {
                self.queue_copy(index, standing == Standing::Proven);
            }
        }
    }

    /// Bytes of objects that should have been chosen to leave by now.
    fn wanted_ahead(&self) -> u64 {
        let ahead = (self.segments.capacity_bytes() as f64 * self.config.demote_ahead) as u64;
        let begin = self.low_mark().saturating_sub(ahead);
        self.segments.used_bytes().saturating_sub(begin).min(ahead)
    }

    /// Bytes of objects that wait for a disk that takes them, or should be chosen to.
    pub(super) fn disk_backlog_bytes(&self) -> u64 {
        let mut ready =
            self.disks.iter().filter(|disk| disk.state == DiskState::Ready && !disk.closed).peekable();
        if ready.peek().is_none() {
            return 0;
        }
        let waiting: u64 = ready.map(|disk| disk.queue_bytes + disk.writing_bytes).sum();
        waiting + self.wanted_ahead().saturating_sub(self.objects.leaving_bytes())
    }

    /// Queues an object for a disk of a node that has it in memory, if it is to have a copy.
    pub(super) fn queue_copy(&mut self, index: u32, proven: bool) {
        let entry = self.objects.entry(index);
        let (generation, len) = (entry.generation, entry.len);
        if !entry.is_plain()
            || !self.objects.usage(entry.tenant).has_disk_room()
            || !(BYTES_MIN..=LEN_MAX).contains(&len)
            || self.shelf.find_generation(entry.full_key(), generation).is_some()
        {
            return;
        }
        let writes = |disk: &Disk| disk.state == DiskState::Ready && disk.writing.contains_key(&generation);
        if self.disks.iter().any(writes) {
            self.objects.await_copy(index, true);
            return;
        }
        let nodes = entry.replicas.as_slice().iter();
        let nodes: Vec<NodeId> = nodes
            .filter_map(|placed| self.segments.get(placed.segment).map(|segment| segment.node))
            .collect();
        let disks = self.disks.iter_mut().filter(|disk| accepts(disk) && nodes.contains(&disk.node));
        // The first of those with the shortest queue.
        let disks = disks.filter(|disk| {
            !disk.tombstones.contains_key(&generation) && !disk.writing.contains_key(&generation)
        });
        let Some(disk) = disks.min_by_key(|disk| disk.queue_bytes + disk.writing_bytes) else { return };
        disk.queue.push_back(Queued { index, generation, proven });
        disk.queue_bytes += len;
        self.objects.await_copy(index, true);
    }

    /// What tenants with a quota of disk bytes may still have on disks, besides what is being written.
    fn disk_rooms(&self) -> Rooms {
        let limited = self.objects.disk_rooms();
        let mut rooms: Vec<(TenantNo, u64)> = limited.collect();
        if !rooms.is_empty() {
            for (tenant, room) in &mut rooms {
                let tag = self.tenants.tag(*tenant);
                let writing = self.disks.iter().flat_map(|disk| disk.writing.values());
                let own = writing.filter(|writing| writing.tenant == tag);
                *room = room.saturating_sub(own.map(|writing| stored_len(writing.len)).sum());
            }
        }
        Rooms(rooms)
    }

    /// Orders a node to write what waits for its disk.
    fn begin_writing(&mut self, no: SegmentNo, count_max: usize, bytes_max: u64) {
        let mut rooms = self.disk_rooms();
        let Self { disks, objects, segments, tenants, shelf, .. } = self;
        let Some(disk) = disks.get_mut(no) else { return };
        while disk.writing.len() < count_max
            && (disk.writing_bytes < bytes_max || disk.writing.is_empty())
            && let Some(Queued { index, generation, proven }) = disk.queue.pop_front()
        {
            let entry = objects.entry(index);
            if entry.generation != generation || !entry.is_complete() {
                // Its bytes were counted when it was queued; the counter is corrected when the queue is
                // empty.
                continue;
            }
            disk.queue_bytes = disk.queue_bytes.saturating_sub(entry.len);
            let is_copied = disk.writing.contains_key(&generation)
                || shelf.find_generation(entry.full_key(), generation).is_some();
            if is_copied {
                continue;
            }
            let node = disk.node;
            let here = |placed: &&crate::segments::Placed| {
                segments.get(placed.segment).is_some_and(|segment| segment.node == node)
            };
            let Some(placed) = entry.replicas.as_slice().iter().find(here) else {
                objects.await_copy(index, false);
                continue;
            };
            if !rooms.take(entry.tenant, stored_len(entry.len)) {
                objects.await_copy(index, false);
                continue;
            }
            let key = entry.key.as_slice();
            let writing = Writing {
                index,
                segment: placed.segment,
                addr: placed.addr,
                tenant: tenants.tag(entry.tenant),
                key: key.into(),
                len: entry.len,
                crc32c: unbound(entry.checksum, key, generation),
                proven,
            };
            disk.writing_bytes += entry.len;
            disk.writing.insert(generation, writing);
        }
        if disk.queue.is_empty() {
            disk.queue_bytes = 0;
        }
    }

    /// An object was written to a disk, or was not.
    fn end_writing(
        &mut self,
        no: SegmentNo,
        generation: u64,
        result: Result<u64, ErrorCode>,
    ) -> Result<(), ErrorCode> {
        let Some(disk) = self.disks.get_mut(no) else { return Err(ErrorCode::SegmentNotFound) };
        let Some(writing) = disk.writing.remove(&generation) else { return Err(ErrorCode::TaskNotFound) };
        disk.writing_bytes = disk.writing_bytes.saturating_sub(writing.len);
        self.objects.await_copy_of(writing.index, generation, false);
        let Writing { index, segment, addr, tenant, key, .. } = writing;
        let entry = self.objects.entry(index);
        let unchanged = self.is_there(index, generation) && entry.is_at(segment, addr) && entry.is_plain();
        match result {
            Ok(locator) if unchanged => {
                let record = Record {
                    key: KeyBytes::new(&key),
                    generation,
                    locator,
                    len: entry.len as u32,
                    checksum: entry.checksum,
                    disk: no,
                    tenant: entry.tenant,
                    hits: 0,
                };
                self.stats.demotions_total += 1;
                self.stats.demoted_bytes_total += u64::from(record.len);
                self.unshelve(FullKey { tenant: record.tenant, key: &key }, |_| true);
                self.shelve(record);
            }
            // The node has not begun to write it.
            Err(ErrorCode::UnavailableInCurrentStatus) => self.stats.demotions_failed_total += 1,
            result => {
                self.stats.demotions_failed_total += 1;
                self.add_tombstone(no, generation, Tombstone { tenant, key, locator: result.ok() });
            }
        }
        Ok(())
    }

    /// Adds a record to the shelf and to its disk.
    fn shelve(&mut self, record: Record) {
        let (no, locator) = (record.disk, record.locator);
        self.objects.note_key(record.full_key());
        self.objects.usage_mut(record.tenant).disk_bytes += stored_len(record.len.into());
        let index = self.shelf.insert(record);
        if let Some(disk) = self.disks.get_mut(no) {
            disk.add(locator, index);
        }
    }

    /// The same bytes have another name, because their disk was mounted again.
    fn move_record(&mut self, index: u32, no: SegmentNo, locator: u64) {
        self.leave_disk(index);
        self.objects.note_key(self.shelf.record(index).full_key());
        self.shelf.moved(index, no, locator);
        if let Some(disk) = self.disks.get_mut(no) {
            disk.add(locator, index);
        }
    }

    fn remove_record(&mut self, index: u32) -> Record {
        self.objects.note_key(self.shelf.record(index).full_key());
        let record = self.shelf.remove(index);
        let bytes = &mut self.objects.usage_mut(record.tenant).disk_bytes;
        *bytes = bytes.saturating_sub(stored_len(record.len.into()));
        let shelf = &self.shelf;
        if let Some(disk) = self.disks.get_mut(record.disk) {
            let no = disk.no;
            disk.left(record.locator, |index| Some(shelf.record(index)).filter(|record| record.disk == no));
        }
        record
    }

    /// A record is about to be moved from its disk.
    fn leave_disk(&mut self, index: u32) {
        let (no, locator) = (self.shelf.record(index).disk, self.shelf.record(index).locator);
        let shelf = &self.shelf;
        if let Some(disk) = self.disks.get_mut(no) {
            let there =
                |other: u32| Some(shelf.record(other)).filter(|record| record.disk == no && other != index);
            disk.left(locator, there);
        }
    }

    /// An object on a disk cannot be read any more.
    fn lose_record(&mut self, index: u32) {
        self.drop_record(index, true);
        self.stats.disk_lost_total += 1;
    }

    /// Remembers that a generation, which is or may be on a disk, was removed.
    fn add_tombstone(&mut self, no: SegmentNo, generation: u64, tombstone: Tombstone) {
        // If the disk was mounted again since, its present number has the tombstones.
        let Some(uuid) = self.disks.get(no).map(|disk| disk.uuid) else { return };
        let Some(no) = self.disks.named(&uuid).map(|disk| disk.no) else { return };
        let Some(disk) = self.disks.get_mut(no) else { return };
        if disk.clearing.is_some() {
            return;
        }
        disk.tombstones.insert(generation, tombstone);
        if disk.tombstones.len() <= TOMBSTONES_MAX {
            return;
        }
        if disk.is_here() {
            self.clear_disk(no);
        } else {
            self.drop_disk(no);
            self.disks.forget(uuid, self.generation);
        }
    }

    /// Voids everything on a disk.
    fn clear_disk(&mut self, no: SegmentNo) {
        self.disks.next_ticket += 1;
        let (ticket, generation) = (self.disks.next_ticket, self.generation);
        let Some(disk) = self.disks.get_mut(no) else { return };
        disk.clearing = Some(ticket);
        disk.tombstones.clear();
        disk.writing.clear();
        (disk.writing_bytes, disk.queue_bytes) = (0, 0);
        for queued in core::mem::take(&mut disk.queue) {
            self.objects.await_copy_of(queued.index, queued.generation, false);
        }
        let (uuid, before) = (disk.uuid, core::mem::take(&mut disk.before));
        let members = disk.take_all();
        self.drop_members(no, members);
        before.into_iter().for_each(|old| self.drop_disk(old));
        self.disks.forget(uuid, generation);
    }

    /// Whether the node of a disk takes objects for it. What waits for a disk that takes none may be copied
    /// to another one.
    fn close_disk(&mut self, no: SegmentNo, closed: bool) {
        let Some(disk) = self.disks.get_mut(no) else { return };
        disk.closed = closed;
        if closed {
            disk.queue_bytes = 0;
            for queued in core::mem::take(&mut disk.queue) {
                self.objects.await_copy_of(queued.index, queued.generation, false);
            }
        }
    }

    /// Forgets a disk, and which objects are on it.
    fn drop_disk(&mut self, no: SegmentNo) {
        let Some(disk) = self.disks.get_mut(no) else { return };
        let members = disk.take_all();
        let before = core::mem::take(&mut disk.before);
        for queued in core::mem::take(&mut disk.queue) {
            self.objects.await_copy_of(queued.index, queued.generation, false);
        }
        self.drop_members(no, members);
        self.disks.remove(no);
        before.into_iter().for_each(|old| self.drop_disk(old));
    }

    fn drop_members(&mut self, no: SegmentNo, members: Vec<u32>) {
        for index in members {
            if self.shelf.record(index).disk == no {
                self.remove_record(index);
            }
        }
    }
}

/// Whether objects may be queued for a disk.
fn accepts(disk: &Disk) -> bool {
    disk.state == DiskState::Ready
        && !disk.closed
        && disk.clearing.is_none()
        && disk.queue.len() < QUEUE_MAX
        && disk.queue_bytes < QUEUE_BYTES_MAX
}

//! The disks of nodes, as the master knows them: which there are, what is being written to them, and which
//! objects on them were removed.

use alloc::boxed::Box;
use alloc::collections::{BTreeMap, VecDeque};
use alloc::vec::Vec;

use serde::{Deserialize, Serialize};
use te_core::Instant;

use crate::message::Staging;
use crate::shelf::Record;
use crate::{Incarnation, NodeId, SegmentNo, TenantTag};

/// The name of a disk, for good.
pub(crate) type DiskUuid = [u8; 16];

/// Removed objects of one disk that its node has not confirmed; beyond this the disk is cleared.
pub(crate) const TOMBSTONES_MAX: usize = 1 << 16;
/// Objects that wait to be given to one disk.
pub(crate) const QUEUE_MAX: usize = 4_096;
/// Disks that were forgotten while objects that were removed since may be on them.
const FLOORS_MAX: usize = 4_096;
/// Indices in the list of an extent that may be stale, before the list is sorted out.
const STALE_MIN: u32 = 64;

/// What a disk can do.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) enum DiskState {
    /// Its objects are being announced.
    Opening,
    /// All of its objects are known, and objects can be written to it.
    Ready,
    /// Its node is gone, since then. Its objects cannot be read.
    Away(Instant),
}

/// An object that was removed while its bytes are, or may be, on a disk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(crate) struct Tombstone {
    pub(crate) tenant: TenantTag,
    pub(crate) key: Box<[u8]>,
    pub(crate) locator: Option<u64>,
}

/// An object that a node was told to write to its disk.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(crate) struct Writing {
    pub(crate) index: u32,
    pub(crate) segment: SegmentNo,
    pub(crate) addr: u64,
    pub(crate) tenant: TenantTag,
    pub(crate) key: Box<[u8]>,
    pub(crate) len: u64,
    pub(crate) crc32c: u32,
    pub(crate) proven: bool,
}

/// An object that is to be written to a disk.
#[derive(Clone, Copy, Debug, Serialize, Deserialize)]
pub(crate) struct Queued {
    pub(crate) index: u32,
    pub(crate) generation: u64,
    pub(crate) proven: bool,
}

/// The objects of one extent.
#[derive(Debug, Default, Serialize, Deserialize)]
struct Members {
    /// Indices of records; some may be of other objects by now.
    list: Vec<u32>,
    /// How many are stale, at least.
    stale: u32,
}

/// One disk.
#[derive(Debug, Serialize, Deserialize)]
pub(crate) struct Disk {
    pub(crate) no: SegmentNo,
    pub(crate) uuid: DiskUuid,
    pub(crate) node: NodeId,
    pub(crate) incarnation: Incarnation,
    pub(crate) endpoint: Box<str>,
    pub(crate) stage: Box<str>,
    pub(crate) staging: Staging,
    pub(crate) bytes: u64,
    pub(crate) extent_bytes: u64,
    /// Where its packs are, if readers may read them themselves; empty for a disk of its node alone.
    pub(crate) shared: Box<str>,
    pub(crate) state: DiskState,
    /// Its numbers in earlier mounts: what is not announced of these is dropped.
    pub(crate) before: Vec<SegmentNo>,
    extents: BTreeMap<u64, Members>,
    /// By generation.
    pub(crate) tombstones: BTreeMap<u64, Tombstone>,
    /// By generation.
    pub(crate) writing: BTreeMap<u64, Writing>,
    pub(crate) writing_bytes: u64,
    pub(crate) queue: VecDeque<Queued>,
    pub(crate) queue_bytes: u64,
    /// Its node writes nothing to it at present: nothing is queued for it.
    pub(crate) closed: bool,
    /// Everything on it is void: the number of the order that says so.
    pub(crate) clearing: Option<u64>,
}

impl Disk {
    pub(crate) fn extent_of(&self, locator: u64) -> u64 {
        locator / self.extent_bytes
    }

    /// Notes a record that is on this disk.
    pub(crate) fn add(&mut self, locator: u64, index: u32) {
        let sequence = self.extent_of(locator);
        self.extents.entry(sequence).or_default().list.push(index);
    }

    /// Indices of records that may be in the extents of these locators.
    pub(crate) fn members(&self, from: u64, to: u64) -> Vec<u32> {
        let extents = self.extents.range(self.extent_of(from)..=self.extent_of(to).max(self.extent_of(from)));
        extents.flat_map(|(_, members)| members.list.iter().copied()).collect()
    }

    /// A record is not in its extent any more. `of_disk` returns a record if it is on this disk.
    pub(crate) fn left<'a>(&mut self, locator: u64, of_disk: impl Fn(u32) -> Option<&'a Record>) {
        let sequence = self.extent_of(locator);
        let extent_bytes = self.extent_bytes;
        let is_there =
            |index: &u32| of_disk(*index).is_some_and(|record| record.locator / extent_bytes == sequence);
        let Some(members) = self.extents.get_mut(&sequence) else { return };
        members.stale += 1;
        if members.stale < STALE_MIN.max(members.list.len() as u32 / 2) {
            return;
        }
        members.list.retain(is_there);
        members.list.sort_unstable();
        members.list.dedup();
        members.list.shrink_to(2 * members.list.len());
        members.stale = 0;
        if members.list.is_empty() {
            self.extents.remove(&sequence);
        }
    }

    /// The records that may be in an extent, which is given up.
    pub(crate) fn take_extent(&mut self, sequence: u64) -> Vec<u32> {
        self.extents.remove(&sequence).map(|members| members.list).unwrap_or_default()
    }

    /// The records that may be on the disk.
    pub(crate) fn take_all(&mut self) -> Vec<u32> {
        core::mem::take(&mut self.extents).into_values().flat_map(|members| members.list).collect()
    }

    /// Whether its node serves it.
    pub(crate) fn is_here(&self) -> bool {
        !matches!(self.state, DiskState::Away(_))
    }

    /// Whether objects can be read from it: packs need no node for that.
    pub(crate) fn is_readable(&self) -> bool {
        self.is_here() || self.is_shared()
    }

    pub(crate) fn is_shared(&self) -> bool {
        !self.shared.is_empty()
    }

    fn memory_bytes(&self) -> usize {
        const MAP: usize = 64;
        let members: usize = self.extents.values().map(|members| members.list.capacity() * 4 + MAP).sum();
        members
            + self.tombstones.values().map(|tombstone| tombstone.key.len() + MAP + 40).sum::<usize>()
            + self.writing.values().map(|writing| writing.key.len() + MAP + 72).sum::<usize>()
            + self.queue.capacity() * size_of::<Queued>()
            + size_of::<Self>()
    }
}

/// All disks, by number.
#[derive(Debug, Default, Serialize, Deserialize)]
pub(crate) struct Disks {
    list: Vec<Disk>,
    /// Disks that were forgotten: removals that came later were not told to them, so nothing on them counts
    /// that is older than this generation.
    floors: BTreeMap<DiskUuid, u64>,
    /// The same for disks that are not in `floors` any more.
    floor: u64,
    /// The number of the next order to clear a disk.
    pub(crate) next_ticket: u64,
}

impl Disks {
    pub(crate) fn iter(&self) -> impl Iterator<Item = &Disk> {
        self.list.iter()
    }

    pub(crate) fn iter_mut(&mut self) -> impl Iterator<Item = &mut Disk> {
        self.list.iter_mut()
    }

    pub(crate) const fn is_empty(&self) -> bool {
        self.list.is_empty()
    }

    pub(crate) const fn len(&self) -> usize {
        self.list.len()
    }

    pub(crate) fn get(&self, no: SegmentNo) -> Option<&Disk> {
        self.list.binary_search_by_key(&no, |disk| disk.no).ok().map(|at| &self.list[at])
    }

    pub(crate) fn get_mut(&mut self, no: SegmentNo) -> Option<&mut Disk> {
        self.list.binary_search_by_key(&no, |disk| disk.no).ok().map(|at| &mut self.list[at])
    }

    /// The latest disk with this name.
    pub(crate) fn named(&self, uuid: &DiskUuid) -> Option<&Disk> {
        self.list.iter().rev().find(|disk| disk.uuid == *uuid)
    }

    /// Adds a disk. Numbers only grow, so that the list stays sorted.
    pub(crate) fn add(&mut self, disk: Disk) {
        self.list.push(disk);
    }

    /// Removes a disk.
    pub(crate) fn remove(&mut self, no: SegmentNo) -> Option<Disk> {
        let at = self.list.binary_search_by_key(&no, |disk| disk.no).ok()?;
        Some(self.list.remove(at))
    }

    /// From here on removals are not told to this disk: nothing on it that is older than `generation` counts.
    pub(crate) fn forget(&mut self, uuid: DiskUuid, generation: u64) {
        self.floors.insert(uuid, generation);
        if self.floors.len() > FLOORS_MAX
            && let Some((uuid, floor)) =
                self.floors.iter().min_by_key(|(_, floor)| **floor).map(|(u, f)| (*u, *f))
        {
            self.floors.remove(&uuid);
            self.floor = self.floor.max(floor);
        }
    }

    /// Objects on this disk count if they are newer than this.
    pub(crate) fn floor(&self, uuid: &DiskUuid) -> u64 {
        self.floors.get(uuid).copied().unwrap_or(self.floor)
    }

    /// The disk is cleared: what is written to it from here on counts.
    pub(crate) fn cleared(&mut self, uuid: &DiskUuid) {
        self.floors.remove(uuid);
    }

    pub(crate) fn memory_bytes(&self) -> usize {
        self.list.iter().map(Disk::memory_bytes).sum::<usize>() + self.floors.len() * 64
    }
}

/// What a disk is mounted with.
pub(crate) struct NewDisk<'a> {
    pub(crate) no: SegmentNo,
    pub(crate) mount: &'a crate::message::MountDisk<'a>,
    pub(crate) before: Vec<SegmentNo>,
}

impl Disk {
    pub(crate) fn new(new: NewDisk<'_>) -> Self {
        let NewDisk { no, mount, before } = new;
        Self {
            no,
            uuid: mount.uuid,
            node: mount.node,
            incarnation: mount.incarnation,
            endpoint: mount.endpoint.into(),
            stage: mount.stage.into(),
            staging: mount.staging,
            bytes: mount.bytes,
            extent_bytes: mount.extent_bytes.max(1),
            shared: mount.shared.into(),
            state: DiskState::Opening,
            before,
            extents: BTreeMap::new(),
            tombstones: BTreeMap::new(),
            writing: BTreeMap::new(),
            writing_bytes: 0,
            queue: VecDeque::new(),
            queue_bytes: 0,
            closed: false,
            clearing: None,
        }
    }
}

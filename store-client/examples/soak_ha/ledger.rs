//! What one writer was told about its objects, and what a later read of one of them means. No I/O.
//!
//! An object must be readable when all of the following hold; a miss is a *loss* then, and only then.
//!
//! * Its latest put was acknowledged, and no removal was begun. A put or a removal without an answer takes
//!   the object out of the audit.
//! * It is pinned, so eviction spares it, and it had a readable replica in the memory of a node that has run
//!   ever since. Which nodes have one is asked after each put. A node that is killed takes its replicas
//!   along: it does not count from before it is killed until it is mounted anew.
//! * Or it is cold (not pinned), and before the fault the master named a readable replica on a disk. Cold
//!   objects are the youngest ones and much smaller than the disks, so none is given up by its disk
//!   meanwhile. When bits of a disk are flipped, nothing has to be on it any more.
//!
//! Whatever must or may be missing, what is read must be right: the bytes follow from key and version, the
//! version is one that was put, it is not an earlier one than was acknowledged, and no removed object is
//! read.

use std::collections::{BTreeMap, VecDeque};

/// Removed objects that are remembered.
const REMOVED_MAX: usize = 20_000;

/// Why an object stays.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Kind {
    /// It is pinned: it stays in memory.
    Pinned,
    /// Eviction moves it to a disk.
    Cold,
}

/// What a read has found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Read {
    /// Nothing.
    Miss,
    /// A value; `version` is the one that it claims, and `intact` says whether all bytes follow from it.
    Value { version: u64, intact: bool },
}

/// What a read means.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Verdict {
    /// As it should be.
    Good,
    /// A miss that is allowed.
    Gone,
    /// A miss of an acknowledged object.
    Lost,
    /// A removed object, or an earlier version than the acknowledged one.
    Resurrected,
    /// Other bytes than were put.
    Wrong,
}

#[derive(Clone, Debug)]
struct Entry {
    kind: Kind,
    /// The version that was acknowledged.
    acked: u64,
    /// The version that was put last.
    tried: u64,
    /// Nodes with a replica in memory, a bit for each.
    holders: u32,
    on_disk: bool,
}

/// The objects of one writer. The numbers of objects are never used twice.
#[derive(Debug, Default)]
pub(crate) struct Ledger {
    live: BTreeMap<u64, Entry>,
    removed: VecDeque<u64>,
    next: u64,
    /// Nodes that are not to be counted on, a bit for each.
    down: u32,
}

impl Ledger {
    /// The number of a new object, and its first version.
    pub(crate) fn create(&mut self, kind: Kind) -> (u64, u64) {
        let id = self.next;
        self.next += 1;
        self.live.insert(id, Entry { kind, acked: 0, tried: 1, holders: 0, on_disk: false });
        (id, 1)
    }

    /// The next version of an object, which is to be put. `None`: there is no such object.
    pub(crate) fn replace(&mut self, id: u64) -> Option<u64> {
        let entry = self.live.get_mut(&id)?;
        entry.tried += 1;
        Some(entry.tried)
    }

    /// The latest put was acknowledged. These nodes have a replica in memory.
    pub(crate) fn acknowledged(&mut self, id: u64, holders: u32) {
        let down = self.down;
        if let Some(entry) = self.live.get_mut(&id) {
            entry.acked = entry.tried;
            entry.holders = holders & !down;
            entry.on_disk = false;
        }
    }

    /// Nothing is known of the object any more: a put or removal of it had no answer.
    pub(crate) fn forget(&mut self, id: u64) {
        self.live.remove(&id);
    }

    /// Its removal was acknowledged.
    pub(crate) fn removed(&mut self, id: u64) {
        if self.live.remove(&id).is_some() {
            self.removed.push_back(id);
            if self.removed.len() > REMOVED_MAX {
                self.removed.pop_front();
            }
        }
    }

    /// A node is about to be killed: what only its memory has will be gone.
    pub(crate) fn node_down(&mut self, node: u32) {
        self.down |= 1 << node;
        self.live.values_mut().for_each(|entry| entry.holders &= !(1 << node));
    }

    /// The node runs again, with empty memory.
    pub(crate) fn node_up(&mut self, node: u32) {
        self.down &= !(1 << node);
    }

    /// The master names a readable replica on a disk, or none.
    pub(crate) fn set_on_disk(&mut self, id: u64, on_disk: bool) {
        if let Some(entry) = self.live.get_mut(&id) {
            entry.on_disk = on_disk;
        }
    }

    /// Disks were damaged on purpose.
    pub(crate) fn void_disks(&mut self) {
        self.live.values_mut().for_each(|entry| entry.on_disk = false);
    }

    /// Whether a miss of this object would be a loss.
    pub(crate) fn must_exist(&self, id: u64) -> bool {
        self.live.get(&id).is_some_and(|entry| match entry.kind {
            Kind::Pinned => entry.acked > 0 && entry.holders != 0,
            Kind::Cold => entry.acked > 0 && entry.on_disk,
        })
    }

    /// Judges a read of an object that was put and not removed.
    pub(crate) fn judge(&self, id: u64, read: Read) -> Verdict {
        let Some(entry) = self.live.get(&id) else { return Verdict::Gone };
        match read {
            Read::Miss if self.must_exist(id) => Verdict::Lost,
            Read::Miss => Verdict::Gone,
            Read::Value { version, intact } if !intact || version > entry.tried => Verdict::Wrong,
            Read::Value { version, .. } if version < entry.acked => Verdict::Resurrected,
            Read::Value { .. } => Verdict::Good,
        }
    }

    /// Judges a read of an object whose removal was acknowledged.
    pub(crate) const fn judge_removed(read: Read) -> Verdict {
        match read {
            Read::Miss => Verdict::Gone,
            Read::Value { .. } => Verdict::Resurrected,
        }
    }

    /// The kind of an object, and the version that was acknowledged.
    pub(crate) fn of(&self, id: u64) -> Option<(Kind, u64)> {
        self.live.get(&id).map(|entry| (entry.kind, entry.acked))
    }

    /// The objects of a kind, oldest first.
    pub(crate) fn ids(&self, kind: Kind) -> Vec<u64> {
        self.live.iter().filter(|(_, entry)| entry.kind == kind).map(|(id, _)| *id).collect()
    }

    /// The removed objects, oldest first.
    pub(crate) fn removed_ids(&self) -> impl DoubleEndedIterator<Item = u64> + ExactSizeIterator {
        self.removed.iter().copied()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MISS: Read = Read::Miss;

    const fn value(version: u64) -> Read {
        Read::Value { version, intact: true }
    }

    fn pinned(holders: u32) -> (Ledger, u64) {
        let mut ledger = Ledger::default();
        let (id, version) = ledger.create(Kind::Pinned);
        assert_eq!(version, 1);
        ledger.acknowledged(id, holders);
        (ledger, id)
    }

    #[test]
    fn a_miss_is_a_loss_only_while_a_node_that_ran_on_had_a_replica() {
        let (mut ledger, id) = pinned(0b11);
        assert_eq!(ledger.judge(id, MISS), Verdict::Lost);
        ledger.node_down(0);
        assert_eq!(ledger.judge(id, MISS), Verdict::Lost, "the other replica");
        ledger.node_up(0);
        ledger.node_down(1);
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone);
        assert_eq!(ledger.judge(id, value(1)), Verdict::Good);
    }

    #[test]
    fn a_replica_on_a_node_that_is_down_does_not_count() {
        let (mut ledger, id) = pinned(0b1);
        ledger.node_down(0);
        assert_eq!(ledger.replace(id), Some(2));
        // The master has not noticed yet.
        ledger.acknowledged(id, 0b1);
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone);
        ledger.node_up(0);
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone, "the node came back empty");
        let _ = ledger.replace(id);
        ledger.acknowledged(id, 0b1);
        assert_eq!(ledger.judge(id, MISS), Verdict::Lost);
    }

    #[test]
    fn a_put_without_an_answer_proves_nothing() {
        let mut ledger = Ledger::default();
        let (id, _) = ledger.create(Kind::Pinned);
        assert_eq!((ledger.judge(id, MISS), ledger.judge(id, value(1))), (Verdict::Gone, Verdict::Good));
        ledger.forget(id);
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone);
        assert_eq!(ledger.removed_ids().len(), 0);
    }

    #[test]
    fn an_earlier_version_than_the_acknowledged_one_has_come_back() {
        let (mut ledger, id) = pinned(0b1);
        assert_eq!(ledger.replace(id), Some(2));
        assert_eq!(ledger.judge(id, value(1)), Verdict::Good, "the second put is under way");
        assert_eq!(ledger.judge(id, value(2)), Verdict::Good);
        ledger.acknowledged(id, 0b1);
        assert_eq!(ledger.judge(id, value(1)), Verdict::Resurrected);
        assert_eq!(ledger.judge(id, value(3)), Verdict::Wrong, "no client has put that");
        assert_eq!(ledger.judge(id, Read::Value { version: 2, intact: false }), Verdict::Wrong);
    }

    #[test]
    fn a_removed_object_that_is_read_has_come_back() {
        let (mut ledger, id) = pinned(0b1);
        ledger.removed(id);
        assert_eq!(ledger.removed_ids().collect::<Vec<_>>(), [id]);
        assert_eq!(Ledger::judge_removed(value(1)), Verdict::Resurrected);
        assert_eq!(Ledger::judge_removed(MISS), Verdict::Gone);
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone);
        assert_ne!(ledger.create(Kind::Pinned).0, id);
    }

    #[test]
    fn a_cold_object_must_be_there_while_it_is_on_an_undamaged_disk() {
        let mut ledger = Ledger::default();
        let (id, _) = ledger.create(Kind::Cold);
        ledger.acknowledged(id, 0b1);
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone, "it may be evicted");
        ledger.set_on_disk(id, true);
        ledger.node_down(0);
        assert_eq!(ledger.judge(id, MISS), Verdict::Lost);
        ledger.void_disks();
        assert_eq!(ledger.judge(id, MISS), Verdict::Gone);
        assert_eq!((ledger.ids(Kind::Cold), ledger.ids(Kind::Pinned)), (vec![id], vec![]));
    }

    #[test]
    fn the_memory_of_removals_is_bounded() {
        let mut ledger = Ledger::default();
        for _ in 0..REMOVED_MAX + 5 {
            let (id, _) = ledger.create(Kind::Cold);
            ledger.removed(id);
        }
        assert_eq!((ledger.removed_ids().len(), ledger.removed_ids().next()), (REMOVED_MAX, Some(5)));
    }
}

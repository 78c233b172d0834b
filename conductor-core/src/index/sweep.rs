//! Cleaning up after clears and removals, a few entries at a time.
//!
//! A pass visits every entry once, in the order of hashes, which insertions and removals do not disturb. It
//! takes the seats that were dead when it began out of the sets, removes entries that have neither holders
//! nor children, and looks whether owners that were holey still are.

use alloc::vec::Vec;

use super::Index;
use super::holders::{EMPTY, SetId, Stamped, each_seat};
use super::table::At;

/// Blocks without holders that are followed down a chain at a time.
const PATH_MAX: usize = 1024;

#[derive(Debug, Default)]
pub(super) struct Sweep {
    /// The next hash, while a pass is going on.
    cursor: Option<u64>,
    /// Seats that were dead when the pass began.
    dead: Vec<u64>,
    /// Seats that the pass examines for holes, and those of them that have one.
    examined: Vec<u64>,
    holed: Vec<u64>,
    examines: bool,
    /// Entries without holders may have lost their children.
    ghosts_dirty: bool,
    /// Blocks that were stored or removed since a pass began to examine.
    changes: usize,
    /// The last step from a set to the set without dead seats.
    step: Option<(Stamped, Stamped)>,
    /// A chain of entries without holders.
    path: Vec<u64>,
}

impl Sweep {
    pub(super) fn note_ghost(&mut self) {
        self.ghosts_dirty = true;
    }

    pub(super) fn note_forgotten(&mut self, ghosts: usize) {
        self.ghosts_dirty |= ghosts > 0;
    }

    pub(super) fn note_changes(&mut self, blocks: usize) {
        self.changes = self.changes.saturating_add(blocks);
    }

    /// The next pass examines whether owners are holey still.
    pub(super) fn examine_soon(&mut self) {
        self.changes = usize::MAX;
    }

    /// A seat got a hole.
    pub(super) fn note_hole(&mut self, seat: u32) {
        if let Some(word) = self.holed.get_mut(seat as usize / 64) {
            *word |= 1 << (seat % 64);
        }
    }
}

impl Index {
    /// Takes up to `budget` steps of cleaning up after clears and removals, and returns how many it took: 0
    /// when there is nothing to do. A step visits one entry, which takes some ten nanoseconds. Call it after
    /// clears until it returns 0, for example with a budget of 10,000 between batches of events.
    pub fn sweep(&mut self, budget: usize) -> usize {
        let mut steps = 0;
        while steps < budget {
            let Some(cursor) = self.sweep.cursor else {
                if !self.begin_pass() {
                    break;
                }
                steps += 1;
                continue;
            };
            let Some(at) = self.table.at_or_after(cursor) else {
                self.end_pass();
                steps += 1;
                continue;
            };
            let hash = self.table.get(at).hash;
            steps += self.visit(hash);
            self.sweep.cursor = hash.checked_add(1);
            if self.sweep.cursor.is_none() {
                self.end_pass();
            }
        }
        steps
    }

    fn begin_pass(&mut self) -> bool {
        // Owners that stay holey are examined again only after as many changes as there are entries.
        let examines = self.seats.holey_count() > 0 && self.sweep.changes >= self.table.len();
        if self.seats.dead() == 0 && !(self.ghosts > 0 && self.sweep.ghosts_dirty) && !examines {
            return false;
        }
        let sweep = &mut self.sweep;
        self.seats.dead_into(&mut sweep.dead);
        sweep.examines = examines;
        sweep.examined.clear();
        sweep.holed.clear();
        if examines {
            sweep.examined.extend_from_slice(self.seats.holey());
            sweep.holed.resize(sweep.examined.len(), 0);
            sweep.changes = 0;
        }
        sweep.ghosts_dirty = false;
        sweep.step = None;
        sweep.cursor = Some(0);
        true
    }

    fn end_pass(&mut self) {
        self.sweep.cursor = None;
        let dead = core::mem::take(&mut self.sweep.dead);
        for (at, word) in dead.iter().enumerate() {
            each_seat(at, *word, |seat| self.seats.swept(seat));
        }
        self.sweep.dead = dead;
        if self.sweep.examines {
            self.sweep.examines = false;
            for at in 0..self.sweep.examined.len() {
                let whole = self.sweep.examined[at] & !self.sweep.holed[at];
                each_seat(at, whole, |seat| self.seats.heal(seat));
            }
        }
        self.sweep.holed.clear();
    }

    /// Visits an entry; returns the steps that it took.
    fn visit(&mut self, hash: u64) -> usize {
        let Some(at) = self.table.find(hash) else { return 1 };
        let entry = self.table.get(at);
        let set = self.without_dead(at, entry.set);
        let steps = if set == EMPTY { self.prune(hash) } else { 1 };
        if self.sweep.examines {
            self.examine(hash);
        }
        steps
    }

    /// Takes the dead seats out of an entry's set; returns the set that it has now.
    fn without_dead(&mut self, at: At, set: SetId) -> SetId {
        if set == EMPTY || self.sweep.dead.is_empty() {
            return set;
        }
        let swept = match self.sweep.step {
            Some((from, to)) if from == self.holders.stamped(set) && to == self.holders.stamped(to.0) => to.0,
            _ => {
                let swept = self.holders.without_all(set, &self.sweep.dead);
                self.sweep.step = Some((self.holders.stamped(set), self.holders.stamped(swept)));
                swept
            }
        };
        if swept != set {
            self.table.get_mut(at).set = swept;
            self.holders.retain(swept);
            self.holders.release(set);
            self.ghosts += usize::from(swept == EMPTY);
        }
        swept
    }

    /// Removes entries without holders from the end of a chain.
    fn prune(&mut self, hash: u64) -> usize {
        let mut path = core::mem::take(&mut self.sweep.path);
        path.clear();
        path.push(hash);
        let mut steps = 0;
        while let Some(last) = path.last().copied() {
            steps += 1;
            let Some(at) = self.table.find(last) else { break };
            let entry = self.table.get(at);
            let mut child = None;
            self.any_child(&entry, |of| {
                child = Some((of.hash, of.set));
                true
            });
            let Some((next, set)) = child else {
                self.forget(at);
                path.pop();
                continue;
            };
            let Some(next_at) = self.table.find(next) else { break };
            if self.without_dead(next_at, set) != EMPTY {
                break;
            }
            if path.len() == PATH_MAX {
                self.sweep.ghosts_dirty = true;
                break;
            }
            path.push(next);
        }
        self.sweep.path = path;
        steps
    }

    /// Notes the examined seats that have a child of an entry and not the entry.
    fn examine(&mut self, hash: u64) {
        let Some(at) = self.table.find(hash) else { return };
        let entry = self.table.get(at);
        let mut holed = core::mem::take(&mut self.sweep.holed);
        self.any_child(&entry, |child| {
            if child.set != entry.set {
                self.holders.each_not_in(child.set, entry.set, &self.sweep.examined, |seat| {
                    holed[seat as usize / 64] |= 1 << (seat % 64);
                });
            }
            false
        });
        self.sweep.holed = holed;
    }
}

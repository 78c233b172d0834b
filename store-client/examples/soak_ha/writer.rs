//! A writer: puts, replaces, reads and removes objects of its own all the time, keeps the ledger, and audits
//! it when it is told to.

use std::sync::Arc;
use std::sync::mpsc::{Receiver, Sender};
use std::time::{Duration, Instant};

use store_client::{
    Client, Get, Pin, PutOptions, RemoveMode, ReplicaState, Retention, Store as _, StoreError,
};
use te_core::testkit::Rng;

use super::content;
use super::flips::{self, Flips};
use super::ledger::{Kind, Ledger, Read, Verdict};
use super::shared::{Shared, say};

/// Objects per request of an audit.
const BATCH: usize = 64;
/// How long a miss that would be a loss is read again, and how often.
const AGAIN: Duration = Duration::from_millis(100);
const AGAIN_MAX: usize = 30;
/// For objects on disks: a node that was killed reads its disk, and announces what it finds, before its
/// objects can be read.
const AGAIN_COLD_MAX: usize = 200;
/// Time between two puts of cold objects: they have to live long enough to be moved to a disk.
const COLD_EVERY: Duration = Duration::from_millis(100);
/// Removed objects that are read in a quick audit: the latest ones, and others.
const REMOVED_LATEST: usize = 200;
const REMOVED_OTHERS: usize = 200;

/// How much an audit reads.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Scope {
    /// What is read is kept in memory. So a third of the cold objects, those that rest on their disks, are
    /// left out, and most of the removed objects.
    Quick,
    /// All objects, and some removed ones.
    Live,
    /// Everything.
    Full,
}

/// What a writer is told.
pub(crate) enum Order {
    /// Read what was acknowledged.
    Audit {
        scope: Scope,
        done: Sender<Audited>,
    },
    /// Find out which cold objects are on disks by now.
    Expect {
        done: Sender<Expected>,
    },
    /// The node is about to be killed.
    NodeDown {
        node: u32,
        done: Sender<()>,
    },
    NodeUp(u32),
    VoidDisks,
    Flip {
        flips: Flips,
        done: Sender<flips::Flipped>,
    },
}

/// The results of an audit.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Audited {
    pub(crate) read: u64,
    pub(crate) removed: u64,
    pub(crate) lost: u64,
    pub(crate) cold_lost: u64,
    pub(crate) resurrected: u64,
    pub(crate) wrong: u64,
    /// Objects that were allowed to be missing, and were.
    pub(crate) gone: u64,
    /// Objects that were read at a later try only.
    pub(crate) late: u64,
    /// Objects that could not be read because of errors.
    pub(crate) failed: u64,
    /// Cold objects that had to be there.
    pub(crate) cold: u64,
}

/// What is there before a fault.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Expected {
    pub(crate) live: u64,
    pub(crate) must: u64,
    pub(crate) on_disk: u64,
}

/// Settings of a writer.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Load {
    /// Pinned objects that it keeps.
    pub(crate) pinned: usize,
    /// Cold objects that it keeps; 0: none is made.
    pub(crate) cold: usize,
    pub(crate) pace: Duration,
    /// Nodes are killed, so it matters which of them has what.
    pub(crate) nodes_die: bool,
    /// Every so-many-th put is not carried out but reported as acknowledged, to see that the audit notices.
    pub(crate) lie: u64,
}

pub(crate) struct Writer {
    pub(crate) who: u64,
    pub(crate) client: Client,
    pub(crate) rng: Rng,
    pub(crate) load: Load,
    pub(crate) shared: Arc<Shared>,
    pub(crate) ledger: Ledger,
    /// When a cold object was put last.
    pub(crate) cold_at: Instant,
}

/// Least length of an object, bytes. Objects under 4 KiB do not go to disks.
const fn least(kind: Kind) -> usize {
    match kind {
        Kind::Pinned => 2_048,
        Kind::Cold => 8_192,
    }
}

impl Writer {
    pub(crate) fn run(mut self, orders: &Receiver<Order>) {
        while !self.shared.is_over() {
            // Orders come one by one: those that were sent before an answer was read are carried out before
            // it.
            while let Ok(order) = orders.try_recv() {
                self.obey(order);
            }
            self.step();
            std::thread::sleep(self.load.pace);
        }
    }

    fn obey(&mut self, order: Order) {
        match order {
            Order::Audit { scope, done } => {
                let _ = done.send(self.audit(scope));
            }
            Order::Expect { done } => {
                let _ = done.send(self.expect());
            }
            Order::NodeDown { node, done } => {
                self.ledger.node_down(node);
                let _ = done.send(());
            }
            Order::NodeUp(node) => self.ledger.node_up(node),
            Order::VoidDisks => self.ledger.void_disks(),
            Order::Flip { flips, done } => {
                let _ = done.send(flips::flip(self, &flips));
            }
        }
    }

    /// One operation of a random kind.
    fn step(&mut self) {
        let (pinned, cold) = (self.ledger.ids(Kind::Pinned), self.ledger.ids(Kind::Cold));
        let any =
            |ids: &[u64], rng: &mut Rng| (!ids.is_empty()).then(|| ids[rng.below(ids.len() as u64) as usize]);
        if cold.len() > self.load.cold {
            self.remove(cold[0]);
        } else if pinned.len() > self.load.pinned {
            let id = any(&pinned, &mut self.rng);
            id.into_iter().for_each(|id| self.remove(id));
        }
        let kind = if self.load.cold > 0 && self.cold_at.elapsed() >= COLD_EVERY {
            self.cold_at = Instant::now();
            // Some of them are on disks by then.
            if self.rng.below(5) == 0 {
                any(&cold, &mut self.rng).into_iter().for_each(|id| self.remove(id));
            }
            Kind::Cold
        } else {
            Kind::Pinned
        };
        match self.rng.below(100) {
            0..15 => any(&pinned, &mut self.rng).into_iter().for_each(|id| self.replace(id)),
            15..30 => any(&pinned, &mut self.rng).into_iter().for_each(|id| self.check_one(id)),
            30..36 => any(&pinned, &mut self.rng).into_iter().for_each(|id| self.remove(id)),
            _ => {
                let (id, version) = self.ledger.create(kind);
                self.put(id, version, kind);
            }
        }
    }

    pub(crate) fn key(&self, id: u64) -> Vec<u8> {
        format!("audit/{}/{id}", self.who).into_bytes()
    }

    pub(crate) fn value(&self, id: u64, version: u64) -> Option<Vec<u8>> {
        let (kind, _) = self.ledger.of(id)?;
        Some(content::value(self.who, id, version, least(kind)))
    }

    fn replace(&mut self, id: u64) {
        if let (Some(version), Some((kind, _))) = (self.ledger.replace(id), self.ledger.of(id)) {
            self.put(id, version, kind);
        }
    }

    fn put(&mut self, id: u64, version: u64, kind: Kind) {
        let key = self.key(id);
        let value = content::value(self.who, id, version, least(kind));
        let pin = if kind == Kind::Pinned { Pin::Hard } else { Pin::None };
        let options = PutOptions {
            replicas: 1 + (kind == Kind::Pinned && id % 2 == 1) as u8,
            retention: Retention { pin, ..Retention::DEFAULT },
            ..PutOptions::DEFAULT
        };
        let lies = self.load.lie > 0 && self.rng.below(self.load.lie) == 0;
        let put = if lies { Ok(()) } else { self.client.upsert(&key, value.as_slice(), &options) };
        if let Err(error) = put {
            return self.failed("put_errors", id, &error);
        }
        self.shared.count("acked_puts", 1);
        self.shared.count("acked_bytes", value.len() as u64);
        let holders = match kind {
            Kind::Pinned if self.load.nodes_die && !lies => match self.holders(&key) {
                Ok(holders) => holders,
                // It was acknowledged, but it is not known where it is.
                Err(error) => return self.failed("locate_errors", id, &error),
            },
            _ => u32::MAX,
        };
        self.ledger.acknowledged(id, holders);
    }

    /// The nodes with a replica in memory.
    fn holders(&mut self, key: &[u8]) -> Result<u32, StoreError> {
        let found = self.client.master().batch_replicas(&[key])?;
        let replicas = found.into_iter().next().and_then(Result::ok).unwrap_or_default();
        let complete = replicas.iter().filter(|replica| replica.state == ReplicaState::Complete);
        Ok(complete.filter_map(|replica| node_of(&replica.name)).fold(0, |holders, node| holders | 1 << node))
    }

    pub(crate) fn remove(&mut self, id: u64) {
        match self.client.remove(&self.key(id), RemoveMode::Force) {
            Ok(found) => {
                self.shared.count("acked_removes", 1);
                self.shared.count("removes_found_nothing", (!found).into());
                self.ledger.removed(id);
            }
            Err(error) => self.failed("remove_errors", id, &error),
        }
    }

    /// The outcome of a call is unknown, so the object is no longer part of the audit.
    fn failed(&mut self, kind: &'static str, id: u64, error: &StoreError) {
        if self.shared.count(kind, 1) % 100 == 1 {
            say(&format!("note {kind}: {error}"));
        }
        self.ledger.forget(id);
        let _ = self.client.remove(&self.key(id), RemoveMode::Force);
    }

    /// Reads one object during the load.
    fn check_one(&mut self, id: u64) {
        let mut audited = Audited::default();
        self.check(&[id], &mut audited);
        self.shared.count("reads", audited.read);
    }

    /// Reads objects that were put and not removed.
    fn check(&mut self, ids: &[u64], audited: &mut Audited) {
        for ids in ids.chunks(BATCH) {
            let found = self.read(ids);
            for (id, found) in ids.iter().zip(found) {
                self.settle(*id, found, audited);
            }
        }
    }

    fn settle(&mut self, id: u64, mut found: Result<Read, StoreError>, audited: &mut Audited) {
        let Some((kind, acked)) = self.ledger.of(id) else { return };
        let must = self.ledger.must_exist(id);
        audited.read += 1;
        audited.cold += u64::from(must && kind == Kind::Cold);
        let mut tries = 0;
        let before = self.client.counters();
        let tries_max = if kind == Kind::Cold { AGAIN_COLD_MAX } else { AGAIN_MAX };
        while tries < tries_max && (found.is_err() || (must && matches!(found, Ok(Read::Miss)))) {
            tries += 1;
            std::thread::sleep(AGAIN);
            found = self.read(&[id]).pop().unwrap_or(Ok(Read::Miss));
        }
        let found = match found {
            Ok(found) => found,
            Err(error) => {
                audited.failed += 1;
                return self.shared.complain("unreadable", &format!("object {id} of {}: {error}", self.who));
            }
        };
        let about = |this: &mut Self| {
            let key = this.key(id);
            let replicas = this.client.master().batch_replicas(&[&key]);
            let now = this.client.counters();
            format!(
                "{kind:?} object {id} of client {}, version {acked} acknowledged, found {found:?}; {} misses of \
                 disks, {} of transfers, {} of checksums; {replicas:?}",
                this.who,
                now.disk_misses - before.disk_misses,
                now.transfer_misses - before.transfer_misses,
                now.checksum_mismatches - before.checksum_mismatches,
            )
        };
        match self.ledger.judge(id, found) {
            Verdict::Good => audited.late += u64::from(tries > 0),
            Verdict::Gone => {
                audited.gone += 1;
                self.ledger.forget(id);
            }
            Verdict::Lost => {
                match kind {
                    Kind::Pinned => audited.lost += 1,
                    Kind::Cold => audited.cold_lost += 1,
                }
                let text = about(self);
                let name = if kind == Kind::Pinned { "lost" } else { "cold_lost" };
                self.shared.complain(name, &text);
                self.ledger.forget(id);
            }
            Verdict::Resurrected => {
                audited.resurrected += 1;
                let text = about(self);
                self.shared.complain("resurrected", &text);
                self.ledger.forget(id);
            }
            Verdict::Wrong => {
                audited.wrong += 1;
                let text = about(self);
                self.shared.complain("wrong", &text);
                self.ledger.forget(id);
            }
        }
    }

    /// Reads these objects, whatever is known of them.
    fn read(&mut self, ids: &[u64]) -> Vec<Result<Read, StoreError>> {
        let keys: Vec<Vec<u8>> = ids.iter().map(|id| self.key(*id)).collect();
        let mut values = vec![Vec::new(); ids.len()];
        let mut gets: Vec<Get<'_>> =
            keys.iter().zip(&mut values).map(|(key, value)| Get::new(key, value)).collect();
        let _ = self.client.batch_get(&mut gets);
        let results: Vec<_> = gets.into_iter().map(Get::into_result).collect();
        let mut found = Vec::with_capacity(ids.len());
        for ((id, value), result) in ids.iter().zip(&values).zip(results) {
            let least = self.ledger.of(*id).map_or(0, |(kind, _)| least(kind));
            found.push(result.map(|len| {
                let bytes = len.map(|_| value.as_slice());
                content::read(self.who, *id, least, bytes)
            }));
        }
        found
    }

    /// Reads one object once: for tests of damage, after which a miss is right.
    pub(crate) fn read_once(&mut self, id: u64) -> Result<Read, StoreError> {
        self.read(&[id]).pop().unwrap_or(Ok(Read::Miss))
    }

    fn audit(&mut self, scope: Scope) -> Audited {
        let mut audited = Audited::default();
        for kind in [Kind::Pinned, Kind::Cold] {
            let mut ids = self.ledger.ids(kind);
            ids.retain(|id| scope != Scope::Quick || kind == Kind::Pinned || id % 3 != 0);
            self.check(&ids, &mut audited);
        }
        let mut removed: Vec<u64> = self.ledger.removed_ids().collect();
        if scope != Scope::Full && removed.len() > REMOVED_LATEST + REMOVED_OTHERS {
            let mut latest = removed.split_off(removed.len() - REMOVED_LATEST);
            for _ in 0..REMOVED_OTHERS {
                latest.push(removed[self.rng.below(removed.len() as u64) as usize]);
            }
            removed = latest;
        }
        for ids in removed.chunks(BATCH) {
            for (id, found) in ids.iter().zip(self.read(ids)) {
                audited.removed += 1;
                match found.map(Ledger::judge_removed) {
                    Ok(Verdict::Resurrected) => {
                        audited.resurrected += 1;
                        let text = format!("object {id} of client {} was removed", self.who);
                        self.shared.complain("resurrected", &text);
                    }
                    Ok(_) => {}
                    Err(_) => audited.failed += 1,
                }
            }
        }
        audited
    }

    fn expect(&mut self) -> Expected {
        let (pinned, cold) = (self.ledger.ids(Kind::Pinned), self.ledger.ids(Kind::Cold));
        let mut expected = Expected { live: (pinned.len() + cold.len()) as u64, ..Expected::default() };
        for (id, disk_only) in self.places(&cold) {
            self.ledger.set_on_disk(id, disk_only.is_some());
            expected.on_disk += u64::from(disk_only.is_some());
        }
        let must = pinned.iter().chain(&cold).filter(|id| self.ledger.must_exist(**id));
        expected.must = must.count() as u64;
        expected
    }

    /// Of each object: whether it is on a disk, and `Some(true)` if it is nowhere else.
    pub(crate) fn places(&mut self, ids: &[u64]) -> Vec<(u64, Option<bool>)> {
        let mut places = Vec::new();
        for ids in ids.chunks(256) {
            let keys: Vec<Vec<u8>> = ids.iter().map(|id| self.key(*id)).collect();
            let keys: Vec<&[u8]> = keys.iter().map(Vec::as_slice).collect();
            let Ok(found) = self.client.master().batch_replicas(&keys) else { continue };
            for (id, replicas) in ids.iter().zip(found) {
                let replicas = replicas.unwrap_or_default();
                let (mut disks, mut others) = (0, 0);
                for replica in &replicas {
                    let complete = replica.state == ReplicaState::Complete;
                    match node_of(&replica.name) {
                        None if complete => disks += 1,
                        _ => others += 1,
                    }
                }
                places.push((*id, (disks > 0).then_some(others == 0)));
            }
        }
        places
    }
}

/// The number of the node whose memory has this name; `None`: it is a disk.
fn node_of(name: &str) -> Option<u32> {
    name.strip_prefix('n')?.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_and_disks_are_told_apart() {
        assert_eq!((node_of("n3"), node_of("127.0.0.1:4711")), (Some(3), None));
    }
}

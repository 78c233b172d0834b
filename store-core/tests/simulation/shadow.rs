//! The invariants, tracked beside the system and never shown to it.

use std::collections::{BTreeMap, HashMap, HashSet};
use std::fmt;

use store_core::SegmentNo;
use te_core::Instant;
use te_core::testkit::Rng;

/// A violated invariant.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A get returned bytes that are not those of the put it named, or of another key.
    WrongBytes(String),
    /// Nothing explains a response about a key: see `checker`.
    NotLinearizable(String),
    /// A range was allocated while an older put may still write it.
    GivenWhileWritten(String),
    /// A range was allocated while a reader holds a lease to it.
    GivenWhileLeased(String),
    /// A writer began to write where another, or an earlier write of its own, may still write.
    TwoWriters(String),
    /// A writer began to write a range that belongs to a newer put.
    WriteAfterLoss(String),
    /// The master sends readers to a range that belongs to another put.
    DoubleAllocation(String),
    /// Space is missing, or too much is free, at the end.
    Leak(String),
    /// A replica counts whose bytes are not those of its object.
    BadCopy(String),
    /// A checksum did not match, and the bytes had not been changed.
    Damaged(String),
    /// An intact replica was dropped as bad, or a dropped one is still returned to readers.
    BadDrop(String),
    /// An object is gone because of a copy, a move, a read or the end of a put.
    LostByTask(String),
    /// An object was evicted that is pinned for good.
    EvictedPinned(String),
    /// An object is gone because its replacement has begun.
    LostByUpsert(String),
    /// Something new on a segment that accepts nothing, or something left on one that is drained.
    NotDrained(String),
    /// A tenant has more than its quota.
    OverQuota(String),
    /// A tenant within its guarantee lost objects to another tenant.
    BelowGuarantee(String),
    /// A tenant saw or changed objects or tasks of another tenant.
    Foreign(String),
    /// The master's counters do not match what exists.
    Books(String),
    /// A party ended, or changed, what another party began.
    Forged(String),
    /// A party acted for a live node of another party, or took its name.
    Stolen(String),
    /// Something was evicted for a put that was refused.
    EvictedForNothing(String),
    /// A node was given up before it had been silent for long enough.
    GivenUpEarly(String),
    /// A listing showed what never existed during it, or is not wanted, or showed something twice.
    Shown(String),
    /// A listing did not show what existed all the time.
    Missed(String),
    /// A removal of many without force removed an object that a reader holds a lease to.
    RemovedWhileLeased(String),
    /// A removal of many left what it should have removed.
    Left(String),
    /// A removal of many removed something else, or reported a wrong number.
    Swept(String),
    /// A replica was cleared that should stay, or one stayed that was reported as cleared.
    Cleared(String),
    /// An operation never ended.
    Stuck(String),
    /// A standby that has repeated all commands is not as the master is.
    Diverged(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLinearizable(story) => write!(f, "nothing explains the response: {story}"),
            other => write!(f, "{other:?}"),
        }
    }
}

pub(crate) type Range = (SegmentNo, u64, u64);

/// One write that may change memory.
#[derive(Clone, Copy, Debug)]
struct Write {
    range: Range,
    /// The engine that moves the bytes; 0: that of the node whose memory it is.
    engine: u64,
    /// `None` while it is in progress.
    until: Option<Instant>,
}

pub(crate) struct Put {
    pub(crate) key: Vec<u8>,
    pub(crate) number: u64,
    pub(crate) len: u64,
}

/// A put that its writer has not ended as far as the master knows: it may write there, even if it has not
/// begun to, or is stopped or dead, until the nodes report that its engine is cut off.
#[derive(Clone, Debug)]
pub(crate) struct Claim {
    pub(crate) key: Vec<u8>,
    /// It is an upsert.
    pub(crate) replaces: bool,
    pub(crate) handle: u64,
    pub(crate) engine: u64,
    pub(crate) ranges: Vec<Range>,
}

/// The party that writes: a client, or, after all of them, a node that copies.
pub(crate) type Writer = usize;

/// A client, its incarnation, and the number of one of its leases.
pub(crate) type Reader = (usize, u64, u64);

#[derive(Default)]
pub(crate) struct Shadow {
    /// Prints what it notes.
    talks: bool,
    /// The put that each range was given to last.
    owners: BTreeMap<(SegmentNo, u64), (u64, u64)>,
    /// Ranges that may be read, until when, by which client and under which lease number.
    leases: Vec<(Range, Instant, Option<Reader>)>,
    /// By writer and number of the transfer, which no other incarnation uses.
    writes: HashMap<(Writer, u64), Write>,
    pub(crate) puts: HashMap<u64, Put>,
    /// By generation.
    pub(crate) claims: BTreeMap<u64, Claim>,
    /// Engines that a segment's node has cut off.
    cut: HashSet<(u64, SegmentNo)>,
    /// Replicas with a byte that flipped, by their put.
    flipped: HashSet<(u64, SegmentNo)>,
}

impl Shadow {
    pub(crate) fn new(talks: bool) -> Self {
        Self { talks, ..Self::default() }
    }

    fn say(&self, what: impl FnOnce() -> String) {
        if self.talks {
            println!("{}", what());
        }
    }

    /// A put's writer has reported its end to the master.
    pub(crate) fn ended(&mut self, generation: u64) {
        self.say(|| format!("{generation:#x} has ended"));
        self.claims.remove(&generation);
    }

    pub(crate) fn allocated(&mut self, now: Instant, generation: u64, range: Range) -> Result<(), Violation> {
        self.say(|| format!("{now:?} {range:?} to {generation:#x}"));
        if self.owners.get(&(range.0, range.1)) == Some(&(range.2, generation)) {
            // A repeated start gets the same space.
            return Ok(());
        }
        self.leases.retain(|(_, until, _)| *until > now);
        self.writes.retain(|_, write| write.until.is_none_or(|until| until > now));
        if let Some(lease) = self.leases.iter().find(|(leased, ..)| overlap(*leased, range)) {
            return Err(Violation::GivenWhileLeased(format!(
                "{range:?} to {generation:#x} at {now:?}: {lease:?}"
            )));
        }
        let writer = self.writes.values().find(|write| overlap(write.range, range));
        if let Some(write) = writer {
            return Err(Violation::GivenWhileWritten(format!(
                "{range:?} to {generation:#x} at {now:?}: {write:?}"
            )));
        }
        let claimed = |claim: &Claim| claim.ranges.iter().any(|claimed| overlap(*claimed, range));
        let claim = self.claims.iter().find(|(other, claim)| **other != generation && claimed(claim));
        if let Some(claim) = claim {
            return Err(Violation::GivenWhileWritten(format!(
                "{range:?} to {generation:#x} at {now:?}: {claim:?}"
            )));
        }
        self.own(generation, range);
        Ok(())
    }

    /// As `allocated`, without a judgement.
    pub(crate) fn own(&mut self, generation: u64, range: Range) {
        let (segment, addr, len) = range;
        let over: Vec<_> = self
            .owners
            .range((segment, 0)..(segment, addr + len))
            .filter(|((_, at), (other, _))| at + other > addr)
            .map(|(place, _)| *place)
            .collect();
        over.iter().for_each(|place| {
            self.owners.remove(place);
        });
        self.owners.insert((segment, addr), (len, generation));
    }

    pub(crate) fn leased(
        &mut self,
        generation: u64,
        range: Range,
        until: Instant,
        whose: Option<Reader>,
    ) -> Result<(), Violation> {
        self.leases.push((range, until, whose));
        match self.owners.get(&(range.0, range.1)) {
            Some((_, owner)) if *owner == generation => Ok(()),
            other => Err(Violation::DoubleAllocation(format!("{range:?} of {generation:#x} is {other:?}"))),
        }
    }

    /// A valid lease on a replica of this put.
    pub(crate) fn lease_on(
        &self,
        now: Instant,
        generation: u64,
    ) -> Option<&(Range, Instant, Option<Reader>)> {
        self.leases.iter().find(|(range, until, _)| {
            let owner = self.owners.get(&(range.0, range.1));
            *until > now && owner.is_some_and(|(_, owner)| *owner == generation)
        })
    }

    /// The leases on replicas of a put.
    pub(crate) fn readers_of(&self, generation: u64) -> Vec<Reader> {
        let owner = |range: &Range| self.owners.get(&(range.0, range.1)).map(|(_, owner)| *owner);
        let held = self.leases.iter().filter(|(range, ..)| owner(range) == Some(generation));
        held.filter_map(|(.., whose)| *whose).collect()
    }

    /// A client has returned these leases.
    pub(crate) fn returned(&mut self, who: (usize, u64), first: u64, count: u32) {
        let numbers = first..first + u64::from(count);
        self.leases.retain(|(.., whose)| {
            whose.is_none_or(|(client, life, no)| (client, life) != who || !numbers.contains(&no))
        });
    }

    /// A writer begins to write a range in the space of its put, which it has whole.
    pub(crate) fn write_begins(
        &mut self,
        now: Instant,
        id: (Writer, u64),
        engine: u64,
        generation: u64,
        (whole, range): (Range, Range),
    ) -> Result<(), Violation> {
        self.say(|| format!("{now:?} {id:?} of engine {engine:#x} begins {range:?} of {generation:#x}"));
        if self.cut.contains(&(engine, range.0)) {
            // It may try.
            return Ok(());
        }
        let runs = |write: &Write| write.until.is_none_or(|until| until > now);
        let other = self.writes.iter().find(|(_, write)| runs(write) && overlap(write.range, range));
        let other =
            other.map(|(other, write)| format!("{id:?} in {range:?} at {now:?}: {other:?} {write:?}"));
        self.writes.insert(id, Write { range, engine, until: None });
        if let Some(other) = other {
            return Err(Violation::TwoWriters(other));
        }
        match self.owners.get(&(whole.0, whole.1)) {
            Some((_, owner)) if *owner == generation => Ok(()),
            other => Err(Violation::WriteAfterLoss(format!("{range:?} of {generation:#x} is {other:?}"))),
        }
    }

    /// A write ended; if its outcome is unknown, it may land until `until`.
    pub(crate) fn write_ends(&mut self, id: (Writer, u64), loose_until: Option<Instant>) {
        self.say(|| format!("{id:?} ends, loose until {loose_until:?}"));
        match loose_until {
            None => drop(self.writes.remove(&id)),
            Some(until) => {
                if let Some(write) = self.writes.get_mut(&id) {
                    write.until = Some(until);
                }
            }
        }
    }

    /// A client's ended writes to a segment cannot land any more.
    pub(crate) fn fenced(&mut self, client: usize, segment: SegmentNo) {
        self.say(|| format!("client {client} is fenced on {segment}"));
        self.writes
            .retain(|(who, _), write| *who != client || write.range.0 != segment || write.until.is_none());
    }

    /// No write of an engine can land in a segment any more.
    pub(crate) fn cut_off(&mut self, engine: u64, segment: SegmentNo) {
        self.say(|| format!("engine {engine:#x} is cut off from {segment}"));
        self.cut.insert((engine, segment));
        self.writes.retain(|_, write| (write.engine, write.range.0) != (engine, segment));
        for claim in self.claims.values_mut().filter(|claim| claim.engine == engine) {
            claim.ranges.retain(|range| range.0 != segment);
        }
    }

    /// A client died; its writes in progress may land until `until`.
    pub(crate) fn writer_died(&mut self, client: usize, until: Instant) {
        self.say(|| format!("client {client} died, loose until {until:?}"));
        let own = self.writes.iter_mut().filter(|((who, _), _)| *who == client);
        own.for_each(|(_, write)| write.until = write.until.or(Some(until)));
    }

    /// A node died, and with it the memory that it read into.
    pub(crate) fn memory_is_gone(&mut self, node: Writer) {
        self.writes.retain(|(who, _), _| *who != node);
    }

    /// A random range of a segment that was given to a `wanted` put.
    pub(crate) fn random_range(
        &self,
        rng: &mut Rng,
        segment: SegmentNo,
        wanted: impl Fn(u64) -> bool,
    ) -> Option<(u64, Range)> {
        let on_it = self.owners.range((segment, 0)..=(segment, u64::MAX));
        let found: Vec<(u64, Range)> = on_it
            .filter(|(_, (_, generation))| wanted(*generation))
            .map(|((_, addr), (len, generation))| (*generation, (segment, *addr, *len)))
            .collect();
        found.get(rng.index(found.len())).copied()
    }

    /// A byte of a replica flipped.
    pub(crate) fn flip(&mut self, generation: u64, segment: SegmentNo) {
        self.flipped.insert((generation, segment));
    }

    /// Whether a byte of a replica flipped, of a present or a former one.
    pub(crate) fn is_flipped(&self, generation: u64, segment: SegmentNo) -> bool {
        self.flipped.contains(&(generation, segment))
    }
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 == b.0 && a.1 < b.1 + b.2 && b.1 < a.1 + a.2
}

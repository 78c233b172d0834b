//! What must hold, kept beside the system and never shown to it.

use std::collections::{BTreeMap, HashMap};
use std::fmt;

use store_core::SegmentNo;
use te_core::Instant;

/// A broken promise.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Violation {
    /// A get returned bytes that are not those of the put it named, or of another key.
    WrongBytes(String),
    /// Nothing that happened to a key explains an answer that somebody was given: see `checker`.
    NotLinearizable(String),
    /// A range was given out while an older put may still write it.
    GivenWhileWritten(String),
    /// A range was given out while a reader holds a lease to it.
    GivenWhileLeased(String),
    /// A writer began to write a range that belongs to a newer put.
    WriteAfterLoss(String),
    /// The master sends readers to a range that belongs to another put.
    DoubleAllocation(String),
    /// Space is missing, or too much is free, when everything is quiet.
    Leak(String),
    /// An operation never ended.
    Stuck(String),
}

impl fmt::Display for Violation {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotLinearizable(story) => write!(f, "nothing explains what was answered: {story}"),
            other => write!(f, "{other:?}"),
        }
    }
}

pub(crate) type Range = (SegmentNo, u64, u64);

/// One write that may change memory.
#[derive(Clone, Copy, Debug)]
struct Write {
    range: Range,
    /// `None` while it is under way.
    until: Option<Instant>,
}

pub(crate) struct Put {
    pub(crate) key: Vec<u8>,
    pub(crate) number: u64,
    pub(crate) len: u64,
}

#[derive(Default)]
pub(crate) struct Shadow {
    /// Which put each range was given to last.
    owners: BTreeMap<(SegmentNo, u64), (u64, u64)>,
    leases: Vec<(Range, Instant)>,
    /// By client, its life, and the transfer's number.
    writes: HashMap<(usize, u64), Write>,
    pub(crate) puts: HashMap<u64, Put>,
}

impl Shadow {
    pub(crate) fn allocated(&mut self, now: Instant, generation: u64, range: Range) -> Result<(), Violation> {
        if self.owners.get(&(range.0, range.1)) == Some(&(range.2, generation)) {
            // A start that came twice is given the same space twice.
            return Ok(());
        }
        self.leases.retain(|(_, until)| *until > now);
        self.writes.retain(|_, write| write.until.is_none_or(|until| until > now));
        if let Some(lease) = self.leases.iter().find(|(leased, _)| overlap(*leased, range)) {
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

    pub(crate) fn leased(&mut self, generation: u64, range: Range, until: Instant) -> Result<(), Violation> {
        self.leases.push((range, until));
        match self.owners.get(&(range.0, range.1)) {
            Some((_, owner)) if *owner == generation => Ok(()),
            other => Err(Violation::DoubleAllocation(format!("{range:?} of {generation:#x} is {other:?}"))),
        }
    }

    pub(crate) fn write_begins(
        &mut self,
        id: (usize, u64),
        generation: u64,
        range: Range,
    ) -> Result<(), Violation> {
        self.writes.insert(id, Write { range, until: None });
        match self.owners.get(&(range.0, range.1)) {
            Some((_, owner)) if *owner == generation => Ok(()),
            other => Err(Violation::WriteAfterLoss(format!("{range:?} of {generation:#x} is {other:?}"))),
        }
    }

    /// A write ended; when not known how, it may land until `until`.
    pub(crate) fn write_ends(&mut self, id: (usize, u64), loose_until: Option<Instant>) {
        match loose_until {
            None => drop(self.writes.remove(&id)),
            Some(until) => {
                if let Some(write) = self.writes.get_mut(&id) {
                    write.until = Some(until);
                }
            }
        }
    }

    /// A client's ended writes to a segment can land no more.
    pub(crate) fn fenced(&mut self, client: usize, segment: SegmentNo) {
        self.writes
            .retain(|(who, _), write| *who != client || write.range.0 != segment || write.until.is_none());
    }

    /// A client died; what it has under way may land until `until`.
    pub(crate) fn writer_died(&mut self, client: usize, until: Instant) {
        let own = self.writes.iter_mut().filter(|((who, _), _)| *who == client);
        own.for_each(|(_, write)| write.until = write.until.or(Some(until)));
    }
}

fn overlap(a: Range, b: Range) -> bool {
    a.0 == b.0 && a.1 < b.1 + b.2 && b.1 < a.1 + a.2
}

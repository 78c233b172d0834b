//! Eviction: which object goes when room is needed. One trait, four policies, chosen by [`EvictionPolicy`].
//!
//! ```text
//!            insert                          touch (first read of a lease)
//!   complete ──────▶ candidates of the policy ◀──────┐
//!                     │  victim?                      │
//!                     │                               │
//!        nobody reads │        somebody reads         │ lease over: put_back
//!                     ▼                ▼              │
//!                  evicted        set aside ──────────┘
//! ```
//!
//! A policy orders *candidates* and knows nothing else: not what an object is, not how long it is, not who reads it. Whatever
//! may not be evicted is no candidate. An object that is being written, or is pinned, never was one; one that is found leased
//! when its turn comes is set aside until its lease is over. A lease sets an object aside once at most, so that the work of
//! eviction is paid for by the gets and puts that caused it, and never grows with the number of objects that cannot go (but for
//! the logarithm in the queue of those that are aside).
//! ([`Nodes::looks`] counts that work; a test holds it to the promise.)
//!
//! What a policy is *not*: exact about time. Reads within one lease count as one, which makes `lru` an approximation.
//!
//! Sources: FIFO and LRU are folklore; SIEVE is Zhang, Yang, Yue, Vigfusson and Rashmi, *SIEVE is Simpler than LRU* (NSDI'24);
//! TRIAL is this project's own, see [`trial`].

mod fifo;
mod ghost;
mod lru;
mod nodes;
mod sieve;
pub(crate) mod trial;

#[cfg(test)]
mod model;

use core::fmt::{self, Debug};
use core::str::FromStr;

use serde::{Deserialize, Serialize};

pub(crate) use nodes::{List, Nodes};

/// How the object to evict is chosen.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
// The wire carries the number of a variant: append.
pub enum EvictionPolicy {
    /// The least recently read of those that were read again, or the least recently written of the others, whichever is
    /// older when an object that nobody has read again ages three times as fast. Made for prefixes. The default.
    #[default]
    Trial,
    /// The least recently read, as exactly as leases allow.
    Lru,
    /// SIEVE: first in first out, but what was read since the hand came by is passed over once.
    Sieve,
    /// First in, first out.
    Fifo,
}

impl EvictionPolicy {
    /// Every policy of this release.
    pub const ALL: &'static [Self] = &[Self::Trial, Self::Lru, Self::Sieve, Self::Fifo];

    /// As written in configurations and on command lines.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Trial => "trial",
            Self::Lru => "lru",
            Self::Sieve => "sieve",
            Self::Fifo => "fifo",
        }
    }

    pub(crate) fn build(self) -> Policy {
        match self {
            Self::Trial => Policy::Trial(trial::Trial::new()),
            Self::Lru => Policy::Lru(lru::Lru::new()),
            Self::Sieve => Policy::Sieve(sieve::Sieve::new()),
            Self::Fifo => Policy::Fifo(fifo::Fifo::new()),
        }
    }
}

impl fmt::Display for EvictionPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for EvictionPolicy {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        Self::ALL.iter().find(|policy| policy.name() == text).copied().ok_or(UnknownPolicy)
    }
}

/// No policy has this name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("no such eviction policy: choose one of")?;
        EvictionPolicy::ALL.iter().try_for_each(|policy| write!(f, " {policy}"))
    }
}

impl core::error::Error for UnknownPolicy {}

/// Where a key stands in the batch it came in, and what is known of the batch.
///
/// Callers of a KV cache name the blocks of a prefix in the order of the prefix; a batch is a piece of one. That is all that
/// [`EvictionPolicy::Trial`] needs, and nothing has to be said on the wire for it. A key on its own is [`Place::ALONE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Another key of the batch came before it.
    pub follows: bool,
    /// The last of several keys.
    pub last: bool,
    /// It, or a later key of the batch, was evicted lately; see [`Master::returning`](crate::Master::returning).
    pub returning: bool,
}

impl Place {
    /// A batch of its own.
    pub const ALONE: Self = Self { follows: false, last: false, returning: false };

    /// The key number `index` of `len`, of which the first `returning` came back.
    #[must_use]
    pub const fn new(index: usize, len: usize, returning: usize) -> Self {
        Self { follows: index > 0, last: len > 1 && index + 1 == len, returning: index < returning }
    }
}

/// An order of candidates. All work is O(1), amortised.
///
/// # For implementers
/// Candidates are named by their index in [`Nodes`], whose links are yours as long as they are. `victim` changes nothing that
/// shows: asked twice, it names the same one, until that is evicted, removed or touched. Count every candidate you look at in
/// [`Nodes::look`].
pub(crate) trait Eviction: Debug + Send {
    /// A new candidate. `hash` is its key's.
    fn insert(&mut self, nodes: &mut Nodes, index: u32, hash: u64, place: Place);
    /// A candidate was read. `follows`: in one batch, after the candidate touched or inserted before.
    fn touch(&mut self, nodes: &mut Nodes, index: u32, follows: bool);
    /// It is none any more, for another reason than eviction.
    fn remove(&mut self, nodes: &mut Nodes, index: u32);
    /// It is one again: it was removed because somebody read it when its turn came, and nobody does now.
    fn put_back(&mut self, nodes: &mut Nodes, index: u32);
    /// Who goes next.
    fn victim(&mut self, nodes: &mut Nodes) -> Option<u32>;
    /// Takes a candidate out for good.
    fn evict(&mut self, nodes: &mut Nodes, index: u32, hash: u64);
    /// How many candidates there are.
    fn len(&self) -> u32;
    /// Whether a key that is no candidate was one lately.
    fn remembers(&self, _hash: u64) -> bool {
        false
    }
    /// Memory besides the nodes, bytes.
    fn memory_bytes(&self) -> usize {
        0
    }
    /// Gives memory back that is not needed any more.
    fn tidy(&mut self) {}
    /// Calls `each` for candidates in the order in which they would go if nothing happened, until it gives false.
    fn preview(&self, nodes: &Nodes, each: &mut dyn FnMut(u32) -> bool);
}

/// One of the policies. An enum rather than a pointer, because every put and every first read of a lease goes through it.
#[derive(Debug)]
pub(crate) enum Policy {
    Trial(trial::Trial),
    Lru(lru::Lru),
    Sieve(sieve::Sieve),
    Fifo(fifo::Fifo),
}

macro_rules! each_policy {
    ($policy:expr, $it:ident => $call:expr) => {
        match $policy {
            Policy::Trial($it) => $call,
            Policy::Lru($it) => $call,
            Policy::Sieve($it) => $call,
            Policy::Fifo($it) => $call,
        }
    };
}

impl Eviction for Policy {
    fn insert(&mut self, nodes: &mut Nodes, index: u32, hash: u64, place: Place) {
        each_policy!(self, it => it.insert(nodes, index, hash, place));
    }

    fn touch(&mut self, nodes: &mut Nodes, index: u32, follows: bool) {
        each_policy!(self, it => it.touch(nodes, index, follows));
    }

    fn remove(&mut self, nodes: &mut Nodes, index: u32) {
        each_policy!(self, it => it.remove(nodes, index));
    }

    fn put_back(&mut self, nodes: &mut Nodes, index: u32) {
        each_policy!(self, it => it.put_back(nodes, index));
    }

    fn victim(&mut self, nodes: &mut Nodes) -> Option<u32> {
        each_policy!(self, it => it.victim(nodes))
    }

    fn evict(&mut self, nodes: &mut Nodes, index: u32, hash: u64) {
        each_policy!(self, it => it.evict(nodes, index, hash));
    }

    fn len(&self) -> u32 {
        each_policy!(self, it => it.len())
    }

    fn remembers(&self, hash: u64) -> bool {
        each_policy!(self, it => it.remembers(hash))
    }

    fn memory_bytes(&self) -> usize {
        each_policy!(self, it => it.memory_bytes())
    }

    fn tidy(&mut self) {
        each_policy!(self, it => it.tidy());
    }

    fn preview(&self, nodes: &Nodes, each: &mut dyn FnMut(u32) -> bool) {
        each_policy!(self, it => it.preview(nodes, each));
    }
}

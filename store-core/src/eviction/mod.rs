//! Eviction: which object goes when room is needed. One trait and four policies, chosen by
//! [`EvictionPolicy`].
//!
//! ```text
//!            insert                          touch (first read of a lease)
//!   complete ──────▶ candidates of the policy ◀──────┐
//!                     │  victim?                      │
//!                     │                               │
//!           not leased │            leased             │ lease over: put_back
//!                     ▼                ▼              │
//!                  evicted        leased set ─────────┘
//! ```
//!
//! A policy orders *candidates* and knows nothing else: not what an object is, how long it is, or who reads
//! it. What may not be evicted is not a candidate. An object that is being written or is pinned never was a
//! candidate; one that is found leased when its turn comes moves to the *leased set* until its lease is over.
//! A lease moves an object at most once, so the work of eviction is paid for by the gets and puts that caused
//! it, and never grows with the number of objects that cannot be evicted (except for the logarithm in the
//! queue of the leased set). [`Nodes::looks`] counts that work; a test checks the promise.
//!
//! A policy is *not* exact about time. Reads within one lease count as one, which makes `lru` an
//! approximation.
//!
//! Sources: FIFO and LRU are folklore; SIEVE is Zhang, Yang, Yue, Vigfusson and Rashmi, *SIEVE is Simpler
//! than LRU* (NSDI'24); TRIAL is this project's own, see [`trial`].

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

/// The policy that chooses the object to evict.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
#[non_exhaustive]
// The wire carries the number of a variant: append only.
pub enum EvictionPolicy {
    /// An LRU in which objects that were never read again age three times as fast as those that were. Made
    /// for prefixes. The default.
    #[default]
    Trial,
    /// The least recently read object, as exactly as leases allow.
    Lru,
    /// SIEVE: first in, first out, except that an object that was read since the hand passed it is spared
    /// once.
    Sieve,
    /// First in, first out.
    Fifo,
}

impl EvictionPolicy {
    /// All policies of this release.
    pub const ALL: &'static [Self] = &[Self::Trial, Self::Lru, Self::Sieve, Self::Fifo];

    /// The name in configurations and on command lines.
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

/// No policy has the given name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("unknown eviction policy: choose one of")?;
        EvictionPolicy::ALL.iter().try_for_each(|policy| write!(f, " {policy}"))
    }
}

impl core::error::Error for UnknownPolicy {}

/// The position of a key in its batch, and what is known of the batch.
///
/// Callers of a KV cache name the blocks of a prefix in the order of the prefix; a batch is a part of one.
/// That is all that [`EvictionPolicy::Trial`] needs, and it takes nothing extra on the wire. The position of
/// a single key is [`Place::ALONE`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Another key of the batch precedes it.
    pub follows: bool,
    /// It is the last of several keys.
    pub last: bool,
    /// It, or a later key of the batch, was evicted lately; see
    /// [`Master::returning`](crate::Master::returning).
    pub returning: bool,
}

impl Place {
    /// The position of a key that is a batch of its own.
    pub const ALONE: Self = Self { follows: false, last: false, returning: false };

    /// The position of key number `index` of `len`, of which the first `returning` came back after their
    /// eviction.
    #[must_use]
    pub const fn new(index: usize, len: usize, returning: usize) -> Self {
        Self { follows: index > 0, last: len > 1 && index + 1 == len, returning: index < returning }
    }
}

/// Whether a key is the first of its batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum BatchOrder {
    /// No key of the batch precedes it.
    First,
    /// Another key of the batch precedes it.
    Follows,
}

impl BatchOrder {
    /// The order of the key at this index.
    #[must_use]
    pub const fn of(index: usize) -> Self {
        if index == 0 { Self::First } else { Self::Follows }
    }
}

/// What a policy knows of the worth of a candidate, when its turn to be evicted comes.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Standing {
    /// It was read since it was put.
    Proven,
    /// It was not read, or the policy does not know.
    OnTrial,
    /// It was not read, and very probably will not be.
    End,
}

/// An order of candidates. All operations are O(1), amortised.
///
/// # For implementers
/// Candidates are identified by their index in [`Nodes`], whose links a policy may use for its own
/// candidates. `victim` has no visible effect: repeated calls return the same candidate until it is evicted,
/// removed or touched. Count every candidate that is examined with [`Nodes::look`].
pub(crate) trait Eviction: Debug + Send {
    /// Adds a candidate. `hash` is the hash of its key.
    fn insert(&mut self, nodes: &mut Nodes, index: u32, hash: u64, place: Place);
    /// A candidate was read. `follows`: in one batch, after the candidate that was touched or inserted
    /// before.
    fn touch(&mut self, nodes: &mut Nodes, index: u32, follows: bool);
    /// Removes a candidate for another reason than eviction.
    fn remove(&mut self, nodes: &mut Nodes, index: u32);
    /// Adds a candidate again that was removed because it was leased when its turn came. It is not leased any
    /// more.
    fn put_back(&mut self, nodes: &mut Nodes, index: u32);
    /// The candidate to evict next.
    fn victim(&mut self, nodes: &mut Nodes) -> Option<u32>;
    /// Removes a candidate that is evicted.
    fn evict(&mut self, nodes: &mut Nodes, index: u32, hash: u64);
    /// Number of candidates.
    fn len(&self) -> u32;
    /// What the policy knows of a candidate's worth.
    fn standing(&self, _nodes: &Nodes, _index: u32) -> Standing {
        Standing::OnTrial
    }
    /// Whether a key that is not a candidate was one lately.
    fn remembers(&self, _hash: u64) -> bool {
        false
    }
    /// Memory of the policy besides the nodes, bytes.
    fn memory_bytes(&self) -> usize {
        0
    }
    /// Returns memory that is no longer needed.
    fn tidy(&mut self) {}
    /// Calls `each` with the candidates in the order in which they would be evicted if nothing happened,
    /// until it returns false.
    fn preview(&self, nodes: &Nodes, each: &mut dyn FnMut(u32) -> bool);
}

/// One of the policies. An enum and not a pointer, because every put and every first read of a lease uses it.
#[derive(Debug, Serialize, Deserialize)]
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

    fn standing(&self, nodes: &Nodes, index: u32) -> Standing {
        each_policy!(self, it => it.standing(nodes, index))
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

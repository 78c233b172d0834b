//! How the prefill instance of a request is chosen: our rule, the paper's, and those of other routers.
//!
//! Every policy sees the same [`View`]; only its choice differs. What a choice will take is predicted by the
//! scheduler afterwards, in one way for all.

mod cost;
mod paper;
mod routers;
mod simple;

use alloc::boxed::Box;
use core::fmt;
use core::str::FromStr;

use super::view::{Placement, View};

pub use cost::Cost;
pub use paper::{Algorithm1, AlphaBeta, Local};
pub use routers::{CacheAware, Dynamo, Preble, TwoTier};
pub use simple::{LeastRequests, LeastTime, MaxHit, PowerOfTwo, Random, RoundRobin};

/// Chooses the prefill instance of a request, and what it fetches.
pub trait Policy: fmt::Debug + Send {
    /// The choice; `None` when no candidate is acceptable. It allocates nothing.
    fn place(&mut self, view: &View<'_>) -> Option<Placement>;
}

/// The policies, by name.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum PolicyKind {
    /// Ours: the least time to the first token, transfers booked on NICs included, and the least cost to
    /// others.
    Cost,
    /// Ours, but transfers take bytes / bandwidth, whatever else uses the NICs.
    CostBlind,
    /// Algorithm 1 of the paper (section 4.1), with its threshold.
    Algorithm1 {
        /// `kvcache_balancing_threshold`.
        threshold: f64,
    },
    /// Algorithm 1 without transfers.
    Local,
    /// The cost of Dynamo's KV router.
    Dynamo,
    /// Its variant that multiplies by the decode load.
    DynamoLmetric,
    /// Dynamo's two-tier rule, which is `cache_aware_zmq` of the SGLang router.
    TwoTier,
    /// `cache_aware` of the SGLang gateway.
    CacheAware,
    /// Preble's E2.
    Preble,
    /// The less loaded of two drawn ones.
    PowerOfTwo,
    /// The fewest requests.
    LeastRequests,
    /// The shortest queue, in time.
    LeastTime,
    /// One after the other.
    RoundRobin,
    /// Drawn.
    Random,
    /// `alpha × reuse + beta × (1 - load)`.
    AlphaBeta {
        /// Weight of the part that is reused.
        alpha: f64,
        /// Weight of idleness.
        beta: f64,
    },
    /// The longest prefix.
    MaxHit,
}

impl PolicyKind {
    /// Every policy, those with settings with their usual ones.
    pub const ALL: [Self; 16] = [
        Self::Cost,
        Self::CostBlind,
        Self::Algorithm1 { threshold: 1.0 },
        Self::Local,
        Self::Dynamo,
        Self::DynamoLmetric,
        Self::TwoTier,
        Self::CacheAware,
        Self::Preble,
        Self::PowerOfTwo,
        Self::LeastRequests,
        Self::LeastTime,
        Self::RoundRobin,
        Self::Random,
        Self::AlphaBeta { alpha: 0.5, beta: 0.5 },
        Self::MaxHit,
    ];

    /// The name, without settings.
    #[must_use]
    pub const fn name(self) -> &'static str {
        match self {
            Self::Cost => "cost",
            Self::CostBlind => "cost-blind",
            Self::Algorithm1 { .. } => "algorithm1",
            Self::Local => "local",
            Self::Dynamo => "dynamo",
            Self::DynamoLmetric => "dynamo-lmetric",
            Self::TwoTier => "two-tier",
            Self::CacheAware => "sglang-cache-aware",
            Self::Preble => "preble",
            Self::PowerOfTwo => "power-of-two",
            Self::LeastRequests => "least-requests",
            Self::LeastTime => "least-time",
            Self::RoundRobin => "round-robin",
            Self::Random => "random",
            Self::AlphaBeta { .. } => "alpha-beta",
            Self::MaxHit => "max-hit",
        }
    }

    /// The policy itself. `seed` is of those that draw; `slots` of those that keep something per instance.
    #[must_use]
    pub fn build(self, seed: u64) -> Box<dyn Policy> {
        match self {
            Self::Cost => Box::new(Cost { booked: true }),
            Self::CostBlind => Box::new(Cost { booked: false }),
            Self::Algorithm1 { threshold } => Box::new(Algorithm1 { threshold }),
            Self::Local => Box::new(Local),
            Self::Dynamo => Box::new(Dynamo::new(false)),
            Self::DynamoLmetric => Box::new(Dynamo::new(true)),
            Self::TwoTier => Box::new(TwoTier),
            Self::CacheAware => Box::new(CacheAware),
            Self::Preble => Box::new(Preble),
            Self::PowerOfTwo => Box::new(PowerOfTwo::new(seed)),
            Self::LeastRequests => Box::new(LeastRequests),
            Self::LeastTime => Box::new(LeastTime),
            Self::RoundRobin => Box::new(RoundRobin::default()),
            Self::Random => Box::new(Random::new(seed)),
            Self::AlphaBeta { alpha, beta } => Box::new(AlphaBeta { alpha, beta }),
            Self::MaxHit => Box::new(MaxHit),
        }
    }
}

impl fmt::Display for PolicyKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Algorithm1 { threshold } => write!(f, "algorithm1:{threshold}"),
            Self::AlphaBeta { alpha, beta } => write!(f, "alpha-beta:{alpha}:{beta}"),
            kind => f.write_str(kind.name()),
        }
    }
}

/// A text that names no policy.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct UnknownPolicy;

impl fmt::Display for UnknownPolicy {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("not the name of a policy; the names are")?;
        for (i, kind) in PolicyKind::ALL.iter().enumerate() {
            write!(f, "{} {}", if i == 0 { "" } else { "," }, kind.name())?;
        }
        f.write_str(" (algorithm1 takes a threshold, as in algorithm1:2; alpha-beta two weights)")
    }
}

impl core::error::Error for UnknownPolicy {}

impl FromStr for PolicyKind {
    type Err = UnknownPolicy;

    fn from_str(text: &str) -> Result<Self, UnknownPolicy> {
        let (name, settings) = text.split_once(':').map_or((text, None), |(name, rest)| (name, Some(rest)));
        let number =
            |text: &str| text.parse().ok().filter(|x: &f64| x.is_finite() && *x >= 0.0).ok_or(UnknownPolicy);
        let kind = Self::ALL.into_iter().find(|kind| kind.name() == name).ok_or(UnknownPolicy)?;
        match (kind, settings) {
            (kind, None) => Ok(kind),
            (Self::Algorithm1 { .. }, Some(threshold)) => {
                Ok(Self::Algorithm1 { threshold: number(threshold)? })
            }
            (Self::AlphaBeta { .. }, Some(settings)) => {
                let (alpha, beta) = settings.split_once(':').ok_or(UnknownPolicy)?;
                Ok(Self::AlphaBeta { alpha: number(alpha)?, beta: number(beta)? })
            }
            _ => Err(UnknownPolicy),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use alloc::string::ToString;

    #[test]
    fn every_policy_is_found_by_its_name_and_by_what_it_displays() {
        for kind in PolicyKind::ALL {
            assert_eq!(kind.name().parse(), Ok(kind));
            assert_eq!(kind.to_string().parse(), Ok(kind));
        }
        assert_eq!("algorithm1:4".parse(), Ok(PolicyKind::Algorithm1 { threshold: 4.0 }));
        for wrong in ["", "costs", "cost:1", "algorithm1:", "algorithm1:-1", "algorithm1:nan", "alpha-beta:1"]
        {
            assert_eq!(wrong.parse::<PolicyKind>(), Err(UnknownPolicy), "{wrong}");
        }
        assert!(UnknownPolicy.to_string().contains("cost, cost-blind, algorithm1,"));
    }
}

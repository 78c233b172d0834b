//! Settings and limits of the scheduler.

use core::time::Duration;

use super::policy::PolicyKind;
use crate::cost::OnlineFitConfig;

/// Limits: everything is allocated for them when the scheduler is made.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Limits {
    /// Instances.
    pub instances: u32,
    /// Racks.
    pub racks: u16,
    /// Requests in progress.
    pub reservations: u32,
    /// Requests that wait for the prefill of one instance.
    pub queue_per_instance: u32,
    /// Models whose lengths of output are learnt; those above share one entry.
    pub models: u32,
    /// Tokens of a prompt.
    pub tokens_max: u32,
}

impl Default for Limits {
    fn default() -> Self {
        Self {
            instances: 256,
            racks: 64,
            reservations: 16_384,
            queue_per_instance: 4_096,
            models: 64,
            tokens_max: 16 << 20,
        }
    }
}

/// What reading from a tier costs beyond the network.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TierCost {
    /// Before the first byte.
    pub latency: Duration,
    /// Bytes per second; 0: no limit of its own.
    pub bytes_per_s: u64,
}

/// How hot prefixes are copied to more instances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct ReplicationConfig {
    /// Prefixes that are counted.
    pub prefixes: u32,
    /// The time in which what a prefix has cost counts half.
    pub half_life: Duration,
    /// The decayed sum of waits for the holder's NIC from which a prefix is copied.
    pub wait_min: Duration,
    /// The shortest time between two copies.
    pub interval: Duration,
}

impl Default for ReplicationConfig {
    fn default() -> Self {
        Self {
            prefixes: 256,
            half_life: Duration::from_secs(30),
            wait_min: Duration::from_secs(2),
            interval: Duration::from_millis(500),
        }
    }
}

/// Settings of the [`Scheduler`](super::Scheduler).
#[derive(Clone, Debug, PartialEq)]
pub struct SchedulerConfig {
    /// Limits.
    pub limits: Limits,
    /// How prefill instances are chosen.
    pub policy: PolicyKind,
    /// Seed of the policies that draw.
    pub seed: u64,
    /// Refuse requests whose SLO would be missed. Without it only a lack of instances and of room refuses.
    pub admission: bool,
    /// After a refusal for its SLO, requests are refused until a prediction is below the SLO by this part.
    pub hysteresis: f64,
    /// KV is shipped from prefill to decode instances over the NICs that are booked here; without it,
    /// shipping takes no time and no NIC.
    pub ships: bool,
    /// The first token reaches the client only when the KV has reached the decode instance (so with vLLM and
    /// SGLang, whose decode instance answers).
    pub first_token_after_transfer: bool,
    /// KV is streamed to the decode instance layer by layer while the prefill runs.
    pub layerwise: bool,
    /// Bytes per second between racks for which [`set_bandwidth`](super::Scheduler::set_bandwidth) said
    /// nothing.
    pub bandwidth_bytes_per_s: u64,
    /// What reading from each tier costs, in the order of [`Tier::ALL`](crate::Tier::ALL).
    pub tiers: [TierCost; 4],
    /// A reservation without any report for this long has ended.
    pub reservation_ttl: Duration,
    /// Tokens of output that are expected of a model without history.
    pub output_tokens_first: u32,
    /// The quantile of the lengths of output that is expected: a high one, because a batch that was expected
    /// to be smaller keeps no promise.
    pub output_quantile: f64,
    /// Replication of hot prefixes; `None` without.
    pub replication: Option<ReplicationConfig>,
    /// Prefixes may be fetched from other instances. Without it they are read from the shared store only.
    pub fetches: bool,
    /// Reports of reservations come from a proxy, which does not see prefills begin: a prefill is taken to
    /// begin when its request was placed, or the prefill before it on its instance ended; and the time from
    /// its end to the first token, which another instance gives, is fitted and added to predictions.
    pub reports_of_proxy: bool,
    /// Fit costs to what engines report; `None` keeps the models as given.
    pub online_fit: Option<OnlineFitConfig>,
}

impl Default for SchedulerConfig {
    fn default() -> Self {
        let memory = TierCost { latency: Duration::from_micros(100), bytes_per_s: 0 };
        Self {
            limits: Limits::default(),
            policy: PolicyKind::Cost,
            seed: 1,
            admission: true,
            hysteresis: 0.02,
            ships: true,
            first_token_after_transfer: true,
            layerwise: false,
            bandwidth_bytes_per_s: 87_000_000_000,
            tiers: [
                memory,
                memory,
                TierCost { latency: Duration::from_millis(1), bytes_per_s: 6_000_000_000 },
                TierCost { latency: Duration::from_millis(1), bytes_per_s: 0 },
            ],
            reservation_ttl: Duration::from_secs(300),
            output_tokens_first: 256,
            output_quantile: 0.9,
            replication: Some(ReplicationConfig::default()),
            fetches: true,
            reports_of_proxy: false,
            online_fit: Some(OnlineFitConfig::default()),
        }
    }
}

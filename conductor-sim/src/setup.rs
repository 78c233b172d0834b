//! What is simulated: the cluster of the paper, or another one.

use conductor_core::cost::CostModel;
use conductor_core::scheduler::PolicyKind;

use crate::calibration::Calibration;

/// When a prompt's KV goes to the decode instance.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Shipping {
    /// Layer by layer, as it is computed (paper, Section 4).
    LayerWise,
    /// When the whole prompt is computed.
    AfterPrefill,
}

/// Tokens of KV that fit beside the weights of a 70B model into 90 % of 8 GPUs of 80 GB.
pub const KV_TOKENS: u64 = 1_300_000;
/// Most sequences of one step: the default of vLLM.
pub const SEQUENCES_MAX: usize = 256;

/// A disaggregated cluster, and how a trace is replayed on it.
#[derive(Clone, Debug)]
pub struct Setup {
    /// Prefill groups.
    pub groups: usize,
    /// Nodes per prefill group.
    pub group_nodes: u32,
    /// Tokens per chunk of the pipeline of a group of several nodes.
    pub chunk_tokens: u32,
    /// Decode instances, one node each; with none, a request ends with its prefill.
    pub decoders: usize,
    /// What work costs on one node.
    pub cost: CostModel,
    /// Layers of the model.
    pub layers: u64,
    /// What a node's NICs send per second, and receive at the same time, bytes.
    pub nic_bytes_per_s: f64,
    /// Whether KV on its way to decode instances passes the same NICs.
    pub shipping: Shipping,
    /// Tokens of KV that a node's memory caches.
    pub cache_tokens: u64,
    /// Whether the memory of decode nodes is part of the cache.
    pub decoders_cache: bool,
    /// How requests are placed.
    pub policy: PolicyKind,
    /// Tokens of KV that fit into the memory of a decode instance's GPUs.
    pub kv_tokens: u64,
    /// Most sequences of one decode step.
    pub sequences_max: usize,
    /// Time per token to load KV from a node's memory into its GPUs, seconds.
    pub load_s_per_token: f64,
    /// Time to place a request and to dispatch it, seconds.
    pub decision_s: f64,
    /// Largest time to first token with which a request is accepted, seconds; with none, all are.
    pub ttft_s_max: Option<f64>,
    /// Largest time between tokens with which a request is accepted, seconds; with none, all are.
    pub tbt_s_max: Option<f64>,
    /// The seed of the arrivals within their bins, and of policies that draw lots.
    pub seed: u64,
    /// How many times as fast as it was recorded the trace is replayed.
    pub speed: f64,
}

impl Setup {
    /// The paper's cluster (Section 5.1): 16 nodes, of which `groups` prefill and the others decode. KV is
    /// sent when a prompt is computed, as in the system that figure 14 measured, whose transfers follow its
    /// prefills.
    #[must_use]
    pub fn paper(groups: usize, calibration: &Calibration, seed: u64) -> Self {
        Self {
            groups,
            group_nodes: 1,
            chunk_tokens: 2_048,
            decoders: 16usize.saturating_sub(groups),
            cost: calibration.cost,
            layers: 80,
            nic_bytes_per_s: calibration.nic_bytes_per_s,
            shipping: Shipping::AfterPrefill,
            cache_tokens: 3_000_000,
            decoders_cache: true,
            policy: PolicyKind::Cost,
            kv_tokens: KV_TOKENS,
            sequences_max: SEQUENCES_MAX,
            load_s_per_token: calibration.load_s_per_token,
            decision_s: calibration.decision_s,
            ttft_s_max: None,
            tbt_s_max: None,
            seed,
            speed: 1.0,
        }
    }

    /// The paper's prefill nodes alone: a request ends with its prefill, and nothing else uses the NICs.
    #[must_use]
    pub fn prefill_only(groups: usize, calibration: &Calibration, seed: u64) -> Self {
        Self { decoders: 0, decision_s: 0.0, ..Self::paper(groups, calibration, seed) }
    }
}

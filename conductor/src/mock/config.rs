//! Settings of a mock engine.

use std::net::SocketAddr;
use std::time::Duration;

use conductor_core::cost::CostModel;

/// What an engine does.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Role {
    /// It computes prompts, and hands their KV to decode engines.
    Prefill,
    /// It generates, with KV that it fetches.
    Decode,
    /// Both.
    #[default]
    Both,
}

/// Whose interfaces it has.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Flavor {
    /// vLLM 0.33: events are maps; `kv_transfer_params`.
    #[default]
    Vllm,
    /// vLLM 0.22: events are arrays.
    VllmArrays,
    /// SGLang 0.5.23: its own events and hashes, the bootstrap protocol, load messages.
    Sglang,
}

/// Settings of a mock engine.
#[derive(Clone, Debug)]
pub struct MockConfig {
    /// Address of its HTTP server; with port 0 the system chooses a port.
    pub listen: SocketAddr,
    /// Address at which it publishes events of its cache; `None` for no events.
    pub events: Option<SocketAddr>,
    /// Address at which it replays them; `None` for no replays.
    pub replay: Option<SocketAddr>,
    /// Address at which it publishes its load; `None` for no loads.
    pub load: Option<SocketAddr>,
    /// Whether it publishes its load at the address of its events, too, with the topic `load`.
    pub load_beside_events: bool,
    /// The topic of its events.
    pub topic: String,
    /// The model that it claims to serve.
    pub model: String,
    /// What it does.
    pub role: Role,
    /// Whose interfaces it has.
    pub flavor: Flavor,
    /// Tokens per block.
    pub block_tokens: u32,
    /// Blocks in the GPU's memory.
    pub gpu_blocks: u32,
    /// Blocks in the host's memory; 0 for none.
    pub cpu_blocks: u32,
    /// Blocks on the disk; 0 for none.
    pub disk_blocks: u32,
    /// How long work takes.
    pub cost: CostModel,
    /// How many times faster its clock goes; 0 for work that takes no time.
    pub speed: f64,
    /// Standard deviation of the time of a step, as a part of it; from 0 to 1.
    pub noise: f64,
    /// Bytes per second between engines.
    pub transfer_bytes_per_s: f64,
    /// Tokens of a prompt that are computed in one step.
    pub chunk_tokens: u32,
    /// Most requests that run.
    pub running_max: u32,
    /// Most requests that wait; further ones are refused (503).
    pub waiting_max: u32,
    /// Longest prompt with its output, tokens.
    pub model_tokens_max: u32,
    /// How long blocks are held for a decode engine.
    pub hold_time_max: Duration,
    /// Batches of events that can be replayed.
    pub replay_batches: usize,
    /// It dies after it has generated this many tokens: every connection is closed, nothing is said.
    pub fail_after_tokens: Option<u64>,
    /// Numbers of noise and of rooms follow from it.
    pub seed: u64,
}

impl Default for MockConfig {
    fn default() -> Self {
        let any = SocketAddr::from(([127, 0, 0, 1], 0));
        Self {
            listen: any,
            events: Some(any),
            replay: Some(any),
            load: None,
            load_beside_events: false,
            topic: String::new(),
            model: "mock".to_owned(),
            role: Role::Both,
            flavor: Flavor::Vllm,
            block_tokens: 16,
            gpu_blocks: 16_384,
            cpu_blocks: 0,
            disk_blocks: 0,
            cost: CostModel::LLAMA3_70B_A800,
            speed: 1.0,
            noise: 0.0,
            transfer_bytes_per_s: 87e9,
            chunk_tokens: 2_048,
            running_max: 256,
            waiting_max: 4_096,
            model_tokens_max: 131_072,
            hold_time_max: Duration::from_secs(60),
            replay_batches: 10_000,
            fail_after_tokens: None,
            seed: 0,
        }
    }
}

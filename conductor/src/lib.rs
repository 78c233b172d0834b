//! The Conductor as a server: subscriptions to engines, HTTP, an OpenAI proxy, metrics.
#![deny(unsafe_code)]

mod config;

pub use config::{
    BLOCK_TOKENS_MAX, Config, ConfigError, DP_RANKS_MAX, Endpoint, EngineConfig, EngineKind, LimitsConfig,
    NAME_BYTES_MAX, PolicyName, Role, ScheduleConfig, StreamsConfig,
};

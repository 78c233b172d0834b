//! A mock engine: an engine to the outside, with a cost model in place of a GPU.
//!
//! ```text
//!   /v1/completions ──▶ tokens ──▶ batch (prefill, continuous batching; time from the cost model) ──▶ SSE
//!                                    │
//!                                    ▼
//!                                  cache: blocks on GPU, CPU, disk ──▶ events over ZMTP, replays, loads
//! ```

mod tokens;

pub use tokens::{Generator, VOCABULARY, detokenize, template, tokenize};

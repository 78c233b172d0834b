//! A simulated serving cluster, driven by traces of requests, under the Conductor's own decisions.
//!
//! ```text
//!   trace ──▶ arrivals ──▶ router: conductor_core's Index, Scheduler and CostModel ──▶ placement
//!                                        ▲ blocks stored and evicted, reports          │
//!                                        │                                             ▼
//!             caches (LRU) ◀── prefill groups ──▶ NICs ──▶ decode batches ──▶ Outcome ──▶ figures
//!                                                                                         ▲
//!             coupled instances (the baseline: prefill and decode on the same GPUs) ──────┘
//! ```
//!
//! Nothing is measured: times come from a cost model that is fitted to figure 14 of the FAST'25 paper
//! ([`Calibration`]). The same trace, setup and seed give the same bytes on every machine: only additions,
//! multiplications and divisions of `f64` are used, and no order of a hash table is visible.
//!
//! ```
//! use conductor_sim::{Calibration, Setup, Trace, run};
//!
//! let mut trace = Trace::default();
//! trace.push(0, 2_048, 10, &[0, 1, 2, 3])?;
//! trace.push(60_000, 2_048, 10, &[0, 1, 2, 9])?;
//! let setup = Setup::paper(8, &Calibration::of_paper()?, 1);
//! let outcome = run(&trace, &setup);
//! // The second request reuses three blocks of the first, whose prefill is long over.
//! assert_eq!(outcome.records[1].reused_tokens, 3 * 512);
//! assert!(outcome.records[1].ttft_ns < outcome.records[0].ttft_ns);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```

#![deny(unsafe_code)]

mod calibration;
mod cluster;
mod coupled;
pub mod figures;
mod gaps;
mod lru;
mod nic;
mod outcome;
pub mod paper;
mod random;
mod router;
mod setup;
mod trace;
pub mod what_if;

pub use calibration::{Calibration, KV_BYTES_PER_TOKEN, PER_SEQUENCE_S};
pub use cluster::run;
pub use conductor_core::scheduler::PolicyKind;
pub use coupled::{Coupled, CoupledSetup, run_coupled};
pub use outcome::{Outcome, Record};
pub use setup::{KV_TOKENS, SEQUENCES_MAX, Setup, Shipping};
pub use trace::{
    BIN_MS, BLOCK_TOKENS, BLOCKS_MAX, REQUESTS_MAX, Request, STORE_BLOCK_TOKENS, Trace, TraceError,
};

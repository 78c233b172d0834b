//! The Conductor as pure state machines: no I/O, no clock, no randomness, no threads.
//!
//! ```text
//!   engines, stores ── frames ──▶ zmtp ──▶ stream ──▶ events ──▶ knowledge ──▶ index
//!                                  gaps, restarts,    decoded     hashes of engines   key ──▶ owners
//!                                  replays            events      become block keys     │
//!                                                                                       │ matches
//!   requests ── tokens ──▶ hash ── block keys ──────────────────────────────────────────┤
//!                                                                                       ▼
//!   reports of engines ──▶ cost (fitted online) ──▶ scheduler: placement, admission, decode, NICs, replicas
//! ```
//!
//! What an engine publishes of a prompt is found again by the prompt's tokens:
//!
//! ```
//! use conductor_core::events::encode::{Layout, encode};
//! use conductor_core::events::{Batch, Decoder, Dialect, Event, Extra, Source, Stored};
//! use conductor_core::hash::{Root, keys};
//! use conductor_core::{EngineHash, Tier};
//!
//! // An engine stores two blocks of 16 tokens.
//! let tokens: Vec<u32> = (0..32).collect();
//! let stored = Stored {
//!     hashes: &[EngineHash(7), EngineHash(8)],
//!     parent: None,
//!     tokens: &tokens,
//!     block_tokens: 16,
//!     lora: None,
//!     salt: None,
//!     extra: Extra::default(),
//!     tier: Tier::Gpu,
//!     group: None,
//!     source: Source::default(),
//! };
//! let mut payload = Vec::new();
//! encode(Layout::VllmMaps, 1.5, Some(0), &[Event::Stored(stored)], &mut payload);
//!
//! // The Conductor reads the event and computes the keys of its blocks.
//! let mut batch = Batch::new();
//! let decoded = Decoder::new(Dialect::Vllm).decode(&payload, &mut batch)?;
//! assert_eq!(decoded.events, 1);
//! let Some(Event::Stored(stored)) = batch.events().next() else { panic!("no stored event") };
//! let root = Root::of(0, stored.lora, stored.salt);
//! let mut published = Vec::new();
//! keys(stored.tokens, stored.block_tokens, &root, &mut published);
//!
//! // A request with the same beginning has the same keys, as far as its blocks are full.
//! let mut wanted = Vec::new();
//! keys(&(0..40).collect::<Vec<u32>>(), 16, &Root::new(0), &mut wanted);
//! assert_eq!(wanted, published);
//! # Ok::<(), conductor_core::events::BatchError>(())
//! ```
//!
//! A request goes where its first token comes soonest, and books what it will use:
//!
//! ```
//! use core::time::Duration;
//! use conductor_core::cost::CostModel;
//! use conductor_core::scheduler::{Ask, InstanceSpec, Role, Scheduler, SchedulerConfig, Slo};
//! use conductor_core::{InstanceId, InstanceMatch};
//! use te_core::Instant;
//!
//! let mut scheduler = Scheduler::new(SchedulerConfig::default());
//! let kind = scheduler.add_kind(CostModel::LLAMA3_70B_A800);
//! for (id, role) in [(1, Role::Prefill), (2, Role::Prefill), (3, Role::Decode)] {
//!     scheduler.add_instance(InstanceSpec::new(InstanceId(id), role, kind))?;
//! }
//!
//! // Instance 2 has 20 of the prompt's blocks of 512 tokens.
//! let matches = [InstanceMatch { instance: InstanceId(2), dp_rank: 0, gpu: 20, cpu: 20, disk: 20 }];
//! let ask = Ask {
//!     model: 0,
//!     tokens: 12_000,
//!     block_tokens: 512,
//!     matches: &matches,
//!     store_blocks: 0,
//!     keys: &[],
//!     expected_output: None,
//!     slo: Slo { ttft: Duration::from_secs(30), tbt: Duration::from_millis(100) },
//! };
//! let decision = scheduler.decide(Instant::from_millis(5), &ask)?;
//! assert_eq!((decision.prefill, decision.reuse_blocks, decision.fetch), (InstanceId(2), 20, None));
//! assert_eq!(decision.decode, InstanceId(3));
//!
//! // What happens is reported; the predictions learn from it.
//! let id = decision.reservation;
//! scheduler.prefill_started(Instant::from_millis(6), id)?;
//! scheduler.first_token(Instant::from_millis(400), id)?;
//! scheduler.done(Instant::from_millis(9_000), id, 180)?;
//! assert_eq!(scheduler.reservations(), 0);
//! # Ok::<(), Box<dyn std::error::Error>>(())
//! ```
#![cfg_attr(not(feature = "std"), no_std)]
#![deny(unsafe_code)]

extern crate alloc;

pub mod cost;
pub mod events;
pub mod hash;
mod ids;
pub mod index;
pub mod knowledge;
pub mod learned;
pub mod scheduler;
pub mod stream;
pub mod zmtp;

pub use ids::{
    BlockKey, Context, ContextId, EngineHash, InstanceId, InstanceMatch, Owner, OwnerId, OwnerMatch, Tier,
};
